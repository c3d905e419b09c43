"""A measured load in the plan, and the placement that `plan --placement` makes of it; no rank is started."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.shapes import qwen3_30b_a3b
from expertmesh.cli.main import main
from expertmesh.config import PrecisionConfig
from expertmesh.distributed.layout import Layout, TopKRouter, rows_per_token
from expertmesh.experts.placement import LOAD_FILE, balanced_order, read_placement, write_loads
from expertmesh.planning.hardware import hardware_table, parse_devices
from expertmesh.planning.memory import memory_of
from expertmesh.planning.model_figures import ModelFigures
from expertmesh.planning.search import Candidate, Job, evaluate, measured_imbalance
from expertmesh.planning.stages import Batch
from tests.support.models import tiny_config
from tests.support.planned import figures_of

LAYERS, BATCH = 4, Batch(2, 1)
# The first experts are the busiest, so that contiguous placement has them on one rank.
SKEWED = [round(10**6 / (expert + 1)) for expert in range(128)]


@pytest.fixture(scope="module")
def qwen() -> ModelFigures:
    config = qwen3_30b_a3b()
    config.num_hidden_layers = LAYERS
    return figures_of(config, length=4096, precision=PrecisionConfig())


def _job(model: ModelFigures, by_layer: Sequence[Sequence[int]] | None) -> Job:
    job = Job(model, parse_devices("8 h100", hardware_table()), 64)
    if by_layer is None:
        return job
    loads = dict(zip((spec.name for spec in model.anatomy.experts), by_layer, strict=True))
    return replace(job, measured=measured_imbalance(loads, model.anatomy))


def _plan(job: Job, layout: Layout) -> Candidate:
    return evaluate(job, layout, "none", BATCH)


def test_a_skewed_load_costs_more_the_larger_ep_is(qwen: ModelFigures) -> None:
    even, skewed = _job(qwen, None), _job(qwen, [SKEWED] * LAYERS)
    more = {}
    for ep in (1, 2, 4, 8):
        layout = Layout(fsdp=8, ep=ep)
        before, after = _plan(even, layout), _plan(skewed, layout)
        more[ep] = after.speed.seconds - before.speed.seconds
        assert (after.memory.total > before.memory.total) == (ep > 1)
        if ep == 8:
            factor = sum(SKEWED[:16]) * 8 / sum(SKEWED)
            assert after.workload.imbalance == pytest.approx(factor)
            assert after.speed.experts == pytest.approx(before.speed.experts * factor, rel=0.01)
            rows = rows_per_token(TopKRouter(128, 8), 8)
            (sent,), (received,) = (
                [link.transfer.bytes for link in each.speed.links if link.transfer.axis == "ep"]
                for each in (before, after)
            )
            # A rank has no more rows than the tokens of its group, however many of their experts are there.
            assert received / sent == pytest.approx(min(factor, 8 / rows), rel=0.01)
    assert 0 == more[1] < more[2] < more[4] < more[8]


def test_time_goes_by_the_mean_of_layers_and_memory_at_work_by_the_worst(qwen: ModelFigures) -> None:
    even = [1] * 128
    one, all_layers = _job(qwen, [even, even, even, SKEWED]), _job(qwen, [SKEWED] * LAYERS)
    layout = Layout(fsdp=8, ep=8)
    seconds = [_plan(job, layout).speed.experts for job in (_job(qwen, None), one, all_layers)]
    assert seconds[1] - seconds[0] == pytest.approx((seconds[2] - seconds[0]) / LAYERS, rel=0.01)
    both = [_plan(job, layout).workload for job in (one, all_layers)]
    assert both[0].imbalance == both[1].imbalance > both[0].mean_imbalance(0) > 1
    full = [memory_of(replace(each, mode="full")).total for each in both]
    assert full[0] == full[1]
    # Of two pipeline stages the second has the busy layer, and all wait for it.
    cut = Layout(pp=2, fsdp=4, ep=4)
    first, second = (_plan(one, cut).workload.mean_imbalance(stage) for stage in (0, 1))
    assert first == 1 < second
    assert _plan(one, cut).speed.experts > _plan(_job(qwen, None), cut).speed.experts


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the configuration of a model and the load of a run: 2 layers of 8 experts."""
    root = tmp_path_factory.mktemp("run")
    tiny_config("qwen3_moe").save_pretrained(root)
    write_loads(root / LOAD_FILE, {f"model.layers.{n}.mlp.experts": [9, 9, 9, 5, 1, 1, 1, 1] for n in range(2)}, 1, 9)
    return root


def test_plan_reads_the_load_of_a_run(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    small = ["plan", str(run), "--seq-len", "64", "--devices", "2x2 cpu"]
    assert main([*small, "--load", str(run)]) == 0
    out = capsys.readouterr().out
    assert "busiest EP rank over the mean" in out
    lines = [line.split() for line in out.splitlines()]
    assert ["4", "2.00", "2.00", "1.11", "1.11", "1.11", "1.11"] in lines
    assert "tokens are spread evenly" not in out
    assert main([*small, "--load", str(run / LOAD_FILE), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(each["ep"], each["contiguous"][0] > each["balanced"][0]) for each in found["load"]] == [(2, 1), (4, 1)]
    other = tmp_path / LOAD_FILE
    write_loads(other, {"model.layers.0.mlp.experts": [1] * 8}, 1, 1)
    for options, said in (
        (["--load", str(other)], "the model has 8 experts for model.layers.1.mlp.experts, and the file has no such"),
        (["--load", str(run), "--imbalance", "2"], "--load and --imbalance: give one of them"),
        (["--load", str(tmp_path / "none")], "there is no such file"),
    ):
        assert main([*small, *options]) == 2
        assert said in capsys.readouterr().err


def test_plan_writes_a_placement_by_the_load_of_a_run(
    run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "placement.json"
    words = ["plan", "--placement", str(run), "--ep", "4", "--output", str(path)]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert ["4", "2.00", "2.00", "1.11", "1.11", "1.11", "1.11"] in [line.split() for line in out.splitlines()]
    assert f"train with moe.placement={path} parallel.ep=4" in out
    placement = read_placement(path)
    assert (placement.ep, len(placement.orders)) == (4, 2)
    assert set(placement.orders.values()) == {balanced_order([9, 9, 9, 5, 1, 1, 1, 1], 4)}
    copied = tmp_path / "copied.json"
    assert main([*words[:-1], str(copied), "--replicas", "1"]) == 0
    out = capsys.readouterr().out
    assert ["4", "2.00", "2.00", "1.11", "1.11", "1.11", "1.11"] in [line.split() for line in out.splitlines()]
    assert f"train with moe.placement={copied} moe.replicas=1 parallel.ep=4" in out
    assert read_placement(copied).replicas == 1
    for changed, said in (
        (words, "exists already and stays as it is"),
        (["plan", "--placement", str(run)], "--placement: give --ep"),
        (
            ["plan", "--placement", str(run), "--ep", "3", "--output", str(tmp_path / "b")],
            "does not divide the model's",
        ),
        ([*words[:-1], str(tmp_path / "b"), "--replicas", "7"], "other ranks have 6 experts"),
        (["plan", "m", *words[1:]], "--placement: takes --ep, --replicas and --output alone"),
        (["plan", "--placement", str(tmp_path / "none"), "--ep", "2", "--output", str(tmp_path / "b")], "no such file"),
        (["plan", "m", "--devices", "8 h100", "--ep", "2"], "--ep: of --placement, which is not given"),
        (["plan", "m"], "give MODEL and --devices, or --placement and --ep"),
        (["plan"], "give MODEL and --devices, or --placement and --ep"),
    ):
        assert main(changed) == 2
        assert said in capsys.readouterr().err
