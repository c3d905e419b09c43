"""Assign consecutive blocks to pipeline stages, so that the slowest stage has as little work as possible.

The work of a stage is the number of multiplications per token: the parameters that a token uses. Routed experts count
by the fraction that a token is sent to; the head counts, an embedding look-up does not. The number of blocks need not
be a multiple of the number of stages. Stage s is on pp rank s mod pp. This file does plain arithmetic on a model that
may be on meta; it never communicates.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from math import inf

from torch import nn

from expertmesh.anatomy import Anatomy
from expertmesh.config.errors import InputError
from expertmesh.distributed.layout import Layout


def plan_stages(
    model: nn.Module, anatomy: Anatomy, blocks: Sequence[str], layout: Layout, joined: Mapping[int, str]
) -> tuple[range, ...]:
    """Return the block numbers of each stage.

    Args:
        blocks: names of the decoder's blocks, in order.
        joined: blocks that must be on the stage of the block before them, by number, and the reason.

    Raises:
        InputError: there are fewer blocks, or fewer places to cut, than stages.
    """
    stages = layout.pp * layout.pp_virtual_stages
    refuse_few_blocks(len(blocks), layout)
    if len(blocks) - len(joined) < stages:
        family = model.config.model_type  # type: ignore[union-attr]
        starts = [str(number) for number in range(1, len(blocks)) if number not in joined]
        where = f"only before block {', '.join(starts)}" if starts else "nowhere"
        raise InputError(
            f"parallel.pp: {family} cannot be cut into {stages} stages, {where}: {next(iter(joined.values()))}; set "
            f"parallel.pp to {'less' if starts else '1'}",
            key="layout.pp-carries-more-than-hidden-state",
        )
    return balanced(_work(model, anatomy, blocks), stages, joined)


def refuse_few_blocks(blocks: int, layout: Layout) -> None:
    """Raise `InputError` if there are fewer blocks than stages."""
    stages = layout.pp * layout.pp_virtual_stages
    if blocks < stages:
        wanted = f"{layout.pp} × {layout.pp_virtual_stages} virtual stages" if layout.pp_virtual_stages > 1 else "pp"
        raise InputError(
            f"parallel.pp: {stages} stages ({wanted}) need as many blocks, and the model has {blocks}; lower "
            "parallel.pp or parallel.pp_virtual_stages",
            key="layout.pp-exceeds-blocks",
        )


def balanced(work: Sequence[float], stages: int, joined: Collection[int] = ()) -> tuple[range, ...]:
    """Cut `work` into `stages` consecutive parts so that the largest sum is minimal.

    No part is empty and none begins with an entry that is `joined`. Among the cuts with the smallest largest sum, the
    sum of squares is minimal, so the parts are as equal as possible. The caller ensures that there are enough places
    to cut.

    Returns:
        The range of indices of each part.
    """

    @cache
    def best(first: int, left: int) -> tuple[float, float, tuple[int, ...]]:
        if left == 1:
            total = sum(work[first:])
            return total, total**2, (len(work),)
        found: list[tuple[float, float, tuple[int, ...]]] = [(inf, inf, (len(work),))]
        for stop in range(first + 1, len(work) - left + 2):
            if stop in joined:
                continue
            own = sum(work[first:stop])
            largest, squares, stops = best(stop, left - 1)
            found.append((max(own, largest), squares + own**2, (stop, *stops)))
        # Tuples compare by the largest sum first, then by the sum of squares.
        return min(found)

    stops = best(0, stages)[2]
    return tuple(range(start, stop) for start, stop in zip((0, *stops), stops, strict=False))


def _work(model: nn.Module, anatomy: Anatomy, blocks: Sequence[str]) -> list[float]:
    """Count the multiplications per token of each block; the last one includes the head."""
    # A token meets top_k of num_experts experts.
    chosen = {
        f"{spec.name}.{name}": (spec.top_k or 1) / spec.num_experts
        for spec in anatomy.experts
        for name in spec.parameters
    }
    work = []
    for block in blocks:
        parameters = model.get_submodule(block).named_parameters(prefix=block)
        work.append(sum(parameter.numel() * chosen.get(name, 1.0) for name, parameter in parameters))
    # The embedding is a look-up without multiplications; the head multiplies with all of its weights.
    head = model.get_output_embeddings()  # type: ignore[operator]
    work[-1] += 0 if head is None else sum(parameter.numel() for parameter in head.parameters())
    return work
