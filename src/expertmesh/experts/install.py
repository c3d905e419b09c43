"""Put expert layers into a model, through transformers' public experts registry under the name "expertmesh", or in
place of `forward` of experts that do not use it. Decide how each layer multiplies (`moe.compute`), which kernels do
the rest (`moe.kernels`; Triton's must give torch's results on this device), and how each layer dispatches
(`moe.dispatch`). A library that sends rows is opened once for a model, and closed at the end.

    P pairs, I intermediate, N items, R rows, H hidden
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from transformers.activations import SiLUActivation
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from expertmesh.anatomy import Anatomy, ExpertsSpec
from expertmesh.compat import default_apply_gate, set_experts
from expertmesh.config.errors import InputError, MissingHereError
from expertmesh.distributed.environment import local_world_sizes_differ
from expertmesh.distributed.mesh import Mesh
from expertmesh.experts import deepep, triton_ops
from expertmesh.experts.dispatch import AllToAllDispatcher, Dispatcher, HierarchicalDispatcher, LocalDispatcher
from expertmesh.experts.expert_mlp import grouped_mm_refusal
from expertmesh.experts.layer import Copies, ExpertLayer, SharedExpert, experts_forward, sorted_forward
from expertmesh.experts.mlp_spec import ExpertMlpSpec, Gate
from expertmesh.experts.placement import Placement
from expertmesh.io.boxes import inverse
from expertmesh.state.model_view import attach_to_module, module_state
from expertmesh.state.patching import replace_forward

IMPLEMENTATION = "expertmesh"
ComputeName = Literal["auto", "grouped_mm", "loop"]
KernelsName = Literal["auto", "torch", "triton"]
# More than one block of columns, the last of them partly used; an odd number of pairs.
_PAIRS, _WIDTH, _ITEMS, _KEYS = 13, 1096, 100, 11
# Items and keys that are sorted: fewer keys than a warp has threads, and more than a block has items.
_SORTED = ((_ITEMS, 2), (200, 300), (_ITEMS, _KEYS))


@dataclass(frozen=True, slots=True)
class Kernels:
    """The resolved `moe.kernels`."""

    triton: bool = False
    """True if Triton's kernels run."""
    gates: Mapping[str, Gate] = field(default_factory=dict)
    """Gates that Triton's kernels compute, by experts module; torch computes other activations."""
    text: str = "torch"
    """Text of the plan."""


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """The decisions of a shard plan about expert layers."""

    dispatch: str
    """The dispatcher that `moe.dispatch` resolved to."""
    compute: Mapping[str, str]
    """The compute backend of each experts module."""
    kernels: Kernels
    """The kernels that `moe.kernels` resolved to."""
    shared: Mapping[str, str]
    """By experts module, the shared expert that computes while its rows are in flight."""
    placement: Placement
    """The places of experts that are not in the model's order, and of copies."""


def install(model: nn.Module, anatomy: Anatomy, mesh: Mesh, plan: ExpertsPlan, dtype: torch.dtype) -> None:
    """Let every experts module of `model` run here, as the shard plan has decided; `dtype` is the compute dtype.

    Collectives: none, unless the dispatcher is that of a library, whose buffers all ranks open here.
    """
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
    kernels, shared = plan.kernels, plan.shared
    dispatchers = open_dispatchers(plan.dispatch, anatomy.experts, mesh, kernels.triton, plan.placement.replicas)
    for spec in anatomy.experts:
        experts: Any = model.get_submodule(spec.name)
        mlp = mlp_spec_of(experts, spec, per_expert=plan.compute[spec.name] == "loop")
        mlp = replace(mlp, triton=kernels.triton, gate=kernels.gates.get(spec.name))
        beside = SharedExpert(model.get_submodule(shared[spec.name])) if spec.name in shared else None
        expert_L, slot_E, copies = _places(spec, plan.placement, mesh)
        layer = ExpertLayer(spec, dispatchers[spec.name], mlp, dtype, expert_L, slot_E, copies, shared=beside)
        attach_to_module(experts, expert_layer=layer)
        if spec.call == "interface":
            set_experts(experts.config, IMPLEMENTATION)
        elif spec.call == "sorted":
            replace_forward(experts, partial(sorted_forward, experts, spec, partial(experts_forward, experts)))
        elif spec.call == "dense":
            replace_forward(experts, partial(layer.forward_dense, experts))
        else:
            replace_forward(experts, partial(experts_forward, experts))


def _places(
    spec: ExpertsSpec, placement: Placement, mesh: Mesh
) -> tuple[torch.Tensor, torch.Tensor | None, Copies | None]:
    """Return an expert layer's `expert_L`, `slot_E` and `copies`."""
    order, rank = placement.orders.get(spec.name), mesh.expert["ep"].get_local_rank()
    experts_here, device = spec.num_experts // mesh.layout.ep, mesh.device
    first, last = rank * experts_here, (rank + 1) * experts_here
    if order is None:
        return torch.arange(first, last, device=device), None, None
    if not placement.copies:
        return torch.tensor(order[first:last], device=device), torch.tensor(inverse(order), device=device), None
    copied = placement.copies[spec.name]
    expert_L = torch.tensor([*order[first:last], *copied[rank]], device=device)
    return expert_L, None, Copies.of(order, copied, mesh.ep_group, device)


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
    # In bf16 on sm90 and sm100 torch multiplies all experts at once (pytorch#186620). On other GPUs it goes expert by
    # expert and waits for the device in each product; our own loop waits once.
    loops = False
    if compute == "auto" and torch.cuda.is_available():
        loops = dtype != torch.bfloat16 or torch.cuda.get_device_capability()[0] not in (9, 10)
    return "loop" if compute == "loop" or refusal or loops else "grouped_mm"


def choose_kernels(model: nn.Module, anatomy: Anatomy, requested: KernelsName, dtype: torch.dtype) -> Kernels:
    """Resolve `moe.kernels` in `dtype`.

    `auto` is Triton's on every GPU on which they have been proven. Ranks try that, each on its own device; a launcher
    or a planner does not touch the devices.

    Raises:
        InputError: Triton's were requested and this device lacks them.
    """
    if requested == "torch" or (requested == "auto" and not torch.cuda.is_available()):
        return Kernels()
    refusal: str | None = "there is no GPU"
    if torch.cuda.is_available():
        if not dist.is_initialized() or dist.get_backend() == "fake":
            return Kernels(text="triton, where ranks find that their GPUs run them")
        found = ((spec.name, gate_of(model.get_submodule(spec.name), spec)) for spec in anatomy.experts)
        gates = {name: gate for name, gate in found if gate is not None}
        device = torch.device("cuda", torch.cuda.current_device())
        refusal = triton_refusal(device, dtype, frozenset(gates.values()))
        if refusal is None:
            others = len(anatomy.experts) - len(gates)
            remainder = f" (torch for the activations of {others} layers)" if others else ""
            return Kernels(True, gates, f"triton{remainder}")
    if requested == "triton":
        error = InputError if torch.cuda.is_available() else MissingHereError
        raise error(
            f"moe.kernels: triton cannot be used here: {refusal}; set moe.kernels to torch or auto",
            key="moe.kernels-unsupported",
        )
    return Kernels(text=f"torch (not triton: {refusal})")


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

    expected = with_gradient(activation)
    for form in itertools.product((False, True), alphas, (None, *limits), (0.0, 1.0)):
        tried = with_gradient(gate := Gate(*form))
        if all(torch.allclose(*pair, rtol=1e-5, atol=1e-5) for pair in zip(expected, tried, strict=True)):
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


@cache
def triton_refusal(device: torch.device, dtype: torch.dtype, gates: frozenset[Gate]) -> str | None:
    """Return why the kernels are not used on `device` in `dtype`, or None. Compiles and runs them, for these
    `gates`.
    """
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"they compute in float32, and precision.compute is {str(dtype).removeprefix('torch.')}"
    try:
        most = max(2 * torch.finfo(dtype).eps, 1e-5)
        wrong = [f"{name} is {error:.1e} off" for name, error in _errors(device, dtype, gates) if not error <= most]
    except Exception as error:  # Triton and drivers raise of all kinds; what it was is printed
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return f"here {', '.join(wrong)} what torch gives" if wrong else None


def _errors(device: torch.device, dtype: torch.dtype, gates: frozenset[Gate]) -> Iterator[tuple[str, float]]:
    """Return the relative error of each kernel's results against torch's in fp32."""
    random = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, device=device).to(dtype)

    for gate in sorted(gates, key=str):
        # Values on both sides of the limit.
        pre_P2I, grad_PI = normal(_PAIRS, 2 * _WIDTH) * (gate.limit or 1.0), normal(_PAIRS, _WIDTH)
        weight_P = torch.rand(_PAIRS, generator=random, device=device)
        leaves = (pre_P2I.float().requires_grad_(), weight_P.clone().requires_grad_())
        with torch.enable_grad():
            expected_PI = gate(leaves[0]) * leaves[1].unsqueeze(1)
            expected = torch.autograd.grad(expected_PI, leaves, grad_PI.float())
        yield "swiglu", _error(triton_ops.swiglu(pre_P2I, weight_P, *gate.flat()), expected_PI)
        grad_weight_P = triton_ops.swiglu_backward_(pre_P2I, grad_PI, weight_P, *gate.flat())
        for got, want in zip((grad_PI, pre_P2I, grad_weight_P), (expected_PI, *expected), strict=True):
            yield "swiglu_backward", _error(got, want)

    for items, keys in _SORTED:
        key_N = torch.randint(keys, (items,), generator=random, device=device)
        order_N = torch.argsort(key_N, stable=True)
        got_order_N, got_place_N = triton_ops.counting_sort(key_N, keys)
        yield "counting_sort", _error(got_order_N, order_N)
        yield "counting_sort", _error(got_place_N, torch.argsort(order_N))

    values_NH = normal(_ITEMS, _WIDTH)
    start_R1 = torch.searchsorted(key_N[order_N], torch.arange(_KEYS + 1, device=device))
    expected_RH = values_NH.new_zeros(_KEYS, _WIDTH, dtype=torch.float32).index_add_(0, key_N, values_NH.float())
    yield "segment_sum", _error(triton_ops.segment_sum(values_NH, order_N, start_R1), expected_RH)


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.detach().double()
    return float((got.double() - expected).norm() / expected.norm())


def open_dispatchers(
    name: str, specs: Sequence[ExpertsSpec], mesh: Mesh, triton: bool, replicas: int = 0
) -> dict[str, Dispatcher]:
    """Return the dispatchers by the name of each experts module; each rank also has slots for `replicas` copies.

    Collectives: every rank calls it; none, unless a library opens its buffers.
    """
    if name == "deepep" and specs:
        library = deepep.Exchange(mesh.ep_group, max(spec.hidden_size for spec in specs))
        ep = mesh.layout.ep
        return {spec.name: deepep.LibraryDispatcher(spec.num_experts, ep, library, triton) for spec in specs}
    more = mesh.layout.ep * replicas
    return {spec.name: _dispatcher(name, spec.num_experts + more, mesh, triton) for spec in specs}


def _dispatcher(name: str, num_experts: int, mesh: Mesh, triton: bool) -> Dispatcher:
    """Return the dispatcher of this name for `num_experts` slots of the EP group."""
    if mesh.layout.ep == 1:
        return LocalDispatcher(num_experts, triton)
    if name == "hierarchical":
        if mesh.ep_nodes is None:
            what = "moe.dispatch: hierarchical needs EP groups of equal nodes"
            raise local_world_sizes_differ(what, "set moe.dispatch to auto")
        across, inside = (mesh.ep_nodes.get_group(axis) for axis in ("across", "inside"))
        return HierarchicalDispatcher(num_experts, across, inside, triton)
    return AllToAllDispatcher(num_experts, mesh.ep_group, triton)


def fetch_copies(model: nn.Module) -> None:
    """Copy the weights of the experts that this rank has copies of from their owners, once they are loaded.

    Collectives: every rank calls it; for each layer with copies one all-to-all over the EP group for each parameter.
    """
    for module in list(model.modules()):
        layer = module_state(module).expert_layer
        if layer is not None and layer.copies is not None:
            layer.copies.fetch(module, layer.spec.parameters)


def close_library(model: nn.Module) -> None:
    """Free the buffers of the library that sends rows of `model`, if there is one. Every rank calls it, at the end."""
    for module in model.modules():
        layer = module_state(module).expert_layer
        if layer is not None and isinstance(layer.dispatcher, deepep.LibraryDispatcher):
            layer.dispatcher.library.close()
            return
