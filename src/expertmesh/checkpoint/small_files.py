"""Write and read the small files of a checkpoint that loading needs: the run's state and its ranks' random generators.

JSON is read completely, compared with the manifest's hash, and parsed before anything is changed; a rank reads only its
row of the generators. Beside them stand copies of the base's files: config, tokenizer, code, and the layout of the
source weights files, so that a checkpoint can be exported without the model that training started from. Content that
does not have the expected form is reported as damage, with the name of the file. Nothing here communicates.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightTransform

from expertmesh.adapters.peft_format import BASE_FILE, CONFIG_FILE
from expertmesh.adapters.save import small_files
from expertmesh.adapters.start import base_of, check_base, check_scaling, read_base
from expertmesh.checkpoint.manifest import MANIFEST, MEND, FileEntry, Manifest, damaged, expecting
from expertmesh.config.errors import InputError, IntegrityError
from expertmesh.io.directory import sync, write_synced
from expertmesh.io.reading import MAX_MANIFEST_BYTES, parse_json, read_file
from expertmesh.io.safetensors_reader import DTYPES, FileTensor, WeightFiles, read_header
from expertmesh.io.safetensors_writer import CODES
from expertmesh.state.model_view import ModelView, Source, sharded
from expertmesh.weights.mapping import plan_load, plan_save
from expertmesh.weights.sidecars import Tokenizer, config_files

LAYOUT_FILE = "layout.json"
HUGGINGFACE = "huggingface"
# In a run with adapters: the directory of PEFT's config and of the hash of the base.
ADAPTER = "adapter"
STATE_FILE = "state.json"
RNG_FILE = "rng/generators.safetensors"


def sidecar_files(model: PreTrainedModel, tokenizer: Tokenizer | None, save_dtype: str = "auto") -> dict[str, bytes]:
    """Return the files that are the same in every checkpoint of a run, by path. No communication.

    Args:
        save_dtype: The run's `save.dtype`, in which the checkpoint is exported.
    """
    view = ModelView(model)
    tensors, source = plan_save(view).items(), view.attached.source
    layout = {
        "tensors": {name: {"dtype": CODES[lazy.dtype], "shape": list(lazy.shape)} for name, lazy in tensors},
        "left_out": [_described(tensor) for tensor in source.unmapped],
        "source_dtypes": {name: CODES[dtype] for name, dtype in source.dtypes.items()},
        "quantization_config": source.quantisation,
        "quantised": [_described(tensor) for tensor in source.packed],
        "bare": source.bare,
        "save_dtype": save_dtype,
    }
    files = {f"{HUGGINGFACE}/{name}": content for name, content in config_files(view, tokenizer).items()}
    if (plan := sharded(model).lora_plan) is not None:
        files |= {f"{ADAPTER}/{name}": content for name, content in small_files(model, plan).items()}
    return {**files, LAYOUT_FILE: json.dumps(layout).encode()}


def read_layout(
    model: PreTrainedModel, directory: Path, manifest: Manifest
) -> tuple[Sequence[WeightTransform], Source]:
    """Read `layout.json`, the layout of the weights files that training started from.

    Args:
        model: A model that the checkpoint fits.

    Returns:
        The conversion rules and the source, as `remember` takes them.

    Raises:
        IntegrityError: The file is damaged.
    """
    with expecting(directory / LAYOUT_FILE, "is not a layout of weights files"):
        layout = read_small_json(directory, manifest, LAYOUT_FILE)
        tensors = {name: _tensor(name, entry, directory / LAYOUT_FILE) for name, entry in layout["tensors"].items()}
        left_out = [_tensor(entry["name"], entry, Path(entry["path"])) for entry in layout["left_out"]]
        dtypes = {name: DTYPES[code] for name, code in layout["source_dtypes"].items()}
        packed = [_tensor(entry["name"], entry, Path(entry["path"])) for entry in layout["quantised"]]
        settings, bare = layout["quantization_config"], bool(layout["bare"])
        source = Source(dtypes, tuple(left_out), settings, tuple(packed), bare)
    return plan_load(ModelView(model), WeightFiles(directory, tensors)).conversions, source


def read_save_dtype(directory: Path, manifest: Manifest) -> str:
    """Return the `save.dtype` of the run that wrote the checkpoint. Raises `IntegrityError`."""
    with expecting(directory / LAYOUT_FILE, "is not a layout of weights files"):
        return str(read_small_json(directory, manifest, LAYOUT_FILE)["save_dtype"])


def check_saved_adapter(model: PreTrainedModel, directory: Path, manifest: Manifest) -> None:
    """Raise unless the checkpoint's adapters belong to the base of `model` and to its scaling, if it has adapters."""
    if (plan := sharded(model).lora_plan) is not None:
        base, config = directory / ADAPTER / BASE_FILE, directory / ADAPTER / CONFIG_FILE
        check_base(base, read_base(base, read_small(directory, manifest, f"{ADAPTER}/{BASE_FILE}")), base_of(model))
        with expecting(config, "is not the config of an adapter"):
            content = read_small_json(directory, manifest, f"{ADAPTER}/{CONFIG_FILE}")
            check_scaling(config, content, model, plan)


def _described(tensor: FileTensor) -> dict[str, Any]:
    """Describe a tensor of the source files for `layout.json`: its dtype, shape, path and offset in bytes."""
    shape, path = list(tensor.shape), str(tensor.path.absolute())
    return {"name": tensor.name, "dtype": CODES[tensor.dtype], "shape": shape, "path": path, "offset": tensor.offset}


def _tensor(name: str, entry: Mapping[str, Any], path: Path) -> FileTensor:
    """Return the tensor that an entry of `layout.json` describes. Raises `ValueError` for an impossible entry."""
    shape, offset = entry["shape"], entry.get("offset", 0)
    if not all(type(number) is int and 0 <= number < 2**63 for number in (*shape, offset)):
        raise ValueError(f"{name[:200]} has a shape or an offset that no tensor has")
    return FileTensor(name, DTYPES[entry["dtype"]], tuple(shape), path, offset)


@dataclass(frozen=True, slots=True)
class StateFile:
    """The content of `state.json`."""

    step: int
    """The optimizer step after which it was saved."""
    state: dict[str, Any]
    """The caller's state, which loading returns."""
    optimizer: str | None
    """The name of the optimizer's class; None if there was none."""


def state_bytes(step: int, state: Mapping[str, Any], optimizer: torch.optim.Optimizer | None) -> bytes:
    """Return the content of `state.json`. Raises `InputError` for a `state` that is not JSON."""
    name = type(optimizer).__name__ if optimizer is not None else None
    try:
        return json.dumps({"step": step, "state": dict(state), "optimizer": name}, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise InputError(
            f"the state to save with step {step} is not JSON: {error}", key="checkpoint.state-not-json"
        ) from error


def read_state_file(directory: Path, manifest: Manifest) -> StateFile:
    """Read a checkpoint's `state.json`. Raises `IntegrityError`."""
    path = directory / STATE_FILE
    with expecting(path, "is not the state of a checkpoint"):
        content = read_small_json(directory, manifest, STATE_FILE)
        found = StateFile(content["step"], dict(content["state"]), content.get("optimizer"))
        if type(found.step) is not int or not isinstance(found.optimizer, str | None):
            raise TypeError("step is no whole number, or optimizer no name")
    if found.step != manifest.step:
        raise damaged(f"{path}: is of step {found.step}, the manifest of step {manifest.step}")
    return found


def rng_state(device: torch.device) -> dict[str, str]:
    """Return the states of this rank's torch generators in base64: `cpu`, and the accelerator's by its device type."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return {name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()}


def set_rng_state(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore this rank's torch generators; ignore the state of another type of device."""
    for name, state in states.items():
        if name == "cpu":
            torch.set_rng_state(state)
        elif name == device.type:
            torch.get_device_module(device).set_rng_state(state, device)


def write_generators(directory: Path, ranks: Sequence[Mapping[str, str]]) -> None:
    """Write and sync `RNG_FILE`: one uint8 tensor for each type of device, with a row for each rank.

    Args:
        ranks: The result of `rng_state` on each rank, in order.
    """
    values = {}
    for kind in ranks[0]:
        states = [base64.b64decode(each[kind], validate=True) for each in ranks]
        values[kind] = torch.stack([torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in states])
    path = directory / RNG_FILE
    path.parent.mkdir(exist_ok=True)
    write_synced(path, save(values, {"format": "pt"}))
    sync(path.parent)


def read_generators(directory: Path, manifest: Manifest, ranks: Iterable[int]) -> list[dict[str, Tensor]]:
    """Read the states of torch's generators of those of `ranks` that the saved job had too.

    Returns:
        One dict for each such rank: uint8 tensors by type of device.

    Raises:
        IntegrityError: The file is damaged.
    """
    path = directory / RNG_FILE
    entry_of(directory, manifest, RNG_FILE)
    header = read_header(path)
    shapes = [(tensor.dtype, len(tensor.shape), tensor.shape[:1]) for tensor in header.values()]
    if "cpu" not in header or set(shapes) != {(torch.uint8, 2, (manifest.world_size,))}:
        raise damaged(f"{path}: does not hold generators of {manifest.world_size} ranks")
    found = []
    with WeightFiles(directory, header) as files:
        for rank in ranks:
            if rank < manifest.world_size:
                states = {kind: torch.empty(tensor.shape[1], dtype=torch.uint8) for kind, tensor in header.items()}
                for kind, state in states.items():
                    files.read(header[kind], ((rank, rank + 1), (0, len(state))), state)
                with expecting(path, "does not hold the states of torch's generators"):
                    torch.Generator().set_state(states["cpu"])  # raises for bytes that are no generator's state
                found.append(states)
    return found


def read_small(directory: Path, manifest: Manifest, name: str) -> bytes:
    """Read a small file. Raises `IntegrityError` if the manifest does not name it, or has another hash for it."""
    entry = entry_of(directory, manifest, name)
    content = read_file(directory / name, MAX_MANIFEST_BYTES)
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise other_content(directory / name)
    return content


def read_small_json(directory: Path, manifest: Manifest, name: str) -> Any:
    """Read the value of a small JSON file. Raises `ValueError` if it is no JSON, and otherwise as `read_small`."""
    return parse_json(read_small(directory, manifest, name))


def entry_of(directory: Path, manifest: Manifest, name: str) -> FileEntry:
    """Return the manifest's entry of a file. Raises `IntegrityError` if there is none."""
    entry = manifest.by_name.get(name)
    if entry is None:
        raise damaged(f"{directory / MANIFEST}: damaged: does not name {name}, which every checkpoint has")
    return entry


def other_content(path: Path) -> IntegrityError:
    return damaged(f"{path}: damaged: its content is not what was written (sha256 differs); {MEND}")
