"""The planner's order of forwards and backwards is torch's own, and what it says is in flight follows from it."""

from typing import Any

import pytest
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from expertmesh.distributed.layout import Layout
from expertmesh.planning.stages import InFlight, in_flight, prefetches_in_vain, schedule_order


@pytest.mark.parametrize(("pp", "chunks", "count"), [(2, 2, 4), (2, 2, 2), (4, 2, 8), (4, 3, 12), (2, 4, 3), (3, 2, 1)])
def test_the_order_is_that_of_torchs_interleaved_schedule(pp: int, chunks: int, count: int) -> None:
    torchs: Any = object.__new__(ScheduleInterleaved1F1B)  # no stages are needed to be asked for an order
    torchs.n_local_stages, torchs.pp_group_size, torchs._n_microbatches = chunks, pp, count
    torchs.microbatches_per_round = count // max(1, count // pp)
    for rank in range(pp):
        steps = [each for each in torchs._calculate_single_rank_operations(rank) if each is not None]
        wanted = [(step.stage_index // pp, "FORWARD" in step.computation_type.name) for step in steps]
        assert list(schedule_order(pp, chunks, count, rank)) == wanted


def test_everything_is_in_flight_where_all_forwards_run_first() -> None:
    gpipe, short = Layout(pp=4, pp_schedule="gpipe"), Layout(pp=4)
    assert in_flight(gpipe, 8, 3) == (InFlight(0, (8,), (False,)), InFlight(0, (7,), (True,)))
    assert in_flight(short, 3, 3)[0].saved == (3,)  # fewer micro-batches than stages
    assert in_flight(short, 4, 3) == (InFlight(0, (1,), (True,)),)
    assert in_flight(short, 8, 0) == (InFlight(0, (4,), (True,)),)
    unequal = Layout(pp=2, pp_schedule="interleaved_1f1b", pp_virtual_stages=2)
    assert max(sum(each.saved) for each in in_flight(unequal, 5, 1)) == 10


def test_a_chunk_of_another_round_is_prefetched_in_vain() -> None:
    virtual = Layout(pp=4, pp_schedule="interleaved_1f1b", pp_virtual_stages=3)
    assert sum(prefetches_in_vain(virtual, 8, 3).values()) == 8  # of the chunk before or behind, between its own rounds
