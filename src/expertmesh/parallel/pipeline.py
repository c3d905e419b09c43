"""Pipeline parallelism: each pp rank keeps the blocks of its stages; the rest of the model becomes placeholders.

Blocks of other stages are replaced by modules without parameters that keep the places, so that the names of what stays
do not depend on the cut. The family's own forward still runs from end to end on every stage, on the whole batch: it
computes masks, rotary tables and whatever else blocks get, from token and position ids. Only the hidden state comes
from elsewhere: it enters where the placeholder before the first block of a stage would give it, and leaves where the
one behind the last block gets it. What stands before the blocks (embedding) is on the first stage, what stands behind
them (final norm, head) on the last; a weight that is tied between the two is on both.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from expertmesh.anatomy import Anatomy, decoder_blocks, is_inside
from expertmesh.config.errors import InputError
from expertmesh.distributed.layout import Layout
from expertmesh.distributed.mesh import Mesh
from expertmesh.experts.lora_state import adapter_state
from expertmesh.introspection.known_families import look_up, proof_key
from expertmesh.introspection.stage_probe import LENGTH, ROWS, Decoder, probe, rehearse
from expertmesh.parallel.placeholders import Leaving, Placeholder, idle, placeholders_for, put_placeholders
from expertmesh.parallel.stages import plan_stages, refuse_few_blocks
from expertmesh.state.patching import exchanged
from expertmesh.state.sharded_model import StageView, attach, sharded
from expertmesh.state.stage_view import full_state, meta_twin

_HIDDEN_SIZE = "hidden_size"  # in a known answer: whatever the configuration has under this name


@dataclass(slots=True, eq=False)
class Pipeline:
    """How a model was cut. `blocks` are the whole decoder's, `stages` the numbers of each stage's blocks. `hidden` and
    `dtype`: what the hidden state between stages is, beside rows and positions. `running`: the stage that runs now.
    """

    mesh: Mesh
    blocks: tuple[str, ...]
    stages: tuple[range, ...]
    hidden: tuple[int, ...]
    dtype: torch.dtype
    # Stand in for blocks of this rank's other stages while one of them runs.
    idle: dict[int, "Placeholder"] = field(default_factory=dict)
    running: int | None = None

    @property
    def own_stages(self) -> tuple[int, ...]:
        """The numbers of this rank's stages."""
        return stages_of(self.mesh.layout, self.mesh.coordinate("pp"))

    @property
    def own_blocks(self) -> list[int]:
        return [block for stage in self.own_stages for block in self.stages[stage]]

    def stage_starts(self, block: str) -> bool:
        """Whether `block` is the first of a stage."""
        return any(self.blocks[numbers.start] == block for numbers in self.stages)

    def is_last(self, stage: int) -> bool:
        return stage == len(self.stages) - 1


def stages_of(layout: Layout, pp_rank: int) -> tuple[int, ...]:
    """Which stages one pp rank holds."""
    return tuple(range(pp_rank, layout.pp * layout.pp_virtual_stages, layout.pp))


def pipeline_of(model: nn.Module) -> Pipeline | None:
    """How `model` was cut; None for one that is whole on every rank."""
    pipeline: Pipeline | None = sharded(model).pipeline
    return pipeline


@dataclass(frozen=True, slots=True)
class Cut:
    """How a model is going to be cut: the blocks of each stage; the modules that not every pp rank holds, by name, and
    the pp ranks that do; the hidden state's dims beside rows and positions; how many things a block returns (0: the
    hidden state alone); the blocks that had to stay with the one before. A parameter that text never uses may be a part
    like a module.
    """

    blocks: tuple[str, ...]
    stages: tuple[range, ...]
    parts: dict[str, frozenset[int]]
    hidden: tuple[int, ...]
    items: int
    joined: Mapping[int, str]

    def gone(self, pp_rank: int) -> list[str]:
        """The modules that one pp rank does not hold."""
        return [name for name, ranks in self.parts.items() if pp_rank not in ranks]


def plan_cut(
    model: nn.Module, anatomy: Anatomy, layout: Layout, twin: nn.Module | None = None, frozen: Sequence[str] = ()
) -> Cut:
    """Raises `InputError` by name for a model that cannot be cut; nothing is changed. Every rank plans the same.

    `twin` is the model's on meta, if there is one, and is left as it was. `frozen` modules are going to be frozen.
    """
    blocks = decoder_blocks(anatomy)
    refuse_few_blocks(len(blocks), layout)
    decoder = find_decoder(model, anatomy, blocks, twin)
    stages = plan_stages(model, anatomy, blocks, layout, decoder.joined)
    parts = _parts(model, decoder, blocks, layout, stages)
    if not decoder.hands_on_hidden_alone:
        _rehearse_each(meta_twin(model) if twin is None else twin, anatomy, blocks, decoder, stages)
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


def find_decoder(model: nn.Module, anatomy: Anatomy, blocks: Sequence[str], twin: nn.Module | None) -> Decoder:
    """What the blocks hand on, and what stands before and behind them; that placeholders do in their place."""

    def prove() -> dict[str, Any]:
        bare = meta_twin(model) if twin is None else twin
        decoder = probe(bare, blocks, anatomy.experts)
        everything = _parts(model, decoder, blocks, Layout(), (range(len(blocks)),))
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
    # What a block shares with another one, or with what is around it, is in no configuration.
    shared = any(uses[id(parameter)] > 1 for name, parameter in parameters.items() if name not in outside)
    key = None if shared else proof_key(model, *outside)
    # Which layers read what others have made is another question for each number of layers.
    found = look_up(
        "stages", key, prove, keep=lambda answer: answer["hidden"] == [_HIDDEN_SIZE] and "joined" not in answer
    )
    dims = tuple(hidden_size if size == _HIDDEN_SIZE else size for size in found["hidden"])
    sets = (frozenset(found.get(what, ())) for what in ("before", "behind", "unused"))
    before, behind, unused = sets
    return Decoder(before, behind, dims, unused, found.get("items", 0), dict(found.get("joined", ())))


def _rehearse_each(
    bare: Any, anatomy: Anatomy, blocks: Sequence[str], decoder: Decoder, stages: tuple[range, ...]
) -> None:
    """Run each stage on meta, with placeholders for all others and without what their blocks have made. Raises
    `InputError` if it does not run.
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
    twin: nn.Module,
) -> Anatomy:
    """Keep what this rank's stages hold of `model`, in place; returns the anatomy of that. No communication.

    `dtype` is the compute dtype, and `uncast` are the parameters that are used in float32 all the same. Questions about
    the whole model go to its `twin` on meta, by state/stage_view.py, from now on.
    """
    blocks = plan.blocks
    pipeline = Pipeline(mesh, blocks, plan.stages, plan.hidden, dtype)
    # The state of adapters too: it is found also where no module of the stage is adapted.
    view = _stage_view(model, plan.parts, mesh, twin)
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
def running(model: nn.Module, stage: int, received: torch.Tensor | None) -> Iterator[Leaving]:
    """While the model's forward runs one stage: only its blocks compute, the first of them on `received`, the hidden
    state `[B, S, ...]` of this rank's positions (None on the first stage).
    """
    pipeline = pipeline_of(model)
    assert pipeline is not None
    active = pipeline.stages[stage]
    blocks = model.get_submodule(pipeline.blocks[0].rpartition(".")[0])._modules
    keys = [name.rpartition(".")[2] for name in pipeline.blocks]
    idle = {keys[n]: pipeline.idle[n] for n in pipeline.own_blocks if n not in active}
    pipeline.running = stage
    leaving = Leaving()
    with ExitStack() as stack:
        stack.callback(setattr, pipeline, "running", None)
        stack.enter_context(exchanged(blocks, idle))
        if active.start:
            stack.enter_context(exchanged(vars(blocks[keys[active.start - 1]]), {"gives": received}))
        if active.stop < len(keys):
            stack.enter_context(exchanged(vars(blocks[keys[active.stop]]), {"catches": leaving}))
        yield leaving


def _refuse_alone(model: nn.Module, args: Any) -> None:
    """Called as a whole (`model(...)`, `generate`), one stage would give nonsense and say nothing."""
    pipeline = pipeline_of(model)
    if pipeline is not None and pipeline.running is None:
        raise InputError(
            "this model is cut into pipeline stages, of which each rank holds its own, and cannot be called alone; "
            "train it by expertmesh.forward_backward, or save it and load it without parallel.pp",
            key="layout.pp-needs-forward-backward",
        )


def _parts(
    model: nn.Module, decoder: Decoder, blocks: Sequence[str], layout: Layout, stages: tuple[range, ...]
) -> dict[str, frozenset[int]]:
    """`Cut.parts`."""
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
    """The largest module around `parameter` all of whose parameters are `among` those of the same end; if there is none
    and text does not use it, itself.
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
    raise InputError(
        f"parallel.pp: {family} cannot be cut into stages: {parameter} belongs to a module that holds the blocks, or "
        "parameters from both ends of them; set parallel.pp to 1",
        key="layout.pp-cannot-cut",
    )


def _stage_view(model: nn.Module, parts: dict[str, frozenset[int]], mesh: Mesh, twin: nn.Module) -> StageView:
    """What is in several stages, and who answers for it: the first of them."""
    everywhere = frozenset(range(mesh.layout.pp))
    holders: dict[int, frozenset[int]] = {}
    state = full_state(model)
    for name, tensor in state.items():
        of_name = next((ranks for part, ranks in parts.items() if name == part or is_inside(name, part)), everywhere)
        holders[id(tensor)] = holders.get(id(tensor), frozenset()) | of_name
    rank = mesh.coordinate("pp")
    held = {name: holders[id(tensor)] for name, tensor in state.items() if rank in holders[id(tensor)]}
    return StageView(
        meta_model=twin,
        tied_replicas=frozenset(name for name, ranks in held.items() if min(ranks) != rank),
        tied_originals=frozenset(name for name, ranks in held.items() if min(ranks) == rank and len(ranks) > 1),
        is_first_rank=mesh.rank % mesh.layout.ranks_per_stage == 0,
    )


def _without(anatomy: Anatomy, gone: Sequence[str]) -> Anatomy:
    def stays(name: str) -> bool:
        return not any(name == part or is_inside(name, part) for part in gone)

    return Anatomy(
        blocks=tuple(filter(stays, anatomy.blocks)),
        experts=tuple(spec for spec in anatomy.experts if stays(spec.name)),
        routers=tuple(filter(stays, anatomy.routers)),
        shared_experts=tuple(filter(stays, anatomy.shared_experts)),
    )
