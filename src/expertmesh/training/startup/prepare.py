"""Prepare everything of a run that comes before its weights: data, mesh, the start of the run, the sharded model.

Every rank calls `prepare`. Afterwards all is known, nothing is allocated, and no weight of the run has been read.
With `moe.placement: balanced` experts are placed on EP ranks by their load: that of the steps before, in
`expert_load.json` of output_dir, or else that of a calibration by forwards of the first rows through a frozen copy of
the model, which is freed before the run's own is allocated. A calibration also counts which experts tokens choose
together, in `expert_pairs.safetensors` of output_dir.
"""

import datetime
import gc
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from expertmesh.config import Config, ObjectiveConfig
from expertmesh.data import BatchLayout, EvaluationBatches, StreamBatches, TokenizedDataset, TrainingBatches
from expertmesh.distributed.all_ranks import from_rank_0, raise_on_all_ranks
from expertmesh.distributed.mesh import Mesh, build_mesh, current_device, set_timeout, start_process_group
from expertmesh.experts.install import close_library
from expertmesh.experts.layer import layer_of
from expertmesh.experts.placement import (
    LOAD_FILE,
    PAIRS_FILE,
    Placement,
    balanced,
    check_layers,
    read_loads,
    read_pairs,
    write_pairs,
)
from expertmesh.io.terminal import print_log
from expertmesh.parallel.apply import shard_model
from expertmesh.state.model_view import stage_names
from expertmesh.step.forward_backward import evaluate_terms
from expertmesh.step.objectives import objective_of
from expertmesh.training.objective import Teacher, evaluating, on_device
from expertmesh.training.resume import (
    Identity,
    check_start,
    date_of,
    find_start,
    find_weights,
)
from expertmesh.training.startup.data import (
    RunData,
    read_data,
    read_where_padded,
    refuse_idle_tower,
    stop_where_taught,
    with_images,
)
from expertmesh.training.startup.output_dir import (
    refuse_no_more_steps,
    restore,
    set_result_aside,
    write_config,
)
from expertmesh.weights.load import bytes_to_read, fill

if TYPE_CHECKING:
    from expertmesh.training.control import Control
    from expertmesh.training.startup.model_check import Checked

log = logging.getLogger(__name__)
Loads = Mapping[str, Sequence[int]]
Together = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that is ready to read weights, as this rank sees it. Its model is sharded and may still be on meta."""

    config: Config
    checked: "Checked"
    mesh: Mesh
    data: RunData
    batch_layout: BatchLayout
    batches: TrainingBatches | StreamBatches
    evaluation: Mapping[str, EvaluationBatches]
    total_steps: int
    bytes_to_load: int
    """Bytes of the model's files that this rank reads."""
    identity: Identity
    start: Path | None
    """The checkpoint that it continues."""
    weights: Path | None
    """Another run's checkpoint that this one begins with."""
    changes: tuple[str, ...]
    """Changes since that start; on rank 0 alone."""

    @property
    def model(self) -> PreTrainedModel:
        return self.checked.model

    def mismatched(self) -> Iterator[TokenizedDataset]:
        """Yield the mismatched rows of training and of each evaluation, for kto; nothing for other objectives."""
        if self.config.objective.judged:
            assert isinstance(self.batches, TrainingBatches)
            yield self.batches.mismatched(self.total_steps)
            yield from (each.mismatched().dataset for each in self.evaluation.values())


def begin(config: Config, control: "Control") -> None:
    """Join the job, and print the first lines: from here on this rank prints what `log.level` allows."""
    start_process_group(current_device(), config.distributed.first_step_timeout_seconds)
    print_log(config.log.level, dist.get_rank())
    say(control, "building the model on meta and planning its shards")


def say(control: "Control", what: str) -> None:
    """Report what this rank does now to the launcher, and on rank 0 to the terminal."""
    control.progress.at(0, what)
    log.log(logging.INFO if dist.get_rank() == 0 else logging.DEBUG, f"starting   {what}")


def prepare(config: Config, control: "Control", checked: "Checked") -> Prepared:
    """Prepare for reading weights. Collectives: every rank calls it; those of the stages that it says."""
    # 1. The checkpoint to continue from, from object storage or output_dir.
    restore(config)
    found: tuple[Path | None, Path | None, datetime.date | None] = (None, None, None)
    with raise_on_all_ranks("looking for a checkpoint"):
        if dist.get_rank() == 0:
            start = find_start(config)
            found = start, find_weights(config), date_of(start)
    start, weights, date = from_rank_0(found)
    # 2. Data and batches.
    data = read_data(config, checked, date, partial(say, control))
    refuse_idle_tower(config, data.training)
    for dataset in data.datasets:
        checked = with_images(config, checked, dataset)
    stop_where_taught(checked.model, data.reports[0], data.tokenizer)
    read_where_padded(checked, data.pad_token_id)
    mesh = build_mesh(checked.layout, current_device())
    set_timeout(mesh, config.distributed.first_step_timeout_seconds)
    layout = BatchLayout(
        micro_batch_size=config.train.micro_batch_size,
        data_rank=mesh.data_rank,
        data_ranks=mesh.layout.data_ranks,
        packing=config.data.packing,
        pad_token_id=data.pad_token_id,
        max_length=config.data.max_length,
        images=data.images,
        guard=nullcontext if data.images is None else raise_on_all_ranks,
    )
    batches, total_steps = _batches(config, layout, data)
    evaluation = {name: EvaluationBatches(dataset, layout) for name, dataset in data.evaluation.items()}
    # 3. The same data on all ranks, and as in the checkpoint.
    with raise_on_all_ranks("comparing the data"):
        identity = Identity.of(config, checked.directory, data.training, data.date)
    identity.agree()
    changes: Sequence[str] = ()
    with raise_on_all_ranks("comparing with the checkpoint"):
        if mesh.rank == 0 and start is not None:
            changes = check_start(start, identity, total_steps, config)
            refuse_no_more_steps(config, start, total_steps)
    # 4. The model, sharded on meta.
    checked = place_experts(config, checked, mesh, batches, partial(say, control))
    say(control, "sharding the model")
    torch.manual_seed(config.train.seed + mesh.rank)
    shard_model(checked.model, checked.plan, mesh)
    if checked.objective.teacher is not None:
        checked.objective.teacher.shard(mesh)
    with raise_on_all_ranks("reading the headers of the weights"):
        to_load = 0 if checked.weights_seed is not None else bytes_to_read(checked.model, checked.directory)
    # 5. The configuration in output_dir; the result of an earlier start is set aside.
    with raise_on_all_ranks("writing the configuration"):
        if mesh.rank == 0:
            if start is not None:
                set_result_aside(config, start)
            write_config(config)
    where = start, weights, tuple(changes)
    return Prepared(config, checked, mesh, data, layout, batches, evaluation, total_steps, to_load, identity, *where)


def _batches(config: Config, layout: BatchLayout, data: RunData) -> tuple[TrainingBatches | StreamBatches, int]:
    """Return the steps of training, and how many there will be."""
    train = config.train
    if data.stream is not None:
        assert train.max_steps is not None
        return StreamBatches(data.stream, layout, global_batch_size=train.global_batch_size), train.max_steps
    batches = TrainingBatches(
        data.training,
        layout,
        global_batch_size=train.global_batch_size,
        shuffle=config.data.shuffle,
        seed=train.seed,
        mixture=data.mixture,
    )
    total_steps = batches.total_steps(train.num_epochs)
    return batches, min(total_steps, train.max_steps or total_steps)


def place_experts(
    config: Config,
    checked: "Checked",
    mesh: Mesh,
    batches: TrainingBatches | StreamBatches,
    say: Callable[[str], None],
) -> "Checked":
    """Return `checked` with its experts placed, if `moe.placement` is balanced, and with words of the plan about it.

    Args:
        say: Reports what this rank does now.

    Collectives: every rank calls it; a broadcast, and those of a calibration if there is no load of this run.
    """
    if config.moe.placement != "balanced":
        return checked
    if mesh.layout.ep == 1:
        return replace(checked, placement="as in the model: at ep 1 each rank holds all experts")
    found: tuple[Loads, Together] | None = None
    with raise_on_all_ranks("reading the load of experts"):
        file = Path(config.output_dir, LOAD_FILE)
        if dist.get_rank() == 0 and file.is_file():
            own = read_loads(file)
            layers = {spec.name: spec.num_experts for spec in checked.anatomy.experts}
            check_layers(str(file), {name: len(load_E) for name, load_E in own.items()}, layers)
            found = own, read_pairs(config.output_dir, own)
    found, source = from_rank_0(found), f"the load in {file}"
    if found is None:
        began = time.monotonic()
        say(f"calibrating on {config.moe.calibration_batches} micro-batches of each data rank")
        counted = _calibrate(config, checked, mesh, batches)
        with raise_on_all_ranks(f"writing {PAIRS_FILE}"):
            if dist.get_rank() == 0:
                write_pairs(config.output_dir, counted)
        found = {name: pairs_EE.diagonal().tolist() for name, pairs_EE in counted.items()}, counted
        source = f"a calibration in {time.monotonic() - began:.3g} s"
    loads, together = found
    placement = balanced(loads, mesh.layout.ep, config.moe.replicas, together)
    both = (each.over(loads) for each in (Placement(placement.ep, {}), placement))
    before, after = (f"{mean:.2f} (at most {worst:.2f})" for mean, worst in both)
    copies = f", moe.replicas {placement.replicas}" if placement.replicas else ""
    line = f"balanced by {source}: the busiest EP rank has {after} times the mean load, contiguous {before}{copies}"
    if together and not placement.replicas:
        line += "; experts that tokens choose together share ranks"
    plan = replace(checked.plan, experts=replace(checked.plan.experts, placement=placement))
    return replace(checked, plan=plan, placement=line, expected_load=placement.over(loads)[1])


def _calibrate(
    config: Config, checked: "Checked", mesh: Mesh, batches: TrainingBatches | StreamBatches
) -> dict[str, torch.Tensor]:
    """Return the tokens that chose both of two experts in the first micro-batches of all data ranks, `[E, E]` by layer.

    Collectives: every rank calls it; those of loading a frozen model, of its forwards, and an all-reduce.
    """
    if config.moe.dispatch == "deepep":  # whose buffers are for one model
        config = config.model_copy(update={"moe": config.moe.model_copy(update={"dispatch": "auto"})})
    with raise_on_all_ranks("planning a frozen copy of the model"):
        frozen = Teacher.planned(config, checked.model_config, checked.directory, mesh.layout)
    frozen.shard(mesh)
    fill(frozen.model, frozen.directory, allocate_on=mesh.device, seed=checked.weights_seed)
    specs, experts = checked.anatomy.experts, checked.anatomy.num_experts
    pairs_LEE = torch.zeros(len(specs), experts, experts, dtype=torch.int64, device=mesh.device)
    here = set(stage_names(frozen.model, [spec.name for spec in specs]))
    for spec, pairs_EE in zip(specs, pairs_LEE, strict=True):
        if spec.name in here:  # the layer of another pipeline stage stays zero
            layer_of(frozen.model.get_submodule(spec.name)).together_EE = pairs_EE
    rows = itertools.chain.from_iterable(step.micro_batches for step in batches.steps(0, None))
    objective = objective_of(ObjectiveConfig(), rows=1, target_tokens=1)
    with evaluating(frozen.model):
        for batch in itertools.islice(rows, config.moe.calibration_batches):
            evaluate_terms(frozen.model, [on_device(batch, mesh.device)], objective)
    dist.all_reduce(pairs_LEE)
    close_library(frozen.model)
    del frozen
    gc.collect()
    if mesh.device.type != "cpu":
        torch.accelerator.empty_cache()
    return {spec.name: pairs_EE for spec, pairs_EE in zip(specs, pairs_LEE.cpu(), strict=True)}
