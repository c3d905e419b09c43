"""Keep the samples of packed rows apart: samples in one row must not see each other.

A row is packed if its position ids restart. Modules that carry a state along a row (linear attention, state spaces,
short convolutions) run on each sample separately, from an empty state; samples of similar length run as one padded
batch. A decoder that would build its masks without position ids gets masks that separate the samples. On accelerators
packed rows get no dense mask, S × S of which would prevent flash attention: a replacement of sdpa in transformers'
registries runs on the concatenated samples with their boundaries (`torch.nn.attention.varlen`, torch 2.11). Families
that flash attention does not support in transformers keep the dense mask, which is equally exact, and the plan prints
the reason. A row of one sample is not changed.

    B rows, S positions of a full row; N samples of similar length, L positions of the longest of them
    N query heads, G key and value heads, D size of a head; T = B * S
"""

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from expertmesh.anatomy import Anatomy
from expertmesh.compat import declared, set_attention, tree_map_only, varlen_attn
from expertmesh.config.errors import InputError
from expertmesh.experts.lora_state import adapter_state
from expertmesh.experts.micro_batch import Borders, PackedSamples, packed_samples
from expertmesh.introspection.attention import MASKED_KINDS, Separation, mask_kinds, narrower_masks, registry_call
from expertmesh.parallel.context import backend_of
from expertmesh.state.patching import mix_in, replaced

NAME = "expertmesh_varlen"
# The arguments that the kernel supports. A family that passes others is refused, as they would be ignored silently.
_KEYWORDS = {"attention_mask", "dropout", "scaling", "sliding_window", "is_causal", "position_ids"}
_LARGEST_HEAD = 256
# cu_seqlens, int32 `[samples + 1]`, and the longest sample.
Boundaries = tuple[torch.Tensor, int]
_MASKS = {
    "full_attention": create_causal_mask,
    "sliding_attention": create_sliding_window_causal_mask,
    "chunked_attention": create_chunked_causal_mask,
}
# Sample boundaries in full rows, for kernels of packed rows; a module that runs on single samples must not get them.
_BORDERS = ("cu_seq", "max_length", "seq_idx")


def varlen_refusal(model: Any, separation: Separation, device_type: str, dtype: torch.dtype) -> str | None:
    """Return the reason to attend to packed rows of `model` with a dense mask, or None for variable-length attention.

    Args:
        device_type: may be a type that this torch does not know.
        dtype: the compute dtype.
    """
    config: Any = separation.decoder.config
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
    if separation.mixers_attend:
        return "its attention carries state, and runs on each sample by itself"
    for module in model.modules():
        if getattr(module, "config", None) is config and (call := registry_call(module)) is not None:
            if odd := sorted(set(call.keywords) - _KEYWORDS):
                return f"its attention passes {odd[0]}"
            # The kernel has no masks: it knows of a window by this argument alone, and of no chunks.
            told = {"sliding_attention"} if "sliding_window" in call.keywords else set()
            if untold := sorted(narrower_masks(separation.decoder) - told):
                return f"masks alone say what its {untold[0]} sees"
            if getattr(module, "attention_dropout", 0.0) or getattr(config, "attention_dropout", 0.0):
                return "its attention has dropout"
            # By the names that modules use; 0 if it is unknown.
            sizes = (getattr(module, name, None) for name in ("qk_head_dim", "head_dim"))
            size = next((size for size in sizes if isinstance(size, int)), 0)
            if size > _LARGEST_HEAD or size % 8:
                return f"its heads have size {size}"
    return None


def packed_attention_line(model: Any, anatomy: Anatomy, device: torch.device, dtype: torch.dtype) -> str:
    """Describe for the printed plan how packed rows are attended; the model may be sharded or not."""
    reason = varlen_refusal(model, Separation.of(model, anatomy), device.type, dtype)
    return "by samples, without masks" if reason is None else f"with a mask of all pairs: {reason}"


def attend_by_samples(decoder: nn.Module) -> None:
    """Switch the attention of `decoder`, built with sdpa, to the samples of packed rows. It does not communicate."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask)
    config: Any = decoder.config
    set_attention(config, {"": NAME})


def mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Return sdpa's mask, or None for packed rows."""
    # As in transformers, rows with a padding mask are not packed.
    is_packed = packed_samples.get() is not None and kwargs.get("attention_mask") is None
    return None if is_packed else ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)


@dataclass(slots=True)
class _InGraph:
    """The boundaries that code being compiled reads: torch.compile traces this object, but no context variable."""

    samples: Boundaries | None = None


_in_graph = _InGraph()


def running_samples(device: torch.device) -> Boundaries | None:
    """Return the boundaries of the packed rows that run now, or None."""
    if (samples := packed_samples.get()) is None:
        return None
    longest = samples.once("longest", lambda borders: max(end - start for start, end in borders))
    return samples.cu_seqlens(device), longest


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


assert _MASKS.keys() == MASKED_KINDS


def separate_samples(model: nn.Module, anatomy: Anatomy, device: torch.device, dtype: torch.dtype) -> None:
    """Install hooks, mixins and variable-length attention that keep packed samples apart; `shard_model` calls it.

    Args:
        anatomy: the anatomy of the full model; only the blocks of this rank's pipeline stages are changed.
        device: the device that the model computes on.
        dtype: the compute dtype.

    Collectives: none.
    """
    found = Separation.of(model, anatomy)
    if by_samples := varlen_refusal(model, found, device.type, dtype) is None:
        attend_by_samples(found.decoder)
    if not found.mixers and not found.needs_masks and not by_samples and not found.has_axes:
        return
    model.register_forward_pre_hook(partial(_enter, found.has_axes), with_kwargs=True, prepend=True)
    model.register_forward_hook(_leave, always_call=True)
    for name in found.mixers:
        mix_in(model.get_submodule(name), BySamples)
    if found.needs_masks:
        found.decoder.register_forward_pre_hook(partial(_give_masks, dtype), with_kwargs=True)


def _enter(has_axes: bool, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Record the sample boundaries before the model runs; a forward pre-hook.

    A model that numbers positions along several axes gets position ids `[4, B, S]`: the text's, then one for each axis.
    """
    # As in transformers, rows with a mask of padding are not packed.
    position_ids = kwargs.get("position_ids") if kwargs.get("attention_mask") is None else None
    if position_ids is not None and position_ids.shape[:-1] == (1,):
        # One row of them is for all rows, each of which has samples of its own.
        rows = next(x for x in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args) if x is not None)
        position_ids = position_ids.expand(len(rows), -1)
    borders = _borders(position_ids)
    packed_samples.set(None if borders is None else PackedSamples(borders))
    if borders is None or position_ids is None:
        return None
    return args, {**kwargs, "position_ids": position_ids.expand(4, -1, -1) if has_axes else position_ids}


def _leave(model: nn.Module, args: Any, output: Any) -> None:
    """Forget the sample boundaries after the model has run; a forward hook."""
    packed_samples.set(None)


def _borders(position_BS: torch.Tensor | None) -> Borders | None:
    """Return the (start, end) of each sample in the flattened rows `[B * S]`; None if each row is one sample.

    The host waits for the device if the position ids are on it.
    """
    if position_BS is None or position_BS.dim() != 2:
        return None
    follows = position_BS[:, 1:] == position_BS[:, :-1] + 1
    if bool(follows.all()):
        return None
    rows, length = position_BS.shape
    starts = [0] + [row * length + place + 1 for row, place in (~follows).nonzero().tolist()]
    starts = sorted({*starts, *range(0, rows * length, length)})
    return [*zip(starts, [*starts[1:], rows * length], strict=True)]


def _give_masks(dtype: torch.dtype, decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Give a decoder masks that separate the samples of packed rows; a forward pre-hook.

    It is for a decoder that would build its masks without position ids, but accepts masks.
    """
    if packed_samples.get() is None or kwargs.get("attention_mask") is not None:
        return None
    like = next(x for x in (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None)
    # transformers' mask functions read shape, dtype and device alone, so an empty tensor saves the embeddings' memory.
    embeds = torch.empty(*like.shape[:2], 0, dtype=dtype, device=like.device)
    masks = masks_of(decoder, mask_kinds(decoder.config), embeds, None, kwargs["position_ids"].to(like.device))
    return args, {**kwargs, "attention_mask": masks}


def masks_of(
    decoder: Any,
    kinds: Collection[str],
    embeds_BSX: torch.Tensor,
    padding_BS: torch.Tensor | None,
    position_BS: torch.Tensor,
) -> dict[str, Any]:
    """Build the attention masks for `kinds` of layers, by transformers' names, for a decoder that accepts them.

    Args:
        embeds_BSX: only its shape, dtype and device are read.
        padding_BS: the padding mask, or None.
        position_BS: position ids; they restart where a sample starts.
    """
    options = {
        "config": decoder.config,
        "inputs_embeds": embeds_BSX,
        "attention_mask": padding_BS,
        "past_key_values": None,
        "position_ids": position_BS,
    }
    # Recurrent layers are masked against padding alone.
    return {kind: _MASKS[kind](**options) if kind in _MASKS else padding_BS for kind in kinds}


def kinds_of_masks(config: Any) -> list[str]:
    """List all kinds of masks that a decoder with this configuration may look up."""
    settings = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    has_setting = [kind for kind, setting in settings.items() if getattr(config, setting, None) is not None]
    return ["full_attention", "linear_attention", *has_setting]


class BySamples(nn.Module):
    """Mixin for a module that carries state along its rows: runs it on each sample separately."""

    # Sizes and number of the groups differ in every batch, so compiled code would be compiled again and again.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        packed = packed_samples.get()
        if packed is None:
            return super().forward(*args, **kwargs)
        hidden_BSH = args[0] if args else kwargs["hidden_states"]
        kwargs = {key: value for key, value in kwargs.items() if not key.startswith(_BORDERS)}
        (rows, length), device = hidden_BSH.shape[:2], hidden_BSH.device
        # All layers share the groups, so they are built once in a forward.
        samples = packed.once((rows, length, device), partial(_Samples.of, (rows, length), device))
        outputs = []
        token = packed_samples.set(None)  # modules inside get rows of one sample each
        try:
            for group in samples.groups:
                group_args, group_kwargs = tree_map_only(torch.Tensor, partial(_of_group, group), (args, kwargs))
                with _numbered(self, group):
                    outputs.append(super().forward(*group_args, **group_kwargs))
        finally:
            packed_samples.reset(token)
        if not isinstance(outputs[0], tuple):
            return _of_rows(outputs, samples)
        return tuple(_of_rows(values, samples) for values in zip(*outputs, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """The places of samples of similar length in the rows."""

    shape: tuple[int, int]
    """(B, S) of the rows."""
    place_NL: torch.Tensor
    """Index of each position in the flattened rows; padding repeats the last position of its sample."""
    is_real_NL: torch.Tensor
    """False for padding."""

    @classmethod
    def of(cls, shape: tuple[int, int], device: torch.device, borders: Borders) -> "_Group":
        """Make the group of these samples, on `device`."""
        offset_L = torch.arange(max(end - start for start, end in borders))
        place_NL = torch.stack([(start + offset_L).clamp(max=end - 1) for start, end in borders])
        is_real_NL = torch.stack([start + offset_L < end for start, end in borders])
        return cls(shape, place_NL.to(device), is_real_NL.to(device))


@dataclass(frozen=True, slots=True, eq=False)
class _Samples:
    """The packed samples of a batch, in groups of similar length."""

    groups: tuple[_Group, ...]
    """The groups, each run as one padded batch."""
    real: tuple[tuple[int, ...], ...]
    """The length of each sample of each group, without padding."""
    order_T: torch.Tensor
    """For each position of the flattened rows, its index in the concatenated samples of all groups, without padding."""

    @classmethod
    def of(cls, shape: tuple[int, int], device: torch.device, borders: Borders) -> "_Samples":
        """Group the samples of rows of this shape, on `device`."""
        # Samples of similar length: padded to the longest, a group takes at most twice the positions.
        by_size: dict[int, Borders] = {}
        for start, end in borders:
            by_size.setdefault((end - start - 1).bit_length(), []).append((start, end))
        order_T = torch.cat([torch.arange(*each) for group in by_size.values() for each in group]).argsort()
        groups = tuple(_Group.of(shape, device, group) for group in by_size.values())
        lengths = tuple(tuple(end - start for start, end in group) for group in by_size.values())
        return cls(groups, lengths, order_T.to(device))


def _numbered(module: nn.Module, group: _Group) -> AbstractContextManager[None]:
    """Give adapters in a module the numbers of a group's tokens, for their dropout."""
    state = adapter_state(module)
    number_T = None if state is None else state.token_number_T
    if state is None or number_T is None or number_T.numel() != math.prod(group.shape):
        return nullcontext()
    return replaced(state, token_number_T=number_T[group.place_NL].reshape(-1))


def _of_group(group: _Group, x: torch.Tensor) -> torch.Tensor:
    """Cut a tensor of full rows into the samples of a group, one sample a row.

    Args:
        x: `[B or 1, S, ...]`, or a mask of all pairs `[B or 1, heads, S, S]`.

    Returns:
        `[N, L, ...]`, or a mask `[N, heads, L, L]` in which padded keys are hidden.

    Raises:
        InputError: a tensor of another shape.
    """
    rows, length = group.shape
    place_NL = group.place_NL
    if x.dim() == 4 and x.shape[0] in (1, rows) and x.shape[2:] == (length, length):
        row_N, at_NL = place_NL[:, 0] // length, place_NL % length
        pairs_BSSN = x.expand(rows, *x.shape[1:]).movedim(1, -1)
        mask = pairs_BSSN[row_N[:, None, None], at_NL[:, :, None], at_NL[:, None, :]].movedim(-1, 1)
        hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        return mask.masked_fill(~group.is_real_NL[:, None, None, :], hidden)
    if x.dim() < 2 or x.shape[0] not in (1, rows) or x.shape[1] != length:
        what = f"a layer that carries state along the sequence gets a tensor {tuple(x.shape)} beside its hidden states"
        raise cannot_pack(f"{what}, which cannot be cut into samples")
    return x.expand(rows, *x.shape[1:]).reshape(rows * length, *x.shape[2:])[place_NL]


def cannot_pack(why: str) -> InputError:
    return InputError(f"data.packing: {why}; set data.packing to false", key="data.packing-unsupported")


def _of_rows(values: Sequence[Any], samples: _Samples) -> torch.Tensor | None:
    """Put the outputs for groups of samples together as full rows.

    Args:
        values: one output `[N, L, X]` for each group: hidden states, or the indices of selected positions, which the
            attention of the next block reads sample by sample.

    Returns:
        `[B, S, X]`; None for an output that is not per position (attention weights), which nothing reads.
    """
    if not all(isinstance(value, torch.Tensor) and value.dim() == 3 for value in values):
        return None
    parts = [
        sample_LX[:length]
        for value_NLX, real in zip(values, samples.real, strict=True)
        for sample_LX, length in zip(value_NLX, real, strict=True)
    ]
    return torch.cat(parts).index_select(0, samples.order_T).view(*samples.groups[0].shape, -1)
