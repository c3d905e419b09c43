"""Packed rows: samples beside each other in one row must not see each other.

A row is packed where its position ids start again. `separate_samples` has modules that look along a row by a state of
their own (linear attention, state spaces, short convolutions) run on each sample by itself, from an empty state,
samples of about one length as one padded batch; and gives a decoder that would build its masks without position ids
those that keep samples apart. A row of one sample is left as it is.

    B rows, S positions of a whole row; N samples of about one length, L positions of the longest of them
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
_BORDERS = ("cu_seq", "max_length", "seq_idx")  # of whole rows, for kernels that a sample by itself does not need


def separate_samples(model: nn.Module, anatomy: Anatomy, device: torch.device, dtype: torch.dtype) -> None:
    """Let `model`, which computes in `dtype` on `device`, keep packed samples apart. Called by `shard`; no
    communication.

    `anatomy` is the whole model's: of pipeline stages, those blocks are changed that are here.
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
    """A hook before the model. One that numbers positions along several axes gets them for each, the text's first."""
    # As in transformers, rows with a mask of padding are not packed.
    borders = _borders(kwargs.get("position_ids")) if kwargs.get("attention_mask") is None else None
    packed_samples.set(None if borders is None else PackedSamples(borders))
    if borders is None or not has_axes:
        return None
    return args, {**kwargs, "position_ids": kwargs["position_ids"].expand(4, -1, -1)}


def _leave(model: nn.Module, args: Any, output: Any) -> None:
    packed_samples.set(None)


def _borders(position_BS: torch.Tensor | None) -> Borders | None:
    """Where the samples of packed rows lie in them, one behind the other; None where each row is one sample.

    Waits for the device if the position ids are there already.
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
    """A hook before a decoder that would build its masks without position ids, but takes those that it is given."""
    if packed_samples.get() is None or kwargs.get("attention_mask") is not None:
        return None
    like = next(x for x in (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None)
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
    """The masks of `kinds` of layers, by transformers' names, for a decoder that takes them. `embeds_BSX`: its shape,
    dtype and device count.
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
    """All kinds that a decoder of this configuration may look up, whatever it calls its layers."""
    settings = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    has_setting = [kind for kind, setting in settings.items() if getattr(config, setting, None) is not None]
    return ["full_attention", "linear_attention", *has_setting]


class BySamples(nn.Module):
    """In front of a module that carries state along its rows: runs it on each sample by itself."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        packed = packed_samples.get()
        if packed is None:
            return super().forward(*args, **kwargs)
        hidden_BSH = args[0] if args else kwargs["hidden_states"]
        kwargs = {key: value for key, value in kwargs.items() if not key.startswith(_BORDERS)}
        (rows, length), device = hidden_BSH.shape[:2], hidden_BSH.device
        samples = packed.once((rows, length, device), partial(_Samples.of, (rows, length), device))
        outputs = []
        token = packed_samples.set(None)  # for what is inside, each row is one sample
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
    """Samples of about one length together: padded to the longest of them they take at most twice the positions."""
    by_size: dict[int, Borders] = {}
    for start, end in borders:
        by_size.setdefault((end - start - 1).bit_length(), []).append((start, end))
    return list(by_size.values())


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Where the positions of samples of about one length lie in `shape` rows: flat, and which of them are real."""

    shape: tuple[int, int]
    place_NL: torch.Tensor
    is_real_NL: torch.Tensor

    @classmethod
    def of(cls, shape: tuple[int, int], device: torch.device, borders: Borders) -> "_Group":
        offset_L = torch.arange(max(end - start for start, end in borders))
        place_NL = torch.stack([(start + offset_L).clamp(max=end - 1) for start, end in borders])
        is_real_NL = torch.stack([start + offset_L < end for start, end in borders])
        return cls(shape, place_NL.to(device), is_real_NL.to(device))


@dataclass(frozen=True, slots=True, eq=False)
class _Samples:
    """Packed samples in groups. `order_T`: which of the groups' positions, padding left out, each position of the rows
    is; `real`: how many positions of each sample of each group.
    """

    groups: tuple[_Group, ...]
    real: tuple[tuple[int, ...], ...]
    order_T: torch.Tensor

    @classmethod
    def of(cls, shape: tuple[int, int], device: torch.device, borders: Borders) -> "_Samples":
        alike = _alike(borders)
        order_T = torch.cat([torch.arange(start, end) for group in alike for start, end in group]).argsort()
        groups = tuple(_Group.of(shape, device, group) for group in alike)
        return cls(groups, tuple(tuple(end - start for start, end in group) for group in alike), order_T.to(device))


def _of_group(group: _Group, x: torch.Tensor) -> torch.Tensor:
    """What a module gets for whole rows, for samples as rows of their own; masks of all pairs too, but for padding."""
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
    """What a module gave for groups of samples, as whole rows: hidden states, or the indices of chosen positions, which
    the attention of the next block reads sample by sample. What is not for each position (weights of attention) is left
    out, as nothing reads it.
    """
    if not all(isinstance(value, torch.Tensor) and value.dim() == 3 for value in values):
        return None
    parts = [
        sample_LX[:length]
        for value_NLX, real in zip(values, samples.real, strict=True)
        for sample_LX, length in zip(value_NLX, real, strict=True)
    ]
    return torch.cat(parts).index_select(0, samples.order_T).view(*samples.groups[0].shape, -1)
