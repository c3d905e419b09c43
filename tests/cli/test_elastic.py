"""`--elastic`: a lost node costs minutes, a node that comes back is used, and the weights are those of a quiet run."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from expertmesh.config import InputError, load_config
from expertmesh.distributed.environment import Rank
from expertmesh.launcher.torchrun import refuse_elastic
from expertmesh.planning.forecast import arrange
from expertmesh.report.page import render
from expertmesh.report.run import read_run
from expertmesh.training import lock
from expertmesh.training.run import train
from expertmesh.training.startup.preflight import preflight
from tests.cli.jobs import ROOT, free_port, left_behind
from tests.support.ranks import shared_ranks
from tests.training.tiny_run import metrics, run_config, weights, write_inputs

STEPS = 120
RUN = ["train.num_epochs=100", f"train.max_steps={STEPS}", "optim.learning_rate=1.0e-3", "parallel.ep=4"]
RUN += ["train.global_batch_size=16"]
TORCHRUN = ["-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "5"]
TORCHRUN += ["--monitor-interval", "0.1", "--rdzv-id", "elastic", "--rdzv-backend", "c10d"]
# Seconds that a lost node is waited for; by default torchrun's take half a minute.
TORCHRUN += ["--rdzv-conf", "last_call_timeout=3"]


def _agent(arguments: list[str], endpoint: str, scratch: Path, log: Path) -> "subprocess.Popen[bytes]":
    """A node: torchrun's agent and its two ranks, which `_lose` finds by `scratch`."""
    own = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1", "SCRATCH": str(scratch)}
    own |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [sys.executable, *TORCHRUN, "--rdzv-endpoint", endpoint, "-m", "expertmesh", "train", *arguments]
    with log.open("ab") as file:
        return subprocess.Popen(command, env=os.environ | own, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)


def _lose(scratch: Path) -> None:
    """The power of a node goes: every process of it ends at once."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"SCRATCH={scratch}".encode() in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)
        except OSError:
            continue


def _listens(endpoint: str) -> bool:
    host, _, port = endpoint.partition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
        return True
    return False


def _starts(output: Path) -> list[int]:
    """The world size of each start, as run.json tells."""
    try:
        return [start["world_size"] for start in json.loads((output / "run.json").read_text())["starts"]]
    except FileNotFoundError:
        return []


def _wait(true: object, seconds: float, log: Path) -> None:
    deadline = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)


@pytest.mark.slow(why="launches of four processes, one after the other; the choice of a layout and the refusals stay")
def test_four_ranks_two_and_four_again_end_as_if_nothing_had_happened(tmp_path: Path) -> None:
    inputs, output, log = write_inputs(tmp_path / "inputs"), tmp_path / "run", tmp_path / "log"
    rows = (inputs / "train.jsonl").read_text()
    (inputs / "train.jsonl").write_text(5 * rows)
    run_config(inputs, tmp_path / "run")
    config = str(tmp_path / "run.yaml")
    shared_ranks(train, 4, load_config(config, [*RUN, f"output_dir={tmp_path / 'quiet'}"]))

    wanted = [config, *RUN, "parallel.ep_across_nodes=true", "checkpoint.every_steps=2", "--elastic", "2:4"]
    endpoint = f"localhost:{free_port()}"
    first = _agent(wanted, endpoint, tmp_path / "one", log)
    _wait(lambda: _listens(endpoint), 300, log)  # it holds the store, without which nobody can go on
    second = _agent(wanted, endpoint, tmp_path / "two", log)
    _wait(lambda: (output / "metrics.jsonl").exists() and len(metrics(output)) >= 6, 300, log)
    lost = time.monotonic()
    _lose(tmp_path / "two")
    second.wait()
    _wait(lambda: _starts(output)[-1] == 2 and len(metrics(output)) >= 10, 300, log)
    back = time.monotonic()
    second = _agent(wanted, endpoint, tmp_path / "two", log)
    _wait(lambda: _starts(output)[-1] == 4, 300, log)
    grown = time.monotonic()
    assert [agent.wait(300) for agent in (first, second)] == [0, 0], log.read_text()
    print(f"from a loss to step 10 on two ranks {back - lost:.1f} s; from a node's start to four {grown - back:.1f} s")

    assert _starts(output) == [4, 2, 4]
    said = log.read_text()
    assert "elastic    2 ranks: planned anew (" in said
    assert "as parallel.ep 4 does not divide" in said
    assert "elastic    4 ranks: laid out as configured" in said
    found, quiet = metrics(output), metrics(tmp_path / "quiet")
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    for row, same in zip(found, quiet, strict=True):
        assert row["target_tokens"] == same["target_tokens"]  # the same data in each step
        assert row["loss"] == pytest.approx(same["loss"], rel=1e-4)
    expected, got = weights(tmp_path / "quiet"), weights(output)
    worst = max(float((got[name] - tensor).abs().max() / tensor.abs().max()) for name, tensor in expected.items())
    print(f"largest difference of a weight, relative to its tensor's largest: {worst:.1e}")
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=1e-4 * float(tensor.abs().max()))
    assert "2 ranks" in render(read_run(output))
    assert left_behind(tmp_path / "one") == left_behind(tmp_path / "two") == []


OF_TORCHRUN = {"TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_RUN_ID": "job7"}


@pytest.mark.parametrize(
    ("place", "environment", "what"),
    [
        (None, {}, r"^--elastic 2:4 is for torchrun, .* start with torchrun --nnodes MIN:MAX --rdzv-backend c10d"),
        (Rank("SLURM", 0, 4), OF_TORCHRUN, "is for torchrun"),
        (Rank("torchrun", 0, 8), OF_TORCHRUN, "but torchrun has started 8 ranks"),
        (Rank("torchrun", 0, 4), OF_TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}, "SHARE_RDZV_TCP_STORE=1"),
        (Rank("torchrun", 0, 4), OF_TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}, "no --rdzv-id"),
    ],
)
def test_a_start_that_could_not_be_made_again_is_refused(
    place: Rank | None, environment: dict[str, str], what: str
) -> None:
    refuse_elastic((2, 4), Rank("torchrun", 0, 3), OF_TORCHRUN)
    with pytest.raises(InputError, match=what) as refusal:
        refuse_elastic((2, 4), place, environment)
    assert refusal.value.key == "launch.elastic-start"


def test_a_layout_that_does_not_fit_the_ranks_is_planned_anew(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path / "inputs")
    run_config(inputs, tmp_path / "run", "parallel.ep=4", "train.micro_batch_size=2")
    config = load_config(tmp_path / "run.yaml", ["parallel.ep=4", "train.micro_batch_size=1", "moe.placement=balanced"])
    kept = arrange(config, 4, preflight)
    assert (kept.parallel, kept.micro_batch_size) == (config.parallel, 1)
    planned = arrange(config, 2, preflight)
    assert planned.parallel.ep in (1, 2)
    assert planned.reason.startswith("planned anew (")
    assert planned.reason.endswith("as parallel.ep 4 does not divide fsdp * cp * tp = 2 ranks")
    with pytest.raises(InputError, match="--elastic: no layout of 3 ranks fits: "):
        arrange(config, 3, preflight)
    with pytest.raises(InputError, match="does not exist"):
        arrange(load_config(tmp_path / "run.yaml", ["data.train=[{path: /nowhere.jsonl}]"]), 2, preflight)


def test_the_next_start_of_a_job_is_refused_while_the_one_before_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun may start again what still runs: an agent that it has not heard of for a while is not dead."""
    monkeypatch.setattr(lock, "LAUNCH_SECONDS", 0.5)
    with lock.RunLock(tmp_path, "job7"):
        for launch in ("job7", "job8"):
            with pytest.raises(InputError, match="in use by another run"), lock.RunLock(tmp_path, launch):
                pass
    with lock.RunLock(tmp_path, "job7"):
        pass
