"""Print the plan before `train` reads weights, with every derived value. Also report a rank that ran out of memory,
beside the prediction.
"""

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe
from torch.distributed.tensor import DTensor

from expertmesh.adapters.plan import plan_lines as adapter_plan_lines
from expertmesh.adapters.plan import plan_of
from expertmesh.anatomy import Anatomy, decoder_blocks, names_without_blocks
from expertmesh.config import Config, InputError
from expertmesh.distributed.layout import Layout
from expertmesh.io.terminal import gib, plural
from expertmesh.parallel.packing import packed_attention_line
from expertmesh.parallel.pipeline import Pipeline, pipeline_of
from expertmesh.parallel.shard_plan import ShardPlan
from expertmesh.state.model_view import is_adapter
from expertmesh.step.pipeline_schedule import schedule_kind
from expertmesh.training.reporting.machine import machine_lines
from expertmesh.training.reporting.record import Forecast
from expertmesh.training.startup.model_check import Checked

if TYPE_CHECKING:
    from expertmesh.training.progress import RankStatus
    from expertmesh.training.startup.prepare import Prepared

log = logging.getLogger(__name__)

Predict = Callable[[Config, Checked], Forecast]
"""Returns the prediction of what a step of a checked run will take. Training has no predictor of its own."""


def print_plan(run: "Prepared", forecast: Forecast | None) -> None:
    """Print the plan, and that an earlier start of the run did no step. For rank 0."""
    directory = Path(run.config.output_dir)
    if run.start is None and (directory / "metrics.jsonl").exists():
        log.info(f"{directory} holds an unfinished run without a checkpoint; it starts again from the beginning")
    log.info("\n".join([*machine_lines(run.config.output_dir), *plan_lines(run, forecast)]))


def out_of_memory(error: torch.OutOfMemoryError, at: "RankStatus", forecast: Forecast | None) -> InputError:
    """Return the error of a rank that ran out of device memory. The same start would fail again, so it is not retried.

    `at`: where the rank was.
    """
    sentence = f"rank {dist.get_rank()} ran out of memory {at}: {str(error).strip().split('. ')[0].rstrip('.')}"
    if torch.accelerator.is_available():
        sentence += f"; it held {torch.accelerator.max_memory_allocated() / 2**30:.2f} GiB at its peak"
    if forecast is not None:
        cures = "; or ".join(forecast.cures())
        sentence += f"; predicted {forecast.line}; "
        sentence += f"predicted to fit, the fastest first: {cures}" if cures else "nothing tried is predicted to fit"
    return InputError(f"{sentence}; change the configuration or use more devices", key="run.out-of-memory")


def plan_lines(run: "Prepared", forecast: Forecast | None) -> Iterator[str]:
    """Return the plan of this rank, line by line. No communication."""
    config, checked, mesh, model, batches = run.config, run.checked, run.mesh, run.model, run.batches
    layout, anatomy, plan = mesh.layout, checked.anatomy, checked.plan
    yield f"model      {config.model.name_or_path}: {checked.model_config.model_type}, " + _experts_line(anatomy)
    yield from _layout_lines(run)
    pipeline = pipeline_of(model)
    dense, expert, adapters = local_parameters(model, anatomy)
    counts = f"{dense:,} dense + {expert:,} expert{f' + {adapters:,} adapter' if adapters else ''} parameters"
    yield f"per rank   {counts}, {gib(run.bytes_to_load)} to load"
    precision, lora = config.precision, plan_of(model)
    what, base = ("parameters", "") if lora is None else ("adapters", "base and ")
    kept = "" if precision.frozen is None or lora is None else f", experts and linear layers in {precision.frozen}"
    yield f"precision  {precision.params} {what}, {precision.compute} {base}compute, {precision.reduce} reduce{kept}"
    if plan.uncast:
        uncast = (name for name, _ in plan.view.meta.named_parameters() if name in plan.uncast)
        yield f"           computed in float32 all the same: {names_without_blocks(uncast)}"
    router: str = config.moe.router
    if lora is not None:
        router = "adapted" if any(target.group == "router" for target in lora.targets) else "frozen"
    said = plan.resolved
    yield (
        f"experts    dispatch {said['dispatch']}, compute {said['compute']}, router {router}, in {said['router_dtype']}"
    )
    if checked.placement is not None:
        yield f"           placed {checked.placement}"
    if said["kernels"] != "torch":
        yield f"           kernels {said['kernels']}"
    counted = batches.accumulation if batches.accumulation > 1 or pipeline is not None else 0
    if checked.order.by_layer and checked.order.rounds(batches.accumulation) == 1:
        counted = 0  # the forward of the round counts
    yield from (f"balance    {line}" for line in _balance_lines(plan, counted))
    if lora is not None:
        yield from (f"lora       {line}" for line in adapter_plan_lines(lora, anatomy))
    yield f"memory     {_checkpointing_line(plan)}"
    if plan.compiled:
        yield f"compile    {_compile_line(plan)}"
    for report in run.data.reports:
        yield from (f"data       {line}" for line in report.lines())
    train, ranks, sequences = config.train, layout.data_ranks, "sequences"
    if objective := checked.objective.line():
        yield f"objective  {objective}"
        sequences = "pairs" if config.objective.pairs else "responses" if config.objective.judged else sequences
    yield (
        f"batch      {train.global_batch_size} {sequences} = {train.micro_batch_size} micro-batch × {ranks} data ranks "
        f"× {batches.accumulation} accumulation"
    )
    if batches.accumulation > 1 or train.accumulate == "by_layer":
        yield f"           {checked.order_line(batches.accumulation)}"
    if checked.checkpoint_bytes:
        yield f"disk       {_disk_line(checked.checkpoint_bytes, config)}"
    steps = f"{run.total_steps} optimizer steps"
    if train.max_steps is not None and train.max_steps > run.total_steps:
        epochs = plural(train.num_epochs, "epoch")
        steps += f" in {epochs} of the data, fewer than train.max_steps {train.max_steps}"
    yield f"steps      {steps}, {config.optim.name}, {config.schedule.name} schedule"
    if forecast is not None:
        yield f"predicted  {forecast.line}"


def _layout_lines(run: "Prepared") -> Iterator[str]:
    """Describe where ranks are, and what each axis does."""
    config, checked, mesh, model = run.config, run.checked, run.mesh, run.model
    plan = checked.plan
    yield from (f"           {line}" for line in mesh.layout.table().splitlines())
    yield from (f"cp         {line}" for line in plan.context.lines())
    yield from (f"tp         {line}" for line in plan.tensor.lines())
    if config.data.packing and mesh.device.type != "cpu":
        how = packed_attention_line(model, checked.anatomy, mesh.device, plan.dtypes[1])
        yield f"packed     rows attend {how}"
    if (pipeline := pipeline_of(model)) is not None:
        yield from (f"stages     {line}" for line in _stage_lines(pipeline, run.batches.accumulation))
    if checked.layout_reason is not None:
        yield f"layout     {checked.layout_reason}"


def _stage_lines(pipeline: Pipeline, micro_batches: int) -> Iterator[str]:
    """Describe which blocks are on which stage, the order of micro-batches, and how long ranks wait."""
    layout, last = pipeline.mesh.layout, len(pipeline.stages) - 1
    for stage, numbers in enumerate(pipeline.stages):
        first_rank = stage % layout.pp * layout.ranks_per_stage
        ranks = f"rank {first_rank}"
        if layout.ranks_per_stage > 1:
            ranks = f"ranks {first_rank} to {first_rank + layout.ranks_per_stage - 1}"
        parts = ["embedding"] if stage == 0 else []
        parts += [f"blocks {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"block {numbers[0]}"]
        parts += ["final norm and head"] if stage == last else []
        yield f"{stage}: {', '.join(parts)} on {ranks}"
    name: str = layout.pp_schedule
    if name == "1f1b" and schedule_kind(layout, micro_batches) is ScheduleGPipe:
        name = "gpipe (which 1f1b is with fewer micro-batches than stages)"
    bubble = bubble_fraction(layout, micro_batches)
    yield f"{name}, {micro_batches} micro-batches a step; ranks wait {bubble:.0%} of it if stages are equally fast"


def _disk_line(size: int, config: Config) -> str:
    """Compare the checkpoints of a run with the free space; one more than are kept exists while it is written."""
    keep, free = config.checkpoint.keep_last, shutil.disk_usage(config.output_dir).free
    remote = config.checkpoint.remote is not None
    total = (keep + (3 if remote else 1)) * size
    what = f"{keep} kept, up to two waiting for their upload and one" if remote else f"{keep} kept and one"
    line = f"{gib(size)} a checkpoint, {what} being written: {gib(total)}; {gib(free)} are free"
    if total > free:
        line += "; warning: not enough for them, lower checkpoint.keep_last or choose another output_dir"
    return line


def bubble_fraction(layout: Layout, micro_batches: int) -> float:
    """Return the share of a step in which a rank waits for others: (pp - 1) / (v · m + pp - 1).

    For m micro-batches and v stages on each rank, if stages take equally long and messages take no time.
    """
    return (layout.pp - 1) / (layout.pp_virtual_stages * micro_batches + layout.pp - 1)


def local_parameters(model: nn.Module, anatomy: Anatomy) -> tuple[int, int, int]:
    """Return the numbers of parameters that this rank holds: (dense, expert, of adapters)."""
    dense = expert = adapters = 0
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if is_adapter(name):
            adapters += local.numel()
        elif anatomy.is_expert_parameter(name):
            expert += local.numel()
        else:
            dense += local.numel()
    return dense, expert, adapters


def _balance_lines(plan: ShardPlan, counted: int) -> Iterator[str]:
    balance = plan.balance
    if balance.aux_loss_coef:
        cost = plural(counted, "counting forward") if counted else "no counting forward"
        yield f"auxiliary loss times {balance.aux_loss_coef:g} over the global batch, {cost} a step"
    if balance.z_loss_coef:
        yield f"z-loss times {balance.z_loss_coef:g}"
    if balance.biases:
        yield f"{len(balance.biases)} correction biases move by {balance.bias_update_rate:g} a step"


def _checkpointing_line(plan: ShardPlan) -> str:
    mode, blocks = plan.options.activation_checkpointing, plan.anatomy.blocks
    if mode == "none" or plan.options.checkpoint_layers == "all":
        return f"activation checkpointing {mode}"
    numbers = ", ".join(str(blocks.index(name)) for name in plan.checkpointed)
    return f"activation checkpointing {mode} of {len(plan.checkpointed)} of {len(blocks)} blocks ({numbers})"


def _compile_line(plan: ShardPlan) -> str:
    # Of all stages, as the model on meta has them: a stage of its own has placeholders for the others' blocks.
    kinds = dict.fromkeys(type(plan.view.meta.get_submodule(name)).__name__ for name in plan.compiled)
    return f"{len(plan.compiled)} dense parts of {len(plan.anatomy.blocks)} blocks ({', '.join(kinds)})"


def _experts_line(anatomy: Anatomy) -> str:
    spec = anatomy.experts[0]
    layers, blocks = len(anatomy.experts), len(decoder_blocks(anatomy))
    return f"{layers} MoE layers of {spec.num_experts} experts, top-{spec.top_k}, {blocks} blocks"
