"""Whatever stands in a file that others have made, reading it ends soon, in bounded memory, and in a named refusal.

    EXPERTMESH_FUZZ_SECONDS=3600 EXPERTMESH_FUZZ_SEED=7 python -m pytest tests/robustness/test_fuzz.py

Without the variables: some seconds for each kind of directory, always the same cases. A failure names reader, file and
seed; `python -m tests.robustness.test_fuzz READER SEED` runs that one case.
"""

import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from expertmesh.config.errors import ExpertmeshError
from expertmesh.io.terminal import printable
from tests.robustness.readers import READERS, put

SECONDS = float(os.environ.get("EXPERTMESH_FUZZ_SECONDS", "0")) / len(READERS)
FIRST = int(os.environ.get("EXPERTMESH_FUZZ_SEED", "0")) * 1_000_000
CASES = int(os.environ.get("EXPERTMESH_FUZZ_CASES", "60"))
LIMIT_SECONDS, LIMIT_BYTES = 60, 4 << 30  # a template has 10 s for a row


def fuzz(name: str, seed: int, sound: Path, scratch: Path) -> str:
    """Run one case in a copy of the directory `sound`; returns how it ended. Raises `AssertionError` for what is not
    a bounded, named end.
    """
    reader, rng = READERS[name], random.Random(f"{name} {seed}")
    shutil.copytree(sound, scratch)
    try:
        file = rng.choice(sorted(reader.files))
        mutation = rng.choice(reader.files[file])
        put(reader, scratch, file, mutation(rng, (scratch / file).read_bytes()))
        return judged(f"{name} {seed}: {file}, {mutation.__name__}", lambda: reader.read(scratch))
    finally:
        shutil.rmtree(scratch)


def judged(where: str, read: Callable[[], object]) -> str:
    """How `read` ended: "read", or the key of a refusal. Raises `AssertionError` for what is not bounded and named."""
    try:
        with _limits(where):
            read()
        return "read"
    except ExpertmeshError as error:
        refused = error
    except Exception as error:
        raise AssertionError(f"{where}: {type(error).__name__}: {str(error)[:500]}") from error
    assert refused.exit_code in (2, 3, 4), f"{where}: exit code {refused.exit_code}"
    assert "." in refused.key, f"{where}: the key {refused.key}"
    assert len(printable(str(refused))) < 20_000, f"{where}: a message of {len(str(refused))} characters"
    return refused.key


@contextmanager
def _limits(where: str) -> Iterator[None]:
    def too_long(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"{where}: still reading after {LIMIT_SECONDS} s")

    before, limits = signal.signal(signal.SIGALRM, too_long), resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + LIMIT_BYTES, limits[1]))
    signal.alarm(LIMIT_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.slow_cases(r"(checkpoint|data)", why="the costliest of the kinds; the others stay")
@pytest.mark.skipif(sys.platform != "linux", reason="limits a process by what only Linux has")
@pytest.mark.timeout(max(600.0, 3 * SECONDS))
@pytest.mark.parametrize("name", READERS)
def test_hostile_files_end_in_bounded_named_refusals(name: str, tmp_path: Path) -> None:
    sound = tmp_path / "sound"
    sound.mkdir()
    READERS[name].make(sound)
    ends, failures, started, case = dict[str, int](), list[str](), time.monotonic(), FIRST
    while case < FIRST + CASES or time.monotonic() < started + SECONDS:
        try:
            end = fuzz(name, case, sound, tmp_path / "case")
            ends[end] = ends.get(end, 0) + 1
        except AssertionError as error:
            failures.append(str(error))
        case += 1
    print(f"{name}: {case - FIRST:,} cases, {len(failures)} failures, {time.monotonic() - started:.0f} s; {ends}")
    assert not failures, "\n".join(failures)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as root:
        made = Path(root, "sound")
        made.mkdir()
        READERS[sys.argv[1]].make(made)
        print(fuzz(sys.argv[1], int(sys.argv[2]), made, Path(root, "case")))
