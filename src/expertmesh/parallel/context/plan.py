"""Decide how each layer that mixes positions sees full rows under cp; on meta, before any weight is read.

Attention that goes through transformers' registry exchanges positions for heads (exchange.py). All other layers that
look along the sequence gather their rows (tensor.py): layers that carry state, and attention that selects positions by
an index, compresses or numbers them. If a small copy shows that the shares of the heads add up, each rank computes its
share of the heads and the sum is scattered back. Otherwise each rank computes the full layer and keeps its positions;
this repeats work, and the plan prints it. A module that looks along the sequence outside of such layers is refused by
name.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from torch import nn

from expertmesh.anatomy import Anatomy, carries_state, decoder_blocks, is_inside
from expertmesh.compat import attention_of
from expertmesh.config.errors import InputError
from expertmesh.distributed.layout import Layout
from expertmesh.introspection.attention import mixes_streams
from expertmesh.introspection.source_code import (
    RegistryCall,
    along_the_sequence,
    attributes_read,
    registry_call,
)
from expertmesh.introspection.state_heads import Share, StateHeads, state_heads
from expertmesh.introspection.token_proof import TokenProof
from expertmesh.parallel.tensor_plan import TensorPart, mixers, part_by_heads, said_of

PREFIX = "expertmesh_context_"
# Arguments that attention classes may pass to the registry's function: numbers, or tensors that the exchange cuts.
_KEYWORDS = {"attention_mask", "dropout", "scaling", "sliding_window", "softcap", "is_causal", "s_aux", "position_ids"}
# Attributes that a family's eager function may read of its module: equal on all ranks, or replaced in the exchange.
_ATTRIBUTES = {"num_key_value_groups", "training", "sinks", "head_dim", "config", "scaling", "is_causal", "layer_idx"}


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """The work of cp in a model."""

    cp: int = 1
    """The number of ranks that share a row."""
    exchanged: tuple[str, ...] = ()
    """Names of the attention modules that exchange positions for heads."""
    whole: tuple[TensorPart, ...] = ()
    """The parts that gather full rows."""
    backends: tuple[str, ...] = field(default=())
    """The attention backends of the modules, by transformers' names, for the printed plan."""

    def within(self, blocks: Sequence[str]) -> "ContextPlan":
        """Return the plan restricted to `blocks`, those of this rank's pipeline stages."""
        here = tuple(name for name in self.exchanged if any(is_inside(name, block) for block in blocks))
        whole = tuple(part for part in self.whole if any(is_inside(part.name, block) for block in blocks))
        return replace(self, exchanged=here, whole=whole)

    def gathers(self, block: str) -> bool:
        """Return whether the attention of a block gets full rows, and so rotary tables of all positions."""
        return any(is_inside(part.name, block) for part in self.whole)

    def lines(self) -> Iterator[str]:
        """Yield the lines to print before training; equal parts of different blocks share a line."""
        if self.cp > 1:
            shared = f"{self.cp} ranks share rows: each has 1/{self.cp} of the positions"
            heads = f", and for attention ({', '.join(self.backends)}) whole rows of 1/{self.cp} of the heads"
            yield shared + (heads if self.exchanged else "")
        for text, count in Counter(map(said_of, self.whole)).items():
            yield f"{count} × {text}, of whole rows"


def context_plan(model: nn.Module, anatomy: Anatomy, layout: Layout) -> ContextPlan:
    """Plan cp for `model`.

    Raises:
        InputError: positions may be mixed in a place that is not recognised, or cp does not divide the heads.

    Collectives: none.
    """
    if layout.cp == 1:
        return ContextPlan()
    blocks, tokens = decoder_blocks(anatomy), TokenProof(model, anatomy)
    where = f"parallel.cp {layout.cp}: {model.config.model_type}"  # type: ignore[union-attr]
    found = {block: mixers(model, block) for block in blocks}
    for block, names in found.items():
        if not names and not _is_feed_forward(model, anatomy, block):
            _refuse(
                f"{where} has no module in {block} that is recognised as attention, so what mixes its positions is not "
                "known",
                "layout.attention-not-recognised",
            )
        if own := _outside(model, anatomy, tokens, block, names):
            _refuse(f"{where} may look along the sequence by itself in {own[0]} ({own[1]})", "layout.mixes-positions")
    attention = {name: calls for names in found.values() for name in names if (calls := _calls(model, name))}
    # If one attention cannot exchange, none does: they may share a configuration, and that names the backend.
    exchanged = not any(_looks_by_itself(model, name) for name in attention) and all(
        _can_exchange(where, module, call) for calls in attention.values() for module, call in calls.values()
    )
    backends = sorted({backend_of(module.config) for calls in attention.values() for module, _ in calls.values()})
    if exchanged and attention:
        _refuse_heads(where, [module for calls in attention.values() for module, _ in calls.values()], layout)
        _refuse_outside(where, model, blocks, attention)
    known: dict[Any, TensorPart] = {}
    whole = [
        _gathered_part(model, anatomy, name, layout, known)
        for names in found.values()
        for name in names
        if not (exchanged and name in attention)
    ]
    trading = tuple(inner for calls in attention.values() for inner in calls) if exchanged else ()
    return ContextPlan(layout.cp, trading, tuple(whole), tuple(backends))


def _is_feed_forward(model: Any, anatomy: Anatomy, block: str) -> bool:
    """Return whether the configuration declares a block without attention: it holds experts, or is a dense MLP."""
    kinds = getattr(model.config.get_text_config(), "layers_block_type", None) or ()
    number = int(block.rpartition(".")[2])
    holds_experts = any(is_inside(spec.name, block) for spec in anatomy.experts)
    return bool(kinds) and (holds_experts or kinds[number] in ("mlp", "moe"))


def _refuse(problem: str, key: str) -> NoReturn:
    raise InputError(f"{problem}; set parallel.cp to 1", key=key)


def _calls(model: nn.Module, mixer: str) -> dict[str, tuple[Any, RegistryCall]]:
    """Return the modules of a mixer whose code calls transformers' attention registry, by name."""
    named = model.get_submodule(mixer).named_modules(prefix=mixer)
    return {name: (module, call) for name, module in named if (call := registry_call(module)) is not None}


def _outside(
    model: Any, anatomy: Anatomy, tokens: TokenProof, block: str, names: Sequence[str]
) -> tuple[str, str] | None:
    """Find the first module of a block, outside of its mixers and experts, that may look along the sequence.

    Returns:
        (its name, how it looks along the sequence); None if every module is proven to compute each token separately.
    """
    for name, module in model.get_submodule(block).named_modules(prefix=block):
        if any(name == each or is_inside(name, each) for each in (*names, *(spec.name for spec in anatomy.experts))):
            continue
        if carries_state(module):
            return name, "it carries state"
        used = along_the_sequence(module)
        if used is not None and not (name == block and mixes_streams(model, block)) and not tokens.holds(name):
            return name, used
    return None


def _looks_by_itself(model: nn.Module, mixer: str) -> bool:
    """Return whether the code of an attention looks along the sequence outside of the function of the registry."""
    return any(carries_state(part) or along_the_sequence(part) for part in model.get_submodule(mixer).modules())


def _can_exchange(where: str, module: Any, call: RegistryCall) -> bool:
    """Return whether cp can cut all that an attention passes to its backend.

    Raises:
        InputError: the backend is not in transformers' registry.
    """
    backend = backend_of(module.config)
    if registered(call, backend) is None:
        raise InputError(
            f"{where}: model.attention {backend} is not in transformers' registry; set it to sdpa",
            key="model.unknown-attention",
        )
    eager = attributes_read(call.global_of(call.default)) if backend == "eager" else []
    return set(call.keywords) <= _KEYWORDS and set(eager) <= _ATTRIBUTES


def _refuse_heads(where: str, modules: Sequence[Any], layout: Layout) -> None:
    heads = math.gcd(*map(_query_heads, modules))
    per_rank = heads // layout.tp
    if per_rank % layout.cp:
        valid = [size for size in range(1, per_rank + 1) if per_rank % size == 0]
        nearest = min(valid, key=lambda size: (abs(size - layout.cp), size))
        shared = f" (of {heads}, over tp {layout.tp})" if layout.tp > 1 else ""
        raise InputError(
            f"{where} has {per_rank} query heads{shared}, which cp does not divide; valid values: "
            f"{', '.join(map(str, valid))}; the nearest is {nearest}",
            key="layout.cp-divides-heads",
        )


def _query_heads(module: Any) -> int:
    """Return the number of query heads, by the names that modules and configurations use.

    The exchange checks the real number again.
    """
    own = (getattr(module, name, None) for name in ("num_heads", "num_attention_heads", "n_heads"))
    return int(next((heads for heads in own if isinstance(heads, int)), module.config.num_attention_heads))


def _refuse_outside(where: str, model: nn.Module, blocks: Sequence[str], attention: Any) -> None:
    """Raise `InputError` if an attention outside of the blocks shares a configuration with one inside."""
    configs = {id(module.config) for calls in attention.values() for module, _ in calls.values()}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{block}.") for block in blocks)
        if not inside and registry_call(module) is not None and id(module.config) in configs:
            _refuse(
                f"{where} attends outside its decoder blocks ({name}), which cp does not split",
                "layout.cp-attention-outside-blocks",
            )


def _gathered_part(
    model: nn.Module, anatomy: Anatomy, name: str, layout: Layout, known: dict[Any, TensorPart]
) -> TensorPart:
    """Plan the share of each rank in a layer that gets full rows.

    Args:
        known: cache of results, by class and parameter shapes.
    """
    module = model.get_submodule(name)
    kind = (type(module), tuple((leaf, parameter.shape) for leaf, parameter in module.named_parameters()))
    if kind not in known:
        if _calls(model, name):
            part = part_by_heads(model, anatomy, name, layout.cp * layout.tp)
            dims = part.parameter_dims(module) if part.is_split else {}
            known[kind] = replace(part, shares={leaf: Share(dim) for leaf, dim in dims.items()})
        else:
            known[kind] = _part_of(name, state_heads(module, layout.cp))
    return replace(known[kind], name=name)


def _part_of(name: str, heads: StateHeads | str) -> TensorPart:
    if isinstance(heads, str):
        return TensorPart(name, True, why_whole=heads)
    cut = tuple(dict.fromkeys(leaf.rpartition(".")[0] for leaf in heads.shares if leaf.endswith(".weight")))
    columns = tuple(leaf for leaf in cut if leaf != heads.rows)
    return TensorPart(name, True, columns, rows=heads.rows, norms=heads.norms, shares=heads.shares, counts=heads.counts)


def backend_of(config: Any) -> str:
    """Return the attention backend of a configuration, by transformers' name."""
    name: str = attention_of(config) or "eager"
    return name.removeprefix(PREFIX)


def registered(call: RegistryCall, backend: str) -> Callable[..., Any] | None:
    """Return the function of a backend from where the family's code looks it up; None if there is none."""
    mapping = call.global_of(call.mapping)
    if backend != "eager" and backend not in mapping:
        return None
    function: Callable[..., Any] = mapping.get_interface(backend, call.global_of(call.default))
    return function
