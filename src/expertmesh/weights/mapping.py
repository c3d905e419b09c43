"""Plan which file tensors make which model tensors, and back, by transformers' own rules for the family.

`plan_load` and `plan_save` run those rules (renames, and conversions such as stacking per-expert matrices) on lazy
tensors, so that the plans hold names and boxes but no values. Every rank computes the same plan from the same model and
headers, without communication. Where `from_pretrained` would warn, this file raises an error: each tensor of the model
is filled exactly once, from tensors that fit. Nothing in this file depends on a family.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from expertmesh.anatomy import is_classifier
from expertmesh.compat import declared, set_weight_conversions, weight_conversions
from expertmesh.config.errors import InputError, IntegrityError
from expertmesh.io.boxes import Leaf
from expertmesh.io.safetensors_reader import FileTensor, WeightFiles
from expertmesh.state.codes import PackedFormat
from expertmesh.state.model_view import ModelView, sharded
from expertmesh.weights.first_values import FirstValues
from expertmesh.weights.lazy import LazyTensor, rounded_units
from expertmesh.weights.module_list import list_rules
from expertmesh.weights.quantised.published import PublishedTensors, published_tensors, quantisation
from expertmesh.weights.quantised.tensor import QuantisedTensor

_LISTED = 10
# The kinds of leaves whose values are in files.
FILE_LEAVES = (FileTensor, QuantisedTensor)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The sources of the values of every parameter and persistent buffer."""

    tensors: dict[str, LazyTensor]
    """One entry for each tensor of the model, under the first of its names if it is tied."""
    copies: tuple[tuple[str, LazyTensor], ...]
    """Further copies of tied tensors in the files: (name in `tensors`, the copy). They must be equal."""
    ignored: tuple[str, ...]
    """The file tensors that the family itself declares unused."""
    conversions: tuple[WeightTransform, ...]
    """The conversion rules that applied."""
    published: PublishedTensors
    """The tensors that the files hold."""


def plan_load(view: ModelView, files: WeightFiles | FirstValues, *, complete: bool = True) -> LoadPlan:
    """Plan the source of each tensor of a model, which may be on meta and may be sharded.

    Quantised weights are read as the values that their codes represent. Only the headers that `files` already has are
    used. The `new_head` of a classifier may be missing; `lm_head.*` of the files is then skipped.

    Args:
        files: Files, with the names that the family publishes; or first values, with those of its class.
        complete: If False, tensors that do not fit are not reported.

    Raises:
        IntegrityError: Names the tensors that are missing, unexpected, duplicated, incomplete, misshaped or mistyped.
        InputError, IntegrityError: As `published_tensors` does.
    """
    if isinstance(files, FirstValues):
        published = files.published
    else:
        published = published_tensors(quantisation(view.module.config), files)
    with view.published_classes():
        # Rules are found by the classes of modules, and one pipeline stage lacks some of these classes.
        conversions = [*get_model_conversion_mapping(view.full), *list_rules(view.full)]
    new = new_head(view)
    planner = _LoadPlanner(view, published, new)
    inputs, ignored = planner.match(conversions)
    filled, failed = planner.assemble(inputs)
    tensors: dict[str, LazyTensor] = {}
    copies: list[tuple[str, LazyTensor]] = []
    for names in view.ties:
        present = [name for name in names if name in filled]
        if present:
            tensors[names[0]] = filled[present[0]]
            copies += [(names[0], filled[name]) for name in present[1:]]
        elif not failed & set(names) and names[0] not in new:
            planner.mismatches.add("missing", names[0])
    if complete:
        planner.mismatches.refuse(view.family, files.directory)
    return LoadPlan(tensors, tuple(copies), ignored, tuple(rule for rule in conversions if rule.was_used()), published)


def classifier_head(view: ModelView) -> list[str]:
    """Return the tensors of a classifier's head; none of other models."""
    prefix = f"{view.module.base_model_prefix}."
    return [name for name in view.tensors if not name.startswith(prefix)] if is_classifier(view.full) else []


def new_head(view: ModelView) -> list[str]:
    """Return the tensors of a classifier's head if the files may lack it: their config names another class."""
    config: Any = view.module.config
    return [] if view.family.__name__ in (config.architectures or ()) else classifier_head(view)


@dataclass(slots=True)
class _ConversionInputs:
    """The file tensors that make one target, by the pattern that matched; without a converter, exactly one."""

    converter: WeightConverter | None
    keys: dict[str, list[str]] = field(default_factory=dict)


@dataclass(slots=True)
class _Mismatches:
    """The tensors that do not fit, by kind, and their files, collected for one error that names all of them."""

    names: dict[str, list[str]] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)

    def add(self, kind: str, name: str, leaves: Iterable[Leaf] = ()) -> None:
        self.names.setdefault(kind, []).append(name)
        self.files |= {leaf.path.name for leaf in leaves if isinstance(leaf, FILE_LEAVES)}

    def refuse(self, family: type, directory: Path) -> None:
        """Raise `IntegrityError` if anything was added."""
        kinds = ("missing", "unexpected", "duplicated", "incomplete", "misshaped", "mistyped")
        found = [f"{len(names)} {kind} ({_listed(names)})" for kind in kinds if (names := self.names.get(kind))]
        if found:
            where = f"; in {_listed(sorted(self.files))}" if self.files else ""
            raise IntegrityError(
                f"{directory}: does not fit {family.__name__}: {'; '.join(found)}{where}",
                key="weights.does-not-fit",
            )


@dataclass(slots=True)
class _LoadPlanner:
    """The steps of `plan_load`, which go on after a mismatch, so that one error can name all of them."""

    view: ModelView
    published: PublishedTensors
    new: Sequence[str]
    mismatches: _Mismatches = field(default_factory=_Mismatches)

    def match(self, conversions: list[WeightTransform]) -> tuple[dict[str, _ConversionInputs], tuple[str, ...]]:
        """Sort the file tensors by the target they go into, as `from_pretrained` does.

        Returns:
            The inputs of each target, and the file tensors to ignore.
        """
        renamings = [rule for rule in conversions if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in conversions if isinstance(rule, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        prefix, state = self.view.module.base_model_prefix, self.view.tensors
        targets: dict[str, _ConversionInputs] = {}
        unmapped: list[str] = []
        # The order matters: converters stack the tensors in the order in which they are added.
        for key in sorted(self.published.tensors, key=dot_natural_key):
            target, pattern = rename_source_key(key, renamings, converters, prefix, state)
            if target not in state and key in state:
                target, pattern = rename_source_key(key, [], [], prefix, state)
            if target not in state:
                unmapped.append(key)
                continue
            if target not in targets:
                targets[target] = _ConversionInputs(None if pattern is None else deepcopy(by_pattern[pattern]))
            inputs = targets[target]
            known = [None] if inputs.converter is None else inputs.converter.source_patterns
            if pattern not in known or (pattern is None and inputs.keys):
                self.mismatches.add("duplicated", f"{target} from {key}")
                continue
            inputs.keys.setdefault(pattern or key, []).append(key)
        return targets, self._ignored(unmapped)

    def _ignored(self, unmapped: list[str]) -> tuple[str, ...]:
        """Return the tensors that `from_pretrained` would not report; report any other as unexpected."""
        patterns = list(declared(self.view.module, "_keys_to_ignore_on_load_unexpected"))
        buffers = [name for name, _ in self.view.full.named_buffers()]
        # Buffers that old checkpoints hold and that models compute now.
        patterns += [r"rotary_emb\.inv_freq"] if any(name.endswith("rotary_emb.inv_freq") for name in buffers) else []
        patterns += [r"(^|\.)position_ids$"] if any(name.endswith("position_ids") for name in buffers) else []
        ignored: list[str] = []
        for key in unmapped:
            if self.new and key.startswith("lm_head."):
                continue
            if any(re.search(pattern, key) for pattern in patterns):
                ignored += self.published.stored[key]
            else:
                self.mismatches.add("unexpected", key, self.published.tensors[key].leaves())
        return tuple(ignored)

    def assemble(self, targets: dict[str, _ConversionInputs]) -> tuple[dict[str, LazyTensor], set[str]]:
        """Run the conversions.

        Returns:
            The resulting tensors by name, and the targets that could not be made.
        """
        filled: dict[str, LazyTensor] = {}
        failed: set[str] = set()
        add = self.mismatches.add
        for target, inputs in targets.items():
            made = self._convert(target, inputs)
            if not made:
                failed.add(target)
            for name, value in made.items():
                wanted, leaves = self.view.tensors.get(name), value.leaves()
                if wanted is None:
                    add("unexpected", f"{name} from {next(iter(inputs.keys.values()))[0]}")
                elif name in filled:
                    add("duplicated", name)
                elif surplus := _surplus(inputs, value, wanted):
                    for key in surplus:
                        add("unexpected", key, self.published.tensors[key].leaves())
                elif value.shape != wanted.shape:
                    add("misshaped", f"{name}: files {tuple(value.shape)}, model {tuple(wanted.shape)}", leaves)
                elif wrong := next((leaf for leaf in leaves if not _can_cast(leaf.dtype, wanted.dtype)), None):
                    add("mistyped", f"{name}: {wrong.name} is {wrong.dtype}, the model {wanted.dtype}", [wrong])
                filled.setdefault(name, value)
        return filled, failed

    def _convert(self, target: str, inputs: _ConversionInputs) -> dict[str, LazyTensor]:
        """Return the tensors made from `inputs`, by name; none if the files do not fit the family's rule."""
        tensors = self.published.tensors
        if inputs.converter is None:
            ((key,),) = inputs.keys.values()
            return {target: tensors[key]}
        for pattern, keys in inputs.keys.items():
            if "*" in pattern and (gap := _gap(keys)):
                self.mismatches.add("incomplete", f"{target}: {gap}")
                return {}
            for key in keys:
                lazy: Any = tensors[key]
                inputs.converter.add_tensor(target, key, pattern, lazy)
        try:
            with torch.no_grad():
                made = inputs.converter.convert(target, model=self.view.full, config=self.view.module.config)
        except Exception as error:  # operations of a family can raise any exception
            fits = True
            for keys in inputs.keys.values():
                shapes = [tuple(tensors[key].shape) for key in keys]
                usual = max(shapes, key=shapes.count)
                for key, shape in zip(keys, shapes, strict=True):
                    if shape != usual:
                        fits = False
                        self.mismatches.add("misshaped", f"{key}: {shape}", tensors[key].leaves())
            if fits:
                self.mismatches.add("incomplete", f"{target}: {error}")
            return {}
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _surplus(inputs: _ConversionInputs, value: Tensor, wanted: Tensor) -> list[str]:
    """Return the file tensors of experts that the model does not have, if only they make `value` too large."""
    if value.dim() == 0 or value.shape[1:] != wanted.shape[1:] or len(value) <= len(wanted):
        return []
    stacked = [keys for keys in inputs.keys.values() if len(keys) == len(value)]
    return [key for keys in stacked for key in keys[len(wanted) :]]


def _can_cast(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether a cast preserves the meaning; it does not for integers and for 8-bit floats without scales."""
    scaled = stored.is_floating_point and stored.itemsize == 1 and stored != wanted
    return stored.is_floating_point == wanted.is_floating_point and not scaled


def _gap(keys: Sequence[str]) -> str | None:
    """Explain why names that differ in one number (the expert) do not count from 0 without gaps; None if they do.

    Stacking uses the existing tensors in order: experts 0, 1, 2 and 4 would silently make a model with four experts.
    """
    split = [re.split(r"(?<=\.)(\d+)(?=\.|$)", key) for key in keys]
    if len({len(parts) for parts in split}) > 1:
        return None
    varying = [place for place in range(len(split[0])) if len({parts[place] for parts in split}) > 1]
    if len(varying) != 1:
        return None
    numbers = {int(parts[varying[0]]) for parts in split}
    absent = sorted(set(range(max(numbers) + 1)) - numbers)
    if not absent:
        return None
    first = [*split[0][: varying[0]], str(absent[0]), *split[0][varying[0] + 1 :]]
    return f"the files hold {len(numbers)} of {max(numbers) + 1} experts, {''.join(first)} is not there"


def rounded_plan(model: nn.Module, plan: LoadPlan) -> LoadPlan:
    """Return `plan` with the values that `model` has after loading, where frozen weights may be quantised."""
    formats: Mapping[str, PackedFormat] = sharded(model).frozen_formats or {}
    quantised = {name: kind for name, kind in formats.items() if not kind.published}
    kept = {name: rounded_units(plan.tensors[name], kind) for name, kind in quantised.items()}
    return replace(plan, tensors=plan.tensors | kept)


@dataclass(frozen=True, slots=True, eq=False)
class StateTensor:
    """A parameter or persistent buffer as a leaf."""

    name: str
    """The tensor's name in the state dict."""
    tensor: Tensor
    """Its shape is the global one; it may be a DTensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype


def plan_save(view: ModelView, bare: bool | None = None) -> dict[str, LazyTensor]:
    """Plan the tensors to write, by file tensor name, in the layout of the files read, or else the family's own layout.

    The keys and shapes are those of transformers' `save_pretrained`: tied tensors once, the family's ignore list
    omitted. The leaves are `StateTensor`s. Works on parallelised models; issues no collective.

    Args:
        bare: Leave out the base model's prefix; None: as in the files that were read.

    Raises:
        InputError: transformers' rules for saving change the number of values.
    """
    model, state = view.module, view.tensors
    kept = _untied(view) - set(declared(model, "_keys_to_ignore_on_save"))
    # transformers adds the prefix when it loads files without it, but does not remove it when it saves.
    prefix = f"{model.base_model_prefix}." if (view.attached.source.bare if bare is None else bare) else ""
    lazies = {
        name.removeprefix(prefix): LazyTensor.of(StateTensor(name, state[name])) for name in state if name in kept
    }
    if view.is_stage:
        # Loading has recorded the rules that applied on this stage; the full model on meta was never loaded.
        set_weight_conversions(view.full, weight_conversions(model))
    with view.published_classes(), torch.no_grad():
        saved: dict[str, Any] = revert_weight_conversion(view.full, dict(lazies))
    before, after = (sum(tensor.numel() for tensor in each.values()) for each in (lazies, saved))
    if before != after:
        raise InputError(
            f"{view.family.__name__}: transformers' own rules for saving it turn {before} values into "
            f"{after}; saving would lose weights, so it is refused",
            key="model.saving-loses-values",
        )
    return saved


def _untied(view: ModelView) -> set[str]:
    """Return the names to save: of each tied tensor, the name that the family does not declare as the copy.

    Raises:
        InputError: Several names share one tensor and the family does not declare a tie.
    """
    patterns = [
        f"{prefix}.{pattern}" if prefix else pattern
        for prefix, module in view.full.named_modules()
        for pattern in declared(module, "_tied_weights_keys")
    ]
    kept = set(view.tensors)
    for names in view.ties:
        copies = [name for name in sorted(names) if any(re.search(pattern, name) for pattern in patterns)]
        kept -= set(copies[: len(names) - 1])  # one name stays, also where the family declares all as copies
        left = [name for name in names if name in kept]
        if len(left) > 1:
            raise InputError(
                f"{view.family.__name__}: {_listed(left)} share one tensor without being declared as tied",
                key="model.undeclared-tie",
            )
    return kept


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown}, and {len(names) - _LISTED} more"
