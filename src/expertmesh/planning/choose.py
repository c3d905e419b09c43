"""What the planner says of a run that starts here: what `parallel.ep: auto` becomes, and what a step will take.

The choice is a pure function of the configuration, the model's config.json, the number of ranks and their device, so
that the launcher and every rank come to the same layout. Where nothing can be predicted (a device that hardware.yaml
does not know, a family whose code does not run without values) it is the largest ep that fits a node, and says so.
"""

import os
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from expertmesh.config import Config
from expertmesh.config.errors import InputError
from expertmesh.distributed.layout import Layout, resolve_layout
from expertmesh.parallel.checkpointing import CheckpointingMode
from expertmesh.planning.hardware import Devices, hardware_table, match_device
from expertmesh.planning.probe import NotProbed
from expertmesh.planning.read_model import figures_of
from expertmesh.planning.search import GIB, Candidate, Job, evaluate, explicit, layouts, modes
from expertmesh.planning.stages import Batch


@dataclass(frozen=True, slots=True)
class Chosen:
    """A layout and why; `reason` is None where nothing was left to choose."""

    layout: Layout
    reason: str | None


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a step of a run will take, and what there is to say about it; None where nothing can be predicted."""

    candidate: Candidate | None
    note: str = ""


def choose_layout(config: Config, model_config: PreTrainedConfig, world_size: int, num_experts: int) -> Chosen:
    """The layout that `config.parallel` means for `world_size` ranks. No communication.

    Raises `InputError` for axes that do not fit the ranks or the model.
    """
    usual = resolve_layout(config.parallel, world_size, num_experts)
    if config.parallel.ep != "auto" or world_size == 1:
        return Chosen(usual, None)
    devices = devices_here(world_size)
    if devices is None:
        return Chosen(usual, f"ep {usual.ep}: the largest within a node, as the planner does not know this device")
    try:
        job = _job(config, model_config, devices)
    except NotProbed as error:
        return Chosen(usual, f"ep {usual.ep}: the largest within a node, as there is no plan for {error}")
    pinned = explicit(usual).model_copy(update={"ep": "auto"})
    found = [_candidate(config, job, layout) for layout in layouts(job, pinned) if _is_possible(layout, num_experts)]
    if not found:
        return Chosen(usual, f"ep {usual.ep}: the largest within a node; no other divides the experts evenly")
    fitting = [candidate for candidate in found if candidate.fits(job)]
    if devices.name == "cpu" or not fitting:
        best = min(found, key=lambda each: (each.memory.total, each.speed.seconds))
        why = "the least memory" if fitting else "the least memory, though it may not fit"
    else:
        best = min(fitting, key=lambda each: (each.speed.seconds, each.memory.total))
        why = "the fastest that fits"
    sizes = ", ".join(str(candidate.layout.ep) for candidate in found)
    figures = (
        f"{best.memory.total / GIB:.1f} GiB of {job.budget / GIB:.1f} a rank and {best.speed.seconds:.2f} s a step"
    )
    reason = f"ep {best.layout.ep} of {sizes}: {why}; {figures} predicted for {devices}"
    return Chosen(best.layout, reason)


def forecast(config: Config, model_config: PreTrainedConfig, layout: Layout) -> Forecast:
    """Time and memory of a step of `config` in `layout` on the devices here. No communication; rank 0 calls it."""
    devices = devices_here(layout.world_size)
    if devices is None:
        return Forecast(None, "the planner does not know this device")
    try:
        job = _job(config, model_config, devices)
    except NotProbed as error:
        return Forecast(None, f"there is no plan for {error}")
    found = _candidate(config, job, layout)
    # How much of the host's memory is for a rank is nobody's to know.
    if devices.name == "cpu" or found.fits(job):
        return Forecast(found)
    return Forecast(found, f"the device has {job.budget / GIB:.1f} GiB for them, so this may run out of memory")


def devices_here(world_size: int) -> Devices | None:
    """The devices of this job, by this rank's own, or None if the table does not know them."""
    table = hardware_table()
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        module = torch.get_device_module(kind)
        name = match_device(module.get_device_name(), table)
        if name is None:
            return None
        memory = float(module.get_device_properties(module.current_device()).total_memory)
        hardware = table[name].model_copy(update={"memory": memory})
    else:
        name, hardware = "cpu", table["cpu"]
    # The launcher's ranks are all here, and they are told so.
    per_node = min(world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    return Devices(name, -(-world_size // per_node), per_node, hardware)


def _job(config: Config, model_config: PreTrainedConfig, devices: Devices) -> Job:
    attention = None if config.model.attention == "auto" else config.model.attention
    figures = figures_of(
        model_config,
        length=config.data.max_length,
        precision=config.precision,
        lora=config.lora,
        packed=config.data.packing,
        attention=attention,
        compute=config.moe.compute,
        trust_remote_code=config.model.trust_remote_code,
    )
    moments = 2 if config.optim.name == "adamw" else 0
    layers = config.train.checkpoint_layers
    return Job(figures, devices, config.train.global_batch_size, moments, gloo=devices.name == "cpu", layers=layers)


def _candidate(config: Config, job: Job, layout: Layout) -> Candidate:
    """With the micro-batch and the checkpointing that the run will have."""
    rows = config.train.micro_batch_size
    accumulation = max(1, config.train.global_batch_size // (rows * layout.data_ranks))
    wanted = config.train.activation_checkpointing
    if wanted == "auto":
        wanted = "none" if job.devices.name == "cpu" else "full"
    mode: CheckpointingMode = wanted if wanted in modes(job.model) else "none"
    return evaluate(job, layout, mode, Batch(rows, accumulation))


def _is_possible(layout: Layout, num_experts: int) -> bool:
    try:
        resolve_layout(explicit(layout), layout.world_size, num_experts)
    except InputError:
        return False
    return True
