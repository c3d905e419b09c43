"""Merge an adapter into its base: from two directories to a plain Hugging Face one, on one process, without a GPU.

For `expertmesh merge`. The base streams by in blocks, so that it may be larger than memory; what is written has the
base's own file layout. The base is compared with the one that the adapter was trained on before anything is written,
and samples of what was written are compared with the two directories afterwards. Never runs the model.
"""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from expertmesh.adapters.base import read_base
from expertmesh.adapters.peft_config import read_config
from expertmesh.adapters.peft_format import BASE_FILE, CONFIG_FILE, WEIGHTS_FILE
from expertmesh.adapters.plan import AdapterPlan, plan_adapters
from expertmesh.anatomy import describe
from expertmesh.config import LoraConfig
from expertmesh.config.errors import InputError, IntegrityError
from expertmesh.export.deltas import Deltas, FileValues
from expertmesh.export.merge_check import Compared, base_hash, check_adapter_copies, check_copies, compare_sample
from expertmesh.io.directory import check_target
from expertmesh.io.safetensors_reader import INDEX_FILE, WeightFiles, open_weight_files
from expertmesh.parallel.shard_plan import quantised_formats
from expertmesh.state.model_view import ModelView, attach
from expertmesh.weights.companions import TOKENIZER_FILES, CopiedFiles, matching_paths
from expertmesh.weights.load import remember_files
from expertmesh.weights.mapping import LoadPlan, plan_load
from expertmesh.weights.meta_model import (
    DATA_FILES,
    GENERATION_FILE,
    build_meta_model,
    give_dtypes,
    read_generation_config,
    read_model_config,
)
from expertmesh.weights.quantised.resident import kept_plan
from expertmesh.weights.save import SavedDtype, SaveReport, save_values

_DTYPES = ("auto", "bfloat16", "float16", "float32", "as_loaded")
_NOT_COPIED = {"config.json", INDEX_FILE, CONFIG_FILE, BASE_FILE}
_MORE_TEMPLATES = "additional_chat_templates/*.jinja"


@dataclass(frozen=True, slots=True)
class MergeReport:
    """An adapter that was merged into its base."""

    plan: AdapterPlan
    base: Path
    """Directory of the base."""
    base_checked: bool
    """True if the adapter names a hash of its base's weights, which these have."""
    frozen: str | None
    """The format that the experts were quantised to for training, and are merged in; None without."""
    saved: SaveReport
    unused: dict[str, tuple[int, ...]]
    """Experts of an adapted weight whose B is all zero, by the weight's name: nothing was added to them."""
    compared: Compared
    seconds: float


@torch.no_grad()
def merge(
    adapter: Path,
    target: Path,
    *,
    base: str | None = None,
    dtype: SavedDtype = "auto",
    max_shard_bytes: int = 5_000_000_000,
    trust_remote_code: bool = False,
) -> MergeReport:
    """Write base + adapter to `target`, which must not exist or be empty. No communication.

    Args:
        adapter: A directory of PEFT.
        base: A hub id or directory; None for what the adapter's config names.
        dtype: That of `save_model`. "auto" takes those of the base's files, bfloat16 where they are quantised;
            "as_loaded" the codes of a quantised base.

    Raises, with nothing left behind:
        InputError: What cannot be merged, no such base, target not empty, disk full.
        SecurityError: Pickles.
        IntegrityError: Damaged, keys missing, another base than the adapter was trained on, values that `dtype` cannot
            hold.
    """
    started = time.monotonic()
    if isinstance(dtype, str) and dtype not in _DTYPES:
        raise InputError(
            f"merge: {dtype!r} is none of {', '.join(_DTYPES)}; convert a plain result", key="config.wrong-value"
        )
    check_target(target)
    model, directory = _base_model(adapter, base, trust_remote_code)
    plan = plan_adapters(model, LoraConfig(from_adapter=str(adapter)), str(directory), merging=True)
    view = ModelView(model)
    with (
        open_weight_files(directory, view.weights_file) as files,
        open_weight_files(adapter, WEIGHTS_FILE) as factors,
    ):
        load = plan_load(view, files)
        deltas = Deltas(plan, factors)
        check_copies(load, files)
        check_adapter_copies(plan.targets, factors, load, files)
        take_layout(view, load, files)
        load, frozen = _trained_base(adapter, model, load)
        checked = _check_base(adapter, model, load, files, trust_remote_code)
        saved = save_values(
            view,
            target,
            FileValues(view.unique, load, files, deltas),
            tokenizer=companions(directory, adapter, trust_remote_code),
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
        )
        try:
            compared = compare_sample(model, load, deltas, factors, saved.directory)
        except BaseException:
            shutil.rmtree(saved.directory, ignore_errors=True)  # nothing that was not compared stays
            raise
    return MergeReport(plan, directory, checked, frozen, saved, deltas.unused, compared, time.monotonic() - started)


def _base_model(adapter: Path, base: str | None, trust_remote_code: bool) -> tuple[PreTrainedModel, Path]:
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


def _trained_base(adapter: Path, model: PreTrainedModel, load: LoadPlan) -> tuple[LoadPlan, str | None]:
    """Return the values that the adapter was trained on: those of `load`, with experts rounded to the format in which
    they were frozen, if the adapter names one.
    """
    path = adapter / BASE_FILE
    frozen = read_base(path).frozen if path.exists() else None
    if frozen is not None:
        attach(model, frozen_formats=quantised_formats(model, describe(model), frozen))
    return kept_plan(model, load), frozen


def _check_base(
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
