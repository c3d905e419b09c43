"""Place the experts of a run on EP ranks by their load, for `moe.placement: balanced`.

The load is that of the steps before, in `expert_load.json` of output_dir, or else that of a calibration: forwards of
the first rows through a frozen copy of the model, which is freed before the run's own is allocated. A calibration also
counts which experts tokens choose together, in `expert_pairs.safetensors` of output_dir.
"""

import gc
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from expertmesh.config import Config, ObjectiveConfig
from expertmesh.data import StreamBatches, TrainingBatches
from expertmesh.distributed.all_ranks import object_from_rank_0, raise_on_all_ranks
from expertmesh.distributed.mesh import Mesh
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
from expertmesh.state.model_view import stage_names
from expertmesh.step.forward_backward import evaluate_terms
from expertmesh.step.objectives import objective_of
from expertmesh.training.objective import evaluating, on_device
from expertmesh.training.teacher import Teacher
from expertmesh.weights.load import fill

if TYPE_CHECKING:
    from expertmesh.training.startup.model_check import Checked

Loads = Mapping[str, Sequence[int]]
Together = Mapping[str, torch.Tensor]


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
    found, said = object_from_rank_0(found), f"the load in {file}"
    if found is None:
        began = time.monotonic()
        say(f"calibrating on {config.moe.calibration_batches} micro-batches of each data rank")
        counted = _calibrate(config, checked, mesh, batches)
        with raise_on_all_ranks(f"writing {PAIRS_FILE}"):
            if dist.get_rank() == 0:
                write_pairs(config.output_dir, counted)
        found = {name: pairs_EE.diagonal().tolist() for name, pairs_EE in counted.items()}, counted
        said = f"a calibration in {time.monotonic() - began:.3g} s"
    loads, together = found
    placement = balanced(loads, mesh.layout.ep, config.moe.replicas, together)
    plan, line = replace(checked.plan, placement=placement), _line(loads, placement, said)
    if together and not placement.replicas:
        line += "; experts that tokens choose together share ranks"
    return replace(checked, plan=plan, placement=line, expected_load=placement.over(loads)[1])


def _line(loads: Loads, placement: Placement, said: str) -> str:
    """Return the load of the busiest EP rank before and after, for the plan."""
    both = (each.over(loads) for each in (Placement(placement.ep, {}), placement))
    before, after = (f"{mean:.2f} (at most {worst:.2f})" for mean, worst in both)
    copies = f", moe.replicas {placement.replicas}" if placement.replicas else ""
    return f"balanced by {said}: the busiest EP rank has {after} times the mean load, contiguous {before}{copies}"


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
    specs = checked.anatomy.experts
    pairs_LEE = torch.zeros(
        len(specs), checked.anatomy.num_experts, checked.anatomy.num_experts, dtype=torch.int64, device=mesh.device
    )
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
