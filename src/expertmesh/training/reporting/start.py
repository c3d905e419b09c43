"""Print and record a start: the plan before weights are read, with every derived value; run.json and data.json once the
step to go on from is known. Also report a rank that ran out of memory, beside the prediction.

Rank 0 prints and writes; record.py has the files' content. Nothing here decides anything.
"""

import logging
import os
import platform
import shutil
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from expertmesh import __version__
from expertmesh.adapters.plan import plan_lines as adapter_plan_lines
from expertmesh.anatomy import Anatomy, decoder_blocks, names_without_blocks
from expertmesh.config import Config, InputError
from expertmesh.data import IGNORE, TokenizedDataset
from expertmesh.data.images import from_blob
from expertmesh.distributed.all_ranks import collective_device, raise_on_all_ranks
from expertmesh.distributed.collectives import all_gather
from expertmesh.distributed.environment import processors
from expertmesh.distributed.layout import DENSE_AXES, EXPERT_AXES, Layout
from expertmesh.distributed.mesh import current_device
from expertmesh.io.boxes import volume
from expertmesh.io.directory import replace_synced
from expertmesh.io.terminal import bytes_text, plural
from expertmesh.parallel.packing import packed_attention_line
from expertmesh.parallel.pipeline import Pipeline
from expertmesh.state.model_view import is_adapter, sharded
from expertmesh.state.shards import owns_copy, stored_box
from expertmesh.step.pipeline_schedule import schedule_kind
from expertmesh.training.reporting.record import (
    DATA_FILE,
    Bin,
    DataCounts,
    DataRecord,
    Forecast,
    MoeLayer,
    Prediction,
    RunRecord,
    Share,
    ShownSample,
    Start,
    TextPiece,
    write_record,
)
from expertmesh.training.startup.model_check import Checked
from expertmesh.training.startup.prepare import Prepared

if TYPE_CHECKING:
    from expertmesh.data import DataReport
    from expertmesh.training.control import RankStatus
    from expertmesh.training.resume import Counters

log = logging.getLogger(__name__)
Predict = Callable[[Config, Checked], Forecast]
"""Returns the prediction of what a step of a checked run will take. Training has no predictor of its own."""
# How many samples, and how much of each.
_SAMPLES, _TOKENS = 3, 512


def print_plan(run: Prepared, forecast: Forecast | None) -> None:
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


def machine_lines(output_dir: str) -> Iterator[str]:
    """Return versions and machine of this job, for its log. Rank 0 calls it."""
    found = versions()
    yield "versions   " + ", ".join(f"{name} {number}" for name, number in found.items())
    ranks, here = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    machines = f", {here} on each of {ranks // here} machines" if ranks > here else ""
    yield f"ranks      {ranks} × {device_name(current_device())}{machines}; rank 0 on {socket.gethostname()}"
    yield f"output     {Path(output_dir).absolute()}"


def versions() -> dict[str, str]:
    """Return the versions of the libraries that decide what a run computes."""
    return {
        "expertmesh": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def device_name(device: torch.device) -> str:
    """Return the name of the device: an accelerator, or the processor with the number of cores that may be used."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    return f"{_processor()}, {processors()} cores"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def plan_lines(run: Prepared, forecast: Forecast | None) -> Iterator[str]:
    """Return the plan of this rank, line by line. No communication."""
    yield from _model_lines(run)
    yield from _expert_lines(run)
    yield from _step_lines(run)
    if forecast is not None:
        yield f"predicted  {forecast.line}"


def _model_lines(run: Prepared) -> Iterator[str]:
    """Describe the model: where ranks are, what each axis does, what a rank holds and in which dtypes."""
    config, checked, mesh, model = run.config, run.checked, run.mesh, run.model
    anatomy, plan, spec = checked.anatomy, checked.plan, checked.anatomy.experts[0]
    layers = f"{len(anatomy.experts)} MoE layers of {spec.num_experts} experts, top-{spec.top_k}"
    blocks = f"{len(decoder_blocks(anatomy))} blocks"
    yield f"model      {config.model.name_or_path}: {checked.model_config.model_type}, {layers}, {blocks}"
    yield from (f"           {line}" for line in mesh.layout.table().splitlines())
    yield from (f"cp         {line}" for line in plan.context.lines())
    yield from (f"tp         {line}" for line in plan.tensor.lines())
    if config.data.packing and mesh.device.type != "cpu":
        how = packed_attention_line(model, checked.anatomy, mesh.device, plan.dtypes.compute)
        yield f"packed     rows attend {how}"
    if (pipeline := sharded(model).pipeline) is not None:
        yield from (f"stages     {line}" for line in _stage_lines(pipeline, run.batches.accumulation))
    if checked.layout_reason is not None:
        yield f"layout     {checked.layout_reason}"
    dense, expert, adapters = local_parameters(model, anatomy)
    counts = f"{dense:,} dense + {expert:,} expert{f' + {adapters:,} adapter' if adapters else ''} parameters"
    yield f"per rank   {counts}, {bytes_text(run.bytes_to_load)} to load"
    precision, lora = config.precision, sharded(model).lora_plan
    what, base = ("parameters", "") if lora is None else ("adapters", "base and ")
    kept = "" if precision.frozen is None or lora is None else f", experts and linear layers in {precision.frozen}"
    yield f"precision  {precision.params} {what}, {precision.compute} {base}compute, {precision.reduce} reduce{kept}"
    if plan.uncast:
        uncast = (name for name, _ in plan.view.meta.named_parameters() if name in plan.uncast)
        yield f"           computed in float32 all the same: {names_without_blocks(uncast)}"


def _expert_lines(run: Prepared) -> Iterator[str]:
    """Describe what is computed of experts and routers, how they are balanced, and which adapters they get."""
    checked, accumulation, lora = run.checked, run.batches.accumulation, sharded(run.model).lora_plan
    resolved, balance = checked.plan.resolved, checked.plan.balance
    router: str = run.config.moe.router
    if lora is not None:
        router = "adapted" if any(target.group == "router" for target in lora.targets) else "frozen"
    computed = f"dispatch {resolved['dispatch']}, compute {resolved['compute']}"
    yield f"experts    {computed}, router {router}, in {resolved['router_dtype']}"
    if checked.placement is not None:
        yield f"           placed {checked.placement}"
    if resolved["kernels"] != "torch":
        yield f"           kernels {resolved['kernels']}"
    if balance.aux_loss_coef:
        counted = accumulation if accumulation > 1 or sharded(run.model).pipeline is not None else 0
        if checked.order.by_layer and checked.order.rounds(accumulation) == 1:
            counted = 0  # the forward of the round counts
        cost = plural(counted, "counting forward") if counted else "no counting forward"
        yield f"balance    auxiliary loss times {balance.aux_loss_coef:g} over the global batch, {cost} a step"
    if balance.z_loss_coef:
        yield f"balance    z-loss times {balance.z_loss_coef:g}"
    if balance.biases:
        yield f"balance    {len(balance.biases)} correction biases move by {balance.bias_update_rate:g} a step"
    if lora is not None:
        yield from (f"lora       {line}" for line in adapter_plan_lines(lora, checked.anatomy))


def _step_lines(run: Prepared) -> Iterator[str]:
    """Describe what a step keeps in memory and trains on, and how many there will be."""
    config, checked, plan, train = run.config, run.checked, run.checked.plan, run.config.train
    blocks, mode = plan.anatomy.blocks, f"{plan.options.activation_checkpointing}"
    if mode != "none" and plan.options.checkpoint_layers != "all":
        numbers = ", ".join(str(blocks.index(name)) for name in plan.checkpointed)
        mode += f" of {len(plan.checkpointed)} of {len(blocks)} blocks ({numbers})"
    yield f"memory     activation checkpointing {mode}"
    if plan.compiled:
        # Of all stages, as the model on meta has them: a stage of its own has placeholders for the others' blocks.
        kinds = dict.fromkeys(type(plan.view.meta.get_submodule(name)).__name__ for name in plan.compiled)
        yield f"compile    {len(plan.compiled)} dense parts of {len(blocks)} blocks ({', '.join(kinds)})"
    for report in run.data.reports:
        yield from (f"data       {line}" for line in report.lines())
    ranks, sequences = run.mesh.layout.data_ranks, "sequences"
    if objective := checked.objective.line():
        yield f"objective  {objective}"
        sequences = "pairs" if config.objective.pairs else "responses" if config.objective.judged else sequences
    yield (
        f"batch      {train.global_batch_size} {sequences} = {train.micro_batch_size} micro-batch × {ranks} data ranks "
        f"× {run.batches.accumulation} accumulation"
    )
    if run.batches.accumulation > 1 or train.accumulate == "by_layer":
        yield f"           {checked.order_line(run.batches.accumulation)}"
    if checked.checkpoint_bytes:
        yield f"disk       {_disk_line(checked.checkpoint_bytes, config)}"
    steps = f"{run.total_steps} optimizer steps"
    if train.max_steps is not None and train.max_steps > run.total_steps:
        epochs = plural(train.num_epochs, "epoch")
        steps += f" in {epochs} of the data, fewer than train.max_steps {train.max_steps}"
    yield f"steps      {steps}, {config.optim.name}, {config.schedule.name} schedule"


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


def _disk_line(size: int, config: Config) -> str:
    """Compare the checkpoints of a run with the free space; one more than are kept exists while it is written."""
    keep, free = config.checkpoint.keep_last, shutil.disk_usage(config.output_dir).free
    remote = config.checkpoint.remote is not None
    total = (keep + (3 if remote else 1)) * size
    what = f"{keep} kept, up to two waiting for their upload and one" if remote else f"{keep} kept and one"
    line = f"{bytes_text(size)} a checkpoint, {what} being written: {bytes_text(total)}; {bytes_text(free)} are free"
    if total > free:
        line += "; warning: not enough for them, lower checkpoint.keep_last or choose another output_dir"
    return line


def record_start(
    run: Prepared, forecast: Forecast | None, counters: "Counters", *, startup_seconds: float, lost_seconds: float
) -> None:
    """Add this start to the run's run.json. The seconds are fields of `Start`.

    Raises `InputError` on all ranks if rank 0 cannot write. Collectives: every rank calls it; one all-gather of five
    integers and one small all-reduce.
    """
    config, checked, mesh = run.config, run.checked, run.mesh
    shares, parameters = _shares(run)
    prediction = None if forecast is None else forecast.prediction
    if checked.expected_load is not None:
        prediction = (prediction or Prediction()).model_copy(update={"ranks_max_over_mean": checked.expected_load})
    with raise_on_all_ranks("writing run.json"):
        if mesh.rank == 0:
            start = Start(
                started=datetime.now(UTC).isoformat(timespec="seconds"),
                after_step=counters.step,
                total_steps=run.total_steps,
                world_size=mesh.layout.world_size,
                layout={axis: mesh.layout.size(axis) for axis in dict.fromkeys((*DENSE_AXES, *EXPERT_AXES))},
                device=mesh.device.type,
                device_name=device_name(mesh.device),
                versions=versions(),
                shares=shares,
                micro_batch_size=config.train.micro_batch_size,
                data_ranks=mesh.layout.data_ranks,
                accumulation=run.batches.accumulation,
                dispatch=checked.plan.resolved["dispatch"],
                compute=checked.plan.resolved["compute"],
                activation_checkpointing=checked.plan.options.activation_checkpointing,
                accumulate="by_layer" if checked.order.by_layer else "by_micro_batch",
                printed=list(plan_lines(run, forecast)),
                plan=prediction,
                startup_seconds=startup_seconds,
                elapsed_seconds=counters.elapsed_seconds,
                lost_seconds=lost_seconds,
            )
            anatomy, reports = checked.anatomy, run.data.reports
            layers = [MoeLayer(name=s.name, experts=s.num_experts, top_k=s.top_k) for s in anatomy.experts]
            record = RunRecord(
                model_type=checked.model_config.model_type,
                parameters=parameters,
                blocks=len(anatomy.blocks),
                moe_layers=layers,
                train_data=_counts(reports[:1]),
                eval_data=_counts(reports[1:]) if len(reports) > 1 else None,
                starts=[start],
            )
            write_record(record, Path(config.output_dir))


def _counts(reports: Sequence["DataReport"]) -> DataCounts:
    return DataCounts(
        rows=sum(each.rows for each in reports),
        samples=sum(each.samples for each in reports),
        tokens=sum(each.tokens for each in reports),
        target_tokens=sum(each.target_tokens for each in reports),
    )


def _shares(run: Prepared) -> tuple[list[Share], int]:
    """Return how much each rank holds, with equal ranks together, and the elements of the full model."""
    dense, expert, adapter = local_parameters(run.model, run.checked.anatomy)
    owned = sum(volume(stored_box(parameter)) for parameter in run.model.parameters() if owns_copy(parameter))
    mine = torch.tensor([[dense, expert, adapter, run.bytes_to_load, owned]], device=collective_device())
    assert dist.group.WORLD is not None
    ranks = [tuple(int(number) for number in row) for row in all_gather(mine, dist.group.WORLD).tolist()]
    shares = [
        Share(ranks=count, dense=dense, expert=expert, adapter=adapter, bytes_to_load=size)
        for (dense, expert, adapter, size), count in Counter(row[:4] for row in ranks).items()
    ]
    return shares, sum(row[4] for row in ranks)


def write_data_record(run: Prepared) -> None:
    """Write the record. For rank 0."""
    dataset, tokenizer = run.data.training, run.data.tokenizer
    shown = []
    for number in range(min(_SAMPLES, len(dataset))):
        sample = dataset.sample(number)
        shown.append(
            ShownSample(
                source=dataset.position(number),
                tokens=len(sample.labels),
                targets=int((sample.labels != IGNORE).sum()),
                pieces=pieces_of(dataset, number, tokenizer, _TOKENS)[0],
            )
        )
    lengths = [Bin(above=b.above, up_to=b.up_to, samples=b.samples) for b in run.data.reports[0].histogram]
    content = DataRecord(samples=shown, lengths=lengths).model_dump_json(indent=1).encode() + b"\n"
    replace_synced(Path(run.config.output_dir) / DATA_FILE, content)


def pieces_of(
    dataset: TokenizedDataset, index: int, tokenizer: PreTrainedTokenizerBase, most: int
) -> tuple[list[TextPiece], int]:
    """Return the text of a sample's first `most` tokens, target by target, and how many tokens are not shown.

    An image is one of them, and is shown by name and size.
    """
    sample = dataset.sample(index)
    targets, ids = (sample.labels != IGNORE).tolist(), sample.input_ids.tolist()
    images = {picture.start: picture for picture, _ in from_blob(dataset.pictures(index))}
    pieces: list[TextPiece] = []
    at, left = 0, most
    while at < len(ids) and left > 0:
        is_target, stop = targets[at], at + 1
        if at in images:
            name, stop = Path(images[at].path or "in the row").name, at + images[at].tokens
            text, left = f"[image {name}: {plural(images[at].tokens, 'token')}]", left - 1
        else:
            while stop < len(ids) and targets[stop] == is_target and stop not in images and stop - at < left:
                stop += 1
            text, left = str(tokenizer.decode(ids[at:stop], clean_up_tokenization_spaces=False)), left - (stop - at)
        if pieces and pieces[-1].is_target == is_target:
            text = pieces.pop().text + text
        pieces.append(TextPiece(text=text, is_target=is_target))
        at = stop
    return pieces, len(ids) - at
