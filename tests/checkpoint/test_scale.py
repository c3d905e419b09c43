"""A checkpoint of 4,096 ranks and 4,000 tensors, 12 million parts: what joining it and one rank's resume take.

The test counts function calls, which no busy machine changes; `python -m tests.checkpoint.test_scale` prints seconds.
"""

import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from expertmesh.checkpoint.interface import read_state
from expertmesh.checkpoint.read import check_hashes, open_state
from expertmesh.checkpoint.small_files import read_generators, rng_state
from expertmesh.checkpoint.state import HeldPart, RankPart, summary_path, write_part
from expertmesh.checkpoint.write import SavedJob, publish
from expertmesh.io.boxes import Box, extents
from tests.support.ranks import shared_ranks

RANKS, PARAMETERS, RANK = 4096, 1000, 1234
LAYOUT = {"pp": 1, "replicate": 1, "fsdp": RANKS, "cp": 1, "tp": 1, "ep": 1, "efsdp": RANKS}
# Rows of the parameters: each is a tiling of its own, and the last ranks hold less of some, or nothing.
ROWS = [RANKS * (1 + number % 4) - 7 * (number // 4) for number in range(40)]


def _box(rows: int, rank: int) -> Box:
    each = -(-rows // RANKS)
    start = min(rank * each, rows)
    return ((start, min(start + each, rows)), (0, 2))


def _part(rank: int) -> RankPart:
    held: list[HeldPart] = []
    values: dict[str, dict[str, torch.Tensor]] = {"model": {}, "optimizer": {}}
    for number in range(PARAMETERS):
        rows, name = ROWS[number % len(ROWS)], f"layers.{number}.weight"
        box = _box(rows, rank)
        for kind, key in (("model", name), *(("optimizer", f"optimizer.{name}.{slot}") for slot in ("m", "v"))):
            writes = box[0][0] < box[0][1]
            held.append(HeldPart(kind, key, "F32", (rows, 2), str(rows), box, writes, None))
            if writes:
                values[kind][key] = torch.full(extents(box), float(number))
        step = f"optimizer.{name}.step"
        held.append(HeldPart("optimizer", step, "F32", (), "scalar", (), rank == 0, 1))
        if rank == 0:
            values["optimizer"][step] = torch.tensor(7.0)
    return RankPart(rank, rank == 0, tuple(held), values, rng_state(torch.device("cpu")))


# Whose files `RANK` reads: its own, those with what all ranks held, and its share of those to be checked (the manifest
# names each rank's two files one after the other).
WRITTEN = {0, RANK, RANK // 2, (RANK + RANKS) // 2}


def _forge(directory: Path) -> Path:
    """The ranks in `WRITTEN` write all of their parts, the others a note."""
    temporary = directory / "step-00000001.tmp-1"
    temporary.mkdir(parents=True)
    for rank in WRITTEN:
        write_part(_part(rank), temporary, RANKS)
    first = json.loads(summary_path(temporary, 0).read_text().splitlines()[0])
    _, _, scalars, _ = first["boxes"]["scalar"]
    for rank in set(range(RANKS)) - WRITTEN:
        boxes = {str(rows): (_box(rows, rank), True, None) for rows in ROWS}
        files = [{**file, "name": file["name"].replace("-00000-", f"-{rank:05d}-")} for file in first["files"]]
        note = {**first, "files": files, "listing": None, "boxes": {**boxes, "scalar": ((), False, scalars)}}
        summary_path(temporary, rank).write_text(json.dumps(note) + "\n{}\n")
    return temporary


def _work(run: Callable[[], Any], counted: bool) -> tuple[Any, float]:
    """What `run` returns, and how many functions it called or, if that is not counted, how many CPU seconds it took."""
    calls, started = 0, time.process_time()

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count if counted else None)
    try:
        result = run()
    finally:
        sys.setprofile(None)
    return result, calls if counted else time.process_time() - started


def _join(directory: Path, counted: bool) -> float:
    temporary = _forge(directory)
    path = directory / "step-00000001"
    manifest, work = _work(lambda: publish(temporary, path, SavedJob(1, LAYOUT, ())), counted)
    assert len(manifest.tilings) == len(ROWS) + 1
    assert len(manifest.model) + len(manifest.optimizer) == 4 * PARAMETERS
    assert (path / "manifest.json").stat().st_size < 8 << 20
    return work


def _resume(path: Path, counted: bool) -> tuple[float, int]:
    """The work, and by how many bytes the memory of this process grew at most."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
    targets: dict[str, torch.Tensor] = {}
    for number in range(PARAMETERS):
        rows, name = ROWS[number % len(ROWS)], f"layers.{number}.weight"
        for key in (name, f"optimizer.{name}.m", f"optimizer.{name}.v"):
            local = torch.zeros(extents(_box(rows, RANK)))
            targets[key] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(rows, 2), stride=(2, 1))
        targets[f"optimizer.{name}.step"] = torch.zeros(())

    def resume() -> Any:
        with open_state(path, rank=RANK, ranks=RANKS) as state:
            check_hashes(state, rank=RANK, ranks=RANKS)
            generators = read_generators(path, state.manifest, [RANK])
            read_state(state, targets)
        return generators

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    generators, work = _work(resume, counted)
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert len(generators) == 1
    for number in range(PARAMETERS):
        local = targets[f"optimizer.layers.{number}.weight.v"].to_local()  # type: ignore[attr-defined]
        assert bool((local == number).all())
        assert float(targets[f"optimizer.layers.{number}.weight.step"]) == 7
    return work, grown


def _both(directory: Path, counted: bool) -> tuple[float, float, int]:
    joining = shared_ranks(_join, 1, directory, counted)[0]
    resuming, grown = shared_ranks(_resume, 1, directory / "step-00000001", counted)[0]
    return joining, resuming, grown


@pytest.mark.slow(why="counts the calls of a job of 4,096 ranks")
def test_joining_and_resuming_scale_with_ranks_and_with_tensors_not_with_their_product(tmp_path: Path) -> None:
    joining, resuming, grown = _both(tmp_path, counted=True)
    ranks_and_tensors = RANKS + 4 * PARAMETERS
    print(f"{joining / ranks_and_tensors:.0f} and {resuming / ranks_and_tensors:.0f} calls, {grown / 2**20:.0f} MiB")
    assert joining <= 1000 * ranks_and_tensors
    assert resuming <= 250 * ranks_and_tensors
    assert grown <= 100e6


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        joining, resuming, grown = _both(Path(name), counted=False)
    print(f"CPU: joining {joining:.2f} s, one rank's resume {resuming:.2f} s and {grown / 2**20:.0f} MiB")
