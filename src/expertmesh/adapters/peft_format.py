"""PEFT's adapter files: what each tensor is called there, how it lies there, and what adapter_config.json says.

Routed experts are PEFT's `target_parameters`: A of all experts is one `[E * r, in]` matrix, expert after expert; B is
`[out, r * E]` with the expert index running fastest. Two parameters of one module are nested wrappers, the first of
them innermost. PEFT takes stored experts for `[out, in]` unless their module says that it is transposed; where that is
wrong, A and B change places in its file. Read and written through lazy tensors: nobody needs to know the sharding.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, TypeGuard

from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from expertmesh.adapters.targets import Target
from expertmesh.config import LoraConfig
from expertmesh.config.errors import InputError, IntegrityError, SecurityError
from expertmesh.config.sections import MAX_ALPHA, MAX_RANK
from expertmesh.introspection.known_families import own_class
from expertmesh.io.reading import read_json, shortened
from expertmesh.state.stage_view import full_model
from expertmesh.weights.lazy import LazyTensor
from expertmesh.weights.mapping import StateTensor

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
# Ours, beside PEFT's own: which base the adapter was trained on.
BASE_FILE = "expertmesh.json"
_PICKLE = "adapter_model.bin"
PREFIX = "base_model.model."
# What modules of routed experts and routers were called in transformers 4. In many families PEFT takes a module of such
# a name in `target_modules` for the fused experts or the router, and doubles r (its `_convert_peft_config_moe`).
_TAKEN_FOR_EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "gate")
# All that adapter_config.json may say: what we read, and what changes nothing that a plain adapter computes. Whatever
# else is set there is refused, also what PEFT will only know in future.
_KNOWN = (
    "peft_type",
    "task_type",
    "r",
    "lora_alpha",
    "lora_dropout",
    "use_rslora",
    "bias",
    "init_lora_weights",
    "target_modules",
    "target_parameters",
    "exclude_modules",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "auto_mapping",
    "peft_version",
    "layers_pattern",
    "megatron_core",
    "qalora_group_size",
    "ensure_weight_tying",
    "runtime_config",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
)
# What their values have to be, where they say anything.
_IS_BOOL = ("use_rslora", "inference_mode", "ensure_weight_tying")
_IS_TEXT = ("task_type", "bias", "base_model_name_or_path", "revision", "peft_version")
# A branch, a tag or a commit; it becomes part of a path in the hub's cache.
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./+-]{0,199}")
_MAX_NAMES = 100_000
# Ways to start that take something out of the base: the adapter alone is not all that was learned.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def file_keys(target: Target, targets: Sequence[Target]) -> tuple[str, str]:
    """The names of A and B of `target` in PEFT's file; `targets` are all of the adapter, in module order."""
    nested = [each for each in targets if each.module == target.module and each.parameter is not None]
    outside = len(nested) - 1 - nested.index(target) if target.parameter is not None else 0
    base = f"{PREFIX}{target.module}{'.base_layer' * outside}"
    return f"{base}.lora_A.weight", f"{base}.lora_B.weight"


def file_tensors(state: Mapping[str, Tensor], targets: Sequence[Target]) -> dict[str, LazyTensor]:
    """The tensors of PEFT's file, made of the model's: `state` holds the adapters by name, sharded or not."""
    files: dict[str, LazyTensor] = {}
    for target in targets:
        names = [f"{target.module}.{leaf}" for leaf in target.leaves]
        a, b = (LazyTensor.of(StateTensor(name, state[name])) for name in names)
        key_a, key_b = file_keys(target, targets)
        if target.experts is not None:
            if target.swapped:
                a, b = _lazy(b.transpose(1, 2)), _lazy(a.transpose(1, 2))
            a, b = _lazy(a.flatten(0, 1)), _lazy(b.permute(1, 2, 0).flatten(1, 2))
        files[key_a], files[key_b] = a, b
    return files


def model_tensors_from(
    files: Mapping[str, LazyTensor], targets: Sequence[Target], r: int, directory: Path
) -> dict[str, LazyTensor]:
    """The reverse: the model's adapters by name, made of PEFT's file. Raises `IntegrityError` for what does not fit,
    naming the file in `directory`. Leaves out `base_copies`.
    """
    path = directory / WEIGHTS_FILE
    tensors: dict[str, LazyTensor] = {}
    left = set(files) - set(base_copies(files, targets))
    for target in targets:
        experts, sizes = target.experts or 1, (target.in_features, target.out_features)
        inner, out = reversed(sizes) if target.swapped else sizes
        shapes = ((experts * r, inner), (out, r * experts))
        a, b = (
            _stored(path, files, key, shape, target)
            for key, shape in zip(file_keys(target, targets), shapes, strict=True)
        )
        left -= set(file_keys(target, targets))
        if target.experts is not None:
            a, b = _lazy(a.unflatten(0, (experts, r))), _lazy(b.unflatten(1, (r, experts)).permute(2, 0, 1))
            if target.swapped:
                a, b = _lazy(b.transpose(1, 2)), _lazy(a.transpose(1, 2))
        tensors |= {f"{target.module}.{leaf}": lazy for leaf, lazy in zip(target.leaves, (a, b), strict=True)}
    if left:
        raise IntegrityError(
            f"{path}: holds {min(left)}, which fits no target of the adapter's config",
            key="adapter.differs-from-its-config",
        )
    return tensors


def base_copies(files: Mapping[str, LazyTensor], targets: Sequence[Target]) -> dict[str, str]:
    """Keys of base weights that PEFT put into its file beside a head's adapter, and whose they are in the model."""
    linear = [target.module for target in targets if target.parameter is None]
    copies = {
        f"{PREFIX}{module}.base_layer.{leaf}": f"{module}.{leaf}" for module in linear for leaf in ("weight", "bias")
    }
    return {key: name for key, name in copies.items() if key in files}


def _stored(
    path: Path, files: Mapping[str, LazyTensor], key: str, shape: tuple[int, ...], target: Target
) -> LazyTensor:
    if key not in files:
        raise IntegrityError(
            f"{path}: has no {key}, although the adapter's config targets {target.name}",
            key="adapter.differs-from-its-config",
        )
    if tuple(files[key].shape) != shape:
        raise IntegrityError(
            f"{path}: {key} is {list(files[key].shape)}, not {list(shape)}", key="adapter.differs-from-its-config"
        )
    if not files[key].dtype.is_floating_point:
        raise IntegrityError(f"{path}: {key} is {files[key].dtype}, not numbers", key="adapter.differs-from-its-config")
    return files[key]


def config_content(
    model: nn.Module, targets: Sequence[Target], lora: LoraConfig, base: str | None, revision: str | None
) -> dict[str, Any]:
    """adapter_config.json. Dropout is written as 0 when parameters are adapted: PEFT has none for those."""
    modules = [target.module for target in targets if not is_parameter(target)]
    parameters = [parameter_name(target) for target in targets if is_parameter(target)]
    model = full_model(model)
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
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": 0.0 if parameters else lora.dropout,
        "use_rslora": lora.use_rslora,
        "init_lora_weights": True if lora.init == "default" else lora.init,
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "target_modules": _endings(modules, every_module, 1),
        "target_parameters": _endings(parameters, every_parameter, 2) or None,
    }


def _class_to_load(model: nn.Module) -> tuple[str | None, dict[str, str] | None]:
    """PEFT's task_type and auto_mapping: the class whose modules have the adapter's names.

    AutoModelForCausalLM makes a model of text alone of many vision-language checkpoints, with other names, of which
    PEFT would load nothing but warn. Without a task its AutoPeftModel loads the class that is named.
    """
    kind: Any = own_class(type(model))
    if not kind.__module__.startswith("transformers."):
        return "CAUSAL_LM", None
    config: Any = type(model.config)
    with_vision = config in AutoModelForImageTextToText._model_mapping
    by_name = AutoModelForCausalLM._model_mapping.get(config, None)
    task = None if with_vision and by_name is not kind else "CAUSAL_LM"
    return task, {"base_model_class": kind.__name__, "parent_library": kind.__module__}


def config_bytes(content: Mapping[str, Any]) -> bytes:
    """adapter_config.json as it is written."""
    return json.dumps(content, indent=2).encode() + b"\n"


def read_config(directory: Path) -> dict[str, Any]:
    """adapter_config.json of a PEFT directory. Raises `InputError` for what we cannot train exactly, by name."""
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
    refuse_names(content, path)
    if (directory / _PICKLE).exists() and not (directory / WEIGHTS_FILE).exists():
        raise SecurityError(
            f"{directory / _PICKLE}: is a pickle, which can run code when read; convert it first", key="adapter.pickle"
        )
    return content


def refuse_content(content: Mapping[str, Any], path: Path | str) -> None:
    """Raise `InputError` for what an adapter_config.json (of `path`) says that we cannot train exactly, by name."""
    if content.get("peft_type") != "LORA":
        raise InputError(f"{path}: is not the config of a LoRA adapter", key="adapter.not-lora")
    # Zero is set too: `layers_to_transform: 0` means the first layer alone.
    said = [key for key, value in content.items() if key not in _KNOWN and (value or type(value) is int)]
    if said or content.get("bias", "none") != "none":
        key = said[0] if said else "bias"
        raise InputError(
            f"{path}: {key} is {shortened(repr(content[key]))}, which is not supported; train a plain LoRA adapter",
            key="adapter.unsupported-option",
        )
    init = content.get("init_lora_weights")
    if isinstance(init, str) and init.startswith(_CHANGES_BASE):
        raise InputError(
            f"{path}: init_lora_weights is {init!r}, which changes the base's weights as well; save it with PEFT's "
            "path_initial_model_for_weight_conversion, which makes a plain LoRA adapter of it",
            key="adapter.changes-base",
        )
    for key in ("target_modules", "target_parameters", "exclude_modules"):
        listed = content.get(key) or []
        text = [listed] if isinstance(listed, str) and key != "target_parameters" else listed
        if not isinstance(text, list) or not all(isinstance(name, str) for name in text):
            raise InputError(
                f"{path}: {key} is {shortened(repr(listed))}, not a list of names", key="adapter.invalid-config"
            )
        if len(text) > _MAX_NAMES:
            raise InputError(f"{path}: {key} has {len(text):,} names", key="adapter.invalid-config")
    for key, problem in _wrong_values(content):
        raise InputError(
            f"{path}: {key} is {shortened(repr(content.get(key)))}, {problem}", key="adapter.invalid-config"
        )


def _wrong_values(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, why) of what no adapter can have."""
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
    revision = content.get("revision")
    if isinstance(revision, str) and (not _REVISION.fullmatch(revision) or ".." in revision):
        yield "revision", "not a branch, tag or commit"


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float)


def refuse_names(content: Mapping[str, Any], path: Path | str) -> None:
    """Raise `InputError` for modules' names that mean something else to PEFT from family to family: patterns, and names
    of former experts.
    """
    modules = content.get("target_modules")
    if isinstance(modules, str):
        raise InputError(
            f"{path}: target_modules is the pattern {modules!r}, which PEFT widens in Mixture-of-Experts models; list "
            "the modules' names instead",
            key="adapter.ambiguous-targets",
        )
    for name in modules or ():
        if name.rpartition(".")[2] in _TAKEN_FOR_EXPERTS:
            raise InputError(
                f"{path}: target_modules names {name}, which PEFT takes for routed experts or the router in many "
                f"families; name the weights in target_parameters instead, as {name}.weight or mlp.experts.down_proj",
                key="adapter.ambiguous-targets",
            )


def config_selects(content: Mapping[str, Any], target: Target) -> bool:
    """Whether an adapter_config.json targets `target`, by PEFT's own matching rules."""
    modules, parameters = content.get("target_modules") or [], content.get("target_parameters") or []
    if _selected(parameters, [parameter_name(target)]):
        return True
    if target.parameter is not None or _is_excluded(content, target.module):
        return False
    return bool(_selected(modules, [target.module]))


def _is_excluded(content: Mapping[str, Any], module: str) -> bool:
    """By PEFT's rule: a pattern for whole names, or ends of names. Parameters are never excluded."""
    exclude = content.get("exclude_modules") or []
    if isinstance(exclude, str):
        return re.fullmatch(exclude, module) is not None
    return bool(_selected(exclude, [module]))


def is_parameter(target: Target) -> bool:
    """Whether the config names the target's weight rather than its module.

    Named as parameters, modules that PEFT would take for others (`_TAKEN_FOR_EXPERTS`) are left what they are, with the
    same keys in the file.
    """
    return target.parameter is not None or target.ending in _TAKEN_FOR_EXPERTS


def parameter_name(target: Target) -> str:
    """The name of the weight that is adapted."""
    return target.name if target.parameter is not None else f"{target.module}.weight"


def _lazy(tensor: Tensor) -> LazyTensor:
    assert isinstance(tensor, LazyTensor)
    return tensor


def _endings(chosen: Sequence[str], every: Sequence[str], least: int) -> list[str]:
    """The shortest endings of names, of `least` parts or more, that select `chosen` and nothing else in `every`."""
    wanted = set(chosen)
    endings: dict[str, None] = {}
    for name in chosen:
        endings[next(end for end in _ends_of(name, least) if _selected([end], every) <= wanted)] = None
    return list(endings)


def _ends_of(name: str, least: int) -> Iterator[str]:
    parts = name.split(".")
    yield from (".".join(parts[start:]) for start in range(max(0, len(parts) - least), -1, -1))


def _selected(endings: Sequence[str], every: Sequence[str]) -> set[str]:
    """The names that are one of `endings` or end with it after a dot."""
    return {name for name in every if not set(_ends_of(name, 1)).isdisjoint(endings)}
