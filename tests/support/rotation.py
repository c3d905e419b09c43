"""Of many cases that another command runs all of, a few at each commit, so that everything comes around."""

import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

_Case = TypeVar("_Case")


def of_this_commit(cases: Sequence[_Case], count: int) -> list[_Case]:
    """Return `count` of `cases`, the same for everybody at one commit, and the next ones at the next."""
    return [cases[(commit_count() * count + n) % len(cases)] for n in range(count)]


@cache
def commit_count() -> int:
    command = ["git", "-C", str(Path(__file__).parent), "rev-list", "--count", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 else 0  # a source archive has no history
