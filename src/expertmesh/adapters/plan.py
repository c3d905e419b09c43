"""Plan which adapters a model gets, from a configuration or from a PEFT directory, and attach them.

The plan is made before the model is sharded, and remembered on the model for saving. Every rank makes the same plan.
To attach means parameters A and B beside each target, new values beside each replaced weight, and a forward that uses
them; on meta, so that FSDP2 and expert parallelism treat adapters like every other parameter. The base keeps its
names, its values and the forward of its classes, and `adapters_off` lets it compute alone. Nothing here communicates.
"""

import glob
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from expertmesh.adapters.peft_config import (
    CLASSIFIES,
    HEADS_OF_CLASSIFIERS,
    as_peft_reads,
    config_bytes,
    config_content,
    config_selects,
    lora_of,
    name_in_config,
    patterns_in,
    read_config,
    refuse_field,
)
from expertmesh.adapters.peft_format import (
    PREFIX,
    WEIGHTS_FILE,
    Part,
    file_keys,
    is_parameter,
    name_of,
    published_parts,
)
from expertmesh.adapters.targets import (
    ALL_LINEAR,
    EMBEDDING,
    GROUPS,
    Replaced,
    Target,
    candidates,
    embedding_target,
    find_targets,
    new_values_of,
    refuse_slow_patterns,
    refuse_tied_head,
)
from expertmesh.anatomy import Anatomy, describe, head_of, is_classifier
from expertmesh.compat import parameter_slots
from expertmesh.config import LoraConfig
from expertmesh.config.base import is_named
from expertmesh.config.errors import InputError
from expertmesh.experts.lora_state import AdapterState, adapter_state, number_rows, running_adapters_of
from expertmesh.io.safetensors_reader import open_weight_files
from expertmesh.state.model_view import ModelView, ModuleState, attach, attach_to_module, module_state
from expertmesh.state.patching import exchanged, mix_in
from expertmesh.weights.mapping import classifier_head, plan_load
from expertmesh.weights.quantised.published import published_formats


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """The adapters of one model."""

    lora: LoraConfig
    """The configuration, resolved for this model."""
    targets: tuple[Target, ...]
    """In module order."""
    weights: Path | None
    """The PEFT directory from which the adapters start; None to start at random."""
    base: str | None
    """The name of the base model, for PEFT's config."""
    revision: str | None = None
    """The revision of the base model, for PEFT's config."""
    in_memory: bool = False
    """The adapters have their values already, from a PeftModel."""
    parts: Mapping[str, Sequence[Part]] = field(default_factory=dict)
    """By target name, the published matrices after which the PEFT directory names its adapters, if it does."""
    replaced: Mapping[str, Replaced] = field(default_factory=dict)
    """By the name of the weight, what is trained of it beside adapters."""

    @property
    def parameters(self) -> int:
        """The number of trainable parameters of the full model."""
        whole = sum(math.prod(each.shape) for each in self.replaced.values())
        return sum(target.elements for target in self.targets) + whole

    def config(self, model: nn.Module) -> bytes:
        """Return the bytes of adapter_config.json."""
        return config_bytes(config_content(model, self.targets, self.replaced, self.lora, self.base, self.revision))

    @property
    def is_uniform(self) -> bool:
        """Return whether all adapters have the same rank and alpha."""
        return all((target.r, target.alpha) == (self.lora.r, self.lora.alpha) for target in self.targets)


def adapt(
    model: nn.Module,
    lora: LoraConfig,
    dtype: torch.dtype,
    base: str | None,
    revision: str | None = None,
    as_published: Path | None = None,
) -> AdapterPlan:
    """Freeze `model` and attach the adapters of `lora`, all zeros. No communication.

    Args:
        model: Not yet sharded, maybe on meta.
        dtype: The dtype of the adapters.
        base: The name of the base model, and `revision` its revision, for PEFT's config.
        as_published: The directory of weights files in whose codes the frozen weights are to stay, if they are.

    Raises:
        InputError: As `plan_adapters`; also if codes cannot stay.
    """
    plan = replace(plan_adapters(model, lora, base), revision=revision)
    attach_adapters(model, plan.targets, plan.replaced, plan.lora, dtype)
    attach(model, lora_plan=plan)
    if as_published is not None:
        remember_formats(model, as_published)
    return plan


def remember_formats(model: Any, directory: Path) -> None:
    """Find out from headers in which formats the files in `directory` hold those weights of `model` that stay packed.

    Remembers the formats on the model, which may be on meta. No communication.

    Raises:
        InputError: Codes of the files cannot stay as they are.
    """
    view = ModelView(model)
    with open_weight_files(directory, view.weights_file) as files:
        attach(model, frozen_formats=published_formats(model, plan_load(view, files, complete=False).tensors))


def plan_adapters(model: nn.Module, lora: LoraConfig, base: str | None, *, merging: bool = False) -> AdapterPlan:
    """Return the plan of the adapters that `lora` means for `model`, which is not changed. No communication.

    Args:
        merging: Nothing of the PEFT directory is to be trained.

    Raises:
        InputError: A target matches nothing or cannot be adapted; names it. Also for a PEFT directory that we cannot
            compute exactly.
        SecurityError: Patterns of a PEFT directory take too long to match.
    """
    anatomy = describe(model)
    if lora.from_adapter is not None:
        plan = _plan_from_adapter(model, anatomy, lora, base, merging)
    else:
        found = find_targets(model, anatomy, lora.targets, lora.exclude)
        _refuse_idle_patterns(lora, [name_of(target) for target in found])
        _refuse_idle_expert_r(lora, found)
        targets = tuple(_ranked(target, lora, name_of(target)) for target in found)
        said = {"modules_to_save": lora.modules_to_save, "trainable_token_indices": list(lora.trainable_token_indices)}
        plan = AdapterPlan(lora, targets, None, base, replaced=replaced_by(model, said, "lora"))
        _refuse_left_out(model, lora, plan.targets)
    return plan_targets(model, plan, lora.from_adapter or "lora", anatomy, merging=merging)


def plan_targets(
    model: nn.Module, plan: AdapterPlan, where: str, anatomy: Anatomy | None = None, *, merging: bool = False
) -> AdapterPlan:
    """Check that `plan` can be carried out in `model`, and return it with the names in PEFT's file and `lora_bias`.

    Args:
        where: For messages.
        merging: As in `plan_adapters`.

    Raises:
        InputError: Something cannot be adapted or trained; names it.
    """
    for target in plan.targets:
        if target.weight in plan.replaced:
            refuse_field(where, "modules_to_save", target.module, "it has an adapter too; leave one out")
    if not merging:
        _refuse_replaced(model, plan, where)
    refuse_tied_head(model, plan.targets)
    plan = replace(plan, targets=_named_in_files(model, plan.targets))
    plan = replace(plan, replaced={**plan.replaced, **dict(_biases(model, plan, where))})
    if plan.lora.dropout:
        _refuse_dropout(plan, anatomy or describe(model))
    return plan


def plan_lines(plan: AdapterPlan, anatomy: Anatomy) -> Iterator[str]:
    """Yield lines for the user: for each group its targets and trainable parameters, then the experts covered."""
    for group in dict.fromkeys(target.group for target in plan.targets):
        members = [target for target in plan.targets if target.group == group]
        count = sum(target.elements for target in members)
        kinds = sorted({(target.r, target.scaling) for target in members})
        others = " and ".join(f"{r} (scaling {scaling:g})" for r, scaling in kinds)
        of_rank = "" if kinds == [(plan.lora.r, plan.lora.scaling)] else f" of r {others}"
        ends = ", ".join(f"{number} {end}" for end, number in Counter(target.ending for target in members).items())
        yield f"{group}: {ends}{of_rank}, {count:,} trainable parameters"
    adapted = {target.module for target in plan.targets if target.experts is not None}
    covered = [spec.name for spec in anatomy.experts if not adapted.isdisjoint(spec.holders)]
    every = anatomy.num_experts
    if len(covered) == len(anatomy.experts):
        yield f"experts covered: all {every} of each of the {len(covered)} MoE layers"
    else:
        layers = f"{len(covered)} of {len(anatomy.experts)} MoE layers"
        yield f"experts covered: {every if covered else 0} of {every} in {layers}"
    biases = [math.prod(each.shape) for each in plan.replaced.values() if each.scaling is not None]
    if biases:
        yield f"added to biases: of {len(biases)} layers, {sum(biases):,} trainable parameters"
    for weight, each in plan.replaced.items():
        if each.scaling is None:
            what = "whole" if each.rows is None else f"{len(each.rows)} rows"
            yield f"{weight}: {what}, {math.prod(each.shape):,} trainable parameters"
    lora = plan.lora
    yield f"r {lora.r}, scaling {lora.scaling:g}, dropout {lora.dropout:g}; {plan.parameters:,} trainable in all"


def _plan_from_adapter(
    model: nn.Module, anatomy: Anatomy, lora: LoraConfig, base: str | None, merging: bool
) -> AdapterPlan:
    """Plan the adapters of the PEFT directory `lora.from_adapter`; of `lora` itself only dropout is used."""
    assert lora.from_adapter is not None
    directory = Path(lora.from_adapter)
    content = read_config(directory)
    if (content.get("task_type") == CLASSIFIES) is not is_classifier(model):
        why = "the model is a sequence classifier" if is_classifier(model) else "the model is no sequence classifier"
        refuse_field(str(directory), "task_type", content.get("task_type"), why)
    refuse_untrained_head(model, content, str(directory))
    weights, there = directory / WEIGHTS_FILE, list(candidates(model, anatomy))
    there += [embedding_target(model)] * merging
    parts = _parts_in(model, there, directory) if weights.exists() else {}
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    names += [part.key.removeprefix(PREFIX) for of_one in parts.values() for part in of_one]
    refuse_slow_patterns(patterns_in(content), names, directory)
    if parts:
        said = lora_of(content, dropout=lora.dropout)
        targets = tuple(
            _joined(target, parts[target.name], said, directory) for target in there if target.name in parts
        )
        embeddings = (each for each in there if each.group == EMBEDDING and config_selects(content, each))
        targets += tuple(_ranked(target, said, name_in_config(content, target)) for target in embeddings)
    else:
        content = as_peft_reads(content, model, directory)
        said = lora_of(content, dropout=lora.dropout)
        found = tuple(target for target in there if config_selects(content, target))
        targets = tuple(_ranked(target, said, name_in_config(content, target)) for target in found)
        _refuse_unknown(model, content, targets, directory)
    if not targets:
        raise InputError(f"{directory}: its targets match nothing in this model", key="adapter.targets-nothing")
    init = content.get("init_lora_weights", True)
    if init not in (True, "gaussian") and not weights.exists():
        why = 'there are no weights, and only true and "gaussian" can be started here'
        refuse_field(directory, "init_lora_weights", init, why)
    resolved = said.model_copy(update={"targets": tuple(target.name for target in targets)})
    replaced = replaced_by(model, content, str(directory))
    return AdapterPlan(resolved, targets, directory if weights.exists() else None, base, parts=parts, replaced=replaced)


def _ranked(target: Target, lora: LoraConfig, name: str) -> Target:
    """Return `target` with the rank, alpha and scaling that `lora` has for `name`."""
    r, alpha = lora.of(name, of_experts=target.experts is not None)
    return replace(target, r=r, alpha=alpha, scaling=lora.scaling_of(r, alpha))


def _parts_in(model: Any, there: Sequence[Target], directory: Path) -> dict[str, list[Part]]:
    """Return, by target name, the published matrices of each target for which the directory's file has adapters.

    Empty unless the file has keys for single experts.
    """
    with open_weight_files(directory, WEIGHTS_FILE) as files:
        keys = set(files.tensors)
    if not any(re.search(r"\.experts\.\d+\.", key) for key in keys):
        return {}
    parts: dict[str, list[Part]] = {}
    for target, _, part in published_parts(model, there):
        if part is not None:
            parts.setdefault(target.name, []).append(part)
    return {name: of_one for name, of_one in parts.items() if any(not keys.isdisjoint(part.keys) for part in of_one)}


def _joined(target: Target, parts: Sequence[Part], lora: LoraConfig, directory: Path) -> Target:
    """Return `target` with the sum of its parts' ranks for one expert, and with their scaling.

    Raises:
        InputError: The parts differ in rank or alpha.
    """
    ranks = {lora.of(part.key.removeprefix(PREFIX)) for part in parts}
    if len(ranks) > 1:
        key = "rank_pattern" if len({r for r, _ in ranks}) > 1 else "alpha_pattern"
        why = f"it tells parts of {target.name} apart, which are one weight here; train a plain LoRA adapter"
        refuse_field(directory, key, dict(getattr(lora, key)), why)
    ((r, alpha),) = ranks
    count, scaling = len(parts) // (target.experts or 1), lora.scaling_of(r, alpha)
    # The joined rank may be larger: choose alpha so that the scaling is still that of the parts.
    alpha = scaling / lora.scaling_of(count * r, 1.0)
    return replace(target, r=count * r, alpha=alpha, scaling=scaling)


def _refuse_idle_patterns(lora: LoraConfig, names: Sequence[str]) -> None:
    """Raise `InputError` for a pattern of ranks or alphas that matches no target."""
    for key, patterns in (("rank_pattern", lora.rank_pattern), ("alpha_pattern", lora.alpha_pattern)):
        for pattern in patterns:
            if not any(is_named(name, pattern) for name in names):
                raise InputError(
                    f"lora.{key}: {pattern} matches no name that gets adapters, as {names[0]}; leave it out",
                    key="lora.pattern-nothing",
                )


def _refuse_idle_expert_r(lora: LoraConfig, targets: Sequence[Target]) -> None:
    """Raise `InputError` if `lora.expert_r` is the rank of no target."""
    names = [name_of(target) for target in targets if target.experts is not None]
    if lora.expert_r is not None and all(any(is_named(name, each) for each in lora.rank_pattern) for name in names):
        why = "lora.rank_pattern says it for all of them" if names else "no routed experts get adapters"
        raise InputError(f"lora.expert_r: is the rank of nothing, as {why}; leave it out", key="lora.pattern-nothing")


def _refuse_left_out(model: nn.Module, lora: LoraConfig, targets: tuple[Target, ...]) -> None:
    """Raise `InputError` if a name in `lora.targets` also matches a module without adapters.

    A vision tower may have modules of the same names as the language model. Groups and patterns are not
    checked.
    """
    if lora.exclude:
        return  # then the user leaves names out deliberately
    names = [name for name in lora.targets if name not in (*GROUPS, ALL_LINEAR) and glob.escape(name) == name]
    _refuse_unknown(model, {"target_modules": names, "target_parameters": names}, targets, "lora.targets")


def _refuse_unknown(model: nn.Module, content: dict[str, Any], targets: tuple[Target, ...], where: Path | str) -> None:
    """Raise `InputError` if PEFT would adapt something that is not a target: training would silently leave it out."""
    known = {target.name for target in targets} | {target.weight for target in targets}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding | nn.Conv1d) and name not in known:
            probe = Target(name, None, 0, 0, None, "")
            if config_selects(content, probe):
                raise unadaptable(where, f"{name} ({type(module).__name__})")
    for name, _ in model.named_parameters():
        probe = Target(name.rpartition(".")[0], name.rpartition(".")[2], 0, 0, None, "")
        if name not in known and config_selects(content, probe):
            raise unadaptable(where, f"the parameter {name}")


def unadaptable(where: Path | str, target: str) -> InputError:
    return InputError(
        f"{where}: {target} cannot be adapted here; leave it out of the adapter's targets",
        key="adapter.unsupported-target",
    )


def _named_in_files(model: Any, targets: Sequence[Target]) -> tuple[Target, ...]:
    """Return `targets` with the names by which PEFT finds them when it reads a file.

    Raises:
        InputError: PEFT would not find a target by any name.
    """
    rules = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]
    backwards = [rule.reverse_transform() for rule in rules]

    def read(module: str) -> str:
        return rename_source_key(f"{module}.lora_A.weight", rules, [])[0].removesuffix(".lora_A.weight")

    named = []
    for target in targets:
        module = target.module
        if read(module) != module:
            names = (rule.rename_source_key(f"{module}.")[0].removesuffix(".") for rule in backwards)
            found = next((name for name in names if read(name) == module), None)
            if found is None:
                raise InputError(
                    f"lora.targets: {target.name} would be lost when PEFT reads the adapter, as it takes {module} for "
                    f"{read(module)} in this family; leave it out of lora.targets",
                    key="lora.unreadable-by-peft",
                )
            target = replace(target, in_files=found)
        named.append(target)
    return tuple(named)


def _refuse_dropout(plan: AdapterPlan, anatomy: Anatomy) -> None:
    """Raise `InputError` if an adapted module does not get all tokens in order.

    Dropout computes its mask from the number of the token in each row, so that it is the same in every layout.
    """
    if any(target.group == "lm_head" for target in plan.targets):
        raise InputError(
            "lora.dropout: lm_head sees chosen tokens only; set lora.dropout to 0 or leave lm_head out",
            key="lora.dropout-without-token-order",
        )
    odd = [spec.name for spec in anatomy.experts if spec.call != "interface"]
    if odd and any(target.experts is not None for target in plan.targets):
        raise InputError(
            f"lora.dropout: {odd[0]} is not called with the tokens themselves; set lora.dropout to 0",
            key="lora.dropout-without-token-order",
        )


def _refuse_replaced(model: nn.Module, plan: AdapterPlan, where: str) -> None:
    """Raise `InputError` for weights that can be merged, but not trained beside adapters."""
    embedding, head = embedding_target(model).weight, head_of(model)
    of_head = [f"{name}.weight" for name, module in model.named_modules() if module is head]
    ties = {names[0]: names for names in ModelView(model).ties if len(names) > 1}
    for weight, each in plan.replaced.items():
        key = "modules_to_save" if each.rows is None else "trainable_token_indices"
        if weight in ties:
            refuse_field(where, key, weight, f"{' and '.join(ties[weight])} are one weight; only untied ones train")
        if weight not in (embedding, *(of_head if each.rows is None else ())):
            refuse_field(where, key, weight, "here only the input embedding, or the whole head, trains beside adapters")


def refuse_untrained_head(model: nn.Module, content: Mapping[str, Any], where: str) -> None:
    """Raise `InputError` for a classifier whose head PEFT does not train: it would stay as it was drawn."""
    saved = content.get("modules_to_save") or ()
    if is_classifier(model) and not any("score".endswith(entry) for entry in saved):
        raise InputError(
            f"{where}: modules_to_save is {list(saved)}, without score, the head of this classifier, which trains; add "
            "it",
            key="lora.on-classifier",
        )


def replaced_by(model: nn.Module, content: Mapping[str, Any], where: str) -> dict[str, Replaced]:
    """Return what an adapter_config.json replaces of `model`, by the name of the weight; of a classifier also its head.

    Args:
        where: For messages.

    Raises:
        InputError: Rows that the weight does not have, or a tied weight that PEFT would untie.
    """
    view, modules = ModelView(model), [name for name, _ in model.named_modules()]
    found = {name: Replaced(PREFIX + name, None, tuple(view.tensors[name].shape)) for name in classifier_head(view)}
    for entry in content.get("modules_to_save") or ():
        if is_classifier(model) and entry in HEADS_OF_CLASSIFIERS:
            continue
        inside = tuple(f"{module}." for module in modules if module.endswith(entry))
        of_entry = {name: tuple(tensor.shape) for name, tensor in view.tensors.items() if name.startswith(inside)}
        if not of_entry:
            why = "no sequence classifier" if entry in HEADS_OF_CLASSIFIERS else "without a module of this name"
            refuse_field(where, "modules_to_save", entry, f"the model is {why}")
        found |= {name: Replaced(PREFIX + name, None, shape) for name, shape in of_entry.items()}
    for entry, rows in _token_rows(model, content):
        ends = [name for name in modules if name.endswith(entry) and f"{name}.weight" in view.tensors]
        if not ends:
            refuse_field(where, "trainable_token_indices", entry, "no embedding here has this name")
        for module in ends:
            count, *others = view.tensors[f"{module}.weight"].shape
            if f"{module}.weight" in found:
                refuse_field(where, "trainable_token_indices", entry, "modules_to_save trains all of it; leave one out")
            if not all(row < count for row in rows):
                refuse_field(where, "trainable_token_indices", max(rows), f"{module} has {count:,} rows")
            key = f"{PREFIX}{module}.token_adapter.trainable_tokens_delta"
            found[f"{module}.weight"] = Replaced(key, rows, (len(rows), *others))
    embedding = embedding_target(model).weight
    for names in view.ties:
        of_tie = [name for name in names if name in found] if len(names) > 1 else []
        whole = any(found[name].rows is None for name in of_tie)
        # PEFT ties the rows of an input embedding, and nothing else.
        if whole or len(of_tie) > 1 or (of_tie and of_tie[0] != embedding):
            key = "modules_to_save" if whole else "trainable_token_indices"
            refuse_field(where, key, content[key], f"{' and '.join(names)} are one weight, which it parts")
        for name in of_tie:
            found[names[0]] = found.pop(name)
    return found


def _biases(model: nn.Module, plan: AdapterPlan, where: str) -> Iterator[tuple[str, Replaced]]:
    """Yield, by the name of the bias, what `lora_bias` adds to the bias of each target.

    Raises:
        InputError: A target is a parameter, for which PEFT has none, or a layer without a bias to merge it with.
    """
    for target in plan.targets if plan.lora.lora_bias else ():
        if is_parameter(target):
            refuse_field(where, "lora_bias", True, f"PEFT has it on linear layers alone, not on {target.weight}")
        bias = parameter_slots(model.get_submodule(target.module)).get("bias")
        if bias is None:
            refuse_field(where, "lora_bias", True, f"{target.module} has no bias with which it could be merged")
        key = f"{file_keys(target, plan.targets)[1].removesuffix('.weight')}.bias"
        yield f"{target.module}.bias", Replaced(key, None, tuple(bias.shape), target.scaling)


def _token_rows(model: nn.Module, content: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the ends of modules' names with the rows of their weights that were trained."""
    said = content.get("trainable_token_indices") or {}
    if isinstance(said, list):
        said = {embedding_target(model).module.rpartition(".")[2]: said}
    yield from ((entry, tuple(rows)) for entry, rows in said.items())


def attach_adapters(
    model: nn.Module, targets: Sequence[Target], replaced: Mapping[str, Replaced], lora: LoraConfig, dtype: torch.dtype
) -> None:
    """Freeze `model`, and give every target an adapter and every replaced weight new values, all zeros.

    No communication.

    Args:
        replaced: By the name of the weight, an embedding's or a head's, or of the bias that `lora_bias` adds to.
        dtype: That of masters.
    """
    model.requires_grad_(False)
    state = AdapterState(dropout=lora.dropout)
    for target in targets:
        module = model.get_submodule(target.module)
        device = next(module.parameters()).device
        for leaf, shape in zip(target.leaves, target.shapes, strict=True):
            module.register_parameter(leaf, nn.Parameter(torch.zeros(shape, dtype=dtype, device=device)))
        scaling = {**module_state(module).lora_scaling, target.parameter or "weight": target.scaling}
        attach_to_module(module, lora_state=state, lora_name=target.name, lora_scaling=scaling)
        if target.experts is None:
            mix_in(module, _LinearForward if target.parameter is None else _ParameterForward)
    for weight, each in replaced.items():
        module = model.get_submodule(weight.rpartition(".")[0])
        device = next(module.parameters()).device
        new = nn.Parameter(torch.zeros(each.shape, dtype=dtype, device=device))
        module.register_parameter(new_values_of(weight).rpartition(".")[2], new)
        if each.scaling is not None:
            continue  # the forward of the layer's adapter adds it
        rows = None if each.rows is None else torch.tensor(each.rows)
        attach_to_module(module, lora_state=state, lora_name=weight, lora_rows=rows)
        mix_in(module, _ReplacedForward)
    model.register_forward_pre_hook(_take_row_numbers, with_kwargs=True)
    model.register_forward_hook(_forget_row_numbers, always_call=True)


def _take_row_numbers(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Take `row_numbers` `[B]` out of the arguments of the model's forward, and number its rows by them.

    For a user who calls the model without the training loop, which calls `number_rows` itself.
    """
    if "row_numbers" not in kwargs:
        return None
    row_numbers_B = kwargs.pop("row_numbers")
    ids_BS = args[0] if args else kwargs.get("input_ids")
    length = (kwargs["inputs_embeds"] if ids_BS is None else ids_BS).shape[1]
    number_rows(model, row_numbers_B, length, lambda number_BS: number_BS)
    return args, kwargs


def _forget_row_numbers(model: nn.Module, args: Any, output: Any) -> None:
    """Forget the numbers after a forward, failed ones too: the next without numbers raises, and repeats no masks."""
    if (state := adapter_state(model)) is not None:
        state.token_number_T = None


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Let `model` compute bit for bit as its frozen base does while the block runs: the reference of DPO, for example.

        with em.adapters_off(model), torch.no_grad():
            reference = model(**batch).logits

    Every rank enters and leaves it around the same forwards; a backward of one of them belongs inside as well. Values
    and gradients of the adapters stay as they are. No communication.

    Raises:
        InputError: The model has no adapters.
    """
    state = adapter_state(model)
    if state is None:
        raise no_adapters(model, "take a second model")
    before = state.is_off
    state.is_off = True
    try:
        yield
    finally:
        state.is_off = before


def no_adapters(model: nn.Module, otherwise: str) -> InputError:
    """Return the error for a model without adapters where some are needed. `otherwise`: what else one can do."""
    return InputError(
        f"{type(model).__name__} has no adapters; load it with lora, or {otherwise}", key="model.no-adapters"
    )


class _LinearForward(nn.Module):
    """A forward that is mixed in before `nn.Linear`: adds the adapter's two products."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(x)
        state, module = running_adapters_of(self), module_state(self)
        if state is None:
            return out
        assert module is not None
        # Where tp splits the layer these are this rank's parts, and plain tensors for the time of the call.
        a_rK, b_Nr = (parameter_slots(self)[leaf].to(x.dtype) for leaf in ("lora_A", "lora_B"))
        bias_N = parameter_slots(self).get("bias_lora_W")
        kept = state.dropped(x, module.lora_name, module.first_column) if self.training else x
        added = F.linear(F.linear(kept, a_rK), b_Nr, None if bias_N is None else bias_N.to(x.dtype))
        return torch.add(out, added, alpha=module.lora_scaling["weight"])


class _ReplacedForward(nn.Module):
    """A forward that is mixed in before an embedding or a head: uses new values of its weight, or of rows of it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        slots = parameter_slots(self)
        weight_VH, new_VH = slots["weight"], slots["weight_lora_W"]
        if running_adapters_of(self) is None:
            return super().forward(*args, **kwargs)
        assert weight_VH is not None
        assert new_VH is not None
        values: Any = new_VH.to(weight_VH.dtype)
        if (rows := module_state(self).lora_rows) is not None:
            values = weight_VH.index_copy(0, rows.to(weight_VH.device), values)
        with exchanged(slots, {"weight": values}):
            return super().forward(*args, **kwargs)


class _ParameterForward(nn.Module):
    """A forward that is mixed in before a module with a small 2-D weight (a router): uses the adapted weight."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state, weight_NK = running_adapters_of(self), parameter_slots(self)["weight"]
        if state is None:
            return super().forward(*args, **kwargs)
        assert weight_NK is not None
        a_rK, b_Nr = (self.get_parameter(f"weight_lora_{which}") for which in "AB")
        if self.training and state.dropout:
            with _DroppedProduct(module_state(self), state, a_rK, b_Nr) as product:
                out = super().forward(*args, **kwargs)
            product.refuse_missing()
            return out
        dtype, scaling = weight_NK.dtype, module_state(self).lora_scaling["weight"]
        adapted: Any = torch.add(weight_NK, b_Nr.to(dtype) @ a_rK.to(dtype), alpha=scaling)
        with exchanged(parameter_slots(self), {"weight": adapted}):
            return super().forward(*args, **kwargs)


class _DroppedProduct(TorchFunctionMode):
    """Adds what an adapter with dropout adds to the product of a router's input and weight; no weight could hold it."""

    def __init__(self, module: ModuleState, state: AdapterState, a_rK: torch.Tensor, b_Nr: torch.Tensor) -> None:
        super().__init__()
        self._module, self._state, self._a_rK, self._b_Nr = module, state, a_rK, b_Nr
        self._seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not F.linear or args[1].shape != (self._b_Nr.shape[0], self._a_rK.shape[1]):
            return out
        self._seen = True
        x = args[0]
        low = F.linear(self._state.dropped(x, self._module.lora_name), self._a_rK.to(x.dtype))
        return torch.add(out, F.linear(low, self._b_Nr.to(x.dtype)), alpha=self._module.lora_scaling["weight"])

    def refuse_missing(self) -> None:
        """Raise `InputError` unless the product was seen."""
        if not self._seen:
            raise InputError(
                f"lora.dropout: {self._module.lora_name} is multiplied in a way of its own here; set lora.dropout to 0 "
                "or leave routers out",
                key="lora.dropout-without-token-order",
            )
