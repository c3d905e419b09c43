"""The base that an adapter is merged into: its model on meta, whether it is the right one, small files.

For merge.py. Holds a block of the base's weights at a time; nothing here communicates.
"""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from expertmesh.adapters.base import read_base
from expertmesh.adapters.peft_config import read_config
from expertmesh.adapters.peft_format import BASE_FILE, CONFIG_FILE, WEIGHTS_FILE
from expertmesh.anatomy import describe
from expertmesh.config.errors import InputError, IntegrityError
from expertmesh.export.merge_check import base_hash
from expertmesh.io.safetensors_reader import INDEX_FILE, WeightFiles
from expertmesh.parallel.shard_plan import quantised_formats
from expertmesh.state.model_view import ModelView, attach
from expertmesh.weights.companions import TOKENIZER_FILES, CopiedFiles, matching_paths
from expertmesh.weights.load import remember_files
from expertmesh.weights.mapping import LoadPlan
from expertmesh.weights.meta_model import (
    DATA_FILES,
    GENERATION_FILE,
    build_meta_model,
    give_dtypes,
    read_generation_config,
    read_model_config,
)
from expertmesh.weights.quantised.resident import kept_plan

_NOT_COPIED = {"config.json", INDEX_FILE, CONFIG_FILE, BASE_FILE}
_MORE_TEMPLATES = "additional_chat_templates/*.jinja"


def base_model(adapter: Path, base: str | None, trust_remote_code: bool) -> tuple[PreTrainedModel, Path]:
    """Return the base of an adapter with weights, on meta, and its directory."""
    content = read_config(adapter, merging=True)
    if not (adapter / WEIGHTS_FILE).exists():
        raise InputError(f"{adapter}: has no {WEIGHTS_FILE}", key="adapter.no-weights")
    named = content.get("base_model_name_or_path")
    if base is None and not (isinstance(named, str) and named):
        raise InputError(
            f"{adapter / CONFIG_FILE}: does not say what the base is; give it with --base", key="adapter.unknown-base"
        )
    try:
        config, directory = read_model_config(
            base or str(named),
            revision=content.get("revision") if base is None else None,
            trust_remote_code=trust_remote_code,
        )
    except InputError as error:
        if base is not None:
            raise
        raise InputError(
            f"{error} (the base that {adapter / CONFIG_FILE} names; --base names another)", key=error.key
        ) from error
    model = build_meta_model(config, torch.float32, directory=directory, trust_remote_code=trust_remote_code)
    read_generation_config(model, adapter / GENERATION_FILE)  # where answers end is what the adapter was taught
    return model, directory


def trained_base(adapter: Path, model: PreTrainedModel, load: LoadPlan) -> tuple[LoadPlan, str | None]:
    """Return the values that the adapter was trained on: those of `load`, with experts rounded to the format in which
    they were frozen, if the adapter names one.
    """
    path = adapter / BASE_FILE
    frozen = read_base(path).frozen if path.exists() else None
    if frozen is not None:
        attach(model, frozen_formats=quantised_formats(model, describe(model), frozen))
    return kept_plan(model, load), frozen


def check_base(
    adapter: Path, model: PreTrainedModel, load: LoadPlan, files: WeightFiles, trust_remote_code: bool
) -> bool:
    """Return whether the adapter names the weights it was trained on.

    Raises:
        IntegrityError: They are not those in `files`.
    """
    path = adapter / BASE_FILE
    if not path.exists():
        return False
    trained_on = read_base(path)
    dtype = getattr(torch, trained_on.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise IntegrityError(
            f"{path}: says that the base was {trained_on.dtype}, which is no dtype", key="adapter.damaged"
        )
    as_trained = build_meta_model(model.config, dtype, trust_remote_code=trust_remote_code)
    here = base_hash(ModelView(as_trained).unique, load, files)
    if here != trained_on.sha256:
        raise IntegrityError(
            f"{path}: the adapter was trained on another base (weights {trained_on}) than "
            f"{files.directory} ({here[:12]}); give --base the one it was trained on",
            key="adapter.other-base",
        )
    return True


def take_layout(view: ModelView, load: LoadPlan, files: WeightFiles) -> None:
    """Let a model be saved in the layout of its files, in their dtypes, with what they hold beside it."""
    give_dtypes(view.unique, {name: lazy.dtype for name, lazy in load.tensors.items()})
    remember_files(view, load, files)


def companions(base: Path, adapter: Path, code: bool) -> CopiedFiles:
    """Return the files that belong beside the weights: the base's small files, and the tokenizer that the adapter was
    trained with.
    """
    patterns = [pattern for pattern in DATA_FILES if pattern != "*.safetensors"] + ["*.py"] * code
    found = {path.name: path for pattern in patterns for path in base.glob(pattern)}
    files = {name: path for name, path in found.items() if name not in _NOT_COPIED and not name.endswith(".index.json")}
    return CopiedFiles(files | matching_paths(base, [_MORE_TEMPLATES]) | matching_paths(adapter, TOKENIZER_FILES))
