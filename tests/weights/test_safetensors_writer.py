"""Files laid out before they are written are files of the safetensors library, wherever each byte comes from."""

import os
import random
from pathlib import Path

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file

from expertmesh.io.boxes import blocks, full_box, slices
from expertmesh.io.safetensors_reader import open_weight_files
from expertmesh.io.safetensors_writer import create_file, create_index, lay_out, write_box

SPECS = {
    "half": (torch.bfloat16, (3, 5)),
    "byte": (torch.uint8, (7,)),
    "wide": (torch.float64, (2, 2)),
    "single": (torch.float32, (4, 3, 2)),
    "scalar": (torch.float32, ()),
    "flag": (torch.bool, (3,)),
    "nothing": (torch.float32, (0, 4)),
    "count": (torch.int64, (1,)),
}


def _values() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: (torch.randn(shape) * 10).to(dtype) for name, (dtype, shape) in SPECS.items()}


@pytest.mark.parametrize("max_shard_bytes", [10**9, 60])
def test_the_library_reads_what_was_written_box_by_box_in_any_order(max_shard_bytes: int, tmp_path: Path) -> None:
    values = _values()
    layout = lay_out(tmp_path, SPECS, max_shard_bytes, parameters=3)
    parts = []
    for file in layout.files:
        create_file(file)
        for tensor in file.tensors:
            parts += [(tensor, box) for box in blocks(full_box(tensor.shape), 3)]
    random.Random(0).shuffle(parts)
    for tensor, box in parts:
        descriptor = os.open(tensor.path, os.O_WRONLY)
        part = values[tensor.name][slices(box)].contiguous()
        assert write_box(descriptor, tensor, box, part) == part.nbytes
        os.close(descriptor)
    if layout.index is not None:
        create_index(tmp_path, layout.index)
    written: dict[str, torch.Tensor] = {}
    for file in layout.files:
        assert file.path.stat().st_size == file.size
        written |= load_file(file.path)
    assert written.keys() == SPECS.keys()
    assert all(torch.equal(written[name], value) for name, value in values.items())
    with open_weight_files(tmp_path) as files:
        assert files.tensors == layout.tensors


def test_columns_are_written_between_what_others_wrote(tmp_path: Path) -> None:
    layout = lay_out(tmp_path, {"w": (torch.float32, (3, 6))}, 10**9, parameters=18)
    create_file(layout.files[0])
    tensor, whole = layout.tensors["w"], torch.arange(18.0).reshape(3, 6)
    descriptor = os.open(tensor.path, os.O_WRONLY)
    for box in (((0, 3), (2, 5)), ((0, 3), (5, 6)), ((0, 3), (0, 2))):
        write_box(descriptor, tensor, box, whole[slices(box)].contiguous())
    os.close(descriptor)
    assert torch.equal(load_file(tensor.path)["w"], whole)


def test_every_tensor_is_aligned_to_its_dtype(tmp_path: Path) -> None:
    for tensor in lay_out(tmp_path, SPECS, 10**9, parameters=0).tensors.values():
        assert tensor.offset % tensor.dtype.itemsize == 0


@pytest.mark.parametrize("limit", [1, 40, 100, 200, 10_000])
def test_files_are_split_where_the_hub_library_splits_them(limit: int, tmp_path: Path) -> None:
    layout = lay_out(tmp_path, SPECS, limit, parameters=0)
    theirs = split_torch_state_dict_into_shards(
        _values(), filename_pattern="model{suffix}.safetensors", max_shard_size=limit
    )
    ours = {name: tensor.path.name for name, tensor in layout.tensors.items()}
    if limit >= 96:
        # Below the largest tensor the order differs: the hub library counts files of single tensors first.
        assert ours == theirs.tensor_to_filename
    assert len(set(ours.values())) == len(set(theirs.tensor_to_filename.values()))


def test_existing_files_are_never_overwritten(tmp_path: Path) -> None:
    layout = lay_out(tmp_path, SPECS, 10**9, parameters=0)
    create_file(layout.files[0])
    with pytest.raises(FileExistsError):
        create_file(layout.files[0])
