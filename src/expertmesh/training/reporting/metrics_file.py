"""Write metrics.jsonl: a row for each report, on the disk before a checkpoint of its step."""

import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from expertmesh.config.errors import InputError
from expertmesh.io.directory import io_errors
from expertmesh.io.reading import MAX_METRICS_BYTES, opened, rows
from expertmesh.io.safetensors_writer import replace_synced
from expertmesh.io.terminal import log


def keep_rows(path: Path, done: int) -> None:
    """Drop the rows of steps after `done` from a metrics.jsonl, and a last line that was cut short.

    Raises `InputError` for a file that cannot be read or written, or has a line that is no row.
    """
    kept, line = [], b"\n"
    with io_errors(path, path.stat().st_size if path.exists() else 0):
        if done and path.exists():
            with opened(path, MAX_METRICS_BYTES) as file:
                for number, line in enumerate(rows(file, path), start=1):
                    if line.endswith(b"\n") and _step_of(line, path, number) <= done:
                        kept.append(line)
        if not line.endswith(b"\n"):  # blocks of zeros are what a power loss leaves
            what = "zeros" if line.strip(b"\0") == b"" else "a row that was cut short"
            log.info(f"{path}: ended in {what}; cut back to its last whole row")
        replace_synced(path, b"".join(kept))


def _step_of(line: bytes, path: Path, number: int) -> int:
    try:
        return int(json.loads(line)["step"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}:{number}: is no row of metrics; remove the line, or move the file away", key="run.damaged-metrics"
        ) from error


def last_elapsed(path: Path) -> float:
    """Return `elapsed_seconds` of the last complete row that has one; 0 without any."""
    elapsed = 0.0
    if path.exists():
        with io_errors(path, 0), opened(path, MAX_METRICS_BYTES) as file:
            for line in rows(file, path):
                with suppress(ValueError, KeyError, TypeError):
                    elapsed = max(0.0, float(json.loads(line)["elapsed_seconds"]))
    return elapsed


class MetricsFile:
    """The metrics.jsonl of a run that goes on after `done` steps.

    `before`: the seconds that its rows covered, including those that are dropped.
    """

    def __init__(self, path: Path, done: int) -> None:
        self.before = last_elapsed(path)
        keep_rows(path, done)
        self.path = path
        self.file = path.open("ab", buffering=0)

    def write(self, row: dict[str, Any]) -> None:
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        line = json.dumps(finite, allow_nan=False).encode() + b"\n"
        with io_errors(self.path, len(line)):
            while line:
                line = line[self.file.write(line) :]

    def sync(self) -> None:
        with io_errors(self.path, 0):
            os.fsync(self.file.fileno())
