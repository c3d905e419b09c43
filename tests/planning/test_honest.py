"""Predictions against what real gloo ranks hold and send; benchmarks/planning.py has all points."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import planning
from benchmarks.planning import POINTS, Honesty, Point, measure
from expertmesh.config import ParallelConfig
from expertmesh.distributed.layout import RoutedTokens, TopKRouter
from expertmesh.planning import traffic
from tests.support.ranks import run_ranks

BY_NAME = {point.name: point for point in POINTS}
STATE, SAVED, PEAK, TRAFFIC = 0.05, 0.05, 0.10, 0.02
_FOUND: dict[str, list[Any]] = {}


def _of_ranks(fn: Callable[..., Any], ranks: int, point: Point, **options: Any) -> list[Any]:
    """Return what the ranks of a point have found, who run once for all tests."""
    if point.name not in _FOUND:
        _FOUND[point.name] = run_ranks(fn, ranks, point, **options)
    return _FOUND[point.name]


def _check(found: Honesty) -> None:
    assert abs(found.state) <= STATE, found
    assert abs(found.saved) <= SAVED, found
    assert abs(found.peak) <= PEAK, found
    assert abs(found.traffic) <= TRAFFIC, found


@pytest.mark.slow_cases(r"(?!qwen3 ep2 of 4$).*", why="honesty of the planner: real ranks; one of eleven stays")
@pytest.mark.parametrize(
    "name",
    [
        "qwen3 ep2 of 4",
        "deepseek ep4 of 4, full",
        "qwen3 ep2 of 4, LoRA on nf4",
        "qwen3 tp2 ep2 of 4, LoRA",
        "qwen3 cp2 ep2 of 4, selective",
        "qwen3 tp2 cp2 ep4",
        "qwen3 pp4, 2 micro-batches",
        "qwen3 pp2 x 2 stages ep2, full, 4 micro-batches",
        "qwen3 tp2 ep2 of 4, full, blocks 0 and 1",
        "qwen3 ep2 of 4, full, 4 by layer",
    ],
)
def test_predictions_are_what_ranks_hold_and_send(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "run_ranks", _of_ranks)
    _check(measure(BY_NAME[name]))


@pytest.mark.slow(why="a layout's prediction stays")
def test_copies_of_experts_are_predicted_but_for_the_rows_that_they_keep_at_home() -> None:
    found = measure(BY_NAME["qwen3 ep4 of 4, LoRA, 2 copies"])
    assert 0 <= found.traffic <= 0.10, found
    _check(replace(found, traffic=0.0))


@pytest.mark.slow(why="a layout's prediction, what AdamW keeps included, and the planted bugs stay")
@pytest.mark.parametrize(
    "name",
    [
        "qwen3 tp2 ep2 of 4, adamw_8bit",
        "qwen3 ep2 of 4, LoRA, adamw_8bit",
        "qwen3 tp2 ep2 of 4, muon",
        "qwen3 ep2 of 4, LoRA, muon",
    ],
)
def test_what_optimizers_keep_is_exact(name: str) -> None:
    found = measure(BY_NAME[name])
    _check(found)
    assert abs(found.state) <= 1e-6, found


@pytest.mark.slow(why="qwen3 stays")
def test_a_router_that_sorts_and_a_mixture_in_attention_are_predicted() -> None:
    found = measure(Point("jetmoe ep2 of 4", "jetmoe", 4, ParallelConfig(ep=2)))
    _check(found)
    assert abs(found.state) <= 1e-6, found


def test_a_copy_of_a_token_for_each_expert_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def copies(router: TopKRouter, tokens: float, ranks: int, imbalance: float = 1.0) -> RoutedTokens:
        return RoutedTokens(tokens, tokens * router.top_k, tokens * router.top_k, tokens * router.top_k)

    monkeypatch.setattr(planning, "run_ranks", _of_ranks)
    _check(measure(BY_NAME["qwen3 ep2 of 4"]))
    monkeypatch.setattr(TopKRouter, "routed", copies)
    with pytest.raises(AssertionError, match="traffic="):
        _check(measure(BY_NAME["qwen3 ep2 of 4"]))


def test_a_gather_over_tp_that_is_forgotten_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "_of_vocabulary", lambda *_: ())
    with pytest.raises(AssertionError):
        _check(measure(BY_NAME["qwen3 tp2 ep2 of 4"]))
