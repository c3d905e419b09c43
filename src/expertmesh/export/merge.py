"""Merges an adapter into its base: from two directories to a plain Hugging Face one, on one process, without a GPU.

For `expertmesh merge`. The base streams by in blocks, so that it may be larger than memory; what is written has the
base's own file layout. The base is compared with the one that the adapter was trained on before anything is written,
and samples of what was written are compared with the two directories afterwards. Never runs the model.
"""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from expertmesh.adapters.peft_format import WEIGHTS_FILE
from expertmesh.adapters.plan import AdapterPlan, plan_adapters
from expertmesh.config import LoraConfig
from expertmesh.config.errors import InputError
from expertmesh.export.deltas import Deltas, MergedValues
from expertmesh.export.merge_base import base_model, check_base, companions, take_layout, trained_base
from expertmesh.export.merge_check import Compared, check_adapter_copies, check_copies, compare_sample
from expertmesh.io.directory import check_target
from expertmesh.io.safetensors_reader import open_weight_files
from expertmesh.state.model_view import ModelView
from expertmesh.weights.mapping import plan_load
from expertmesh.weights.save import SavedDtype, SaveReport, save_values

_DTYPES = ("auto", "bfloat16", "float16", "float32", "as_loaded")


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
    """Write base + adapter to `target`, which must not exist or be empty. `adapter` is a directory of PEFT.

    `base` is a hub id or directory (None: what the adapter's config says), `dtype` that of `save_model` ("auto": those
    of the base's files, bfloat16 where they are quantised; "as_loaded": the codes of a quantised base). Raises, with
    nothing left behind: `InputError` (what cannot be merged, no such base, target not empty, disk full),
    `SecurityError` (pickles), `IntegrityError` (damaged, keys missing, another base than the adapter was trained on,
    values that `dtype` cannot hold).
    """
    started = time.monotonic()
    if isinstance(dtype, str) and dtype not in _DTYPES:
        raise InputError(
            f"merge: {dtype!r} is none of {', '.join(_DTYPES)}; convert a plain result", key="config.wrong-value"
        )
    check_target(target)
    model, directory = base_model(adapter, base, trust_remote_code)
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
        load, frozen = trained_base(adapter, model, load)
        checked = check_base(adapter, model, load, files, trust_remote_code)
        saved = save_values(
            view,
            target,
            MergedValues(view.unique, load, files, deltas),
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
