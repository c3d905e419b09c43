"""Which blocks run in halves (`moe.interleave`), or why they cannot. Nothing communicates."""

import importlib.util
from collections.abc import Collection, Iterator, Sequence

from torch import nn

from expertmesh.anatomy import Anatomy, decoder_blocks, is_inside
from expertmesh.config.errors import InputError
from expertmesh.distributed.layout import Layout
from expertmesh.introspection.compute_dtype import Casts
from expertmesh.parallel.groups import Group
from expertmesh.parallel.pipeline import find_decoder
from expertmesh.state.stage_view import MetaTwin


def interleaved_blocks(
    model: nn.Module,
    anatomy: Anatomy,
    layout: Layout,
    dispatch: str,
    compiles: bool,
    groups: Sequence[Group],
    casts: Casts,
    twin: MetaTwin,
) -> dict[str, tuple[str, ...]]:
    """The experts modules of each block that has any. Raises `InputError`, with what stands against it."""
    for reason in _reasons(anatomy, layout, dispatch, compiles, groups, casts.buffers):
        raise _refused(f"{reason}; set moe.interleave to false")
    if importlib.util.find_spec("greenlet") is None:
        raise InputError(
            "moe.interleave: greenlet is not installed, whose coroutines run the halves of a block; pip install "
            '"expertmesh[interleave]", or set moe.interleave to false',
            key="moe.interleave-needs-greenlet",
        )
    blocks = decoder_blocks(anatomy)
    try:
        alone, why = find_decoder(model, anatomy, blocks, twin.module).hands_on_hidden_alone, "its blocks return more"
    except InputError as error:
        alone, why = False, str(error)
    if not alone:
        raise _refused(
            "the halves of a block run one beside the other, and it is not so, or not known, that the blocks of "
            f"{model.config.model_type} hand on hidden states alone ({why}); "  # type: ignore[union-attr]
            "set moe.interleave to false"
        )
    found = {block: tuple(spec.name for spec in anatomy.experts if is_inside(spec.name, block)) for block in blocks}
    return {block: experts for block, experts in found.items() if experts}


def _reasons(
    anatomy: Anatomy,
    layout: Layout,
    dispatch: str,
    compiles: bool,
    groups: Sequence[Group],
    cast_buffers: Collection[str],
) -> Iterator[str]:
    if layout.ep == 1:
        yield "with parallel.ep 1 no token travels"
    if dispatch not in ("local", "all_to_all"):
        yield f"moe.dispatch is {dispatch}, and only all_to_all lets tokens travel while something is computed"
    if layout.pp > 1:
        yield f"parallel.pp is {layout.pp}, whose stages run micro-batches in an order of their own"
    if compiles:
        yield "train.compile is true, and compiled parts are not proven inside of coroutines"
    for spec in anatomy.experts:
        if spec.call == "dense":
            yield f"{spec.name} is called with every token for every expert"
        if spec.call == "sorted":
            yield f"{spec.name} routes its tokens itself"
        if spec.post_norm:
            yield f"{spec.name} has a norm behind its experts, which FSDP2 gathers by itself"
        if around := [name for name in cast_buffers if name != spec.name and is_inside(spec.name, name)]:
            yield f"buffers of {around[0]} are in another dtype while it runs, and it runs twice at a time"
    for group in groups:
        if len(group.modules) > 1 and any(is_inside(group.modules[0], block) for block in anatomy.blocks):
            yield f"FSDP2 gathers {group.modules[0]} and {group.modules[1]} together, once for a call of both"


def _refused(why: str) -> InputError:
    return InputError(f"moe.interleave: {why}", key="moe.interleave-unsupported")
