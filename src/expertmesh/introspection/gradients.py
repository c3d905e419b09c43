"""Find the parameters of a decoder's blocks that a loss on text never trains, by one forward and backward on meta.

Modules that only select (the indexer of sparse attention, a router of image tokens) get no gradient. An adapter there
would be reported as trained and stay zero. Nothing here needs weights or communicates.
"""

import torch
from torch import nn

from expertmesh.anatomy import Anatomy, alike, decoder_blocks, is_inside, settings
from expertmesh.introspection.known_families import look_up, proof_key
from expertmesh.introspection.stage_probe import (
    LENGTH,
    ROWS,
    EvenCounts,
    WithoutValues,
    handed_on,
    stand_ins_for_experts,
)
from expertmesh.state.model_view import meta_copy


def without_gradient(model: nn.Module, anatomy: Anatomy) -> frozenset[str]:
    """Return the names of the parameters that get no gradient in any block; parameters of routed experts are left out.

    The result is empty if the model's code does not run without values. An adapter without gradients is then reported
    when it is saved.
    """
    blocks = decoder_blocks(anatomy)

    def find() -> list[str]:
        try:
            return _found(meta_copy(model), anatomy)
        except Exception:  # the family's code may fail in any way on tensors without values: nothing is known then
            return []

    names = look_up("gradients", proof_key(model), find)
    return frozenset(f"{block}.{name}" for block in blocks for name in names)


def _found(meta_model: nn.Module, anatomy: Anatomy) -> list[str]:
    """Return the untrained parameters by their names in a block, from one block of each kind."""
    blocks = decoder_blocks(anatomy)
    firsts = [names[0] for names in alike(meta_model, blocks, lambda name: settings(meta_model.get_submodule(name)))]
    meta_model.eval()  # adapters' dropout needs the numbers of the tokens, which are unknown here
    for parameter in meta_model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64, device="meta")
    with (
        torch.enable_grad(),
        stand_ins_for_experts(meta_model, anatomy.experts),
        handed_on(meta_model, blocks, set(blocks) - set(firsts)),
        EvenCounts(),
        WithoutValues(),
    ):
        logits = meta_model(input_ids=ids, use_cache=False).logits
        logits.backward(torch.empty_like(logits))
    trained: dict[str, bool] = {}
    for block in firsts:
        for name, parameter in meta_model.get_submodule(block).named_parameters(remove_duplicate=False):
            if not any(is_inside(f"{block}.{name}", spec.name) for spec in anatomy.experts):
                trained[name] = trained.get(name, False) or parameter.grad is not None
    return sorted(name for name, is_trained in trained.items() if not is_trained)
