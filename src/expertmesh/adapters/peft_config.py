"""Write our adapter_config.json, and interpret others' configs, on disk or in memory, by the rules by which PEFT does.

Every option that a plain LoRA adapter does not have is refused by its name. PEFT is never imported here; its config
only needs `to_dict`, the content that it would write to adapter_config.json.
"""

import glob
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, TypeGuard

from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.pytorch_utils import Conv1D

from expertmesh.adapters.peft_format import (
    CONFIG_FILE,
    TAKEN_FOR_EXPERTS,
    WEIGHTS_FILE,
    is_parameter,
    name_of,
)
from expertmesh.adapters.targets import ALL_LINEAR, GROUPS, Replaced, Target
from expertmesh.anatomy import is_classifier
from expertmesh.compat import class_mapping, conversion_family
from expertmesh.config import LoraConfig
from expertmesh.config.base import pattern_problem
from expertmesh.config.errors import InputError, SecurityError
from expertmesh.config.sections import MAX_ALPHA, MAX_RANK
from expertmesh.introspection.proofs import own_class
from expertmesh.io.reading import read_json, shortened
from expertmesh.state.model_view import ModelView

_PICKLE = "adapter_model.bin"
# All keys that adapter_config.json may set: those that we read, and those that do not change what a plain adapter
# computes. Any other one is refused, so that an option of a future PEFT is not silently ignored.
_KNOWN = (
    "peft_type", "task_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "lora_dropout", "use_rslora",
    "lora_bias", "bias", "init_lora_weights", "target_modules", "target_parameters", "exclude_modules",
    "base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version", "layers_pattern",
    "megatron_core", "qalora_group_size", "ensure_weight_tying", "runtime_config", "loftq_config", "eva_config",
    "corda_config", "lora_ga_config",
)  # fmt: skip
# Keys of values beside low-rank adapters.
_TRAINED_IN_FULL = ("modules_to_save", "trainable_token_indices")
# PEFT's task of sequence classifiers, and the names of heads that it adds to `modules_to_save`, if there or not.
CLASSIFIES, HEADS_OF_CLASSIFIERS = "SEQ_CLS", ("score", "classifier")
# Keys whose values, if not null, have to be a bool or text.
_IS_BOOL = ("use_rslora", "lora_bias", "inference_mode", "ensure_weight_tying")
_IS_TEXT = ("task_type", "bias", "base_model_name_or_path", "revision", "peft_version")
# A branch, a tag or a commit; it becomes part of a path in the hub's cache.
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./+-]{0,199}")
_MAX_NAMES = 100_000
# Initialisations that subtract from the base's weights: such an adapter is wrong on the original base.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# The parameters for which PEFT 0.21 takes former modules of experts and routers (its `_MOE_TARGET_MODULE_MAPPING`), by
# the family whose rules transformers uses for a model's files.
_FORMER = {
    "mixtral": {"gate": "gate.weight", "w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"},
    "qwen2_moe": {
        "gate": "gate.weight",
        "gate_proj": "gate_up_proj",
        "up_proj": "gate_up_proj",
        "down_proj": "down_proj",
    },
}


def config_content(
    model: nn.Module,
    targets: Sequence[Target],
    replaced: Mapping[str, Replaced],
    lora: LoraConfig,
    base: str | None,
    revision: str | None,
) -> dict[str, Any]:
    """Return the content of adapter_config.json.

    Dropout is written as 0 if parameters are adapted, because PEFT has no dropout for those.

    Args:
        base: The name of the base model, and `revision` its revision on the hub.
    """
    modules = [name_of(target) for target in targets if not is_parameter(target)]
    parameters = [name_of(target) for target in targets if is_parameter(target)]
    new = {weight.rpartition(".")[0]: each for weight, each in replaced.items() if each.scaling is None}
    whole = [name for name, each in new.items() if each.rows is None]
    rows = {name: list(each.rows) for name, each in new.items() if each.rows is not None}
    model = ModelView(model).full
    every_module = [name for name, _ in model.named_modules()]
    every_parameter = [name for name, _ in model.named_parameters()]
    task, mapping = _class_to_load(model)
    return {
        "peft_type": "LORA",
        "task_type": task,
        "auto_mapping": mapping,
        "base_model_name_or_path": base,
        "revision": revision,
        "inference_mode": True,
        "r": lora.r,
        "lora_alpha": _number(lora.alpha),
        **patterns_of({name_of(target): (target.r, target.alpha) for target in targets}, lora),
        "lora_dropout": 0.0 if parameters else lora.dropout,
        "use_rslora": lora.use_rslora,
        "init_lora_weights": True if lora.init == "default" else lora.init,
        "lora_bias": lora.lora_bias,
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": _endings(whole, every_module, 1) or None,
        "trainable_token_indices": {_endings([name], every_module, 1)[0]: rows[name] for name in rows} or None,
        "target_modules": _endings(modules, every_module, 1),
        "target_parameters": _endings(parameters, every_parameter, 2) or None,
    }


def _class_to_load(model: nn.Module) -> tuple[str | None, dict[str, str] | None]:
    """Return PEFT's task_type and auto_mapping for the class whose modules have the adapter's names.

    AutoModelForCausalLM loads many vision-language checkpoints as a text-only model with other names; PEFT would load
    none of the adapter into it, with only a warning. Without a task its AutoPeftModel loads the class in auto_mapping.
    """
    kind: Any = own_class(type(model))
    if not kind.__module__.startswith("transformers."):
        return "CAUSAL_LM", None
    if is_classifier(model):
        return CLASSIFIES, None
    config: Any = type(model.config)
    with_vision = config in class_mapping(AutoModelForImageTextToText)
    by_name = class_mapping(AutoModelForCausalLM).get(config, None)
    task = None if with_vision and by_name is not kind else "CAUSAL_LM"
    return task, {"base_model_class": kind.__name__, "parent_library": kind.__module__}


def config_bytes(content: Mapping[str, Any]) -> bytes:
    """Return the bytes of adapter_config.json."""
    return json.dumps(content, indent=2).encode() + b"\n"


def read_config(directory: Path) -> dict[str, Any]:
    """Read adapter_config.json of a PEFT directory.

    Raises:
        InputError: It cannot be read, or sets an option that we cannot compute exactly; names the option.
        SecurityError: The weights are a pickle only.
    """
    path = directory / CONFIG_FILE
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path}: cannot be read as an adapter's config: {error}", key="adapter.unreadable-config"
        ) from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: is not the config of a LoRA adapter", key="adapter.not-lora")
    refuse_content(content, path)
    if (directory / _PICKLE).exists() and not (directory / WEIGHTS_FILE).exists():
        raise SecurityError(
            f"{directory / _PICKLE}: is a pickle, which can run code when read; convert it first", key="adapter.pickle"
        )
    return content


def refuse_content(content: Mapping[str, Any], path: Path | str, *, in_memory: bool = False) -> None:
    """Raise `InputError` for an option that we cannot compute exactly, by its name.

    Args:
        content: The content of an adapter_config.json.
        path: For the message.
        in_memory: It is that of a PeftModel, of which rows of tokens are not taken over.
    """
    if (kind := content.get("peft_type")) != "LORA":
        raise InputError(
            f"{path}: peft_type is {getattr(kind, 'value', kind)}, and only LORA is trained here; give the config of a "
            "plain LoRA adapter",
            key="adapter.not-lora",
        )
    # Zero is set too: `layers_to_transform: 0` means the first layer alone.
    known = (*_KNOWN, *_TRAINED_IN_FULL[: 1 if in_memory else None])
    said = [key for key, value in content.items() if key not in known and (value or type(value) is int)]
    if said or content.get("bias", "none") != "none":
        key = said[0] if said else "bias"
        of_full = "give the base model with lora=, or save it and give lora.from_adapter"
        instead = of_full if key in _TRAINED_IN_FULL else "train a plain LoRA adapter"
        refuse_field(path, key, content[key], f"it is not supported; {instead}")
    init = content.get("init_lora_weights")
    if isinstance(init, str) and init.startswith(_CHANGES_BASE):
        raise InputError(
            f"{path}: init_lora_weights is {init!r}, which changes the base's weights as well; save it with PEFT's "
            "path_initial_model_for_weight_conversion, which makes a plain LoRA adapter of it",
            key="adapter.changes-base",
        )
    for key in ("target_modules", "target_parameters", "exclude_modules", "modules_to_save"):
        listed = [] if content.get(key) is None else content[key]
        text = [listed] if isinstance(listed, str) and key in ("target_modules", "exclude_modules") else listed
        if not isinstance(text, list) or not all(isinstance(name, str) for name in text):
            raise InputError(
                f"{path}: {key} is {shortened(repr(listed))}, not a list of names", key="adapter.invalid-config"
            )
        if len(text) > _MAX_NAMES:
            raise InputError(f"{path}: {key} has {len(text):,} names", key="adapter.invalid-config")
    for key, problem in (*_wrong_values(content), *_wrong_patterns(content)):
        raise InputError(
            f"{path}: {key} is {shortened(repr(content.get(key)))}, {problem}", key="adapter.invalid-config"
        )


def _wrong_values(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) of values that no adapter can have."""
    yield from ((key, "not true or false") for key in _IS_BOOL if type(content.get(key, False)) not in (bool, NoneType))
    yield from ((key, "not text") for key in _IS_TEXT if not isinstance(content.get(key, ""), str | None))
    if not isinstance(content.get("init_lora_weights", True), bool | str | None):
        yield "init_lora_weights", "neither true, false nor a name"
    r, alpha, dropout = content.get("r"), content.get("lora_alpha"), content.get("lora_dropout", 0.0)
    if type(r) is not int or not 0 < r <= MAX_RANK:
        yield "r", f"not a number of 1 to {MAX_RANK:,}"
    if not _is_number(alpha) or not 0 < alpha <= MAX_ALPHA:
        yield "lora_alpha", f"not a number above 0 and of at most {MAX_ALPHA:g}"
    if dropout is not None and (not _is_number(dropout) or not 0 <= dropout < 1):
        yield "lora_dropout", "not a number from 0 to below 1"
    tokens = content.get("trainable_token_indices") or {}
    for rows in tokens.values() if isinstance(tokens, dict) else [tokens]:
        if (
            not isinstance(rows, list)
            or any(type(row) is not int or row < 0 for row in rows)
            or len({*rows}) < len(rows)
        ):
            yield "trainable_token_indices", "not a list of different tokens, or one for each embedding"
    revision = content.get("revision")
    if isinstance(revision, str) and (not _REVISION.fullmatch(revision) or ".." in revision):
        yield "revision", "not a branch, tag or commit"


def _wrong_patterns(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) of invalid patterns, and of invalid values for patterns."""
    for key, most in (("rank_pattern", MAX_RANK), ("alpha_pattern", MAX_ALPHA)):
        patterns = content.get(key) or {}
        if not isinstance(patterns, Mapping):
            yield key, "not a value for each pattern of names"
            continue
        for pattern, value in patterns.items():
            if not _is_number(value) or not 0 < value <= most or (key == "rank_pattern" and type(value) is not int):
                yield key, f"but {shortened(repr(value))} is no number above 0 and of at most {most:,}"
            if (problem := pattern_problem(pattern)) is not None:
                yield key, f"and {problem}"
    for key in ("target_modules", "exclude_modules"):
        pattern = content.get(key)
        if isinstance(pattern, str) and (problem := pattern_problem(pattern)) is not None:
            yield key, f"and {problem}"


def patterns_in(content: Mapping[str, Any]) -> list[str]:
    """Return the regular expressions of an adapter_config.json."""
    whole = [content.get(key) for key in ("target_modules", "exclude_modules")]
    of_values = [pattern for key in ("rank_pattern", "alpha_pattern") for pattern in content.get(key) or {}]
    return list(dict.fromkeys([*(each for each in whole if isinstance(each, str)), *of_values]))


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float)


def _refuse_names(content: Mapping[str, Any], path: Path | str) -> None:
    """Raise `InputError` for module names whose meaning in PEFT depends on the family: patterns, and former experts."""
    modules = content.get("target_modules")
    if isinstance(modules, str):
        raise InputError(
            f"{path}: target_modules is {shortened(repr(modules))}, which PEFT widens in Mixture-of-Experts models; "
            "list the modules' names, or give em.parallelize the PeftModel that get_peft_model makes of it",
            key="adapter.ambiguous-targets",
        )
    for name in modules or ():
        if name.rpartition(".")[2] in TAKEN_FOR_EXPERTS:
            raise InputError(
                f"{path}: target_modules names {name}, which PEFT takes for routed experts or the router in many "
                f"families; name the weights in target_parameters instead, as {name}.weight or mlp.experts.down_proj",
                key="adapter.ambiguous-targets",
            )


def plain_content(peft_config: Any) -> dict[str, Any]:
    """Return the content that a config of PEFT would write to adapter_config.json."""
    content = peft_config.to_dict()
    return {key: sorted(value) if isinstance(value, set | tuple) else value for key, value in content.items()}


def refuse_start(content: Mapping[str, Any], where: str) -> None:
    """Raise `InputError` if PEFT would not train the adapters, or for a task that is none of a model here."""
    if (task := content.get("task_type")) not in (None, "CAUSAL_LM", CLASSIFIES):
        refuse_field(where, "task_type", task, f"models here are CAUSAL_LM or {CLASSIFIES}; leave it out")
    if content.get("inference_mode"):
        refuse_field(where, "inference_mode", True, "its adapters would stay frozen; set it to False")


def refuse_field(where: Path | str, field: str, value: Any, why: str) -> NoReturn:
    """Raise `InputError` for the value of a field."""
    raise InputError(f"{where}: {field} is {shortened(repr(value))}: {why}", key="adapter.unsupported-option")


def as_peft_reads(content: Mapping[str, Any], model: nn.Module, path: Path | str) -> dict[str, Any]:
    """Return an adapter_config.json with its target names resolved for `model` as PEFT resolves them.

    `all-linear` becomes the linear layers except the head. In families in which PEFT takes module names of transformers
    4 for fused experts, gate and up together become `gate_up_proj`, with twice the rank and twice the alpha: the same
    scaling, or √2 times as much with rslora.

    Args:
        path: For messages.

    Raises:
        InputError: The names are ambiguous in this family.
    """
    config: Any = model.config
    family = conversion_family(config.model_type)
    former = _FORMER.get("mixtral" if config.model_type == "mixtral" else str(family), {})
    modules = content.get("target_modules")
    if isinstance(modules, str) and modules.lower() == ALL_LINEAR:
        head = model.get_output_embeddings()  # type: ignore[operator]
        linear = (
            name for name, each in model.named_modules() if isinstance(each, nn.Linear | Conv1D) and each is not head
        )
        modules = sorted({name.rpartition(".")[2] for name in linear} | former.keys()) if former else list(linear)
    elif isinstance(modules, str) and former:
        raise InputError(
            f"{path}: target_modules is the pattern {shortened(repr(modules))}, which PEFT widens in this family; list "
            "the modules' names instead",
            key="adapter.ambiguous-targets",
        )
    if not former or modules is None:
        return {**content, "target_modules": modules if modules is None or isinstance(modules, str) else set(modules)}
    new_names = {each: next((old for old in former if f".{each}".endswith(f".{old}")), None) for each in modules}
    taken = {name for name in new_names.values() if name is not None}
    fused = {old for old, new in former.items() if new == "gate_up_proj"}
    if len(fused & taken) == 1:
        raise InputError(
            f"{path}: target_modules names {min(fused & taken)} without {min(fused - taken)}, which are one parameter "
            "in this model; name both, or neither",
            key="adapter.ambiguous-targets",
        )
    said = {**content, "target_modules": {each for each, name in new_names.items() if name is None}}
    said["target_parameters"] = {*(content.get("target_parameters") or ()), *(former[name] for name in taken)}
    if fused <= taken:
        for key, value in (("rank_pattern", content["r"]), ("alpha_pattern", content["lora_alpha"])):
            said[key] = {**(content.get(key) or {}), r".*\.gate_up_proj": 2 * value}
    return said


def lora_of(content: Mapping[str, Any], **others: Any) -> LoraConfig:
    """Return the settings of an adapter_config.json for all its adapters, with the fields `others`."""
    return LoraConfig(
        r=content["r"],
        alpha=float(content["lora_alpha"]),
        rank_pattern=dict(content.get("rank_pattern") or {}),
        alpha_pattern={key: float(value) for key, value in (content.get("alpha_pattern") or {}).items()},
        use_rslora=bool(content.get("use_rslora")),
        lora_bias=bool(content.get("lora_bias")),
        init="gaussian" if content.get("init_lora_weights") == "gaussian" else "default",
        **others,
    )


def config_selects(content: Mapping[str, Any], target: Target) -> bool:
    """Return whether an adapter_config.json targets `target`, by PEFT's matching rules."""
    modules, parameters = content.get("target_modules") or [], content.get("target_parameters") or []
    if _selected(parameters, [target.weight]):
        return True
    if target.parameter is not None or _is_excluded(content, target.module):
        return False
    if isinstance(modules, str):
        return re.fullmatch(modules, target.module) is not None
    return bool(_selected(modules, [target.module]))


def name_in_config(content: Mapping[str, Any], target: Target) -> str:
    """Return the name of `target` that rank_pattern and alpha_pattern are compared with, in a config that selects it.

    It is the weight's name if target_parameters selects the target, otherwise the module's.
    """
    by_parameter = _selected(content.get("target_parameters") or [], [target.weight])
    return target.weight if by_parameter else target.module


def _is_excluded(content: Mapping[str, Any], module: str) -> bool:
    """Return whether PEFT excludes the module: in modules_to_save, or by exclude_modules, a pattern or endings."""
    if any(f".{name}." in f".{module}." for name in content.get("modules_to_save") or ()):
        return True
    exclude = content.get("exclude_modules") or []
    if isinstance(exclude, str):
        return re.fullmatch(exclude, module) is not None
    return bool(_selected(exclude, [module]))


def patterns_of(
    ranks: Mapping[str, tuple[int, float]], lora: LoraConfig, joined: Mapping[str, int] | None = None
) -> dict[str, dict[str, Any]]:
    """Return rank_pattern and alpha_pattern of an adapter_config.json.

    Args:
        ranks: Rank and alpha by name, as readers compare it with patterns; `#` stands for a dot and any number.
        lora: Its r and alpha are those of names without a pattern.
        joined: By name, the factor by which PEFT takes more than r and alpha where there is no pattern.
    """
    patterns: dict[str, dict[str, Any]] = {}
    for place, (key, default) in enumerate((("rank_pattern", lora.r), ("alpha_pattern", lora.alpha))):
        values = {name: _number(said[place]) for name, said in ranks.items()}
        others = {name: value for name, value in values.items() if value != default * (joined or {}).get(name, 1)}
        patterns[key] = {}
        for value in dict.fromkeys(others.values()):
            ends = _endings([name for name in others if others[name] == value], list(values), 1)
            patterns[key] |= {re.escape(end).replace(r"\#", r"\.\d+"): value for end in ends}
    return patterns


def _number(value: float) -> int | float:
    return int(value) if value == int(value) else value


def _endings(chosen: Sequence[str], every: Sequence[str], least: int) -> list[str]:
    """Return the shortest endings, of `least` components or more, that select `chosen` and nothing else in `every`."""
    wanted = set(chosen)
    endings: dict[str, None] = {}
    for name in chosen:
        endings[next(end for end in _ends_of(name, least) if _selected([end], every) <= wanted)] = None
    return list(endings)


def _ends_of(name: str, least: int) -> Iterator[str]:
    """Yield the endings of a dotted name, shortest first, starting with `least` components."""
    parts = name.split(".")
    yield from (".".join(parts[start:]) for start in range(max(0, len(parts) - least), -1, -1))


def _selected(endings: Collection[str], every: Sequence[str]) -> set[str]:
    """Return the names that equal one of `endings`, or end with a dot and one of them."""
    return {name for name in every if not set(_ends_of(name, 1)).isdisjoint(endings)}


def lora_from_peft(peft_config: Any) -> LoraConfig:
    """Return the `em.LoraConfig` that trains the same adapters as a `peft.LoraConfig`. No communication.

    `target_modules` has to be a list of names; `target_parameters` may name routed experts. r, lora_alpha,
    rank_pattern, alpha_pattern, lora_dropout, exclude_modules, modules_to_save, trainable_token_indices (a list),
    use_rslora, lora_bias and init_lora_weights (True, "gaussian") are taken over. With task_type SEQ_CLS the model has
    to be a classifier, whose head trains.

    Raises:
        InputError: Another field is set (use_dora, bias, ...); names the field.
    """
    if not hasattr(peft_config, "to_dict"):
        raise InputError(
            f"lora_from_peft takes a peft.LoraConfig, not a {type(peft_config).__name__}", key="adapter.not-lora"
        )
    content, where = plain_content(peft_config), "peft_config"
    refuse_content(content, where)
    _refuse_names(content, where)
    refuse_start(content, where)
    init = content.get("init_lora_weights", True)
    if init is not True and init != "gaussian":
        refuse_field(where, "init_lora_weights", init, 'only True and "gaussian" can be started here')
    modules, parameters = content.get("target_modules") or [], content.get("target_parameters") or []
    exclude = content.get("exclude_modules") or []
    if isinstance(exclude, str):
        refuse_field(where, "exclude_modules", exclude, "it is a pattern; list the modules' names")
    if named := [name for name in exclude if any(each.endswith(f"{name}.weight") for each in parameters)]:
        refuse_field(where, "exclude_modules", named, "target_parameters names its weight, which PEFT does not exclude")
    _refuse_patterns_beside(parameters, content, where)
    heads = HEADS_OF_CLASSIFIERS if content.get("task_type") == CLASSIFIES else ()
    tokens = content.get("trainable_token_indices") or ()
    if isinstance(tokens, dict):
        refuse_field(where, "trainable_token_indices", tokens, "only a list, of the input embedding, is taken over")
    if not modules and not parameters:
        refuse_field(
            where, "target_modules", content.get("target_modules"), "PEFT chooses by family then; list the modules"
        )
    return lora_of(
        content,
        dropout=float(content.get("lora_dropout") or 0.0),
        # Modules are named by their weight, so that the name means neither a parameter of the same name nor a group.
        targets=(*(f"{glob.escape(name)}.weight" for name in modules), *(_text(name) for name in parameters)),
        exclude=tuple(f"{glob.escape(name)}.weight" for name in exclude),
        modules_to_save=tuple(dict.fromkeys((*(content.get("modules_to_save") or ()), *heads))),
        trainable_token_indices=tuple(tokens),
    )


def _refuse_patterns_beside(parameters: Sequence[str], content: Mapping[str, Any], where: str) -> None:
    """Raise `InputError` for patterns beside a weight of a linear layer in `target_parameters`.

    PEFT compares them with the weight's name then; here a linear layer has one name, that of its module.
    """
    weights = [name for name in parameters if name.endswith(".weight")]
    linear = [name for name in weights if name.split(".")[-2] not in TAKEN_FOR_EXPERTS]
    for key in ("rank_pattern", "alpha_pattern"):
        if linear and (patterns := content.get(key)):
            why = f"target_parameters has {linear[0]}, which PEFT compares with it by another name than its module"
            refuse_field(where, key, patterns, f"{why}; name the module in target_modules")


def _text(name: str) -> str:
    """Return a selector for a parameter's name in PEFT's config that never means one of our groups."""
    return f"*.{name}" if name in GROUPS else glob.escape(name)
