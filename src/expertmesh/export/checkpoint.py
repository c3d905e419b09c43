"""From a checkpoint to a plain Hugging Face directory: one process, no GPU, no process group, a block at a time.

For `expertmesh export`. The files are, byte for byte, those that `save_model` would have written of the live model, or
`save_adapter` of a LoRA run; what is shared with them (layout, casts, temporary directory, publishing) is their code.
Optimizer files are not read.
"""

import json
import time
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertmesh.adapters.peft_format import BASE_FILE, CONFIG_FILE, WEIGHTS_FILE, config_bytes, file_tensors
from expertmesh.adapters.plan import plan_of
from expertmesh.adapters.save import write_adapter
from expertmesh.checkpoint.interface import ADAPTER
from expertmesh.checkpoint.manifest import Manifest
from expertmesh.checkpoint.read import SavedState, check_hashes, open_state
from expertmesh.checkpoint.small_files import read_small
from expertmesh.checkpoint.state import model_state
from expertmesh.config.errors import InputError
from expertmesh.export.per_expert_adapter import per_expert_adapter
from expertmesh.export.stored_model import StoredTensors, companion_files, holds_adapters, stored_model
from expertmesh.io.boxes import Box
from expertmesh.io.directory import check_target
from expertmesh.weights.companions import CopiedFiles
from expertmesh.weights.mapping import StateTensor, adapter_tensors
from expertmesh.weights.save import SaveReport, save_values
from expertmesh.weights.write import StateReader

AdapterFormat = Literal["peft", "per-expert"]


def export(
    checkpoint: Path,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    trust_remote_code: bool = False,
    adapter_format: AdapterFormat | None = None,
) -> tuple[Manifest, SaveReport]:
    """Write the model of the checkpoint directory `checkpoint` to `target`, which must not exist or be empty.

    Of a LoRA run, that is its adapter in one file, as PEFT has it (None) or with keys for each expert. `dtype` casts
    floating-point tensors (but for what the family keeps in fp32); None writes them as trained. Raises, before anything
    is written: `InputError` (no such checkpoint, newer format, target not empty, disk too small, remote code without
    the flag, an `adapter_format` of what is no adapter or has no such format), `SecurityError`, `IntegrityError`
    (damaged); and with nothing left behind: disk full, values that `dtype` cannot hold.
    """
    check_target(target)
    with open_state(checkpoint) as state:
        check_hashes(state, optimizer=False)
        if adapter_format is not None and not holds_adapters(state):
            raise InputError(f"{checkpoint}: holds a whole model, no adapter; leave --adapter-format out")
        model = stored_model(state, trust_remote_code=trust_remote_code)
        stored = StoredTensors(state)
        names = {id(tensor): name for name, tensor in model_state(model).items()}

        def values(leaf: StateTensor, box: Box) -> Tensor:
            return stored.read(names[id(leaf.tensor)], box)

        if holds_adapters(state):
            return state.manifest, _export_adapter(state, model, target, values, dtype, adapter_format or "peft")
        report = save_values(
            model,
            target,
            values,
            tokenizer=CopiedFiles(companion_files(state)),
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
        )
    return state.manifest, report


@torch.no_grad()
def _export_adapter(
    state: SavedState,
    model: PreTrainedModel,
    target: Path,
    values: StateReader,
    dtype: torch.dtype | None,
    adapter_format: AdapterFormat,
) -> SaveReport:
    started = time.monotonic()
    directory, plan = target.absolute(), plan_of(model)
    assert plan is not None
    small = {
        name: read_small(state.directory, state.manifest, f"{ADAPTER}/{name}") for name in (CONFIG_FILE, BASE_FILE)
    }
    if adapter_format == "peft":
        files = file_tensors(adapter_tensors(model), plan.targets)
    else:
        adapter = per_expert_adapter(model, plan)
        files = adapter.tensors
        small[CONFIG_FILE] = config_bytes(adapter.config(json.loads(small[CONFIG_FILE]), plan))
    layout, written = write_adapter(directory, files, small, CopiedFiles(_tokenizer_files(state)), values, dtype)
    return SaveReport(
        directory=directory,
        files=(WEIGHTS_FILE,),
        tensors=len(files),
        total_bytes=layout.size,
        bytes_written=written,
        seconds=time.monotonic() - started,
        kept=(),
        dropped=(),
    )


def _tokenizer_files(state: SavedState) -> dict[str, Path]:
    """What stands beside the weights of a model, without what is the model's own."""
    own = {"config.json", "generation_config.json"}
    files = companion_files(state)
    return {name: path for name, path in files.items() if name not in own and not name.endswith(".py")}
