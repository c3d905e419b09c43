"""What is written beside weights, so that whoever reads the base reads the result: config.json, generation_config.json,
the tokenizer's files, a model's own code.

Each JSON file is the base's own, key by key, in which is changed what has changed since the base was read: a newer
transformers spells the same values otherwise, and older readers take what they do not find for a default. A tokenizer
that is the base's is copied. A model that was made in memory, and a tokenizer of another vocabulary, are written by
transformers. Nothing here reads or writes weights, and nothing communicates.
"""

import json
import tempfile
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.dynamic_module_utils import custom_object_save

from expertmesh.io.directory import io_errors
from expertmesh.io.reading import MAX_TOKENIZER_BYTES, read_file
from expertmesh.io.safetensors_writer import FilesLayout, create_index, sync
from expertmesh.state.sharded_model import sharded
from expertmesh.weights.mapping import own_class, own_classes
from expertmesh.weights.meta_model import CONFIG_FILE, GENERATION_FILE, class_of, family_of, json_files
from expertmesh.weights.source import source_of

_TOKENIZER_CONFIG, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
# The files of tokenizers of every kind, the vocabularies of those of transformers 4 among them.
TOKENIZER_FILES = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab.*", "merges.txt"),
    *("*.model", "*.model.v*", "*.tiktoken", "tekken.json", "additional_chat_templates/*.jinja"),
)
_PROCESSOR_FILES = ("*processor_config.json",)
# What does not follow from a difference between two configs: dtype, class and quantisation are set by their own rules,
# the others stay the base's, whatever transformers notes of its version and of how it was called.
_APART = (
    *("architectures", "auto_map", "dtype", "model_type", "quantization_config", "torch_dtype"),
    *("transformers_version", "transformers_weights", "is_local", "local_files_only"),
)
_ABSENT = object()


class Tokenizer(Protocol):
    """A tokenizer or processor of transformers."""

    def save_pretrained(self, save_directory: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class CopiedFiles:
    """Files in place of a tokenizer that saves itself."""

    files: Mapping[str, Path | bytes]
    """What each is copied from, or its content, by its path in the new directory; none replaces another there."""

    def save_pretrained(self, save_directory: str) -> None:
        for name, source in self.files.items():
            path = Path(save_directory) / name
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(source if isinstance(source, bytes) else source.read_bytes())


def write_companions(
    model: PreTrainedModel,
    directory: Path,
    layout: FilesLayout,
    tokenizer: Tokenizer | None,
    dtype: torch.dtype,
    quantisation: Mapping[str, Any] | None = None,
) -> None:
    """Write everything but the weights, and sync it. The config will say that the weights are in `dtype`, and how they
    are quantised, if they are.
    """
    with io_errors(directory, layout.size):
        if layout.index is not None:
            create_index(directory, layout.index)
        write_config(model, directory, tokenizer, dtype, quantisation)
        for path in directory.rglob("*"):
            sync(path)
        sync(directory)


def config_files(model: PreTrainedModel, tokenizer: Tokenizer | None) -> dict[str, bytes]:
    """What `write_config` writes for weights in the base's dtype, by path."""
    with io_errors(Path(tempfile.gettempdir()), 0), tempfile.TemporaryDirectory(prefix="expertmesh-") as scratch:
        write_config(model, Path(scratch), tokenizer, None)
        return _files_in(Path(scratch))


def write_config(
    model: PreTrainedModel,
    directory: Path,
    tokenizer: Tokenizer | None,
    dtype: torch.dtype | None,
    quantisation: Mapping[str, Any] | None = None,
) -> None:
    """Write config, generation config, a remote-code model's own code, and the tokenizer's files.

    Args:
        dtype: That of the weights; None for the base's, or the parameters' of a model that has no base.
        quantisation: The `quantization_config` of the weights, if they are written as codes.
    """
    base = _base_of(model)
    config = deepcopy(model.config)
    if model.is_remote_code():
        with own_classes(model):
            custom_object_save(model, directory, config=config)  # type: ignore[arg-type]
    if CONFIG_FILE in base:
        (directory / CONFIG_FILE).write_bytes(_config_in_base(model, base[CONFIG_FILE], dtype, quantisation))
    else:
        dtype = dtype or next(each.dtype for each in model.parameters() if each.is_floating_point())
        config.dtype = str(dtype).removeprefix("torch.")
        config.architectures = [own_class(model).__name__]
        # They would name another weights file than the one written here, and codes where there are values.
        for name in ("transformers_weights", "quantization_config"):
            if hasattr(config, name):
                delattr(config, name)
        if quantisation is not None:
            config.quantization_config = dict(quantisation)
        # `save_pretrained` would validate, and refuse after the training what was accepted before.
        config.to_json_file(directory / CONFIG_FILE, use_diff=True)
    for name, content in generation_files(model).items():
        (directory / name).write_bytes(content)
    if tokenizer is not None:
        write_tokenizer(tokenizer, directory)


def write_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write `tokenizer` to `directory`: the files of its base where it is that, or else what transformers writes."""
    known = isinstance(tokenizer, PreTrainedTokenizerBase | ProcessorMixin)
    (CopiedFiles(tokenizer_files(tokenizer)) if known else tokenizer).save_pretrained(str(directory))


def generation_files(model: PreTrainedModel) -> dict[str, bytes]:
    """generation_config.json by its name; nothing where the base has none and config.json says the same."""
    if not model.can_generate() or model.generation_config is None:
        return {}
    base, now = _base_of(model), model.generation_config
    if GENERATION_FILE in base:
        before = GenerationConfig.from_dict(json.loads(base[GENERATION_FILE]))
        return {GENERATION_FILE: _changed_bytes(base[GENERATION_FILE], _content(before), _content(now))}
    # `from_pretrained` makes False of some that are None.
    derived, own = (
        {key: value for key, value in _content(each).items() if value is not None and value is not False}
        for each in (GenerationConfig.from_model_config(model.config), now)
    )
    if CONFIG_FILE in base and derived == own:
        return {}
    return {GENERATION_FILE: now.to_json_string(use_diff=True).encode()}


def tokenizer_files(tokenizer: Any, base: Path | None = None) -> dict[str, bytes]:
    """The files of a tokenizer or processor of transformers, by path.

    Args:
        base: The directory that it was read from; None for the one that it names, if that is here.

    Returns:
        The files of `base`, byte for byte, but for a chat template or a setting that is another now. Of a tokenizer
        without a base, or whose vocabulary or rules have changed, what transformers writes.
    """
    now, reader = _written(tokenizer), AutoProcessor if isinstance(tokenizer, ProcessorMixin) else AutoTokenizer
    base = base or _directory_of(getattr(tokenizer, "tokenizer", tokenizer).name_or_path, _TOKENIZER_CONFIG)
    code = type(tokenizer).__module__.startswith("transformers_modules")
    patterns = [*TOKENIZER_FILES, *_PROCESSOR_FILES * (reader is AutoProcessor), *["*.py"] * code]
    files = {} if base is None else _read(matching_paths(base, patterns))
    if not files.keys() & {_TOKENIZER_CONFIG, "tokenizer.json"}:
        return now
    before = _written(reader.from_pretrained(str(base), trust_remote_code=code))
    if _rules(before) != _rules(now):
        return now
    if _TOKENIZER_CONFIG in files:
        files[_TOKENIZER_CONFIG] = _with_settings(files[_TOKENIZER_CONFIG], before, now)
    own, wanted = ({name: each for name, each in of.items() if name.endswith(".jinja")} for of in (before, now))
    if own == wanted:
        return files
    return now if wanted.keys() - {_TEMPLATE} else _with_template(files, wanted.get(_TEMPLATE))


def model_files(directory: Path, *, code: bool) -> dict[str, bytes]:
    """What the base of a whole model has beside: what is said of images and sound, which training on text leaves alone,
    and with `code` the Python files that config.json may name.
    """
    return _read(matching_paths(directory, [*_PROCESSOR_FILES, *["*.py"] * code]))


def matching_paths(directory: Path, patterns: Iterable[str]) -> dict[str, Path]:
    """The files that fit one of `patterns`, by their path in `directory`."""
    paths = (path for pattern in patterns for path in sorted(directory.glob(pattern)) if path.is_file())
    return {path.relative_to(directory).as_posix(): path for path in paths}


def _base_of(model: PreTrainedModel) -> Mapping[str, bytes]:
    """config.json and generation_config.json of the model's base: as they were when the model was built of them, or as
    they are where the config says that it was read. Nothing of a model that was made in memory.
    """
    base: Mapping[str, bytes] | None = sharded(model).base_files
    if base is None:
        directory = _directory_of(model.config.name_or_path or "", CONFIG_FILE)
        base = {} if directory is None else json_files(directory)
    if CONFIG_FILE in base and _own_part(json.loads(base[CONFIG_FILE]), model.config) is None:
        return {}
    return base


def _directory_of(name: str, holding: str) -> Path | None:
    """The directory `name`, or the cached files of the hub's repository of that name; None where there is neither."""
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    try:
        found = try_to_load_from_cache(name, holding)
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _own_part(base: Any, config: PreTrainedConfig) -> dict[str, Any] | None:
    """The part of a base's config.json that `config` was made of: all of it, or the one of its text model."""
    found = [base, *(each for each in base.values() if isinstance(each, dict))] if isinstance(base, dict) else []
    return next((each for each in found if family_of(each) == config.model_type), None)


def _config_in_base(
    model: PreTrainedModel, base: bytes, dtype: torch.dtype | None, quantisation: Mapping[str, Any] | None
) -> bytes:
    """config.json as the base has it, with what has changed: see `write_config`."""
    config, whole = model.config, json.loads(base)
    own = _own_part(whole, config)
    assert own is not None
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(own, file)
        file.flush()
        before = type(config).from_json_file(file.name)  # which reads numbers that JSON has not, unlike `from_dict`
    content = _changed(own, _content(before), _content(config), config)
    content.pop("transformers_weights", None)  # it would name another weights file than the one written here
    kind = own_class(model)
    same_class = kind.__name__ in (own.get("architectures") or ()) or model.is_remote_code() or kind is class_of(config)
    if not same_class or own is not whole:
        content["architectures"] = [kind.__name__]
    as_before = content.pop("quantization_config", None) == quantisation
    if quantisation is not None:
        content["quantization_config"] = dict(quantisation)
    if dtype is not None:
        same = as_before and (quantisation is not None or dtype in source_of(model).dtypes.values())
        _say_dtype(content, type(config), str(dtype).removeprefix("torch."), add=not same)
    return base if content == whole else _json_bytes(content)


def _say_dtype(content: dict[str, Any], kind: type[PreTrainedConfig], dtype: str, *, add: bool) -> None:
    """Set the dtype wherever a config and the configs in it name one, unless it is the one that is named. Where none is
    named, `add` it.
    """
    inner = (content.get(key) for key in sorted(kind.sub_configs or {}, key=lambda key: "text" not in key))
    levels = [content, *(each for each in inner if isinstance(each, dict))]
    named = [(each, key) for each in levels for key in ("torch_dtype", "dtype") if isinstance(each.get(key), str)]
    if not named and add:
        content["torch_dtype"] = dtype  # which every version reads
    elif named and named[0][0][named[0][1]] != dtype:
        for each, key in named:
            each[key] = dtype


def _changed(
    base: Mapping[str, Any], before: Mapping[str, Any], now: Mapping[str, Any], config: Any = None
) -> dict[str, Any]:
    """`base` with every key that `before` and `now` differ in as it is now. Of a `config`, which has several names for
    some values, under those that `base` uses, or under all.
    """
    content = dict(base)
    for key in dict.fromkeys((*before, *now)):
        old, new = before.get(key, _ABSENT), now.get(key, _ABSENT)
        if old == new or key in _APART or key.startswith("_"):
            continue
        if isinstance(old, dict) and isinstance(new, dict) and isinstance(base.get(key), dict):
            inner = getattr(config, key, None)
            content[key] = _changed(base[key], old, new, inner if isinstance(inner, PreTrainedConfig) else None)
            continue
        names = [key, *(name for name, real in getattr(config, "attribute_map", {}).items() if real == key)]
        for name in [name for name in names if name in base] or names:
            if new is _ABSENT:
                content.pop(name, None)
            else:
                content[name] = new
        if key == "rope_parameters" and key not in base and isinstance(new, dict) and "rope_theta" in new:
            scaling = {name: value for name, value in new.items() if name != "rope_theta"}
            content["rope_theta"] = new["rope_theta"]
            content["rope_scaling"] = None if new.get("rope_type") == "default" else scaling
    return content


def _changed_bytes(base: bytes, before: Mapping[str, Any], now: Mapping[str, Any]) -> bytes:
    whole = json.loads(base)
    content = _changed(whole, before, now)
    return base if content == whole else _json_bytes(content)


def _content(config: PreTrainedConfig | GenerationConfig) -> dict[str, Any]:
    """All values of a config as JSON has them."""
    content: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return content


def _json_bytes(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"


def _written(tokenizer: Tokenizer) -> dict[str, bytes]:
    """What transformers writes of a tokenizer, by path."""
    with tempfile.TemporaryDirectory(prefix="expertmesh-") as scratch:
        tokenizer.save_pretrained(scratch)
        return _files_in(Path(scratch))


def _read(paths: Mapping[str, Path]) -> dict[str, bytes]:
    return {name: read_file(path, MAX_TOKENIZER_BYTES) for name, path in paths.items()}


def _files_in(directory: Path) -> dict[str, bytes]:
    return {name: path.read_bytes() for name, path in matching_paths(directory, ["**/*"]).items()}


def _rules(written: Mapping[str, bytes]) -> dict[str, Any]:
    """What makes a tokenizer another: all but its settings, its templates, and how the last call padded and cut."""
    rules: dict[str, Any] = {name: each for name, each in written.items() if not name.endswith(".jinja")}
    settings = json.loads(rules.pop(_TOKENIZER_CONFIG, b"{}"))
    rules["class"] = settings.get("tokenizer_class")
    if "tokenizer.json" in rules:
        whole = json.loads(rules["tokenizer.json"])
        rules["tokenizer.json"] = {key: each for key, each in whole.items() if key not in ("padding", "truncation")}
    return rules


def _with_settings(base: bytes, before: Mapping[str, bytes], now: Mapping[str, bytes]) -> bytes:
    """tokenizer_config.json with the named tokens, and the settings among its own, that are others now."""
    said = json.loads(base)
    old, new = (
        {key: each for key, each in json.loads(of[_TOKENIZER_CONFIG]).items() if key in said or key.endswith("_token")}
        for of in (before, now)
    )
    return _changed_bytes(base, old, new)


def _with_template(files: Mapping[str, bytes], template: bytes | None) -> dict[str, bytes]:
    """The files with another chat template wherever they have one; with none of several that the other replaces."""
    changed = {name: each for name, each in files.items() if not name.startswith("additional_chat_templates/")}
    places = [_TEMPLATE] * (_TEMPLATE in files)
    for name in (_TOKENIZER_CONFIG, "chat_template.json", "processor_config.json"):
        if "chat_template" in (content := json.loads(files.get(name, b"{}"))):
            places.append(name)
            said = {"chat_template": content["chat_template"]}
            text = {} if template is None else {"chat_template": template.decode()}
            changed[name] = _changed_bytes(files[name], said, text)
    if template is None:
        changed.pop(_TEMPLATE, None)
    elif _TEMPLATE in places or _TOKENIZER_CONFIG not in files:
        changed[_TEMPLATE] = template
    elif _TOKENIZER_CONFIG not in places:
        changed[_TOKENIZER_CONFIG] = _changed_bytes(files[_TOKENIZER_CONFIG], {}, {"chat_template": template.decode()})
    return changed
