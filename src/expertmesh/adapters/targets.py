"""Resolve `lora.targets` for a model: the linear layers and parameters that get adapters, by group or by name.

Groups are found by the model's anatomy, not by a family's names. A target that matches nothing is an error that lists
the model's targets: adapters that silently miss the experts are the most common bug of this field.
"""

import fnmatch
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from expertmesh.anatomy import Anatomy, ExpertsSpec, is_inside, is_within
from expertmesh.config.base import is_named
from expertmesh.config.errors import InputError, SecurityError
from expertmesh.data.encoding.sandbox import LimitExceeded, Sandbox
from expertmesh.experts.module_list import FusedExperts
from expertmesh.introspection.stage_probe import without_gradient

GROUPS = ("attention", "experts", "shared_experts", "dense_mlp", "router", "lm_head")
ALL_LINEAR = "all-linear"
# The group of a target that is merged, never trained.
EMBEDDING = "embedding"
_MLP_NAMES = ("mlp", "feed_forward", "ffn", "ff")


@dataclass(frozen=True, slots=True)
class Target:
    """A linear module, or a parameter of a module, that can get an adapter."""

    module: str
    """The name of the module."""
    parameter: str | None
    """The name of the parameter on the module; None for a linear module."""
    in_features: int
    out_features: int
    experts: int | None
    """The number of experts of a 3-D parameter, which has an adapter for each; else None."""
    group: str
    """One of `GROUPS`, or `EMBEDDING`."""
    swapped: bool = False
    """PEFT takes the parameter's outputs for its inputs: its A is our B transposed, and its B our A transposed."""
    transposed: bool = False
    """The weight's shape is `[experts, in, out]` instead of `[experts, out, in]`, or `[in, out]` of an embedding."""
    r: int = 0
    """The rank; set by a plan, as the fields below."""
    alpha: float = 0.0
    scaling: float = 1.0
    """The factor of B A."""
    in_files: str = ""
    """The module's name in a file that PEFT reads, if it differs."""

    @property
    def name(self) -> str:
        """The name of the module or of the parameter, in the model."""
        return self.module if self.parameter is None else f"{self.module}.{self.parameter}"

    @property
    def weight(self) -> str:
        """The name of the weight that is adapted."""
        return self.name if self.parameter is not None else f"{self.module}.weight"

    @property
    def leaves(self) -> tuple[str, str]:
        """The names of A and B on the module."""
        prefix = "" if self.parameter is None else f"{self.parameter}_"
        return f"{prefix}lora_A", f"{prefix}lora_B"

    @property
    def factors(self) -> tuple[str, str]:
        """The names of A and B in the model."""
        leaf_a, leaf_b = self.leaves
        return f"{self.module}.{leaf_a}", f"{self.module}.{leaf_b}"

    @property
    def ending(self) -> str:
        """The shortest name that selects this target, together with others of its kind."""
        return ".".join(self.name.split(".")[-2 if self.parameter == "weight" else -1 :])

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of A `[r, in]` and B `[out, r]`, after a dim of experts if there are some."""
        lead = () if self.experts is None else (self.experts,)
        return (*lead, self.r, self.in_features), (*lead, self.out_features, self.r)

    @property
    def elements(self) -> int:
        return self.r * (self.in_features + self.out_features) * (self.experts or 1)


@dataclass(frozen=True, slots=True)
class Replaced:
    """New values of a weight or of some of its rows, or what is added to a bias (PEFT's `lora_bias`)."""

    key: str
    """Their name in PEFT's file."""
    rows: tuple[int, ...] | None
    """The rows of the weight, in the order of the file's; None for all of the weight."""
    shape: tuple[int, ...]
    """Shape of the new values."""
    scaling: float | None = None
    """Factor of values that are added; None for values that stand instead of the weight's."""


def new_values_of(weight: str) -> str:
    """Return the name, in a model that trains, of the parameter that replaces a weight or rows of it, or adds to it."""
    return f"{weight}_lora_W"


def find_targets(
    model: nn.Module, anatomy: Anatomy, wanted: Sequence[str], exclude: Sequence[str] = ()
) -> tuple[Target, ...]:
    """Return the targets that `wanted` selects and `exclude` does not, in module order.

    Weights that get no gradient are left out.

    Args:
        wanted: Groups, `all-linear`, names or patterns; `exclude` likewise.

    Raises:
        InputError: An entry of `wanted` matches nothing that text trains, or an entry of `exclude` takes out nothing or
            everything.
    """
    there, idle = by_gradient(model, anatomy)
    chosen: dict[str, Target] = {}
    for selector in wanted:
        matches = [target for target in there if _selects(selector, target)]
        if not matches and (untrained := [target.name for target in idle if _selects(selector, target)]):
            raise InputError(
                f"lora.targets: {selector} matches what text does not train here, as {untrained[0]}; it gets no "
                "gradient, so its adapter would stay zero; leave it out",
                key="lora.targets-untrained",
            )
        if not matches:
            groups = (f"{group} ({', '.join(endings)})" for group, endings in listed(there).items())
            refused = ((spec.name, _expert_refusal(spec, model.get_submodule(spec.name))) for spec in anatomy.experts)
            whys = [f" ({name}: its experts {why})" for name, why in refused if why and selector == "experts"]
            raise InputError(
                f"lora.targets: {selector} matches nothing in this model{''.join(whys[:1])}; it has "
                f"{', '.join(groups)}",
                key="lora.targets-nothing",
            )
        chosen |= {target.name: target for target in matches}
    for selector in exclude:
        out = [name for name, target in chosen.items() if _selects(selector, target)]
        if not out and any(_selects(selector, target) for target in idle):
            continue
        if not out or len(out) == len(chosen):
            what = "none of the targets" if not out else "all that is left of the targets"
            raise InputError(f"lora.exclude: {selector} matches {what}; leave it out", key="lora.exclude-nothing")
        chosen = {name: target for name, target in chosen.items() if name not in out}
    return tuple(target for target in there if target.name in chosen)


def listed(there: Sequence[Target]) -> dict[str, list[str]]:
    """Return, by group, the endings of the targets' names."""
    groups: dict[str, list[str]] = {}
    for target in sorted(there, key=lambda target: GROUPS.index(target.group)):
        endings = groups.setdefault(target.group, [])
        if target.ending not in endings:
            endings.append(target.ending)
    return groups


def by_gradient(model: nn.Module, anatomy: Anatomy) -> tuple[list[Target], list[Target]]:
    """Return the candidates that text trains, and those that get no gradient from it."""
    untrained = without_gradient(model, anatomy)
    there: tuple[list[Target], list[Target]] = ([], [])
    for target in candidates(model, anatomy):
        there[target.weight in untrained].append(target)
    return there


def candidates(model: nn.Module, anatomy: Anatomy) -> Iterator[Target]:
    """Yield all targets in `model` that can get an adapter, in module order."""
    experts = {spec.name: spec for spec in anatomy.experts}
    head = model.get_output_embeddings()  # type: ignore[operator]
    inside = {block: spec for spec in anatomy.experts for block in anatomy.blocks if is_inside(spec.name, block)}
    for name, module in model.named_modules():
        if name in experts:
            if _expert_refusal(experts[name], module) is None:
                yield from _expert_targets(experts[name], module)
        elif is_inside(name, *experts) and not _is_router(name, anatomy):
            continue
        elif type(module) is nn.Linear:
            group = "lm_head" if module is head else _group(name, anatomy, inside)
            if group is not None:
                yield Target(name, None, module.in_features, module.out_features, None, group)
        elif name in anatomy.routers:
            # A router that is not an `nn.Linear` is still a matrix from hidden states to experts.
            weight = getattr(module, "weight", None)
            if isinstance(weight, nn.Parameter) and weight.dim() == 2:
                yield Target(name, "weight", weight.shape[1], weight.shape[0], None, "router")


def embedding_target(model: nn.Module) -> Target:
    """Return the input embedding as a target."""
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    name: str = next(name for name, module in model.named_modules() if module is embedding)
    vocabulary, width = embedding.weight.shape
    return Target(name, None, vocabulary, width, None, EMBEDDING, transposed=True)


def _expert_targets(spec: ExpertsSpec, module: nn.Module) -> Iterator[Target]:
    """Yield the up (with gate, if gated) and down projections of all experts of one layer."""
    width = spec.intermediate_size * (2 if spec.gated else 1)
    sizes = {spec.up: (spec.hidden_size, width), spec.down: (spec.intermediate_size, spec.hidden_size)}
    swapped = spec.transposed and not getattr(module, "is_transposed", False)
    for parameter, (inner, out) in sizes.items():
        holder, _, leaf = f"{spec.name}.{parameter}".rpartition(".")
        yield Target(holder, leaf, inner, out, spec.num_experts, "experts", swapped, spec.transposed)


def _expert_refusal(spec: ExpertsSpec, module: nn.Module) -> str | None:
    """Return why these experts get no adapters, as the end of a sentence, or None if they do."""
    if isinstance(module, FusedExperts):
        return "are a list of modules, each of which PEFT gives adapters of its own"
    return "lie in flat matrices, in which PEFT knows no single expert" if spec.flat_gate is not None else None


def _group(name: str, anatomy: Anatomy, inside: dict[str, ExpertsSpec]) -> str | None:
    """Return the group of a linear layer in a list of blocks some of which have experts.

    Args:
        inside: The experts by the name of the block that has them.

    Returns:
        None for a layer outside of such a list, in a vision tower or a projector for example.
    """
    block = next((each for each in anatomy.blocks if is_inside(name, each)), None)
    if block is None or block.rpartition(".")[0] not in {each.rpartition(".")[0] for each in inside}:
        return None
    parts = name[len(block) + 1 :].split(".")
    if _is_router(name, anatomy):
        return "router"
    if any("shared" in part for part in parts):
        return "shared_experts"
    # An MLP has the same name in a dense block as a mixture of experts in another block.
    mixtures = {spec.name[len(each) + 1 :].split(".")[0] for each, spec in inside.items()}
    is_mlp = parts[0] in mixtures or any(part in _MLP_NAMES for part in parts)
    return "dense_mlp" if is_mlp else "attention"


def _is_router(name: str, anatomy: Anatomy) -> bool:
    """Return whether a module is a router or in one."""
    return is_within(name, *anatomy.routers)


def _selects(selector: str, target: Target) -> bool:
    """Return whether a group, `all-linear`, or a name or pattern (also of the end of a name) selects `target`."""
    if selector in GROUPS:
        return target.group == selector
    if selector == ALL_LINEAR:
        return target.parameter is None and target.group != "lm_head"
    names = (target.name, f"{target.module}.weight") if target.parameter is None else (target.name,)
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in (selector, f"*.{selector}"))


def refuse_tied_head(model: nn.Module, targets: Sequence[Target]) -> None:
    """Raise `InputError` for an adapter on a head or an input embedding that share their weight."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[operator]
    if head is not None and head.weight is embedding.weight and any(t.group in ("lm_head", EMBEDDING) for t in targets):
        raise InputError(
            "lora.targets: lm_head is tied to the input embedding in this model, so an adapter on one of them could "
            "not be merged; leave it out",
            key="lora.tied-head",
        )


def refuse_slow_patterns(patterns: Collection[str], names: Collection[str], where: Path) -> None:
    """Raise `SecurityError` for regular expressions of a foreign adapter that take too long to match `names`.

    A process cannot interrupt a match that it runs itself, so a child process tries all of them first.
    """

    def match_all(each: Sequence[str]) -> None:
        for pattern in each:
            for name in names:
                re.fullmatch(pattern, name)
                is_named(name, pattern)

    try:
        if patterns:
            Sandbox(match_all).map([list(patterns)])
    except LimitExceeded as error:
        raise SecurityError(
            f"{where}: comparing its patterns ({', '.join(patterns)[:200]}) with the names in the model "
            f"{error}; write them without repetitions of repetitions",
            key="adapter.slow-pattern",
        ) from error
