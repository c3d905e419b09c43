"""Which positions of a row a rank holds: cp and tp ranks share rows and split their positions between them.

A model's own forward runs on whole rows up to its first block: embedding, masks and rotary tables are the family's
code and see every position. `split_blocks` then lets each rank keep its own positions, so that norms, routers and
dispatch see each token on one rank only; what needs more (attention) fetches it. Positions are cut into cp equal
parts, each of them into tp, both in order; rows are padded on the right until that comes out even.

Every gradient is then a partial sum over cp and tp, and FSDP2 adds them up over the same ranks as over the batch.

Also which positions belong together: a row is packed where its position ids start again. `separate_samples` has modules
that look along a row by a state of their own (linear attention, state spaces, short convolutions) run on each sample by
itself, from an empty state, samples of about one length as one padded batch; and gives a decoder that would build its
masks without position ids those that keep samples apart. A row of one sample is left as it is.

    B rows, S positions of a whole row, a rank holds S / (cp * tp) of them
    N samples of about one length, L positions of the longest of them
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.masking_utils import (
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)

from expertmesh.anatomy import Anatomy, decoder_blocks
from expertmesh.compat import tree_map_only
from expertmesh.config.errors import InputError
from expertmesh.distributed.layout import Layout
from expertmesh.distributed.mesh import Mesh
from expertmesh.experts.token_counts import Borders, PackedSamples, packed_samples
from expertmesh.introspection.attention import (
    MASKED_KINDS,
    decoder_of,
    has_position_axes,
    mask_kinds,
    needs_masks,
    recurrent_mixers,
)
from expertmesh.parallel.varlen import attend_by_samples, varlen_refusal
from expertmesh.state.patching import mix_in
from expertmesh.state.sharded_model import sharded

Batch = Mapping[str, torch.Tensor]
_MASKS = {
    "full_attention": create_causal_mask,
    "sliding_attention": create_sliding_window_causal_mask,
    "chunked_attention": create_chunked_causal_mask,
}
assert _MASKS.keys() == MASKED_KINDS
_BORDERS = ("cu_seq", "max_length", "seq_idx")  # of whole rows, for kernels that a sample by itself does not need
# Values for padded positions; position ids restart there, so that packed rows do not reach into the padding.
_PADDING = {"input_ids": 0, "labels": -100, "attention_mask": 0, "real_tokens": 0}
# What a block gets for each position, and which dim the positions are: for its attention, and beside it.
_OF_ATTENTION = {"position_embeddings": -2, "attention_scaling": -2, "position_ids": -1, "cache_position": -1}
_BESIDE_ATTENTION = {"per_layer_input": 1, "input_ids": 1}
# What attention hands on to the attention of the next block, for the positions that it computes.
_BETWEEN_ATTENTION = ("prev_topk_indices",)
# What some families' blocks hand on for each position beside hidden states.
_NOT_SPLIT = ("block_states", "conv_mask", "ple_input_ids", "prev_router_hidden_states")
# What it gets for whole rows, for its attention as well.
_WHOLE = ("hidden_states", "attention_mask", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


@dataclass(frozen=True, slots=True)
class SequenceShare:
    """This rank's part of the positions."""

    cp: int = 1
    tp: int = 1
    cp_rank: int = 0
    tp_rank: int = 0

    @property
    def parts(self) -> int:
        return self.cp * self.tp

    def own(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The positions that this rank holds between attention layers, of a tensor over all: a view."""
        return self._cut(x, dim, self.parts, self.cp_rank * self.tp + self.tp_rank)

    def of_context(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The positions that this rank's tp group holds together: what its attention computes with. A view."""
        return self._cut(x, dim, self.cp, self.cp_rank)

    def _cut(self, x: torch.Tensor, dim: int, parts: int, part: int) -> torch.Tensor:
        length, rest = divmod(x.shape[dim], parts)
        assert rest == 0, f"{x.shape[dim]} positions in {parts} parts"
        return x.narrow(dim, part * length, length)


def sequence_share(model: nn.Module) -> SequenceShare:
    """Of a model; all positions where it is on neither cp nor tp."""
    mesh = sharded(model).mesh
    return SequenceShare() if mesh is None else _share(mesh)


def _share(mesh: Mesh) -> SequenceShare:
    layout = mesh.layout
    return SequenceShare(layout.cp, layout.tp, mesh.coordinate("cp"), mesh.coordinate("tp"))


def padded(batch: Batch, share: SequenceShare) -> Batch:
    """`batch` with its rows padded on the right until each rank gets equally many positions; itself where they do.

    Padding is behind every token that could attend to it, has no target and does not count as real.
    """
    length = batch["input_ids"].shape[1]
    return lengthened(batch, length + -length % share.parts, f"cannot be cut into {share.parts} parts (cp × tp)")


def lengthened(batch: Batch, to: int, refusal: str) -> Batch:
    """`batch` with its rows padded on the right to `to` positions. `refusal`: why a key that cannot be is refused."""
    rows, length = batch["input_ids"].shape
    missing = to - length
    if not missing:
        return batch
    longer = dict(batch)
    if "attention_mask" not in batch and "real_tokens" not in batch:
        longer["real_tokens"] = torch.ones_like(batch["input_ids"], dtype=torch.bool)
    for key, tensor in longer.items():
        if key == "position_ids":
            more = torch.arange(missing, device=tensor.device, dtype=tensor.dtype).expand(*tensor.shape[:-1], missing)
            longer[key] = torch.cat([tensor, more], dim=-1)
        elif key in _PADDING:
            if tensor.shape[-1] != length:
                raise InputError(
                    f"{key} {tuple(tensor.shape)} does not fit input_ids {(rows, length)}", key="data.batch-shape"
                )
            longer[key] = F.pad(tensor, (0, missing), value=_PADDING[key])
        elif key not in ("row_numbers", "reference"):  # one of each row
            raise InputError(
                f"parallel: {key} of a batch {refusal}; pad rows to {to} positions, or leave it out",
                key="data.batch-not-paddable",
            )
    return longer


def refuse_blocks(model: nn.Module, anatomy: Anatomy, layout: Layout) -> None:
    """Raise `InputError` for a model whose blocks are known to take more than positions can be cut for.

    What is not known here is refused in the first forward.
    """
    if layout.cp * layout.tp == 1:
        return
    for name in decoder_blocks(anatomy):
        taken = inspect.signature(model.get_submodule(name).forward).parameters
        if odd := [key for key in _NOT_SPLIT if key in taken]:
            family = model.config.model_type  # type: ignore[union-attr]
            raise InputError(
                f"parallel: {name} of {family} gets {odd[0]} for each position, which cp and tp do not split; set "
                "parallel.cp and parallel.tp to 1",
                key="layout.input-per-position",
            )


def split_blocks(model: nn.Module, anatomy: Anatomy, mesh: Mesh, gathers: Callable[[str], bool]) -> None:
    """Let the decoder's blocks run on this rank's positions. Called by `parallelize`; no communication.

    The first block gets whole rows and cuts them; all get rotary tables for the positions that attention computes:
    those of a part of the row, or where the block's attention `gathers` it over cp, of all of it.
    """
    share = _share(mesh)
    if share.parts == 1:
        return
    for index, name in enumerate(decoder_blocks(anatomy)):
        block = model.get_submodule(name)
        entered = _Entered(share, name, list(inspect.signature(block.forward).parameters), index == 0, gathers(name))
        block.register_forward_pre_hook(partial(_enter_block, entered), with_kwargs=True)


@dataclass(frozen=True, slots=True)
class _Entered:
    """A block and what its arguments are called. `attends_whole`: its attention gets whole rows."""

    share: SequenceShare
    name: str
    arguments: Sequence[str]
    is_first: bool
    attends_whole: bool


def _enter_block(
    entered: _Entered, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A hook before a block: what it gets for whole rows becomes this rank's."""
    share, names = entered.share, entered.arguments
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.get("past_key_values") is not None:
        raise InputError(
            "parallel.cp and parallel.tp split rows that are whole, so a model on them cannot generate",
            key="layout.cannot-generate",
        )
    hidden = given["hidden_states"]
    length = hidden.shape[1] * (1 if entered.is_first else share.parts)
    if length % share.parts:
        raise InputError(
            f"parallel: rows of {length} positions cannot be cut into {share.parts} parts (cp × tp); pad them, or call "
            "causal_lm_loss, which does",
            key="layout.row-length",
        )
    here = {key: _part(entered, key, value, length) for key, value in given.items()}
    if entered.is_first:
        # A copy, not a view: the whole rows must not live until backward, nor see what a block does in place.
        here["hidden_states"] = share.own(hidden, 1).clone()
    return tuple(here[key] for key in names[: len(args)]), {key: here[key] for key in kwargs}


def _part(entered: _Entered, key: str, value: Any, length: int) -> Any:
    """What a block gets of one of its arguments, which is for `length` positions."""
    share, whole = entered.share, entered.attends_whole
    if key in _OF_ATTENTION:
        # A tensor, or several in a tuple or dict (a table for each kind of layer).
        cut = partial(_cut_positions, share.of_context, _OF_ATTENTION[key], length)
        return value if whole else tree_map_only(torch.Tensor, cut, value)
    if key in _BESIDE_ATTENTION and value is not None:
        return share.own(value, _BESIDE_ATTENTION[key])
    if isinstance(value, torch.Tensor) and key not in _WHOLE and not (key in _BETWEEN_ATTENTION and _joint(entered)):
        raise InputError(
            f"parallel: {entered.name} gets {key} {tuple(value.shape)}, which cp and tp do not know how to split",
            key="layout.input-per-position",
        )
    return value


def _joint(entered: _Entered) -> bool:
    """Whether attention computes the same positions in every block."""
    return entered.share.cp == 1 or entered.attends_whole


def _cut_positions(
    cut: Callable[[torch.Tensor, int], torch.Tensor], dim: int, length: int, x: torch.Tensor
) -> torch.Tensor:
    # Tables may be shared by all positions.
    return cut(x, dim) if x.shape[dim] == length else x


def separate_samples(model: nn.Module, anatomy: Anatomy, device: torch.device, dtype: torch.dtype) -> None:
    """Let `model`, which computes in `dtype` on `device`, keep packed samples apart. Called by `shard`; no
    communication.

    `anatomy` is the whole model's: of pipeline stages, those blocks are changed that are here.
    """
    mixers, asks = recurrent_mixers(model, anatomy), needs_masks(model, anatomy)
    if by_samples := varlen_refusal(model, anatomy, device, dtype) is None:
        attend_by_samples(decoder_of(model, anatomy))
    has_axes = has_position_axes(model)
    if not mixers and not asks and not by_samples and not has_axes:
        return
    model.register_forward_pre_hook(partial(_enter, has_axes), with_kwargs=True, prepend=True)
    model.register_forward_hook(_leave, always_call=True)
    for name in mixers or ():
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
    config: Any = decoder.config
    like = next(x for x in (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None)
    options = {
        "config": config,
        "inputs_embeds": torch.empty(*like.shape[:2], 0, dtype=dtype, device=like.device),
        "attention_mask": None,
        "past_key_values": None,
        "position_ids": kwargs["position_ids"].to(like.device),
    }
    return args, {**kwargs, "attention_mask": {kind: _mask(kind, options) for kind in mask_kinds(config)}}


def _mask(kind: str, options: Mapping[str, Any]) -> Any:
    return _MASKS[kind](**options) if kind in _MASKS else None  # recurrent layers are masked against padding alone


class BySamples(nn.Module):
    """In front of a module that carries state along its rows: runs it on each sample by itself."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        packed = packed_samples.get()
        if packed is None:
            return super().forward(*args, **kwargs)
        hidden_BSH = args[0] if args else kwargs["hidden_states"]
        kwargs = {key: value for key, value in kwargs.items() if not key.startswith(_BORDERS)}
        groups, outputs = _alike(packed.borders), []
        token = packed_samples.set(None)  # for what is inside, each row is one sample
        try:
            for samples in groups:
                cut = partial(_of_samples, _Places.of(samples, hidden_BSH))
                there_args, there_kwargs = tree_map_only(torch.Tensor, cut, (args, kwargs))
                outputs.append(super().forward(*there_args, **there_kwargs))
        finally:
            packed_samples.reset(token)
        if not isinstance(outputs[0], tuple):
            return _of_rows(outputs, groups, hidden_BSH.shape[:2])
        return tuple(_of_rows(values, groups, hidden_BSH.shape[:2]) for values in zip(*outputs, strict=True))


def _alike(borders: Borders) -> list[Borders]:
    """Samples of about one length together: padded to the longest of them they take at most twice the positions."""
    by_size: dict[int, Borders] = {}
    for start, end in borders:
        by_size.setdefault((end - start - 1).bit_length(), []).append((start, end))
    return list(by_size.values())


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the positions of samples of about one length lie in `shape` rows: flat, and which of them are real."""

    shape: tuple[int, int]
    place_NL: torch.Tensor
    is_real_NL: torch.Tensor

    @classmethod
    def of(cls, samples: Borders, like_BSH: torch.Tensor) -> "_Places":
        offset_L = torch.arange(max(end - start for start, end in samples))
        place_NL = torch.stack([(start + offset_L).clamp(max=end - 1) for start, end in samples])
        is_real_NL = torch.stack([start + offset_L < end for start, end in samples])
        rows, length = like_BSH.shape[:2]
        return cls((rows, length), place_NL.to(like_BSH.device), is_real_NL.to(like_BSH.device))


def _of_samples(places: _Places, x: torch.Tensor) -> torch.Tensor:
    """What a module gets for whole rows, for samples as rows of their own; masks of all pairs too, but for padding."""
    rows, length = places.shape
    place_NL = places.place_NL
    if x.dim() == 4 and x.shape[0] in (1, rows) and x.shape[2:] == (length, length):
        row_N, at_NL = place_NL[:, 0] // length, place_NL % length
        pairs_BSSN = x.expand(rows, *x.shape[1:]).movedim(1, -1)
        mask = pairs_BSSN[row_N[:, None, None], at_NL[:, :, None], at_NL[:, None, :]].movedim(-1, 1)
        hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        return mask.masked_fill(~places.is_real_NL[:, None, None, :], hidden)
    if x.dim() < 2 or x.shape[0] not in (1, rows) or x.shape[1] != length:
        raise InputError(
            f"data.packing: a layer that carries state along the sequence gets a tensor {tuple(x.shape)} beside its "
            "hidden states, which cannot be cut into samples; set data.packing to false",
            key="data.packing-unsupported",
        )
    return x.expand(rows, *x.shape[1:]).reshape(rows * length, *x.shape[2:])[place_NL]


def _of_rows(values: Sequence[Any], groups: Sequence[Borders], shape: torch.Size) -> torch.Tensor | None:
    """What a module gave for groups of samples, as whole rows: hidden states, or the indices of chosen positions, which
    the attention of the next block reads sample by sample. What is not for each position (weights of attention) is left
    out, as nothing reads it.
    """
    if not all(isinstance(value, torch.Tensor) and value.dim() == 3 for value in values):
        return None
    parts, places = [], []
    for value_NLX, samples in zip(values, groups, strict=True):
        for sample_LX, (start, end) in zip(value_NLX, samples, strict=True):
            parts.append(sample_LX[: end - start])
            places.append(torch.arange(start, end))
    order = torch.cat(places).argsort().to(parts[0].device)
    return torch.cat(parts).index_select(0, order).view(*shape, -1)
