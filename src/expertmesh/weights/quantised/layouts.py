"""The formats that plain weights can be written in: the file tensors of one matrix, and the config's settings.

Names and settings are those that the public tools write: transformers' FP8, OpenAI's MXFP4 for GPT-OSS, and
compressed-tensors for the others. `published` reads all of them.
"""

from pathlib import Path
from typing import Any

import torch

from expertmesh.io.safetensors_reader import FileTensor
from expertmesh.weights.quantised.tensor import QuantisedTensor

_FP8_BLOCK = (128, 128)
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
_FP4 = {"num_bits": 4, "type": "float", "symmetric": True}
# Formats of compressed-tensors: the name that it gives the format, and its settings.
_COMPRESSED: dict[str, tuple[str, dict[str, Any]]] = {
    "int4": ("pack-quantized", _INT4),
    "mxfp4": ("mxfp4-pack-quantized", {**_FP4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {**_FP4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
    ),
}
FORMATS = ("fp8", *sorted(_COMPRESSED))


def multiple_of(form: str) -> int:
    """Return the number that must divide the number of columns."""
    return 1 if form == "fp8" else int(_COMPRESSED[form][1]["group_size"])


def stored_matrix(form: str, name: str, shape: tuple[int, ...]) -> QuantisedTensor:
    """Return the file tensors in which `form` stores the weight `name`.

    Args:
        shape: `[out, in]`, or for GPT-OSS' mxfp4 `[experts, out, in]`.
    """
    *lead, rows, columns = shape

    def part(name: str, dtype: torch.dtype, *shape: int) -> FileTensor:
        return FileTensor(name, dtype, shape, Path(), 0)

    if form == "fp8":
        grid = (-(-rows // _FP8_BLOCK[0]), -(-columns // _FP8_BLOCK[1]))
        scale = part(f"{name}_scale_inv", torch.float32, *grid)
        codes = part(name, torch.float8_e4m3fn, *shape)
        return QuantisedTensor(name, shape, torch.float32, "e4m3", _FP8_BLOCK, codes, scale)
    size = multiple_of(form)
    if not name.endswith(".weight"):
        codes = part(f"{name}_blocks", torch.uint8, *lead, rows, columns // size, size // 2)
        scale = part(f"{name}_scales", torch.uint8, *lead, rows, columns // size)
        return QuantisedTensor(name, shape, torch.float32, "e2m1", (1, size), codes, scale)
    grid = (rows, columns // size)
    if form == "int4":
        return QuantisedTensor(
            name, shape, torch.bfloat16, "int4", (1, size),
            part(f"{name}_packed", torch.int32, rows, columns // 8), part(f"{name}_scale", torch.bfloat16, *grid),
            stored_shape=part(f"{name}_shape", torch.int64, 2),
        )  # fmt: skip
    scale_dtype = torch.uint8 if form == "mxfp4" else torch.float8_e4m3fn
    return QuantisedTensor(
        name, shape, torch.float32, "e2m1", (1, size),
        part(f"{name}_packed", torch.uint8, rows, columns // 2), part(f"{name}_scale", scale_dtype, *grid),
        global_scale=part(f"{name}_global_scale", torch.float32, 1) if form == "nvfp4" else None, global_divides=True,
    )  # fmt: skip


def settings_of(form: str, skipped: list[str], *, stacks: bool) -> dict[str, Any]:
    """Return the `quantization_config` of a format.

    Args:
        skipped: The modules that are not quantised.
        stacks: Experts are stacked in one tensor, as in GPT-OSS.
    """
    if form == "fp8":
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": list(_FP8_BLOCK),
            "modules_to_not_convert": skipped,
        }
    if stacks:
        return {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    name, weights = _COMPRESSED[form]
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "format": name}},
        "ignore": skipped,
    }
