"""Marks the cases that `make test` leaves to `make test-all` as slow. All tests but those of `pytest -m gpu` run on the
CPU, where a GPU is as well: ranks are forked, and there are more of them than devices.
"""

import gc
import logging
import os
import re
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.support.one_launch import Launched, Launches
from tests.support.rotation import of_this_commit


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quarter", action="store_true", help="of a test with many slow cases a quarter, by the commit")


def pytest_configure(config: pytest.Config) -> None:
    # Before anything imports torch. More ranks than cores, and threads that spin for one another, make tests crawl.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave what is imported out of every pass of the garbage collector: a million objects, a second each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _mark_slow_cases(items)
    if config.option.quarter:
        left_out = _not_of_this_commit(items)
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))


def _not_of_this_commit(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return three quarters of the slow cases of each test that has more than two; two cases stay at least."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    many = [cases for cases in tests.values() if len(cases) > 2]
    return {item for cases in many for item in set(cases) - set(of_this_commit(cases, max(2, len(cases) // 4)))}


def _mark_slow_cases(items: list[pytest.Item]) -> None:
    """Give the cases that `slow_cases` names the mark `slow`. Each says why it may be left out; one names a case."""
    unused: dict[tuple[str, str], bool] = {}
    for item in items:
        whole, _, case = item.nodeid.partition("[")
        for mark in item.iter_markers("slow_cases"):
            assert mark.kwargs["why"], item.nodeid
            for pattern in mark.args:
                named = re.fullmatch(pattern, case[:-1]) is not None
                if named:
                    item.add_marker(pytest.mark.slow)
                unused[whole, pattern] = unused.get((whole, pattern), True) and not named
    chosen = any("[" in argument for argument in sys.argv)
    if not chosen and (wrong := [f"{test}: {pattern}" for (test, pattern), none in unused.items() if none]):
        raise pytest.UsageError(f"slow_cases names no case: {wrong}")


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str) -> None:
    """The whole run ends with the process that dies in a test: `--dist loadfile` would wait for it for ever."""
    pytest.exit(f"{crashitem}: the process that ran it has died", returncode=1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> object:
    """Run a test, and the ranks that it forks, without a system call for every call at some depth."""
    from expertmesh.compat import frames_in_one_chunk

    runner = item.config.pluginmanager.get_plugin("runner")
    return frames_in_one_chunk(runner.pytest_runtest_protocol)(item, nextitem)


@pytest.fixture(autouse=True)
def _log_as_it_was() -> Iterator[None]:
    """What prints the log is chosen for the life of a process, which here goes on with the next test."""
    log = logging.getLogger("expertmesh")
    before = log.handlers, log.propagate, log.level
    yield
    log.handlers, log.propagate = before[:2]
    log.setLevel(before[2])


@pytest.fixture(scope="module")
def _launches(request: pytest.FixtureRequest) -> Iterator[Launches]:
    launches = Launches(request)
    yield launches
    launches.end()


@pytest.fixture
def launched(request: pytest.FixtureRequest, _launches: Launches) -> Launched:
    """Run this case of `one_launch` on ranks that the module's cases share."""
    return lambda: _launches.results(request.node)


@pytest.fixture(scope="module", autouse=True)
def _large_shared_ranks_end() -> Iterator[None]:
    """Ranks of one or two modules would stay in memory for the rest of the session."""
    yield
    _end_shared_ranks(above=4)


@pytest.fixture(scope="session", autouse=True)
def _shared_ranks_end() -> Iterator[None]:
    yield
    _end_shared_ranks()


def _end_shared_ranks(above: int = 0) -> None:
    if ranks := sys.modules.get("tests.support.ranks"):
        ranks.shared_ranks.end(above)


@pytest.fixture
def cache_of_model_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give transformers a cache of the test's own for code that models bring; it imports from there."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)
    _end_shared_ranks()  # they have the other cache
    yield
    _end_shared_ranks()
