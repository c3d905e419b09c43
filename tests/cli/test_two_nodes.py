"""Two machines: the weights of one, the planned bytes on the cable, and a name for what is lost."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoConfig

from expertmesh.config import PrecisionConfig, load_config
from expertmesh.distributed.layout import Layout
from expertmesh.planning.stages import Batch, Workload
from expertmesh.planning.traffic import bytes_between_nodes, traffic_of
from expertmesh.training.run import train
from tests.cli.jobs import ROOT, free_port, left_behind
from tests.cli.test_starts import assert_same, run_all
from tests.support.nodes import ADDRESSES, Nodes, two_nodes
from tests.support.planned import figures_of
from tests.support.ranks import shared_ranks
from tests.training.tiny_run import GLOBAL_BATCH, metrics, run_config, write_inputs

STEPS, LENGTH, PORT = 12, 30, "23456"
ROW = {"prompt": "What is 2 plus 2?", "completion": "It is 4."}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
# What a job says to itself beside its steps: finding each other, checks that ranks agree, the lines of a start.
START_BYTES = 600_000


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, rows of one length and `run.yaml`."""
    root = write_inputs(tmp_path_factory.mktemp("nodes"))
    (root / "train.jsonl").write_text((json.dumps(ROW) + "\n") * 12)
    run_config(root, root / "run", f"train.max_steps={STEPS}", "train.num_epochs=20")
    return root


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with two_nodes() as nodes:
        yield nodes


def arguments(inputs: Path, output: str, ep: int, *more: str) -> list[str]:
    options = [f"parallel.ep={ep}", "parallel.ep_across_nodes=true", f"train.max_steps={STEPS}", "train.num_epochs=20"]
    return [str(inputs / "run.yaml"), *options, f"output_dir={inputs / output}", *more]


def agents(nodes: Nodes, arguments: list[str]) -> list[tuple[list[str], dict[str, str]]]:
    """One of torchrun on each node."""
    meet = ["--nnodes", "2", "--master-addr", ADDRESSES[0], "--master-port", PORT, "--node-rank"]
    train = ["-m", "expertmesh", "train", *arguments]
    return [(nodes.command(node, [*TORCHRUN, *meet, str(node), *train]), {}) for node in range(2)]


@pytest.mark.slow(why="launches of four processes each, with limits of time to be waited for")
def test_two_nodes_give_the_weights_of_one_and_send_what_was_planned(nodes: Nodes, inputs: Path) -> None:
    config, *local = [*arguments(inputs, "local", 4), "parallel.ep_across_nodes=false"]
    shared_ranks(train, 4, load_config(config, local))
    nodes.run(0, "sh", "-c", "tc qdisc add dev cable0 root tbf rate 400mbit burst 256kb latency 100ms")
    before = nodes.sent()
    said, _ = run_all(agents(nodes, arguments(inputs, "nodes", 4)))
    sent = [after - start for start, after in zip(before, nodes.sent(), strict=True)]
    assert_same(inputs, "nodes")
    assert "ep 4 crosses the borders of nodes of 2 ranks in 1 of its 1 groups (ranks 0 to 3)" in said
    planned = STEPS * _planned(inputs)
    for node in sent:
        # Above the bytes of the collectives: headers of TCP and Ethernet, acknowledgements, one exchange a step.
        assert planned < node < 1.15 * planned + START_BYTES, (sent, planned)


def _planned(inputs: Path) -> float:
    """Bytes that a node of two ranks sends in a step. gloo makes an all-reduce of each reduce-scatter."""
    figures = figures_of(
        AutoConfig.from_pretrained(inputs / "model"),
        length=LENGTH,
        precision=PrecisionConfig(params="float32", compute="float32"),
    )
    layout = Layout(fsdp=4, ep=4)
    work = Workload(figures, layout, Batch(1, GLOBAL_BATCH // 4), "none", "all", 1.0, on_cpu=True, optimizer="adamw")
    return sum(
        2 * bytes_between_nodes(each, layout, per_node=2) * (2 if each.kind == "reduce_scatter" else 1)
        for each in traffic_of(work)
    )


ENDLESS = ["train.max_steps=100000", "train.num_epochs=100000", "distributed.timeout_seconds=8"]


def _start(commands: list[tuple[list[str], dict[str, str]]], scratch: Path) -> "list[subprocess.Popen[str]]":
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "SCRATCH": str(scratch)}
    return [
        subprocess.Popen(
            command, env=environment | own, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT
        )
        for command, own in commands
    ]


def _wait_for_steps(output: Path) -> None:
    deadline = time.monotonic() + 300
    while not (output / "metrics.jsonl").exists() or len(metrics(output)) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow(why="launches of four processes each, with limits of time to be waited for")
def test_a_network_that_is_lost_ends_both_nodes_by_name(nodes: Nodes, inputs: Path, tmp_path: Path) -> None:
    started = _start(agents(nodes, arguments(inputs, "cut", 2, *ENDLESS)), tmp_path)
    _wait_for_steps(inputs / "cut")
    nodes.cut()
    first, second = (process.communicate()[0] for process in started)
    assert "rank 2, 3 (node 1 of 2) did not answer within 5 s when the others had waited in vain" in first
    assert f"and {ADDRESSES[0]}:{PORT}, where the job met, cannot be reached from here" in second
    assert all(process.returncode != 0 for process in started)
    assert left_behind(tmp_path) == []


@pytest.mark.slow(why="launches of four processes each, with limits of time to be waited for")
def test_a_rank_that_hangs_under_torchrun_is_named_with_its_stack(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    meet = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}"]
    command = [*TORCHRUN[:-1], "1", *meet, str(script), str(tmp_path)]
    started = _start([(command, {"HANG": "endless_loop"})] * 2, tmp_path)
    said = [process.communicate()[0] for process in started]
    for each in said:
        assert "rank 1 hung at step 3, reading data: it had not moved for " in each
        assert "in endless_loop\n" in each
        assert f"stacks of all ranks: {tmp_path / 'stacks.txt'}" in each
    stacks = (tmp_path / "stacks.txt").read_text()
    assert "rank 0 on " in stacks
    assert "at step 3, reading data, for " in stacks
    assert left_behind(tmp_path) == []


RANK = """
import sys
from expertmesh.launcher.torchrun import report
from expertmesh.config import ExpertmeshError
from expertmesh.launcher.launch import run
from expertmesh.launcher.worker import leave
from tests.cli.jobs import CONFIG
try:
    code = run(CONFIG.model_copy(update={"output_dir": sys.argv[1]}), "tests.cli.fake_training:hang_on_rank_1")
except ExpertmeshError as error:
    code = report(error)
leave(code)
"""


@pytest.mark.slow(why="launches of four processes each, with limits of time to be waited for")
def test_a_rank_that_is_stopped_on_another_node_is_named(nodes: Nodes, inputs: Path, tmp_path: Path) -> None:
    started = _start(agents(nodes, arguments(inputs, "stopped", 2, *ENDLESS)), tmp_path)
    _wait_for_steps(inputs / "stopped")
    os.kill(_process_of_rank(3, tmp_path), signal.SIGSTOP)
    first, _ = (process.communicate()[0] for process in started)
    assert "rank 3 (node 1 of 2) did not answer within 5 s" in first, first
    assert left_behind(tmp_path) == []


def _process_of_rank(rank: int, scratch: Path) -> int:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if {f"SCRATCH={scratch}".encode(), f"RANK={rank}".encode()} <= set(environment):
            return int(process.name)
    raise AssertionError(f"no rank {rank}")
