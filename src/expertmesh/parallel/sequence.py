"""Split the positions of a row between the cp and tp ranks that share it.

The model's forward runs on full rows up to its first block: embedding, masks and rotary tables are the family's code
and see every position. `split_blocks` then leaves each rank its local positions, so norms, routers and dispatch see
each token on one rank only; attention gathers more. Positions are cut into cp equal parts and each of them into tp,
both in order; rows are padded on the right until the parts are equal. So every gradient is a partial sum over cp and
tp, and FSDP2 sums them over the same ranks as the batch.

    B rows, S positions of a full row, a rank holds S / (cp * tp) of them
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from expertmesh.anatomy import Anatomy, decoder_blocks, head_of, is_classifier
from expertmesh.compat import CACHE_ARGUMENTS, tree_map_only
from expertmesh.config.errors import InputError
from expertmesh.distributed.layout import Layout
from expertmesh.distributed.mesh import Mesh
from expertmesh.introspection.attention import decoder_of, takes_masks
from expertmesh.parallel.packing import kinds_of_masks, masks_of
from expertmesh.state.model_view import sharded
from expertmesh.state.other_code import ranks_share_rows

Batch = Mapping[str, torch.Tensor]
# Values for padded positions. Position ids restart there, so that the padding is a separate sample of a packed row.
_PADDING = {"input_ids": 0, "labels": -100, "attention_mask": 0, "real_tokens": 0}
# Entries of a batch with one value of each row, which the model does not take.
OF_ROWS = ("row_numbers", "reference", "desirable", "teacher")
# Arguments of a block with values per position, and the dim of the positions: for its attention, and for other code.
_OF_ATTENTION = {"position_embeddings": -2, "attention_scaling": -2, "position_ids": -1, "cache_position": -1}
_BESIDE_ATTENTION = {"per_layer_input": 1, "input_ids": 1}
# Results that attention passes to the attention of the next block, for the positions that it computes.
_BETWEEN_ATTENTION = ("prev_topk_indices",)
# Hidden states that a decoder stores between its blocks: the decoder itself must then see this rank's positions alone.
_STORED_BY_DECODER = "block_states"
# Values that a decoder adds to hidden states of full rows between its first blocks.
_ADDED_BY_DECODER = "deepstack_visual_embeds"
# Arguments of a block that earlier blocks computed for the local positions.
_BETWEEN_BLOCKS = {"prev_router_hidden_states", _STORED_BY_DECODER}
# Arguments of a block for full rows, which attention and other layers that gather rows need.
_FULL_ROWS = {"hidden_states", "attention_mask", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
_FULL_ROWS |= {"conv_mask", "ple_input_ids"}
# Kinds of rotary tables that depend on the largest position of all rows.
_BY_LENGTH = {"dynamic", "longrope"}


@dataclass(frozen=True, slots=True)
class SequenceShare:
    """This rank's part of the positions."""

    cp: int = 1
    """The size of the cp axis."""
    tp: int = 1
    """The size of the tp axis."""
    cp_rank: int = 0
    """The coordinate on cp."""
    tp_rank: int = 0
    """The coordinate on tp."""
    rotates_by_length: bool = False
    """True if the model's rotary tables depend on the largest position of all rows."""

    @property
    def parts(self) -> int:
        """The number of ranks that share a row."""
        return self.cp * self.tp

    def local(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return a view of the positions of `x` that this rank holds between attention layers."""
        return self._cut(x, dim, self.parts, self.cp_rank * self.tp + self.tp_rank)

    def of_context(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return a view of the positions of `x` that this rank's tp group holds together, which attention computes."""
        return self._cut(x, dim, self.cp, self.cp_rank)

    def _cut(self, x: torch.Tensor, dim: int, parts: int, part: int) -> torch.Tensor:
        length, remainder = divmod(x.shape[dim], parts)
        assert remainder == 0, f"{x.shape[dim]} positions in {parts} parts"
        return x.narrow(dim, part * length, length)


def sequence_share(model: nn.Module) -> SequenceShare:
    """Return this rank's part of the positions in a model; all positions if it uses neither cp nor tp."""
    mesh = sharded(model).mesh
    if mesh is None:
        return SequenceShare()
    config: Any = model.config
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    # A family may have parameters of each kind of layer.
    each = [rope, *(of_kind for of_kind in rope.values() if isinstance(of_kind, dict))]
    return replace(_share(mesh), rotates_by_length=any(kind.get("rope_type") in _BY_LENGTH for kind in each))


def _share(mesh: Mesh) -> SequenceShare:
    """Return the part of this rank in a mesh."""
    layout = mesh.layout
    return SequenceShare(layout.cp, layout.tp, mesh.coordinate("cp"), mesh.coordinate("tp"))


def padded(batch: Batch, share: SequenceShare) -> Batch:
    """Pad the rows of `batch` on the right until all ranks get equally many positions.

    Padding comes after all tokens, so none attends to it; it has no target and does not count as real.

    Returns:
        The padded batch; `batch` if it needs no padding.

    Raises:
        InputError: a key of the batch cannot be padded.
    """
    length = batch["input_ids"].shape[1]
    why = f"cannot be cut into {share.parts} parts (cp × tp)"
    return lengthened(batch, length + -length % share.parts, why, share.rotates_by_length)


def lengthened(batch: Batch, to: int, refusal: str, rotates_by_length: bool) -> Batch:
    """Pad the rows of `batch` on the right.

    Args:
        to: the number of positions after padding.
        refusal: the reason in the error message for a key that cannot be padded.
        rotates_by_length: True if no position of the padding may be larger than all of the rows.

    Returns:
        The padded batch; `batch` if its rows have `to` positions.

    Raises:
        InputError: a key has another shape than input_ids, or cannot be padded.
    """
    rows, length = batch["input_ids"].shape
    missing = to - length
    if not missing:
        return batch
    longer = dict(batch)
    if "attention_mask" not in batch and "real_tokens" not in batch:
        # Without a mask, nothing else in the batch would mark the padding.
        longer["real_tokens"] = torch.ones_like(batch["input_ids"], dtype=torch.bool)
    if rotates_by_length and "position_ids" not in batch:
        # The model would number the padding too. A mask says that its positions, which restart, are no sample's.
        longer.setdefault("attention_mask", torch.ones_like(batch["input_ids"]))
        longer["position_ids"] = torch.arange(length, device=batch["input_ids"].device)[None]
    for key, tensor in longer.items():
        if key == "position_ids":
            # It restarts, so that no position is larger than those of the rows; on a device nothing waits for it.
            more = torch.arange(missing, device=tensor.device, dtype=tensor.dtype) % (tensor.amax() + 1)
            longer[key] = torch.cat([tensor, more.expand(*tensor.shape[:-1], missing)], dim=-1)
        elif key in _PADDING and tensor.dim() > 1:
            if tensor.shape[-1] != length:
                raise InputError(
                    f"{key} {tuple(tensor.shape)} does not fit input_ids {(rows, length)}", key="data.batch-shape"
                )
            longer[key] = F.pad(tensor, (0, missing), value=_PADDING[key])
        elif key == "routes":
            # Recorded ones may have the positions of the padding; any other shape is refused on all ranks together.
            pads = 0 if tensor.shape[1:2] == (to,) else missing
            longer[key] = F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, pads), value=-1)
        elif key not in (*OF_ROWS, "labels"):  # a classifier's are of rows
            raise not_paddable(f"{key} of a batch {refusal}", f"pad rows to {to} positions, or leave it out")
    return longer


def not_paddable(what: str, mend: str) -> InputError:
    return InputError(f"parallel: {what}; {mend}", key="data.batch-not-paddable")


def refuse_blocks(model: nn.Module, anatomy: Anatomy, layout: Layout) -> None:
    """Raise `InputError` for a decoder that stores hidden states of all positions and builds its masks itself.

    Other inputs that cannot be split are refused in the first forward.
    """
    decoder: Any = decoder_of(model, anatomy)
    if layout.cp * layout.tp > 1 and _decoder_stores(model, anatomy) and not takes_masks(decoder):
        raise InputError(
            f"parallel: the decoder of {decoder.config.model_type} keeps {_STORED_BY_DECODER} of all positions and "
            "makes its masks itself, so cp and tp cannot split positions; set parallel.cp and parallel.tp to 1",
            key="layout.input-per-position",
        )


def _decoder_stores(model: nn.Module, anatomy: Anatomy) -> bool:
    """Return whether the decoder stores hidden states between its blocks: their forward takes them."""
    blocks = map(model.get_submodule, decoder_blocks(anatomy))
    return any(_STORED_BY_DECODER in inspect.signature(block.forward).parameters for block in blocks)


def split_blocks(model: nn.Module, anatomy: Anatomy, mesh: Mesh, gathers: Callable[[str], bool]) -> None:
    """Install hooks that make the decoder's blocks run on this rank's positions; `shard_model` calls it.

    The first block cuts full rows, or the decoder does if it stores hidden states between blocks. All blocks get rotary
    tables for the positions that their attention computes: those of the tp group, or of the full row if it is gathered.

    Args:
        anatomy: the anatomy of the full model.
        gathers: returns whether the attention of a block gathers full rows over cp.

    Collectives: none.
    """
    share = _share(mesh)
    if share.parts == 1:
        return
    if is_classifier(model):
        head_of(model).register_forward_pre_hook(partial(_refuse_call, mesh.layout))
    decoder: Any = decoder_of(model, anatomy)
    decoder.register_forward_pre_hook(_refuse_added, with_kwargs=True)
    if decoder_cuts := _decoder_stores(model, anatomy):
        decoder.register_forward_pre_hook(partial(_enter_decoder, share), with_kwargs=True)
    for index, name in enumerate(decoder_blocks(anatomy)):
        block = model.get_submodule(name)
        arguments, cuts = list(inspect.signature(block.forward).parameters), index == 0 and not decoder_cuts
        entered = _Entered(share, name, arguments, cuts, gathers(name))
        block.register_forward_pre_hook(partial(_enter_block, entered), with_kwargs=True)


def _refuse_call(layout: Layout, head: nn.Module, args: Any) -> None:
    """Refuse a call of a classifier itself, whose head would look for the last token in a part of each row."""
    raise ranks_share_rows("a sequence classifier is called", layout, "use em.forward_backward")


def _refuse_added(decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise `InputError` for values that the decoder adds to hidden states itself; a pre-hook."""
    if kwargs.get(_ADDED_BY_DECODER) is not None:
        raise InputError(
            f"parallel: the decoder adds {_ADDED_BY_DECODER} of images to whole rows between its blocks, which cp and "
            "tp do not know how to split; set parallel.cp and parallel.tp to 1",
            key="layout.input-per-position",
        )


def _enter_decoder(share: SequenceShare, decoder: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Give a decoder embeddings of this rank's positions and masks and position ids of full rows; a pre-hook."""
    given = dict(zip(inspect.signature(decoder.forward).parameters, args, strict=False)) | kwargs
    embeds, position_ids, masks = (given.get(key) for key in ("inputs_embeds", "position_ids", "attention_mask"))
    rows: torch.Tensor = given["input_ids"] if embeds is None else embeds
    refuse_length(rows.shape[1], share)
    if position_ids is None:
        position_ids = torch.arange(rows.shape[1], device=rows.device)[None]
    local = share.local(rows, 1)
    # Only local positions are embedded. A clone, because a view would keep the full rows alive until backward.
    embeds = decoder.get_input_embeddings()(local) if embeds is None else local.clone()
    if not isinstance(masks, dict):
        like = embeds.new_empty(*rows.shape[:2], 0)
        masks = masks_of(decoder, kinds_of_masks(decoder.config), like, masks, position_ids)
    changed = {"input_ids": None, "inputs_embeds": embeds, "position_ids": position_ids, "attention_mask": masks}
    return (), given | changed


def refuse_length(length: int, share: SequenceShare) -> None:
    """Raise `InputError` for rows that cannot be cut into equal parts."""
    if length % share.parts:
        raise InputError(
            f"parallel: rows of {length} positions cannot be cut into {share.parts} parts (cp × tp); pad them, or call "
            "causal_lm_loss, which does",
            key="layout.row-length",
        )


@dataclass(frozen=True, slots=True)
class _Entered:
    """A decoder block, as its hook needs it."""

    share: SequenceShare
    """This rank's part of the positions."""
    name: str
    """Name of the block."""
    arguments: Sequence[str]
    """Names of the arguments of its forward, in order."""
    cuts: bool
    """True if it gets hidden states of full rows and cuts them."""
    gathers: bool
    """True if its attention gathers full rows over cp."""


def _enter_block(
    entered: _Entered, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cut the arguments of a block to the positions that it computes; a forward pre-hook."""
    share, names = entered.share, entered.arguments
    given = dict(zip(names, args, strict=False)) | kwargs
    if any(given.get(name) is not None for name in CACHE_ARGUMENTS):
        raise InputError(
            "parallel.cp and parallel.tp split rows that are whole, so a model on them cannot generate",
            key="layout.cannot-generate",
        )
    hidden = given["hidden_states"]
    length = hidden.shape[1] * (1 if entered.cuts else share.parts)
    refuse_length(length, share)
    local = {key: _part(entered, key, value, length) for key, value in given.items()}
    if entered.cuts:
        # A copy, not a view: the full rows must not live until backward, nor be changed by in-place code of a block.
        local["hidden_states"] = share.local(hidden, 1).clone()
    return tuple(local[key] for key in names[: len(args)]), {key: local[key] for key in kwargs}


def _part(entered: _Entered, key: str, value: Any, length: int) -> Any:
    """Return the part of one argument that a block gets, out of `length` positions.

    Raises:
        InputError: a tensor that is not known to be per position or for full rows.
    """
    share = entered.share
    if key in _OF_ATTENTION:
        # A tensor, or several in a tuple or dict (a table for each kind of layer).
        cut = partial(_cut_positions, share.of_context, _OF_ATTENTION[key], length)
        return value if entered.gathers else tree_map_only(torch.Tensor, cut, value)
    if key in _BESIDE_ATTENTION and value is not None:
        return share.local(value, _BESIDE_ATTENTION[key])
    # Results of the attention before fit only if it computes the same positions: without cp, or those of full rows.
    known = key in _FULL_ROWS | _BETWEEN_BLOCKS
    known |= key in _BETWEEN_ATTENTION and (share.cp == 1 or entered.gathers)
    if isinstance(value, torch.Tensor) and not known:
        raise InputError(
            f"parallel: {entered.name} gets {key} {tuple(value.shape)}, which cp and tp do not know how to split",
            key="layout.input-per-position",
        )
    return value


def _cut_positions(
    cut: Callable[[torch.Tensor, int], torch.Tensor], dim: int, length: int, x: torch.Tensor
) -> torch.Tensor:
    # A table may be broadcast over the positions, with size 1.
    return cut(x, dim) if x.shape[dim] == length else x
