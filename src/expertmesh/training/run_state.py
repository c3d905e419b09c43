"""Load what a run trains and steps, save it as checkpoints while the run goes, and write and publish the result.

The loop asks after each step whether to save; checkpoint/write.py writes. All ranks decide the same, from numbers that
all of them have: the step, rank 0's clock, the status of every writer in the step's exchange, and evaluations, which
tell the best checkpoint and whether training still helps. A result has a model card (README.md) with the recipe, the
figures and the findings of `verify`, and no path of this machine. The push to the hub comes last, by rank 0 alone: when
it fails, the run is finished and its result is in output_dir.
"""

import json
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from expertmesh.adapters.save import save_adapter
from expertmesh.adapters.start import start_adapters
from expertmesh.checkpoint.directory import CHECKPOINTS, clean, step_name
from expertmesh.checkpoint.interface import load_directory
from expertmesh.checkpoint.small_files import STATE_FILE, sidecar_files, state_bytes
from expertmesh.checkpoint.write import CheckpointWriter, SavedCheckpoint
from expertmesh.config import Config, dump_config
from expertmesh.config.errors import ExpertmeshError, InputError
from expertmesh.distributed.all_ranks import from_rank_0, raise_on_all_ranks
from expertmesh.io.directory import replace_synced
from expertmesh.io.terminal import bytes_text, first_line, plural
from expertmesh.model import fill_and_audit
from expertmesh.training.objective import reference_file
from expertmesh.training.optimizers.build import build_optimizer, build_schedule
from expertmesh.training.reporting.weights import AUDIT_FILE, adapter_lines, dtype_text, loaded_lines, saved_lines
from expertmesh.training.resume import Best, Counters, flat, read_counters
from expertmesh.training.startup.output_dir import RunUploads, result_of, start_uploads
from expertmesh.training.startup.prepare import Prepared, say
from expertmesh.weights.audit import write_audit
from expertmesh.weights.meta_model import materialize
from expertmesh.weights.save import save_model
from expertmesh.weights.sidecars import CopiedFiles, model_files, tokenizer_files

if TYPE_CHECKING:
    from expertmesh.training.control import Control

log = logging.getLogger(__name__)
# Seconds until the first save of a start under `every_minutes: auto`; the cost of that save then sets the interval.
FIRST_SECONDS = 300.0
# The time of an upload before a stop, as a share of distributed.timeout_seconds.
_SHARE_OF_TIMEOUT = 0.8
# Report a new interval between saves if it differs by at least this share.
_WORTH_A_LINE = 0.2
CARD = "README.md"
# The configuration keys that the model card lists; `_name` adds paths.
_RECIPE = (
    "objective", "optim", "schedule", "lora", "precision.params", "precision.compute", "precision.frozen",
    "data.max_length", "data.packing", "data.loss_on", "train.global_batch_size", "train.num_epochs", "train.max_steps",
    "train.seed", "moe.router", "moe.aux_loss_coef", "moe.z_loss_coef", "moe.bias_update_rate",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunState:
    """The state beside the model, which is filled in place."""

    optimizer: Optimizer
    """The optimizer, with the state of the checkpoint if there is one."""
    schedule: LRScheduler
    """The learning rate of the next step."""
    counters: Counters
    """Step and timers."""


def load_state(run: Prepared, control: "Control") -> RunState:
    """Fill the model from the checkpoint to go on from, or from the weights that training begins with.

    A frozen base always comes from its own files: checkpoints hold the adapters alone, and the base's hash. Every rank
    calls it.
    """
    config, is_main = run.config, run.mesh.rank == 0
    check_hub(config)
    if (run.start is None and run.weights is None) or config.lora is not None:
        drawn, seed = run.checked.weights_seed is not None, config.train.seed
        say(control, "drawing weights" if drawn else "loading weights")
        loaded, audited = fill_and_audit(
            run.model, run.checked.directory, run.mesh, control.audit, seed, from_config=drawn
        )
        if is_main and audited is None:
            log.info(f"weights    random, drawn from train.seed {seed}; there are no files to audit them by")
        elif is_main and audited is not None:
            output = Path(config.output_dir)
            if audited.mode == "full":
                write_audit(output / AUDIT_FILE, audited, run.checked.directory)
            log.info("\n".join(loaded_lines(loaded, audited, output)))
            if loaded.new:
                log.info(f"new head   {', '.join(loaded.new)}: not in the files, drawn from train.seed {seed}")
        start_adapters(run.model, config.train.seed)
    else:
        materialize(run.model, run.mesh.device)
    if run.weights is not None:
        say(control, "loading the weights of another run's checkpoint")
        step = load_directory(run.model, None, run.weights).step
        torch.manual_seed(config.train.seed + run.mesh.rank)  # generators come with a checkpoint
        if is_main:
            log.info(f"weights    {run.weights}, after step {step}; all else begins anew")
    if (teacher := run.checked.objective.teacher) is not None:
        say(control, "loading the teacher's weights")
        teacher.load(run.mesh, control.audit)
    if run.checked.objective.precomputes:
        say(control, "the reference: log-probabilities of all rows")
        run.checked.objective.give_reference(
            run.model, run.mesh, run.data.datasets, run.batch_layout, run.start, list(run.mismatched())
        )
    compute = getattr(torch, config.precision.compute)
    optimizer, counters = build_optimizer(run.model, config.optim, config.train.seed, compute), Counters()
    if run.start is not None:
        say(control, "loading the checkpoint")
        saved = load_directory(run.model, optimizer, run.start)
        counters = read_counters(run.start, saved.state["counters"], saved.step)
        _forget_best_elsewhere(config, counters)
        if is_main:
            log.info(f"resume     {run.start.name}, after step {saved.step}; {'; '.join(run.changes)}")
            if control.audit == "full" and config.lora is None:
                log.info("audit      nothing was read from the model's files; expertmesh verify checks the checkpoint")
    return RunState(optimizer, build_schedule(optimizer, config.schedule, run.total_steps, counters.step), counters)


def save_result(run: Prepared, tokenizer: CopiedFiles) -> None:
    """Write the trained model, or its adapters alone, and print it. Every rank calls it; rank 0 prints.

    `tokenizer`: on rank 0, the files of the tokenizer, and of a full model's processor.
    """
    config, (directory, _) = run.config, result_of(run.config)
    if config.lora is not None:
        adapter = save_adapter(run.model, directory, tokenizer=tokenizer)
        lines, dtype = adapter_lines(adapter), ""
    else:
        saved = save_model(run.model, directory, tokenizer=tokenizer, dtype=config.save.dtype)
        lines, dtype = saved_lines(saved), f" in {dtype_text(saved)}"
    if run.mesh.rank == 0:
        # In place of a card that the adapter's library made.
        replace_synced(directory / CARD, "\n".join(_card(config)).encode() + b"\n")
        log.info("\n".join([*lines, f"saved {directory}{dtype}; metrics in {directory.parent / 'metrics.jsonl'}"]))


@dataclass(slots=True)
class Selection:
    """The rules of `checkpoint.keep_best` and `train.early_stop`; their state is in `counters`."""

    config: Config
    counters: Counters

    def saw(self, step: int, row: Mapping[str, Any]) -> bool:
        """Take the figures of an evaluation; return whether to save a checkpoint because they are the best so far."""
        stop, counters = self.config.train.early_stop, self.counters
        if stop is not None:
            before = counters.least
            counters.least = _better(before, stop.figure, row[stop.figure], step, stop.min_change)
            counters.no_better = 0 if counters.least is not before else counters.no_better + 1
        figure = self.config.checkpoint.keep_best
        if figure is None:
            return False
        best = counters.best
        counters.best = _better(best, figure, row[figure], step)
        return counters.best is not best

    def ends(self) -> bool:
        """Return whether the run is over."""
        stop = self.config.train.early_stop
        return stop is not None and self.counters.no_better >= stop.patience

    def last_lines(self) -> list[str]:
        """Return the lines for the end of the run."""
        lines, counters, stop = [], self.counters, self.config.train.early_stop
        if self.ends() and stop is not None and counters.least is not None:
            lines.append(
                f"stopped early: {stop.figure} was best ({counters.least.value:.4f}) after step {counters.least.step}, "
                f"{counters.no_better} evaluations ago"
            )
        if counters.best is not None:
            best = counters.best
            lines.append(f"best {best.figure} {best.value:.4f}: checkpoint {step_name(best.step)}")
        return lines


def _forget_best_elsewhere(config: Config, counters: Counters) -> None:
    """Begin the best of `checkpoint.keep_best` anew where the run that this one goes on from has kept its checkpoint.

    Collectives: every rank calls it; broadcasts of one number.
    """
    best = counters.best
    if best is None or config.checkpoint.remote is not None:  # storage keeps it
        return
    directory = Path(config.output_dir) / CHECKPOINTS / step_name(best.step)
    if not from_rank_0(directory.is_dir()):
        if dist.get_rank() == 0:
            log.info(f"           best {best.figure} {best.value:.4f}: {directory.name} is not in {directory.parent}")
        counters.best = None


def _better(before: Best | None, figure: str, value: float, step: int, min_change: float = 0.0) -> Best | None:
    """Return `before`, or the new value if it is better; a NaN never is."""
    if math.isnan(value):
        return before
    if before is None or before.figure != figure:
        return Best(figure, value, step)
    gain = before.value - value if figure.endswith("loss") else value - before.value
    return Best(figure, value, step) if gain > min_change else before


@dataclass(slots=True)
class RunCheckpoints:
    """The checkpoints of one run. Every rank has one and uses it in step; make it with `open_checkpoints`."""

    run: Prepared
    state: RunState
    writer: CheckpointWriter
    files: Mapping[str, bytes]
    """Content of small files that every checkpoint holds, by name."""
    beside_weights: CopiedFiles
    """The files that rank 0 writes with the result in place of the tokenizer: the base may be deleted by then."""
    selection: Selection
    uploads: RunUploads | None
    saved_at: float = field(default_factory=time.monotonic)
    """`time.monotonic()` of the last checkpoint."""
    auto_seconds: float = FIRST_SECONDS
    """Seconds between saves for `every_minutes: auto`, by the cost of the last save."""

    def overdue(self) -> bool:
        """Return whether `every_minutes` have passed by this rank's clock; only rank 0's answer counts."""
        minutes = self.run.config.checkpoint.every_minutes
        seconds = self.auto_seconds if minutes == "auto" else None if minutes is None else 60 * minutes
        return seconds is not None and time.monotonic() - self.saved_at >= seconds

    def is_due(self, step: int, overdue: bool) -> bool:
        """Return whether to save after `step` by the rules; `overdue` is rank 0's."""
        every = self.run.config.checkpoint.every_steps
        return overdue or (every is not None and step % every == 0)

    def settle(self, ranks: Sequence[int]) -> None:
        """Publish what all ranks have written by now; `ranks` as in `CheckpointWriter.settle`."""
        self._note_saved(self.writer.settle(ranks))

    def save(self) -> None:
        """Save the state after `counters.step`, first waiting for an earlier checkpoint. Every rank calls it."""
        self._note_saved(self.writer.finish())
        counters, optimizer = self.state.counters, self.state.optimizer
        state: dict[str, Any] = {"identity": asdict(self.run.identity), "counters": asdict(counters)}
        state["total_steps"] = self.run.total_steps
        self.writer.keep_step = counters.best.step if counters.best is not None else None
        files = {**self.files, STATE_FILE: state_bytes(counters.step, state, optimizer)}
        saved = self.writer.save(self.run.model, optimizer, counters.step, files)
        self.saved_at = time.monotonic()
        self._note_saved(saved)

    def finish(self) -> None:
        """Wait until the last checkpoint is on the disk. Every rank calls it."""
        self._note_saved(self.writer.close())

    def upload_before_stopping(self) -> None:
        """Upload the last checkpoint to object storage: a machine that stops may not come back.

        Takes no longer than the time that leaves the other ranks waiting; what cannot be uploaded is reported, and the
        run goes on from its own directory. Every rank calls it: launchers end all ranks when the first has ended.
        """
        if self.uploads is None:
            return
        with raise_on_all_ranks("uploading the last checkpoint"):
            if self.run.mesh.rank == 0:
                try:
                    self.uploads.finish(_SHARE_OF_TIMEOUT * self.run.config.distributed.timeout_seconds)
                except ExpertmeshError as error:
                    log.warning(f"warning: {error}")

    def _note_saved(self, saved: SavedCheckpoint | None) -> None:
        if saved is None:
            return
        config, ranks = self.run.config.checkpoint, self.run.mesh.layout.world_size
        before = self.auto_seconds
        self.auto_seconds = best_interval(saved, 3600 * config.device_hours_per_failure / ranks)
        if self.run.mesh.rank == 0:
            log.info(
                f"checkpoint {saved.directory.name}: {saved.files} files, {bytes_text(saved.total_bytes)}, "
                f"written in {saved.seconds:.1f} s, training paused {saved.paused_seconds:.2f} s"
            )
            unchanged = abs(self.auto_seconds / before - 1) < _WORTH_A_LINE
            if config.every_minutes == "auto" and not unchanged:
                log.info(
                    f"           saved every {self.auto_seconds / 60:.3g} minutes from here on: a save pauses training "
                    f"for {saved.paused_seconds:.2f} s, and {ranks} ranks fail every "
                    f"{config.device_hours_per_failure / ranks:,.3g} h (checkpoint.device_hours_per_failure)"
                )


def best_interval(saved: SavedCheckpoint, seconds_between_failures: float) -> float:
    """Return the seconds between saves that lose least by pauses and by work done again (Young's rule).

    It is never less than a save takes.
    """
    return max(math.sqrt(2 * saved.paused_seconds * seconds_between_failures), saved.seconds)


def open_checkpoints(run: Prepared, state: RunState) -> RunCheckpoints:
    """Prepare for saving, and remove what interrupted saves have left.

    Collectives: every rank calls it; two small all-reduces, and with `checkpoint.remote` a broadcast.
    """
    config, is_main, output = run.config, run.mesh.rank == 0, Path(run.config.output_dir)
    directory = output / CHECKPOINTS
    files: dict[str, bytes] = {}
    beside: dict[str, bytes] = {}
    with raise_on_all_ranks("preparing checkpoints"):
        if is_main:
            beside = tokenizer_files(run.data.tokenizer, run.checked.directory)
            if config.lora is None:
                beside |= model_files(run.checked.directory, code=config.model.trust_remote_code)
            own = sidecar_files(run.model, CopiedFiles(beside), config.save.dtype)
            files = {"config.yaml": dump_config(config).encode(), **own}
            files |= reference_file(run.data.datasets)
    with raise_on_all_ranks("cleaning up after interrupted checkpoints"):
        if is_main and (leftovers := [*clean(directory), *clean(output)]):
            log.info(f"removed what interrupted saves left: {', '.join(leftovers)}")
    keep_last, asynchronous = config.checkpoint.keep_last, config.checkpoint.asynchronous
    best = state.counters.best
    uploads = start_uploads(config, None if best is None else best.step)
    queue = None if uploads is None else uploads.queue
    writer = CheckpointWriter(directory, keep_last=keep_last, asynchronous=asynchronous, uploads=queue)
    selection = Selection(config, state.counters)
    copied = CopiedFiles(beside)
    return RunCheckpoints(run, state, writer, files, copied, selection, uploads)


def check_hub(config: Config) -> None:
    """Refuse `save.push_to_hub` without a log-in. Every rank calls it before weights are read; one small all-reduce."""
    with raise_on_all_ranks("asking the hub"):
        if config.save.push_to_hub is not None and dist.get_rank() == 0:
            from huggingface_hub import HfApi

            try:
                HfApi().whoami()
            except Exception as error:
                raise InputError(
                    f"save.push_to_hub {config.save.push_to_hub}: the hub does not know who asks "
                    f"({first_line(error).rstrip('.')}); log in (hf auth login, or HF_TOKEN), or set save.push_to_hub "
                    "to null and push later",
                    key="save.hub-refused",
                ) from error


def push_result(config: Config) -> None:
    """Push the result of a finished run, after everything else and without a collective: an upload may take long.

    Raises `InputError` on rank 0 if it fails.
    """
    repository = config.save.push_to_hub
    if repository is None or dist.get_rank() != 0:
        return
    from huggingface_hub import HfApi

    folder, _ = result_of(config)
    log.info(f"pushing    {folder} to {repository}")
    try:
        HfApi().create_repo(repository, private=config.save.hub_private, exist_ok=True)
        HfApi().upload_folder(repo_id=repository, folder_path=folder, commit_message="Trained with expertmesh")
    except Exception as error:
        raise InputError(
            f"save.push_to_hub {repository}: {first_line(error).rstrip('.')}; the run is finished and its result is in "
            f"{folder}: push it with hf upload {repository} {folder}",
            key="save.push-failed",
        ) from error
    log.info(f"pushed     https://huggingface.co/{repository}")


def _card(config: Config) -> Iterator[str]:
    base, adapter = config.model.name_or_path, config.lora is not None
    yield "---"
    yield f"library_name: {'peft' if adapter else 'transformers'}"
    if not Path(base).exists() and "://" not in base:
        yield f"base_model: {json.dumps(base)}"
    yield f"tags: [expertmesh, mixture-of-experts, {config.objective.name}{', lora' if adapter else ''}]"
    yield "---"
    yield f"\n# {Path(config.save.push_to_hub or Path(config.output_dir).absolute()).name}\n"
    sources = ", ".join(f"`{_name(source.path)}`" for source in config.data.train)
    what = "Trained from random weights with the config of" if config.model.from_config else "Fine-tuned from"
    yield (
        f"{'A LoRA adapter for' if adapter else what} `{_name(base)}`, trained with "
        f"[expertmesh](https://github.com/expertmesh/expertmesh) on {sources}."
    )
    yield "\n## Figures\n"
    yield from (f"- {line}" for line in _figures(Path(config.output_dir)))
    yield f"- {_verified(Path(config.output_dir) / 'verification.json')}"
    yield "\n## Recipe\n\n| key | value |\n|---|---|"
    values = flat(config.model_dump(mode="json"))
    for key, value in values.items():
        if key == "moe.router" and adapter:
            continue  # routers that have no adapters are frozen, whatever it says
        if value is not None and any(key == name or key.startswith(f"{name}.") for name in _RECIPE):
            yield f"| `{key}` | {_name(value) if isinstance(value, str) else json.dumps(value)} |"


def _name(path: str) -> str:
    """Return a hub id in full, and of a path on this machine the last part."""
    return Path(path).name if path.startswith((".", "/", "~")) or Path(path).exists() else path


def _figures(output_dir: Path) -> Iterator[str]:
    """Return figures from metrics.jsonl, which this run has written."""
    rows = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_bytes().splitlines()]
    steps, evaluations = [row for row in rows if "loss" in row], [row for row in rows if "eval_loss" in row]
    if steps:
        yield f"{plural(steps[-1]['step'], 'step')}, {steps[-1]['epoch']:.2f} passes over the data"
        first, last = (_shown(row["loss"]) for row in (steps[0], steps[-1]))
        yield f"training loss {first} at the first reported step, {last} at the last"
    if evaluations:
        yield f"evaluation loss {_shown(evaluations[-1]['eval_loss'])}"


def _shown(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "not finite"


def _verified(path: Path) -> str:
    """Return what `expertmesh verify` found for this configuration, if it was run."""
    try:
        found = json.loads(path.read_bytes())
        layers = ", ".join(f"{layer['name']} {layer['status']}" for layer in found["layers"])
        return f"`expertmesh verify` of this configuration against the unsharded model: {found['status']} ({layers})"
    except FileNotFoundError:
        return "not compared with the unsharded model (`expertmesh verify`)"
    except (OSError, ValueError, KeyError, TypeError):
        return "its verification.json cannot be read"
