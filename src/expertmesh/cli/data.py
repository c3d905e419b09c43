"""`expertmesh check CONFIG.yaml` and `expertmesh prepare CONFIG.yaml`: the verbs about the data of a run.

`check` is for someone about to start a run: whether training would start, the layout and what a step is predicted to
take, the first samples as the chat template renders them, with the target tokens in colour (between [[ and ]] when
piped), file and line of rows that will not be trained on, and what `train` would refuse before it reads weights. What
another machine or `output_dir` mends is a note; all else ends with the refusal, after the data. Data that is prepared
is not tokenized again.

`prepare` tokenizes the data by all processors of this machine, where no accelerator has to wait. Afterwards `train` on
any number of ranks, `check` and `verify` map the tokens; `train` prepares data itself that is not prepared.

Both read the model's config.json and tokenizer, never its weights, and never start a process group.
"""

import math
import multiprocessing
import os
import shutil
import signal
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from expertmesh.adapters.plan import plan_lines
from expertmesh.cli.printing import Terminal
from expertmesh.config import Config, InputError
from expertmesh.config.errors import DistributedFailure, ExpertmeshError
from expertmesh.data import (
    IGNORE,
    BatchLayout,
    DataReport,
    Mixture,
    Preparation,
    PreparedData,
    Recipe,
    TokenizedDataset,
    TrainingBatches,
    found_or_built,
    load_tokenizer,
    padding_token_id,
)
from expertmesh.data.loader import accumulation_of
from expertmesh.data.sources import RowShare
from expertmesh.distributed.environment import processors
from expertmesh.distributed.layout import CONFIGURED_AXES
from expertmesh.io.parent import end_with_parent
from expertmesh.io.terminal import counted, plural, printable
from expertmesh.launcher.launch import has_room_for, job_size
from expertmesh.planning.forecast import forecast
from expertmesh.state.model_view import sharded
from expertmesh.training.reporting.start import pieces_of
from expertmesh.training.startup.data import held_by_another, refuse_idle_tower, stop_where_taught, with_images
from expertmesh.training.startup.model_check import Checked
from expertmesh.training.startup.preflight import preflight
from expertmesh.weights.meta_model import read_model_config

TARGET_STYLE = "bold green"
TOKENS_SHOWN = 1000
BAR_WIDTH = 40
FEW_STEPS = 20
_SECONDS_BETWEEN_LOOKS = 2.0


def run_check(config: Config, samples: int = 3, nproc: int | None = None) -> int:
    """Print the report on `config` and its data, with the first `samples` samples; returns 0.

    The layout is that of `nproc` ranks, by default of as many as `train` would start here, or the fewest that the axes
    in `config` make. Raises `InputError` for what would stop training anywhere, after the data where these can be read:
    what preflight refuses, a malformed row under `data.on_error: stop`, data without any target.
    """
    console, notes = Terminal(soft_wrap=True), list[ExpertmeshError]()
    found: Checked | InputError
    try:
        found = checked_here(config, nproc, notes)
    except InputError as error:
        found = error
    try:
        _print_all(console, config, samples, found, nproc)
    except InputError as error:
        raise (found if isinstance(found, InputError) else error) from None
    if isinstance(found, InputError):
        raise found
    for line in note_lines(notes):
        console.print(line, style="yellow")
    return 0


def note_lines(notes: Sequence[ExpertmeshError]) -> Iterator[str]:
    """Say what stops `train` here and would not with another machine or `output_dir`."""
    return (f"note: train would stop here: {note}" for note in notes)


def _print_all(console: Console, config: Config, samples: int, found: Checked | InputError, nproc: int | None) -> None:
    """Print the model, the job and the data; `found` is the model's shards, or why there are none."""
    model = config.model
    read, directory = read_model_config(model.name_or_path, model.revision, model.trust_remote_code, weights=False)
    vocab_size = int(read.get_text_config().vocab_size)
    tokenizer = load_tokenizer(model, config.data.chat_template)
    console.print(f"model {model.name_or_path}: {vocab_size:,} embeddings, {len(tokenizer):,} tokens known")
    if isinstance(found, Checked):
        _print_job(console, config, found, nproc)
    else:
        console.print(f"refused    {found}", style="bold red")

    recipe = Recipe.of(config, config.data.train, tokenizer, (read, directory))
    dataset, report = found_or_built(config, recipe)
    if isinstance(found, Checked):
        stop_where_taught(found.model, report, tokenizer)
        refuse_idle_tower(config, dataset)
        with_images(config, found, dataset)
    mixture = None if config.data.stream else Mixture.of(config.data.train, report, dataset.samples_per_row)
    for index in range(min(samples * dataset.samples_per_row, len(dataset))):
        _print_sample(console, dataset, index, tokenizer)
    _print_report(console, "train", config, report)
    _print_steps(console, config, dataset, mixture, padding_token_id(tokenizer, vocab_size))
    for name, sources in config.data.eval_sets().items():
        dataset, report = found_or_built(config, replace(recipe, sources=sources))
        if isinstance(found, Checked):
            with_images(config, found, dataset)
        _print_report(console, f"eval {name}".strip(), config, report)


def checked_here(config: Config, nproc: int | None = None, notes: list[ExpertmeshError] | None = None) -> Checked:
    """Return the result of preflight for `nproc` ranks, by default those that `train` would start here.

    `notes` as in `preflight`.
    """
    here, per_node = _ranks_here(nproc)
    # A job with these axes has a multiple of so many ranks, or exactly these if fsdp is a number.
    axes = config.parallel
    shared, ep = axes.cp * axes.tp, 1 if axes.ep == "auto" else axes.ep
    fsdp = ep // math.gcd(ep, shared) if axes.fsdp == "auto" else axes.fsdp
    fewest = axes.pp * axes.replicate * shared * fsdp
    ranks = nproc or (here if here % fewest == 0 else fewest)
    return preflight(config, ranks, per_node if ranks == here else None, weights=False, notes=notes)


def _ranks_here(nproc: int | None) -> tuple[int, int | None]:
    """Return the ranks that `train` would start here (--nproc, if there is room), and those on this machine."""
    return (nproc, nproc) if nproc is not None and has_room_for(nproc) else job_size()


def _print_job(console: Console, config: Config, checked: Checked, nproc: int | None) -> None:
    here, _ = _ranks_here(nproc)
    layout = checked.layout
    axes = ", ".join(f"{axis} {layout.size(axis)}" for axis in CONFIGURED_AXES)
    reason = f" ({checked.layout_reason})" if checked.layout_reason else ""
    console.print(f"layout of {plural(layout.world_size, 'rank')}: {axes}{reason}")
    if layout.world_size == here:
        predicted = forecast(config, checked)
        checked = checked.in_order(predicted.order)
        console.print(f"predicted  {predicted.line}")
    else:
        console.print(f"predicted  nothing: train would start {plural(here, 'rank')} here; see expertmesh plan")
    train = config.train
    accumulation = accumulation_of(train.global_batch_size, train.micro_batch_size, layout.data_ranks)
    if accumulation > 1 or train.accumulate == "by_layer":
        console.print(
            f"{accumulation} micro-batch{'es' * (accumulation > 1)} a step {checked.order_line(accumulation)}"
        )
    adapters = sharded(checked.model).lora_plan
    for line in () if adapters is None else plan_lines(adapters, checked.anatomy):
        console.print(f"lora {line}")


def _print_sample(console: Console, dataset: TokenizedDataset, index: int, tokenizer: PreTrainedTokenizerBase) -> None:
    sample = dataset.sample(index)
    targets = (sample.labels != IGNORE).tolist()
    text = Text()
    pieces, hidden = pieces_of(dataset, index, tokenizer, TOKENS_SHOWN)
    for each in pieces:
        piece = printable(each.text)
        marked = piece if console.is_terminal or not each.is_target else f"[[{piece}]]"
        text.append(marked, style=TARGET_STYLE if each.is_target else "")
    if hidden:
        text.append(f"\n… {hidden:,} more tokens", style="dim")
    kind = ("chosen", "rejected")[index % 2] if dataset.samples_per_row == 2 else "sample"
    if dataset.desirable is not None:
        kind = "desirable" if dataset.desirable[index] else "undesirable"
    console.print(
        f"\n{kind} {dataset.position(index)}: {len(targets):,} tokens, {sum(targets):,} targets", style="bold"
    )
    console.print(text)


def _print_report(console: Console, name: str, config: Config, report: DataReport) -> None:
    console.print(f"\n{name} data", style="bold")
    for line in report.lines():
        console.print(line)
    share = f"{report.target_tokens / report.tokens:.0%}"
    has_turns = config.data.loss_on == "assistant" and any(source.format != "text" for source in report.sources)
    if has_turns and share in ("0%", "100%"):  # which is how a broken mask looks
        console.print(
            f"warning: {share} of all tokens are targets under data.loss_on: assistant; look at the samples above, and "
            "at the chat template's {% generation %} marks.",
            style="yellow",
        )
    console.print("\nlength in tokens, before cutting", style="bold")
    most = max(bin.samples for bin in report.histogram)
    for bin in report.histogram:
        span = f"{bin.above + 1:>7,} – {bin.up_to:<7,}" if bin.up_to else f"{'>':>7} {bin.above:<9,}"
        bar = "█" * -(-bin.samples * BAR_WIDTH // most)
        console.print(f"{span} {bar:<{BAR_WIDTH}} {bin.samples:,}")


def _print_steps(
    console: Console, config: Config, dataset: TokenizedDataset, mixture: Mixture | None, pad_token_id: int
) -> None:
    size = config.train.global_batch_size
    # One rank that takes the whole global batch: steps do not depend on the layout, which is unknown here.
    layout = BatchLayout(
        micro_batch_size=size,
        data_rank=0,
        data_ranks=1,
        packing=config.data.packing,
        pad_token_id=pad_token_id,
        max_length=config.data.max_length,
    )
    batches = TrainingBatches(
        dataset, layout, global_batch_size=size, shuffle=config.data.shuffle, seed=config.train.seed, mixture=mixture
    )
    plan = batches.plan(0)
    console.print("\nsteps", style="bold")
    if config.data.packing:
        rows = f"{len(plan.rows):,} rows of {config.data.max_length:,} tokens"
        samples = sum(map(len, plan.rows))
        console.print(f"packing: {samples:,} samples in {rows}, {plan.fill:.1%} full")
    if config.data.stream:
        console.print(f"global batch {size:,} rows: {config.train.max_steps:,} steps of the stream")
        return
    epochs, rows = config.train.num_epochs, "pairs" if dataset.samples_per_row == 2 else "rows"
    first, total = batches.steps_per_epoch, batches.total_steps(epochs)
    console.print(
        f"global batch {size:,} {rows}: {plural(first, 'step')} in the first epoch, "
        f"{total:,} in {plural(epochs, 'epoch')}"
    )
    if total < min(FEW_STEPS, config.train.max_steps or FEW_STEPS):
        console.print(
            f"warning: {plural(total, 'optimizer step')} in all teach little; lower train.global_batch_size "
            f"({size:,}) or raise train.num_epochs ({epochs:,})",
            style="yellow",
        )


def run_prepare(config: Config, workers: int | None = None) -> int:
    """Prepare `data.train` and `data.eval` with so many processes, by default one for each processor; returns 0.

    Raises what `train` would raise about them and about the model; what another machine or `output_dir` mends is noted.
    """
    notes: list[ExpertmeshError] = []
    checked = checked_here(config, notes=notes)
    tokenizer = load_tokenizer(config.model, config.data.chat_template)
    date = None
    sets = {f"eval {name}".strip(): sources for name, sources in config.data.eval_sets().items()}
    if config.data.stream:
        print("train data: is read as a stream, so there is nothing to prepare")
    else:
        sets = {"train": config.data.train} | sets
    for name, sources in sets.items():
        recipe = Recipe.of(config, sources, tokenizer, (checked.model_config, checked.directory), date)
        found = prepare(name, Preparation.of(config, recipe), workers or processors())
        date = date or found.date
        print("\n".join(found.report.lines()))
        print(f"{name} data: {found.directory}", flush=True)
    print("\n".join(note_lines(notes)), end="\n" * bool(notes))
    return 0


def prepare(name: str, preparation: Preparation, workers: int) -> PreparedData:
    """Find the prepared tokens of the set `name`, or make them in `workers` processes; print which."""
    with ExitStack() as stack:
        while (found := preparation.find()) is None and (holder := held_by_another(stack, preparation)):
            print(f"{name} data: waiting for {holder}, which tokenizes it", flush=True)
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        if (found := found or preparation.find()) is not None:
            print(f"{name} data: is prepared already")
            return found
        if preparation.is_stale():
            print(f"{name} data: its rows have changed since it was prepared")
        began, building = time.monotonic(), preparation.building(uuid.uuid4().hex)
        try:
            rows = _write(name, preparation, building, workers)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
        preparation.finish(building, workers)
    seconds = time.monotonic() - began
    print(f"{name} data: {plural(rows, 'row')} in {seconds:.1f} s, {rows / seconds:,.0f} rows/s, {workers} processes")
    found = preparation.find()
    assert found is not None
    return found


def _write(name: str, preparation: Preparation, building: Path, workers: int) -> int:
    """Let `workers` processes write their shares; returns how many rows there were."""
    context = multiprocessing.get_context("fork")
    running: dict[Connection, BaseProcess] = {}
    for index in range(workers):
        receiver, sender = context.Pipe(duplex=False)
        arguments = preparation, building, RowShare(index, workers), sender
        running[receiver] = context.Process(target=_work, args=arguments, daemon=True)
        running[receiver].start()
        sender.close()
    rows = 0
    try:
        with counted(f"tokenizing {name} data", "rows") as told:  # after the forks: a bar has a thread
            while running:
                for ready in wait(list(running)):
                    assert isinstance(ready, Connection)
                    try:
                        more = ready.recv()
                    except EOFError:
                        process = running.pop(ready)
                        process.join()
                        if process.exitcode:
                            raise DistributedFailure(
                                f"a process that tokenizes ended with {process.exitcode}, perhaps for want of memory; "
                                "start again with fewer --workers",
                                key="data.worker-ended",
                            ) from None
                        continue
                    rows += more
                    told(more)
    finally:
        for process in running.values():
            process.kill()
            process.join()
    return rows


def _work(preparation: Preparation, building: Path, share: RowShare, sender: Connection) -> None:
    # A terminal's Ctrl-C is for the process that started this one, whose end is the end of this one as well.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    # One thread each: there are as many processes as processors.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    preparation.write_share(building, share, sender.send)
