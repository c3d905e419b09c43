"""Make and read the sidecar files of a checkpoint: config, tokenizer, code, and the layout of the source weights files.

They stand beside tensors and state, so that a checkpoint can be exported without the model that training started from.
Nothing here communicates.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.core_model_loading import WeightTransform

from expertmesh.adapters.base import base_of, check_base, read_base
from expertmesh.adapters.peft_format import BASE_FILE
from expertmesh.adapters.plan import plan_of
from expertmesh.adapters.save import small_files
from expertmesh.checkpoint.manifest import expecting
from expertmesh.checkpoint.schema import Manifest
from expertmesh.checkpoint.small_files import read_small, read_small_json
from expertmesh.io.safetensors_reader import DTYPES, FileTensor, WeightFiles
from expertmesh.io.safetensors_writer import CODES
from expertmesh.state.model_view import ModelView, Source
from expertmesh.weights.companions import Tokenizer, config_files
from expertmesh.weights.mapping import plan_load, plan_save

LAYOUT_FILE = "layout.json"
HUGGINGFACE = "huggingface"
# In a run with adapters: the directory of PEFT's config and of the hash of the base.
ADAPTER = "adapter"


def companions(model: PreTrainedModel, tokenizer: Tokenizer | None, save_dtype: str = "auto") -> dict[str, bytes]:
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
    if (plan := plan_of(model)) is not None:
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


def check_adapter_base(model: PreTrainedModel, directory: Path, manifest: Manifest) -> None:
    """Raise unless the checkpoint's adapters were trained on the base of `model`; do nothing without adapters."""
    if plan_of(model) is not None:
        base = directory / ADAPTER / BASE_FILE
        check_base(base, read_base(base, read_small(directory, manifest, f"{ADAPTER}/{BASE_FILE}")), base_of(model))


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
