"""Plan accumulation by layer: which blocks run one after the other, each for all micro-batches of a round.

A layer is a pipeline stage that this rank holds with all the others: one block, or several where a block reads more of
an earlier one than its hidden state. The embedding and what else runs before the blocks belongs to the first layer, the
final norm and the head to the last. While one layer runs, placeholders stand for all other modules (stages.py).
step/by_layer.py runs the layers; nothing here communicates.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from expertmesh.anatomy import decoder_blocks, is_inside
from expertmesh.config.errors import InputError
from expertmesh.distributed.layout import Layout
from expertmesh.distributed.mesh import Mesh
from expertmesh.introspection.stage_probe import CannotCut
from expertmesh.parallel.pipeline import Pipeline
from expertmesh.parallel.shard_plan import ShardPlan
from expertmesh.parallel.stages import Cut, idle, idle_around, parts_by_stage, rehearse_each
from expertmesh.state.model_view import attach, mesh_of, sharded


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
    found: Layers | None = sharded(model).layers
    if found is None:
        found = _plan(model, sharded(model).shard_plan, mesh_of(model))
        attach(model, layers=found)
    return found


def refuse_by_layer(plan: ShardPlan, pp: int) -> None:
    """Raise `InputError` if the model of a shard plan cannot be trained layer by layer on `pp` pipeline stages."""
    _cut(plan, pp)


def _plan(model: nn.Module, plan: ShardPlan, mesh: Mesh) -> Layers:
    cut, compute = _cut(plan, plan.layout.pp), getattr(torch, plan.options.precision.compute)
    pipeline = Pipeline(mesh, cut.blocks, cut.stages, tuple(range(len(cut.stages))), cut.hidden, compute)
    pipeline.idle.update({n: idle(model.get_submodule(name), cut.items) for n, name in enumerate(cut.blocks)})
    around = [name for name in cut.parts if name not in cut.blocks]
    placeholders = idle_around(
        model, around, lambda name: torch.float32 if name in plan.uncast else compute, mesh.device
    )
    pipeline.around.update({name: (cut.parts[name], placeholder) for name, placeholder in placeholders.items()})
    units: list[list[FSDPModule]] = [[] for _ in cut.stages]
    for group in plan.groups:
        # In backward the first layer runs last.
        layer = min(_users(group.parameters or group.modules, cut), default=len(cut.stages) - 1)
        units[layer] += [cast(FSDPModule, model.get_submodule(name)) for name in group.modules]
    return Layers(pipeline, tuple(map(tuple, units)))


def _users(names: Sequence[str], cut: Cut) -> set[int]:
    """Return the layers that use any of these parameters or modules."""
    parts = (part for part in cut.parts if any(name == part or is_inside(name, part) for name in names))
    return {layer for part in parts for layer in cut.parts[part]}


def _cut(plan: ShardPlan, pp: int) -> Cut:
    """Cut the model of a shard plan into layers, each the only stage of a pp rank of its own."""
    if pp > 1:
        raise InputError(
            "train.accumulate: by_layer is for models that are not cut, and parallel.pp is "
            f"{pp}; set train.accumulate to by_micro_batch, or parallel.pp to 1",
            key="train.accumulate-unsupported",
        )
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
        raise InputError(
            f"train.accumulate: by_layer: {cannot.why}; set train.accumulate to by_micro_batch",
            key="train.accumulate-unsupported",
        ) from cannot
    return Cut(tuple(blocks), stages, parts, decoder.hidden, decoder.items, decoder.joined)
