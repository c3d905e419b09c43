"""Marks the tests that `make test` leaves to `make test-all` as slow: those that slow.yaml names. All but those of
`pytest -m gpu` run on the CPU, where a GPU is as well: ranks are forked, and there are more of them than devices.
"""

import os
import re
from pathlib import Path

import pytest
import yaml

_SLOW: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_name("slow.yaml").read_text())


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before anything imports torch


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
