"""Cut a model into pipeline stages: each pp rank keeps the blocks of its stages, the others become placeholders.

Placeholders are modules without parameters in the same places, so the names of the local parameters do not depend on
the cut. The family's forward still runs from end to end on every stage, on the full batch: it computes masks, rotary
tables and other inputs of blocks from token and position ids. Only the hidden state comes from another stage: the
placeholder before the first block of a stage returns it, and the placeholder after the last block receives the
result. Modules before the blocks (embedding) are on the first stage, modules after them (final norm, head) on the
last; a weight that is tied between the two is on both.

Accumulation by layer uses the same placeholders: a layer is a pipeline stage that this rank holds with all the others,
of one block, or of several where a block reads more of an earlier one than its hidden state. While one layer runs,
placeholders stand for all other modules. step/by_layer.py runs the layers; nothing in this file communicates.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from expertmesh.anatomy import Anatomy, decoder_blocks, is_within
from expertmesh.compat import child_slots
from expertmesh.config.errors import InputError
from expertmesh.distributed.layout import Layout
from expertmesh.distributed.mesh import Mesh
from expertmesh.introspection.stage_probe import CannotCut
from expertmesh.parallel.shard_plan import ShardPlan
from expertmesh.parallel.stages import (
    Cut,
    Placeholder,
    StageResult,
    idle,
    idle_around,
    parts_by_stage,
    put_placeholders,
    rehearse_each,
    stages_of,
)
from expertmesh.state.model_view import ModelView, StageView, attach, mesh_of, shard_plan_of, sharded
from expertmesh.state.patching import exchanged


@dataclass(slots=True, eq=False)
class Pipeline:
    """The pipeline stages of a cut model."""

    mesh: Mesh
    """The mesh of the model."""
    blocks: tuple[str, ...]
    """Names of the blocks of the full decoder."""
    stages: tuple[range, ...]
    """The block numbers of each stage."""
    local_stages: tuple[int, ...]
    """The numbers of this rank's stages."""
    hidden: tuple[int, ...]
    """The dims of the hidden state between stages after `[B, S]`."""
    dtype: torch.dtype
    """The dtype of the hidden state between stages."""
    idle: dict[int, Placeholder] = field(default_factory=dict)
    """Placeholders for the local blocks, by number, used while another stage of this rank runs."""
    around: dict[str, tuple[frozenset[int], nn.Module]] = field(default_factory=dict)
    """Local modules around the blocks by name: the stages that run them, and a placeholder for the other stages."""
    running: int | None = None
    """The stage that runs now; None outside of `running`."""

    @property
    def local_blocks(self) -> list[int]:
        """The numbers of this rank's blocks."""
        return [block for stage in self.local_stages for block in self.stages[stage]]

    def is_last(self, stage: int) -> bool:
        """Return whether `stage` is the last, which holds the head."""
        return stage == len(self.stages) - 1


def cut(model: nn.Module, plan: ShardPlan, cuts: Cut, absent: Sequence[str], mesh: Mesh) -> Anatomy:
    """Replace the parts of other pp ranks in `model` by placeholders, in place.

    Args:
        cuts: `plan.cut`. `ModelView` reads names and shapes of other stages from the plan's meta copy.
        absent: the parts that this rank's stages do not hold.

    Returns:
        The anatomy of this rank's stages.
    """
    blocks, dtype, uncast = cuts.blocks, plan.dtypes.compute, plan.uncast
    local_stages = stages_of(mesh.layout, mesh.coordinate("pp"))
    pipeline = Pipeline(mesh, blocks, cuts.stages, local_stages, cuts.hidden, dtype)
    # Attach the adapter state too: no module of this stage may be adapted, and it must be found all the same.
    # The view is made before any part is replaced: it needs the tensors and ties of the full model.
    view = _stage_view(model, cuts.parts, mesh, plan.view.meta)
    attach(model, stage_view=view, pipeline=pipeline, lora_state=plan.adapters)
    put_placeholders(
        model, absent, blocks, cuts.items, lambda name: torch.float32 if name in uncast else dtype, mesh.device
    )
    local = {number: model.get_submodule(blocks[number]) for number in pipeline.local_blocks}
    pipeline.idle.update({number: idle(block, cuts.items) for number, block in local.items()})
    model.register_forward_pre_hook(_refuse_direct_call)
    anatomy, is_here = plan.anatomy, lambda name: not is_within(name, *absent)
    return Anatomy(
        blocks=tuple(filter(is_here, anatomy.blocks)),
        experts=tuple(spec for spec in anatomy.experts if is_here(spec.name)),
        routers=tuple(filter(is_here, anatomy.routers)),
        shared_experts=tuple(filter(is_here, anatomy.shared_experts)),
    )


@contextmanager
def running(
    model: nn.Module, pipeline: Pipeline, stage: int, received: torch.Tensor | None, *, behind_blocks: bool = False
) -> Iterator[StageResult]:
    """Make the model's forward run one stage while the context is open: only its blocks compute.

    Args:
        pipeline: the stages of the model.
        behind_blocks: the stage's blocks have run, and `received` is the output of the last of them.
        received: the input of its first block: the hidden state `[B, S, ...]` of this rank's positions; None on the
            first stage.

    Yields:
        The output of the stage, filled by the forward.
    """
    active = pipeline.stages[stage]
    active = range(active.stop, active.stop) if behind_blocks else active
    blocks = child_slots(model.get_submodule(pipeline.blocks[0].rpartition(".")[0]))
    keys = [name.rpartition(".")[2] for name in pipeline.blocks]
    idle = {keys[n]: pipeline.idle[n] for n in pipeline.local_blocks if n not in active}
    pipeline.running = stage
    result = StageResult()
    with ExitStack() as stack:
        stack.callback(setattr, pipeline, "running", None)
        stack.enter_context(exchanged(blocks, idle))
        for name, (stages, placeholder) in pipeline.around.items():
            if stage not in stages:
                parent, _, leaf = name.rpartition(".")
                stack.enter_context(exchanged(child_slots(model.get_submodule(parent)), {leaf: placeholder}))
        # After the placeholders are in place: the neighbouring block may be one of this rank's other stages.
        if active.start:
            stack.enter_context(exchanged(vars(blocks[keys[active.start - 1]]), {"output": received}))
        if active.stop < len(keys):
            stack.enter_context(exchanged(vars(blocks[keys[active.stop]]), {"result": result}))
        yield result


def _refuse_direct_call(model: nn.Module, args: Any) -> None:
    """Raise `InputError` if a cut model is called directly; a forward pre-hook."""
    # `model(...)` or `generate` on one stage would silently return wrong values.
    pipeline = sharded(model).pipeline
    if pipeline is not None and pipeline.running is None:
        raise not_callable("a call of the model runs a whole one")


def not_callable(what: str) -> InputError:
    """Return the error for code that runs a model as if it were not cut into stages."""
    return InputError(
        f"{what}, and this one is cut into pipeline stages, of which each rank holds its own; train it by "
        "expertmesh.forward_backward(model, micro_batches, target_tokens=n), which works for every layout, or save it "
        "and load it without parallel.pp",
        key="layout.pp-needs-forward-backward",
    )


def _stage_view(model: nn.Module, parts: dict[str, frozenset[int]], mesh: Mesh, meta_model: nn.Module) -> StageView:
    """Record the tensors that several stages hold; the first pp rank of them owns each, the others have replicas."""
    all_ranks = frozenset(range(mesh.layout.pp))
    holders: dict[int, frozenset[int]] = {}
    state = ModelView(model).state
    # By identity: tied names share one tensor, which is on the stages of all its names.
    for name, tensor in state.items():
        of_name = next((ranks for part, ranks in parts.items() if is_within(name, part)), all_ranks)
        holders[id(tensor)] = holders.get(id(tensor), frozenset()) | of_name
    rank = mesh.coordinate("pp")
    held = {name: holders[id(tensor)] for name, tensor in state.items() if rank in holders[id(tensor)]}
    return StageView(
        meta_model=meta_model,
        tied_replicas=frozenset(name for name, ranks in held.items() if min(ranks) != rank),
        tied_originals=frozenset(name for name, ranks in held.items() if min(ranks) == rank and len(ranks) > 1),
        is_first_rank=mesh.rank % mesh.layout.ranks_per_stage == 0,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Layers:
    """The layers of a sharded model, and what FSDP2 gathers and reduces for each of them."""

    pipeline: Pipeline
    """Each layer as a stage of this rank."""
    units: tuple[tuple[FSDPModule, ...], ...]
    """The FSDP2 modules by layer: a layer is the last in backward to use the parameters of its modules."""

    @property
    def count(self) -> int:
        """The number of layers."""
        return len(self.pipeline.stages)


def layers_of(model: nn.Module) -> Layers:
    """Return the layers of a sharded model, planned at the first call.

    Raises:
        InputError: the model is cut into pipeline stages already, or its blocks cannot run one by one; names the block.
    """
    if (planned := sharded(model).layers) is not None:
        return planned
    plan, mesh = shard_plan_of(model), mesh_of(model)
    layers_cut, compute = _cut_into_layers(plan, plan.layout.pp), plan.dtypes.compute
    stages = layers_cut.stages
    pipeline = Pipeline(mesh, layers_cut.blocks, stages, tuple(range(len(stages))), layers_cut.hidden, compute)
    blocks = {number: model.get_submodule(name) for number, name in enumerate(layers_cut.blocks)}
    pipeline.idle.update({number: idle(block, layers_cut.items) for number, block in blocks.items()})
    around = [name for name in layers_cut.parts if name not in layers_cut.blocks]
    placeholders = idle_around(
        model, around, lambda name: torch.float32 if name in plan.uncast else compute, mesh.device
    )
    pipeline.around.update({name: (layers_cut.parts[name], part) for name, part in placeholders.items()})
    units: list[list[FSDPModule]] = [[] for _ in stages]
    for group in plan.groups:
        # In backward the first layer runs last, so that it is the last to use what several layers share.
        names = group.parameters or group.modules
        users = [
            layer
            for part, part_layers in layers_cut.parts.items()
            if any(is_within(name, part) for name in names)
            for layer in part_layers
        ]
        layer = min(users, default=len(stages) - 1)
        units[layer] += [cast(FSDPModule, model.get_submodule(name)) for name in group.modules]
    layers = Layers(pipeline, tuple(map(tuple, units)))
    attach(model, layers=layers)
    return layers


def refuse_by_layer(plan: ShardPlan, pp: int) -> None:
    """Raise `InputError` if the model of a shard plan cannot be trained layer by layer on `pp` pipeline stages."""
    _cut_into_layers(plan, pp)


def not_by_layer(why: str) -> InputError:
    return InputError(
        f"train.accumulate: by_layer: {why}; set it (in Python accumulate=) to by_micro_batch",
        key="train.accumulate-unsupported",
    )


def _cut_into_layers(plan: ShardPlan, pp: int) -> Cut:
    """Cut the model of a shard plan into layers, each the only stage of a pp rank of its own."""
    if pp > 1:
        raise not_by_layer(f"it needs an uncut model (parallel.pp 1), and parallel.pp is {pp}")
    meta, anatomy = plan.view.meta, plan.anatomy
    blocks = decoder_blocks(anatomy)
    try:
        decoder = plan.decoder
        starts = [number for number in range(len(blocks)) if number not in decoder.joined]
        stages = tuple(itertools.starmap(range, itertools.pairwise([*starts, len(blocks)])))
        parts = parts_by_stage(meta, decoder, blocks, Layout(pp=len(stages)), stages)
        if not decoder.hands_on_hidden_alone:
            rehearse_each(meta, anatomy, blocks, decoder, stages)
    except CannotCut as cannot:
        raise not_by_layer(cannot.why) from cannot
    return Cut(tuple(blocks), stages, parts, decoder.hidden, decoder.items, decoder.joined)
