"""What `save_pretrained` writes beside the weights: index, config, generation config, remote code, tokenizer files."""

import shutil
import tempfile
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from expertmesh.io.directory import io_errors
from expertmesh.io.safetensors_writer import FilesLayout, create_index, sync
from expertmesh.weights.mapping import own_class, own_classes


class Tokenizer(Protocol):
    """A tokenizer or processor of transformers."""

    def save_pretrained(self, save_directory: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class CopiedFiles:
    """Files by their path in the new directory, in place of a tokenizer that saves itself; none replaces another."""

    files: Mapping[str, Path]

    def save_pretrained(self, save_directory: str) -> None:
        for name, source in self.files.items():
            path = Path(save_directory) / name
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, path)


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


def config_files(model: PreTrainedModel, tokenizer: Tokenizer | None, dtype: torch.dtype) -> dict[str, bytes]:
    """What `write_config` writes, by path."""
    with io_errors(Path(tempfile.gettempdir()), 0), tempfile.TemporaryDirectory(prefix="expertmesh-") as scratch:
        write_config(model, Path(scratch), tokenizer, dtype)
        paths = [path for path in sorted(Path(scratch).rglob("*")) if path.is_file()]
        return {path.relative_to(scratch).as_posix(): path.read_bytes() for path in paths}


def write_config(
    model: PreTrainedModel,
    directory: Path,
    tokenizer: Tokenizer | None,
    dtype: torch.dtype,
    quantisation: Mapping[str, Any] | None = None,
) -> None:
    """Write config, generation config, a remote-code model's own code, and the tokenizer's files."""
    config = deepcopy(model.config)
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [own_class(model).__name__]
    # They would name another weights file than the one written here, and codes where there are values.
    for name in ("transformers_weights", "quantization_config"):
        if hasattr(config, name):
            delattr(config, name)
    if quantisation is not None:
        config.quantization_config = dict(quantisation)
    if model.is_remote_code():
        with own_classes(model):
            custom_object_save(model, directory, config=config)  # type: ignore[arg-type]
    # `save_pretrained` would validate, and refuse after the training what was accepted before.
    config.to_json_file(directory / "config.json", use_diff=True)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.to_json_file(directory / "generation_config.json")
    if tokenizer is not None:
        tokenizer.save_pretrained(str(directory))
