"""What a step of a run that starts here will take: the `predicted` line of `train`, `check` and `verify`.

Training does not know the planner: `train_with_forecast` is what the command line has its ranks run, and hands
`forecast` to `training.run.train`. A forecast decides nothing and refuses nothing.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch

from expertmesh.config import Config, InputError, ParallelConfig
from expertmesh.distributed.layout import CONFIGURED_AXES, Layout, explicit, node_crossing
from expertmesh.io.terminal import bytes_text, plural
from expertmesh.parallel.checkpointing import CheckpointingMode, checkpointing_mode
from expertmesh.planning.hardware import Devices, hardware_table, name_of, unknown_device
from expertmesh.planning.probe import NotProbed
from expertmesh.planning.read_model import figures_of_plan, figures_of_teacher
from expertmesh.planning.search import GIB, Candidate, Job, evaluate, layouts, nothing_fits, plan
from expertmesh.planning.stages import Batch
from expertmesh.training.control import Control
from expertmesh.training.reporting.record import ChosenLayout, Forecast, Prediction
from expertmesh.training.run import train
from expertmesh.training.startup.model_check import Checked, OrderWish


def train_with_forecast(config: Config, control: Control | None = None) -> None:
    """Run `training.run.train`, with a prediction of a step's time and memory in the printed plan and in run.json."""
    elastic = control is not None and control.elastic
    train(config, control, predict=forecast, arrange=arrange if elastic else None)


def arrange(config: Config, world_size: int, preflight: Callable[[Config, int], Checked]) -> ChosenLayout:
    """Return the layout of a start of an elastic job: that of `config` if it can be had, else the fastest planned one.

    Nothing communicates.

    Args:
        preflight: Refuses a configuration for a number of ranks by an `InputError`, or returns the checked model.

    Raises:
        InputError: No layout of `world_size` ranks fits.
    """
    mode = config.train.activation_checkpointing
    try:
        preflight(config, world_size)
        return ChosenLayout(config.parallel, config.train.micro_batch_size, mode, "laid out as configured")
    except InputError as error:
        if not error.key.startswith("layout.") and error.key != "config.combination":
            raise
        why = str(error).partition(";")[0]
    one_row = config.train.model_copy(update={"micro_batch_size": 1})
    alone = {"parallel": ParallelConfig(), "moe": config.moe.unplaced, "train": one_row}
    checked, devices = preflight(config.model_copy(update=alone), 1), devices_here(world_size)
    if devices is None:
        raise unknown_device("the devices of this --elastic job", f"start another number of ranks, as {why}")
    found = plan(_job(config, checked, devices))
    across = config.parallel.ep_across_nodes
    fitting = (each for each in found.candidates if across or node_crossing(each.layout, devices.per_node) is None)
    if (best := next(fitting, None)) is None:
        reason = found.rejected[0].why if found.rejected else why
        raise nothing_fits(f"--elastic: no layout of {plural(world_size, 'rank')} fits: {reason}")
    apart = config.data.packing and config.model.attention == "flash_attention_2"  # which separates samples of one row
    rows = 1 if config.objective.pairs or apart else best.workload.batch.rows
    axes = ", ".join(f"{axis} {best.layout.size(axis)}" for axis in CONFIGURED_AXES if best.layout.size(axis) > 1)
    reason = f"planned anew ({axes or 'one rank'}, micro-batch {rows}), as {why}"
    return ChosenLayout(explicit(best.layout), rows, best.workload.mode, reason)


def forecast(config: Config, checked: Checked, devices: Devices | None = None) -> Forecast:
    """Predict time and memory of a step of the job that preflight accepted. Nothing communicates.

    Args:
        devices: The devices to predict for; None takes those of this job.
    """
    devices = devices or devices_here(checked.layout.world_size)
    if devices is None:
        return Forecast("nothing: the planner does not know this device")
    try:
        job = _job(config, checked, devices)
    except NotProbed as error:
        return Forecast(f"nothing: there is no plan for {error}")
    found = _candidate(config, job, checked.layout)
    warning = None
    if not found.fits(job):  # a prediction refuses nothing
        has, ranks = f"has {job.budget / GIB:.1f} GiB for", devices.per_node
        where = f"this machine {has} each of its {ranks} ranks" if devices.name == "cpu" else f"the device {has} them"
        warning = f"{where}, so this may run out of memory"
    memory, timed = found.memory.total, not checked.objective.runs_another
    prediction = Prediction(peak_memory_bytes=memory)
    notes = [f"{bytes_text(memory)} of tensors a rank"]
    if timed:  # else each step runs the reference or a teacher as well
        prediction = Prediction(
            step_seconds=found.speed.seconds, tokens_per_second=found.tokens_per_second, peak_memory_bytes=memory
        )
        notes = [_figures(found)]
    notes[0] += ", with full rows and even routing"
    notes += [warning] if warning else []
    if config.parallel.ep == "auto" and not found.fits(job):
        # `ep: auto` does not depend on the device's memory (distributed/layout.py): name another ep that fits.
        free, node = explicit(found.layout).model_copy(update={"ep": "auto"}), devices.per_node
        even = (each for each in layouts(job, free) if node % each.ep == 0 or each.ep % node == 0)
        others = [_candidate(config, job, each) for each in even if job.model.traffic.can_have(each)]
        if fitting := [other for other in others if other.fits(job)]:
            best = min(fitting, key=lambda other: other.memory.total)
            notes.append(f"parallel.ep={best.layout.ep} would fit ({bytes_text(best.memory.total)})")
    cures, peak = partial(_cures, config, checked, devices), None
    if timed and devices.name != "cpu":  # of a processor the table has no peak, but what one reached
        peak = found.speed.peak_flops * found.speed.tokens / found.speed.model_flops
    order = found.workload.batch.order, found.order_reason
    return Forecast("; ".join(notes), prediction, warning, cures, peak, order)


def _cures(config: Config, checked: Checked, devices: Devices) -> list[str]:
    """Return at most three changes of the configuration with which a step is predicted to fit, the fastest first."""
    now = config.train.micro_batch_size, checkpointing_mode(config.train.activation_checkpointing)
    fitting: dict[str, float] = {}
    for length in (config.data.max_length, config.data.max_length // 2):
        data = config.data.model_copy(update={"max_length": length})
        job = _job(config.model_copy(update={"data": data}), checked, devices)
        for rows, mode in product(dict.fromkeys((now[0], 1)), dict.fromkeys((now[1], "selective", "full"))):
            update = {"micro_batch_size": rows, "activation_checkpointing": mode}
            changed = config.model_copy(update={"train": config.train.model_copy(update=update)})
            found = _candidate(changed, job, checked.layout)
            change = [
                f"train.{key}={value}" for (key, value), old in zip(update.items(), now, strict=True) if value != old
            ]
            change += [f"data.max_length={length}"] * (length != config.data.max_length)
            if change and found.fits(job):
                fitting[f"{' '.join(change)} ({_figures(found)})"] = found.speed.seconds / length
    return sorted(fitting, key=lambda cure: fitting[cure])[:3]


def devices_here(world_size: int) -> Devices | None:
    """Return the devices of this job, by this rank's own, or None if the table does not know them."""
    table = hardware_table()
    # The launcher sets LOCAL_WORLD_SIZE for its ranks, which are all on this machine.
    per_node = min(world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        module = torch.get_device_module(kind)
        name = name_of(module.get_device_name(), table)
        if name is None:
            return None
        memory = float(module.get_device_properties(module.current_device()).total_memory)
    else:
        name, memory = "cpu", host_memory() / per_node
    hardware = table[name].model_copy(update={"memory": memory, "host_memory": host_memory() / per_node})
    return Devices(name, -(-world_size // per_node), per_node, hardware)


def host_memory() -> float:
    """Return the bytes of memory of this machine, or of the control group that this process is confined to."""
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8").strip()
    except OSError:
        return memory
    return min(memory, float(limit)) if limit.isdigit() else memory


def _figures(found: Candidate) -> str:
    return f"{bytes_text(found.memory.total)} of tensors a rank, {found.speed.seconds:.3g} s a step"


def _job(config: Config, checked: Checked, devices: Devices) -> Job:
    length, packed = config.data.max_length, config.data.packing
    kind = devices.hardware.torch_device
    figures = figures_of_plan(checked.plan, length=length, lora=config.lora, packed=packed, device=kind)
    layers = config.train.checkpoint_layers
    size, optimizer = config.train.global_batch_size, config.optim.name
    order, dispatch = OrderWish.of(config.train), config.moe.dispatch
    teacher = figures_of_teacher(checked.objective.teacher, length=length, packed=packed, device=kind)
    job = Job(figures, devices, size, optimizer, layers=layers, dispatch=dispatch, order=order, teacher=teacher)
    return replace(job, offload=config.parallel.offload)


def _candidate(config: Config, job: Job, layout: Layout) -> Candidate:
    """Return the candidate with the micro-batch and the checkpointing that the run will have."""
    rows = config.train.micro_batch_size
    accumulation = max(1, config.train.global_batch_size // (rows * layout.data_ranks))
    mode: CheckpointingMode = "none"
    if job.model.checkpointable:
        mode = checkpointing_mode(config.train.activation_checkpointing)
    return evaluate(job, layout, mode, Batch(rows * config.objective.sequences, accumulation))
