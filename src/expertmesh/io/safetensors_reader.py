"""Read the safetensors files of a directory by byte range: first the headers, then exactly the requested boxes.

No input is trusted. Every header is checked against its file before any of its numbers is used, and an index may only
name plain files of its own directory (which may be symbolic links: the hub's cache consists of them). A damaged file
raises `IntegrityError`. A file that would mislead a trusting reader (offsets outside of the data, a header larger than
its file) raises `SecurityError`. Unlike the safetensors library this file maps no file into memory, because mapped
pages would count as memory of the rank. It never opens a pickle.
"""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from expertmesh.config.errors import InputError, IntegrityError, SecurityError
from expertmesh.io.boxes import Box, ByteRuns, volume
from expertmesh.io.reading import open_file, parse_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# The limit of the safetensors library for headers; here also for an index.
MAX_HEADER_BYTES = 100_000_000
# Per file. The largest published model has about 200,000 tensors in all of its files together.
MAX_TENSORS = 500_000
# Larger numbers mean damage, and their products would take a long time to compute.
_MAX_DIMS, _MAX_NUMBER = 64, 1 << 63
# Short rows with gaps below a page come from the disk together in any case, so one read including the gaps is faster.
MAX_MERGED_ROW_BYTES = 512
MAX_GAP_BYTES = 4096
# The usual limit is 1024 open files per process, and a checkpoint of a thousand ranks has two thousand files.
MAX_OPEN_FILES = 256
_SPAN_BYTES = 16 << 20

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# Further dtypes of the format, which are not supported.
_UNSUPPORTED_DTYPES = ("F4", "F6_E2M3", "F6_E3M2", "C64")


@dataclass(frozen=True, slots=True)
class FileTensor:
    """One tensor of one file."""

    name: str
    """The tensor's name in the file."""
    dtype: torch.dtype
    """The dtype in the file."""
    shape: tuple[int, ...]
    """The shape in the file."""
    path: Path
    """The file."""
    offset: int
    """The first byte of its data, counted from the start of the file."""

    @property
    def nbytes(self) -> int:
        """The bytes of its data."""
        return math.prod(self.shape) * self.dtype.itemsize


class WeightFiles:
    """The tensors of one Hugging Face directory, by name, and their files. Close it, or use `with`.

    `bytes_read` counts every byte of tensor data that was read through it, without headers and index.
    """

    def __init__(self, directory: Path, tensors: dict[str, FileTensor]) -> None:
        self.directory = directory
        self.tensors = tensors
        self.bytes_read = 0
        self._descriptors: dict[Path, int] = {}

    @property
    def total_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def read(self, tensor: FileTensor, box: Box, out: Tensor) -> None:
        """Fill `out` with the elements of `box`, in row-major order.

        Args:
            out: Contiguous, on the CPU, of the tensor's dtype.

        Raises:
            IntegrityError: The file ends early; the error names file and tensor.
            InputError: The file cannot be read.
        """
        assert out.is_contiguous()
        assert out.dtype == tensor.dtype
        assert out.numel() == volume(box)
        if out.numel() == 0:
            return
        target = as_bytes(out)
        runs = ByteRuns.of(tensor.shape, tensor.dtype.itemsize, box)
        at = 0
        for first, count, stride in runs.rows():
            rows = target[at : at + count * runs.length].view(count, runs.length)
            short = runs.length <= MAX_MERGED_ROW_BYTES and stride - runs.length <= MAX_GAP_BYTES
            if count > 1 and short:
                self._read_spans(tensor, first, stride, rows)
            else:
                for row in range(count):
                    self._read_run(tensor, first + row * stride, rows[row])
            at += count * runs.length

    def announce(self, tensor: FileTensor, box: Box) -> None:
        """Advise the system to start reading the bytes that `read` will need.

        It does not wait. Not every system takes advice.
        """
        descriptor, runs = self._descriptor(tensor.path), ByteRuns.of(tensor.shape, tensor.dtype.itemsize, box)
        for first, count, stride in runs.rows():
            together = count if stride - runs.length <= MAX_GAP_BYTES else 1
            for start in range(tensor.offset + first, tensor.offset + first + count * stride, together * stride):
                with suppress(OSError):  # some file systems take no advice
                    os.posix_fadvise(descriptor, start, (together - 1) * stride + runs.length, os.POSIX_FADV_WILLNEED)

    def _read_spans(self, tensor: FileTensor, first: int, stride: int, rows: Tensor) -> None:
        """Read rows together with the small gaps between them, in spans of bounded size."""
        length = rows.shape[1]
        step = max(1, _SPAN_BYTES // stride)
        for start in range(0, rows.shape[0], step):
            part = rows[start : start + step]
            span = torch.empty(part.shape[0] * stride, dtype=torch.uint8)
            self._read_run(tensor, first + start * stride, span[: span.numel() - stride + length])
            part.copy_(span.view(-1, stride)[:, :length])

    def _read_run(self, tensor: FileTensor, first: int, out: Tensor) -> None:
        """Read consecutive bytes of a tensor, from byte `first` on, into `out`."""
        descriptor, offset = self._descriptor(tensor.path), tensor.offset + first
        buffer = out.numpy().data
        while buffer:
            try:
                got = os.preadv(descriptor, [buffer], offset)
            except OSError as error:
                problem = f"{tensor.path}: cannot read {tensor.name}: {error.strerror}"
                raise InputError(problem, key="file.unreadable") from error
            # A read may return fewer bytes than requested; only 0 means the end of the file.
            if got == 0:
                _damaged(tensor.path, f"the file ends inside tensor {tensor.name}")
            self.bytes_read += got
            buffer, offset = buffer[got:], offset + got

    def _descriptor(self, path: Path) -> int:
        if path not in self._descriptors:
            if len(self._descriptors) == MAX_OPEN_FILES:  # files are read in order, so the oldest is done first
                os.close(self._descriptors.pop(next(iter(self._descriptors))))
            self._descriptors[path] = _open(path)
        return self._descriptors[path]

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def __enter__(self) -> "WeightFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_weight_files(directory: str | Path, weights_file: str | None = None) -> WeightFiles:
    """Read the headers of all files of a Hugging Face directory, but no tensor data.

    Args:
        weights_file: Overrides the usual names (a config's `transformers_weights`).

    Raises:
        InputError: Files are missing.
        SecurityError: Pickled weights, or names or offsets that point outside.
        IntegrityError: Anything damaged; the error names file and tensor.
    """
    directory = Path(directory)
    name = weights_file or _weights_name(directory)
    check_plain_name(name, directory)
    index = read_index(directory / name) if name.endswith(".index.json") else {}
    tensors: dict[str, FileTensor] = {}
    for file in sorted(set(index.values())) or [name]:
        for tensor in read_header(directory / file).values():
            if index.get(tensor.name, file) != file:
                continue  # a stale copy: the index names another file for this tensor
            if tensor.name in tensors:
                problem = f"tensor {tensor.name} is in both {tensors[tensor.name].path.name} and {file}; remove one"
                raise IntegrityError(f"{directory}: {problem}", key="weights.duplicate-tensor")
            tensors[tensor.name] = tensor
    for key, file in index.items():
        if key not in tensors or tensors[key].path.name != file:
            problem = f"says that {key} is in {file}, which does not hold it"
            raise IntegrityError(f"{directory / name}: {problem}", key="weights.index-mismatch")
    return WeightFiles(directory, tensors)


def as_bytes(values: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as a 1-D uint8 tensor."""
    # Not reshape(-1): a contiguous tensor of one element may have any stride, and `view(dtype)` refuses some of them.
    return values.as_strided((values.numel(),), (1,)).view(torch.uint8)


def read_index(path: Path) -> dict[str, str]:
    """Return the `weight_map` of an index file: tensor name -> plain name of a safetensors file beside the index."""
    with _opened(path) as (descriptor, size):
        if size > MAX_HEADER_BYTES:
            _unsafe(path, f"an index of {size} bytes")
        text = _pread(path, descriptor, size, 0)
    try:
        content = parse_json(text)
    except ValueError as error:
        raise IntegrityError(f"{path}: is not JSON ({error})", key="weights.damaged") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise IntegrityError(f"{path}: has no weight_map of tensor names to files", key="weights.damaged")
    for file in weight_map.values():
        check_plain_name(file, path)
    return weight_map


def check_plain_name(name: Any, where: Path) -> None:
    """Raise `SecurityError` for anything that is not the plain name of a file in the same directory."""
    plain = isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")
    if not plain or not name.endswith((".safetensors", ".safetensors.index.json")):
        rule = "; only safetensors files are read" if plain else ", not a plain file name beside it"
        raise SecurityError(f"{where}: names the weights file {name!r}{rule}", key="weights.unsafe-name")


def read_header(path: Path) -> dict[str, FileTensor]:
    """Return the tensors of one safetensors file, in file order, checked against the size of the file."""
    entries, start, size = _header_entries(path)
    entries.pop("__metadata__", None)
    tensors = (_entry(path, name, entry, start, size) for name, entry in entries.items())
    return _check_coverage(path, sorted(tensors, key=lambda each: (each.offset, each.nbytes)), start, size)


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata in the header of one safetensors file: texts by name."""
    metadata = _header_entries(path)[0].get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _damaged(path, "header has metadata that is not texts by name")
    return metadata


def _header_entries(path: Path) -> tuple[dict[str, Any], int, int]:
    """Return the JSON object of the header, the offset of the data, and the size of the file in bytes."""
    with _opened(path) as (descriptor, size):
        if size < 8:
            _damaged(path, f"the file has {size} bytes, too few for a header")
        length = int.from_bytes(_pread(path, descriptor, 8, 0), "little")
        # Checked before anything is allocated for the header.
        if length > min(size - 8, MAX_HEADER_BYTES):
            if length <= MAX_HEADER_BYTES and _is_cut(_pread(path, descriptor, size - 8, 8)):
                _damaged(path, f"the file has {size} bytes and ends inside its header of {length} bytes")
            _unsafe(path, f"a header of {length} bytes in a file of {size} bytes")
        header = _pread(path, descriptor, length, 8)
    count = header.count(b'"data_offsets"')  # before parsing, because a million tensors take seconds and gigabytes
    try:
        entries = parse_json(header) if count <= MAX_TENSORS else {}
    except ValueError as error:
        _damaged(path, f"header is not JSON ({error})")
    if not isinstance(entries, dict):
        _damaged(path, "header is not a JSON object")
    if (count := max(count, len(entries))) > MAX_TENSORS:
        _unsafe(path, f"a header of {count:,} tensors")
    return entries, 8 + len(header), size


def _is_cut(header: bytes) -> bool:
    """Return whether these bytes are the start of a longer header; a complete header contradicts a larger length."""
    try:
        json.JSONDecoder().raw_decode(header.decode(errors="replace"))
    except (ValueError, RecursionError):
        return header.startswith(b"{")
    return False


def _entry(path: Path, name: str, entry: Any, data_start: int, size: int) -> FileTensor:
    try:
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        valid = isinstance(dtype, str) and isinstance(shape, list) and len(shape) <= _MAX_DIMS
        valid = valid and all(type(number) is int and number < _MAX_NUMBER for number in (*shape, start, stop))
        valid = valid and all(number >= 0 for number in shape)
    except (KeyError, TypeError, ValueError):
        valid = False
    if not valid:
        _damaged(path, f"tensor {name} has no valid dtype, shape and data_offsets")
    if dtype in _UNSUPPORTED_DTYPES:
        problem = f"tensor {name} has the unsupported dtype {dtype!r}; convert the checkpoint"
        raise InputError(f"{path}: {problem}", key="weights.unsupported-dtype")
    if dtype not in DTYPES:
        _damaged(path, f"tensor {name} has the dtype {dtype!r}, which does not exist")
    tensor = FileTensor(name, DTYPES[dtype], tuple(shape), path, data_start + start)
    if stop - start == tensor.nbytes and start >= 0:
        return tensor
    if not 0 <= start <= stop <= size - data_start:
        _unsafe(path, f"tensor {name} has the data_offsets {[start, stop]}, outside of the file's data")
    _damaged(path, f"tensor {name} {dtype} {shape} has {stop - start} bytes, not {tensor.nbytes}")


def _check_coverage(path: Path, tensors: list[FileTensor], start: int, size: int) -> dict[str, FileTensor]:
    """Check that the tensors fill the file without gaps or overlaps, as the format demands; return them by name."""
    if tensors and tensors[0].offset != start:
        _unsafe(path, f"tensor {tensors[0].name} does not start where the header ends")
    for before, after in pairwise(tensors):
        if before.offset + before.nbytes != after.offset:
            _unsafe(path, f"tensors {before.name} and {after.name} overlap or leave a gap")
    stop = tensors[-1].offset + tensors[-1].nbytes if tensors else start
    if stop > size:
        first_cut = next(tensor for tensor in tensors if tensor.offset + tensor.nbytes > size)
        _damaged(path, f"the file has {size} of {stop} bytes and ends inside tensor {first_cut.name}")
    if stop < size:
        _damaged(path, f"{size - stop} bytes after the last tensor")
    return {tensor.name: tensor for tensor in tensors}


def _weights_name(directory: Path) -> str:
    if not directory.is_dir():
        raise InputError(f"{directory}: no such directory", key="weights.not-found")
    for name in (SINGLE_FILE, INDEX_FILE):
        if (directory / name).exists():
            return name
    pickles = sorted(path.name for path in directory.iterdir() if path.name.endswith((".bin", ".pt", ".pth", ".ckpt")))
    if pickles:
        raise SecurityError(
            f"{directory}: holds only pickled weights ({pickles[0]}), which can run code when read; "
            f"convert them to {SINGLE_FILE} first (save_pretrained of a trusted copy does it)",
            key="weights.pickle",
        )
    raise InputError(
        f"{directory}: holds no weights, neither {SINGLE_FILE} nor {INDEX_FILE}; copy them there, or set "
        "model.from_config to true to train from random ones",
        key="weights.not-found",
    )


def _open(path: Path) -> int:
    mend = "remove it and download the checkpoint again"
    try:
        return open_file(path, key="weights.unsafe", mend=mend)
    except IsADirectoryError as error:
        raise SecurityError(f"{path}: is neither a file nor a link to one; {mend}", key="weights.unsafe") from error
    except FileNotFoundError as error:
        problem = f"{path}: no such file, but the checkpoint needs it; download it"
        raise InputError(problem, key="weights.not-found") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be opened: {error.strerror}", key="file.unreadable") from error


@contextmanager
def _opened(path: Path) -> Iterator[tuple[int, int]]:
    """Open the file for the block; yields its descriptor and its size in bytes."""
    with os.fdopen(_open(path), "rb", buffering=0) as file:
        yield file.fileno(), os.fstat(file.fileno()).st_size


def _pread(path: Path, descriptor: int, length: int, offset: int) -> bytes:
    try:
        return os.pread(descriptor, length, offset)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}", key="file.unreadable") from error


def _damaged(path: Path, what: str) -> NoReturn:
    raise IntegrityError(f"{path}: damaged: {what}; copy or download it again", key="weights.damaged")


def _unsafe(path: Path, what: str) -> NoReturn:
    raise SecurityError(f"{path}: refused: {what}; download it again, from a source you trust", key="weights.unsafe")
