"""Each case of the corpus ends within seconds and bounded memory: it is read, or refused by name."""

import shutil
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.robustness.corpus import KINDS
from tests.robustness.readers import READERS
from tests.robustness.test_fuzz import judged


@pytest.mark.slow_cases(
    r"(?!links|adapter).*", why="thousands of cases; links and adapters stay, and test_fuzz.py's of most kinds"
)
@pytest.mark.skipif(sys.platform != "linux", reason="limits a process by what only Linux has")
@pytest.mark.parametrize("kind", KINDS)
def test_every_case_is_read_or_refused_by_name_in_bounds(kind: str, tmp_path: Path) -> None:
    count, refused, failures, slowest, started = 0, 0, list[str](), (0.0, ""), time.monotonic()
    for name, reader in READERS.items():
        (tmp_path / name).mkdir()
        reader.make(tmp_path / name)
    for case in KINDS[kind]():
        scratch = tmp_path / "case" / "here"
        if case.reader:
            shutil.copytree(tmp_path / case.reader, scratch)
        else:
            scratch.mkdir(parents=True)
        case.change(scratch)
        began = time.monotonic()
        try:
            end = judged(case.name, partial(case.read, scratch))
            if case.must and end == "read":
                failures.append(f"{case.name}: was read, and must be refused")
            refused += end != "read"
        except AssertionError as error:
            failures.append(str(error))
        slowest = max(slowest, (time.monotonic() - began, case.name))
        shutil.rmtree(tmp_path / "case")
        count += 1
    print(f"{kind}: {count} cases, {refused} refused; slowest {slowest}; {time.monotonic() - started:.0f} s")
    assert not failures, f"{len(failures)} of {count}:\n" + "\n".join(failures)
