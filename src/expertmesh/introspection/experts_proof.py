"""Prove that experts without transformers' interface compute the same as `ExpertLayer`.

Such experts are recognised by shapes and argument names alone (anatomy/structure.py), which is a guess. So each of them
is copied at a tiny size, in fp64, and run twice on random tokens: by the module's forward, and by `ExpertLayer` on one
rank. Outputs and all gradients must agree, or the model is refused by name. The proof needs no weights and does not
communicate.

Shared experts that a model's code runs after the routed ones, on the same tokens, are found here too
(`shared_behind_routed`): each Mixture-of-Experts module runs once on meta, with its calls recorded.

    E experts, H hidden, I intermediate, T tokens, K top-k
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from expertmesh.anatomy import Anatomy, ExpertsSpec, experts_spec
from expertmesh.anatomy.expert_module import relative_error, small_copy
from expertmesh.compat import storage_key
from expertmesh.config.errors import InputError
from expertmesh.experts.dispatch import LocalDispatcher
from expertmesh.experts.install import mlp_spec_of
from expertmesh.experts.layer import ExpertLayer, sorted_forward
from expertmesh.experts.lora_state import drop_adapters
from expertmesh.introspection.known_families import proof_key, refusal_by_proof
from expertmesh.state.patching import forwards_replaced

_EXPERTS, _HIDDEN, _INTERMEDIATE, _TOKENS, _TOP_K = 3, 10, 6, 7, 2
TOLERANCE = 1e-9
# For mixtures that contain their routers, which may round weights to fp32; a wrong formula is off by far more.
_WITH_ROUTER = 1e-5
_POSITIONS = 4


def confirm_experts(model: nn.Module, anatomy: Anatomy) -> None:
    """Raise `InputError`, naming the module, if experts without the interface differ from `ExpertLayer`."""
    for spec in anatomy.experts:
        if spec.call == "interface":
            continue
        experts = model.get_submodule(spec.name)
        key = proof_key(experts, spec.call, spec.flat_gate, spec.gated, spec.transposed, spec.biased)
        if reason := refusal_by_proof("experts", key, partial(_refusal, experts, spec)):
            raise InputError(
                f"{spec.name}: {type(experts).__name__} {reason}; it is not supported",
                key="model.experts-not-weighted-sum",
            )


def _refusal(experts: nn.Module, spec: ExpertsSpec) -> str | None:
    """Return the reason why experts are not supported, or None if they are proven."""
    try:
        error = _disagreement(experts, spec)
    except InputError:
        raise
    except Exception as cause:
        # Code of another project, at a size it was not written for: any exception means that nothing is proven.
        return f"cannot be run on a small copy ({cause}), so it is not known to be a sum of gated MLPs"
    if not error <= (_WITH_ROUTER if spec.call == "sorted" else TOLERANCE):
        return f"does not compute a weighted sum of gated MLPs (off by {error:.1e} on a small copy)"
    return None


def _disagreement(experts: nn.Module, spec: ExpertsSpec) -> float:
    """Return the largest relative error of output and gradients between the module's forward and `ExpertLayer`."""
    generator = torch.Generator().manual_seed(0)
    small = small_copy(experts, _small_sizes(spec), generator)
    for part in small.modules():
        drop_adapters(part)  # the module's forward does not use expertmesh's adapters
    small_spec = experts_spec(spec.name, small)
    mlp = mlp_spec_of(small, small_spec, per_expert=True)
    layer = ExpertLayer(
        small_spec, LocalDispatcher(small_spec.num_experts), mlp, torch.float64, torch.arange(small_spec.num_experts)
    )
    if spec.call == "dense":
        inputs = [_dense_tokens(small_spec, generator)]
        results = [_run(call, small, inputs) for call in (small.forward, lambda rows: layer.forward_dense(small, rows))]
    elif spec.call == "sorted":
        inputs = [_random((1, _TOKENS, small_spec.hidden_size), generator)]
        ours = partial(sorted_forward, small, small_spec, partial(layer.forward, small))
        results = [_run(call, small, inputs) for call in (small.forward, ours)]
    else:
        index_TK = torch.stack([torch.randperm(_EXPERTS, generator=generator)[:_TOP_K] for _ in range(_TOKENS)])
        index_TK[index_TK == 1] = 0  # cover an expert without tokens, and a token that is sent to one expert twice
        inputs = [_random((_TOKENS, small_spec.hidden_size), generator), _random(tuple(index_TK.shape), generator)]
        calls: list[Callable[..., torch.Tensor]] = [
            lambda hidden, weight: small(hidden, index_TK, weight),
            lambda hidden, weight: layer.forward(small, hidden, index_TK, weight),
        ]
        results = [_run(call, small, inputs) for call in calls]
    return relative_error(*results)


def _small_sizes(spec: ExpertsSpec) -> dict[int, int]:
    """Map the real sizes to small ones; equal sizes stay equal, and double sizes stay double."""
    sizes = {spec.num_experts: _EXPERTS}
    hidden = sizes.setdefault(spec.hidden_size, _HIDDEN)
    half = spec.hidden_size == 2 * spec.intermediate_size
    width = sizes.setdefault(spec.intermediate_size, hidden // 2 if half else _INTERMEDIATE)
    sizes.setdefault(2 * spec.intermediate_size, 2 * width)
    if spec.flat_gate is not None:
        sizes.setdefault(spec.num_experts * spec.intermediate_size, _EXPERTS * width)
    return sizes


def _dense_tokens(spec: ExpertsSpec, generator: torch.Generator) -> torch.Tensor:
    """Make rows `[E * T, H]`, one per (expert, token), zero for tokens not sent to the expert; the last gets none."""
    rows_ETH = _random((spec.num_experts, _TOKENS, spec.hidden_size), generator).detach()
    rows_ETH[:, ::2] = 0
    rows_ETH[-1] = 0
    return rows_ETH.view(-1, spec.hidden_size).requires_grad_()


def _run(call: Callable[..., torch.Tensor], small: nn.Module, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the output, then the gradients of inputs and parameters, for one fixed direction."""
    out = call(*inputs).reshape(-1, inputs[0].shape[-1])
    direction = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)
    wanted = [*inputs, *small.parameters()]
    return [out.detach(), *torch.autograd.grad((out * direction).sum(), wanted, materialize_grads=True)]


def _random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


def shared_behind_routed(model: nn.Module, anatomy: Anatomy) -> dict[str, str]:
    """Return the shared expert that runs after the routed ones, by experts module of a `model` on meta.

    Experts modules with none or several such shared experts are left out.
    """
    found: dict[str, str] = {}
    for spec in anatomy.experts:
        parent = spec.name.rpartition(".")[0]
        shared = [name for name in anatomy.shared_experts if name.rpartition(".")[0] == parent]
        behind = [name for name in shared if _runs_behind(model, parent, spec.name, name, spec.hidden_size)]
        if len(behind) == 1:
            found[spec.name] = behind[0]
    return found


def _runs_behind(model: nn.Module, parent: str, experts: str, shared: str, hidden_size: int) -> bool:
    """Return whether a shared expert is called once, after the routed experts, on their input, and keeps its shape."""
    calls: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def recorded(name: str, own: Callable[..., torch.Tensor], hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        calls.append((name, hidden, out := own(hidden, *rest)))
        return out

    modules = {name: model.get_submodule(name) for name in (experts, shared)}
    own = {experts: lambda hidden, *_: torch.zeros_like(hidden), shared: modules[shared].forward}
    forwards = {module: partial(recorded, name, own[name]) for name, module in modules.items()}
    dtype = next(modules[shared].parameters()).dtype
    try:
        with forwards_replaced(forwards), torch.no_grad():
            model.get_submodule(parent)(torch.empty(1, _POSITIONS, hidden_size, dtype=dtype, device="meta"))
    except Exception:  # code that needs other arguments, or values; its order is then not changed
        return False
    if [name for name, *_ in calls] != [experts, shared]:
        return False
    (_, routed, _), (_, given, out) = calls
    same = (
        storage_key(routed.untyped_storage()) == storage_key(given.untyped_storage())
        and routed.numel() == given.numel()
    )
    return same and out.shape == given.shape
