"""Where a run's wall time went, from records written by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from expertmesh.cli.report import run as report
from expertmesh.report.run import Goodput, read_run
from expertmesh.training.reporting.record import read_record, write_record
from expertmesh.training.reporting.reporter import MetricsFile
from tests.report.made_up import record, row, start, write_run

# Steps of 2 s. An evaluation of 5 s and a save of 1 s after step 2, at 10 s; killed after step 4.
ROWS: list[dict[str, Any]] = [
    row(1, 4, 1) | {"step_seconds": 2.0, "elapsed_seconds": 2.0},
    row(2, 4, 1) | {"step_seconds": 2.0, "elapsed_seconds": 4.0},
    {"step": 2, "eval_loss": 3.0, "eval_target_tokens": 9, "eval_runtime": 5.0},
]
LATER = [
    row(3, 4, 1) | {"step_seconds": 2.0, "elapsed_seconds": 12.0},
    row(4, 4, 1) | {"step_seconds": 2.0, "elapsed_seconds": 14.0},
]
AGAIN = {"after_step": 2, "startup_seconds": 7.0, "elapsed_seconds": 10.0, "lost_seconds": 4.0}


def test_the_parts_of_a_run_that_was_killed_once_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    starts = [
        start(0, 4, started="2026-11-20T12:00:00+00:00", startup_seconds=20.0),
        # 10 s kept, 4 s lost, 7 s of start-up: 39 s later it had waited for 18 s.
        start(total_steps=4, started="2026-11-20T12:00:39+00:00", **AGAIN),
    ]
    ended = {"step": 4, "eval_loss": 3.0, "eval_target_tokens": 9, "eval_runtime": 5.0}
    directory = write_run(tmp_path / "run", starts=starts, rows=[*ROWS, *LATER, ended])
    found = read_run(directory).goodput
    assert found == Goodput(training=8.0, evaluation=5.0, saving=1.0, lost=4.0, startup=27.0, waiting=18.0)
    assert found.wall == 39.0 + 20.0 + 4.0
    assert found.share == 8 / 63
    report([str(directory)])
    parts = "training 8 s, evaluation 5 s, saving 1 s, lost 4 s, startup 27 s, waiting 18 s"
    assert f"goodput 13% of 63 s: {parts}" in capsys.readouterr().out
    assert "Where the time went" in (directory / "report.html").read_text()


def test_what_is_done_again_is_known_from_the_rows_that_are_dropped(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", rows=[*ROWS, *LATER], starts=[start(0, 4)])
    rows = MetricsFile(directory / "metrics.jsonl", 2)
    rows.file.close()
    assert rows.before == 14.0
    assert [json.loads(line)["step"] for line in rows.path.read_text().splitlines()] == [1, 2, 2]


def test_a_start_that_is_left_out_leaves_its_time_to_the_next(tmp_path: Path) -> None:
    write_run(tmp_path / "run", starts=[start(0, 4, startup_seconds=20.0), start(total_steps=4, **AGAIN)])
    write_record(record([start(total_steps=4, **AGAIN)]), tmp_path / "run")
    found = read_record(tmp_path / "run")
    assert found is not None
    assert [(each.after_step, each.startup_seconds, each.lost_seconds) for each in found.starts] == [
        (0, 20.0, 0.0),
        (2, 14.0, 8.0),
    ]


def test_records_that_do_not_tell_have_no_goodput(tmp_path: Path) -> None:
    for name, changes, rows in (("a", {"started": "noon"}, ROWS), ("b", {}, [])):
        directory = write_run(tmp_path / name, starts=[start(0, 4, **changes)], rows=rows)
        assert read_run(directory).goodput is None
