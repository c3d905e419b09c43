"""The benchmarks refuse to compare what does not compute the same; no time is ever compared with anything."""

import dataclasses
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks import accumulation, layer, load, lora, placement, result, step, worker
from benchmarks.case import Case, LayerCase, Shape
from benchmarks.probes import count_collectives
from expertmesh.compat import all_gather_into, reduce_scatter_into
from expertmesh.planning.probe import CollectiveCount, UsageTracker
from tests.support.ranks import run_ranks, shared_ranks

TINY = dataclasses.replace(Case(tokens=32, sequence=32, compute="float32").tiny(), ranks=2)
LAYER = LayerCase(24, Shape(hidden=32, width=16, experts=4, top_k=2), "float32")
CPU = torch.device("cpu")


def forked(mode: str, case: Case, names: Sequence[str], repeats: int, worker_module: str = "") -> dict[str, Any]:
    """`launch` with ranks that are forked instead of started anew."""
    first: dict[str, Any] = run_ranks(worker.MODES[mode], case.ranks, case, names, repeats)[0]
    return first


def test_a_step_sends_fewer_bytes_than_the_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "launch", forked)
    report = step.measure_step(TINY, ["transformers_ep2", "expertmesh_ep2"], 1, with_memory=False)
    step.check_steps(TINY, report["time"])
    assert "transformers_ep2" in step.step_table(TINY, report)
    # Exact, so the same everywhere: each token is sent once, not once for every expert.
    theirs, ours = (
        sum(rank["all_to_all"]["bytes"] for rank in report["time"][name]["traffic"])
        for name in ("transformers_ep2", "expertmesh_ep2")
    )
    assert ours < 0.9 * theirs
    report["time"]["expertmesh_ep2"]["grad_norm"] *= 1.001
    with pytest.raises(result.ResultsDiffer, match="expertmesh_ep2 computes something else"):
        step.check_steps(TINY, report["time"])


@pytest.mark.slow(why="parallel/test_by_layer.py counts the collectives")
def test_by_layer_gathers_and_reduces_as_much_for_any_number_of_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "launch", forked)
    names = ["transformers_fsdp2", "transformers_no_sync_fsdp2", "expertmesh_by_layer_ep1", "expertmesh_by_layer_ep2"]
    rows = []
    for number in (2, 4):
        case = dataclasses.replace(TINY, layers=2, micro_batches=number)
        timing = step.measure_step(case, names, 1, with_memory=False)["time"]
        step.check_steps(case, timing)
        rows += accumulation.rows_of(number, timing)
    assert "expertmesh_by_layer_ep1" in accumulation.table(rows)
    growth = {
        two["system"]: [four[kind][0] / two[kind][0] for kind in ("all_gather", "reduce_scatter")]
        for two, four in zip(rows[: len(names)], rows[len(names) :], strict=True)
    }
    assert growth == dict(zip(names, ([2, 2], [2, 1], [1, 1], [1, 1]), strict=True))


def test_weights_that_were_loaded_wrong_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "launch", forked)
    report = load.measure_load(TINY, ("transformers_ep", "expertmesh_ep"), [2], 1)
    load.check_loads(report["runs"])
    assert "expertmesh_ep2" in load.load_table(TINY, report)
    report["runs"]["expertmesh_ep2"][0]["square"] *= 1.001
    with pytest.raises(result.ResultsDiffer, match="expertmesh_ep2 holds other weights"):
        load.check_loads(report["runs"])


def test_a_transformers_without_expert_parallelism_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass
    class OlderConfig:
        tp_size: int = 1

    assert result.why_missing("transformers") is None
    monkeypatch.setattr("transformers.distributed.configuration_utils.DistributedConfig", OlderConfig)
    assert "has no expert parallelism on FSDP2" in str(result.why_missing("transformers"))


def test_a_layer_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = layer.SYSTEMS["expertmesh_loop"]

    def wrong(shape: Shape, weights: Mapping[str, torch.Tensor]) -> layer.Experts:
        experts = right(shape, weights)
        return lambda *inputs: experts(*inputs) * 1.01

    assert len(layer.measure(LAYER, layer.systems_on(CPU), CPU, 1)["rows"]) == 6
    monkeypatch.setitem(layer.SYSTEMS, "expertmesh_loop", wrong)
    with pytest.raises(result.ResultsDiffer, match="expertmesh_loop does not compute what transformers_grouped_mm"):
        layer.measure(LAYER, layer.systems_on(CPU), CPU, 1)


def test_adapters_that_compute_something_else_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = lora.SYSTEMS["ours"]

    def doubled(shape: Shape, weights: lora.Tensors, adapters: lora.Tensors, inputs: layer.Inputs) -> layer.Step:
        return real(shape, weights, {name: 2 * adapter for name, adapter in adapters.items()}, inputs)

    assert "ours" in lora.table([lora.measure(LAYER, tuple(lora.SYSTEMS), CPU, 1)])
    monkeypatch.setitem(lora.SYSTEMS, "ours", doubled)
    with pytest.raises(result.ResultsDiffer, match="ours does not compute what PEFT does: output"):
        lora.measure(LAYER, tuple(lora.SYSTEMS), CPU, 1)


@pytest.mark.slow(why="starts interpreters and launches their systems")
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("layer", "--tiny --tokens 16 --repeats 1 --dtype float32"),
        ("step", "--ranks 1 --tokens 512 --layers 1 --experts 8 --repeats 1 --no-memory --systems "
         "expertmesh_ep1,expertmesh_lora_ep1,unsharded"),
        ("accumulation", "--ranks 1 --tokens 64 --layers 2 --experts 8 --repeats 1 --micro-batches 2 --systems "
         "expertmesh_ep1,expertmesh_by_layer_full_ep1,unsharded"),
    ],
)  # fmt: skip
def test_the_scripts_of_the_published_figures_run(script: str, arguments: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{script}", *arguments.split()]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "expertmesh_" in done.stdout


def test_rows_of_a_placement_are_counted_as_token_by_token() -> None:
    draw, order = np.random.default_rng(1), (5, 0, 7, 2, 1, 3, 4, 6)
    chosen = placement.choices(placement.Routing("tiny", 8, 3), draw)[:500]
    ranks = [{order.index(expert) // 2 for expert in token} for token in chosen.tolist()]
    assert {len(set(token)) for token in chosen.tolist()} == {3}
    pairs, rows = placement.work_of_ranks(chosen, order, ((),) * 4).tolist()
    assert rows == [sum(rank in held for held in ranks) for rank in range(4)]
    assert pairs == [sum(order.index(expert) // 2 == rank for expert in chosen.ravel()) for rank in range(4)]
    # With a copy on each rank: tokens come from all ranks by turns, go to their own, else by turns to all that hold it.
    copies = ((0,), (5,), (5,), (5,))
    homes = {expert: order.index(expert) // 2 for expert in range(8)}
    held = {expert: sorted({home, *(r for r in range(4) if expert in copies[r])}) for expert, home in homes.items()}
    ranks = []
    for number, token in enumerate(chosen.tolist()):
        at, turn = number % 4, number // 4
        ranks.append([at if at in held[e] else held[e][turn % len(held[e])] for e in token])
    pairs, rows = placement.work_of_ranks(chosen, order, copies).tolist()
    assert rows == [sum(rank in of for of in ranks) for rank in range(4)]
    assert pairs == [sum(of.count(rank) for of in ranks) for rank in range(4)]
    # Popular experts are chosen more often: the first of Zipf's by most tokens.
    counts = np.bincount(chosen.ravel(), minlength=8)
    assert counts.max() > 0.6 * len(chosen) > 2 * counts.min()


def _counted() -> list[tuple[list[str], dict[str, CollectiveCount]]]:
    group, x, whole = dist.group.WORLD, torch.ones(8), torch.empty(16)
    counted = []
    for issue in (
        lambda: (all_gather_into(whole, x), reduce_scatter_into(x, whole), dist.all_reduce(x)),
        lambda: (
            torch.ops._c10d_functional.all_gather_into_tensor(x, 2, group.group_name),
            torch.ops._c10d_functional.reduce_scatter_tensor(whole, "sum", 2, group.group_name),
            torch.ops._c10d_functional.all_reduce(x, "sum", group.group_name),
        ),
    ):
        with UsageTracker() as tracker:
            issue()  # type: ignore[no-untyped-call]
        counted.append((list(tracker.sent), count_collectives(issue)))
    return counted


def test_functional_collectives_are_counted_as_those_of_c10d_are() -> None:
    plain, functional = shared_ranks(_counted, 2)[0]
    assert plain == functional
    assert plain[1] == {kind: CollectiveCount(1, 64) for kind in ("all_gather", "reduce_scatter")} | {
        "all_reduce": CollectiveCount(1, 32)
    }


def test_tables_are_aligned_markdown() -> None:
    assert result.markdown(("a", "long"), [("longer", "1")]) == (
        "| a      | long |\n| ------ | ---- |\n| longer |    1 |"
    )
