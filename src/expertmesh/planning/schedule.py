"""Which micro-batches a pipeline rank holds activations of while one of them runs backward, schedule by schedule.

A rank's stages (one, or `pp_virtual_stages`) are its chunks, in the order of the model. The order of forwards and
backwards is that of the schedules step/pipeline_schedule.py chooses from torch.distributed.pipelining.
"""

from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from expertmesh.distributed.layout import Layout


class Held(NamedTuple):
    """A micro-batch of a rank's `chunk` runs backward while `flying[c]` micro-batches of each chunk hold activations,
    this one included; `whole[c]`: gradients of chunk c are there from an earlier backward; `vain`: FSDP2 prefetches a
    block of another micro-batch at its end.
    """

    chunk: int
    flying: tuple[int, ...]
    whole: tuple[bool, ...]
    vain: bool


def backwards(layout: Layout, accumulation: int, rank: int) -> tuple[Held, ...]:
    """Every different situation of a step's backwards, on pp rank `rank`."""
    return _backwards(layout.pp, layout.pp_virtual_stages, layout.pp_schedule, accumulation, rank)


class Prefetched(NamedTuple):
    """Backwards of `chunk`, `times` of them, as FSDP2 prefetches in them: in the reverse order of the forwards recorded
    by then. `recorded`: any of this chunk are among them. `behind`: the chunk that ran right before the last of those,
    or None. `other`: the chunk that ran last of all, if it is another one.
    """

    chunk: int
    recorded: bool
    behind: int | None
    other: int | None
    times: int


def prefetching(layout: Layout, accumulation: int, rank: int) -> tuple[Prefetched, ...]:
    """FSDP2 forgets what it has recorded at the end of each backward, so only what ran since the one before counts."""
    return _prefetching(layout.pp, layout.pp_virtual_stages, layout.pp_schedule, accumulation, rank)


@cache
def _prefetching(pp: int, chunks: int, schedule: str, count: int, rank: int) -> tuple[Prefetched, ...]:
    if chunks == 1:
        flying = _backwards(pp, chunks, schedule, count, rank)[0].flying[0]
        found = [Prefetched(0, True, 0 if flying > 1 else None, None, 1)]
        return (*found, Prefetched(0, True, None, None, count - flying)) if count > flying else tuple(found)
    recorded: list[int] = []
    seen: Counter[tuple[int, bool, int | None, int | None]] = Counter()
    for chunk, forward in _order(pp, chunks, count, rank):
        if forward:
            recorded.append(chunk)
            continue
        there, behind = chunk in recorded, None
        if there:
            last = len(recorded) - 1 - recorded[::-1].index(chunk)
            behind = recorded[last - 1] if last else None
        seen[chunk, there, behind, recorded[-1] if recorded and recorded[-1] != chunk else None] += 1
        recorded.clear()
    return tuple(Prefetched(*key, times) for key, times in seen.items())


@cache
def _backwards(pp: int, chunks: int, schedule: str, count: int, rank: int) -> tuple[Held, ...]:
    if chunks == 1:
        first = min(pp - rank, count) if schedule != "gpipe" and count >= pp else count
        first = 1 if pp == 1 else first
        later = min(first, count - 1)
        # From the second micro-batch on gradients are whole, but fewer may be in flight. Where as many are, the second
        # stands for the first as well.
        found = [Held(0, (first,), (False,), first > 1)] if later < first else []
        return (*found, Held(0, (later,), (True,), later == first > 1)) if later else tuple(found)
    flying, whole = [0] * chunks, [False] * chunks
    seen: dict[Held, None] = {}
    for chunk, forward in _order(pp, chunks, count, rank):
        if forward:
            flying[chunk] += 1
            continue
        seen[Held(chunk, tuple(flying), tuple(whole), sum(flying) > 1 and not any(whole))] = None
        flying[chunk] -= 1
        whole[chunk] = True
    return tuple(seen)


def _order(pp: int, chunks: int, count: int, rank: int) -> Iterator[tuple[int, bool]]:
    """(chunk, whether forward) in the order of interleaved 1F1B; of looped breadth-first where rounds are unequal."""
    rounds = max(1, count // pp)
    if count % rounds:
        yield from ((chunk, True) for chunk in range(chunks) for _ in range(count))
        yield from ((chunk, False) for chunk in reversed(range(chunks)) for _ in range(count))
        return
    each = count // rounds
    warm = min((chunks - 1) * each + 2 * (pp - 1 - rank), chunks * count)
    forwards = (step // each % chunks for step in range(chunks * count))
    behind = (chunks - 1 - step // each % chunks for step in range(chunks * count))
    for _ in range(warm):
        yield next(forwards), True
    for chunk in behind:
        if (following := next(forwards, None)) is not None:
            yield following, True
        yield chunk, False
