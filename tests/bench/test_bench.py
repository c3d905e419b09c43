"""`expertmesh bench` at the smallest sizes: what it prints and refuses; no time is ever compared with anything."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from expertmesh.bench import case, layer, lora, model, result, worker
from expertmesh.bench.case import Case, LayerCase, Shape, Sizes, check_ranks, write_checkpoint
from expertmesh.bench.probes import count_collectives
from expertmesh.cli.bench import PARTS
from expertmesh.cli.main import main
from expertmesh.compat import all_gather_into, reduce_scatter_into
from expertmesh.planning.trackers import CollectiveCount, UsageTracker
from tests.support.errors import refused
from tests.support.ranks import run_ranks

TINY = Case(tokens=32, sequence=32, compute="float32").tiny()
SHAPE = Shape(hidden=32, width=16, experts=4, top_k=2)
SMALLEST = Sizes(
    step=TINY,
    load=dataclasses.replace(TINY, params="bfloat16", compute="bfloat16"),
    layer=(LayerCase(24, SHAPE, "float32"),),
    lora=(LayerCase(24, SHAPE, "float32"),),
    step_repeats=2,
    load_repeats=1,
    layer_repeats=2,
    lora_repeats=2,
)


def forked(mode: str, case: Case, names: Sequence[str], repeats: int, worker_module: str = "") -> dict[str, Any]:
    """`launch` with ranks that are forked instead of started anew."""
    first: dict[str, Any] = run_ranks(worker.MODES[mode], case.ranks, case, names, repeats)[0]
    return first


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest sizes, on a CPU, wherever the tests run."""
    monkeypatch.setattr(model, "launch", forked)
    monkeypatch.setattr(case, "CPU_QUICK", SMALLEST)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)


@pytest.mark.parametrize("verb", [["bench"], ["verify", "none.yaml"], ["verify", "--model", "none"]])
def test_a_report_that_cannot_be_written_is_refused_before_anything_is_done(
    verb: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("expertmesh.cli.bench.PARTS", {"step": ("nothing", None)})
    os.mkfifo(tmp_path / "pipe")
    for path, why in (
        (tmp_path, "Is a directory"),
        (tmp_path / "no" / "x.json", "No such"),
        (tmp_path / "pipe", "No "),
    ):
        assert main([*verb, "--json", str(path)]) == 2
        told = capsys.readouterr()
        assert f"--json {path}: cannot be written: {why}" in told.err
        assert told.out == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pipe"]


def test_all_parts_beside_all_peers_in_one_command(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--quick", "--json", str(tmp_path / "bench.json")]) == 0
    printed = capsys.readouterr().out
    for name, (summary, _) in PARTS.items():
        assert f"## {name}: {summary}" in printed
    for system in ("transformers_ep2", "expertmesh_ep2", "transformers_grouped_mm", "expertmesh_loop", "PEFT"):
        assert system in printed
    assert f"torch {torch.__version__}" in printed
    assert "2 local ranks, a thread each" in printed
    written = json.loads((tmp_path / "bench.json").read_text())
    assert {key: written[key] for key in ("format", "version", "ranks", "quick")} == {
        "format": "expertmesh-bench", "version": 1, "ranks": 2, "quick": True,
    }  # fmt: skip
    assert written["machine"]["versions"]["torch"] == torch.__version__
    ratios = {part: [ratio["what"] for ratio in found["ratios"]] for part, found in written["parts"].items()}
    assert ratios["step"] == [
        "wall seconds", "CPU seconds of all ranks", "all-to-all bytes", "peak memory of a rank",
        "peak tensor memory of a rank",
    ]  # fmt: skip
    assert ratios["lora"] == ["seconds, float32, 24 tokens", "peak memory, float32, 24 tokens"]
    assert len(ratios["layer"]) == 6
    assert len(ratios["load"]) == 4
    assert all(found["missing"] is None for found in written["parts"].values())
    # Exact, so the same everywhere: each token travels once, not once for every expert.
    traffic = next(ratio for ratio in written["parts"]["step"]["ratios"] if ratio["what"] == "all-to-all bytes")
    assert traffic["ratio"] < 0.9


def test_a_peer_that_is_not_there_is_named_and_ours_is_measured_alone(
    small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = result._version
    monkeypatch.setattr(result, "_version", lambda name: None if name in ("peft", "accelerate") else real(name))
    assert main(["bench", "lora", "step", "load", "--quick"]) == 0
    printed = capsys.readouterr().out
    assert "accelerate not installed, peft not installed" in printed
    install = "pip install 'expertmesh[peers]'; ours is measured alone"
    assert f"missing     PEFT is not installed; {install}" in printed
    assert printed.count(f"missing     transformers' expert parallelism needs accelerate; {install}") == 2
    assert "\nratio " not in printed
    assert "expertmesh_ep2" in printed
    assert "transformers_ep" not in printed


def test_a_transformers_without_expert_parallelism_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass
    class OlderConfig:
        tp_size: int = 1

    assert result.why_missing("transformers") is None
    monkeypatch.setattr("transformers.distributed.configuration_utils.DistributedConfig", OlderConfig)
    assert "has no expert parallelism on FSDP2" in str(result.why_missing("transformers"))


def test_what_does_not_compute_the_same_is_refused(
    small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = layer.SYSTEMS["expertmesh_loop"]

    def wrong(shape: Shape, weights: Mapping[str, torch.Tensor]) -> layer.Experts:
        experts = right(shape, weights)
        return lambda *inputs: experts(*inputs) * 1.01

    monkeypatch.setitem(layer.SYSTEMS, "expertmesh_loop", wrong)
    assert main(["bench", "layer", "--quick"]) == 3
    assert "expertmesh_loop does not compute what transformers_grouped_mm does: output" in capsys.readouterr().err
    real = lora.SYSTEMS["ours"]

    def doubled(shape: Shape, weights: lora.Tensors, adapters: lora.Tensors, inputs: layer.Inputs) -> layer.Step:
        return real(shape, weights, {name: 2 * adapter for name, adapter in adapters.items()}, inputs)

    monkeypatch.setitem(lora.SYSTEMS, "ours", doubled)
    assert main(["bench", "lora", "--quick"]) == 3
    assert "ours does not compute what PEFT does: output" in capsys.readouterr().err


def test_ranks_that_do_not_compute_the_same_are_refused(
    small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tampered(mode: str, case: Case, names: Sequence[str], repeats: int, worker_module: str = "") -> dict[str, Any]:
        found = forked(mode, case, names, repeats)
        if mode == "time":
            found["expertmesh_ep2"]["grad_norm"] *= 1.001
        elif mode == "load" and names[0].startswith("expertmesh"):
            found["square"] *= 1.001
        return found

    monkeypatch.setattr(model, "launch", tampered)
    for part, said in (
        ("step", "expertmesh_ep2 computes something else"),
        ("load", "expertmesh_ep1 holds other weights"),
    ):
        assert main(["bench", part, "--quick"]) == 3
        assert said in capsys.readouterr().err


def test_a_wrong_part_or_number_of_ranks_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    assert main(["bench", "stpe"]) == 2
    assert "bench has no part stpe; use step, layer, load, lora" in capsys.readouterr().err
    assert main(["bench", "--nproc", "3"]) == 2
    assert "--nproc 3 does not divide the 64 experts of a layer; use 1, 2, 4, 8" in capsys.readouterr().err
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with refused("launch.too-few-accelerators", naming="2 accelerators"):
        check_ranks(4, torch.device("cuda"), False, case.ACCELERATOR)
    assert check_ranks(None, torch.device("cuda"), False, case.ACCELERATOR) == 2


def test_a_real_launch_starts_the_installed_worker(tmp_path: Path) -> None:
    written = dataclasses.replace(write_checkpoint(TINY, tmp_path / "model"), ranks=1)
    found = worker.launch("time", written, ["expertmesh_ep1"], 1)
    assert len(found["expertmesh_ep1"]["wall"]) == 1


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("layer", "--tiny --tokens 16 --repeats 1 --dtype float32"),
        ("step", "--ranks 1 --tokens 512 --layers 1 --experts 8 --repeats 1 --no-memory --systems "
         "expertmesh_ep1,expertmesh_lora_ep1,unsharded"),
    ],
)  # fmt: skip
def test_the_scripts_of_the_published_figures_run(script: str, arguments: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{script}", *arguments.split()]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "expertmesh_" in done.stdout


def _counted() -> list[tuple[list[str], dict[str, CollectiveCount]]]:
    group, x, whole = dist.group.WORLD, torch.ones(8), torch.empty(16)
    counted = []
    for step in (
        lambda: (all_gather_into(whole, x), reduce_scatter_into(x, whole), dist.all_reduce(x)),
        lambda: (
            torch.ops._c10d_functional.all_gather_into_tensor(x, 2, group.group_name),
            torch.ops._c10d_functional.reduce_scatter_tensor(whole, "sum", 2, group.group_name),
            torch.ops._c10d_functional.all_reduce(x, "sum", group.group_name),
        ),
    ):
        with UsageTracker() as tracker:
            step()  # type: ignore[no-untyped-call]
        counted.append((list(tracker.sent), count_collectives(step)))
    return counted


def test_functional_collectives_are_counted_as_those_of_c10d_are() -> None:
    plain, functional = run_ranks(_counted, 2)[0]
    assert plain == functional
    assert plain[1] == {kind: CollectiveCount(1, 64) for kind in ("all_gather", "reduce_scatter")} | {
        "all_reduce": CollectiveCount(1, 32)
    }


def test_tables_are_aligned_markdown() -> None:
    assert result.markdown(("a", "long"), [("longer", "1")]) == (
        "| a      | long |\n| ------ | ---- |\n| longer |    1 |"
    )
