"""Sizes of a model's weights for `expertmesh inspect`: on disk, and as a frozen base that stays packed.

From the model on meta and the headers of weight files; never reads a weight.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from torch import nn
from transformers import PreTrainedConfig

from expertmesh.anatomy import describe
from expertmesh.cli.printing import bytes_text
from expertmesh.config.errors import InputError
from expertmesh.io.safetensors_reader import INDEX_FILE, SINGLE_FILE, open_weight_files, read_index
from expertmesh.parallel.groups import quantised_formats
from expertmesh.weights.quantised.published import method_of, plain_dtype, published_tensors, quantisation

# What forward and backward run in by default.
COMPUTE_BYTES = 2


def frozen_rows(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield what `precision.frozen` would hold of the whole base.

    Experts and linear layers are packed, all else is in bfloat16.
    """
    anatomy, sizes = describe(model), {name: parameter.numel() for name, parameter in model.named_parameters()}
    plain = COMPUTE_BYTES * sum(sizes.values())
    found = [f"bfloat16 {bytes_text(plain)}"]
    for frozen in ("float8", "nf4", "nvfp4", "mxfp4"):
        try:
            formats = quantised_formats(model, anatomy, frozen)
        except InputError:  # no format of theirs; `train` says why
            continue
        units = {name: model.get_parameter(name).shape[0] for name in formats}
        packed = sum(kind.bytes * units[name] for name, kind in formats.items())
        kept = plain - COMPUTE_BYTES * sum(sizes[name] for name in formats) + packed
        found.append(f"{frozen} {bytes_text(kept)}")
    yield "frozen base", ", ".join(found)


def disk_text(config: PreTrainedConfig, directory: Path) -> str:
    """Size, number of files, dtypes and quantisation of a directory's weights, from headers alone.

    Weights need not be there, or not all of them; `IntegrityError` for a file that is there but damaged.
    """
    expected = {SINGLE_FILE} if (directory / SINGLE_FILE).exists() else set[str]()
    if not expected and (directory / INDEX_FILE).exists():
        expected = set(read_index(directory / INDEX_FILE).values())
    missing = [name for name in expected if not (directory / name).exists()]
    if not expected or len(missing) == len(expected):
        return "no weight files here; counts are from the configuration"
    if missing:
        return f"{len(expected) - len(missing)} of {len(expected)} weight files, the others are not here"
    with open_weight_files(directory) as files:
        by_dtype = Counter[str]()
        for tensor in files.tensors.values():
            by_dtype[str(tensor.dtype).removeprefix("torch.")] += tensor.nbytes
        total = bytes_text(files.total_bytes)
        published = published_tensors(quantisation(config), files).tensors.values()
        plain = sum(lazy.numel() * plain_dtype(lazy).itemsize for lazy in published)
    settings = quantisation(config)
    how = "" if settings is None else f"; quantised ({method_of(settings)}), {bytes_text(plain)} with bfloat16 instead"
    kinds = ", ".join(f"{dtype} {bytes_text(size)}" for dtype, size in by_dtype.most_common())
    return f"{total} in {len(expected)} file{'s' if len(expected) > 1 else ''} ({kinds}){how}"
