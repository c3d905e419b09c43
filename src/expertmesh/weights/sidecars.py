"""Write the sidecar files of the weights: config.json, generation_config.json, tokenizer files, a model's own code.

Any program that reads the base model can read the result. Each JSON file starts as a copy of the base's file; only the
keys whose value has changed since the base was read are rewritten, because a newer transformers spells equal values in
another way, and older readers replace a missing key by a default. A tokenizer that equals the base's is copied.
transformers itself writes the files of a model that was made in memory, and of a tokenizer with another vocabulary.
Nothing here reads or writes weights, and nothing communicates.
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

from expertmesh.io.directory import io_errors, sync
from expertmesh.io.reading import MAX_TOKENIZER_BYTES, read_file
from expertmesh.io.safetensors_writer import FilesLayout, create_index
from expertmesh.state.model_view import ModelView
from expertmesh.weights.meta_model import CONFIG_FILE, GENERATION_FILE, class_of, json_files, own_part

_TOKENIZER_CONFIG, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
# The files of all kinds of tokenizers, including the vocabulary files of transformers 4.
TOKENIZER_FILES = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab.*", "merges.txt"),
    *("*.model", "*.model.v*", "*.tiktoken", "tekken.json", "additional_chat_templates/*.jinja"),
)
_PROCESSOR_FILES = ("*processor_config.json",)
# Keys that are not compared between two configs. Dtype, class and quantisation follow separate rules; the others stay
# as in the base, because transformers records there its version and how it was called.
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
    """Files to copy in place of a tokenizer that saves itself."""

    files: Mapping[str, Path | bytes]
    """The source or the content of each file, by its path in the new directory. An existing file is never replaced."""

    def save_pretrained(self, save_directory: str) -> None:
        """Write the files that `save_directory` does not have yet."""
        for name, source in self.files.items():
            path = Path(save_directory) / name
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(source if isinstance(source, bytes) else source.read_bytes())


def write_sidecars(
    view: ModelView,
    directory: Path,
    layout: FilesLayout,
    tokenizer: Tokenizer | None,
    dtype: torch.dtype,
    quantisation: Mapping[str, Any] | None = None,
) -> None:
    """Write everything except the weights, and sync it to disk.

    Args:
        layout: The layout of the weights files; its index is written if it has one.
        dtype: The dtype of the weights that the config will name.
        quantisation: The `quantization_config` of the weights, if they are written as codes.
    """
    with io_errors(directory, layout.size):
        if layout.index is not None:
            create_index(directory, layout.index)
        write_config(view, directory, tokenizer, dtype, quantisation)
        for path in directory.rglob("*"):
            sync(path)
        sync(directory)


def config_files(view: ModelView, tokenizer: Tokenizer | None) -> dict[str, bytes]:
    """Return the files that `write_config` writes for weights in the base's dtype, by path."""
    with io_errors(Path(tempfile.gettempdir()), 0), tempfile.TemporaryDirectory(prefix="expertmesh-") as scratch:
        write_config(view, Path(scratch), tokenizer, None)
        return _files_in(Path(scratch))


def write_config(
    view: ModelView,
    directory: Path,
    tokenizer: Tokenizer | None,
    dtype: torch.dtype | None,
    quantisation: Mapping[str, Any] | None = None,
) -> None:
    """Write config, generation config, a remote-code model's own code, and the tokenizer's files.

    Args:
        dtype: The dtype of the weights. None: the base's dtype, or the parameters' dtype for a model without a base.
        quantisation: The `quantization_config` of the weights, if they are written as codes.
    """
    model: PreTrainedModel = view.module
    base, config = _base_of(view), deepcopy(model.config)
    if model.is_remote_code():
        with view.published_classes():
            custom_object_save(model, directory, config=config)  # type: ignore[arg-type]
    if CONFIG_FILE in base:
        (directory / CONFIG_FILE).write_bytes(_config_in_base(view, base[CONFIG_FILE], dtype, quantisation))
    else:
        dtype = dtype or next(each.dtype for each in model.parameters() if each.is_floating_point())
        config.dtype = str(dtype).removeprefix("torch.")
        config.architectures = [view.family.__name__]
        # These keys would name a weights file that is not written here, and codes where the files hold values.
        for name in ("transformers_weights", "quantization_config"):
            if hasattr(config, name):
                delattr(config, name)
        if quantisation is not None:
            config.quantization_config = dict(quantisation)
        # `save_pretrained` would validate the config, and could refuse after training what was accepted before it.
        config.to_json_file(directory / CONFIG_FILE, use_diff=True)
    for name, content in generation_files(view).items():
        (directory / name).write_bytes(content)
    if tokenizer is not None:
        write_tokenizer(tokenizer, directory)


def write_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write `tokenizer` to `directory`: the base's files if it is unchanged, else those that transformers writes."""
    known = isinstance(tokenizer, PreTrainedTokenizerBase | ProcessorMixin)
    (CopiedFiles(tokenizer_files(tokenizer)) if known else tokenizer).save_pretrained(str(directory))


def generation_files(view: ModelView) -> dict[str, bytes]:
    """Return generation_config.json by its name.

    Returns:
        An empty dict if the model cannot generate, or if the base has no such file and config.json yields the same
        values.
    """
    model: PreTrainedModel = view.module
    if not model.can_generate() or model.generation_config is None:
        return {}
    base, now = _base_of(view), model.generation_config
    if GENERATION_FILE in base:
        before = GenerationConfig.from_dict(json.loads(base[GENERATION_FILE]))
        return {GENERATION_FILE: _changed_bytes(base[GENERATION_FILE], _content(before), _content(now))}
    # `from_pretrained` turns some values from None into False, so None and False count as equal here.
    derived, own = (
        {key: value for key, value in _content(each).items() if value is not None and value is not False}
        for each in (GenerationConfig.from_model_config(model.config), now)
    )
    if CONFIG_FILE in base and derived == own:
        return {}
    return {GENERATION_FILE: now.to_json_string(use_diff=True).encode()}


def tokenizer_files(tokenizer: Any, base: Path | None = None) -> dict[str, bytes]:
    """Return the files of a tokenizer or processor of transformers, by path.

    Args:
        base: The directory it was read from. None: the directory that the tokenizer names, if it is on this machine.

    Returns:
        The files of `base`, byte for byte, except a changed chat template or setting. For a tokenizer without a base,
        or with a changed vocabulary or changed rules: the files that transformers writes.
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
        # The new values of changed settings that the base has, and of changed named tokens.
        known = json.loads(files[_TOKENIZER_CONFIG])
        old, new = (json.loads(of[_TOKENIZER_CONFIG]) for of in (before, now))
        for settings in (old, new):
            for key in [key for key in settings if key not in known and not key.endswith("_token")]:
                del settings[key]
        files[_TOKENIZER_CONFIG] = _changed_bytes(files[_TOKENIZER_CONFIG], old, new)
    own, wanted = ({name: each for name, each in of.items() if name.endswith(".jinja")} for of in (before, now))
    if own == wanted:
        return files
    return now if wanted.keys() - {_TEMPLATE} else _with_template(files, wanted.get(_TEMPLATE))


def model_files(directory: Path, *, code: bool) -> dict[str, bytes]:
    """Return further files of the base that training on text leaves unchanged, by path.

    These are the processor configs for images and sound and, with `code`, the Python files that config.json may name.
    """
    return _read(matching_paths(directory, [*_PROCESSOR_FILES, *["*.py"] * code]))


def matching_paths(directory: Path, patterns: Iterable[str]) -> dict[str, Path]:
    """Return the files that match one of `patterns`, by their path relative to `directory`."""
    paths = (path for pattern in patterns for path in sorted(directory.glob(pattern)) if path.is_file())
    return {path.relative_to(directory).as_posix(): path for path in paths}


def _base_of(view: ModelView) -> Mapping[str, bytes]:
    """Return config.json and generation_config.json of the model's base.

    Returns:
        The files as they were when the model was built from them, or else as they are now in the directory that the
        config names. An empty mapping for a model that was made in memory.
    """
    base, config = view.attached.base_files, view.module.config
    if base is None:
        directory = _directory_of(config.name_or_path or "", CONFIG_FILE)
        base = {} if directory is None else json_files(directory)
    known = CONFIG_FILE not in base or own_part(json.loads(base[CONFIG_FILE]), config) is not None
    return base if known else {}


def _directory_of(name: str, holding: str) -> Path | None:
    """Return the directory `name`, or the directory of the cached files of the hub repository `name`, or None."""
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    try:
        found = try_to_load_from_cache(name, holding)
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _config_in_base(
    view: ModelView, base: bytes, dtype: torch.dtype | None, quantisation: Mapping[str, Any] | None
) -> bytes:
    """Return the base's config.json with the changed values: see `write_config`."""
    config, whole = view.module.config, json.loads(base)
    own = own_part(whole, config)
    assert own is not None
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".json") as file:
        json.dump(own, file)
        file.flush()
        before = type(config).from_json_file(file.name)  # unlike `from_dict`, it reads numbers that JSON lacks
    content = _changed(own, _content(before), _content(config), config)
    content.pop("transformers_weights", None)  # it would name a weights file that is not written here
    kind = view.family
    published = kind.__name__ in (own.get("architectures") or ()) or kind is class_of(config)
    same_class = published or view.module.is_remote_code()
    if not same_class or own is not whole:
        content["architectures"] = [kind.__name__]
    as_before = content.pop("quantization_config", None) == quantisation
    if quantisation is not None:
        content["quantization_config"] = dict(quantisation)
    if dtype is not None:
        same = as_before and (quantisation is not None or dtype in view.attached.source.dtypes.values())
        _say_dtype(content, type(config), str(dtype).removeprefix("torch."), add=not same)
    return base if content == whole else _json_bytes(content)


def _say_dtype(content: dict[str, Any], kind: type[PreTrainedConfig], dtype: str, *, add: bool) -> None:
    """Set the dtype wherever a config and its nested configs name one, unless they already name `dtype`.

    With `add`, also set it where no config names one.
    """
    inner = (content.get(key) for key in sorted(kind.sub_configs or {}, key=lambda key: "text" not in key))
    levels = [content, *(each for each in inner if isinstance(each, dict))]
    named = [(each, key) for each in levels for key in ("torch_dtype", "dtype") if isinstance(each.get(key), str)]
    if not named and add:
        content["torch_dtype"] = dtype  # every version of transformers reads this key
    elif named and named[0][0][named[0][1]] != dtype:
        for each, key in named:
            each[key] = dtype


def _changed(
    base: Mapping[str, Any], before: Mapping[str, Any], now: Mapping[str, Any], config: Any = None
) -> dict[str, Any]:
    """Return `base` with the new value of every key that differs between `before` and `now`.

    Args:
        config: A config that has several names for some values. The names that `base` uses are set, or all of them if
            it uses none.
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
    """Return all values of a config as JSON has them."""
    content: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return content


def _json_bytes(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"


def _written(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the files that transformers writes for a tokenizer, by path."""
    with tempfile.TemporaryDirectory(prefix="expertmesh-") as scratch:
        tokenizer.save_pretrained(scratch)
        return _files_in(Path(scratch))


def _read(paths: Mapping[str, Path]) -> dict[str, bytes]:
    return {name: read_file(path, MAX_TOKENIZER_BYTES) for name, path in paths.items()}


def _files_in(directory: Path) -> dict[str, bytes]:
    return {name: path.read_bytes() for name, path in matching_paths(directory, ["**/*"]).items()}


def _rules(written: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the parts that make two tokenizers different: the class, and the files without settings.

    Chat templates, and the padding and truncation of the last call, are left out too.
    """
    rules: dict[str, Any] = {name: each for name, each in written.items() if not name.endswith(".jinja")}
    settings = json.loads(rules.pop(_TOKENIZER_CONFIG, b"{}"))
    rules["class"] = settings.get("tokenizer_class")
    if "tokenizer.json" in rules:
        whole = json.loads(rules["tokenizer.json"])
        rules["tokenizer.json"] = {key: each for key, each in whole.items() if key not in ("padding", "truncation")}
    return rules


def _with_template(files: Mapping[str, bytes], template: bytes | None) -> dict[str, bytes]:
    """Return the files with another chat template wherever they have one.

    Several templates that the new one replaces are left out.
    """
    changed = {name: each for name, each in files.items() if not name.startswith("additional_chat_templates/")}
    places = [_TEMPLATE] * (_TEMPLATE in files)
    for name in (_TOKENIZER_CONFIG, "chat_template.json", "processor_config.json"):
        if "chat_template" in (content := json.loads(files.get(name, b"{}"))):
            places.append(name)
            before = {"chat_template": content["chat_template"]}
            text = {} if template is None else {"chat_template": template.decode()}
            changed[name] = _changed_bytes(files[name], before, text)
    if template is None:
        changed.pop(_TEMPLATE, None)
    elif _TEMPLATE in places or _TOKENIZER_CONFIG not in files:
        changed[_TEMPLATE] = template
    elif _TOKENIZER_CONFIG not in places:
        changed[_TOKENIZER_CONFIG] = _changed_bytes(files[_TOKENIZER_CONFIG], {}, {"chat_template": template.decode()})
    return changed
