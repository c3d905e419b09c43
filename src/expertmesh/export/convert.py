"""Writes a model's weights in another dtype, quantised ones as the values that they stand for, without loading it.

For `expertmesh convert`. One process, no GPU; the files stream by in blocks, so that the model may be larger than
memory. Names, the layout in files and what these hold beside the model stay as they are. Never runs the model.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from expertmesh.export.deltas import FileValues
from expertmesh.export.merge import companions, take_layout
from expertmesh.export.merge_check import check_copies
from expertmesh.io.directory import check_target
from expertmesh.io.safetensors_reader import open_weight_files
from expertmesh.state.model_view import ModelView
from expertmesh.weights.mapping import plan_load
from expertmesh.weights.meta_model import build_meta_model, read_model_config
from expertmesh.weights.quantised.published import method_of, quantisation
from expertmesh.weights.save import SavedDtype, SaveReport, save_values


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """A model that was converted."""

    source: Path
    method: str | None
    """Quantisation of the source; None if it is not."""
    source_bytes: int
    """Bytes of its tensors."""
    saved: SaveReport
    seconds: float


@torch.no_grad()
def convert(
    name_or_path: str,
    target: Path,
    *,
    dtype: SavedDtype = "auto",
    max_shard_bytes: int = 5_000_000_000,
    trust_remote_code: bool = False,
) -> ConvertReport:
    """Write the model at `name_or_path`, a hub id or directory, to `target`, which must not exist or be empty.

    No communication.

    Args:
        dtype: That of `save_model`; "auto" keeps those of the files, bfloat16 where they are quantised.

    Raises, with nothing left behind:
        InputError: No such model, target not empty, disk full.
        SecurityError: Pickles.
        IntegrityError: Damaged, scales that do not fit, values that `dtype` cannot hold.
    """
    started = time.monotonic()
    check_target(target)
    config, directory = read_model_config(name_or_path, trust_remote_code=trust_remote_code)
    settings = quantisation(config)
    model = build_meta_model(config, torch.float32, directory=directory, trust_remote_code=trust_remote_code)
    view = ModelView(model)
    with open_weight_files(directory, view.weights_file) as files:
        load = plan_load(view, files)
        check_copies(load, files)
        take_layout(view, load, files)
        saved = save_values(
            view,
            target,
            FileValues(view.unique, load, files),
            tokenizer=companions(directory, directory, trust_remote_code),
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
        )
        method = None if settings is None else method_of(settings)
        return ConvertReport(directory, method, files.total_bytes, saved, time.monotonic() - started)
