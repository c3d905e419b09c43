"""Keep the samples of packed rows apart: samples in one row must not see each other.

A row is packed if its position ids restart. `separate_samples` makes modules that carry a state along a row (linear
attention, state spaces, short convolutions) run on each sample separately, from an empty state; samples of similar
length run as one padded batch. A decoder that would build its masks without position ids gets masks that separate the
samples. A row of one sample is not changed.

    B rows, S positions of a full row; N samples of similar length, L positions of the longest of them
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import (
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)

from expertmesh.anatomy import Anatomy
from expertmesh.compat import tree_map_only
from expertmesh.config.errors import InputError
from expertmesh.experts.token_counts import Borders, PackedSamples, packed_samples
from expertmesh.introspection.attention import (
    MASKED_KINDS,
    decoder_of,
    has_position_axes,
    mask_kinds,
    needs_masks,
    recurrent_mixers,
)
from expertmesh.parallel.packing.varlen import attend_by_samples, varlen_refusal
from expertmesh.state.patching import mix_in

_MASKS = {
    "full_attention": create_causal_mask,
    "sliding_attention": create_sliding_window_causal_mask,
    "chunked_attention": create_chunked_causal_mask,
}
assert _MASKS.keys() == MASKED_KINDS
# Sample boundaries in full rows, for kernels of packed rows; a module that runs on single samples must not get them.
_BORDERS = ("cu_seq", "max_length", "seq_idx")


def separate_samples(model: nn.Module, anatomy: Anatomy, device: torch.device, dtype: torch.dtype) -> None:
    """Install hooks, mixins and variable-length attention that keep packed samples apart; `shard` calls it.

    Args:
        anatomy: the anatomy of the full model; only the blocks of this rank's pipeline stages are changed.
        device: the device that the model computes on.
        dtype: the compute dtype.

    Collectives: none.
    """
    mixers, asks = recurrent_mixers(model, anatomy), needs_masks(model, anatomy)
    if by_samples := varlen_refusal(model, anatomy, device.type, dtype) is None:
        attend_by_samples(decoder_of(model, anatomy))
    has_axes = has_position_axes(model)
    if not mixers and not asks and not by_samples and not has_axes:
        return
    model.register_forward_pre_hook(partial(_enter, has_axes), with_kwargs=True, prepend=True)
    model.register_forward_hook(_leave, always_call=True)
    for name in mixers:
        mix_in(model.get_submodule(name), BySamples)
    if asks:
        decoder_of(model, anatomy).register_forward_pre_hook(partial(_give_masks, dtype), with_kwargs=True)


def _enter(has_axes: bool, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Record the sample boundaries before the model runs; a forward pre-hook.

    A model that numbers positions along several axes gets position ids `[4, B, S]`: the text's, then one for each axis.
    """
    # As in transformers, rows with a mask of padding are not packed.
    borders = _borders(kwargs.get("position_ids")) if kwargs.get("attention_mask") is None else None
    packed_samples.set(None if borders is None else PackedSamples(borders))
    if borders is None or not has_axes:
        return None
    return args, {**kwargs, "position_ids": kwargs["position_ids"].expand(4, -1, -1)}


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
                there_args, there_kwargs = tree_map_only(torch.Tensor, partial(_of_group, group), (args, kwargs))
                outputs.append(super().forward(*there_args, **there_kwargs))
        finally:
            packed_samples.reset(token)
        if not isinstance(outputs[0], tuple):
            return _of_rows(outputs, samples)
        return tuple(_of_rows(values, samples) for values in zip(*outputs, strict=True))


def _alike(borders: Borders) -> list[Borders]:
    """Group samples of similar length: padded to the longest, a group takes at most twice the positions."""
    by_size: dict[int, Borders] = {}
    for start, end in borders:
        by_size.setdefault((end - start - 1).bit_length(), []).append((start, end))
    return list(by_size.values())


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
        alike = _alike(borders)
        order_T = torch.cat([torch.arange(start, end) for group in alike for start, end in group]).argsort()
        groups = tuple(_Group.of(shape, device, group) for group in alike)
        return cls(groups, tuple(tuple(end - start for start, end in group) for group in alike), order_T.to(device))


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
        raise InputError(
            f"data.packing: a layer that carries state along the sequence gets a tensor {tuple(x.shape)} beside its "
            "hidden states, which cannot be cut into samples; set data.packing to false",
            key="data.packing-unsupported",
        )
    return x.expand(rows, *x.shape[1:]).reshape(rows * length, *x.shape[2:])[place_NL]


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
