"""Find the heads in the tensors of a layer that carries state along the sequence, so that ranks can share them.

Gated delta nets, Kimi's delta attention, lightning attention and short convolutions compute each head (of a
convolution, each channel) from separate rows of the projections before it, and their last layer sums over the heads.
The layout follows from the module's names and sizes. It is used only if a small copy of the module adds up: run once
with all heads, and once with the share of each rank. A module that is not known, or does not add up, has no layout.
Nothing here needs weights or communicates.
"""

import inspect
import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from expertmesh.anatomy.expert_module import relative_error
from expertmesh.compat import buffer_slots, parameter_slots
from expertmesh.introspection.heads_proof import TOLERANCE
from expertmesh.introspection.known_families import proof_key, refusal_by_proof

_HIDDEN, _ROWS, _LENGTH = 8, 2, 5
_QWEN = ({"in_proj_qkvz", "in_proj_ba"}, {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"})
_KIMI = {"q_proj", "k_proj", "v_proj", "b_proj", "conv1d", "forget_gate", "o_norm", "o_proj"}
_LIGHTNING = {"qkv_proj", "output_gate", "norm", "out_proj"}
_SHORT_CONVOLUTION = {"conv", "in_proj", "out_proj"}


@dataclass(frozen=True, slots=True)
class Share:
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
    shares: Mapping[str, Share]
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
    shares: dict[str, Share]
    counts: tuple[str, ...]
    norms: tuple[str, ...] = ()
    if any(names <= children for names in _QWEN) and "conv1d" in children:
        sections = (module.key_dim, module.key_dim, module.value_dim)
        shares = {name: Share(0) for name in ("A_log", "dt_bias")}
        shares |= {f"{name}.weight": Share(0) for name in sorted(children) if name.startswith("in_proj")}
        shares |= {f"{name}.weight": Share(0, sections) for name in ("in_proj_qkv", "conv1d") if name in children}
        heads = math.gcd(module.num_k_heads, module.num_v_heads)
        counts, rows = ("num_k_heads", "num_v_heads", "key_dim", "value_dim"), "out_proj"
    elif children >= _KIMI:
        heads, width = module.num_heads, module.qkv_dim
        gate = [name for name, child in module.forget_gate.named_children() if _features(child) == width]
        projections = ["q_proj", "k_proj", "v_proj", "b_proj", *(f"forget_gate.{name}" for name in gate)]
        projections += [name for name in ("g_proj", "g_b_proj") if name in children]
        shares = {f"{name}.weight": Share(0) for name in projections}
        shares["conv1d.weight"] = Share(0, (width, width, width))
        for name, parameter in module.forget_gate.named_parameters(recurse=False):
            dims = [dim for dim, size in enumerate(parameter.shape) if size in (heads, width)]
            shares |= {f"forget_gate.{name}": Share(dim) for dim in dims[:1]}
        owned = [f"forget_gate.{name}" for name in ("num_heads", "qkv_dim") if hasattr(module.forget_gate, name)]
        counts, rows = ("num_heads", "qkv_dim", *owned), "o_proj"
    elif children >= _LIGHTNING and "slope_rate" in buffer_slots(module):
        shares = {f"{name}.weight": Share(0) for name in ("qkv_proj", "output_gate")}
        shares |= {name: Share(list(b.shape).index(module.num_attention_heads)) for name, b in module.named_buffers()}
        heads = module.num_attention_heads
        counts, rows, norms = ("num_attention_heads",), "out_proj", ("norm",)
    elif children == _SHORT_CONVOLUTION:
        heads = module.conv.in_channels
        shares = {"conv.weight": Share(0), "in_proj.weight": Share(0, (heads, heads, heads))}
        counts, rows = (), "out_proj"
    else:
        return None
    return StateHeads(heads, _with_biases_and_adapters(module, shares, rows), counts, rows, norms)


def _features(child: nn.Module) -> int | None:
    return child.out_features if isinstance(child, nn.Linear) else None


def _with_biases_and_adapters(module: nn.Module, shares: Mapping[str, Share], rows: str) -> dict[str, Share]:
    """Add the cuts of biases and adapters: like the weight's outputs, but for the last layer on its inputs."""
    known = {name for name, _ in module.named_parameters()}
    alike = {
        f"{name.rpartition('.')[0]}.{leaf}": share
        for name, share in shares.items()
        if name.endswith(".weight")
        for leaf in ("bias", "lora_B")
    }
    last = {f"{rows}.weight": Share(1), f"{rows}.lora_A": Share(1)}
    return {name: share for name, share in (dict(shares) | alike | last).items() if name in known or name in shares}


def _why_not(module: nn.Module, found: StateHeads, ranks: int) -> str | None:
    """Return the reason why the shares of `ranks` do not add up on a small copy, or None if they do."""
    generator = torch.Generator().manual_seed(0)
    copy = _narrow(module, found.rows, generator)
    for name in found.norms:
        setattr(copy, name, nn.Identity())
    hidden = torch.randn(_ROWS, _LENGTH, _HIDDEN, dtype=torch.float64, generator=generator)
    try:
        whole = _run(copy, hidden)
        parts = [_run(_share(copy, found, rank, ranks), hidden) for rank in range(ranks)]
    except Exception as cause:  # code of another project may fail in any way: nothing is proven then
        return f"it cannot be run on a small copy ({type(cause).__name__}: {cause})"
    error = relative_error([whole], [torch.stack(parts).sum(dim=0)])
    return None if error <= TOLERANCE else f"its heads see each other (off by {error:.1e} on a small copy)"


def _narrow(module: nn.Module, rows: str, generator: torch.Generator) -> nn.Module:
    """Make a copy in fp64 on the CPU with random values and a narrow hidden state."""
    hidden = int(module.get_submodule(rows).out_features)  # type: ignore[arg-type]
    memo: dict[int, object] = {}
    for name, parameter in module.named_parameters():
        owner, _, leaf = name.rpartition(".")
        shape = list(parameter.shape)
        narrow = {"weight": 0, "bias": 0, "lora_B": 0} if owner == rows else {"weight": 1, "lora_A": 1}
        if (dim := narrow.get(leaf)) is not None and dim < len(shape) and shape[dim] == hidden:
            shape[dim] = _HIDDEN
        value = torch.randn(shape, dtype=torch.float64, generator=generator) * 0.5
        memo[id(parameter)] = nn.Parameter(value, requires_grad=False)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.rand(buffer.shape, dtype=torch.float64, generator=generator)
    return deepcopy(module, memo).eval()


def _share(copy: nn.Module, found: StateHeads, rank: int, ranks: int) -> nn.Module:
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


@torch.no_grad()
def _run(module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    optional = {"position_embeddings": None, "attention_mask": None}
    taken = inspect.signature(module.forward).parameters
    output: Any = module(hidden, **{key: value for key, value in optional.items() if key in taken})
    first = output[0] if isinstance(output, tuple) else output
    assert isinstance(first, torch.Tensor)
    return first
