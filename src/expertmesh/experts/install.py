"""Put expert layers into a model, through transformers' public experts registry under the name "expertmesh", or in
place of `forward` of experts that do not use it. Decide how each layer multiplies (`moe.compute`) and which kernels do
the rest (`moe.kernels`).
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from transformers.activations import SiLUActivation
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from expertmesh.anatomy import Anatomy, ExpertsSpec
from expertmesh.compat import default_apply_gate, set_experts
from expertmesh.config.errors import InputError, MissingHereError
from expertmesh.distributed.mesh import Mesh
from expertmesh.experts.dispatchers.choose import open_dispatchers
from expertmesh.experts.expert_mlp import grouped_mm_refusal
from expertmesh.experts.kernels.probe import triton_refusal
from expertmesh.experts.layer import ExpertLayer, SharedExpert, attach_layer, layer_of, sorted_forward
from expertmesh.experts.mlp_spec import ExpertMlpSpec, Gate
from expertmesh.experts.token_counts import real_tokens
from expertmesh.state.patching import register_function, replace_forward

IMPLEMENTATION = "expertmesh"
ComputeName = Literal["auto", "grouped_mm", "loop"]
KernelsName = Literal["auto", "torch", "triton"]


@dataclass(frozen=True, slots=True)
class Kernels:
    """The resolved `moe.kernels`."""

    triton: bool = False
    gates: Mapping[str, Gate] = field(default_factory=dict)
    """Gates that Triton's kernels compute, by experts module; torch computes other activations."""
    said: str = "torch"
    """Text of the plan."""


def install(
    model: nn.Module,
    anatomy: Anatomy,
    mesh: Mesh,
    *,
    dispatch: str,
    compute: Mapping[str, str],
    kernels: Kernels,
    shared: Mapping[str, str],
    dtype: torch.dtype,
) -> None:
    """Let every experts module of `model` run here, as the shard plan has decided.

    Args:
        dispatch: The dispatcher's name.
        compute: The backend of each experts module.
        shared: The shared expert that computes while its rows are in flight.
        dtype: The compute dtype.

    Collectives: none, unless `dispatch` names a library, whose buffers all ranks open here.
    """
    register_function(ALL_EXPERTS_FUNCTIONS, IMPLEMENTATION, _experts_forward)
    dispatchers = open_dispatchers(dispatch, anatomy.experts, mesh, kernels.triton)
    for spec in anatomy.experts:
        experts: Any = model.get_submodule(spec.name)
        mlp = mlp_spec_of(experts, spec, per_expert=compute[spec.name] == "loop")
        mlp = replace(mlp, triton=kernels.triton, gate=kernels.gates.get(spec.name))
        first_expert = mesh.expert["ep"].get_local_rank() * (spec.num_experts // mesh.layout.ep)
        beside = SharedExpert(model.get_submodule(shared[spec.name])) if spec.name in shared else None
        attach_layer(experts, ExpertLayer(spec, dispatchers[spec.name], mlp, dtype, first_expert, shared=beside))
        if spec.call == "interface":
            set_experts(experts.config, IMPLEMENTATION)
        elif spec.call == "sorted":
            replace_forward(experts, partial(sorted_forward, experts, spec, partial(_experts_forward, experts)))
        else:
            forward = _dense_forward if spec.call == "dense" else _experts_forward
            replace_forward(experts, partial(forward, experts))


def _experts_forward(
    experts: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    real_T = real_tokens(len(top_k_index))
    return layer_of(experts).forward_counted(experts, hidden_states, top_k_index, top_k_weights, real_T)


def _dense_forward(experts: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    return layer_of(experts).forward_dense(experts, hidden_states)


def choose_backend(spec: ExpertsSpec, compute: ComputeName, dtype: torch.dtype, experts: int) -> str:
    """Resolve `moe.compute` for `experts` experts of a rank in `dtype`.

    `auto` is the grouped product wherever torch has a kernel for it, else one expert after the other.

    Raises:
        InputError: The requested backend cannot run.
    """
    # The up projection is as wide or twice as wide.
    refusal = grouped_mm_refusal(dtype, spec.hidden_size, spec.intermediate_size, experts)
    if compute == "grouped_mm" and refusal:
        raise InputError(
            f"moe.compute: grouped_mm cannot run {spec.name}: {refusal}; set moe.compute to loop or auto",
            key="moe.compute-unsupported",
        )
    loops = compute == "auto" and torch.cuda.is_available() and not _has_grouped_kernel(dtype)
    return "loop" if compute == "loop" or refusal or loops else "grouped_mm"


def _has_grouped_kernel(dtype: torch.dtype) -> bool:
    """Return whether torch multiplies all experts at once on this GPU: in bf16 on sm90 and sm100 (pytorch#186620).

    Elsewhere it goes expert by expert, and waits for the device in each product; our own loop waits once.
    """
    return dtype == torch.bfloat16 and torch.cuda.get_device_capability()[0] in (9, 10)


def choose_kernels(model: nn.Module, anatomy: Anatomy, asked: KernelsName, dtype: torch.dtype) -> Kernels:
    """Resolve `moe.kernels` in `dtype`.

    `auto` is Triton's on every GPU on which they have been proven. Ranks try that, each on its own device; a launcher
    or a planner does not touch the devices.

    Raises:
        InputError: Triton's were requested and this device lacks them.
    """
    if asked == "torch" or (asked == "auto" and not torch.cuda.is_available()):
        return Kernels()
    refusal: str | None = "there is no GPU"
    if torch.cuda.is_available():
        if not dist.is_initialized() or dist.get_backend() == "fake":
            return Kernels(said="triton, where ranks find that their GPUs run them")
        found = ((spec.name, gate_of(model.get_submodule(spec.name), spec)) for spec in anatomy.experts)
        gates = {name: gate for name, gate in found if gate is not None}
        device = torch.device("cuda", torch.cuda.current_device())
        refusal = triton_refusal(device, dtype, frozenset(gates.values()))
        if refusal is None:
            others = len(anatomy.experts) - len(gates)
            rest = f" (torch for the activations of {others} layers)" if others else ""
            return Kernels(True, gates, f"triton{rest}")
    if asked == "triton":
        error = InputError if torch.cuda.is_available() else MissingHereError
        raise error(
            f"moe.kernels: triton cannot be used here: {refusal}; set moe.kernels to torch or auto",
            key="moe.kernels-unsupported",
        )
    return Kernels(said=f"torch (not triton: {refusal})")


def gate_of(experts: Any, spec: ExpertsSpec) -> Gate | None:
    """Return the closed form of these experts' gate, shown by values and gradients on both sides of its limits; else
    None.
    """
    act_fn = _act_fn(experts)
    if not spec.gated or (isinstance(act_fn, nn.Module) and any(True for _ in act_fn.parameters())):
        return None
    activation = mlp_spec_of(experts, spec, per_expert=False).activation

    def constants(*names: str) -> set[float]:
        values = (getattr(experts, name, None) for name in names)
        return {float(value) for value in values if isinstance(value, int | float)}

    alphas, limits = sorted({1.0, *constants("alpha", "swiglu_alpha")}), sorted(constants("limit", "swiglu_limit"))
    random = torch.Generator("cpu").manual_seed(0)
    wide_P2I = torch.randn(64, 32, generator=random, device="cpu") * 2 * max([1.0, *limits])
    pre_P2I = torch.cat([wide_P2I, wide_P2I.sign() * wide_P2I.abs().sqrt()]).requires_grad_()

    def with_gradient(function: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        with torch.enable_grad():
            act_PI = function(pre_P2I)
            return [act_PI, *torch.autograd.grad(act_PI.sum(), pre_P2I)]

    own = with_gradient(activation)
    for form in itertools.product((False, True), alphas, (None, *limits), (0.0, 1.0)):
        tried = with_gradient(gate := Gate(*form))
        if all(torch.allclose(*pair, rtol=1e-5, atol=1e-5) for pair in zip(own, tried, strict=True)):
            return gate
    return None


def mlp_spec_of(experts: Any, spec: ExpertsSpec, *, per_expert: bool) -> ExpertMlpSpec:
    """Return how these experts compute, by the module's own activation and gate."""
    activation: Callable[[torch.Tensor], torch.Tensor]
    if not spec.gated:
        activation = experts.act_fn
    elif hasattr(experts, "_apply_gate"):
        activation = experts._apply_gate
    elif (act_fn := _act_fn(experts)) is not None:
        activation = partial(_gated, act_fn)
    else:
        raise InputError(
            f"{spec.name}: no activation is recognised (act_fn, activation_fn or activation); it is not supported",
            key="model.unknown-activation",
        )
    return ExpertMlpSpec(activation, is_silu_gated(experts, spec), spec.transposed, per_expert)


def is_silu_gated(experts: nn.Module, spec: ExpertsSpec) -> bool:
    """Return whether the experts use transformers' default gate with SiLU on concatenated [gate; up]."""
    default = getattr(type(experts), "_apply_gate", None) in (None, default_apply_gate)
    silu = isinstance(_act_fn(experts), nn.SiLU | SiLUActivation)
    return spec.gated and default and silu and bool(getattr(experts, "is_concatenated", True))


def _act_fn(experts: nn.Module) -> Any:
    """Return the activation, by the names that transformers uses; in the module itself or in the one it wraps."""
    for module in (experts, *experts.children()):
        for name in ("act_fn", "activation_fn", "activation"):
            if hasattr(module, name):
                return getattr(module, name)
    return None


def _gated(act_fn: Callable[[torch.Tensor], torch.Tensor], pre_P2I: torch.Tensor) -> torch.Tensor:
    gate_PI, up_PI = pre_P2I.chunk(2, dim=-1)
    return act_fn(gate_PI) * up_PI
