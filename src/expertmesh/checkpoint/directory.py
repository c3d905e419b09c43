"""Find, name, clean up and remove the checkpoints in the directory `checkpoints/` of a run.

A checkpoint is `step-XXXXXXXX`, eight digits. While it is written it is `step-XXXXXXXX.tmp-TOKEN`; before it is removed
it becomes `step-XXXXXXXX.old-TOKEN`. So a directory with the plain name is complete at any moment. Nothing here
communicates; one rank alone calls the functions that change something.
"""

import re
import shutil
import time
from collections.abc import Collection
from pathlib import Path

from expertmesh.checkpoint.manifest import MANIFEST, step_of
from expertmesh.config.errors import InputError
from expertmesh.io.directory import io_errors, rename_synced

CHECKPOINTS = "checkpoints"
_LEFTOVER = re.compile(r"(step-\d{8,}|model|adapter)\.(tmp|old)-[0-9a-f]+")


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def published(directory: Path) -> list[tuple[int, Path]]:
    """Return (step, directory) of every checkpoint in `directory`, oldest first."""
    if not directory.is_dir():
        return []
    found = [(step, path) for path in directory.iterdir() if (step := step_of(path)) is not None]
    return sorted(found)


def find(directory: Path, resume: str) -> Path | None:
    """Return the checkpoint that `checkpoint.resume` names.

    Args:
        directory: The checkpoints of the run.
        resume: `auto` for the newest one in `directory`, `never`, the name of a step there, or a path.

    Returns:
        Its directory; None for `never`, and for `auto` when there is no checkpoint.

    Raises:
        InputError: The named checkpoint does not exist.
    """
    if resume == "never":
        return None
    checkpoints = published(directory)
    if resume == "auto":
        return checkpoints[-1][1] if checkpoints else None
    named = directory / resume if step_of(Path(resume)) is not None and "/" not in resume else Path(resume)
    if named.is_dir():
        return named
    known = ", ".join(path.name for _, path in checkpoints[-5:]) or "no checkpoint"
    raise InputError(
        f"checkpoint.resume: {resume}: no such checkpoint; {directory} has {known}", key="checkpoint.not-found"
    )


def locate(path: Path) -> tuple[Path, int | None]:
    """Find the checkpoint that a user means by `path`.

    Args:
        path: A checkpoint, a run's directory, or the directory of its checkpoints.

    Returns:
        The checkpoint, the newest one of a run, and how many the run has; None for the number if `path` is a
        checkpoint itself.

    Raises:
        InputError: There is none.
    """
    if not path.is_dir():
        found = "is a file" if path.exists() else "no such directory"
        raise InputError(
            f"{path}: {found}; give the output_dir of a run, or one of its checkpoints",
            key="checkpoint.not-found",
        )
    if step_of(path.resolve()) is not None or (path / MANIFEST).exists():
        return path, None
    checkpoints = published(path / CHECKPOINTS) or published(path)
    if not checkpoints:
        raise InputError(
            f"{path}: holds no checkpoint, neither a {MANIFEST} nor {CHECKPOINTS}/step-*", key="checkpoint.not-found"
        )
    return checkpoints[-1][1], len(checkpoints)


def later_exists(what: str, where: object, holds: str, mend: str) -> InputError:
    """Return the error for a checkpoint before a later one: `auto` would continue from that, `keep_last` keep that."""
    way = "which is later and would be in the way"
    return InputError(f"{what}, but {where} holds {holds}, {way}; {mend}", key="checkpoint.later-exists")


def clean(directory: Path) -> list[str]:
    """Remove what interrupted saves and removals of checkpoints and models have left there, and return the names.

    Call it only while nothing else writes there.
    """
    with io_errors(directory, 0):
        paths = [*directory.iterdir()] if directory.is_dir() else []
        leftovers = [path for path in paths if _LEFTOVER.fullmatch(path.name)]
        for path in leftovers:
            shutil.rmtree(path)
    return sorted(path.name for path in leftovers)


def prune(directory: Path, keep_last: int | None, keep: Collection[int | None] = ()) -> list[str]:
    """Remove all checkpoints but the newest `keep_last` and those of the steps `keep`, and return their names.

    Args:
        keep_last: None keeps all.

    Raises:
        InputError: A checkpoint cannot be removed.
    """
    old = published(directory)[:-keep_last] if keep_last is not None else []
    old = [(step, path) for step, path in old if step not in keep]
    for _, path in old:
        condemned = path.with_name(f"{path.name}.old-{time.time_ns():x}")
        try:
            # Renamed first, so that an interrupted removal leaves no incomplete checkpoint under the plain name.
            rename_synced(path, condemned)
            shutil.rmtree(condemned)
        except OSError as error:
            raise InputError(
                f"{path}: cannot be removed, as checkpoint.keep_last demands: {error}; newer checkpoints are complete, "
                "and the same command continues from them",
                key="checkpoint.not-removable",
            ) from error
    return [path.name for _, path in old]
