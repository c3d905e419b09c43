"""Prove that the output of an attention is the sum over its heads, if its family has no plan for it.

A small copy of the module, the family's code with few heads and a narrow hidden state, runs with all heads and once
with the heads of each rank. The outputs of the shares must add up to the full output. An attention that cannot run so,
or does not add up (heads that select positions together), is not split. The proof needs no weights and does not
communicate.
"""

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from expertmesh.anatomy.expert_module import relative_error
from expertmesh.compat import attention_of, set_attention

_HIDDEN, _ROWS, _LENGTH = 8, 2, 5
# Softmax may be computed in fp32; heads that see each other are off by far more.
TOLERANCE = 1e-5


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
    last: Any = module.get_submodule(rows)
    copy = _few_heads(module, heads, last.out_features, rows, tp, generator)
    for name in norms:
        setattr(copy, name, nn.Identity())
    shares = [_share(copy, dims, rows, rank, tp) for rank in range(tp)]
    failure = "it takes nothing that is known"
    for inputs in _inputs(module, generator):
        try:
            whole = _run(copy, inputs)
            parts = [_run(share, inputs) for share in shares]
        except Exception as cause:  # code of another project may fail in any way: nothing is proven then
            failure = f"it cannot be run on a small copy ({type(cause).__name__}: {cause})"
            continue
        error = relative_error([whole], [torch.stack(parts).sum(dim=0)])
        return None if error <= TOLERANCE else f"its heads see each other (off by {error:.1e} on a small copy)"
    return failure


def _few_heads(
    module: nn.Module, heads: Mapping[str, int], hidden: int, rows: str, tp: int, generator: torch.Generator
) -> nn.Module:
    """Make a copy in fp64 on the CPU with random values, the fewest heads for `tp` ranks, and a narrow hidden state."""
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
    copy = deepcopy(module, memo).eval()
    for part in copy.modules():
        config = getattr(part, "config", None)
        if config is not None and attention_of(config) != "sdpa":
            set_attention(config, "eager")
    return copy


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


@torch.no_grad()
def _run(module: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    output: Any = module(**inputs)
    first = output[0] if isinstance(output, tuple) else output
    assert isinstance(first, torch.Tensor)
    return first
