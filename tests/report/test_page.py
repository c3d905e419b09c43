"""The page of every kind of run: well-formed, alone, telling what is there and what is not."""

import json
import math
import os
import re
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from expertmesh.cli.main import main
from expertmesh.report import page as page_module
from expertmesh.report.page import render, write
from expertmesh.report.run import RESULTS, read_run
from expertmesh.training.lock import RunLock
from expertmesh.training.reporting.record import Bin, DataRecord, ShownSample, TextPiece
from expertmesh.training.startup.output_dir import ADAPTER, MODEL
from expertmesh.verification.result import Check, Figure, Layer, Mutation, Report, write_proof
from tests.report.made_up import PREDICTED, row, start, write_run
from tests.report.parsed import Page

SECTIONS = {"training", "experts", "data", "plan", "verification", "starts", "configuration"}


@pytest.fixture
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what is said around them: to draw them takes most of the time."""
    monkeypatch.setattr(page_module, "draw", lambda run: {})


def page_of(directory: Path) -> Page:
    page = Page(render(read_run(directory)))
    assert set(page.texts) >= SECTIONS
    assert page.tags.count("h1") == 1
    return page


def verification(status: str = "pass", name: str = "every gradient", note: str = "", **worst: Any) -> dict[str, Any]:
    figure = {"tensor": "model.norm.weight", "error": 3.1e-7, "limit": 1e-5} | worst
    check = {"name": name, "status": status, "worst": figure, "compared": 212, "note": note}
    whole = {"name": "experts owned", "status": "pass", "worst": None, "compared": 64, "note": "each 1 time"}
    return {
        "format": "expertmesh-proof",
        "version": 1,
        "status": status,
        "layers": [
            {"name": "bytes", "status": "pass", "seconds": 0.1, "checks": [whole]},
            {"name": "backward", "status": status, "seconds": 0.1, "checks": [check]},
        ],
        "mutations": [],
    }


def test_a_run_s_figures_tables_and_configuration_are_on_the_page(tmp_path: Path) -> None:
    rows = [row(step, 40, 3) for step in range(1, 41)]
    rows[6] = row(7, 40, 3, skipped="the loss is nan on rank 1") | {"loss": None, "grad_norm": None}
    rows += [{"step": step, "eval_loss": 3.0 - step / 40, "eval_target_tokens": 500} for step in (20, 40)]
    starts = [start(), start(20, world_size=8, versions={"expertmesh": "0.1.0", "torch": "2.12.0"}), start(30)]
    run = write_run(tmp_path / "a run", rows=rows, starts=starts)
    (run / "model").mkdir()
    for step in (20, 40):
        (run / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    page = page_of(run)
    told = [described.split(" over steps")[0] for described in page.described]
    assert told == [
        "Loss", "Gradient norm", "Learning rate", "Tokens per second", "Peak memory, GiB",
        "Expert load per layer", "Load of EP ranks per layer", "Entropy of the experts' shares per layer",
        "Dead experts per layer",
    ]  # fmt: skip
    assert "Finished at step 40 of 40; the result is in model/" in page.texts["top"]
    assert "model, 2026-" in page.texts["top"]
    cards = ["Loss", "Evaluation loss", "Tokens per second", "Peak memory", "Skipped steps", "Highest expert load"]
    assert re.findall(r"<dt>(.*?)</dt>", page.source) == cards
    assert (
        "some/model: qwen3_moe, 1.23M parameters, 3 MoE layers of 8 experts. Full fine-tuning on 4 ranks" in page.text
    )
    assert "Skipped steps: 1" in page.texts["training"]
    assert "the loss is nan on rank 1" in page.texts["training"]
    assert "1 row without a finite value" in page.texts["training"]
    assert "Dashed vertical lines mark where the run was resumed" in page.texts["training"]
    assert "last evaluation 2" in page.texts["training"]
    assert "at most 1.9× in block 3 at step 14" in page.texts["experts"]  # the third MoE layer is in the fourth block
    assert "at most 1.35× in block 3 at step 1" in page.texts["experts"]
    assert "; busiest EP rank 1.35×, lately 1.3×" in page.texts["top"]
    assert "24 = 2 micro-batch × 4 data ranks × 3 accumulation" in page.texts["plan"]
    assert "Speed and memory were not predicted" in page.texts["plan"]
    assert "2.13.0 (earlier: 2.12.0)" in page.texts["starts"]
    assert "checkpoints of step 20, step 40, model/" in page.texts["starts"]
    assert "max_grad_norm: 1.0" in page.texts["configuration"]


def test_a_single_value_is_no_picture_and_what_did_not_happen_has_no_card(tmp_path: Path) -> None:
    rows = [row(step, 4, 1) for step in range(1, 5)]
    rows += [{"step": 4, "eval_loss": 2.0, "eval_target_tokens": 500, "eval_token_accuracy": 0.43}]
    page = page_of(write_run(tmp_path / "run", rows=rows))
    assert not any("Token accuracy" in described for described in page.described)
    assert "the only one; token accuracy 0.43" in page.texts["top"]
    assert {"Skipped steps", "Verified"}.isdisjoint(re.findall(r"<dt>(.*?)</dt>", page.source))


def test_a_preference_run_shows_its_rewards_and_how_often_the_chosen_response_wins(tmp_path: Path) -> None:
    def rewards(step: int, prefix: str = "") -> dict[str, float]:
        chosen, rejected = step / 80, -step / 40
        means = {"chosen": chosen, "rejected": rejected, "margins": chosen - rejected, "accuracies": 0.5 + step / 100}
        return {f"{prefix}rewards/{name}": value for name, value in means.items()}

    rows = [row(step, 40, 1, **rewards(step)) for step in range(1, 41)]
    rows += [{"step": 40, "eval_loss": 0.5, **rewards(20, "eval_")}]
    page = page_of(write_run(tmp_path / "run", rows=rows, more="objective: {name: dpo}\n"))
    told = [described.split(" over steps")[0] for described in page.described]
    assert told[:4] == ["Loss", "Rewards", "Reward margins", "Reward accuracy"]
    assert "per pair: first" in page.texts["training"]
    assert "chosen, first 0.0125, last 0.5" in page.texts["training"]
    assert "rejected, first -0.025, last -1" in page.texts["training"]
    assert "last 0.9, lowest 0.51, highest 0.9; last evaluation 0.7" in page.texts["training"]


@pytest.mark.usefixtures("without_figures")
def test_what_was_predicted_stands_beside_what_was_measured(tmp_path: Path) -> None:
    rows = [row(step, 40, 1, tokens_per_second=5000.0) for step in range(1, 41)]
    page = page_of(write_run(tmp_path / "run", rows=rows, starts=[start(plan=PREDICTED)]))
    told = page.texts["plan"]
    for figures in ("0.25 s 0.5 s 2.00×", "10,000 5,000 0.50×"):
        assert figures in told
    # Of a processor, resident memory and tensors stand apart.
    assert "tensors of a rank 2.0 GiB resident memory of a rank 3.0 GiB" in told
    assert "the resident memory of the whole process" in told
    assert "not predicted" not in told


@pytest.mark.usefixtures("without_figures")
def test_a_prediction_is_compared_with_what_came_after_its_start_alone(tmp_path: Path) -> None:
    rows = [row(step, 40, 1, tokens_per_second=100.0 if step <= 20 else 20_000.0) for step in range(1, 41)]
    page = page_of(write_run(tmp_path / "run", rows=rows, starts=[start(), start(20, plan=PREDICTED, device="cuda")]))
    assert "10,000 20,000 2.00×" in page.texts["plan"]
    assert "peak memory of a rank 2.0 GiB 3.0 GiB 1.50×" in page.texts["plan"]
    assert "resident" not in page.texts["plan"]


@pytest.mark.usefixtures("without_figures")
def test_starts_on_other_ranks_are_listed(tmp_path: Path) -> None:
    """Of an elastic run, or of one that somebody has started anew elsewhere."""
    fewer = {"pp": 1, "replicate": 2, "fsdp": 1, "cp": 1, "tp": 1, "efsdp": 1, "ep": 1}
    starts = [start(), start(10, world_size=2, layout=fewer), start(20)]
    told = page_of(write_run(tmp_path / "run", starts=starts)).text
    said = "It ran on 4 ranks (fsdp 4, efsdp 2, ep 2) from step 1, 2 ranks (replicate 2) from step 11, 4 ranks ("
    assert said in told
    assert "It ran on" not in page_of(write_run(tmp_path / "same", starts=[start(), start(20)])).text


def test_values_under_the_pointer_are_where_the_figures_draw_them(tmp_path: Path) -> None:
    rows = [row(step, 40, 3, expert_tokens=[[8, 0, 4], [4, 4, 4], [0, 0, 12]]) for step in range(1, 41)]
    rows += [{"step": 20, "eval_loss": 3.5}]
    page = page_of(write_run(tmp_path / "run", rows=rows))
    loss = page.hovers[0]["lines"]
    assert [line["name"] for line in loss] == ["training", "evaluation"]
    assert loss[0]["step"] == list(range(1, 41))
    assert loss[0]["value"][0] == pytest.approx(rows[0]["loss"], rel=1e-3)
    assert (loss[1]["step"], loss[1]["value"]) == ([20], [3.5])
    # Evenly from left to right, inside of the picture of 432 by 223 points.
    gaps = [after - before for before, after in pairwise(loss[0]["x"])]
    assert max(gaps) - min(gaps) < 0.3
    assert 20 < loss[0]["x"][0] < loss[0]["x"][-1] < 432
    assert loss[1]["x"][0] == loss[0]["x"][19]
    grids = [hover for hover in page.hovers if "box" in hover]
    assert grids[0]["rows"] == ["block 1", "block 2", "block 3"]
    assert grids[0]["values"][2][39] == pytest.approx(rows[39]["expert_load"][2]["max_over_mean"], rel=1e-3)
    tokens = grids[-1]
    assert tokens["columns"] == ["expert 0", "expert 1", "expert 2"]
    assert tokens["values"] == [[2, 0, 1], [1, 1, 1], [0, 0, 3]]
    left, top, right, bottom = tokens["box"]
    assert 0 < left < right < 432
    assert 0 < top < bottom < 223
    assert "over the mean of its layer, in the report of step 40" in page.texts["experts"]


def test_each_evaluation_set_is_drawn_and_answers_stand_as_text(tmp_path: Path) -> None:
    rows = [row(step, 40, 1) for step in range(1, 41)]
    for step in range(5, 41, 5):
        sample = {"set": "code", "source": "c.jsonl:1", "prompt": "<b>1 + 1?", "answer": f"try {step}", "expected": "2"}
        figures = {"eval_loss": 2.0, "eval_token_accuracy": 0.5, "eval_my_code_loss": 3.0 - step / 40}
        figures |= {"eval_my_code_token_accuracy": step / 80, "eval_chat_loss": None, "eval_samples": [sample, 7]}
        rows.append({"step": step, **figures})
    page = page_of(write_run(tmp_path / "run", rows=rows))
    loss, accuracy = page.hovers[0]["lines"], page.hovers[1]["lines"]
    assert [line["name"] for line in loss] == ["training", "evaluation", "evaluation of my_code", "evaluation of chat"]
    assert loss[2]["value"][-1] == 2.0
    assert [line["name"] for line in accuracy[:2]] == ["evaluation", "evaluation of my_code"]
    assert accuracy[1]["value"][-1] == 0.5
    told = page.texts["training"]
    assert "set loss token accuracy my_code 2 0.5 chat" in told
    assert "code: c.jsonl:1 <b>1 + 1?" in told
    # Of the first evaluation, the last, and some between.
    assert re.findall(r"step (\d+) try (\d+)", told) == [("5", "5"), ("15", "15"), ("30", "30"), ("40", "40")]
    assert "the data 2" in told


def test_the_data_page_marks_what_is_learned_and_draws_lengths(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=3)
    pieces = [TextPiece(text="What is 1 + 1?", is_target=False), TextPiece(text="<b>2</b>", is_target=True)]
    samples = [ShownSample(source="train.jsonl:1", tokens=900, targets=2, pieces=pieces)]
    lengths = [Bin(above=0, up_to=64, samples=7), Bin(above=64, up_to=None, samples=2)]
    (run / "data.json").write_text(DataRecord(samples=samples, lengths=lengths).model_dump_json())
    source = render(read_run(run))
    told = Page(source).texts["data"]
    assert "train.jsonl:1 900 tokens, 2 targets; the beginning What is 1 + 1?<b>2</b>" in told
    assert "<mark>&lt;b&gt;2&lt;/b&gt;</mark>" in source
    assert any("Lengths of all samples" in described for described in Page(source).described)
    (run / "data.json").write_text("{}")
    page = page_of(run)
    assert "data.json is left out" in page.texts["top"]
    assert "left no data.json" in page.texts["data"]


def _advice(directory: Path, change: Callable[[int], dict[str, Any]], *more: dict[str, Any]) -> str:
    rows = [row(step, 40, 2, **{"loss": 2.0 - step / 100, **change(step)}) for step in range(1, 41)]
    return page_of(write_run(directory, rows=[*rows, *more])).texts["top"]


@pytest.mark.usefixtures("without_figures")
def test_each_anomaly_has_one_line_of_advice_and_a_sound_run_none(tmp_path: Path) -> None:
    def load(dead: int, load: float) -> list[dict[str, Any]]:
        return [{"max_over_mean": load, "entropy": 0.5, "dead": dead}] * 2

    evaluations = [{"step": step, "eval_loss": loss} for step, loss in ((10, 2.0), (20, 1.5), (40, 1.9))]
    sound = {"grad_norm": 0.5}
    for number, (change, more, said) in enumerate([
        (lambda step: sound, [], ""),
        (lambda step: sound | ({"skipped": "the loss is nan"} if step == 3 else {}), [], "1 step was skipped"),
        (lambda step: sound | {"loss": 1.0 + step / 10}, [], "The loss has grown from 1.25 to 4.85"),
        (lambda step: {"grad_norm": None}, [], ""),
        (lambda step: {"grad_norm": 0.0}, [], "The gradient norm was 0 in every step"),
        (lambda step: {"grad_norm": 2.0}, [], "100% of the steps were clipped to optim.max_grad_norm 1"),
        (lambda step: sound, evaluations, "The evaluation loss was lowest (1.5) at step 20 and is 1.9 at the end"),
        (lambda step: sound | {"expert_load": load(4, 2.0)}, [], "collapsed in block 0, 1: up to 4 of 8 experts are"),
        (lambda step: sound | {"expert_load": load(2, 3.9)}, [], "busiest has 3.9 times the mean of at most 4; lower"),
        (lambda step: sound | {"expert_load": load(1, 4.0)}, [], ""),
        (lambda step: sound | {"expert_load": load(0, step / 10)}, [], " of at most 4 times the mean: a step waits"),
        (lambda step: sound | {"tokens_per_second": 9000.0 - 100 * step}, [], "Tokens per second fell from 8,750 to"),
    ]):  # fmt: skip
        told = _advice(tmp_path / str(number), change, *more)
        assert ("What to do" in told) is bool(said)
        assert said in told


def test_several_runs_stand_on_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write_run(tmp_path / "first", rows=[row(step, 40, 1) for step in range(1, 41)])
    second = write_run(tmp_path / "<second>", steps=10, more="lora: {r: 4}\n")
    (second / "run.json").unlink()
    out = tmp_path / "both.html"
    assert main(["report", str(first), str(second), "--output", str(out)]) == 0
    assert "stopped, step 10, 10 steps" in capsys.readouterr().out.replace(" of 10", "")
    page = Page(out.read_text("utf-8"))
    assert "A first stopped 40" in page.texts["results"]
    assert "B <second> stopped 10" in page.texts["results"]
    assert "lora.r null 4" in page.texts["differences"].replace("– 4", "null 4")
    assert "train.max_steps 40 10" in page.texts["differences"]
    assert "output_dir" not in page.texts["differences"]
    assert [line["name"] for line in page.hovers[0]["lines"]] == ["A", "B"]
    assert len(page.described) == 4
    assert "There is no run.json" in page.text
    assert main(["report", *[str(first)] * 27]) == 2


HOSTILE = (
    "</style></title><script>alert(1)</script><img src=http://evil/x onerror=alert(1)>&amp;'\"$\\frac$\u202e\x1b[2J"
)


def test_no_string_of_a_run_can_become_markup(tmp_path: Path) -> None:
    directory = tmp_path / "<script>alert(2)</script>&'\""
    versions, layout = {HOSTILE: HOSTILE}, {HOSTILE: 4}
    hostile = start(device_name=HOSTILE, dispatch=HOSTILE, printed=[HOSTILE], versions=versions, layout=layout)
    rows = [row(1, 2, 2), row(2, 2, 2, skipped=HOSTILE)]
    run = write_run(directory, model=HOSTILE.replace("\x1b", ""), starts=[hostile], rows=rows)
    record = json.loads((run / "run.json").read_text())
    record["model_type"] = record["moe_layers"][0]["name"] = HOSTILE
    (run / "run.json").write_text(json.dumps(record))
    told = verification(name=HOSTILE, note=HOSTILE, tensor=HOSTILE, error=HOSTILE, limit=HOSTILE)
    (run / "verification.json").write_text(json.dumps(told))
    (run / "audit.json").write_text(json.dumps({"source": HOSTILE, "tensors": 3, "bytes_compared": 7}))
    page = page_of(run)  # no script, no handler, nothing that loads: see Page
    shown = HOSTILE.replace("\u202e", "\\u202e").replace("\x1b", "\\x1b")
    for section in ("top", "training", "plan", "verification", "starts"):
        assert "<script>alert(" in page.texts[section], section
        assert not {"\u202e", "\x1b"} & set(page.texts[section])
    for section in ("training", "plan", "verification", "starts"):
        assert shown in page.texts[section], section
    assert "<script>alert(1)</script>" in page.texts["configuration"]


def test_an_empty_run_says_that_nothing_has_happened_yet(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=0)
    page = page_of(run)
    assert "Not started: no step has been reported yet" in page.texts["top"]
    assert "no step yet" in page.texts["training"]
    assert "svg" not in page.tags
    for name in ("config.yaml", "run.json"):
        (run / name).unlink()
    page = page_of(run)  # metrics.jsonl alone, and empty
    assert "There is no run.json" in page.texts["top"]
    assert "no configuration that can be read" in page.texts["configuration"]


def test_one_step_a_step_without_any_number_and_no_layer_are_drawn_too(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "one", rows=[row(1, 1, 1)]))
    assert page.tags.count("svg") == 4  # heat maps; a curve of one point tells nothing
    null = dict.fromkeys(("loss", "grad_norm", "learning_rate", "tokens_per_second", "peak_memory_bytes"))
    page = page_of(write_run(tmp_path / "none", rows=[row(1, 2, 0) | null, row(2, 2, 0) | null]))
    assert page.tags.count("svg") == 0
    assert "No step has reported the load" in page.texts["experts"]
    equal = [row(step, 3, 2, grad_norm=0.0) for step in (1, 2, 3)]
    for each in equal:
        for layer in each["expert_load"]:
            layer |= {"max_over_mean": 1.0, "entropy": 1.0, "dead": 0}
    page = page_of(write_run(tmp_path / "equal", rows=equal))
    assert "Dead experts: none." in page.texts["experts"]


@pytest.mark.usefixtures("without_figures")
def test_a_run_that_goes_on_is_told_from_one_whose_process_is_gone(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row(41, 41, 3))[:100])
    with RunLock(run):
        page = page_of(run)
        assert "Running: step 40 of 40 when this page was written" in page.texts["top"]
        assert "cut short" in page.texts["top"]
        left_behind = (run / "lock.json").read_text()
    (run / "lock.json").write_text(left_behind)
    (run / "checkpoints" / "step-00000020").mkdir(parents=True)
    told = page_of(run).texts["top"]
    assert "Ended early after step 40 of 40: its process is gone and has left no result." in told
    assert f"expertmesh train {run}/config.yaml continues from the checkpoint of step 20." in told
    (run / "lock.json").unlink()
    assert "Stopped after step 40 of 40" in page_of(run).texts["top"]


def test_thousands_of_steps_are_thinned_and_the_page_says_so(tmp_path: Path) -> None:
    rows = [row(step, 5000, 2) for step in range(1, 5001)]
    rows[3210]["loss"] = 777.0
    run = write_run(tmp_path / "run", rows=rows)
    source = render(read_run(run))
    told = Page(source).texts
    assert "each of the 556 is the median of 9 rows" in told["training"]
    assert "highest 777" in told["training"]
    assert "the worst of up to 16 rows" in told["experts"]
    assert len(source) < 500_000


@pytest.mark.usefixtures("without_figures")
def test_verification_is_shown_as_it_is_or_its_command_if_there_is_none(tmp_path: Path) -> None:
    run, shown = write_run(tmp_path / "run", steps=1, layers=0), {}
    for name, content in {
        "none": None,
        "passed": verification(),
        "failed": verification("fail", error=0.25),
        "contradiction": verification("fail") | {"status": "pass"},
        "empty": verification() | {"layers": []},
        "missed": verification() | {"mutations": [{"bug": "experts exchanged", "status": "fail"}]},
        "newer": verification() | {"version": 2},
        "damaged": {"status": "pass"},
    }.items():
        (run / "verification.json").unlink(missing_ok=True)
        if content is not None:
            (run / "verification.json").write_text(json.dumps(content))
        page = page_of(run)
        shown[name] = page.texts["verification"], page.texts["top"]
    for name in ("none", "newer", "damaged"):
        assert "Not verified." in shown[name][0]
        assert f"expertmesh verify {run}/config.yaml" in shown[name][0]
        assert ("verification.json is left out" in shown[name][1]) is (name != "none")
    assert "Passed: what was run agrees with the unsharded model" in shown["passed"][0]
    assert "backward every gradient pass 3.1e-07 1e-05 model.norm.weight" in shown["passed"][0]
    assert "2 of 2 layers passed" in shown["passed"][1]
    assert "FAILED: see backward" in shown["failed"][0]
    for name in ("contradiction", "empty", "missed"):
        assert "FAILED: the report says passed, but what is in it does not" in shown[name][0]
    assert "0 of 1 planted bug caught; not caught: experts exchanged" in shown["missed"][0]


@pytest.mark.usefixtures("without_figures")
def test_what_verify_writes_is_what_the_report_reads(tmp_path: Path) -> None:
    limit = Check.of("gradients", [Figure("model.norm.weight", 2e-6, 1e-5), Figure("lm_head.weight", math.nan, 1e-5)])
    layers = [Layer("bytes", [Check.that("experts owned", True, 64)]), Layer("backward", [limit])]
    missed = Mutation("experts exchanged", "forward", (("forward", "logits"),))
    found = Report({}, [*layers, Layer("artifacts", [Check.not_run("adapter", "no adapters")])], [missed])
    run = write_run(tmp_path / "run", steps=1, layers=0)
    write_proof(found, run / "verification.json")
    page = page_of(run)
    assert "verification.json is left out" not in page.texts["top"]
    assert "FAILED: see backward" in page.texts["verification"]
    assert "backward gradients fail nan 1e-05 lm_head.weight" in page.texts["verification"]
    assert "artifacts adapter not run" in page.texts["verification"]
    assert "1 of 1 planted bug caught" in page.texts["verification"]


def test_damaged_files_are_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "config.yaml").write_text("trian: {}\n")
    (run / "run.json").write_text("{")
    (run / "audit.json").write_text("[]")
    page = page_of(run)
    for sentence in ("trian is not a key", "run.json is left out", "audit.json is left out"):
        assert sentence in page.texts["top"]
    assert "trian: {}" in page.texts["configuration"]
    assert page.tags.count("svg") == 9


def test_the_results_that_the_report_looks_for_are_those_that_training_leaves() -> None:
    assert (MODEL, ADAPTER) == RESULTS


def test_the_command_writes_the_page_into_the_run_or_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")
    assert main(["report", str(run)]) == 0
    assert f"report      {run}/report.html" in capsys.readouterr().out
    Page((run / "report.html").read_text("utf-8"))
    assert main(["report", str(run), "--output", str(tmp_path / "page.html")]) == 0
    Page((tmp_path / "page.html").read_text("utf-8"))
    assert not list(tmp_path.rglob("*.tmp"))
    assert main(["report", str(run), "--output", str(tmp_path / "absent" / "page.html")]) == 2
    assert "cannot be written: No such file" in capsys.readouterr().err


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, said in ((tmp_path / "absent", "no such directory"), (tmp_path, "holds no run")):
        assert main(["report", str(path)]) == 2
        assert said in capsys.readouterr().err
    assert not os.listdir(tmp_path)


def test_without_matplotlib_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", steps=1)
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("importlib.machinery.PathFinder.find_spec", _without_matplotlib())
    assert main(["report", str(run)]) == 2
    assert "pip install 'expertmesh[report]'" in capsys.readouterr().err
    assert not (run / "report.html").exists()


def _without_matplotlib() -> Any:
    from importlib.machinery import PathFinder

    real = PathFinder.find_spec

    def find(name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.partition(".")[0] == "matplotlib" else real(name, path, target)

    return find


def test_a_page_is_never_written_through_a_link_in_the_run(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("mine")
    for name in ("report.html", "report.html.tmp"):
        (tmp_path / name).symlink_to(outside)
    write(tmp_path / "report.html", "<html>")
    assert outside.read_text() == "mine"
    assert (tmp_path / "report.html").read_text() == "<html>"
