"""All that reads files which others have made: a sound directory for each, and what reads it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow
import torch
from pyarrow import parquet

import expertmesh as em
from expertmesh.adapters.plan import plan_adapters
from expertmesh.anatomy import describe
from expertmesh.checkpoint.read import open_state
from expertmesh.config import load_config
from expertmesh.config.data import DataConfig, DataSource
from expertmesh.config.sections import ModelConfig
from expertmesh.data import Recipe, build_dataset, load_tokenizer
from expertmesh.experts.placement import (
    LOAD_FILE,
    Placement,
    balanced_order,
    check_fits,
    read_loads,
    read_placement,
    write_loads,
    write_placement,
)
from expertmesh.export.checkpoint import export
from expertmesh.io.safetensors_reader import open_weight_files
from expertmesh.report.run import read_run
from expertmesh.training.lock import holder
from expertmesh.verification.checkpoint import verify
from expertmesh.weights.meta_model import build_meta_model, read_model_config
from tests.checkpoint.damage import replace_file
from tests.config.minimal import write as write_config
from tests.data.tokenizers_on_the_fly import CHATML, bpe_tokenizer
from tests.robustness.mutations import BYTES, Mutation, in_header, in_json, in_lines
from tests.support.models import tiny_model

GOLDEN = Path(__file__).parents[1] / "checkpoint" / "golden" / "step-00000002"
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]


@dataclass(frozen=True, slots=True)
class Reader:
    """`make` fills a directory, `read` reads it, `files` of it are changed. `with_hashes`: a manifest's hash and size
    follow the change, as a forger would see to it.
    """

    make: Callable[[Path], None]
    read: Callable[[Path], object]
    files: dict[str, tuple[Mutation, ...]] = field(default_factory=dict)
    with_hashes: bool = False


def _make_model(path: Path) -> None:
    model = tiny_model("qwen3_moe")
    model.save_pretrained(path)
    bpe_tokenizer(CHATML).save_pretrained(path)


def _read_model(path: Path) -> None:
    config, directory = read_model_config(str(path))
    describe(build_meta_model(config, torch.float32, directory=directory))
    with open_weight_files(path):
        pass


def _read_tokenizer(path: Path) -> None:
    load_tokenizer(ModelConfig(name_or_path=str(path)))("some text")


def _make_adapter(path: Path) -> None:
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}
    more = {"use_rslora": False, "lora_dropout": 0.0, "bias": "none", "revision": None, "init_lora_weights": True}
    (path / "adapter_config.json").write_text(json.dumps(said | more))


def _read_adapter(path: Path) -> None:
    plan_adapters(_MODEL(), em.LoraConfig(from_adapter=str(path)), None)


_models: list[torch.nn.Module] = []


def _MODEL() -> torch.nn.Module:
    if not _models:
        _models.append(tiny_model("qwen3_moe"))
    return _models[0]


def _make_checkpoint(path: Path) -> None:
    shutil.copytree(GOLDEN, path / GOLDEN.name)


def _read_checkpoint(path: Path) -> None:
    verify(path / GOLDEN.name)
    with open_state(path / GOLDEN.name):
        pass
    export(path / GOLDEN.name, path / "out")


def _make_run(path: Path) -> None:
    write_config(path)
    (path / "run.yaml").rename(path / "config.yaml")
    load = [{"max_over_mean": 2.0, "entropy": 1.0, "dead": 0}]
    rows = [{"step": n, "loss": 2.0, "expert_load": load} for n in (1, 2)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    counts = {"rows": 1, "samples": 1, "tokens": 1, "target_tokens": 1}
    record = {"schema_version": 1, "model_type": "m", "parameters": 1, "blocks": 1, "moe_layers": [], "starts": []}
    (path / "run.json").write_text(json.dumps(record | {"train_data": counts, "eval_data": None}))
    (path / "lock.json").write_text(json.dumps({"host": "h", "process": 1, "launch": None, "started": 1.0}))
    (path / "audit.json").write_text(json.dumps({"source": "s", "tensors": 1, "bytes_compared": 1}))


def _read_run(path: Path) -> None:
    str(holder(path))
    read_run(path)


def _make_data(path: Path) -> None:
    rows = [{"messages": CHAT}, {"prompt": "a", "completion": "b"}, {"messages": CHAT, "tools": [{"name": "f"}]}] * 2
    (path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "b.json").write_text(json.dumps(rows[:1] * 3))
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": CHAT}] * 3), path / "c.parquet")


def _read_data(path: Path) -> None:
    for name in ("a.jsonl", "b.json", "c.parquet"):
        config = DataConfig(train=(DataSource(path=str(path / name), format="messages"),), on_error="skip")
        build_dataset(Recipe(config.train, config, _TOKENIZER(), model_vocab_size=706))


_tokenizers: list[object] = []


def _TOKENIZER():  # type: ignore[no-untyped-def]
    if not _tokenizers:
        _tokenizers.append(bpe_tokenizer(CHATML))
    return _tokenizers[0]


def _make_index(path: Path) -> None:
    tiny_model("qwen3_moe").save_pretrained(path, max_shard_size="40KB")


def _read_index(path: Path) -> None:
    with open_weight_files(path):
        pass


def _make_placement(path: Path) -> None:
    loads = {f"model.layers.{n}.mlp.experts": [9, 1, 5, 2] for n in range(2)}
    write_loads(path / LOAD_FILE, loads, 1, 2)
    orders = {name: balanced_order(load_E, 2) for name, load_E in loads.items()}
    write_placement(Placement(2, orders), path / "placement.json")


def _read_placement(path: Path) -> None:
    for load_E in read_loads(path).values():
        balanced_order(load_E, len(load_E))
    check_fits(read_placement(path / "placement.json"), {f"model.layers.{n}.mlp.experts": 4 for n in range(2)}, 2)


READERS = {
    "index": Reader(_make_index, _read_index, {"model.safetensors.index.json": (*BYTES, in_json, in_json)}),
    "model": Reader(
        _make_model,
        _read_model,
        {
            "config.json": (*BYTES, in_json, in_json, in_json),
            "generation_config.json": (*BYTES, in_json),
            "model.safetensors": (*BYTES, in_header, in_header, in_header),
        },
    ),
    "tokenizer": Reader(
        _make_model,
        _read_tokenizer,
        {"tokenizer.json": (*BYTES, in_json, in_json), "tokenizer_config.json": (*BYTES, in_json, in_json)},
    ),
    "adapter": Reader(_make_adapter, _read_adapter, {"adapter_config.json": (*BYTES, in_json, in_json, in_json)}),
    "checkpoint": Reader(
        _make_checkpoint,
        _read_checkpoint,
        {
            f"{GOLDEN.name}/{name}": mutations
            for name, mutations in {
                "manifest.json": (*BYTES, in_json, in_json, in_json),
                "state.json": (*BYTES, in_json),
                "layout.json": (*BYTES, in_json, in_json),
                "huggingface/config.json": (*BYTES, in_json),
                "rng/generators.safetensors": (*BYTES, in_header),
                "model-00000-of-00002.safetensors": (*BYTES, in_header, in_header),
                "optimizer-00001-of-00002.safetensors": (*BYTES, in_header),
            }.items()
        },
        with_hashes=True,
    ),
    "run": Reader(
        _make_run,
        _read_run,
        {
            "config.yaml": BYTES,
            "metrics.jsonl": (*BYTES, in_lines),
            "run.json": (*BYTES, in_json),
            "lock.json": (*BYTES, in_json),
            "audit.json": (*BYTES, in_json),
        },
    ),
    "data": Reader(
        _make_data,
        _read_data,
        {"a.jsonl": (*BYTES, in_lines, in_lines), "b.json": (*BYTES, in_json), "c.parquet": BYTES},
    ),
    "placement": Reader(
        _make_placement,
        _read_placement,
        {LOAD_FILE: (*BYTES, in_json, in_json), "placement.json": (*BYTES, in_json, in_json)},
    ),
    "configuration": Reader(write_config, lambda path: load_config(path / "run.yaml"), {"run.yaml": BYTES}),
}


def put(reader: Reader, path: Path, name: str, content: bytes) -> None:
    """Let a file hold `content`."""
    if reader.with_hashes and not name.endswith("manifest.json"):
        replace_file(name.removeprefix(f"{GOLDEN.name}/"), content)(path / GOLDEN.name)
    else:
        (path / name).write_bytes(content)
