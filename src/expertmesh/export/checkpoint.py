"""From a checkpoint to a plain Hugging Face directory: one process, no GPU, no process group, a block at a time.

For `expertmesh export`. The files are, byte for byte, those that `save_model` would have written of the live model, or
`save_adapter` of a LoRA run; what is shared with them (layout, casts, temporary directory, publishing) is their code.
Optimizer files are not read.
"""

from pathlib import Path

from torch import Tensor

from expertmesh.checkpoint.read import check_hashes, open_state
from expertmesh.checkpoint.schema import Manifest
from expertmesh.checkpoint.small_files import read_save_dtype
from expertmesh.checkpoint.state import model_state
from expertmesh.config.errors import InputError
from expertmesh.export.adapter import AdapterFormat, export_adapter
from expertmesh.export.stored_model import companion_files, holds_adapters, stored_model
from expertmesh.io.boxes import Box
from expertmesh.io.directory import check_target
from expertmesh.state.model_view import ModelView
from expertmesh.weights.companions import CopiedFiles
from expertmesh.weights.mapping import StateTensor
from expertmesh.weights.save import SavedDtype, SaveReport, dtype_of, save_values


def export(
    checkpoint: Path,
    target: Path,
    *,
    dtype: SavedDtype = None,
    max_shard_bytes: int = 5_000_000_000,
    trust_remote_code: bool = False,
    adapter_format: AdapterFormat | None = None,
) -> tuple[Manifest, SaveReport]:
    """Write the model of the checkpoint directory `checkpoint` to `target`, which must not exist or be empty.

    Of a LoRA run, that is its adapter in one file, as PEFT has it (None) or with keys for each expert. `dtype` is that
    of `save_model`; None takes the run's `save.dtype`. Adapters are written as trained, unless `dtype` is one. A
    checkpoint of a version that noted neither is written as trained. Raises, before anything is written: `InputError`
    (no such checkpoint, newer format, target not empty, disk too small, remote code without the flag, an
    `adapter_format` of what is no adapter or has no such format), `SecurityError`, `IntegrityError` (damaged); and with
    nothing left behind: disk full, values that `dtype` cannot hold.
    """
    check_target(target)
    with open_state(checkpoint) as state:
        check_hashes(state, optimizer=False)
        if adapter_format is not None and not holds_adapters(state):
            raise InputError(
                f"{checkpoint}: holds a whole model, no adapter; export writes it without --adapter-format",
                key="checkpoint.no-adapter",
            )
        model = stored_model(state, trust_remote_code=trust_remote_code)
        names = {id(tensor): name for name, tensor in model_state(model).items()}

        def values(leaf: StateTensor, box: Box) -> Tensor:
            read = state.read(names[id(leaf.tensor)], box)
            state.check_finite(names[id(leaf.tensor)], box, read)
            return read

        if holds_adapters(state):
            cast = dtype_of(dtype)
            return state.manifest, export_adapter(state, model, target, values, cast, adapter_format or "peft")
        report = save_values(
            ModelView(model),
            target,
            values,
            tokenizer=CopiedFiles(companion_files(state)),
            dtype=dtype or read_save_dtype(state.directory, state.manifest),
            max_shard_bytes=max_shard_bytes,
        )
    return state.manifest, report
