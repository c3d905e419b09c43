"""`expertmesh check CONFIG.yaml`: what training would see: samples, targets, lengths, lost rows.

For someone about to start a run: the first samples as the chat template renders them, with the target tokens
in colour (between [[ and ]] when piped), and file and line of rows that will not be trained on. Reads the
model's config.json and tokenizer; never its weights, and never starts a process group.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from expertmesh.adapters.plan import adapt, plan_lines
from expertmesh.adapters.start import check_files
from expertmesh.anatomy import describe
from expertmesh.config import Config, LoraConfig
from expertmesh.data import (
    IGNORE,
    DataReport,
    TokenizedDataset,
    TrainingBatches,
    build_dataset,
    load_tokenizer,
    padding_token_id,
)
from expertmesh.io.terminal import printable
from expertmesh.weights.meta_model import build_meta_model, read_model_config

TARGET_STYLE = "bold green"
TOKENS_SHOWN = 1000
BAR_WIDTH = 40


def run(config: Config, samples: int = 3) -> int:
    """Print the report on `config`'s data, with the first `samples` samples; returns 0.

    Raises `InputError` for what would stop training: a tokenizer that cannot be loaded, adapters that the model cannot
    have, a malformed row under `data.on_error: stop`, data without any target.
    """
    model = config.model
    model_config, directory = read_model_config(
        model.name_or_path, model.revision, model.trust_remote_code, weights=False
    )
    vocab_size = int(model_config.get_text_config().vocab_size)
    tokenizer = load_tokenizer(model)
    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False, soft_wrap=True)
    console.print(f"model {model.name_or_path}: {vocab_size:,} embeddings, {len(tokenizer):,} tokens known")
    if config.lora is not None:
        for line in _adapters(config, config.lora, model_config, directory):
            console.print(f"lora {line}")

    dataset, report = build_dataset(config.data.train, config.data, tokenizer, model_vocab_size=vocab_size)
    for index in range(min(samples, len(dataset))):
        _print_sample(console, dataset, index, tokenizer)
    _print_report(console, "train", config, report)
    _print_steps(console, config, dataset, padding_token_id(tokenizer, vocab_size))
    if config.data.eval:
        _, report = build_dataset(config.data.eval, config.data, tokenizer, model_vocab_size=vocab_size)
        _print_report(console, "eval", config, report)
    return 0


def _adapters(config: Config, lora: LoraConfig, model_config: PreTrainedConfig, directory: Path) -> Iterator[str]:
    """What training would print about adapters, from the model on meta; raises what it would raise before weights."""
    trust = config.model.trust_remote_code
    model = build_meta_model(model_config, torch.bfloat16, directory=directory, trust_remote_code=trust)
    plan = adapt(model, lora, torch.float32, config.model.name_or_path)
    check_files(plan)
    return plan_lines(plan, describe(model))


def _print_sample(console: Console, dataset: TokenizedDataset, index: int, tokenizer: PreTrainedTokenizerBase) -> None:
    sample = dataset.sample(index)
    targets = (sample.labels != IGNORE).tolist()
    text = Text()
    runs: list[tuple[bool, list[int]]] = []
    for token_id, is_target in zip(sample.input_ids[:TOKENS_SHOWN].tolist(), targets, strict=False):
        if not runs or runs[-1][0] != is_target:
            runs.append((is_target, []))
        runs[-1][1].append(token_id)
    for is_target, ids in runs:
        piece = printable(str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)))
        marked = piece if console.is_terminal or not is_target else f"[[{piece}]]"
        text.append(marked, style=TARGET_STYLE if is_target else "")
    if (hidden := len(targets) - TOKENS_SHOWN) > 0:
        text.append(f"\n… {hidden:,} more tokens", style="dim")
    console.print(
        f"\nsample {dataset.position(index)}: {len(targets):,} tokens, {sum(targets):,} targets", style="bold"
    )
    console.print(text)


def _print_report(console: Console, name: str, config: Config, report: DataReport) -> None:
    console.print(f"\n{name} data", style="bold")
    for line in report.lines():
        console.print(line)
    if warning := _share_warning(config, report):
        console.print(f"warning: {warning}", style="yellow")
    console.print("\nlength in tokens, before cutting", style="bold")
    most = max(bin.samples for bin in report.histogram)
    for bin in report.histogram:
        span = f"{bin.above + 1:>7,} – {bin.up_to:<7,}" if bin.up_to else f"{'>':>7} {bin.above:<9,}"
        bar = "█" * -(-bin.samples * BAR_WIDTH // most)
        console.print(f"{span} {bar:<{BAR_WIDTH}} {bin.samples:,}")


def _share_warning(config: Config, report: DataReport) -> str | None:
    """A target share of nothing or everything is what a broken mask looks like."""
    if config.data.loss_on != "assistant" or all(source.format == "text" for source in report.sources):
        return None
    share = f"{report.target_tokens / report.tokens:.0%}"
    if share not in ("0%", "100%"):
        return None
    return (
        f"{share} of all tokens are targets under data.loss_on: assistant; look at the samples above, and at "
        "the chat template's {% generation %} marks."
    )


def _print_steps(console: Console, config: Config, dataset: TokenizedDataset, pad_token_id: int) -> None:
    size = config.train.global_batch_size
    # One rank that takes the whole global batch: steps do not depend on the layout, which is unknown here.
    batches = TrainingBatches(
        dataset,
        global_batch_size=size,
        micro_batch_size=size,
        data_rank=0,
        data_ranks=1,
        packing=config.data.packing,
        shuffle=config.data.shuffle,
        seed=config.train.seed,
        pad_token_id=pad_token_id,
        max_length=config.data.max_length,
    )
    plan = batches.plan(0)
    console.print("\nsteps", style="bold")
    if config.data.packing:
        rows = f"{len(plan.rows):,} rows of {config.data.max_length:,} tokens"
        console.print(f"packing: {len(dataset):,} samples in {rows}, {plan.fill:.1%} full")
    epochs = config.train.num_epochs
    console.print(
        f"global batch {size:,} rows: {batches.steps_per_epoch:,} steps in the first epoch, "
        f"{batches.total_steps(epochs):,} in {epochs:,} epoch{'s' * (epochs != 1)}"
    )
