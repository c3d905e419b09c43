"""Which blocks are on which pipeline stage: consecutive ones, so that the slowest stage has as little work as possible.

A stage's work is counted in multiplications per token: the parameters that a token meets, so of routed experts the
share that it chooses; the head counts, looking up an embedding does not. The number of blocks need not be a multiple of
the number of stages. Stage s is on pp rank s mod pp. Plain arithmetic on a model that may be on meta.
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
    """The numbers of each stage's blocks; those that are `joined` are on the stage of the block before, for a reason.
    Raises `InputError` if there are fewer blocks, or fewer places to cut, than stages.
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
    """Cut `work` into so many consecutive parts, none empty and none beginning with one that is `joined`, whose largest
    sum is as small as can be; of such cuts one whose parts are the most equal. There have to be that many places.
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
        return min(found)

    stops = best(0, stages)[2]
    return tuple(range(start, stop) for start, stop in zip((0, *stops), stops, strict=False))


def _work(model: nn.Module, anatomy: Anatomy, blocks: Sequence[str]) -> list[float]:
    chosen = {
        f"{spec.name}.{name}": (spec.top_k or 1) / spec.num_experts
        for spec in anatomy.experts
        for name in spec.parameters
    }
    work = []
    for block in blocks:
        parameters = model.get_submodule(block).named_parameters(prefix=block)
        work.append(sum(parameter.numel() * chosen.get(name, 1.0) for name, parameter in parameters))
    head = model.get_output_embeddings()  # type: ignore[operator]
    work[-1] += 0 if head is None else sum(parameter.numel() for parameter in head.parameters())
    return work
