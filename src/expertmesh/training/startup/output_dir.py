"""Decide whether this configuration may write into the directory of a run, and write the configuration there."""

import os
import re
from pathlib import Path

from expertmesh.checkpoint.directory import CHECKPOINTS, published, step_name
from expertmesh.config import Config, TrainConfig, dump_config
from expertmesh.config.errors import InputError
from expertmesh.config.files import config_from
from expertmesh.io.directory import io_errors, nearest
from expertmesh.io.reading import read_file
from expertmesh.io.safetensors_writer import rename_synced, replace_synced
from expertmesh.io.terminal import log
from expertmesh.training.resume import config_differences, find_start, find_weights, flat, ways_on
from expertmesh.training.startup.uploads import has_result, withdraw_result

CONFIG_FILE = "config.yaml"
MODEL, ADAPTER = "model", "adapter"
# Of how many differences a refusal speaks.
_LISTED = 4
# What a run that was killed before it had written config.yaml may have left behind, none of it worth keeping, and what
# `verify` and `prepare` write before there is a run.
_LEFT_BY_A_START = re.compile(r"lock\.json(\..+)?|config\.yaml\.tmp|verification\.json|prepared|stacks\.txt")


def refuse_output_dir(config: Config) -> None:
    """Refuse a directory that holds another run, or anything else: it is never written into.

    The same run may go on in it, from its newest checkpoint; resume.py has what may differ.
    """
    directory = Path(config.output_dir)
    there = nearest(directory)
    if not there.is_dir():
        raise InputError(f"output_dir {directory}: {there} is a file; choose another directory", key="output.is-a-file")
    if not os.access(there, os.R_OK | os.W_OK | os.X_OK):
        raise InputError(
            f"output_dir {directory}: {there} cannot be written by this user; choose another directory, or give it "
            "the permission",
            key="output.unwritable",
        )
    if there == directory.absolute():
        _refuse_contents(config, directory)
    if config.checkpoint.remote is None:  # which may have what is not here; prepare.py looks there
        find_start(config)
        find_weights(config)


def _refuse_contents(config: Config, directory: Path) -> None:
    if all(_LEFT_BY_A_START.fullmatch(path.name) for path in directory.iterdir()):
        return
    # Somebody may have removed the run's own; each checkpoint holds one.
    known = (directory, *(path for _, path in reversed(published(directory / CHECKPOINTS))))
    written = next((path / CONFIG_FILE for path in known if (path / CONFIG_FILE).is_file()), None)
    if written is None:
        raise InputError(
            f"output_dir {directory} is not empty and holds no run of ours; choose another directory",
            key="output.not-empty",
        )
    if did_no_step(directory):
        return
    before = _read(written)
    forbidden, _ = config_differences(*(flat(each.model_dump(mode="json")) for each in (before, config)))
    if forbidden:
        shown = "; ".join([*forbidden.values()][:_LISTED])
        shown += f"; and {len(forbidden) - _LISTED} more" * (len(forbidden) > _LISTED)
        newest = next((path for _, path in reversed(published(directory / CHECKPOINTS))), None)
        raise InputError(
            f"output_dir {directory} holds a run with another configuration: {shown}; put it back to "
            f"continue that run{ways_on(forbidden, newest)}, or choose another directory",
            key="run.other-configuration",
        )
    goes_on = _has_more_steps(before.train, config.train) and published(directory / CHECKPOINTS)
    if _is_finished(config) and not goes_on:
        raise _finished(config, before.train)


def refuse_no_more_steps(config: Config, start: Path, total_steps: int) -> None:
    """Refuse a finished run that the configuration's epochs or steps do not make longer. Call it on one rank."""
    if _is_finished(config) and start.name == step_name(total_steps):
        raise _finished(config, config.train)


def set_result_aside(config: Config, start: Path) -> None:
    """Rename the result of a finished run after its last step, when the run goes on. Call it on one rank."""
    result = _result(config)
    if result.exists():
        kept = result.with_name(f"{result.name}-{start.name}")
        with io_errors(kept, 0):
            rename_synced(result, kept)
        log.info(f"finished   before, after {start.name}; its result is now {kept}")


def _result(config: Config) -> Path:
    return Path(config.output_dir) / (MODEL if config.lora is None else ADAPTER)


def _is_finished(config: Config) -> bool:
    """Return whether the result is everywhere it belongs: a run that was killed while it uploaded its result
    goes on.
    """
    return _result(config).exists() and (config.checkpoint.remote is None or has_result(config))


def _has_more_steps(before: TrainConfig, now: TrainConfig) -> bool:
    if before.max_steps is None:
        return now.num_epochs > before.num_epochs
    return now.num_epochs > before.num_epochs or now.max_steps is None or now.max_steps > before.max_steps


def _finished(config: Config, train: TrainConfig) -> InputError:
    """Return what one can do with a run that has ended."""
    key = "model.name_or_path" if config.lora is None else "lora.from_adapter"
    limit = f" or train.max_steps ({train.max_steps})" if train.max_steps is not None else ""
    more = f"raise train.num_epochs ({train.num_epochs}){limit} to train on, or "
    if not published(Path(config.output_dir) / CHECKPOINTS):
        more = ""
    return InputError(
        f"output_dir {config.output_dir} holds this run, finished; {more}set {key} to {_result(config)} and choose "
        "another output_dir to go on with other data or settings",
        key="run.finished",
    )


def _read(path: Path) -> Config:
    return config_from(read_file(path).decode(errors="backslashreplace"), str(path))


def did_no_step(directory: Path) -> bool:
    """Return whether a start in this directory left nothing: no result, no checkpoint and no row of metrics."""
    metrics = directory / "metrics.jsonl"
    results = [directory / name for name in (MODEL, ADAPTER, "report.html")]
    return not (
        published(directory / CHECKPOINTS)
        or any(path.exists() for path in results)
        or (metrics.exists() and metrics.stat().st_size > 0)
    )


def write_config(config: Config) -> None:
    """Write the configuration completely or not at all: a run that is killed here must find one that it can read.

    Removes what an earlier start without a step has left of another configuration.
    """
    path, content = Path(config.output_dir) / CONFIG_FILE, dump_config(config).encode()
    if config.checkpoint.remote is not None:
        withdraw_result(config)
    with io_errors(path, len(content)):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and read_file(path) != content and did_no_step(path.parent):
            (path.parent / "run.json").unlink(missing_ok=True)
        replace_synced(path, content)
