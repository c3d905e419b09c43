"""A matrix of layouts is one launch: cases of one module and world size run on the same ranks, each a test of its own.

    @pytest.mark.parametrize("layout", LAYOUTS)
    @one_launch(lambda layout: (world_of(layout), lambda: train_sharded(expected, layout)))
    def test_it_gives_the_same(launched: Launched, layout: Layout) -> None:
        for distance in launched():
            distance.check(TOLERANCE)

The function that `one_launch` gets takes the test's parameters (and fixtures of the module) by name, and returns the
number of ranks and what each of them runs. The first case to call `launched()` builds all cases of the module that
pytest selected and starts the ranks; every case runs when its test calls `launched()`, so that its time, its output and
its failure are its own. After a case that raises, crashes or hangs, the next one gets new ranks. They end with the last
case of their number, or with the module. Ranks whose cases give limits of their own have the shortest.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest

Launched = Callable[[], list[Any]]
Work = Callable[[], Any]


def one_launch(case: Callable[..., tuple[int, Work]], limit_seconds: float | None = None) -> pytest.MarkDecorator:
    """Mark a test whose cases share ranks; its fixture `launched` runs its own case and returns the ranks' results.

    `limit_seconds` is for a case of moments, whose hang need not last as long as `LivingRanks` allow.
    """
    return pytest.mark.one_launch.with_args(case, limit_seconds)


class Launches:
    """The cases of one module that have the mark, and the ranks that are alive for them, by world size."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._request = request
        self._ranks: dict[int, Any] = {}
        self._to_come: set[str] = set()
        self._limits: dict[str, float] = {}

    def results(self, item: pytest.Item) -> list[Any]:
        """Run the case of `item` on living ranks; raises `RankFailed` with its own ranks' tracebacks."""
        # Not with conftest.py: nothing may import torch as early.
        from tests.support.ranks import LIMIT_SECONDS, LivingRanks

        case = self._cases[item.nodeid]
        if isinstance(case, Exception):
            raise case
        world = case[0]
        together = {name: each for name, each in self._cases.items() if isinstance(each, tuple) and each[0] == world}
        number = list(together).index(item.nodeid)
        ranks = self._ranks.get(world)
        if ranks is None or not ranks.alive or not ranks.start(number):
            limit = min([self._limits[name] for name in together if name in self._limits], default=LIMIT_SECONDS)
            ranks = self._ranks[world] = LivingRanks([work for _, work in together.values()], world, limit)
            if not ranks.start(number):
                raise RuntimeError(f"{world} new ranks do not start")
        results: list[Any] = ranks.results()
        self._to_come.discard(item.nodeid)
        if not self._to_come & together.keys():
            ranks.end()
        return results

    def end(self) -> None:
        """Leave no ranks behind."""
        for ranks in self._ranks.values():
            if ranks.alive:
                ranks.end()

    @functools.cached_property
    def _cases(self) -> dict[str, tuple[int, Work] | Exception]:
        """By test; an exception where a case could not be built, which is then this test's own."""
        cases: dict[str, tuple[int, Work] | Exception] = {}
        for item in self._request.session.items:
            mark = item.get_closest_marker("one_launch")
            if mark is None or item.getparent(pytest.Module) is not self._request.node:
                continue
            case, limit = mark.args
            if limit is not None:
                self._limits[item.nodeid] = limit
            try:
                cases[item.nodeid] = case(**self._arguments(case, item))
            except Exception as error:
                cases[item.nodeid] = error
        self._to_come = set(cases)
        return cases

    def _arguments(self, case: Callable[..., Any], item: Any) -> dict[str, Any]:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        # The request is the module's, so that a fixture of a single test is refused here.
        return {
            name: given[name] if name in given else self._request.getfixturevalue(name)
            for name in inspect.signature(case).parameters
        }
