"""What a run prints: levels, ranks, one line per report, and how far long work is."""

import io
import logging
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from expertmesh.experts.placement import Placement
from expertmesh.io import terminal
from expertmesh.io.terminal import duration, print_log, tracked
from expertmesh.training.reporting.metrics import StepMetrics, placement_advice
from expertmesh.training.reporting.record import MoeLayer
from expertmesh.training.reporting.reporter import Collapse, Console, Reporter

log = logging.getLogger("expertmesh.of.some.part")


class _Clock:
    """Seconds that pass when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(terminal.time, "monotonic", lambda: self.now)


def _metrics(step: int, **others: Any) -> StepMetrics:
    values: dict[str, Any] = {"loss": 2.0, "grad_norm": 1.5, "learning_rate": 1e-5, "target_tokens": 100}
    values |= {"tokens_per_second": 4000.0, "peak_memory_bytes": 2**31, "elapsed_seconds": 1.0, "step_seconds": 2.0}
    load: list[dict[str, float | int]] = [{"max_over_mean": 2.0, "entropy": 0.9, "dead": 1}]
    return StepMetrics(step=step, epoch=0.25, **values, expert_load=load, **others)


def test_a_level_decides_what_is_printed_and_only_debug_lets_other_ranks_speak(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for level, rank, said in (
        ("info", 0, "line\nwarning\n"),
        ("warning", 0, "warning\n"),
        ("info", 1, ""),
        ("warning", 1, ""),
        ("debug", 0, "detail\nline\nwarning\n"),
        ("debug", 1, "rank 1: detail\nrank 1: line\nrank 1: warning\n"),
    ):
        print_log(level, rank)
        log.debug("detail")
        log.info("line")
        log.warning("warning")
        assert capsys.readouterr().out == said, (level, rank)
    print_log("info")


def test_long_work_says_how_far_it_is_now_and_then_and_short_work_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    print_log("info")
    clock = _Clock(monkeypatch)
    for seconds, lines in (
        (0.1, []),
        (5, ["load  2 of 20 tensors, 1 min 30 s left", "load  8 of 20 tensors, 1 min 0 s left"]),
    ):
        for number in tracked(range(20), 20, "load", "tensors"):
            clock.now += seconds
            assert number < 20
        assert capsys.readouterr().out.splitlines()[:2] == lines


def test_on_a_terminal_there_is_a_bar_below_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def items() -> Iterator[int]:
        for number in range(3):
            log.info(f"line {number}")
            yield number

    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    print_log("info")
    with terminal.bars() as outer:
        assert list(tracked(items(), 3, "load", "tensors")) == [0, 1, 2]
        with terminal.bars() as inner:
            assert inner is outer
    written = screen.getvalue()
    assert re.search(r"line 0\nload .*line 1\nload .*line 2\nload ", written, re.DOTALL)
    assert terminal._shown is None


def test_a_line_has_time_pace_share_of_the_peak_and_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    print_log("info")
    clock = _Clock(monkeypatch)
    written: list[dict[str, Any]] = []
    layer = MoeLayer(name="experts", experts=16, top_k=4)
    rows: Any = type("Rows", (), {"take": lambda event: written.append(event.row())})
    reporter = Reporter([rows, Console(10, 0, 8, Collapse(None, layer))], peak_tokens_per_second=10_000.0)
    reporter.emit(_metrics(1))
    clock.now += 30
    reporter.emit(_metrics(3, skipped="the loss is nan on rank 1"))
    reporter.emit(_metrics(10))
    first, second, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d  step 1/10  epoch 0\.25  loss 2\.0000  grad norm 1\.500  lr 1\.00e-05  2 s/step  "
        r"4,000 tokens/s \(500 a device\)  MFU 40\.0%  2\.00 GiB  load 2\.0x of at most 4, 1 of 16 dead  18 s left",
        first,
    )
    assert second.endswith("1 min 45 s left  SKIPPED: the loss is nan on rank 1")
    assert "left" not in last
    assert [row["mfu"] for row in written] == [0.4, 0.4, 0.4]
    assert "mfu" not in _metrics(1).row()
    assert [duration(each) for each in (5, 250, 18_200, 400_000)] == ["5 s", "4 min 10 s", "5 h 3 min", "4.6 days"]


def test_a_placement_is_advised_where_it_takes_a_tenth_off_the_busiest_rank() -> None:
    """Four experts on two ranks: tokens (6, 2, 1, 1) give 1.6 in the model's order, and 1.4 at best."""
    loads, contiguous = {"a": [60, 20, 10, 10], "b": [60, 20, 10, 10]}, Placement(2, {})
    (line,) = placement_advice(loads, contiguous)
    assert line == (
        "placement  the busiest EP rank had 1.60 times the mean load (mean of layers); moe.placement: balanced would "
        "give 1.40 by this run's expert_load.json"
    )
    best, own = (0, 2, 1, 3), (0, 1, 2, 3)
    assert placement_advice(loads, Placement(2, {"a": best, "b": best})) == []
    assert placement_advice(loads, Placement(2, {"a": best, "b": own})) == []  # 1.50 in the mean
    (line,) = placement_advice(loads, Placement(2, {"a": own, "b": own}))
    assert "1.60 times the mean load under its placement (mean of layers); a new one would give 1.40" in line
    assert placement_advice(loads, Placement(1, {})) == []
