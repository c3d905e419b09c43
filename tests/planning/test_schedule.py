"""The planner's order of forwards and backwards is torch's own, and what it says is in flight follows from it."""

from typing import Any

import pytest
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from expertmesh.distributed.layout import Layout
from expertmesh.planning.schedule import Held, Prefetched, _order, backwards, prefetching


@pytest.mark.parametrize(("pp", "chunks", "count"), [(2, 2, 4), (2, 2, 2), (4, 2, 8), (4, 3, 12), (2, 4, 3), (3, 2, 1)])
def test_the_order_is_that_of_torchs_interleaved_schedule(pp: int, chunks: int, count: int) -> None:
    torchs: Any = object.__new__(ScheduleInterleaved1F1B)  # no stages are needed to be asked for an order
    torchs.n_local_stages, torchs.pp_group_size, torchs._n_microbatches = chunks, pp, count
    torchs.microbatches_per_round = count // max(1, count // pp)
    for rank in range(pp):
        steps = [each for each in torchs._calculate_single_rank_operations(rank) if each is not None]
        wanted = [(step.stage_index // pp, "FORWARD" in step.computation_type.name) for step in steps]
        assert list(_order(pp, chunks, count, rank)) == wanted


def test_everything_is_in_flight_where_all_forwards_run_first() -> None:
    gpipe, short = Layout(pp=4, pp_schedule="gpipe"), Layout(pp=4)
    assert backwards(gpipe, 8, 3) == (Held(0, (8,), (False,), True), Held(0, (7,), (True,), False))
    assert backwards(short, 3, 3)[0].flying == (3,)  # fewer micro-batches than stages
    assert backwards(short, 4, 3) == (Held(0, (1,), (True,), False),)
    assert backwards(short, 8, 0) == (Held(0, (4,), (True,), True),)
    unequal = Layout(pp=2, pp_schedule="interleaved_1f1b", pp_virtual_stages=2)
    assert max(sum(held.flying) for held in backwards(unequal, 5, 1)) == 10


def test_what_is_recorded_when_a_backward_begins() -> None:
    assert prefetching(Layout(pp=2), 4, 0) == (Prefetched(0, True, 0, None, 1), Prefetched(0, True, None, None, 2))
    assert prefetching(Layout(pp=2), 4, 1) == (Prefetched(0, True, None, None, 1), Prefetched(0, True, None, None, 3))
    virtual = Layout(pp=4, pp_schedule="interleaved_1f1b", pp_virtual_stages=3)
    others = [found for found in prefetching(virtual, 8, 3) if found.other is not None]
    assert sum(found.times for found in others) == 8  # of the chunk before or behind, between its own rounds
