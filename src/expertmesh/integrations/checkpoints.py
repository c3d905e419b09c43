"""Write, find and load a Trainer's checkpoint-N of a sharded model.

    checkpoint-40/
        config.json, model*.safetensors, tokenizer ...     save_model (adapter_model.safetensors: save_adapter)
        optimizer/step-00000040/                           save_checkpoint without weights: moments, groups, schedule;
                                                           not with save_only_model
        rng_state_*.pth, trainer_state.json                the Trainer's own
        complete.json                                      every file and its size, written last

Weights are stored once, as `from_pretrained` reads them. The directory is filled file by file; it counts as a
checkpoint only when complete.json is there and every file has its size. Every rank calls every public function here
except `is_complete`.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

import expertmesh as em
from expertmesh.config.errors import InputError, IntegrityError

COMPLETE = "complete.json"
OPTIMIZER = "optimizer"
_NAME = re.compile(r"checkpoint-(\d+)")
_LEFTOVER = re.compile(r"checkpoint-\d+\.tmp-[0-9a-f]+")
_WEIGHTS = re.compile(r"(model|adapter_model)(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
T = TypeVar("T")
log = logging.getLogger(__name__)


def on_rank_0(function: Callable[[], T]) -> T:
    """Call `function` on rank 0, and return its result or raise its exception on every rank.

    Collectives: every rank calls it; one broadcast of the result on the default group.
    """
    result: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            result[0] = function()
        except Exception as error:
            result[1] = error
    dist.broadcast_object_list(result, src=0)
    if result[1] is not None:
        raise result[1]
    found: T = result[0]
    return found


def save_weights(model: PreTrainedModel, directory: Path, tokenizer: Any, *, adapters: bool) -> None:
    """Save by `em.save_model` in the trained dtypes, or by `em.save_adapter`, also into a directory with other files.

    Replaces weights that are there already.

    Collectives: every rank calls it; those of `em.save_model` or `em.save_adapter`, and one or three broadcasts.
    """
    save: Callable[..., Any] = em.save_adapter if adapters else partial(em.save_model, dtype=None)
    if on_rank_0(lambda: not directory.exists() or not any(directory.iterdir())):
        save(model, directory, tokenizer=tokenizer)
        return
    # The saving functions refuse a directory with files in it: save beside them, then move.
    inner = directory / "weights.tmp"
    on_rank_0(lambda: shutil.rmtree(inner, ignore_errors=True))
    save(model, inner, tokenizer=tokenizer)
    on_rank_0(lambda: _move_into(inner, directory))


def _move_into(inner: Path, directory: Path) -> None:
    """Replace the weights in `directory` by the files in `inner`, on one rank."""
    for path in directory.iterdir():
        if _WEIGHTS.fullmatch(path.name):
            path.unlink()
    for path in inner.iterdir():
        if path.is_dir():
            shutil.copytree(path, directory / path.name, dirs_exist_ok=True)
        else:
            os.replace(path, directory / path.name)
    shutil.rmtree(inner)


def save_training_state(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, scheduler: Any, checkpoint: Path, step: int
) -> None:
    """Save the optimizer's moments in shards, and the settings of its groups (learning rates) and the schedule as JSON.

    Collectives: every rank calls it; those of `em.save_checkpoint`.
    """
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    state = {"groups": _to_json(groups), "scheduler": _to_json(scheduler.state_dict())}
    em.save_checkpoint(model, optimizer, checkpoint / OPTIMIZER, step=step, state=state, weights=False)


def load_training_state(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, scheduler: Any, checkpoint: Path
) -> None:
    """Load the files of `save_training_state` into any layout; the next step has the learning rate of the saved run.

    A complete checkpoint without them was saved with `save_only_model`: then optimizer and schedule begin anew, as
    those of the stock Trainer do.

    Raises:
        IntegrityError: The optimizer has another number of parameter groups.

    Collectives: every rank calls it; one broadcast on the default group, and those of `em.load_checkpoint`.
    """
    if not on_rank_0((checkpoint / OPTIMIZER).is_dir):
        if dist.get_rank() == 0:
            log.warning("%s has weights alone; the optimizer and the learning rates begin anew", checkpoint)
        return
    loaded = em.load_checkpoint(model, optimizer, checkpoint / OPTIMIZER, weights=False)
    groups = _from_json(loaded.state["groups"])
    if len(groups) != len(optimizer.param_groups):
        raise IntegrityError(
            f"{checkpoint}: holds {len(groups)} groups of parameters, and the optimizer has "
            f"{len(optimizer.param_groups)}; resume with the model, adapters and optimizer that it was saved with",
            key="trainer.other-groups",
        )
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        # The scheduler's state has the rate only for its log; it writes a rate into the groups only when it steps.
        group.update({key: tuple(value) if isinstance(value, list) else value for key, value in saved.items()})
    scheduler.load_state_dict(_from_json(loaded.state["scheduler"]))


def _to_json(value: Any) -> Any:
    """Return `value` as JSON can hold it. JSON has no infinity, with which some schedules start."""
    if isinstance(value, dict):
        return {key: _to_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(each) for each in value]
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return {"float": str(value)}
    return value


def _from_json(value: Any) -> Any:
    """Return the value of which `_to_json` made `value`; tuples have become lists."""
    if isinstance(value, dict):
        return float(value["float"]) if value.keys() == {"float"} else {k: _from_json(v) for k, v in value.items()}
    return [_from_json(each) for each in value] if isinstance(value, list) else value


def mark_complete(checkpoint: Path) -> None:
    """Write complete.json with every file and its size, after all ranks have written theirs.

    Collectives: every rank calls it; one barrier and one broadcast on the default group.
    """
    dist.barrier()
    on_rank_0(lambda: _mark(checkpoint))


def _mark(checkpoint: Path) -> None:
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    sizes = {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in files}
    temporary = checkpoint / f"{COMPLETE}.tmp"
    with temporary.open("w") as file:
        json.dump({"files": sizes}, file)
        file.flush()
        os.fsync(file.fileno())
    # Renamed after its content is on the disk, so that a crash leaves no half-written complete.json.
    os.replace(temporary, checkpoint / COMPLETE)
    _sync(checkpoint)
    _sync(checkpoint.parent)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_complete(checkpoint: Path) -> bool:
    """Return whether every file that was saved is there at its size. No communication."""
    try:
        sizes = json.loads((checkpoint / COMPLETE).read_text())["files"]
        return all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False


def find_start(output_dir: Path, resume: str | bool | None, *, saves: bool) -> Path | None:
    """Find the checkpoint to resume from.

    Args:
        resume: True for the newest complete one of `output_dir`, or a path; None or False for none.
        saves: This run will save checkpoints: rename later incomplete ones, which a kill has left, out of its way.

    Returns:
        Its path, or None.

    Raises:
        InputError: There is nothing to resume from, or a later complete checkpoint is in the way.
        IntegrityError: The named checkpoint is incomplete.

    Collectives: every rank calls it; one broadcast on the default group.
    """
    found = on_rank_0(lambda: _find_start(output_dir, resume, saves))
    return None if found is None else Path(found)


def _find_start(output_dir: Path, resume: str | bool | None, saves: bool) -> str | None:
    found = output_dir.iterdir() if output_dir.is_dir() else ()
    matches = [(_NAME.fullmatch(path.name), path) for path in found if path.is_dir()]
    checkpoints = sorted((int(match[1]), path) for match, path in matches if match)  # oldest first
    complete = [(step, path) for step, path in checkpoints if is_complete(path)]
    start: tuple[int, Path | None] = (-1, None)
    if resume is True:
        if not complete:
            raise InputError(
                f"{output_dir}: has no complete checkpoint to resume from ({len(checkpoints)} incomplete); start "
                "without resume_from_checkpoint",
                key="trainer.no-checkpoint",
            )
        start = complete[-1]
    elif resume:
        start = _named(Path(resume))
    if saves:
        _clear_way(output_dir, start[0], checkpoints)
    return None if start[1] is None else str(start[1])


def _named(path: Path) -> tuple[int, Path]:
    """Return (step, path) of a complete checkpoint that the user named. Raises as `find_start`."""
    match = _NAME.fullmatch(path.name)
    if match is None or not path.is_dir():
        raise InputError(f"{path}: is not a directory checkpoint-N", key="trainer.no-checkpoint")
    if not is_complete(path):
        raise IntegrityError(
            f"{path}: is not complete, or was not written by a trainer of em.trainer; resume_from_checkpoint=True "
            "takes the newest complete one",
            key="trainer.incomplete-checkpoint",
        )
    return int(match[1]), path


def _clear_way(output_dir: Path, step: int, checkpoints: list[tuple[int, Path]]) -> None:
    """Rename incomplete checkpoints later than `step`, and remove leftovers. Raises `InputError` for a complete one."""
    for number, path in checkpoints:
        if number <= step:
            continue
        if is_complete(path):
            raise InputError(
                f"{path}: is later than where this run starts, and a checkpoint is never written over; resume from it "
                "(resume_from_checkpoint=True), or choose another output_dir",
                key="trainer.checkpoint-exists",
            )
        aside = path.with_name(f"incomplete-{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        log.warning("%s is not complete; set aside as %s", path, aside.name)
    for path in output_dir.iterdir() if output_dir.is_dir() else ():
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
