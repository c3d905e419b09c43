"""Rows per second of preparing chat data, and what a start costs that finds its data prepared.

    OMP_NUM_THREADS=1 python -m benchmarks.preparing [--chats FILE]

First chats, with a template without generation marks: tokenized in memory in one process, as each rank would for
itself, then prepared by 1, 2 ... processes. Then a million short documents: prepared once, and opened by a fresh
process that packs an epoch in random order, counts the steps of three and makes the first batch. Memory is what that
process has beyond its imports: its own (anonymous), and all of it (files that are mapped count where they were read).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import tempfile
import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.result import markdown
from expertmesh.cli.data import prepare, processors
from expertmesh.config import DataConfig
from expertmesh.data import BatchLayout, Preparation, Recipe, TrainingBatches, build_dataset

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = [f"{first}{second}" for first in "bdfgklmnprstvz" for second in ("a", "en", "ir", "ol", "um")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=Path, help="JSON lines of messages (default: made up)")
    parser.add_argument("--rows", type=int, default=1_000_000, help="documents of the second part")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        chats = arguments.chats or _write(root / "chats.jsonl", 8000, _chat)
        counts = [count for count in (1, 2, 4, 8, 16, 32) if count <= processors()]
        table = [("in memory", f"{_in_memory(chats):,.0f}")]
        table += [(f"prepared by {count}", f"{_prepared(root / f'by-{count}', chats, count):,.0f}") for count in counts]
        print(markdown(("chats", "rows/s"), table))
        documents = _write(root / "documents.jsonl", arguments.rows, lambda i: {"text": _text(i, 12)})
        speed = _prepared(root / "many", documents, counts[-1])
        print(f"\n{arguments.rows:,} documents prepared with {speed:,.0f} rows/s by {counts[-1]}\n")
        pool = multiprocessing.get_context("spawn").Pool(1)
        with pool:
            print(markdown(("start that finds them", ""), pool.apply(_start, (root / "many", documents))))


def _preparation(directory: Path, rows: Path) -> Preparation:
    config = DataConfig(train=[{"path": str(rows)}], max_length=2048)  # type: ignore[list-item]
    return Preparation(directory, Recipe(config.train, config, _tokenizer(), 1 << 16))


def _tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens: no training, and about as slow as merging them."""
    vocabulary = {symbol: at for at, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _in_memory(rows: Path) -> float:
    recipe = _preparation(Path(), rows).recipe
    began = time.perf_counter()
    dataset, _ = build_dataset(recipe)
    return len(dataset) / (time.perf_counter() - began)


def _prepared(directory: Path, rows: Path, workers: int) -> float:
    began = time.perf_counter()
    found = prepare("benchmark", _preparation(directory, rows), workers)
    return found.report.rows / (time.perf_counter() - began)


def _start(directory: Path, rows: Path) -> list[tuple[str, str]]:
    preparation = _preparation(directory, rows)
    before, began = _memory(), time.perf_counter()
    found = preparation.find()
    assert found is not None
    opened = time.perf_counter()
    layout = BatchLayout(1, 0, 8, packing=True, pad_token_id=0, max_length=2048)
    batches = TrainingBatches(found.dataset, layout, global_batch_size=64, shuffle=True, seed=1)
    steps = batches.total_steps(3)
    next(batches.epoch(0))
    ready, after = time.perf_counter(), _memory()
    return [
        ("samples, steps of 3 epochs", f"{len(found.dataset):,}, {steps:,}"),
        ("tokens opened", f"{opened - began:.2f} s"),
        ("first batch", f"{ready - began:.2f} s"),
        ("its own memory", f"{(after['Anonymous'] - before['Anonymous']) / 1e6:.0f} MB"),
        ("all of its memory", f"{(after['Rss'] - before['Rss']) / 1e6:.0f} MB"),
    ]


def _memory() -> dict[str, int]:
    """Bytes of this process (Linux)."""
    text = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8")
    return {name: int(size) * 1024 for name, size in re.findall(r"(\w+): +(\d+) kB", text)}


def _write(path: Path, rows: int, row: Any) -> Path:
    with path.open("w", encoding="utf-8") as stream:
        for i in range(rows):
            stream.write(json.dumps(row(i)) + "\n")
    return path


def _chat(i: int) -> dict[str, Any]:
    turns = ({"role": "user", "content": _text(i, 45)}, {"role": "assistant", "content": _text(i + 1, 60)})
    return {"messages": list(turns)}


def _text(i: int, words: int) -> str:
    return " ".join(WORDS[(i * 31 + at * at * 7) % len(WORDS)] for at in range(words))


if __name__ == "__main__":
    main()
