"""Prove that ranks can share the heads of a layer, if its family has no plan for it: its output is the sum over them.

A small copy of the module, the family's code with a narrow hidden state, runs with all heads and once with the heads of
each rank. The outputs of the shares must add up to the full output. A module that cannot run so, or does not add up
(heads that select positions together), is not split.

Of attention the caller names the split parameters (`why_not_split`). Layers that carry state along the sequence are
known by the names and sizes of their parts (`state_heads`): gated delta nets, Kimi's delta attention, lightning
attention and short convolutions compute each head (of a convolution, each channel) from separate rows of the
projections before it, and their last layer sums over the heads. Nothing here needs weights or communicates.
"""

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from expertmesh.anatomy.expert_module import relative_error
from expertmesh.compat import attention_of, buffer_slots, parameter_slots, set_attention
from expertmesh.introspection.known_families import proof_key, refusal_by_proof

_HIDDEN, _ROWS, _LENGTH = 8, 2, 5
# Softmax may be computed in fp32; heads that see each other are off by far more.
TOLERANCE = 1e-5
_QWEN = ({"in_proj_qkvz", "in_proj_ba"}, {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"})
_KIMI = {"q_proj", "k_proj", "v_proj", "b_proj", "conv1d", "forget_gate", "o_norm", "o_proj"}
_LIGHTNING = {"qkv_proj", "output_gate", "norm", "out_proj"}
_SHORT_CONVOLUTION = {"conv", "in_proj", "out_proj"}


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
    copy = deepcopy(module, _small_parameters(module, rows, generator, heads, tp)).eval()
    for part in copy.modules():
        config = getattr(part, "config", None)
        if config is not None and attention_of(config) != "sdpa":
            set_attention(config, "eager")
    for name in norms:
        setattr(copy, name, nn.Identity())
    shares = [_share(copy, dims, rows, rank, tp) for rank in range(tp)]
    reason: str | None = "it takes nothing that is known"
    for inputs in _inputs(module, generator):
        ran, reason = _why_not_a_sum(copy, shares, **inputs)
        if ran:
            break
    return reason


def _why_not_a_sum(copy: nn.Module, shares: Sequence[nn.Module], *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
    """Return (whether the copy ran, the reason why the outputs of its shares do not add up to its own or None)."""
    try:
        whole, *parts = (_run(module, *args, **kwargs) for module in (copy, *shares))
    except Exception as cause:  # code of another project may fail in any way: nothing is proven then
        return False, f"it cannot be run on a small copy ({type(cause).__name__}: {cause})"
    error = relative_error([whole], [torch.stack(parts).sum(dim=0)])
    return True, None if error <= TOLERANCE else f"its heads see each other (off by {error:.1e} on a small copy)"


@torch.no_grad()
def _run(module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    output: Any = module(*args, **kwargs)
    first = output[0] if isinstance(output, tuple) else output
    assert isinstance(first, torch.Tensor)
    return first


def _small_parameters(
    module: nn.Module, rows: str, generator: torch.Generator, heads: Mapping[str, int], tp: int
) -> dict[int, object]:
    """Return random parameters in fp64 for a copy on the CPU with a narrow hidden state, as a memo of `deepcopy`.

    Args:
        heads: the number of heads of layers or parameters that get the fewest for `tp` ranks.
    """
    hidden = int(module.get_submodule(rows).out_features)  # type: ignore[arg-type]
    common = math.gcd(*heads.values())
    memo: dict[int, object] = {}
    for name, parameter in module.named_parameters():
        owner, _, leaf = name.rpartition(".")
        shape = list(parameter.shape)
        count = heads.get(owner, heads.get(name))
        if count is not None and (dim := _dim_of_heads(leaf, owner == rows)) is not None:
            shape[dim] = shape[dim] // common * tp
        # The hidden size is the input dim of a layer, but the output dim of the last one.
        narrow = {"weight": 0, "bias": 0, "lora_B": 0} if owner == rows else {"weight": 1, "lora_A": 1}
        if (dim := narrow.get(leaf)) is not None and dim < len(shape) and parameter.shape[dim] == hidden:
            shape[dim] = _HIDDEN
        value = torch.randn(shape, dtype=torch.float64, generator=generator) * 0.5
        memo[id(parameter)] = nn.Parameter(value, requires_grad=False)
    return memo


def _dim_of_heads(leaf: str, is_last: bool) -> int | None:
    if is_last:
        return {"weight": 1, "lora_A": 1}.get(leaf)
    return None if leaf == "lora_A" else 0


def _share(copy: nn.Module, dims: Mapping[str, int], rows: str, rank: int, tp: int) -> nn.Module:
    """Make a copy with the heads of one rank; rank 0 alone has the bias of the last layer."""
    share = deepcopy(copy)
    for name, dim in dims.items():
        parameter = share.get_parameter(name)
        parameter.data = parameter.data.chunk(tp, dim)[rank].clone()
    last: Any = share.get_submodule(rows)
    if rank and last.bias is not None:
        last.bias = None
    return share


def _inputs(module: Any, generator: torch.Generator) -> Iterator[dict[str, Any]]:
    """Yield the arguments to call an attention with, for each width that its rotary tables may have."""
    config = getattr(module, "config", None)
    head_dim = getattr(module, "head_dim", None) or getattr(module, "qk_head_dim", None) or 0
    partial = getattr(config, "partial_rotary_factor", None) or 1.0
    widths = [getattr(module, "qk_rope_head_dim", None), head_dim, int(head_dim * partial), head_dim // 2]
    mask = torch.full((_LENGTH, _LENGTH), -math.inf, dtype=torch.float64).triu(1).expand(_ROWS, 1, -1, -1)
    for width in dict.fromkeys(width for width in widths if width):
        tables = torch.randn(2, _ROWS, _LENGTH, width, dtype=torch.float64, generator=generator).unbind()
        known = {
            "hidden_states": torch.randn(_ROWS, _LENGTH, _HIDDEN, dtype=torch.float64, generator=generator),
            "position_embeddings": tables,
            "attention_mask": mask,
            "position_ids": torch.arange(_LENGTH).expand(_ROWS, -1),
            "past_key_values": None,
        }
        taken = inspect.signature(module.forward).parameters
        yield {key: value for key, value in known.items() if key in taken}


@dataclass(frozen=True, slots=True)
class TensorCut:
    """The cut of a tensor into one part for each rank."""

    dim: int
    """The dim that is cut."""
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
    return refusal_by_proof("heads", key, partial(_why_not, module, found, ranks)) or found


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
        gate = [name for name, child in module.forget_gate.named_children() if _features(child) == width]
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


def _features(child: nn.Module) -> int | None:
    return child.out_features if isinstance(child, nn.Linear) else None


def _with_biases_and_adapters(module: nn.Module, shares: Mapping[str, TensorCut], rows: str) -> dict[str, TensorCut]:
    """Add the cuts of biases and adapters: like the weight's outputs, but for the last layer on its inputs."""
    known = {name for name, _ in module.named_parameters()}
    alike = {
        f"{name.rpartition('.')[0]}.{leaf}": share
        for name, share in shares.items()
        if name.endswith(".weight")
        for leaf in ("bias", "lora_B")
    }
    last = {f"{rows}.weight": TensorCut(1), f"{rows}.lora_A": TensorCut(1)}
    return {name: share for name, share in (dict(shares) | alike | last).items() if name in known or name in shares}


def _why_not(module: nn.Module, found: StateHeads, ranks: int) -> str | None:
    """Return the reason why the shares of `ranks` do not add up on a small copy, or None if they do."""
    generator = torch.Generator().manual_seed(0)
    memo = _small_parameters(module, found.rows, generator, {}, 1)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.rand(buffer.shape, dtype=torch.float64, generator=generator)
    copy = deepcopy(module, memo).eval()
    for name in found.norms:
        setattr(copy, name, nn.Identity())
    hidden = torch.randn(_ROWS, _LENGTH, _HIDDEN, dtype=torch.float64, generator=generator)
    taken = inspect.signature(copy.forward).parameters
    absent = {name: None for name in ("position_embeddings", "attention_mask") if name in taken}
    try:
        shares = [_share_state(copy, found, rank, ranks) for rank in range(ranks)]
    except Exception as cause:  # a module of another shape than its names say: nothing is proven then
        return f"it cannot be run on a small copy ({type(cause).__name__}: {cause})"
    return _why_not_a_sum(copy, shares, hidden, **absent)[1]


def _share_state(copy: nn.Module, found: StateHeads, rank: int, ranks: int) -> nn.Module:
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
    last: Any = share.get_submodule(found.rows)
    if rank and last.bias is not None:
        last.bias = None
    return share
