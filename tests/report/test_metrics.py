"""metrics.jsonl as columns, whatever state it is in: nothing ends the report, nothing is left out in silence."""

import json
from pathlib import Path

import numpy as np
import pytest

from expertmesh.report.run import read_metrics
from tests.report.made_up import row
from tests.support.errors import refused


def _read(tmp_path: Path, *lines: object, end: str = "\n") -> "tuple[object, ...]":
    file = tmp_path / "metrics.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("\n".join(texts) + end, encoding="utf-8", errors="surrogateescape")
    return (read_metrics(file),)


def test_rows_become_columns_with_a_gap_for_what_is_null_or_left_out(tmp_path: Path) -> None:
    skipped = row(2, 3, 2, loss=float("nan"), skipped="the loss is nan on rank 1") | {"loss": None, "grad_norm": None}
    evaluation = {"step": 3, "eval_loss": 2.5, "eval_target_tokens": 70}
    (metrics,) = _read(tmp_path, row(1, 3, 2, z_loss=0.25), skipped, row(3, 3, 2, tokens_per_second=None), evaluation)
    assert metrics.step.tolist() == [1, 2, 3]
    assert np.isnan(metrics["loss"]).tolist() == [False, True, False]
    assert np.isnan(metrics["tokens_per_second"]).tolist() == [False, False, True]
    assert metrics.skipped == ((2, "the loss is nan on rank 1"),)
    assert (metrics.eval_step.tolist(), metrics.evaluated["loss"].tolist()) == ([3], [2.5])
    assert metrics.load_SL["max_over_mean"].shape == (3, 2)
    assert metrics.has("z_loss")
    assert not metrics.has("aux_loss")
    assert metrics.notes == ()


def test_a_last_line_that_a_kill_cut_short_is_left_out_and_said(tmp_path: Path) -> None:
    whole = json.dumps(row(2, 2, 1))
    # Even a line that happens to be JSON: only its newline says that it was written whole.
    for cut in (whole[:-40], whole):
        (metrics,) = _read(tmp_path, row(1, 2, 1), cut, end="")
        assert metrics.step.tolist() == [1]
        assert "cut short" in metrics.notes[0]


STRANGE = [
    "not json", "[1, 2]", "7", '"text"', "{}", '{"step": "1", "loss": 1}', '{"step": true, "loss": 1}',
    '{"step": -1, "loss": 1}', '{"step": 1e99, "loss": 1}', '{"step": 5}', "[" * 100_000, "\udcff\udcfe",
]  # fmt: skip


def test_lines_that_are_no_rows_are_left_out_and_named(tmp_path: Path) -> None:
    (metrics,) = _read(tmp_path, row(1, 2, 1), *STRANGE, row(2, 2, 1))
    assert metrics.step.tolist() == [1, 2]
    assert metrics.notes == (
        f"Lines of metrics.jsonl that are no rows of metrics are left out: 2, 3, 4, 5, 6 and {len(STRANGE) - 5} more.",
    )


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 400, '"1.5"', "true", "[]", "null"])
def test_a_value_that_is_no_finite_number_is_a_gap(tmp_path: Path, value: str) -> None:
    load = f'[{{"max_over_mean": {value}, "dead": 1}}, {value}]'
    (metrics,) = _read(tmp_path, f'{{"step": 1, "loss": {value}, "expert_load": {load}}}')
    assert np.isnan(metrics["loss"][0])
    assert np.isnan(metrics.load_SL["max_over_mean"]).all()
    assert metrics.load_SL["dead"][0, 0] == 1


def test_a_step_that_is_there_twice_counts_once_and_layers_may_differ_in_number(tmp_path: Path) -> None:
    (metrics,) = _read(tmp_path, row(2, 2, 1), row(1, 2, 3), row(2, 2, 2, loss=9.0))
    assert metrics.step.tolist() == [1, 2]
    assert metrics["loss"][1] == 9.0
    assert np.isnan(metrics.load_SL["dead"][1]).tolist() == [False, False, True]
    assert metrics.notes == ("Steps that metrics.jsonl reports twice: 1; the later row counts.",)


def test_no_file_is_no_rows_and_a_directory_in_its_place_is_refused(tmp_path: Path) -> None:
    assert len(read_metrics(tmp_path / "metrics.jsonl").step) == 0
    with refused("run.unreadable-metrics"):
        read_metrics(tmp_path)


def test_seconds_per_step_count_the_steps_between_rows_and_never_run_backwards(tmp_path: Path) -> None:
    rows = [row(step, 9, 0, elapsed_seconds=at) for step, at in ((2, 4.0), (4, 8.0), (5, 6.0), (6, 9.0))]
    (metrics,) = _read(tmp_path, *rows)
    assert metrics.step_seconds()[1:].tolist() == [2.0, pytest.approx(float("nan"), nan_ok=True), 3.0]
