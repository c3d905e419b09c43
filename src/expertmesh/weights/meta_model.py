"""Build the model to be filled: on meta, with real values in the buffers that no file holds.

The model equals the one that `from_pretrained` builds: in the requested dtype, tied, with the family's fp32 exceptions,
and with non-persistent buffers (rotary frequencies and the like) computed by the model's own `_init_weights`.
Parameters stay on meta, so that no memory used here grows with the model.

Its config.json is checked first: transformers builds any size, a list of a billion layers or a vocabulary of minus
five. Numbers that no model has are refused with the key that holds them. The meaning of the keys, and the set of keys,
is left to the family.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import meta_device_safe_creation_ops
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from expertmesh.compat import apply_to_tensors, class_mapping, declared, mark_initialised
from expertmesh.config.errors import ExpertmeshError, InputError
from expertmesh.io.hub import MODEL_FILES, OTHER_WEIGHTS, hub_mend, model_at, model_patterns, remote_code
from expertmesh.io.reading import read_file, read_json, shortened
from expertmesh.io.storage import is_url
from expertmesh.state.model_view import attach, tied_names
from expertmesh.weights.first_values import refuse_from_config
from expertmesh.weights.module_list import fuse_lists_of_experts
from expertmesh.weights.quantised.published import quantisation, refuse_other_methods

_MAX_NUMBER = 2**63
# The largest allowed number of each kind, some tens of times that of published models.
_MOST = {
    "layers": 4096,
    "experts": 65_536,
    "heads": 65_536,
    "vocab_size": 2**27,
    "size": 2**24,
    "dim": 2**24,
    "rank": 2**24,
}
_MOST_EXPERTS_IN_ALL = 2**20
_COUNT = re.compile(rf"(?:.*_)?({'|'.join(_MOST)})")
_NEVER_ZERO = {
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts",
    "n_routed_experts",
    "num_local_experts",
    "moe_num_experts",
}
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_top_k", "moe_k")
_KINDS: dict[str, Any] = {"model_type": str, "architectures": list, "text_config": dict, "quantization_config": dict}
_POSITIVE = {"rope_theta", "theta", "rms_norm_eps", "layer_norm_eps", "initializer_range"}
# The limits of a time step in Mamba are infinite on purpose.
_MAY_BE_INFINITE = {"time_step_limit"}
DATA_FILES = MODEL_FILES
CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
# Published configs whose model_type is another name for a family of transformers; the tensor names are those of the
# family too. transformers reads the text_config of Kimi-K2.5 by the same rule. The code that is published with these
# weights is for transformers 4 and never runs.
_OTHER_NAMES = {"kimi_k2": "deepseek_v3"}


def read_model_json(path: Path) -> dict[str, Any]:
    """Return the content of a config.json.

    Raises:
        InputError: It is not a JSON object, or has a number that no model has.
    """
    try:
        content = read_json(path)
    except FileNotFoundError as error:
        raise _invalid(path, "there is no such file; give the directory of a model") from error
    except (OSError, ValueError) as error:
        raise _invalid(path, f"cannot be read as a model's config: {error}") from error
    if not isinstance(content, dict):
        raise _invalid(path, "is not a JSON object")
    if "configuration_files" in content:
        others = "configuration_files names other files, which transformers would read in place of this one"
        raise _invalid(path, f"{others}; remove it, and put the wanted one here")
    for key, kind in _KINDS.items():
        if not isinstance(value := content.get(key), kind | None):
            raise _invalid(path, f"{key} is {shortened(repr(value))}, which has another type; correct it")
    refuse_impossible(content, path)
    return content


def refuse_impossible(content: Mapping[str, Any], path: Path) -> None:
    """Raise `InputError` for the first number in `content` that no model has."""
    for where, problem in _impossible(content, ""):
        raise _invalid(path, f"{shortened(where)} {problem}; correct it")


def _invalid(path: Path, problem: str) -> InputError:
    return InputError(f"{path}: {problem}", key="model.invalid-config")


def blamed(content: Mapping[str, Any], reason: str, prefix: str = "") -> str | None:
    """Find the value of a config.json that an error of transformers is about.

    It is a value that `reason` quotes, or a padding token without an embedding.

    Returns:
        `key is value` as text, or None if the error is about neither.
    """
    for key, value in content.items():
        if isinstance(value, Mapping):
            if (found := blamed(value, reason, f"{prefix}{key}.")) is not None:
                return found
        elif isinstance(value, str) and value and (f"'{value}'" in reason or f'"{value}"' in reason):
            return f"{prefix}{key} is {shortened(repr(value))}"
    pad, size = content.get("pad_token_id"), content.get("vocab_size")
    if "padding_idx" in reason.lower() and isinstance(pad, int) and isinstance(size, int) and pad >= size:
        return f"{prefix}pad_token_id is {pad:,}, but {prefix}vocab_size is {size:,}"
    return None


def _impossible(content: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """Yield (key, problem) for each wrong number, including those of nested configs."""
    for key, value in content.items():
        where = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _impossible(value, f"{where}.")
        elif isinstance(value, list):
            for place, each in enumerate(value):
                if isinstance(each, Mapping):
                    yield from _impossible(each, f"{where}.{place}.")
                elif problem := _number_problem(str(key), each, inside=True):
                    yield where, problem
        elif problem := _number_problem(str(key), value, inside=False):
            yield where, problem
    if content.get("head_dim") == 0 and not content.get("v_head_dim"):  # latent attention uses other keys
        yield f"{prefix}head_dim", "is 0, which must be at least 1"
    counts = [(content[key], key) for key in _EXPERTS if type(content.get(key)) is int]
    if not counts:
        return
    experts, named = min(counts)
    for key in _TOP_K:
        if type(top_k := content.get(key)) is int and not 1 <= top_k <= experts:
            yield f"{prefix}{key}", f"is {top_k:,}, but {prefix}{named} is {experts:,}"
    layers, (experts, named) = content.get("num_hidden_layers"), max(counts)
    if type(layers) is int and layers * experts > _MOST_EXPERTS_IN_ALL:
        problem = f"is {experts:,} in {layers:,} layers, and no model has more than {_MOST_EXPERTS_IN_ALL:,} experts"
        yield f"{prefix}{named}", problem


def _number_problem(key: str, value: Any, *, inside: bool) -> str | None:
    """Return why `value` is not possible for `key`, or None if it is; `inside`: it is an element of a list."""
    if type(value) not in (int, float):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None if key in _MAY_BE_INFINITE else f"is {value}, which is no number to compute with"
    if abs(value) >= _MAX_NUMBER:
        return f"is {shortened(str(value))}, more than any number of a model"
    if key in _POSITIVE and value <= 0:
        return f"is {value}, which must be above 0"
    if inside or not (kind := _COUNT.fullmatch(key)):
        return None
    # Some configs write -1 for "no limit".
    least, most = 1 if key in _NEVER_ZERO else -1, _MOST["vocab_size" if key.endswith("vocab_size") else kind[1]]
    return None if least <= value <= most else f"is {value:,}, which must be from {least} to {most:,}"


def read_model_config(
    name_or_path: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
    *,
    weights: bool = True,
    from_config: bool = False,
) -> tuple[PreTrainedConfig, Path]:
    """Return the config of a local directory, a URL or a hub repository, and the local directory with its files.

    Repositories of the hub and of ModelScope are downloaded into their caches: only safetensors, JSON and tokenizer
    files. A type that is another name for a family of transformers (Kimi-K2's) becomes that family. Every rank may call
    it; ranks of one machine share the cache.

    Args:
        trust_remote_code: Also download Python files, and allow the model's own code to run.
        weights: If False, weights are not downloaded.
        from_config: The model starts from random weights: nothing is downloaded, and a model with weights is refused.

    Raises:
        InputError: Something is missing, unreadable or quantised by an unsupported method, or the model needs its own
            code and `trust_remote_code` is off.
    """
    directory, weights = Path(name_or_path), weights and not from_config
    if is_url(name_or_path):
        directory = model_at(name_or_path, revision, trust_remote_code, weights=weights)
    elif not directory.is_dir():
        directory = _download(name_or_path, revision, trust_remote_code, weights)
    path = directory / CONFIG_FILE
    content = read_model_json(path)
    other_name = content.get("model_type") in _OTHER_NAMES
    if not other_name:
        _refuse_remote_code(path, content, trust_remote_code)
    try:
        if not other_name:
            config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
        else:
            family = family_of(content)
            values = {**content, "model_type": family, "_name_or_path": str(directory)}
            values.pop("auto_map", None)
            config = CONFIG_MAPPING[family].from_dict(values)
    except Exception as error:
        # A family's config class can raise any exception on wrong values.
        cause, reason = blamed(content, str(error)), _one_line(error)
        refused = f"{cause}, which transformers refuses" if cause else "is not a config that transformers understands"
        raise _invalid(path, f"{refused}: {reason}; correct it") from error
    assert isinstance(config, PreTrainedConfig)
    refuse_impossible(config.to_dict(), path)  # now with the family's defaults for values that the file lacks
    refuse_other_methods(quantisation(config), directory)
    if from_config:
        refuse_from_config(config, directory)
    return config, directory


def family_of(content: Mapping[str, Any]) -> str:
    """Return the transformers family that a config.json names, directly or under another name."""
    name = str(content.get("model_type"))
    return _OTHER_NAMES.get(name, name)


def own_part(base: Any, config: PreTrainedConfig) -> dict[str, Any] | None:
    """Return the part of a base's config.json that `config` was made from: all of it, or the part of its text model."""
    found = [base, *(each for each in base.values() if isinstance(each, dict))] if isinstance(base, dict) else []
    return next((each for each in found if family_of(each) == config.model_type), None)


def json_files(directory: Path) -> dict[str, bytes]:
    """Return the bytes of config.json and generation_config.json by name; a missing file is left out."""
    paths = (directory / name for name in (CONFIG_FILE, GENERATION_FILE))
    return {path.name: read_file(path) for path in paths if path.exists()}


def build_meta_model(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    *,
    directory: str | Path | None = None,
    attention: str | None = None,
    trust_remote_code: bool = False,
    fuse: bool = True,
    num_labels: int | None = None,
) -> PreTrainedModel:
    """Build the causal language model of `config` with parameters and persistent buffers on meta.

    Non-persistent buffers are on the CPU and have their values.

    Args:
        dtype: The dtype of floating-point parameters (the master dtype), except those that the family keeps in fp32
            when `dtype` is narrower. Persistent buffers are as `from_pretrained(dtype=dtype)` gives them.
        directory: Source of the generation config, if it has one. The model remembers the content of its JSON files,
            and saving writes it again.
        attention: transformers' `attn_implementation`.
        fuse: Fuse experts that are a list of MLPs.
        num_labels: Build the sequence classifier with so many labels instead.

    Raises:
        InputError: transformers cannot build the model, or it needs remote code and `trust_remote_code` is off.
    """
    _refuse_remote_code(Path(config.name_or_path or "") / "config.json", config.to_dict(), trust_remote_code)
    options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    auto, config = _auto_class(config, num_labels), deepcopy(config)
    if num_labels is not None:
        config.num_labels = num_labels
    try:
        with torch.device("meta"), meta_device_safe_creation_ops():
            model = auto.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code, **options)
    except Exception as error:  # any exception, such as a division by zero or an unknown activation
        path = Path(directory or config.name_or_path or "") / CONFIG_FILE
        written = read_model_json(path) if path.is_file() else {}
        cause = blamed(written, str(error)) or blamed(config.to_dict(), str(error))
        where = f"{path if written else config.model_type}: {'' if cause is None else f'{cause}; '}"
        reason = f"{type(error).__name__}: {_one_line(error)}"
        raise InputError(
            f"{where}transformers cannot build a causal LM of it: {reason}; correct it", key="model.no-causal-lm"
        ) from error
    assert isinstance(model, PreTrainedModel)
    if fuse:
        fuse_lists_of_experts(model)
    state, kept = model.state_dict(keep_vars=True), kept_in_fp32(model, dtype)
    give_dtypes(state, {name: torch.float32 for name in state if kept(name)})
    if dtype.itemsize > 4:  # transformers 5.24 keeps routers in fp32 here as well
        give_dtypes(dict(model.named_parameters()), {name: dtype for name, _ in model.named_parameters()})
    _compute_buffers(model)
    if directory is not None:
        if model.can_generate():
            read_generation_config(model, Path(directory) / GENERATION_FILE)
        attach(model, base_files=json_files(Path(directory)))
    return model


def class_of(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class of the language model that `build_meta_model` builds, or None if transformers has none."""
    found: type[PreTrainedModel] | None = next((class_mapping(auto)[type(config)] for auto in _known(config)), None)
    return found


def labels_of(config: PreTrainedConfig) -> int | None:
    """Return how many labels the files of a sequence classifier have; None if `config` names another class."""
    known: Any = class_mapping(AutoModelForSequenceClassification)
    named = type(config) in known and known[type(config)].__name__ in (config.architectures or ())
    return config.num_labels if named else None


def _auto_class(config: PreTrainedConfig, num_labels: int | None) -> Any:
    """Return the automatic class that builds the model that the files hold, by `architectures`; else prefer text alone.

    A vision-language model that is read as text alone would lose its vision tower when it is saved.

    Raises:
        InputError: transformers has no class for the config.
    """
    if num_labels is not None:
        classifier: Any = AutoModelForSequenceClassification
        if type(config) not in class_mapping(classifier):
            raise InputError(
                f"{config.model_type}: transformers has no sequence classifier of it; leave num_labels out, or take a "
                "family that has one (Qwen3-MoE, Mixtral, gpt-oss, DeepSeek-V3 ...)",
                key="model.no-classifier",
            )
        return classifier
    known = _known(config)
    if not known and not getattr(config, "auto_map", None):
        raise InputError(
            f"{config.model_type}: transformers cannot build a causal LM of it: no class of it is one",
            key="model.no-causal-lm",
        )
    return (known or [AutoModelForCausalLM])[0]


def _known(config: PreTrainedConfig) -> list[Any]:
    """Return the automatic classes that know the config; the one whose class the config names comes first."""
    mappings: Any = (AutoModelForCausalLM, AutoModelForImageTextToText)
    known = [auto for auto in mappings if type(config) in class_mapping(auto)]
    architectures = config.architectures or ()
    return sorted(known, key=lambda auto: class_mapping(auto)[type(config)].__name__ not in architectures)


def materialize(model: nn.Module, device: torch.device | str) -> None:
    """Allocate the tensors on meta, uninitialised, and move the tensors that have values to `device`.

    Only this rank's shards of a sharded model are allocated. Unlike `to_empty`, it preserves the buffers that
    `build_meta_model` computed, and ties.
    """
    tied = [names for names in tied_names(dict(model.state_dict(keep_vars=True))) if len(names) > 1]

    def move(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

    apply_to_tensors(model, move)
    # Moving off meta creates a new parameter for each name of a tied one, so the ties are restored here.
    for first, *others in tied:
        for name in others:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, model.state_dict(keep_vars=True)[first])


def kept_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str], bool]:
    """Return a predicate on tensor names: whether the family keeps the tensor in fp32 when the others are `dtype`."""
    patterns: set[str] = set()
    if dtype in (torch.float16, torch.bfloat16):
        patterns |= set(declared(model, "_keep_in_fp32_modules_strict"))
    if dtype == torch.float16:
        patterns |= set(declared(model, "_keep_in_fp32_modules"))
    compiled = [re.compile(pattern.replace("*", ".*")) for pattern in patterns]
    return lambda name: any(pattern.search(name) for pattern in compiled)


def give_dtypes(tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> None:
    """Change the dtypes of floating-point tensors of a model on meta, in place, to floating-point ones."""
    for name, tensor in tensors.items():
        dtype = dtypes.get(name, tensor.dtype)
        if tensor.is_floating_point() and dtype.is_floating_point:
            # Assigning `data` preserves ties and the identity of the parameter.
            tensor.data = tensor.data.to(dtype)


def _compute_buffers(model: PreTrainedModel) -> None:
    """Let the model initialise its non-persistent buffers, as `from_pretrained` does after loading."""
    # `initialize_weights` passes over marked tensors: parameters and persistent buffers are filled from files.
    for tensor in model.state_dict(keep_vars=True).values():
        mark_initialised(tensor)
    for name, buffer in list(model.named_non_persistent_buffers()):
        parent, _, leaf = name.rpartition(".")
        empty = torch.empty_like(buffer, device="cpu")
        model.get_submodule(parent).register_buffer(leaf, empty, persistent=False)
    model.initialize_weights()


def read_generation_config(model: PreTrainedModel, path: Path) -> None:
    """Give `model` the generation config in `path`, if the file exists. Raises `InputError` if it is invalid."""
    if not path.exists():
        return
    try:
        read_json(path)  # enforces limits on the file, which transformers does not
        model.generation_config = GenerationConfig.from_pretrained(path.parent)
    except ExpertmeshError:
        raise
    except Exception as error:
        raise InputError(
            f"{path}: is not a generation config: {_one_line(error)}", key="model.invalid-generation-config"
        ) from error


def _one_line(error: Exception) -> str:
    return shortened(" ".join(str(error).split()))


def _refuse_remote_code(path: Path, content: dict[str, Any], trust_remote_code: bool) -> None:
    remote = content.get("auto_map") or {}
    if not isinstance(remote, dict):
        raise _invalid(path, "auto_map is not an object of names")
    if remote and content.get("model_type") not in CONFIG_MAPPING and not trust_remote_code:
        code = ", ".join(sorted({str(reference) for reference in remote.values()}))
        raise remote_code(f"{path}: the model brings its own code ({code})")


def _download(name: str, revision: str | None, trust_remote_code: bool, weights: bool) -> Path:
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise InputError(f"model {name}: no such directory; correct the name or the path", key="model.not-found")
    try:
        patterns = model_patterns(trust_remote_code, weights=weights)
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=[OTHER_WEIGHTS])
        )
    except (OSError, ValueError) as error:
        # Every error of the hub's client is an OSError or a ValueError.
        where = f"{name} at revision {revision}" if revision else name
        reason = str(error).splitlines()[0].partition(". ")[0] if str(error) else type(error).__name__
        local = "name a directory that has its files (for plan and inspect a config.json alone is enough)"
        raise InputError(
            f"model {where}: no such directory, and the hub cannot provide it ({reason.removeprefix('Got: ')}); "
            + hub_mend(error, local, "correct the name or the path"),
            key="model.not-found",
        ) from error
