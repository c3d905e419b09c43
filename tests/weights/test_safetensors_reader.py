"""Reading safetensors by byte range: the library's values, only the bytes asked for, nothing trusted."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from expertmesh.config.errors import ExpertmeshError, InputError, IntegrityError, SecurityError
from expertmesh.io import safetensors_reader
from expertmesh.io.boxes import extents, slices, volume
from expertmesh.io.safetensors_reader import (
    MAX_GAP_BYTES,
    MAX_MERGED_ROW_BYTES,
    FileTensor,
    WeightFiles,
    as_bytes,
    open_weight_files,
    read_header,
)
from tests.support.errors import refused


def _tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    kinds = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
    tensors = {name: torch.randn(3, 4, 5).to(dtype) for name, dtype in kinds.items()}
    tensors["f8"] = torch.randn(4, 4).to(torch.float8_e4m3fn)
    tensors |= {
        "i64": torch.arange(7),
        "bool": torch.tensor([True, False, True]),
        "u8": torch.arange(9).byte(),
    }
    return tensors | {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3)}


def _raw(path: Path, header: Any, data: bytes = b"") -> Path:
    """A safetensors file with this header, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def _entry(shape: list[int], start: int, stop: int, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def test_values_of_every_dtype_and_box_equal_the_librarys(tmp_path: Path) -> None:
    save_file(_tensors(), tmp_path / "model.safetensors")
    reference = load_file(tmp_path / "model.safetensors")
    choose = random.Random(0)
    with open_weight_files(tmp_path) as files:
        assert files.tensors.keys() == reference.keys()
        for name, whole in reference.items():
            for _ in range(20):
                ends = [sorted((choose.randint(0, size), choose.randint(0, size))) for size in whole.shape]
                box = tuple((start, stop) for start, stop in ends)
                out = torch.empty(extents(box), dtype=whole.dtype)
                before = files.bytes_read
                files.read(files.tensors[name], box, out)
                expected = whole[slices(box)].clone(memory_format=torch.contiguous_format)
                assert torch.equal(as_bytes(out), as_bytes(expected))
                wanted = volume(box) * whole.element_size()
                assert files.bytes_read - before >= wanted


def test_contiguous_boxes_read_exactly_their_bytes_in_one_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"w": torch.randn(8, 6, 4)}, tmp_path / "model.safetensors")
    calls: list[int] = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: calls.append(at) or preadv(fd, buffers, at))
    with open_weight_files(tmp_path) as files:
        for box in (((2, 5), (0, 6), (0, 4)), ((3, 4), (1, 4), (0, 4)), ((3, 4), (2, 3), (1, 3))):
            calls.clear()
            before = files.bytes_read
            files.read(files.tensors["w"], box, torch.empty(extents(box)))
            assert files.bytes_read - before == volume(box) * 4
            assert len(calls) == 1


def test_one_element_is_read_into_a_tensor_with_any_strides(tmp_path: Path) -> None:
    save_file({"w": torch.arange(20.0).reshape(4, 5)}, tmp_path / "model.safetensors")
    out = torch.zeros(4, 5).t()
    with open_weight_files(tmp_path) as files:
        files.read(files.tensors["w"], ((2, 3), (1, 2)), out[1:2, 2:3])
    assert out[1, 2] == 11
    assert out.sum() == 11


def test_rows_are_read_one_by_one_but_short_close_ones_with_their_gaps(tmp_path: Path) -> None:
    far = torch.randn(5, 2 * MAX_GAP_BYTES)
    close = torch.randn(6, 64)
    long = torch.randn(3, MAX_MERGED_ROW_BYTES)
    save_file({"far": far, "close": close, "long": long}, tmp_path / "model.safetensors")
    with open_weight_files(tmp_path) as files:
        out = torch.empty(5, 3)
        files.read(files.tensors["far"], ((0, 5), (7, 10)), out)
        assert torch.equal(out, far[:, 7:10])
        assert files.bytes_read == 5 * 3 * 4
        out = torch.empty(6, 32)
        files.read(files.tensors["close"], ((0, 6), (16, 48)), out)
        assert torch.equal(out, close[:, 16:48])
        assert files.bytes_read - 60 == 5 * 64 * 4 + 32 * 4
        before = files.bytes_read
        out = torch.empty(3, MAX_MERGED_ROW_BYTES - 1)
        files.read(files.tensors["long"], ((0, 3), (1, MAX_MERGED_ROW_BYTES)), out)
        assert torch.equal(out, long[:, 1:])
        assert files.bytes_read - before == out.nbytes


def test_sharded_checkpoints_are_one_set_of_tensors_and_links_are_followed(tmp_path: Path) -> None:
    blobs, directory = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    directory.mkdir()
    save_file({"a": torch.ones(2)}, blobs / "one")
    save_file({"b": torch.zeros(3)}, blobs / "two")
    for name, blob in (("model-1.safetensors", "one"), ("model-2.safetensors", "two")):
        (directory / name).symlink_to(blobs / blob)
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with open_weight_files(directory) as files:
        assert sorted(files.tensors) == ["a", "b"]
        assert files.total_bytes == 20
        out = torch.empty(3)
        files.read(files.tensors["b"], ((0, 3),), out)
        assert torch.equal(out, torch.zeros(3))


BAD_HEADERS: list[tuple[str, Any, bytes, type[ExpertmeshError], str]] = [
    ("no JSON", b"{not json", b"", IntegrityError, "not JSON"),
    ("nested", b"[" * 1_000_000, b"", IntegrityError, "not JSON"),
    ("no object", [1], b"", IntegrityError, "not a JSON object"),
    ("twice", b'{"w":{},"w":{}}', b"", IntegrityError, "w appears twice"),
    ("no shape", {"w": {"dtype": "U8", "data_offsets": [0, 1]}}, b"1", IntegrityError, "tensor w"),
    ("entry is a list", {"w": [1, 2]}, b"", IntegrityError, "tensor w"),
    ("negative", {"w": _entry([-1], 0, 1)}, b"1", IntegrityError, "tensor w"),
    ("negative offset", {"w": _entry([2], -1, 1)}, b"12", SecurityError, "tensor w .* outside of the file"),
    ("backwards", {"w": _entry([1], 2, 1)}, b"12", SecurityError, "tensor w .* outside of the file"),
    ("out of range", {"w": _entry([2], 0, 1 << 40)}, b"12", SecurityError, "tensor w .* outside of the file"),
    ("elsewhere", {"w": _entry([2], 1 << 40, (1 << 40) + 2)}, b"12", SecurityError, "w does not start"),
    ("float offset", {"w": _entry([1], 0, 1.0)}, b"1", IntegrityError, "tensor w"),  # type: ignore[arg-type]
    ("three offsets", {"w": _entry([1], 0, 1) | {"data_offsets": [0, 1, 1]}}, b"1", IntegrityError, "tensor w"),
    ("float shape", {"w": _entry([1.0], 0, 1)}, b"1", IntegrityError, "tensor w"),  # type: ignore[list-item]
    ("true", {"w": _entry([True], 0, 1)}, b"1", IntegrityError, "tensor w"),
    ("unsupported dtype", {"w": _entry([2], 0, 1, "F4")}, b"1", InputError, "unsupported dtype 'F4'"),
    ("unknown dtype", {"w": _entry([1], 0, 4, "F33")}, b"1234", IntegrityError, "tensor w has the dtype 'F33'"),
    ("dtype is a list", {"w": {"dtype": [], "shape": [], "data_offsets": [0, 1]}}, b"1", IntegrityError, "w"),
    ("wrong size", {"w": _entry([3], 0, 2)}, b"12", IntegrityError, "tensor w"),
    ("huge shape", {"w": _entry([2**40, 2**40], 0, 2)}, b"12", IntegrityError, "tensor w"),
    ("shape that wraps round", {"w": _entry([2**62, 4, 2], 0, 0)}, b"", IntegrityError, "tensor w"),
    ("nothing times too much", {"w": _entry([0, 1 << 63], 0, 0)}, b"", IntegrityError, "tensor w"),
    ("endless product", {"w": _entry([10**4000] * 999, 0, 2)}, b"12", IntegrityError, "tensor w"),
    ("endless dims", {"w": _entry([1] * 99999, 0, 1)}, b"1", IntegrityError, "tensor w"),
    ("overlap", {"a": _entry([2], 0, 2), "b": _entry([2], 1, 3)}, b"123", SecurityError, "a and b overlap"),
    ("same bytes", {"a": _entry([2], 0, 2), "b": _entry([2], 0, 2)}, b"12", SecurityError, "a and b overlap"),
    ("gap", {"a": _entry([1], 0, 1), "b": _entry([1], 2, 3)}, b"123", SecurityError, "a and b overlap"),
    ("late start", {"a": _entry([1], 1, 2)}, b"12", SecurityError, "tensor a does not start"),
    (
        "truncated",
        {"a": _entry([1], 0, 1), "b": _entry([9], 1, 10)},
        b"123",
        IntegrityError,
        "inside tensor b",
    ),
    ("trailing", {"a": _entry([1], 0, 1)}, b"123", IntegrityError, "2 bytes after"),
]

KEYS: dict[type[ExpertmeshError], str] = {
    InputError: "weights.unsupported-dtype",
    IntegrityError: "weights.damaged",
    SecurityError: "weights.unsafe",
}


@pytest.mark.parametrize(
    ("header", "data", "error", "words"),
    [case[1:] for case in BAD_HEADERS],
    ids=[case[0] for case in BAD_HEADERS],
)
def test_damaged_headers_are_refused_naming_file_and_tensor(
    tmp_path: Path, header: Any, data: bytes, error: type[ExpertmeshError], words: str
) -> None:
    path = _raw(tmp_path / "model.safetensors", header, data)
    with pytest.raises(error, match=words) as caught:
        open_weight_files(tmp_path)
    assert str(path) in str(caught.value)
    assert caught.value.key == KEYS[error]


HEADER = json.dumps({"w": _entry([2], 0, 2)}).encode()


@pytest.mark.parametrize(
    ("length", "rest"),
    [
        (1 << 62, b"{}"),
        (200_000_000, b""),
        (1 << 40, HEADER + b"12"),
        (len(HEADER) + 99, HEADER + b"12"),
        (9, b"\0" * 8),
    ],
)
def test_a_header_larger_than_its_file_is_refused_before_it_is_read(
    tmp_path: Path, length: int, rest: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: read.append(size) or pread(fd, size, at))
    path = tmp_path / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + rest)
    with refused("weights.unsafe", SecurityError, naming=f"{path}: refused: a header of {length} bytes"):
        open_weight_files(tmp_path)
    assert max(read) <= 8 + len(rest)


@pytest.mark.parametrize("kept", [0, 3, 8, 9, 20, 7 + len(HEADER), 8 + len(HEADER), 9 + len(HEADER)])
def test_a_truncated_file_is_an_integrity_error_wherever_it_ends(tmp_path: Path, kept: int) -> None:
    path = _raw(tmp_path / "model.safetensors", HEADER, b"12")
    os.truncate(path, kept)
    error = SecurityError if kept == 8 else IntegrityError  # nothing is left that would tell the two apart
    with refused(KEYS[error], error, naming=str(path)):
        open_weight_files(tmp_path)


def test_a_flipped_bit_in_a_header_is_refused_or_changes_nothing_that_is_used(tmp_path: Path) -> None:
    save_file({"weight": torch.arange(6.0)}, tmp_path / "good.safetensors", metadata={"format": "pt"})
    good = (tmp_path / "good.safetensors").read_bytes()
    reference = {name: (t.dtype, t.shape, t.offset) for name, t in read_header(tmp_path / "good.safetensors").items()}
    length = 8 + int.from_bytes(good[:8], "little")
    unsafe: list[str] = []
    for bit in range(8 * length):
        flipped = bytearray(good)
        flipped[bit // 8] ^= 1 << bit % 8
        path = tmp_path / "flipped.safetensors"
        path.write_bytes(flipped)
        try:
            tensors = read_header(path)
        except IntegrityError:
            continue
        except SecurityError as error:
            unsafe.append(str(error))
            continue
        found = {name: (tensor.dtype, tensor.shape, tensor.offset) for name, tensor in tensors.items()}
        # What is left are flips of the metadata, of the name (found when the plan is made) and between
        # dtypes of one size (found by the model's kind of dtype where integers meet floats).
        assert found == reference or "weight" not in found or found["weight"][0].itemsize == 4
    # A length or an offset that now points out of the file cannot be told from a forged one.
    assert all("a header of" in words or "outside of the file" in words for words in unsafe)


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..",
        "",
        "a\\b.safetensors",
        ".",
        "a.safetensors\0",
        ["a.safetensors"],
        "a.bin",
        3,
        None,
    ],
)
def test_an_index_that_names_anything_but_files_beside_it_is_refused_for_security(tmp_path: Path, name: Any) -> None:
    save_file({"w": torch.ones(1)}, tmp_path.parent / "model.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": name}}))
    with refused("weights.unsafe-name", SecurityError, naming=str(index)):
        open_weight_files(tmp_path)


@pytest.mark.parametrize("kind", ["directory", "pipe", "device"])
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_only_files_are_read_and_nothing_waits_for_a_pipe(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / name
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with refused("weights.unsafe", SecurityError, naming=f"{path}: is neither a file nor a link to one"):
        open_weight_files(tmp_path)


def test_an_index_too_large_to_be_one_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.touch()
    os.truncate(path, 1 << 40)
    with refused("weights.unsafe", SecurityError, naming="an index of 1099511627776 bytes"):
        open_weight_files(tmp_path)


def test_a_link_to_a_file_that_is_not_there_is_plain_bad_input(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"w": "one.safetensors"}}')
    (tmp_path / "one.safetensors").symlink_to(tmp_path / "blobs" / "gone")
    with refused("weights.not-found", naming="one.safetensors: no such file"):
        open_weight_files(tmp_path)


DEEP = '{"weight_map": ' + "[" * 1_000_000


@pytest.mark.parametrize(
    "content", [DEEP, '{"weight_map": {"w": "a.safetensors", "w": "b.safetensors"}}'], ids=["deep", "twice"]
)
def test_an_index_that_is_nested_without_end_or_says_two_things_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with refused("weights.damaged", IntegrityError):
        open_weight_files(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}'])
def test_an_index_without_a_weight_map_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with refused("weights.damaged", IntegrityError, naming="model.safetensors.index.json"):
        open_weight_files(tmp_path)


def test_files_and_tensors_that_the_index_promises_must_be_there(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "one.safetensors"}}))
    with refused("weights.not-found", naming="one.safetensors: no such file"):
        open_weight_files(tmp_path)
    save_file({"other": torch.ones(1)}, tmp_path / "one.safetensors")
    with refused("weights.index-mismatch", IntegrityError, naming="w is in one.safetensors"):
        open_weight_files(tmp_path)


@pytest.mark.parametrize("counts", ["one.safetensors", "two.safetensors"])
def test_of_a_tensor_in_two_files_the_index_says_which_counts(tmp_path: Path, counts: str) -> None:
    save_file({"w": torch.ones(1), "u": torch.ones(1)}, tmp_path / "one.safetensors")
    save_file({"w": torch.ones(1), "v": torch.ones(1)}, tmp_path / "two.safetensors")
    others = {"u": "one.safetensors", "v": "two.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {**others, "w": counts}}))
    with open_weight_files(tmp_path) as files:
        assert {name: tensor.path.name for name, tensor in files.tensors.items()} == {**others, "w": counts}
    index.write_text(json.dumps({"weight_map": others}))
    with refused("weights.duplicate-tensor", IntegrityError, naming="w is in both one.safetensors and two.safetensors"):
        open_weight_files(tmp_path)


def test_pickles_are_refused_for_security_and_empty_directories_as_input(tmp_path: Path) -> None:
    with refused("weights.not-found", naming="absent: no such directory"):
        open_weight_files(tmp_path / "absent")
    with refused("weights.not-found", naming="holds no weights"):
        open_weight_files(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with refused("weights.pickle", SecurityError, naming="pytorch_model.bin"):
        open_weight_files(tmp_path)
    with refused("weights.unsafe-name", SecurityError, naming="only safetensors"):
        open_weight_files(tmp_path, "pytorch_model.bin")
    save_file({"w": torch.ones(1)}, tmp_path / "special.safetensors")
    assert list(open_weight_files(tmp_path, "special.safetensors").tensors) == ["w"]


def test_a_file_that_shrinks_after_its_header_was_read_names_the_tensor(tmp_path: Path) -> None:
    save_file({"w": torch.randn(100)}, tmp_path / "model.safetensors")
    with open_weight_files(tmp_path) as files:
        os.truncate(tmp_path / "model.safetensors", 200)
        with refused("weights.damaged", IntegrityError, naming="ends inside tensor w"):
            files.read(files.tensors["w"], ((0, 100),), torch.empty(100))


def test_more_files_than_a_process_may_have_open_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_reader, "MAX_OPEN_FILES", 4)
    for number in range(10):
        save_file({"w": torch.full((3,), float(number))}, tmp_path / f"{number}.safetensors")
    with WeightFiles(tmp_path, {}) as files:
        before = len(os.listdir("/proc/self/fd"))
        for number in [*range(10), *range(10)]:
            out = torch.empty(3)
            files.read(read_header(tmp_path / f"{number}.safetensors")["w"], ((0, 3),), out)
            assert out.tolist() == [number] * 3
            assert len(os.listdir("/proc/self/fd")) <= before + 4


def test_a_file_tensor_knows_its_bytes() -> None:
    assert FileTensor("w", torch.bfloat16, (3, 5), Path("f"), 0).nbytes == 30
