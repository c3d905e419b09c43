"""Plan which file tensors make which model tensors, and back, by transformers' own rules for the family.

`plan_load` and `plan_save` run those rules (renames, and conversions such as stacking per-expert matrices) on lazy
tensors, so that the plans hold names and boxes but no values. Every rank computes the same plan from the same model and
headers, without communication. Where `from_pretrained` would warn, this file raises an error: each tensor of the model
is filled exactly once, from tensors that fit. Nothing in this file depends on a family.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from expertmesh.anatomy import is_adapter
from expertmesh.config.errors import InputError, IntegrityError
from expertmesh.io.pieces import Leaf
from expertmesh.io.safetensors_reader import FileTensor, WeightFiles
from expertmesh.state.sharded_model import sharded
from expertmesh.state.stage_view import full_model, full_state
from expertmesh.weights.lazy import LazyTensor
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


@dataclass(frozen=True, slots=True, eq=False)
class StateTensor:
    """A parameter or persistent buffer as a leaf."""

    name: str
    tensor: Tensor
    """Its shape is the global one; it may be a DTensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype


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

    def refuse(self, model: nn.Module, directory: Path) -> None:
        """Raise `IntegrityError` if anything was added."""
        kinds = ("missing", "unexpected", "duplicated", "incomplete", "misshaped", "mistyped")
        found = [f"{len(names)} {kind} ({_listed(names)})" for kind in kinds if (names := self.names.get(kind))]
        if found:
            where = f"; in {_listed(sorted(self.files))}" if self.files else ""
            raise IntegrityError(
                f"{directory}: does not fit {own_class(model).__name__}: {'; '.join(found)}{where}",
                key="weights.does-not-fit",
            )


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by state-dict name, without adapters.

    Tied tensors are there under each of their names. The tensors of the full model are returned: those of another
    pipeline stage have no values (state/stage_view.py).

    Raises:
        InputError: An entry of the state dict is not a tensor.
    """
    state = {name: value for name, value in full_state(model).items() if not is_adapter(name)}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise InputError(
                f"{type(model).__name__}: state {name} is not a tensor, which is not supported",
                key="model.state-not-tensor",
            )
    return dict(state)


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the low-rank adapters of the full model by name; an empty dict for a model without adapters."""
    return {name: parameter for name, parameter in full_state(model).items() if is_adapter(name)}


def plan_load(
    model: PreTrainedModel, files: WeightFiles, new: Sequence[str] = (), *, complete: bool = True
) -> LoadPlan:
    """Plan the source of each tensor of `model`, which may be on meta and may be sharded.

    Quantised weights are read as the values that their codes represent. Only the headers that `files` already has are
    used.

    Args:
        new: Tensors that may be missing in the files, such as a new head that replaces the language model's (load.py);
            `lm_head.*` of the files is then skipped.
        complete: If False, tensors that do not fit are not reported.

    Raises:
        IntegrityError: Names the tensors that are missing, unexpected, duplicated, incomplete, misshaped or mistyped.
        InputError, IntegrityError: As `published_tensors` does.
    """
    published = published_tensors(quantisation(model.config), files)
    state = model_tensors(model)
    with own_classes(model):
        # Rules are found by the classes of modules, and one pipeline stage lacks some of these classes.
        whole: Any = full_model(model)
        conversions = [*get_model_conversion_mapping(whole), *list_rules(whole)]
    planner = _LoadPlanner(model, published, state, new)
    inputs, ignored = planner.match(conversions)
    filled, failed = planner.assemble(inputs)
    tensors: dict[str, LazyTensor] = {}
    copies: list[tuple[str, LazyTensor]] = []
    for names in tied_names(state):
        present = [name for name in names if name in filled]
        if present:
            tensors[names[0]] = filled[present[0]]
            copies += [(names[0], filled[name]) for name in present[1:]]
        elif not failed & set(names) and names[0] not in new:
            planner.mismatches.add("missing", names[0])
    if complete:
        planner.mismatches.refuse(model, files.directory)
    return LoadPlan(tensors, tuple(copies), ignored, tuple(rule for rule in conversions if rule.was_used()), published)


def plan_save(model: PreTrainedModel) -> dict[str, LazyTensor]:
    """Plan the tensors to write, by file tensor name, in the layout of the files read, or else the family's own layout.

    The keys and shapes are those of transformers' `save_pretrained`: tied tensors once, the family's ignore list
    omitted. The leaves are `StateTensor`s. Works on parallelised models; issues no collective.

    Raises:
        InputError: transformers' rules for saving change the number of values.
    """
    state = model_tensors(model)
    kept = _untied(model, state) - set(model._keys_to_ignore_on_save or ())
    # transformers adds the prefix when it loads files without it, but does not remove it when it saves.
    prefix = f"{model.base_model_prefix}." if getattr(sharded(model).source, "bare", False) else ""
    lazies = {
        name.removeprefix(prefix): LazyTensor.of(StateTensor(name, state[name])) for name in state if name in kept
    }
    whole: Any = full_model(model)
    if whole is not model:
        whole._weight_conversions = getattr(model, "_weight_conversions", None)  # the rules that loading applied
    with own_classes(model), torch.no_grad():
        saved: dict[str, Any] = revert_weight_conversion(whole, dict(lazies))
    before, after = (sum(tensor.numel() for tensor in each.values()) for each in (lazies, saved))
    if before != after:
        raise InputError(
            f"{own_class(model).__name__}: transformers' own rules for saving it turn {before} values into "
            f"{after}; saving would lose weights, so it is refused",
            key="model.saving-loses-values",
        )
    return saved


def unique_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return `model_tensors`, each tensor once, under the first of its names."""
    state = model_tensors(model)
    return {names[0]: state[names[0]] for names in tied_names(state)}


def tied_names(state: dict[str, Tensor]) -> list[list[str]]:
    """Return the names of each tensor, in state-dict order: a list of one name, or of several for a tied tensor."""
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    return list(names.values())


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the module's class without the subclass that FSDP2 puts in front of it."""
    kinds: Iterable[type] = type(module).__mro__
    return next(kind for kind in kinds if issubclass(kind, nn.Module) and not issubclass(kind, FSDPModule))


@contextmanager
def own_classes(model: nn.Module) -> Iterator[None]:
    """Give sharded modules their original classes back inside the `with` block.

    transformers finds conversion rules by class name and skips classes defined outside of transformers. FSDP2's
    `FSDPMixtralForCausalLM` fails both tests: without this function, a sharded model would have no rules and would be
    saved in another layout.
    """
    sharded = [(module, type(module)) for module in model.modules() if own_class(module) is not type(module)]
    try:
        for module, _ in sharded:
            module.__class__ = own_class(module)
        yield
    finally:
        for module, kind in sharded:
            module.__class__ = kind


@dataclass(slots=True)
class _LoadPlanner:
    """The steps of `plan_load`; they collect mismatches."""

    model: PreTrainedModel
    published: PublishedTensors
    state: dict[str, Tensor]
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
        prefix, state = self.model.base_model_prefix, self.state
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
        patterns = list(self.model._keys_to_ignore_on_load_unexpected or ())
        buffers = [name for name, _ in full_model(self.model).named_buffers()]
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
                wanted, leaves = self.state.get(name), value.leaves()
                if wanted is None:
                    add("unexpected", f"{name} from {next(iter(inputs.keys.values()))[0]}")
                elif name in filled:
                    add("duplicated", name)
                elif surplus := _surplus(inputs, value, wanted):
                    for key in surplus:
                        add("unexpected", key, self.published.tensors[key].leaves())
                elif value.shape != wanted.shape:
                    add("misshaped", f"{name}: files {tuple(value.shape)}, model {tuple(wanted.shape)}", leaves)
                elif wrong := next((leaf for leaf in leaves if not _castable(leaf.dtype, wanted.dtype)), None):
                    add("mistyped", f"{name}: {wrong.name} is {wrong.dtype}, the model {wanted.dtype}", [wrong])
                filled.setdefault(name, value)
        return filled, failed

    def _odd(self, keys: Sequence[str]) -> list[str]:
        """Return the tensors whose shape differs from the most frequent shape among `keys`."""
        shapes = [tuple(self.published.tensors[key].shape) for key in keys]
        usual = max(shapes, key=shapes.count)
        return [key for key, shape in zip(keys, shapes, strict=True) if shape != usual]

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
                made = inputs.converter.convert(target, model=full_model(self.model), config=self.model.config)
        except Exception as error:  # operations of a family can raise any exception
            odd = [key for keys in inputs.keys.values() for key in self._odd(keys)]
            for key in odd:
                self.mismatches.add("misshaped", f"{key}: {tuple(tensors[key].shape)}", tensors[key].leaves())
            if not odd:
                self.mismatches.add("incomplete", f"{target}: {error}")
            return {}
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _surplus(inputs: _ConversionInputs, value: Tensor, wanted: Tensor) -> list[str]:
    """Return the file tensors of experts that the model does not have, if only they make `value` too large."""
    if value.dim() == 0 or value.shape[1:] != wanted.shape[1:] or len(value) <= len(wanted):
        return []
    stacked = [keys for keys in inputs.keys.values() if len(keys) == len(value)]
    return [key for keys in stacked for key in keys[len(wanted) :]]


def _castable(stored: torch.dtype, wanted: torch.dtype) -> bool:
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


def _untied(model: PreTrainedModel, state: dict[str, Tensor]) -> set[str]:
    """Return the names to save: of each tied tensor, the name that the family does not declare as the copy.

    Raises:
        InputError: Several names share one tensor and the family does not declare a tie.
    """
    declared = [
        f"{prefix}.{pattern}" if prefix else pattern
        for prefix, module in full_model(model).named_modules()
        for pattern in getattr(module, "_tied_weights_keys", None) or {}
    ]
    kept = set(state)
    for names in tied_names(state):
        copies = [name for name in sorted(names) if any(re.search(pattern, name) for pattern in declared)]
        kept -= set(copies[: len(names) - 1])
        left = [name for name in names if name in kept]
        if len(left) > 1:
            family = own_class(model).__name__
            raise InputError(
                f"{family}: {_listed(left)} share one tensor without being declared as tied", key="model.undeclared-tie"
            )
    return kept


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown}, and {len(names) - _LISTED} more"
