"""Attend to packed rows on accelerators with variable-length flash attention instead of a dense mask.

A mask of S × S prevents flash attention, computes scores that it then hides, and repeats key and value heads. So this
file registers a replacement of sdpa in transformers' registries: for packed rows it builds no mask, and attention runs
on the concatenated samples with their boundaries (`torch.nn.attention.varlen`, torch 2.11). Rows of one sample and
padded rows still use sdpa. Families that flash attention does not support in transformers (sinks, indices, chunks) keep
the dense mask, which is equally exact, and the plan prints the reason.

    B rows, S positions, N query heads, G key and value heads, D size of a head; T = B * S
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from expertmesh.anatomy import Anatomy
from expertmesh.compat import declared, set_attention, varlen_attn
from expertmesh.experts.token_counts import packed_samples
from expertmesh.introspection.attention import attention_by_samples, decoder_of
from expertmesh.introspection.source_code import registry_call
from expertmesh.parallel.context.plan import backend_of
from expertmesh.state.patching import register_function

NAME = "expertmesh_varlen"
# The arguments that the kernel supports. A family that passes others is refused, as they would be ignored silently.
_KEYWORDS = {"attention_mask", "dropout", "scaling", "sliding_window", "is_causal", "position_ids"}
_LARGEST_HEAD = 256


def varlen_refusal(model: Any, anatomy: Anatomy, device_type: str, dtype: torch.dtype) -> str | None:
    """Return the reason to attend to packed rows of `model` with a dense mask, or None for variable-length attention.

    Args:
        device_type: may be a type that this torch does not know.
        dtype: the compute dtype.
    """
    config: Any = decoder_of(model, anatomy).config
    if device_type != "cuda":
        return f"on {device_type} torch has no variable-length attention"
    if varlen_attn is None:
        return "torch has no torch.nn.attention.varlen before 2.11"
    if dtype.itemsize != 2:
        return f"flash attention does not compute in {str(dtype).removeprefix('torch.')}"
    if (backend := backend_of(config)) not in ("sdpa", NAME):
        return f"model.attention is {backend}"
    if not declared(model, "_supports_flash_attn"):
        return f"transformers does not run {config.model_type} with flash attention"
    if attention_by_samples(model, anatomy):
        return "its attention carries state, and runs on each sample by itself"
    for module in model.modules():
        if getattr(module, "config", None) is config and (call := registry_call(module)) is not None:
            if odd := sorted(set(call.keywords) - _KEYWORDS):
                return f"its attention passes {odd[0]}"
            if getattr(module, "attention_dropout", 0.0) or getattr(config, "attention_dropout", 0.0):
                return "its attention has dropout"
            if (size := _head_size(module)) > _LARGEST_HEAD or size % 8:
                return f"its heads have size {size}"
    return None


def packed_attention_line(model: Any, anatomy: Anatomy, device: torch.device, dtype: torch.dtype) -> str:
    """Describe for the printed plan how packed rows are attended; the model may be sharded or not."""
    reason = varlen_refusal(model, anatomy, device.type, dtype)
    return "by samples, without masks" if reason is None else f"with a mask of all pairs: {reason}"


def attend_by_samples(decoder: nn.Module) -> None:
    """Switch the attention of `decoder`, built with sdpa, to the samples of packed rows. It does not communicate."""
    register_function(ALL_ATTENTION_FUNCTIONS, NAME, attention)
    register_function(ALL_MASK_ATTENTION_FUNCTIONS, NAME, mask)
    config: Any = decoder.config
    set_attention(config, {"": NAME})


def mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Return sdpa's mask, or None for packed rows."""
    # As in transformers, rows with a padding mask are not packed.
    is_packed = packed_samples.get() is not None and kwargs.get("attention_mask") is None
    return None if is_packed else ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)


Boundaries = tuple[torch.Tensor, int]
"""cu_seqlens, int32 `[samples + 1]`, and the longest sample."""


@dataclass(slots=True)
class _InGraph:
    """The boundaries that code being compiled reads: torch.compile traces this object, but no context variable."""

    samples: Boundaries | None = None


_in_graph = _InGraph()


def running_samples(device: torch.device) -> Boundaries | None:
    """Return the boundaries of the packed rows that run now, or None."""
    samples = packed_samples.get()
    if samples is None:
        return None
    return samples.cu_seqlens(device), samples.once(
        "longest", lambda borders: max(end - start for start, end in borders)
    )


def traceable(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `forward` with the boundaries as one more argument, so that compiled code does not fix them."""

    def with_samples(part: nn.Module, samples: Boundaries | None, *args: Any, **kwargs: Any) -> Any:
        _in_graph.samples = samples
        return forward(part, *args, **kwargs)

    with_samples.__name__, with_samples.__qualname__ = forward.__name__, forward.__qualname__  # for torch's own logs
    return with_samples


def attention(
    module: nn.Module,
    query_BNSD: torch.Tensor,
    key_BGSD: torch.Tensor,
    value_BGSD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend to packed rows sample by sample, to all others with sdpa; the function in transformers' registry.

    Args:
        query_BNSD: queries of full rows.
        key_BGSD: keys; G divides N.
        value_BGSD: values; their head size may be smaller than D.
        attention_mask: None for packed rows.
        sliding_window: how many positions a query sees, itself included.

    Returns:
        (the result `[B, S, N, D of values]`, None).
    """
    samples = _in_graph.samples if torch.compiler.is_compiling() else running_samples(query_BNSD.device)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if samples is None or attention_mask is not None or not causal:
        arguments = (module, query_BNSD, key_BGSD, value_BGSD, attention_mask)
        out_BSND, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](*arguments, scaling=scaling, is_causal=is_causal, **options)
        return out_BSND, None
    # varlen_refusal has excluded attention with dropout.
    assert not options.get("dropout"), "the kernel has no dropout"
    rows, heads, positions, size = query_BNSD.shape
    value_size = value_BGSD.shape[-1]
    # The kernel supports one head size; zero columns of the values give zero columns of the result, which are cut off.
    value_BGSD = value_BGSD if value_size == size else F.pad(value_BGSD, (0, size - value_size))
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query_BNSD, key_BGSD, value_BGSD))
    borders, longest = samples
    out = varlen_attn(
        query,
        key,
        value,
        borders,
        borders,
        longest,
        longest,
        scale=scaling,
        # transformers counts the query as part of the window, the kernel does not.
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=heads != key.shape[1],
    )
    return out.view(rows, positions, heads, size)[..., :value_size], None


def _head_size(module: Any) -> int:
    """Return the size of a query head, by the names that modules use; 0 if it is unknown."""
    names = ("qk_head_dim", "head_dim")
    return int(next((size for name in names if isinstance(size := getattr(module, name, None), int)), 0))
