"""Prove on small copies of modules that their code may be sharded: routed experts, heads, single tokens.

A small copy has the family's code and a narrow hidden state, with random values in fp64 on the CPU. What cannot run so
is not proven. Nothing here needs weights or communicates.

`confirm_experts`: experts without transformers' interface are recognised by shapes and argument names alone
(anatomy/structure.py), which is a guess. Each of them runs twice on random tokens: by the module's forward, and by
`ExpertLayer` on one rank. Outputs and all gradients must agree, or the model is refused by name. Shared experts that a
model's code runs after the routed ones, on the same tokens, are found here too (`shared_behind_routed`).

`why_not_split`, `state_heads`: ranks can share the heads of a layer without a plan of its family if its output is the
sum over them. The copy runs with all heads and once with the heads of each rank; the outputs of the shares must add up
to the full output. Heads that select positions together do not, so the layer is not split. Of attention the caller
names the split parameters. Layers that carry state along the sequence are known by the names and sizes of their parts:
gated delta nets, Kimi's delta attention, lightning attention and short convolutions compute each head (of a
convolution, each channel) from separate rows of the projections before it, and their last layer sums over the heads.

`TokenProof`: some code multiplies matrices over experts or residual streams, or slices a dim, and no token sees
another. One forward of the model on meta shows the arguments of such a module, and the copy is called with all of
several random tokens and with each of them alone; the results must be equal. Otherwise the module may look along the
sequence.

    E experts, H hidden, I intermediate, T tokens, K top-k
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from expertmesh.anatomy import Anatomy, ExpertsSpec, experts_spec, is_within
from expertmesh.anatomy.expert_module import relative_error, small_copy
from expertmesh.compat import (
    CACHE_ARGUMENTS,
    attention_of,
    buffer_slots,
    parameter_slots,
    set_attention,
    storage_key,
    tree_leaves,
    tree_map_only,
)
from expertmesh.config.errors import InputError
from expertmesh.experts.dispatch import LocalDispatcher
from expertmesh.experts.install import mlp_spec_of
from expertmesh.experts.layer import ExpertLayer, sorted_forward
from expertmesh.experts.lora_state import drop_adapters
from expertmesh.introspection.meta_run import LENGTH, ROWS, run_text
from expertmesh.introspection.proofs import own_class, proof_key, refusal_by_proof
from expertmesh.state.model_view import OUTPUT_ROWS, meta_copy
from expertmesh.state.patching import forwards_replaced

# Sizes of copied experts.
_E, _H, _I, _T, _K = 3, 10, 6, 7, 2
EXPERTS_TOLERANCE = 1e-9
# For mixtures that contain their routers, which may round weights to fp32; a wrong formula is off by far more.
_WITH_ROUTER = 1e-5
# Sizes of other copies.
_HIDDEN, _LENGTH, _TOKENS = 8, 5, ROWS * LENGTH
# Softmax may be computed in fp32; heads or tokens that see each other are off by far more.
TOLERANCE = 1e-5
_Call = tuple[tuple[Any, ...], dict[str, Any]]
_QWEN = ({"in_proj_qkvz", "in_proj_ba"}, {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"})
_KIMI = {"q_proj", "k_proj", "v_proj", "b_proj", "conv1d", "forget_gate", "o_norm", "o_proj"}
_LIGHTNING = {"qkv_proj", "output_gate", "norm", "out_proj"}
_SHORT_CONVOLUTION = {"conv", "in_proj", "out_proj"}


def confirm_experts(model: nn.Module, anatomy: Anatomy) -> None:
    """Raise `InputError`, naming the module, if experts without the interface differ from `ExpertLayer`."""
    for spec in anatomy.experts:
        if spec.call == "interface":
            continue
        experts = model.get_submodule(spec.name)
        key = proof_key(experts, spec.call, spec.flat_gate, spec.gated, spec.transposed, spec.biased)
        if reason := refusal_by_proof("experts", key, partial(_why_not_experts, experts, spec)):
            raise not_weighted_sum(spec.name, experts, reason)


def not_weighted_sum(name: str, module: nn.Module, why: str) -> InputError:
    return InputError(
        f"{name}: {type(module).__name__} {why}; it is not supported", key="model.experts-not-weighted-sum"
    )


def _why_not_experts(experts: nn.Module, spec: ExpertsSpec) -> str | None:
    """Return the reason why experts are not supported, or None if they are proven."""
    try:
        error = _disagreement(experts, spec)
    except InputError:
        raise
    except Exception as cause:
        # Code of another project, at a size it was not written for: any exception means that nothing is proven.
        return f"cannot be run on a small copy ({cause}), so it is not known to be a sum of gated MLPs"
    if not error <= (_WITH_ROUTER if spec.call == "sorted" else EXPERTS_TOLERANCE):
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
    hidden = small_spec.hidden_size
    ours: Callable[..., torch.Tensor]
    if spec.call == "dense":
        # One row per (expert, token), zero for tokens not sent to the expert; the last expert gets none.
        rows_ETH = _random((_E, _T, hidden), generator).detach()
        rows_ETH[:, ::2] = 0
        rows_ETH[-1] = 0
        inputs = [rows_ETH.view(-1, hidden).requires_grad_()]
        theirs, ours = small.forward, partial(layer.forward_dense, small)
    elif spec.call == "sorted":
        inputs = [_random((1, _T, hidden), generator)]
        theirs, ours = small.forward, partial(sorted_forward, small, small_spec, partial(layer.forward, small))
    else:
        index_TK = torch.stack([torch.randperm(_E, generator=generator)[:_K] for _ in range(_T)])
        index_TK[index_TK == 1] = 0  # cover an expert without tokens, and a token that is sent to one expert twice
        inputs = [_random((_T, hidden), generator), _random(tuple(index_TK.shape), generator)]
        theirs, ours = (
            lambda hidden_TH, weight_TK, call=call: call(hidden_TH, index_TK, weight_TK)
            for call in (small, partial(layer.forward, small))
        )
    return relative_error(*(_run_backward(call, small, inputs) for call in (theirs, ours)))


def _small_sizes(spec: ExpertsSpec) -> dict[int, int]:
    """Map the real sizes to small ones; equal sizes stay equal, and double sizes stay double."""
    sizes = {spec.num_experts: _E}
    hidden = sizes.setdefault(spec.hidden_size, _H)
    half = spec.hidden_size == 2 * spec.intermediate_size
    width = sizes.setdefault(spec.intermediate_size, hidden // 2 if half else _I)
    sizes.setdefault(2 * spec.intermediate_size, 2 * width)
    if spec.flat_gate is not None:
        sizes.setdefault(spec.num_experts * spec.intermediate_size, _E * width)
    if spec.call == "sorted" and spec.top_k is not None:  # its router is copied with it
        sizes.setdefault(spec.top_k, _K)
    return sizes


def _run_backward(
    call: Callable[..., torch.Tensor], small: nn.Module, inputs: list[torch.Tensor]
) -> list[torch.Tensor]:
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
        behind = [name for name in shared if _runs_behind(model, parent, spec, name)]
        if len(behind) == 1:
            found[spec.name] = behind[0]
    return found


def _runs_behind(model: nn.Module, parent: str, spec: ExpertsSpec, shared: str) -> bool:
    """Return whether a shared expert is called once, after the routed experts, on their input, and keeps its shape."""
    calls: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def recorded(name: str, own: Callable[..., torch.Tensor], hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        calls.append((name, hidden, out := own(hidden, *rest)))
        return out

    experts, module = model.get_submodule(spec.name), model.get_submodule(shared)
    forwards = {
        experts: partial(recorded, spec.name, lambda hidden, *_: torch.zeros_like(hidden)),
        module: partial(recorded, shared, module.forward),
    }
    hidden = torch.empty(1, 4, spec.hidden_size, dtype=next(module.parameters()).dtype, device="meta")
    try:
        with forwards_replaced(forwards), torch.no_grad():
            model.get_submodule(parent)(hidden)
    except Exception:  # code that needs other arguments, or values; its order is then not changed
        return False
    if [name for name, *_ in calls] != [spec.name, shared]:
        return False
    (_, routed, _), (_, given, out) = calls
    same = storage_key(routed.untyped_storage()) == storage_key(given.untyped_storage())
    return same and routed.numel() == given.numel() and out.shape == given.shape


def why_not_split(
    module: nn.Module, heads: Mapping[str, int], rows: str, dims: Mapping[str, int], norms: Sequence[str], tp: int
) -> str | None:
    """Return the reason why `tp` ranks cannot share the heads of an attention, or None.

    Args:
        heads: the number of heads of each split layer or parameter.
        rows: name of the last layer.
        dims: the split dim of each split parameter.
        norms: norms over all heads, which are left out: the ranks compute them together.
    """
    generator = torch.Generator().manual_seed(0)
    copy = _narrow_copy(module, rows, norms, generator, heads=heads, tp=tp)
    for part in copy.modules():
        config = getattr(part, "config", None)
        if config is not None and attention_of(config) != "sdpa":
            set_attention(config, "eager")
    split = StateHeads(0, {name: TensorCut(dim) for name, dim in dims.items()}, (), rows)
    reason: str | None = "it takes nothing that is known"
    for inputs in _inputs(module, generator):
        ran, reason = _why_not_a_sum(copy, split, tp, **inputs)
        if ran:
            break
    return reason


@torch.no_grad()
def _why_not_a_sum(
    copy: nn.Module, found: "StateHeads", ranks: int, *args: Any, **kwargs: Any
) -> tuple[bool, str | None]:
    """Return (whether the copy ran, the reason why the outputs of its shares do not add up to its own or None)."""
    try:
        modules = (copy, *(_share(copy, found, rank, ranks) for rank in range(ranks)))
        outputs = (module(*args, **kwargs) for module in modules)
        full, *parts = (output[0] if isinstance(output, tuple) else output for output in outputs)
        error = relative_error([full], [torch.stack(parts).sum(dim=0)])
    except Exception as cause:  # code of another project may fail in any way: nothing is proven then
        return False, f"it cannot be run on a small copy ({type(cause).__name__}: {cause})"
    return True, None if error <= TOLERANCE else f"its heads see each other (off by {error:.1e} on a small copy)"


def _narrow_copy(
    module: nn.Module,
    rows: str,
    norms: Sequence[str],
    generator: torch.Generator,
    *,
    heads: Mapping[str, int] | None = None,
    tp: int = 1,
    random_buffers: bool = False,
) -> nn.Module:
    """Return a copy in fp64 on the CPU with random parameters, a narrow hidden state and without `norms`.

    Args:
        rows: name of the last layer.
        heads: the number of heads of layers or parameters that get the fewest for `tp` ranks.
        random_buffers: draw buffers as well; else they are copied.
    """
    heads = heads or {}
    hidden = int(module.get_submodule(rows).out_features)  # type: ignore[arg-type]
    common = math.gcd(*heads.values())
    # `deepcopy` takes what is in its memo for copied already, so that nothing large ever is.
    memo: dict[int, object] = {}
    for name, parameter in module.named_parameters():
        owner, _, leaf = name.rpartition(".")
        shape = list(parameter.shape)
        count = heads.get(owner, heads.get(name))
        split = {"weight": 1, "lora_A": 1}.get(leaf) if owner == rows else None if leaf == "lora_A" else 0
        if count is not None and split is not None:
            shape[split] = shape[split] // common * tp
        # The hidden size is the input dim of a layer, but the output dim of the last one.
        narrow = dict.fromkeys(OUTPUT_ROWS, 0) if owner == rows else {"weight": 1, "lora_A": 1}
        if (dim := narrow.get(leaf)) is not None and dim < len(shape) and parameter.shape[dim] == hidden:
            shape[dim] = _HIDDEN
        value = torch.randn(shape, dtype=torch.float64, generator=generator) * 0.5
        memo[id(parameter)] = nn.Parameter(value, requires_grad=False)
    for buffer in module.buffers() if random_buffers else ():
        memo[id(buffer)] = torch.rand(buffer.shape, dtype=torch.float64, generator=generator)
    copy = deepcopy(module, memo).eval()
    for name in norms:
        setattr(copy, name, nn.Identity())
    return copy


def _share(copy: nn.Module, found: "StateHeads", rank: int, ranks: int) -> nn.Module:
    """Make a copy with the heads of one rank; rank 0 alone has the bias of the last layer."""
    share = deepcopy(copy)
    for name, how in found.shares.items():
        owner, _, leaf = name.rpartition(".")
        module = share.get_submodule(owner)
        tensor = how.of(getattr(module, leaf), rank, ranks).clone()
        if leaf in buffer_slots(module):
            buffer_slots(module)[leaf] = tensor
        else:
            parameter_slots(module)[leaf] = nn.Parameter(tensor, requires_grad=False)
    for name in found.counts:
        owner, _, leaf = name.rpartition(".")
        module = share.get_submodule(owner)
        setattr(module, leaf, getattr(module, leaf) // ranks)
    last: Any = share.get_submodule(found.rows)  # of any class with a bias
    for leaf in {"bias", "bias_lora_W"} & parameter_slots(last).keys() if rank else ():
        parameter_slots(last)[leaf] = None
    return share


def _inputs(module: Any, generator: torch.Generator) -> Iterator[dict[str, Any]]:
    """Yield the arguments to call an attention with, for each width that its rotary tables may have."""
    config = getattr(module, "config", None)
    head_dim = getattr(module, "head_dim", None) or getattr(module, "qk_head_dim", None) or 0
    partial = getattr(config, "partial_rotary_factor", None) or 1.0
    widths = [getattr(module, "qk_rope_head_dim", None), head_dim, int(head_dim * partial), head_dim // 2]
    mask = torch.full((_LENGTH, _LENGTH), -math.inf, dtype=torch.float64).triu(1).expand(ROWS, 1, -1, -1)
    for width in dict.fromkeys(width for width in widths if width):
        tables = torch.randn(2, ROWS, _LENGTH, width, dtype=torch.float64, generator=generator).unbind()
        known = {
            "hidden_states": torch.randn(ROWS, _LENGTH, _HIDDEN, dtype=torch.float64, generator=generator),
            "position_embeddings": tables,
            "attention_mask": mask,
            "position_ids": torch.arange(_LENGTH).expand(ROWS, -1),
            **dict.fromkeys(CACHE_ARGUMENTS),
        }
        taken = inspect.signature(module.forward).parameters
        yield {key: value for key, value in known.items() if key in taken}


@dataclass(frozen=True, slots=True)
class TensorCut:
    """The cut of a tensor into one part for each rank."""

    dim: int
    sizes: tuple[int, ...] = ()
    """The sizes of the sections on `dim`, each cut into equal parts; empty cuts the full dim into equal parts."""

    def of(self, tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        """Return the part of `rank` out of `ranks`; a view if there are no sections."""
        if not self.sizes:
            return tensor.chunk(ranks, self.dim)[rank]
        sections = tensor.split(list(self.sizes), self.dim)
        return torch.cat([section.chunk(ranks, self.dim)[rank] for section in sections], self.dim)


@dataclass(frozen=True, slots=True)
class StateHeads:
    """The heads of one module. Names are relative to it."""

    heads: int
    """The number of heads that can be shared."""
    shares: Mapping[str, TensorCut]
    """The tensors that are cut, by name."""
    counts: tuple[str, ...]
    """Attributes with the number of heads, or of features of all heads."""
    rows: str
    """Name of the last layer, which sums over the heads."""
    norms: tuple[str, ...] = field(default=())
    """Names of the norms over all heads."""


def state_heads(module: nn.Module, ranks: int) -> StateHeads | str:
    """Return how `ranks` share the heads of a module, or the reason why they do not."""
    found = _by_names(module)
    if found is None:
        return "its layers are not known"
    if found.heads % ranks:
        return f"{ranks} ranks cannot share its {found.heads} heads evenly"
    key = proof_key(module, ranks, sorted(found.shares), found.counts, found.rows, found.norms)
    return refusal_by_proof("heads", key, partial(_why_not_shared, module, found, ranks)) or found


def _by_names(module: Any) -> StateHeads | None:
    """Return the heads of a module of a known kind, recognised by the names of its children; else None."""
    children = {name for name, _ in module.named_children()}
    shares: dict[str, TensorCut]
    counts: tuple[str, ...]
    norms: tuple[str, ...] = ()
    if any(names <= children for names in _QWEN) and "conv1d" in children:
        sections = (module.key_dim, module.key_dim, module.value_dim)
        shares = {name: TensorCut(0) for name in ("A_log", "dt_bias")}
        shares |= {f"{name}.weight": TensorCut(0) for name in sorted(children) if name.startswith("in_proj")}
        shares |= {f"{name}.weight": TensorCut(0, sections) for name in ("in_proj_qkv", "conv1d") if name in children}
        heads = math.gcd(module.num_k_heads, module.num_v_heads)
        counts, rows = ("num_k_heads", "num_v_heads", "key_dim", "value_dim"), "out_proj"
    elif children >= _KIMI:
        heads, width = module.num_heads, module.qkv_dim
        gate = [
            name
            for name, child in module.forget_gate.named_children()
            if isinstance(child, nn.Linear) and child.out_features == width
        ]
        projections = ["q_proj", "k_proj", "v_proj", "b_proj", *(f"forget_gate.{name}" for name in gate)]
        projections += [name for name in ("g_proj", "g_b_proj") if name in children]
        shares = {f"{name}.weight": TensorCut(0) for name in projections}
        shares["conv1d.weight"] = TensorCut(0, (width, width, width))
        for name, parameter in module.forget_gate.named_parameters(recurse=False):
            dims = [dim for dim, size in enumerate(parameter.shape) if size in (heads, width)]
            shares |= {f"forget_gate.{name}": TensorCut(dim) for dim in dims[:1]}
        owned = [f"forget_gate.{name}" for name in ("num_heads", "qkv_dim") if hasattr(module.forget_gate, name)]
        counts, rows = ("num_heads", "qkv_dim", *owned), "o_proj"
    elif children >= _LIGHTNING and "slope_rate" in buffer_slots(module):
        shares = {f"{name}.weight": TensorCut(0) for name in ("qkv_proj", "output_gate")}
        shares |= {
            name: TensorCut(list(b.shape).index(module.num_attention_heads)) for name, b in module.named_buffers()
        }
        heads = module.num_attention_heads
        counts, rows, norms = ("num_attention_heads",), "out_proj", ("norm",)
    elif children == _SHORT_CONVOLUTION:
        heads = module.conv.in_channels
        shares = {"conv.weight": TensorCut(0), "in_proj.weight": TensorCut(0, (heads, heads, heads))}
        counts, rows = (), "out_proj"
    else:
        return None
    return StateHeads(heads, _with_biases_and_adapters(module, shares, rows), counts, rows, norms)


def _with_biases_and_adapters(module: nn.Module, shares: Mapping[str, TensorCut], rows: str) -> dict[str, TensorCut]:
    """Add the cuts of biases and adapters: like the weight's outputs, but for the last layer on its inputs."""
    known = {name for name, _ in module.named_parameters()}
    alike = {
        f"{name.rpartition('.')[0]}.{leaf}": share
        for name, share in shares.items()
        if name.endswith(".weight")
        for leaf in OUTPUT_ROWS[1:]
    }
    last = {f"{rows}.weight": TensorCut(1), f"{rows}.lora_A": TensorCut(1)}
    return {name: share for name, share in (dict(shares) | alike | last).items() if name in known or name in shares}


def _why_not_shared(module: nn.Module, found: StateHeads, ranks: int) -> str | None:
    """Return the reason why the shares of `ranks` do not add up on a small copy, or None if they do."""
    generator = torch.Generator().manual_seed(0)
    copy = _narrow_copy(module, found.rows, found.norms, generator, random_buffers=True)
    hidden = torch.randn(ROWS, _LENGTH, _HIDDEN, dtype=torch.float64, generator=generator)
    taken = inspect.signature(copy.forward).parameters
    absent = {name: None for name in ("position_embeddings", "attention_mask") if name in taken}
    return _why_not_a_sum(copy, found, ranks, hidden, **absent)[1]


class TokenProof:
    """The proofs for the modules of one model; the model runs on meta once, if any is to be proven."""

    def __init__(self, model: nn.Module, anatomy: Anatomy) -> None:
        self._model: Any = model  # torch types `config` of any module as a tensor
        self._anatomy = anatomy
        self._calls: dict[str, _Call] | None = None

    def holds(self, name: str) -> bool:
        """Return whether the module `name` of a block computes each token separately; one with experts never is."""
        module, caller = self._model.get_submodule(name), self._model.get_submodule(name.rpartition(".")[0])
        key = proof_key(module, own_class(type(caller)).__qualname__)
        return refusal_by_proof("tokens", key, partial(self._why_not, name)) is None

    def _why_not(self, name: str) -> str | None:
        if any(is_within(spec.name, name) for spec in self._anatomy.experts):
            return "it holds experts"
        try:
            if self._calls is None:
                calls: dict[str, _Call] = {}

                def record(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                    calls[name] = (args, kwargs)

                meta_model = meta_copy(self._model)
                for part, each in meta_model.named_modules():
                    each.register_forward_pre_hook(partial(record, part), with_kwargs=True)
                run_text(meta_model, self._anatomy.experts)
                self._calls = calls  # of a complete forward alone
            module = self._model.get_submodule(name)
            error = _error(module, self._calls[name], self._model.config.get_text_config().hidden_size)
        # The family's code may fail in any way without values, or at another size; nothing is proven then.
        except Exception as cause:
            return f"it cannot be run on a small copy ({type(cause).__name__}: {cause})"
        return None if error <= TOLERANCE else f"its tokens see each other (off by {error:.1e} on a small copy)"


@torch.no_grad()
def _error(module: nn.Module, call: _Call, hidden: int) -> float:
    """Return the relative error between the outputs of a small copy for all tokens at once and for each token alone."""
    generator = torch.Generator().manual_seed(0)
    copy = small_copy(module, {hidden: _HIDDEN}, generator).eval()

    def narrow(x: torch.Tensor) -> torch.Tensor:
        dims = _token_dims(x)
        shape = [*x.shape[:dims], *(_HIDDEN if size == hidden else size for size in x.shape[dims:])]
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    def outputs(tokens: int, args: Any, kwargs: Any) -> list[torch.Tensor]:
        leaves = tree_leaves(copy(*args, **kwargs))
        return [leaf.reshape(tokens, -1) for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def of_token(token: int, x: torch.Tensor) -> torch.Tensor:
        dims = _token_dims(x)
        return x.flatten(0, dims - 1)[token].view(*[1] * dims, *x.shape[dims:])

    inputs = tree_map_only(torch.Tensor, narrow, call)
    ones = (tree_map_only(torch.Tensor, partial(of_token, token), inputs) for token in range(_TOKENS))
    alone = [outputs(1, *one) for one in ones]
    return relative_error(outputs(_TOKENS, *inputs), [torch.cat(parts) for parts in zip(*alone, strict=True)])


def _token_dims(x: torch.Tensor) -> int:
    """Return how many dims number the tokens: two for `[B, S, ...]`, one for `[B * S, ...]`.

    Raises:
        ValueError: a tensor of another shape, or of integers.
    """
    if x.is_floating_point() and x.shape[:2] == (ROWS, LENGTH):
        return 2
    if x.is_floating_point() and x.shape[:1] == (_TOKENS,):
        return 1
    raise ValueError(f"it gets {x.dtype} {tuple(x.shape)}")
