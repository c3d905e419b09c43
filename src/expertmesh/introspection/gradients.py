"""Which parameters of a decoder's blocks a loss on text never trains: one forward and backward on meta shows it.

What only chooses (the indexer of sparse attention, a router of image tokens) gets no gradient. An adapter there would
be told as trained and stay zero. Needs no weights; no communication.
"""

import torch
from torch import nn

from expertmesh.anatomy import Anatomy, alike, decoder_blocks, settings
from expertmesh.introspection.known_families import look_up, proof_key
from expertmesh.introspection.stage_probe import (
    LENGTH,
    ROWS,
    EvenCounts,
    WithoutValues,
    handed_on,
    stand_ins_for_experts,
)
from expertmesh.state.stage_view import meta_twin


def without_gradient(model: nn.Module, anatomy: Anatomy) -> frozenset[str]:
    """The names of parameters in `model`'s blocks that get no gradient in any of them; routed experts are not asked
    about. None where that cannot be known, as the model's code does not run without values.
    """
    blocks = decoder_blocks(anatomy)
    experts = {f"{spec.name}.{name}" for spec in anatomy.experts for name in spec.parameters}

    def find() -> list[str]:
        try:
            return _found(meta_twin(model), anatomy, experts)
        except Exception:  # the family's code on tensors without values: nothing is known
            return []

    names = look_up("gradients", proof_key(model), find)
    return frozenset(f"{block}.{name}" for block in blocks for name in names)


def _found(twin: nn.Module, anatomy: Anatomy, experts: set[str]) -> list[str]:
    """Names within their block, of one block of each kind."""
    blocks = decoder_blocks(anatomy)
    firsts = [names[0] for names in alike(twin, blocks, lambda name: settings(twin.get_submodule(name)))]
    twin.eval()  # dropout wants to know which tokens these are
    for parameter in twin.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64, device="meta")
    with (
        torch.enable_grad(),
        stand_ins_for_experts(twin, anatomy.experts),
        handed_on(twin, blocks, set(blocks) - set(firsts)),
        EvenCounts(),
        WithoutValues(),
    ):
        logits = twin(input_ids=ids, use_cache=False).logits
        logits.backward(torch.empty_like(logits))
    trained: dict[str, bool] = {}
    for block in firsts:
        for name, parameter in twin.get_submodule(block).named_parameters(remove_duplicate=False):
            if f"{block}.{name}" not in experts:
                trained[name] = trained.get(name, False) or parameter.grad is not None
    return sorted(name for name, is_trained in trained.items() if not is_trained)
