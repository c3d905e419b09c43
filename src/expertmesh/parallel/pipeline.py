"""Cut a model into pipeline stages: each pp rank keeps the blocks of its stages, the others become placeholders.

Placeholders are modules without parameters in the same places, so the names of the local parameters do not depend on
the cut. The family's forward still runs from end to end on every stage, on the full batch: it computes masks, rotary
tables and other inputs of blocks from token and position ids. Only the hidden state comes from another stage: the
placeholder before the first block of a stage returns it, and the placeholder after the last block receives the
result. Modules before the blocks (embedding) are on the first stage, modules after them (final norm, head) on the
last; a weight that is tied between the two is on both.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from expertmesh.anatomy import Anatomy, decoder_blocks, is_inside
from expertmesh.compat import child_slots
from expertmesh.config.errors import InputError
from expertmesh.distributed.layout import Layout
from expertmesh.distributed.mesh import Mesh
from expertmesh.experts.lora_state import adapter_state
from expertmesh.introspection.known_families import look_up, proof_key
from expertmesh.introspection.stage_probe import LENGTH, ROWS, CannotCut, Decoder, probe, rehearse
from expertmesh.parallel.placeholders import Leaving, Placeholder, idle, placeholders_for, put_placeholders
from expertmesh.parallel.stages import plan_stages, refuse_few_blocks
from expertmesh.state.model_view import ModelView, StageView, attach, meta_copy, sharded
from expertmesh.state.patching import exchanged

_HIDDEN_SIZE = "hidden_size"  # in a cached answer, stands for the value of this name in the configuration


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
    idle: dict[int, "Placeholder"] = field(default_factory=dict)
    """Placeholders for the local blocks, by number, used while another stage of this rank runs."""
    around: dict[str, tuple[frozenset[int], nn.Module]] = field(default_factory=dict)
    """Local modules around the blocks by name: the stages that run them, and a placeholder for the other stages."""
    running: int | None = None
    """The stage that runs now; None outside of `running`."""

    @property
    def own_blocks(self) -> list[int]:
        """The numbers of this rank's blocks."""
        return [block for stage in self.own_stages for block in self.stages[stage]]

    def stage_starts(self, block: str) -> bool:
        """Return whether `block` is the first of a stage."""
        return any(self.blocks[numbers.start] == block for numbers in self.stages)

    def is_last(self, stage: int) -> bool:
        """Return whether `stage` is the last, which holds the head."""
        return stage == len(self.stages) - 1


def stages_of(layout: Layout, pp_rank: int) -> tuple[int, ...]:
    """Return the stages that one pp rank holds."""
    return tuple(range(pp_rank, layout.pp * layout.pp_virtual_stages, layout.pp))


def pipeline_of(model: nn.Module) -> Pipeline | None:
    """Return the pipeline stages of `model`; None if it is not cut."""
    pipeline: Pipeline | None = sharded(model).pipeline
    return pipeline


@dataclass(frozen=True, slots=True)
class Cut:
    """The plan to cut a model into pipeline stages."""

    blocks: tuple[str, ...]
    """Names of the blocks of the full decoder."""
    stages: tuple[range, ...]
    """The block numbers of each stage."""
    parts: dict[str, frozenset[int]]
    """The pp ranks that hold a module, for modules that not every pp rank holds.

    A parameter that text never uses may be a part too.
    """
    hidden: tuple[int, ...]
    """The dims of the hidden state between stages after `[B, S]`."""
    items: int
    """Number of values that a block returns; 0 if it returns the hidden state without a tuple."""
    joined: Mapping[int, str]
    """The blocks that must be on the stage of the block before them, by number, and the reason."""

    def gone(self, pp_rank: int) -> list[str]:
        """Return the parts that one pp rank does not hold."""
        return [name for name, ranks in self.parts.items() if pp_rank not in ranks]


def plan_cut(
    model: nn.Module, anatomy: Anatomy, layout: Layout, meta_model: nn.Module | None = None, frozen: Sequence[str] = ()
) -> Cut:
    """Plan the pipeline stages of `model`, which is not changed; every rank makes the same plan.

    Args:
        meta_model: the meta copy of the model, if there is one; its state is restored.
        frozen: names of the modules that will be frozen.

    Raises:
        InputError: the model cannot be cut, or a rank would train nothing; names the module.
    """
    blocks = decoder_blocks(anatomy)
    refuse_few_blocks(len(blocks), layout)
    decoder = find_decoder(model, anatomy, blocks, meta_model)
    stages = plan_stages(model, anatomy, blocks, layout, decoder.joined)
    parts = parts_by_stage(model, decoder, blocks, layout, stages)
    if not decoder.hands_on_hidden_alone:
        rehearse_each(meta_copy(model) if meta_model is None else meta_model, anatomy, blocks, decoder, stages)
    # Under all names: a tied weight is trained on the stage of each of its names.
    trained = [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad]
    trained = [name for name in trained if not any(is_inside(name, module) for module in frozen)]
    for rank in range(layout.pp):
        if not any(
            rank in ranks and (name == part or is_inside(name, part))
            for part, ranks in parts.items()
            for name in trained
        ):
            own = stages_of(layout, rank)
            numbers = [str(number) for stage in own for number in stages[stage]]
            raise InputError(
                f"parallel.pp: nothing on stage {own[0]} (blocks {', '.join(numbers)}) is trained, so that it would "
                "only hand tokens on; set parallel.pp to 1, or widen lora.targets",
                key="layout.pp-untrained-stage",
            )
    return Cut(tuple(blocks), stages, parts, decoder.hidden, decoder.items, decoder.joined)


def find_decoder(model: nn.Module, anatomy: Anatomy, blocks: Sequence[str], meta_model: nn.Module | None) -> Decoder:
    """Find the values that blocks pass on, and the parameters before and after them.

    The answer is cached by the family's code and configuration. To prove it, the model runs on meta with placeholders.
    """

    def prove() -> dict[str, Any]:
        bare = meta_copy(model) if meta_model is None else meta_model
        decoder = probe(bare, blocks, anatomy.experts)
        # Replace every part at once: no stage can lack more than that.
        everything = parts_by_stage(model, decoder, blocks, Layout(), (range(len(blocks)),))
        with placeholders_for(bare, everything, blocks, decoder.items):
            rehearse(bare)
        dims = [_HIDDEN_SIZE if size == hidden_size else size for size in decoder.hidden]
        answer = {"before": sorted(decoder.before), "behind": sorted(decoder.behind), "hidden": dims}
        rare = {"unused": sorted(decoder.unused), "items": decoder.items, "joined": list(decoder.joined.items())}
        return answer | {what: value for what, value in rare.items() if value}

    config: Any = model.config
    hidden_size: Any = getattr(config.get_text_config(), "hidden_size", None)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    outside = [name for name in parameters if not any(is_inside(name, block) for block in blocks)]
    uses = Counter(map(id, parameters.values()))
    # The configuration does not show whether a block shares parameters with other modules, so the answer is not cached.
    shared = any(uses[id(parameter)] > 1 for name, parameter in parameters.items() if name not in outside)
    key = None if shared else proof_key(model, *outside)
    # The layers that read results of others depend on the number of layers, so such an answer is not cached either.
    found = look_up(
        "stages", key, prove, keep=lambda answer: answer["hidden"] == [_HIDDEN_SIZE] and "joined" not in answer
    )
    dims = tuple(hidden_size if size == _HIDDEN_SIZE else size for size in found["hidden"])
    sets = (frozenset(found.get(what, ())) for what in ("before", "behind", "unused"))
    before, behind, unused = sets
    return Decoder(before, behind, dims, unused, found.get("items", 0), dict(found.get("joined", ())))


def rehearse_each(
    bare: Any, anatomy: Anatomy, blocks: Sequence[str], decoder: Decoder, stages: tuple[range, ...]
) -> None:
    """Run each stage on meta with placeholders for all other blocks, and so without their results.

    Raises:
        InputError: a stage does not run.
    """
    for numbers in stages:
        others = [block for number, block in enumerate(blocks) if number not in numbers]
        here = [spec for spec in anatomy.experts if not any(is_inside(spec.name, block) for block in others)]
        with placeholders_for(bare, others, blocks, decoder.items):
            if numbers.start:
                before: Any = bare.get_submodule(blocks[numbers.start - 1])
                before.gives = torch.empty(ROWS, LENGTH, *decoder.hidden, dtype=bare.dtype, device="meta")
            rehearse(bare, here)


def cut(
    model: nn.Module,
    plan: Cut,
    anatomy: Anatomy,
    mesh: Mesh,
    dtype: torch.dtype,
    uncast: Collection[str],
    meta_model: nn.Module,
) -> Anatomy:
    """Replace the parts of other pp ranks in `model` by placeholders, in place.

    Args:
        dtype: the compute dtype.
        uncast: the parameters that are used in float32.
        meta_model: the meta copy of the full model; `ModelView` reads names and shapes of other stages from it.

    Returns:
        The anatomy of this rank's stages.

    Collectives: none.
    """
    blocks = plan.blocks
    own_stages = stages_of(mesh.layout, mesh.coordinate("pp"))
    pipeline = Pipeline(mesh, blocks, plan.stages, own_stages, plan.hidden, dtype)
    # Attach the adapter state too: no module of this stage may be adapted, and it must be found all the same.
    # The view is made before any part is replaced: it needs the tensors and ties of the full model.
    view = _stage_view(model, plan.parts, mesh, meta_model)
    attach(model, stage_view=view, pipeline=pipeline, lora_state=adapter_state(model))
    gone = plan.gone(mesh.coordinate("pp"))
    put_placeholders(
        model, gone, blocks, plan.items, lambda name: torch.float32 if name in uncast else dtype, mesh.device
    )
    own = {number: model.get_submodule(blocks[number]) for number in pipeline.own_blocks}
    pipeline.idle.update({number: idle(block, plan.items) for number, block in own.items()})
    model.register_forward_pre_hook(_refuse_alone)
    return _without(anatomy, gone)


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


def parts_by_stage(
    model: nn.Module, decoder: Decoder, blocks: Sequence[str], layout: Layout, stages: tuple[range, ...]
) -> dict[str, frozenset[int]]:
    """Return `Cut.parts`: the pp ranks that hold each part of a decoder that is cut into `stages`.

    Raises:
        CannotCut: a parameter belongs to no single stage.
    """
    parts: dict[str, frozenset[int]] = {}
    for stage, numbers in enumerate(stages):
        parts |= {blocks[number]: frozenset([stage % layout.pp]) for number in numbers}
    ends = ((decoder.before, 0), (decoder.behind, (len(stages) - 1) % layout.pp))
    for names, rank in ends:
        for name in sorted(names):
            if not any(is_inside(name, part) for part in parts):
                parts[_outermost(model, name, names, decoder.unused, blocks)] = frozenset([rank])
    return parts


def _outermost(
    model: nn.Module, parameter: str, among: frozenset[str], unused: frozenset[str], blocks: Sequence[str]
) -> str:
    """Find the largest module around `parameter` that can be on one stage.

    Args:
        among: the parameters on the same side of the blocks; the module must hold no others.
        unused: the parameters that text does not use.

    Returns:
        The name of the module; `parameter` if there is none and text does not use it.

    Raises:
        InputError: there is no such module and text uses the parameter.
    """
    steps = parameter.split(".")[:-1]
    for depth in range(1, len(steps) + 1):
        name = ".".join(steps[:depth])
        inside = {leaf for leaf, _ in model.get_submodule(name).named_parameters(name, remove_duplicate=False)}
        if inside <= among and not any(is_inside(block, name) for block in blocks):
            return name
    if parameter in unused:
        return parameter
    family = model.config.model_type  # type: ignore[union-attr]
    raise CannotCut(
        f"{family} cannot be cut into stages: {parameter} belongs to a module that holds the blocks, or parameters "
        "from both ends of them",
        key="layout.pp-cannot-cut",
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
