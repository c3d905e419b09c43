"""Decide where a model is cut into pipeline stages, and make the placeholders of the parts that are on other stages.

The work of a stage is the number of multiplications per token: the parameters that a token uses. Routed experts count
by the fraction that a token is sent to; the head counts, an embedding look-up does not. The number of blocks need not
be a multiple of the number of stages. The slowest stage has as little work as possible. Stage s is on pp rank s mod pp.

A placeholder has no parameters and stands in the place and under the name of what it replaces. That of a block returns
its input, or a hidden state that was set on it. That of the embedding returns zeros that no block uses; that of any
other module returns its first argument. The model may be on meta; nothing here communicates.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Any

import torch
from torch import nn

from expertmesh.anatomy import Anatomy, decoder_blocks, head_of, is_inside, is_within
from expertmesh.compat import parameter_slots
from expertmesh.config.errors import InputError
from expertmesh.distributed.layout import Layout
from expertmesh.introspection.meta_run import LENGTH, ROWS
from expertmesh.introspection.proofs import look_up, proof_key
from expertmesh.introspection.stage_probe import Decoder, cannot_cut, carries_more, probe, rehearse
from expertmesh.state.patching import set_at


def plan_stages(
    model: nn.Module, anatomy: Anatomy, blocks: Sequence[str], layout: Layout, joined: Mapping[int, str]
) -> tuple[range, ...]:
    """Return the block numbers of each stage.

    Args:
        blocks: names of the decoder's blocks, in order; as many as there are stages (`refuse_few_blocks`) or more.
        joined: blocks that must be on the stage of the block before them, by number, and the reason.

    Raises:
        InputError: there are fewer places to cut than stages.
    """
    stages = layout.pp * layout.pp_virtual_stages
    if len(blocks) - len(joined) < stages:
        starts = [str(number) for number in range(1, len(blocks)) if number not in joined]
        where = f"only before block {', '.join(starts)}" if starts else "nowhere"
        why = f"{stages} are asked for, and places to cut are {where}: {next(iter(joined.values()))}"
        raise carries_more(model, why, "less" if starts else "1")
    return balanced(_work(model, anatomy, blocks), stages, joined)


def refuse_few_blocks(blocks: int, layout: Layout) -> None:
    """Raise `InputError` if there are fewer blocks than stages."""
    stages = layout.pp * layout.pp_virtual_stages
    if blocks < stages:
        wanted = f"{layout.pp} × {layout.pp_virtual_stages} virtual stages" if layout.pp_virtual_stages > 1 else "pp"
        raise InputError(
            f"parallel.pp: {stages} stages ({wanted}) need as many blocks, and the model has {blocks}; lower "
            "parallel.pp or parallel.pp_virtual_stages",
            key="layout.pp-exceeds-blocks",
        )


def balanced(work: Sequence[float], stages: int, joined: Collection[int] = ()) -> tuple[range, ...]:
    """Cut `work` into `stages` consecutive parts so that the largest sum is minimal.

    No part is empty and none begins with an entry that is `joined`. Among the cuts with the smallest largest sum, the
    sum of squares is minimal, so the parts are as equal as possible. The caller ensures that there are enough places
    to cut.

    Returns:
        The range of indices of each part.
    """

    @cache
    def best(first: int, parts: int) -> tuple[float, float, tuple[int, ...]]:
        if parts == 1:
            total = sum(work[first:])
            return total, total**2, (len(work),)
        found: list[tuple[float, float, tuple[int, ...]]] = [(inf, inf, (len(work),))]
        for stop in range(first + 1, len(work) - parts + 2):
            if stop in joined:
                continue
            here = sum(work[first:stop])
            largest, squares, ends = best(stop, parts - 1)
            found.append((max(here, largest), squares + here**2, (stop, *ends)))
        # Tuples compare by the largest sum first, then by the sum of squares.
        return min(found)

    ends = best(0, stages)[2]
    return tuple(range(start, stop) for start, stop in zip((0, *ends), ends, strict=False))


def _work(model: nn.Module, anatomy: Anatomy, blocks: Sequence[str]) -> list[float]:
    """Count the multiplications per token of each block; the last one includes the head."""
    # A token meets top_k of num_experts experts.
    chosen = {
        f"{spec.name}.{name}": (spec.top_k or 1) / spec.num_experts
        for spec in anatomy.experts
        for name in spec.parameters
    }
    work = []
    for block in blocks:
        parameters = model.get_submodule(block).named_parameters(prefix=block)
        work.append(sum(parameter.numel() * chosen.get(name, 1.0) for name, parameter in parameters))
    # The embedding is a look-up without multiplications; the head multiplies with all of its weights.
    head = head_of(model)
    work[-1] += 0 if head is None else sum(parameter.numel() for parameter in head.parameters())
    return work


def stages_of(layout: Layout, pp_rank: int) -> tuple[int, ...]:
    """Return the stages that one pp rank holds."""
    return tuple(range(pp_rank, layout.pp * layout.pp_virtual_stages, layout.pp))


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

    @property
    def starts(self) -> frozenset[str]:
        """The first block of each stage."""
        return frozenset(self.blocks[numbers.start] for numbers in self.stages)

    def absent(self, pp_rank: int) -> list[str]:
        """Return the parts that one pp rank does not hold."""
        return [name for name, ranks in self.parts.items() if pp_rank not in ranks]


def plan_cut(meta_model: nn.Module, anatomy: Anatomy, layout: Layout, frozen: Sequence[str] = ()) -> Cut:
    """Plan the pipeline stages of a model; every rank makes the same plan.

    Args:
        meta_model: the meta copy of the model; its state is restored.
        frozen: names of the modules that will be frozen.

    Raises:
        InputError: the model cannot be cut, or of a model that trains a rank would train nothing; names the module.
    """
    blocks = decoder_blocks(anatomy)
    refuse_few_blocks(len(blocks), layout)
    decoder = find_decoder(meta_model, anatomy, blocks)
    stages = plan_stages(meta_model, anatomy, blocks, layout, decoder.joined)
    parts = parts_by_stage(meta_model, decoder, blocks, layout, stages)
    if not decoder.hands_on_hidden_alone:
        rehearse_each(meta_model, anatomy, blocks, decoder, stages)
    # Under all names: a tied weight is trained on the stage of each of its names.
    trained = [
        name
        for name, parameter in meta_model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad and not is_inside(name, *frozen)
    ]
    # A model without gradients at all, a teacher, only hands tokens on.
    learns = any(parameter.requires_grad for parameter in meta_model.parameters())
    for rank in range(layout.pp):
        if learns and not any(
            rank in ranks and is_within(name, part) for part, ranks in parts.items() for name in trained
        ):
            rank_stages = stages_of(layout, rank)
            numbers = [str(number) for stage in rank_stages for number in stages[stage]]
            raise InputError(
                f"parallel.pp: nothing on stage {rank_stages[0]} (blocks {', '.join(numbers)}) is trained, so that it "
                "would only hand tokens on; set parallel.pp to 1, or widen lora.targets",
                key="layout.pp-untrained-stage",
            )
    return Cut(tuple(blocks), stages, parts, decoder.hidden, decoder.items, decoder.joined)


def find_decoder(meta_model: nn.Module, anatomy: Anatomy, blocks: Sequence[str]) -> Decoder:
    """Find the values that blocks pass on, and the parameters before and after them.

    The answer is cached by the family's code and configuration. To prove it, the model runs on meta with placeholders.
    """

    def prove() -> Decoder:
        decoder = probe(meta_model, blocks, anatomy.experts)
        # Replace every part at once: no stage can lack more than that.
        everything = parts_by_stage(meta_model, decoder, blocks, Layout(), (range(len(blocks)),))
        with placeholders_for(meta_model, everything, blocks, decoder.items):
            rehearse(meta_model)
        return decoder

    config: Any = meta_model.config
    hidden_size: Any = getattr(config.get_text_config(), "hidden_size", None)
    parameters = dict(meta_model.named_parameters(remove_duplicate=False))
    outside = [name for name in parameters if not is_inside(name, *blocks)]
    uses = Counter(map(id, parameters.values()))
    # The configuration does not show whether a block shares parameters with other modules, so the answer is not cached.
    shared = any(uses[id(parameter)] > 1 for name, parameter in parameters.items() if name not in outside)
    key = None if shared else proof_key(meta_model, hidden_size, *outside)
    # The layers that read results of others depend on the number of layers, so such an answer is not cached either.
    found: Decoder = look_up(
        "stages", key, prove, keep=lambda decoder: decoder.hidden == (hidden_size,) and not decoder.joined
    )
    return found


def rehearse_each(
    bare: Any, anatomy: Anatomy, blocks: Sequence[str], decoder: Decoder, stages: tuple[range, ...]
) -> None:
    """Run each stage on meta with placeholders for all other blocks, and so without their results.

    Raises:
        InputError: a stage does not run.
    """
    for numbers in stages:
        others = [block for number, block in enumerate(blocks) if number not in numbers]
        experts = [spec for spec in anatomy.experts if not is_inside(spec.name, *others)]
        with placeholders_for(bare, others, blocks, decoder.items):
            if numbers.start:
                before: Any = bare.get_submodule(blocks[numbers.start - 1])
                before.output = torch.empty(ROWS, LENGTH, *decoder.hidden, dtype=bare.dtype, device="meta")
            rehearse(bare, experts)


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
            if not is_inside(name, *parts):
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
    both = "a module that holds the blocks, or parameters from both ends of them"
    raise cannot_cut(model, f"{parameter} belongs to {both}")


@contextmanager
def placeholders_for(bare: nn.Module, names: Iterable[str], blocks: Sequence[str], items: int) -> Iterator[None]:
    """Put placeholders for `names` into a model on meta while the context is open."""
    dtype = next(iter(bare.parameters())).dtype
    replaced = put_placeholders(bare, names, blocks, items, lambda name: dtype, torch.device("meta"))
    try:
        yield
    finally:
        for name, part in replaced.items():
            set_at(bare, name, part)


def put_placeholders(
    model: nn.Module,
    names: Iterable[str],
    blocks: Sequence[str],
    items: int,
    dtype_of: Callable[[str], torch.dtype],
    device: torch.device,
) -> dict[str, nn.Module | nn.Parameter]:
    """Replace the parts `names` by placeholders, in place.

    Args:
        names: modules, or parameters that text does not use; these become None.
        blocks: names of all decoder blocks.
        items: how many values a block returns; 0 if it returns the hidden state without a tuple.
        dtype_of: returns the dtype in which a parameter is used, by name.

    Returns:
        The replaced parts by name, the last replaced first.
    """
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    replaced: dict[str, nn.Module | nn.Parameter] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        if leaf in (parameters := parameter_slots(model.get_submodule(parent))):
            parameter = parameters[leaf]
            assert parameter is not None
            replaced = {name: parameter, **replaced}
            set_at(model, name, None)
            continue
        module = model.get_submodule(name)
        replaced = {name: module, **replaced}
        if name in blocks:
            set_at(model, name, Placeholder(module, items))
        else:
            set_at(model, name, _around(module, embedding, name, dtype_of, device))
    return replaced


def idle_around(
    model: nn.Module, names: Iterable[str], dtype_of: Callable[[str], torch.dtype], device: torch.device
) -> dict[str, nn.Module]:
    """Return placeholders by name for modules around the blocks that stay on this rank; each holds its module as child.

    Args:
        names: modules, or parameters that text does not use, which get no placeholder.
        dtype_of: returns the dtype in which a parameter is used, by name.
    """
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    modules = {name: module for name, module in model.named_modules() if name in set(names)}
    placeholders = {name: _around(module, embedding, name, dtype_of, device) for name, module in modules.items()}
    for name, placeholder in placeholders.items():
        placeholder.module = modules[name]
    return placeholders


def _around(
    module: nn.Module, embedding: nn.Module, name: str, dtype_of: Callable[[str], torch.dtype], device: torch.device
) -> nn.Module:
    """Make the placeholder of a module around the blocks: of the embedding, if that is inside, or of any other."""
    kind = _NoEmbedding if any(part is embedding for part in module.modules()) else _PassThrough
    return kind(embedding if kind is _NoEmbedding else module, dtype_of(f"{name}.weight"), device)


@dataclass(slots=True)
class StageResult:
    """The output of a stage."""

    hidden: torch.Tensor | None = None
    """The hidden state after the stage's last block, once it has run; None on the last stage: its model returns it."""


@dataclass(frozen=True, slots=True)
class BlockCall:
    """The inputs of a block beside the hidden state (masks, rotary tables), as the model's forward gives them."""

    args: tuple[Any, ...]
    """Its positional arguments after the hidden state."""
    kwargs: Mapping[str, Any]
    """Its keyword arguments."""
    context: Context
    """The context variables of the forward: which samples are packed, which tokens are real."""


class Placeholder(nn.Module):
    """Placeholder of a block that does not compute here: returns its input and has the block's plain attributes.

    If the block returns `items` values, the hidden state first, the others are None. It hands what it is called with to
    `records`, if that is set.
    """

    def __init__(self, block: nn.Module, items: int) -> None:
        super().__init__()
        for name, value in vars(block).items():
            if not name.startswith("_") and not isinstance(value, torch.Tensor | nn.Module) and name != "training":
                setattr(self, name, value)
        if isinstance(getattr(block, "gradient_checkpointing", None), bool):
            # A class attribute in some families; transformers requires the switch on every block.
            self.gradient_checkpointing = False
        self.output: torch.Tensor | None = None
        self.result: StageResult | None = None
        self.records: Callable[[BlockCall], None] | None = None
        self.others = None if items == 0 else (None,) * (items - 1)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.result is not None:
            self.result.hidden = hidden_states
        if self.records is not None:
            self.records(BlockCall(args, kwargs, copy_context()))
        given = hidden_states if self.output is None else self.output
        return given if self.others is None else (given, *self.others)


def idle(block: nn.Module, items: int) -> Placeholder:
    """Return a placeholder for a block of this rank while another of its stages runs; it holds the block as a child."""
    placeholder = Placeholder(block, items)
    # A child, so that code that walks the model while another stage runs (FSDP2, transformers) finds the block.
    placeholder.block = block
    return placeholder


class _PassThrough(nn.Module):
    """Placeholder of a module around the blocks that is on another stage: returns its first argument.

    A family may read the dtype of its weight, which takes no memory; stage_probe.py ensures that no code uses the
    values.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.stands_for = type(module).__name__
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor):
            self.weight = torch.empty((), dtype=dtype, device=device).expand(weight.shape)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else next(iter(kwargs.values()))
        # FSDP2 accepts no view as output of the root, and the head gets no token here, so its output is empty.
        return given.clone() if isinstance(given, torch.Tensor) and given.numel() == 0 else given


class _NoEmbedding(nn.Module):
    """Placeholder of the embedding: returns zeros of its shape and dtype, which take no memory and no block uses."""

    def __init__(self, embedding: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        weight = embedding.weight
        assert isinstance(weight, torch.Tensor)
        self.num_embeddings, self.embedding_dim = weight.shape[0], weight.shape[-1]
        self.padding_idx = getattr(embedding, "padding_idx", None)
        # An empty tensor, not a parameter, for families that read its dtype or device.
        self.weight = torch.empty(0, dtype=dtype, device=device)

    def forward(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        zero = torch.zeros((), dtype=self.weight.dtype, device=input_ids.device)
        return zero.expand(*input_ids.shape, self.embedding_dim)
