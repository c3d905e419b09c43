"""Which positions of a row a rank holds: cp and tp ranks share rows and split their positions between them.

A model's own forward runs on whole rows up to its first block: embedding, masks and rotary tables are the family's
code and see every position. `split_blocks` then lets each rank keep its own positions, so that norms, routers and
dispatch see each token on one rank only; what needs more (attention) fetches it. Positions are cut into cp equal
parts, each of them into tp, both in order; rows are padded on the right until that comes out even.

Every gradient is then a partial sum over cp and tp, and FSDP2 adds them up over the same ranks as over the batch.

    B rows, S positions of a whole row, a rank holds S / (cp * tp) of them
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from expertmesh.anatomy import Anatomy, decoder_blocks
from expertmesh.compat import tree_map_only
from expertmesh.config.errors import InputError
from expertmesh.distributed.layout import Layout
from expertmesh.distributed.mesh import Mesh
from expertmesh.introspection.attention import decoder_of
from expertmesh.introspection.source_code import takes_masks
from expertmesh.parallel.packing.by_samples import kinds_of_masks, masks_of
from expertmesh.state.sharded_model import sharded

Batch = Mapping[str, torch.Tensor]
# Values for padded positions; position ids restart there, so that packed rows do not reach into the padding.
_PADDING = {"input_ids": 0, "labels": -100, "attention_mask": 0, "real_tokens": 0}
# What a block gets for each position, and which dim the positions are: for its attention, and beside it.
_OF_ATTENTION = {"position_embeddings": -2, "attention_scaling": -2, "position_ids": -1, "cache_position": -1}
_BESIDE_ATTENTION = {"per_layer_input": 1, "input_ids": 1}
# What attention hands on to the attention of the next block, for the positions that it computes.
_BETWEEN_ATTENTION = ("prev_topk_indices",)
# What a decoder keeps of hidden states between its blocks: its own code then has to see this rank's positions alone.
_KEPT_BY_DECODER = "block_states"
# What a decoder adds to hidden states of whole rows between its first blocks.
_ADDED_BY_DECODER = "deepstack_visual_embeds"
# What a block gets for its own positions, from the blocks before it.
_BETWEEN_BLOCKS = {"prev_router_hidden_states", _KEPT_BY_DECODER}
# What it gets for whole rows, for its attention and whatever else gathers them.
_WHOLE = {"hidden_states", "attention_mask", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
_WHOLE |= {"conv_mask", "ple_input_ids"}


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
    """Raise `InputError` for a model whose decoder keeps what cannot be cut for it.

    What is not known here is refused in the first forward.
    """
    decoder: Any = decoder_of(model, anatomy)
    if layout.cp * layout.tp > 1 and _decoder_keeps(model, anatomy) and not takes_masks(decoder):
        raise InputError(
            f"parallel: the decoder of {decoder.config.model_type} keeps {_KEPT_BY_DECODER} of all positions and makes "
            "its masks itself, so cp and tp cannot split positions; set parallel.cp and parallel.tp to 1",
            key="layout.input-per-position",
        )


def _decoder_keeps(model: nn.Module, anatomy: Anatomy) -> bool:
    blocks = map(model.get_submodule, decoder_blocks(anatomy))
    return any(_KEPT_BY_DECODER in inspect.signature(block.forward).parameters for block in blocks)


def split_blocks(model: nn.Module, anatomy: Anatomy, mesh: Mesh, gathers: Callable[[str], bool]) -> None:
    """Let the decoder's blocks run on this rank's positions. Called by `parallelize`; no communication.

    The first block gets whole rows and cuts them, or the decoder does if it keeps hidden states between blocks; all get
    rotary tables for the positions that attention computes: those of a part of the row, or where the block's attention
    `gathers` it over cp, of all of it.
    """
    share = _share(mesh)
    if share.parts == 1:
        return
    decoder: Any = decoder_of(model, anatomy)
    decoder.register_forward_pre_hook(_refuse_added, with_kwargs=True)
    if decoder_cuts := _decoder_keeps(model, anatomy):
        decoder.register_forward_pre_hook(partial(_enter_decoder, share), with_kwargs=True)
    for index, name in enumerate(decoder_blocks(anatomy)):
        block = model.get_submodule(name)
        arguments, cuts = list(inspect.signature(block.forward).parameters), index == 0 and not decoder_cuts
        entered = _Entered(share, name, arguments, cuts, gathers(name))
        block.register_forward_pre_hook(partial(_enter_block, entered), with_kwargs=True)


def _refuse_added(decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    if kwargs.get(_ADDED_BY_DECODER) is not None:
        raise InputError(
            f"parallel: the decoder adds {_ADDED_BY_DECODER} of images to whole rows between its blocks, which cp and "
            "tp do not know how to split; set parallel.cp and parallel.tp to 1",
            key="layout.input-per-position",
        )


def _enter_decoder(share: SequenceShare, decoder: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A hook before a decoder: it gets embeddings of this rank's positions, masks and position ids of whole rows."""
    given = dict(zip(inspect.signature(decoder.forward).parameters, args, strict=False)) | kwargs
    embeds, position_ids, masks = (given.get(key) for key in ("inputs_embeds", "position_ids", "attention_mask"))
    rows: torch.Tensor = given["input_ids"] if embeds is None else embeds
    _refuse_length(rows.shape[1], share)
    if position_ids is None:
        position_ids = torch.arange(rows.shape[1], device=rows.device)[None]
    own = share.own(rows, 1)
    embeds = decoder.get_input_embeddings()(own) if embeds is None else own.clone()
    if not isinstance(masks, dict):
        like = embeds.new_empty(*rows.shape[:2], 0)
        masks = masks_of(decoder, kinds_of_masks(decoder.config), like, masks, position_ids)
    there = {"input_ids": None, "inputs_embeds": embeds, "position_ids": position_ids, "attention_mask": masks}
    return (), given | there


def _refuse_length(length: int, share: SequenceShare) -> None:
    if length % share.parts:
        raise InputError(
            f"parallel: rows of {length} positions cannot be cut into {share.parts} parts (cp × tp); pad them, or call "
            "causal_lm_loss, which does",
            key="layout.row-length",
        )


@dataclass(frozen=True, slots=True)
class _Entered:
    """A block and what its arguments are called. `cuts`: it gets hidden states of whole rows, `attends_whole`: its
    attention does.
    """

    share: SequenceShare
    name: str
    arguments: Sequence[str]
    cuts: bool
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
    length = hidden.shape[1] * (1 if entered.cuts else share.parts)
    _refuse_length(length, share)
    here = {key: _part(entered, key, value, length) for key, value in given.items()}
    if entered.cuts:
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
    known = key in _WHOLE | _BETWEEN_BLOCKS or (key in _BETWEEN_ATTENTION and _joint(entered))
    if isinstance(value, torch.Tensor) and not known:
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
