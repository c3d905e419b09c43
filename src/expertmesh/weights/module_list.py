"""Fuse experts that are a list of MLPs, with rules for files that hold one tensor per expert and linear layer.

Two small copies of a block prove that it computes the same: one with the list of experts, one with fused experts in the
`ExpertLayer` that training uses. Outputs, all gradients and the buffers after the forward must agree, or the model is
refused by name. A block that adds gradients in backward (an auxiliary loss for each process, independent of the other
ranks' batches) is refused too. The rules have the form of transformers' own: loading stacks the experts of the files by
byte ranges, and saving writes them back under their original names.
"""

from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, WeightConverter

from expertmesh.anatomy import experts_spec
from expertmesh.anatomy.expert_module import (
    ExpertModuleSpec,
    expert_module_spec,
    relative_error,
    small_copy,
    small_sizes,
)
from expertmesh.compat import child_slots, set_weight_conversions, weight_conversions
from expertmesh.config.errors import InputError
from expertmesh.experts.dispatch import LocalDispatcher
from expertmesh.experts.install import mlp_spec_of
from expertmesh.experts.layer import ExpertLayer
from expertmesh.experts.module_list import FusedExperts, fuse
from expertmesh.introspection.proofs import proof_key, refusal_by_proof
from expertmesh.introspection.small_copies import not_weighted_sum
from expertmesh.state.model_view import attach_to_module

_ROWS, _LENGTH = 2, 9
# Blocks may round routing weights to fp32; a wrong formula is off by far more.
TOLERANCE = 1e-5


def fuse_lists_of_experts(model: PreTrainedModel) -> None:
    """Fuse every list of experts in `model`, on meta or in memory, in place, and remember how the files hold them.

    Raises:
        InputError: A list cannot be fused exactly; names it.
    """
    rules = get_model_conversion_mapping(model, add_legacy=False)
    proven: list[list[Any]] = []  # one block of each kind is proven, as the layers of a model are equal
    blocks = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(experts := child_slots(module).get("experts"), nn.ModuleList) and len(experts)
    ]
    for name, block in blocks:
        members: Any = block.experts
        module_spec = expert_module_spec(f"{name}.experts", members)
        kind = _kind(block)
        if kind not in proven:
            proven.append(kind)
            if reason := refusal_by_proof("block", proof_key(block), partial(_refusal, block, module_spec)):
                raise not_weighted_sum(name, block, f"with a list of experts {reason}")
        fuse(block, model.config, module_spec)
    if blocks:
        set_weight_conversions(model, [*(weight_conversions(model) or rules), *list_rules(model)])


def list_rules(model: nn.Module) -> list[WeightConverter]:
    """Return the rules from per-expert tensors to fused ones, for the lists that were fused in `model`."""
    kinds: dict[tuple[str, tuple[str, ...], str, bool], None] = {}
    for name, module in model.named_modules():
        if isinstance(module, FusedExperts):
            parent = name.rpartition(".")[0]
            leaf = parent.rpartition(".")[2]
            # The last component gives one rule for all layers. A bare number would also match other modules.
            kinds[parent if leaf.isdigit() else leaf, module.ups, module.down, module.has_bias] = None
    rules = []
    for parent, ups, down, biased in kinds:
        up = "gate_up_proj" if len(ups) == 2 else "up_proj"
        for leaf, end in (("weight", ""), ("bias", "_bias"))[: 1 + biased]:
            for linears, target in ((ups, up), ((down,), "down_proj")):
                operations: list[ConversionOps] = [MergeModulelist(dim=0)]
                if len(linears) > 1:
                    operations.append(Concatenate(dim=1))
                sources = [f"{parent}.experts.*.{linear}.{leaf}" for linear in linears]
                rules.append(WeightConverter(sources, f"{parent}.experts.{target}{end}", operations))
    return rules


def _kind(block: nn.Module) -> list[Any]:
    """Return what may differ between blocks of one model: classes, shapes and settings, without the layer's number."""
    simple = (bool, int, float, str)
    parts = [(name, part) for name, part in block.named_modules() if not name.startswith("experts.")]
    settings = [
        (name, type(part), {k: v for k, v in vars(part).items() if isinstance(v, simple) and "layer" not in k})
        for name, part in [*parts, ("experts.0", block.get_submodule("experts.0"))]
    ]
    return [settings, [(name, tensor.shape) for name, tensor in block.state_dict().items()]]


def _refusal(block: nn.Module, module_spec: ExpertModuleSpec) -> str | None:
    """Return the reason why a block cannot have fused experts, or None if it is proven."""
    generator = torch.Generator().manual_seed(0)
    sizes = small_sizes(module_spec.hidden_size, module_spec.intermediate_size)
    try:
        own = small_copy(block, sizes, generator)
        fused = _fused_copy(own)
        shape = (_ROWS, _LENGTH, sizes[module_spec.hidden_size])
        hidden = torch.randn(shape, dtype=torch.float64, generator=generator)
        # With output gradients of zero, a block must give gradients of zero, unless it adds a loss.
        adds_gradients = any(bool(gradient.any()) for gradient in _gradients(deepcopy(own), hidden, 0.0))
        error = relative_error(_results(own, hidden), _results(fused, hidden))
    except InputError:
        raise
    except Exception as cause:
        # Code of another project, at a size it was not written for: any exception means that nothing is proven.
        return (
            f"cannot be run on a small copy ({type(cause).__name__}: {cause}), so nothing is known of what it "
            "computes; it is not supported, unless transformers has a class of its own for the model"
        )
    if adds_gradients:
        return (
            "adds a loss of its own in backward, which would be that of each process; set the coefficient of "
            "the auxiliary loss in the model's config to 0 to train without it"
        )
    if not error <= TOLERANCE:
        return (
            f"does not give the same result when the experts are computed apart (off by {error:.1e} on a small "
            "copy); it is not supported"
        )
    return None


def _fused_copy(own: nn.Module) -> nn.Module:
    copy: Any = deepcopy(own)
    module_spec = expert_module_spec("experts", copy.experts)
    fuse(copy, None, module_spec)  # type: ignore[arg-type]
    spec = experts_spec("experts", copy.experts)
    mlp = mlp_spec_of(copy.experts, spec, per_expert=True)
    layer = ExpertLayer(spec, LocalDispatcher(spec.num_experts), mlp, torch.float64, torch.arange(spec.num_experts))
    attach_to_module(copy.experts, expert_layer=layer)
    assert isinstance(copy, nn.Module)
    return copy


def _results(block: nn.Module, hidden: torch.Tensor) -> list[torch.Tensor]:
    """Return the outputs in evaluation and in training, the gradients, and the buffers afterwards."""
    with torch.no_grad():
        outputs = [*_tensors(block.eval()(hidden.clone())), *_tensors(block.train()(hidden.clone()))]
    return [*outputs, *_gradients(block, hidden, 1.0), *block.buffers()]


def _gradients(block: nn.Module, hidden: torch.Tensor, scale: float) -> list[torch.Tensor]:
    """Return the gradients of input, experts and other parameters, for one fixed direction times `scale`."""
    leaf = hidden.clone().requires_grad_()
    outputs = _tensors(block.train()(leaf * 1.0))
    directions = [torch.linspace(-scale, 2 * scale, out.numel(), dtype=out.dtype).view_as(out) for out in outputs]
    kept = [(out, d) for out, d in zip(outputs, directions, strict=True) if out.requires_grad]
    torch.autograd.backward([out for out, _ in kept], [direction for _, direction in kept])
    others = {n: p for n, p in block.named_parameters() if not n.startswith("experts.")}
    return [_gradient(leaf), *_expert_gradients(block), *(_gradient(parameter) for parameter in others.values())]


def _expert_gradients(block: nn.Module) -> list[torch.Tensor]:
    """Return the gradients of the experts, in the same order and layout for a list and for fused experts."""
    experts: Any = block.experts
    if isinstance(experts, FusedExperts):
        return [_gradient(experts.get_parameter(name)) for name in experts_spec("experts", experts).parameters]
    module_spec = expert_module_spec("experts", experts)
    gradients = []
    for leaf in ("weight", "bias")[: 1 + module_spec.biased]:
        for linears in (module_spec.ups, (module_spec.down,)):
            each = [torch.cat([_gradient(m.get_parameter(f"{linear}.{leaf}")) for linear in linears]) for m in experts]
            gradients.append(torch.stack(each))
    return gradients


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _tensors(output: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors that a block returns: its output, and router logits if there are any."""
    found = [output] if isinstance(output, torch.Tensor) else list(output)
    return [value for value in found if isinstance(value, torch.Tensor) and value.is_floating_point()]
