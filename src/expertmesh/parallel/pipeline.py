"""Cut a model into pipeline stages: each pp rank keeps the blocks of its stages, the others become placeholders.

Placeholders are modules without parameters in the same places, so the names of the local parameters do not depend on
the cut. The family's forward still runs from end to end on every stage, on the full batch: it computes masks, rotary
tables and other inputs of blocks from token and position ids. Only the hidden state comes from another stage: the
placeholder before the first block of a stage returns it, and the placeholder after the last block receives the
result. Modules before the blocks (embedding) are on the first stage, modules after them (final norm, head) on the
last; a weight that is tied between the two is on both.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from expertmesh.anatomy import Anatomy, is_inside
from expertmesh.compat import child_slots
from expertmesh.config.errors import InputError
from expertmesh.distributed.mesh import Mesh
from expertmesh.parallel.shard_plan import ShardPlan
from expertmesh.parallel.stages import Cut, Leaving, Placeholder, idle, put_placeholders, stages_of
from expertmesh.state.model_view import ModelView, StageView, attach, sharded
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
    own_stages: tuple[int, ...]
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
    def own_blocks(self) -> list[int]:
        """The numbers of this rank's blocks."""
        return [block for stage in self.own_stages for block in self.stages[stage]]

    def is_last(self, stage: int) -> bool:
        """Return whether `stage` is the last, which holds the head."""
        return stage == len(self.stages) - 1


def pipeline_of(model: nn.Module) -> Pipeline | None:
    """Return the pipeline stages of `model`; None if it is not cut."""
    pipeline: Pipeline | None = sharded(model).pipeline
    return pipeline


def cut(model: nn.Module, plan: ShardPlan, cuts: Cut, gone: Sequence[str], mesh: Mesh) -> Anatomy:
    """Replace the parts of other pp ranks in `model` by placeholders, in place.

    Args:
        cuts: `plan.cut`. `ModelView` reads names and shapes of other stages from the plan's meta copy.
        gone: the parts that this rank's stages do not hold.

    Returns:
        The anatomy of this rank's stages.

    Collectives: none.
    """
    blocks, (_, dtype, _), uncast = cuts.blocks, plan.dtypes, plan.uncast
    own_stages = stages_of(mesh.layout, mesh.coordinate("pp"))
    pipeline = Pipeline(mesh, blocks, cuts.stages, own_stages, cuts.hidden, dtype)
    # Attach the adapter state too: no module of this stage may be adapted, and it must be found all the same.
    # The view is made before any part is replaced: it needs the tensors and ties of the full model.
    view = _stage_view(model, cuts.parts, mesh, plan.view.meta)
    attach(model, stage_view=view, pipeline=pipeline, lora_state=plan.adapters)
    put_placeholders(
        model, gone, blocks, cuts.items, lambda name: torch.float32 if name in uncast else dtype, mesh.device
    )
    own = {number: model.get_submodule(blocks[number]) for number in pipeline.own_blocks}
    pipeline.idle.update({number: idle(block, cuts.items) for number, block in own.items()})
    model.register_forward_pre_hook(_refuse_alone)
    return _without(plan.anatomy, gone)


@contextmanager
def running(
    model: nn.Module, pipeline: Pipeline, stage: int, received: torch.Tensor | None, *, behind_blocks: bool = False
) -> Iterator[Leaving]:
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
    idle = {keys[n]: pipeline.idle[n] for n in pipeline.own_blocks if n not in active}
    pipeline.running = stage
    leaving = Leaving()
    with ExitStack() as stack:
        stack.callback(setattr, pipeline, "running", None)
        stack.enter_context(exchanged(blocks, idle))
        for name, (stages, placeholder) in pipeline.around.items():
            if stage not in stages:
                parent, _, leaf = name.rpartition(".")
                stack.enter_context(exchanged(child_slots(model.get_submodule(parent)), {leaf: placeholder}))
        # After the placeholders are in place: the neighbouring block may be one of this rank's other stages.
        if active.start:
            stack.enter_context(exchanged(vars(blocks[keys[active.start - 1]]), {"gives": received}))
        if active.stop < len(keys):
            stack.enter_context(exchanged(vars(blocks[keys[active.stop]]), {"catches": leaving}))
        yield leaving


def _refuse_alone(model: nn.Module, args: Any) -> None:
    """Raise `InputError` if a cut model is called directly; a forward pre-hook."""
    # `model(...)` or `generate` on one stage would silently return wrong values.
    pipeline = pipeline_of(model)
    if pipeline is not None and pipeline.running is None:
        raise InputError(
            "this model is cut into pipeline stages, of which each rank holds its own, and cannot be called alone; "
            "train it by expertmesh.forward_backward, or save it and load it without parallel.pp",
            key="layout.pp-needs-forward-backward",
        )


def _stage_view(model: nn.Module, parts: dict[str, frozenset[int]], mesh: Mesh, meta_model: nn.Module) -> StageView:
    """Record the tensors that several stages hold; the first pp rank of them owns each, the others have replicas."""
    everywhere = frozenset(range(mesh.layout.pp))
    holders: dict[int, frozenset[int]] = {}
    state = ModelView(model).state
    # By identity: tied names share one tensor, which is on the stages of all its names.
    for name, tensor in state.items():
        of_name = next((ranks for part, ranks in parts.items() if name == part or is_inside(name, part)), everywhere)
        holders[id(tensor)] = holders.get(id(tensor), frozenset()) | of_name
    rank = mesh.coordinate("pp")
    held = {name: holders[id(tensor)] for name, tensor in state.items() if rank in holders[id(tensor)]}
    return StageView(
        meta_model=meta_model,
        tied_replicas=frozenset(name for name, ranks in held.items() if min(ranks) != rank),
        tied_originals=frozenset(name for name, ranks in held.items() if min(ranks) == rank and len(ranks) > 1),
        is_first_rank=mesh.rank % mesh.layout.ranks_per_stage == 0,
    )


def _without(anatomy: Anatomy, gone: Sequence[str]) -> Anatomy:
    """Return the anatomy without the modules named in `gone`."""

    def stays(name: str) -> bool:
        return not any(name == part or is_inside(name, part) for part in gone)

    return Anatomy(
        blocks=tuple(filter(stays, anatomy.blocks)),
        experts=tuple(spec for spec in anatomy.experts if stays(spec.name)),
        routers=tuple(filter(stays, anatomy.routers)),
        shared_experts=tuple(filter(stays, anatomy.shared_experts)),
    )
