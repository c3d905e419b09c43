"""Marks the tests that `make test` leaves to `make test-all` as slow: those that slow.yaml names. All but those of
`pytest -m gpu` run on the CPU, where a GPU is as well: ranks are forked, and there are more of them than devices.
"""

import gc
import logging
import os
import re
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.one_launch import Launched, Launches

_LIST = Path(__file__).with_name("slow.yaml").read_text()
_SLOW: dict[str, dict[str, str]] = yaml.safe_load(_LIST)


def pytest_configure(config: pytest.Config) -> None:
    lines = sum(line[:1] not in ("", "#") for line in _LIST.splitlines())
    if lines != len(_SLOW) + sum(map(len, _SLOW.values())):
        raise pytest.UsageError("tests/slow.yaml has a key twice, of which YAML keeps the last")
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before anything imports torch


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
    """A row of slow.yaml that names no test is an error when the whole suite is collected."""
    rows = {(f"tests/{path}", pattern) for path, tests in _SLOW.items() for pattern in tests}
    used = set()
    for item in items:
        path, _, name = item.nodeid.partition("::")
        hits = {row for row in rows if row[0] == path and re.fullmatch(row[1], name)}
        if hits:
            item.add_marker(pytest.mark.slow)
        used |= hits
    if config.args == config.getini("testpaths") and not config.option.keyword and used != rows:
        raise pytest.UsageError(f"tests/slow.yaml names tests that do not exist: {sorted(rows - used)}")


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str) -> None:
    """The whole run ends with the process that dies in a test: `--dist loadfile` would wait for it for ever."""
    pytest.exit(f"{crashitem}: the process that ran it has died", returncode=1)


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


@pytest.fixture
def cache_of_model_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give transformers a cache of the test's own for code that models bring; it imports from there."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)
