"""The adapter of a LoRA run's checkpoint as one file: as PEFT has it, or with keys for each expert.

For checkpoint.py.
"""

import json
import time
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel

from expertmesh.adapters.peft_format import BASE_FILE, CONFIG_FILE, WEIGHTS_FILE, file_tensors
from expertmesh.adapters.plan import plan_of
from expertmesh.adapters.save import write_adapter
from expertmesh.checkpoint.companions import ADAPTER
from expertmesh.checkpoint.read import SavedState
from expertmesh.checkpoint.small_files import read_small
from expertmesh.export.per_expert_adapter import per_expert_adapter
from expertmesh.export.stored_model import companion_files
from expertmesh.state.model_view import ModelView
from expertmesh.weights.companions import CopiedFiles
from expertmesh.weights.save import SaveReport
from expertmesh.weights.write import StateReader

AdapterFormat = Literal["peft", "per-expert"]


@torch.no_grad()
def export_adapter(
    state: SavedState,
    model: PreTrainedModel,
    target: Path,
    values: StateReader,
    dtype: torch.dtype | None,
    adapter_format: AdapterFormat,
) -> SaveReport:
    """Write the adapter of a LoRA run: `model` on meta, with its adapters, and `values` to read theirs from `state`."""
    started = time.monotonic()
    directory, plan = target.absolute(), plan_of(model)
    assert plan is not None
    small = {
        name: read_small(state.directory, state.manifest, f"{ADAPTER}/{name}") for name in (CONFIG_FILE, BASE_FILE)
    }
    if adapter_format == "peft":
        files = file_tensors(ModelView(model).adapters, plan.targets)
    else:
        adapter = per_expert_adapter(model, plan)
        files = adapter.tensors
        small[CONFIG_FILE] = adapter.config(json.loads(small[CONFIG_FILE]), plan)
    # Of what is beside a model's weights, what says something of the tokenizer or of generation.
    found = companion_files(state)
    beside = {name: found[name] for name in found if name != "config.json" and not name.endswith(".py")}
    layout, written = write_adapter(directory, files, small, CopiedFiles(beside), values, dtype)
    return SaveReport(
        directory=directory,
        files=(WEIGHTS_FILE,),
        tensors=len(files),
        dtype=dtype or next(lazy.dtype for lazy in files.values()),
        total_bytes=layout.size,
        bytes_written=written,
        seconds=time.monotonic() - started,
        kept=(),
        dropped=(),
    )
