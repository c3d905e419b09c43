"""Which blocks are on which pipeline stage: consecutive ones, so that the slowest stage has as little work as possible.

A stage's work is counted in multiplications per token: the parameters that a token meets, so of routed experts the
share that it chooses; the head counts, looking up an embedding does not. The number of blocks need not be a multiple of
the number of stages. Stage s is on pp rank s mod pp. Plain arithmetic on a model that may be on meta.
"""

from collections.abc import Sequence
from functools import cache

from torch import nn

from expertmesh.anatomy import Anatomy
from expertmesh.config.errors import InputError
from expertmesh.distributed.layout import Layout


def plan_stages(model: nn.Module, anatomy: Anatomy, blocks: Sequence[str], layout: Layout) -> tuple[range, ...]:
    """The numbers of each stage's blocks. Raises `InputError` if there are fewer blocks than stages."""
    stages = layout.pp * layout.pp_virtual_stages
    if len(blocks) < stages:
        wanted = f"{layout.pp} × {layout.pp_virtual_stages} virtual stages" if layout.pp_virtual_stages > 1 else "pp"
        raise InputError(
            f"parallel.pp: {stages} stages ({wanted}) need as many blocks, and the model has {len(blocks)}; lower "
            "parallel.pp or parallel.pp_virtual_stages",
            key="layout.pp-exceeds-blocks",
        )
    return balanced(_work(model, anatomy, blocks), stages)


def balanced(work: Sequence[float], stages: int) -> tuple[range, ...]:
    """Cut `work` into so many consecutive parts, none empty, whose largest sum is as small as can be; of such cuts one
    whose parts are the most equal.
    """

    @cache
    def best(first: int, left: int) -> tuple[float, float, tuple[int, ...]]:
        if left == 1:
            total = sum(work[first:])
            return total, total**2, (len(work),)
        found = []
        for stop in range(first + 1, len(work) - left + 2):
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
