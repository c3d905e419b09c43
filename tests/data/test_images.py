"""Rows with images: the tokens and pixels of the family's own processor, no image as a target, and named refusals."""

import base64
import contextlib
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerBase

from expertmesh.config import IntegrityError, load_config
from expertmesh.data import (
    IGNORE,
    BatchLayout,
    DataReport,
    Preparation,
    Recipe,
    TokenizedDataset,
    build_dataset,
    load_tokenizer,
)
from expertmesh.data.images import Images, from_blob
from expertmesh.data.sources import RowShare
from expertmesh.weights.meta_model import read_model_config
from tests.support.errors import refused
from tests.support.images import FAMILIES, PICTURES, row_of, write_rows, write_vision_model


# Of those that write nothing around an image; training/test_image_run.py has all.
@pytest.fixture(scope="module", params=[name for name, family in FAMILIES.items() if not any(family.around)])
def inputs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(request.param)
    write_vision_model(root / "model", request.param)
    write_rows(root)
    return root


def _recipe(inputs: Path, data: Path, *overrides: str) -> Recipe:
    text = f"model: {{name_or_path: {inputs / 'model'}}}\noutput_dir: {data.parent / 'out'}\n"
    file = data.parent / "config.yaml"
    file.write_text(text + f"data: {{train: [{data}], max_length: 128, packing: false, shuffle: false}}\n")
    config = load_config(file, overrides)
    tokenizer = load_tokenizer(config.model)
    return Recipe.of(config, config.data.train, tokenizer, read_model_config(config.model.name_or_path))


def _built(recipe: Recipe) -> tuple[TokenizedDataset, DataReport, Images, PreTrainedTokenizerBase]:
    assert recipe.images is not None
    return *build_dataset(recipe), recipe.images, recipe.tokenizer


def _write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _same(batch: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return batch.keys() == other.keys() and all(torch.equal(batch[key], other[key]) for key in batch)


def test_rows_are_what_the_processor_makes_of_them_in_one_call(inputs: Path) -> None:
    from PIL import Image

    dataset, report, images, tokenizer = _built(_recipe(inputs, inputs / "rows.jsonl"))
    assert (report.images, report.with_images) == (6, 4)
    layout = BatchLayout(1, 0, 1, False, 0, 128, images)
    batches = layout.micro_batches(dataset, [np.array([index]) for index in range(len(dataset))])
    lines = (inputs / "rows.jsonl").read_text().splitlines()
    for index, (line, batch, numbers) in enumerate(zip(lines, batches, PICTURES, strict=True)):
        messages = json.loads(line)["messages"]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        names = [part["image"] for part in messages[0]["content"] if part["type"] == "image"] if numbers else []
        given = {"images": [Image.open(inputs / name).convert("RGB") for name in names]} if names else {}
        expected = dict(images.processor(text=[text], **given, return_tensors="pt"))
        made = {key: batch[key] for key in batch if key not in ("labels", "row_numbers", "real_tokens")}
        if not names:
            expected = {key: expected[key] for key in made}
        assert _same(made, expected)
        pad = batch["input_ids"] == tokenizer.convert_tokens_to_ids(images.placeholder)
        assert pad.any() == bool(names)
        assert (batch["labels"][pad] == IGNORE).all()
        found = [picture.tokens for picture, _ in from_blob(dataset.pictures(index))]
        assert sum(found) == int(pad.sum())
        assert len(found) == len(names)


def test_all_tokens_as_targets_leave_out_those_of_images(inputs: Path) -> None:
    dataset, _, images, tokenizer = _built(_recipe(inputs, inputs / "rows.jsonl", "data.loss_on=all"))
    pad = tokenizer.convert_tokens_to_ids(images.placeholder)
    for index in range(len(dataset)):
        sample = dataset.sample(index)
        assert ((sample.labels[1:] == IGNORE) == (sample.input_ids[1:] == pad)).all()


@pytest.mark.slow_cases(r"(?!qwen3_vl_moe-).*", why="what a family does not decide")
@pytest.mark.parametrize("form", ["path", "column", "base64", "bytes in Parquet", "absolute", "relative"])
def test_an_image_may_be_named_or_held_by_its_row(
    inputs: Path, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = (inputs / "pictures" / "1.jpg").read_bytes()
    row = row_of(["pictures/1.jpg"], "What is it?", "A module.")
    part, data = row["messages"][0]["content"][0], inputs / f"one-{form.split()[0]}.jsonl"
    del part["image"]
    if form in ("path", "relative"):
        part["path"] = "pictures/1.jpg"
    elif form == "absolute":
        part["image"], data = str(inputs / "pictures" / "1.jpg"), tmp_path / "one.jsonl"
    elif form == "column":
        row["images"] = ["pictures/1.jpg"]
    elif form == "base64":
        part["image"] = {"bytes": base64.b64encode(content).decode()}
    if form == "bytes in Parquet":
        import pyarrow
        from pyarrow import parquet

        row["images"], data = [{"bytes": content, "path": None}], tmp_path / "one.parquet"
        row["messages"][1]["content"] = [{"type": "text", "text": row["messages"][1]["content"]}]
        parquet.write_table(pyarrow.Table.from_pylist([row]), data)
    else:
        _write(data, row)
    plain = _write(inputs / "plain.jsonl", row_of(["pictures/1.jpg"], "What is it?", "A module."))
    monkeypatch.chdir(inputs)
    data = Path(data.name) if form == "relative" else data
    found, expected = (_built(_recipe(inputs, path)) for path in (data, plain))
    monkeypatch.chdir(tmp_path)  # what was prepared in one directory is read from any
    assert found[0].sha256() == expected[0].sha256()
    one, other = (
        next(BatchLayout(1, 0, 1, False, 0, 128, images).micro_batches(dataset, [np.array([0])]))
        for dataset, _, images, _ in (found, expected)
    )
    assert "pixel_values" in one
    assert _same(one, other)


def test_prepared_rows_have_the_images_of_rows_in_memory(inputs: Path) -> None:
    """Of a sample each, whichever process has tokenized it."""
    recipe = _recipe(inputs, inputs / "rows.jsonl")
    built, _, images, _ = _built(recipe)
    preparation = Preparation(inputs / "prepared", recipe)
    for index in range(2):
        preparation.write_share(preparation.building("x"), RowShare(index, 2), lambda rows: None)
    preparation.finish(preparation.building("x"), 2)
    found = preparation.find()
    assert found is not None
    assert found.dataset.sha256() == built.sha256()
    layout, rows = BatchLayout(8, 0, 1, False, 0, 128, images), [np.array([index]) for index in range(len(built))]
    assert _same(*(next(layout.micro_batches(each, rows)) for each in (found.dataset, built)))


def test_a_rank_without_images_gets_a_blank_one_where_another_has_some(inputs: Path) -> None:
    """Behind its tokens, where nothing attends to it; no rank gets one where none has any."""
    dataset, _, images, _ = _built(_recipe(inputs, inputs / "rows.jsonl"))
    # A rank of three has no row of its own in the last micro-batch, and gets the first, which has an image.
    for ranks, order in ((2, range(8)), (3, [0, 2, 3, 5])):
        rows = [np.array([index]) for index in order]
        layouts = [BatchLayout(1, rank, ranks, False, 0, 128, images) for rank in range(ranks)]
        of_ranks = [list(layout.micro_batches(dataset, rows)) for layout in layouts]
        for batches in zip(*of_ranks, strict=True):
            assert len({"pixel_values" in batch for batch in batches}) == 1
    rows = [np.array([index]) for index in range(8)]
    plain, blank = (
        list(BatchLayout(1, 1, 2, False, 0, 128, each).micro_batches(dataset, rows))[2] for each in (None, images)
    )
    length = plain["input_ids"].shape[1]
    assert "pixel_values" not in plain
    assert blank["image_grid_thw"].shape[0] == 1
    assert torch.equal(blank["input_ids"][:, :length], plain["input_ids"])
    assert (blank["labels"][:, length:] == IGNORE).all()
    assert not blank["real_tokens"][:, length:].any()


def test_a_row_is_cut_behind_its_images_and_never_inside_one(inputs: Path) -> None:
    data = _write(
        inputs / "long.jsonl",
        row_of(["pictures/5.jpg"], "What is it?", "A module " * 20),
        row_of([], "And this is a long question about it, is it not?", "A module."),
    )
    dataset = _built(_recipe(inputs, data))[0]
    length, ((picture, _),) = int(dataset.lengths[0]), from_blob(dataset.pictures(0))
    last = picture.start + picture.tokens - 1
    cut = _built(_recipe(inputs, data, f"data.max_length={length - 5}"))[1]
    inside = _built(_recipe(inputs, data, f"data.max_length={last}", "data.loss_on=all"))[1]
    assert (cut.cut, cut.dropped, cut.images) == (1, 0, 1)
    assert (inside.dropped, inside.images) == (1, 0)


@pytest.mark.slow_cases(r"(?!qwen3_vl_moe-).*", why="what a family does not decide")
@pytest.mark.parametrize(
    ("part", "naming"),
    [
        ({"type": "image", "image": "https://example.org/a.png"}, "is a URL"),
        ({"type": "image", "url": "https://example.org/a.png"}, "is a URL"),
        ({"type": "image", "image": "data:image/png;base64,AAAA"}, "is a URL"),
        ({"type": "image", "image": "missing.png"}, "missing.png', which cannot be read"),
        ({"type": "image", "image": "rows.jsonl"}, "image 1 of the row is damaged"),
        ({"type": "image"}, "1 image parts without a file"),
        ({"type": "image", "image": 3}, "is a number"),
        ({"type": "video", "video": "a.mp4"}, "of type 'video', and only text and images"),
        ({"type": "audio", "audio": "a.wav"}, "of type 'audio', and only text and images"),
        ({"type": "text", "text": "PLACEHOLDER"}, "which stands for an image"),
    ],
)
def test_what_is_no_readable_image_is_refused_by_name(inputs: Path, part: dict[str, Any], naming: str) -> None:
    row = row_of(["pictures/0.png"], "What is it?", "A module.")
    recipe = _recipe(inputs, inputs / "bad.jsonl")
    assert recipe.images is not None
    written = {k: v if v != "PLACEHOLDER" else recipe.images.placeholder for k, v in part.items()}
    row["messages"][0]["content"][0] = written
    _write(inputs / "bad.jsonl", row)
    with refused("data.malformed-row", naming=naming):
        build_dataset(recipe)


def test_images_in_answers_are_refused_by_name(inputs: Path) -> None:
    row = row_of([], "What is it?", "A module.")
    row["messages"][1]["content"] = [{"type": "image", "image": "pictures/0.png"}]
    with refused("data.malformed-row", naming="message 2 has a content part of type 'image'"):
        build_dataset(_recipe(inputs, _write(inputs / "bad.jsonl", row)))


def test_a_template_that_writes_no_images_is_refused_by_name(inputs: Path) -> None:
    recipe = _recipe(inputs, inputs / "rows.jsonl")
    assert recipe.images is not None
    recipe.tokenizer.chat_template = str(recipe.tokenizer.chat_template).replace(recipe.images.placeholder, "")
    with refused("data.malformed-row", naming="the row has 1 images, and its text"):
        build_dataset(recipe)


class _Padding:
    """A processor that pads images to the largest of a call, as that of Pixtral does: a token for 8 x 8 pixels."""

    def __init__(self, image_token: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self.image_token, self._tokenizer = image_token, tokenizer

    def __call__(self, text: list[str], images: Sequence[Any] = (), **_: Any) -> dict[str, torch.Tensor]:
        first, *rest = text[0].split(self.image_token) if images else text
        counts = [-(-image.width // 8) * -(-image.height // 8) for image in images]
        whole = first + "".join(self.image_token * n + part for n, part in zip(counts, rest, strict=True))
        found = {"input_ids": torch.tensor([self._tokenizer(whole, add_special_tokens=False).input_ids])}
        if images:
            width, height = (max(getattr(image, side) for image in images) for side in ("width", "height"))
            found["pixel_values"] = torch.stack(
                [F.pad(torch.tensor(np.array(i)), (0, 0, 0, width - i.width, 0, height - i.height)) for i in images]
            )
        return found


@pytest.mark.parametrize("names", [["0.png"], ["0.png", "3.jpg"]])
def test_a_processor_that_pads_to_the_largest_image_is_refused_by_name(inputs: Path, names: list[str]) -> None:
    """Though the first row may have a single image."""
    row = row_of([f"pictures/{name}" for name in names], "What is it?", "A module.")
    recipe = _recipe(inputs, _write(inputs / "one.jsonl", row))
    assert recipe.images is not None
    recipe.images.processor = _Padding(recipe.images.placeholder, recipe.tokenizer)
    with refused("model.no-image-processor", naming="_Padding makes other tensors"):
        build_dataset(recipe)


def _with_damaged_exif() -> bytes:
    from PIL import Image

    exif, stream = Image.Exif(), io.BytesIO()
    exif[0x0112], exif[0x0100] = 6, 8  # the orientation, and the width before it
    damaged = bytearray(exif.tobytes())
    damaged[19] = 2  # says that the width is text
    Image.new("RGB", (8, 8)).save(stream, "JPEG", exif=bytes(damaged))
    return stream.getvalue()


@pytest.mark.slow_cases(r"(?!qwen3_vl_moe-).*", why="what a family does not decide")
@pytest.mark.parametrize(
    ("image", "naming"),
    [
        ({"bytes": [137, 80]}, "bytes that are a list"),
        ({"bytes": 5}, "bytes that are a number"),
        ("a\u0000b", "null"),
        ("a\ud800", "unpaired surrogate"),
        ({"bytes": base64.b64encode(_with_damaged_exif()).decode()}, "is damaged"),
        ("pipe", "neither a file nor a link"),
        ("/dev/zero", "neither a file nor a link"),
        ("huge.png", "at most 67,108,864 bytes"),
    ],
)
def test_hostile_images_are_skipped_or_refused_by_name(inputs: Path, image: Any, naming: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkfifo(inputs / "pipe")
    with (inputs / "huge.png").open("wb") as file:
        file.truncate(1 << 27)
    rows = [row_of([each], "What is it?", "A module.") for each in (image, "pictures/0.png")]
    data = _write(inputs / "hostile.jsonl", *rows)
    assert len(build_dataset(_recipe(inputs, data, "data.on_error=skip"))[0]) == 1
    with refused("data.malformed-row", naming=naming):
        build_dataset(_recipe(inputs, data))


@pytest.mark.parametrize(
    "header", [b"[{", b"{}", b'[{"sha256": 1}]', b"[\xff]", b'[{"sha256": "", "path": "a", "size": "big"}]']
)
def test_damaged_descriptions_of_images_are_refused_by_name(header: bytes) -> None:
    with refused("data.damaged-preparation", IntegrityError, naming="remove the prepared data"):
        from_blob(header + b"\nrest")
