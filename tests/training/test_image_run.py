"""Runs on rows with images, against the unsharded class on the same rows: losses, gradients, norms, weights, files.

Of two data ranks one may have images in a micro-batch and the
other none (`PICTURES`), and pictures have other sizes.
"""

import copy
import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

import expertmesh as em
from expertmesh.config import Config, IntegrityError, load_config
from expertmesh.data import BatchLayout, Recipe, TokenizedDataset, build_dataset, load_tokenizer
from expertmesh.data.images import Images
from expertmesh.training.run import train
from expertmesh.weights.meta_model import read_model_config
from tests.adapters.reference import in_files, random_adapter
from tests.support.errors import refused_on_ranks
from tests.support.images import (
    FAMILIES,
    SIZES,
    image_texts,
    is_vision,
    write_picture,
    write_rows,
    write_vision_model,
)
from tests.support.models import widened
from tests.support.ranks import shared_ranks
from tests.support.reference import whole, worst

GLOBAL_BATCH, STEPS = 4, 2
# The linear attention of Qwen3.5, the router and the position embeddings of GLM-4.5V, and the norms and the tower of
# Gemma 4 compute in fp32 in any model.
BOUNDS = {"qwen3_vl_moe": 1e-10, "qwen3_5_moe": 1e-5, "glm4v_moe": 1e-5, "gemma4": 1e-5, "llama4": 1e-5}


def _is_there(package: str) -> bool:
    return not package or importlib.util.find_spec(package) is not None


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.skipif(not _is_there(family.needs), reason=f"needs {family.needs}"))
        for name, family in FAMILIES.items()
    ],
)
def inputs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory, and rows with pictures."""
    root = tmp_path_factory.mktemp(request.param)
    write_vision_model(root / "model", request.param)
    write_rows(root)
    return root


def _config(inputs: Path, output: Path, *overrides: str) -> Config:
    length = 256 if FAMILIES[_family(inputs)].placeholder else 128  # Gemma 4 makes 49 tokens or more of any image
    text = f"""
model: {{name_or_path: {inputs / "model"}}}
precision: {{params: float64, compute: float64, reduce: float64}}
data: {{train: [{inputs / "rows.jsonl"}], max_length: {length}, packing: false, shuffle: false}}
optim: {{name: sgd, learning_rate: 1.0e-2, max_grad_norm: 0.5}}
schedule: {{name: constant, warmup_ratio: 0.0}}
train: {{global_batch_size: {GLOBAL_BATCH}, max_steps: {STEPS}, num_epochs: {STEPS}}}
parallel: {{ep: 2}}
checkpoint: {{every_steps: null}}
output_dir: {output}
"""
    file = output.parent / f"{output.name}.yaml"
    file.write_text(text)
    return load_config(file, overrides)


def _by_hand(inputs: Path) -> Iterator[tuple[dict[str, torch.Tensor], int]]:
    """Each row as a batch of its own, by the family's image processor on all of its pictures, and its targets."""
    from PIL import Image

    tokenizer: Any = AutoTokenizer.from_pretrained(inputs / "model")
    pixels: Any = AutoImageProcessor.from_pretrained(inputs / "model")
    family = FAMILIES[_family(inputs)]
    for line in (inputs / "rows.jsonl").read_text().splitlines():
        messages = json.loads(line)["messages"]
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
        content = messages[0]["content"]
        names = [part["image"] for part in content if part["type"] == "image"] if isinstance(content, list) else []
        batch: dict[str, torch.Tensor] = {}
        if names:
            batch = dict(pixels([Image.open(inputs / name).convert("RGB") for name in names], return_tensors="pt"))
            first, *pieces = text.split(family.written)
            written = image_texts(family, batch)
            text = first + "".join(image + piece for image, piece in zip(written, pieces, strict=True))
        ids = tokenizer(text, add_special_tokens=False).input_ids
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        answer = [*tokenizer(messages[1]["content"], add_special_tokens=False).input_ids, end]
        stop = len(ids) - ids[::-1].index(end)
        assert ids[stop - len(answer) : stop] == answer
        labels = torch.full((1, len(ids)), -100)
        labels[0, stop - len(answer) : stop] = torch.tensor(answer)
        batch |= {"input_ids": torch.tensor([ids]), "labels": labels}
        if names:
            batch["pixel_values"] = batch["pixel_values"].double()
            is_image = batch["input_ids"] == tokenizer.convert_tokens_to_ids(family.image)
            batch["mm_token_type_ids"] = is_image.int()
        yield batch, len(answer)


def _loss(model: Any, batch: dict[str, torch.Tensor], targets: int) -> torch.Tensor:
    logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    return F.cross_entropy(logits[0, :-1], batch["labels"][0, 1:], reduction="sum", ignore_index=-100) / targets


def _family(inputs: Path) -> str:
    return str(json.loads((inputs / "model" / "config.json").read_text())["model_type"])


def _expected(inputs: Path, vision: bool) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Losses and norms of the steps, and the weights behind them."""
    model = _in_memory(inputs)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(vision or not is_vision(name))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-2)  # Adam would make much of rounding in gradients near zero
    rows, found = list(_by_hand(inputs)), []
    for step in range(STEPS):
        first = step * GLOBAL_BATCH % len(rows)
        part = rows[first : first + GLOBAL_BATCH]
        total = sum(targets for _, targets in part)
        loss = torch.stack([_loss(model, batch, total) for batch, _ in part]).sum()
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(trained, 0.5))
        found.append((loss.item(), norm))
        optimizer.step()
        optimizer.zero_grad()
    return found, {name: tensor.detach() for name, tensor in model.state_dict().items()}


@pytest.mark.slow_cases(
    r"(?!qwen3_vl_moe-2-train|qwen3_5_moe-2-frozen|glm4v_moe-1-train|gemma4-1-frozen|llama4-2-train).*",
    why="pairwise over families, sizes and what trains",
)
@pytest.mark.parametrize("vision", ["frozen", "train"])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_a_run_on_images_is_plain_training(inputs: Path, tmp_path: Path, micro_batch_size: int, vision: str) -> None:
    bound = BOUNDS[_family(inputs)]
    steps, weights = _expected(inputs, vision == "train")
    size = f"train.micro_batch_size={micro_batch_size}"
    shared_ranks(train, 2, _config(inputs, tmp_path / "run", size, f"model.vision={vision}"))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for row, (loss, norm) in zip(rows, steps, strict=True):
        assert row["loss"] == pytest.approx(loss, rel=bound)
        assert row["grad_norm"] == pytest.approx(norm, rel=bound)
    saved = load_file(tmp_path / "run" / "model" / "model.safetensors")
    base = load_file(inputs / "model" / "model.safetensors")
    base = load_file(inputs / "model" / "model.safetensors")
    assert saved.keys() == base.keys()
    for name, tensor in saved.items():
        if is_vision(name):
            assert torch.equal(tensor, base[name]) == (vision == "frozen"), name
    trained: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "run" / "model")
    for name, tensor in trained.state_dict().items():
        assert (tensor - weights[name]).norm() <= 1e-5 * weights[name].norm(), name


def _compare_gradients(
    model: Any, config: Config, expected: dict[str, torch.Tensor], size: int, adapter: Path | None = None
) -> None:
    """Run one step on all rows from the data loader, and compare every gradient with that of the rows by hand."""
    dataset, images = _dataset(config)
    lora = None if adapter is None else em.LoraConfig(from_adapter=str(adapter))
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=2)), lora=lora)
    rows = [np.array([number]) for number in range(len(dataset))]
    layout = BatchLayout(size, dist.get_rank(), 2, False, 0, config.data.max_length, images)
    batches = list(layout.micro_batches(dataset, rows))
    em.forward_backward(model, batches, target_tokens=dataset.target_tokens)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found = whole(gradients) if adapter is None else in_files(model, whole(gradients))
    assert worst(found, expected)[0] <= BOUNDS[model.config.model_type]


def _dataset(config: Config) -> tuple[TokenizedDataset, Images]:
    tokenizer = load_tokenizer(config.model)
    recipe = Recipe.of(config, config.data.train, tokenizer, read_model_config(config.model.name_or_path))
    assert recipe.images is not None
    return build_dataset(recipe)[0], recipe.images


def _gradients_by_hand(inputs: Path, model: Any) -> dict[str, torch.Tensor]:
    """Gradients of the mean loss of all rows."""
    rows = list(_by_hand(inputs))
    total = sum(targets for _, targets in rows)
    torch.stack([_loss(model, batch, total) for batch, _ in rows]).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _in_memory(inputs: Path) -> Any:
    stock: Any = AutoModelForImageTextToText.from_pretrained(inputs / "model", dtype=torch.float64)
    model: Any = widened(stock, torch.float64).train()
    model.set_experts_implementation("eager")  # transformers' grouped product takes no fp64
    return model


@pytest.mark.slow_cases(r"(qwen3_vl_moe|gemma4|llama4)-1", r"(qwen3_5_moe|glm4v_moe)-.*", why="one size of three stays")
@pytest.mark.parametrize("size", [1, 2])
def test_every_gradient_of_adapters_on_rows_with_images_is_stock_pefts(inputs: Path, tmp_path: Path, size: int) -> None:
    """On attention and experts of the text, of which some tokens are an image's."""
    model = _in_memory(inputs)
    modules = [f"{name}.{end}" for name in _of_text(model, "self_attn") for end in ("q_proj", "o_proj")]
    experts = [f"{name}.{end}" for name in _of_text(model, "experts") for end in ("gate_up_proj", "down_proj")]
    assert modules
    assert experts
    adapted = random_adapter(copy.deepcopy(model), tmp_path / "adapter", modules, experts)
    expected = {name.replace(".default", ""): g for name, g in _gradients_by_hand(inputs, adapted).items()}
    shared_ranks(_compare_gradients, 2, model, _config(inputs, tmp_path / "run"), expected, size, tmp_path / "adapter")


def _of_text(model: Any, end: str) -> list[str]:
    return [name for name, _ in model.named_modules() if name.endswith(f".{end}") and not is_vision(name)]


@pytest.mark.slow_cases(
    r"(?!(qwen3_vl_moe|llama4)-1|(qwen3_5_moe|glm4v_moe)-2|gemma4-4).*", why="pairwise over families and sizes"
)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_gradient_of_rows_with_images_is_exact(inputs: Path, tmp_path: Path, size: int) -> None:
    """The tower's too, where one rank has no images of its own in a micro-batch."""
    model = _in_memory(inputs)
    expected = _gradients_by_hand(inputs, copy.deepcopy(model))
    assert any(map(is_vision, expected))
    shared_ranks(_compare_gradients, 2, model, _config(inputs, tmp_path / "run"), expected, size)


@pytest.mark.slow_cases(r"(?!qwen3_vl_moe-).*", why="one family stays")
@pytest.mark.parametrize(
    ("options", "key", "naming"),
    [
        (["data.packing=true"], "data.images-unsupported", "rows.jsonl:1 has images"),
        (["parallel.ep=1", "parallel.tp=2"], "data.images-unsupported", "parallel.tp 2"),
        (["parallel.ep=1", "parallel.cp=2"], "data.images-unsupported", "parallel.cp 2"),
        (["parallel.ep=1", "parallel.pp=2"], "layout.pp-takes-text-alone", "rows.jsonl:1 has images"),
        (["data.eval=[{rows}]", "eval.samples=1"], "data.images-unsupported", "eval.samples 1"),
        (["train.accumulate=by_layer"], "train.accumulate-unsupported", "rows.jsonl:1 has images"),
    ],
)
def test_what_cannot_be_done_with_images_is_refused_by_name(
    inputs: Path, tmp_path: Path, options: list[str], key: str, naming: str
) -> None:
    with refused_on_ranks(key, naming=naming):
        given = [option.replace("{rows}", str(inputs / "rows.jsonl")) for option in options]
        shared_ranks(train, 2, _config(inputs, tmp_path / "run", *given))
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow_cases(r"(?!qwen3_vl_moe).*", why="one family stays")
def test_a_picture_that_changed_since_it_was_tokenized_stops_all_ranks(inputs: Path, tmp_path: Path) -> None:
    """With the error of the one whose row has it: its peers would wait for it in a collective."""
    shutil.copytree(inputs, tmp_path / "copy")
    config = _config(tmp_path / "copy", tmp_path / "run", "train.max_steps=1")
    shared_ranks(train, 2, config)
    write_picture(tmp_path / "copy" / "pictures" / "0.png", SIZES[0], seed=99)
    again = config.model_copy(update={"output_dir": str(tmp_path / "again")})
    prepared = again.data.model_copy(update={"prepared_path": str(tmp_path / "run" / "prepared")})
    found = shared_ranks(_error_of, 2, again.model_copy(update={"data": prepared}))
    assert [key for key, _ in found] == ["data.changed-image"] * 2
    assert all("0.png has changed since the data was prepared" in text for _, text in found)


def _error_of(config: Config) -> tuple[str, str]:
    with pytest.raises(IntegrityError) as caught:
        train(config)
    return caught.value.key, str(caught.value)


@pytest.mark.skipif(_is_there("torchvision"), reason="torchvision is installed")
def test_a_processor_whose_package_is_absent_is_refused_by_name(tmp_path: Path) -> None:
    write_vision_model(tmp_path / "model", "llama4")
    write_rows(tmp_path)
    with refused_on_ranks("install.missing-package", naming="pip install torchvision"):
        shared_ranks(train, 2, _config(tmp_path, tmp_path / "run"))
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow_cases(r"(?!qwen3_vl_moe).*", why="one family stays")
def test_a_tower_is_not_trained_on_text_alone(inputs: Path, tmp_path: Path) -> None:
    """Neither with images of evaluation alone."""
    (tmp_path / "text.jsonl").write_text((inputs / "rows.jsonl").read_text().splitlines()[2] + "\n")
    given = [f"data.train=[{tmp_path / 'text.jsonl'}]", f"data.eval=[{inputs / 'rows.jsonl'}]", "model.vision=train"]
    config = _config(inputs, tmp_path / "run", *given)
    with refused_on_ranks("config.combination", naming="no row of data.train has an image"):
        shared_ranks(train, 2, config)
    assert not (tmp_path / "run" / "checkpoints").exists()
