"""Find where a run starts, anew or from a checkpoint, and which changes of the configuration a resumed run may have.

A resumed run must be the same run: model, data, seed, optimizer and batch decide what every step is. The layout of
ranks, the length and the reports may change, and so may a learning rate and its like where `checkpoint.resume_changed`
names them. Each change is printed.
"""

import datetime
import hashlib
import json
import socket
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args

import torch.distributed as dist
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from expertmesh.checkpoint.directory import CHECKPOINTS, find, later_exists, published
from expertmesh.checkpoint.manifest import damaged, read_manifest
from expertmesh.checkpoint.small_files import STATE_FILE, read_state_file
from expertmesh.config import Config, ScheduleConfig
from expertmesh.config.errors import InputError, IntegrityError
from expertmesh.config.output import Changeable
from expertmesh.data import StreamPosition, TokenizedDataset
from expertmesh.data.formats import shared_length
from expertmesh.distributed.all_ranks import from_rank_0, raise_on_all_ranks
from expertmesh.io.reading import first_problem
from expertmesh.io.terminal import plural
from expertmesh.training.optimizers.build import learning_rate_factor

# What may differ from the run that is resumed: sections and keys.
_FREE_SECTIONS = ("parallel", "eval", "checkpoint", "save", "log", "distributed")
_FREE_KEYS = (
    "train.max_steps",
    "train.num_epochs",
    "train.micro_batch_size",
    "train.activation_checkpointing",
    "train.checkpoint_layers",
    "train.accumulate",
    "train.round",
    "train.keep_inputs",
    "train.compile",
    "train.deterministic",
    "train.eval_every_steps",
    "train.early_stop",
    *(f"train.early_stop.{key}" for key in ("figure", "patience", "min_change")),
    "moe.dispatch",
    "moe.placement",
    "moe.replicas",
    "moe.calibration_batches",
    "moe.compute",
    "moe.kernels",
    "data.eval",
    "data.prepared_path",
    "output_dir",
)
# What a run began with, though its section is free.
_FROM_WEIGHTS = "checkpoint.resume_weights_only"
# Keys that may differ as well, where it names them; no change by itself.
_WANTED = "checkpoint.resume_changed"
# How many of the first sample's token ids a checkpoint keeps, to show where others begin.
_IDS_KEPT = 512
_LISTED = 4


_Count = Annotated[int, Field(ge=0, lt=2**53)]
_Seconds = Annotated[float, Field(ge=0, lt=1e11)]


@dataclass(frozen=True, slots=True)
class Best:
    """The best value of a figure of evaluations."""

    figure: str
    value: float
    step: int
    """The step after which it was measured."""


@dataclass(slots=True)
class Counters:
    """The loop's counters beside model and optimizer; part of every checkpoint."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")

    step: _Count = 0
    elapsed_seconds: _Seconds = 0.0
    skipped_in_a_row: _Count = 0
    """Steps without a finite gradient."""
    tokens: _Count = 0
    """Input tokens since the last report."""
    steps: _Count = 0
    """Optimizer steps since the last report."""
    seconds: _Seconds = 0.0
    """Training time since the last report."""
    expert_load: list[list[_Count]] | None = None
    """Tokens per layer and expert `[L][E]` since the last report, all ranks together, or None."""
    best: Best | None = None
    """The best of `checkpoint.keep_best`."""
    least: Best | None = None
    """The least of `train.early_stop`."""
    no_better: _Count = 0
    """Evaluations since `least` that have not improved it."""
    stream: StreamPosition | None = None


_COUNTERS = TypeAdapter(Counters)


def read_counters(checkpoint: Path, saved: Any, step: int) -> Counters:
    """Return the counters of a checkpoint after `step`. Raises `IntegrityError` for numbers that no loop counts."""
    problem = f"counters.step is not {step}"
    try:
        counters = _COUNTERS.validate_json(json.dumps(saved))
        if counters.step == step:
            return counters
    except ValidationError as error:
        problem = first_problem(error)
    raise _damaged(checkpoint, f"counters: {problem}")


def _damaged(checkpoint: Path, problem: object) -> IntegrityError:
    return damaged(f"{checkpoint / STATE_FILE}: is not the state of a training run ({problem})")


@dataclass(frozen=True, slots=True)
class Identity:
    """The values that must be equal for a run to be resumed."""

    config: Mapping[str, Any]
    model_sha256: str
    data_sha256: str
    data: Mapping[str, Any]
    """Counts of samples and tokens and the first ids, to describe how other data differ."""
    date: str
    """The date of the run's first start, which chat templates may write."""

    @classmethod
    def of(cls, config: Config, model_directory: Path, dataset: TokenizedDataset, date: datetime.date) -> "Identity":
        model = hashlib.sha256((model_directory / "config.json").read_bytes()).hexdigest()
        first = dataset.sample(0).input_ids[:_IDS_KEPT].tolist()
        data = {"samples": len(dataset), "tokens": dataset.tokens, "first_ids": first}
        return cls(flat(config.model_dump(mode="json")), model, dataset.sha256(), data, date.isoformat())

    def agree(self) -> None:
        """Raise `InputError` on all ranks unless all of them have the same identity.

        Ranks of different machines with files of their own may differ. Collectives: every rank calls it; one broadcast
        and one small all-reduce.
        """
        mine = {
            "the configuration": hashlib.sha256(json.dumps(self.config, sort_keys=True).encode()).hexdigest(),
            "the model's config.json": self.model_sha256,
            "the data": self.data_sha256,
        }
        first = from_rank_0(mine)
        with raise_on_all_ranks("comparing configuration and data between ranks"):
            different = [name for name, digest in mine.items() if digest != first[name]]
            if different:
                raise InputError(
                    f"rank {dist.get_rank()} on host {socket.gethostname()} has not what rank 0 has: "
                    f"{' and '.join(different)}; give every machine the same files",
                    key="launch.files-differ",
                )

    def differences(self, saved: Mapping[str, Any]) -> "tuple[dict[str, str], list[str]]":
        """Return `config_differences` and those of the files that keys name; `saved` is a result of `asdict`."""
        forbidden, changed = config_differences(saved["config"], self.config)
        if saved["model_sha256"] != self.model_sha256:
            forbidden["model.name_or_path"] = "model.name_or_path has another config.json than the run started with"
        if saved["data_sha256"] != self.data_sha256:
            forbidden["data.train"] = _data_difference(saved["data"], self.data)
        return forbidden, changed


def config_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Return the differences between two flat configurations as sentences: (forbidden, by key; allowed)."""
    wanted = new.get(_WANTED, ())
    forbidden: dict[str, str] = {}
    changed: list[str] = []
    for key in sorted(old.keys() | new.keys()):
        then, now = old.get(key), new.get(key)
        if key == _WANTED or then == now:
            continue
        if then in ({}, None) and now in ({}, None):  # keys of an empty mapping speak for themselves
            continue
        sentence = ", ".join(_changes(key, then, now))
        section = key.partition(".")[0]
        requested = key in wanted or section in wanted
        if requested or key in _FREE_KEYS or (section in _FREE_SECTIONS and key != _FROM_WEIGHTS):
            changed.append(sentence)
        else:
            forbidden[key] = sentence
    return forbidden, changed


def ways_on(keys: Collection[str], checkpoint: Path | None) -> str:
    """Return how to train on from `checkpoint` with other values of `keys`, for the end of a refusal."""
    changeable = get_args(Changeable)
    named = [key if key in changeable else key.partition(".")[0] for key in keys]
    ways = ""
    if all(name in changeable for name in named):
        ways += f", set checkpoint.resume_changed to [{', '.join(dict.fromkeys(named))}] to go on with the change"
    if checkpoint is not None and not any(key.partition(".")[0] in ("model", "lora") for key in keys):
        ways += (
            f", set checkpoint.resume to {checkpoint} and checkpoint.resume_weights_only to true, with another "
            "output_dir, to start anew from its weights"
        )
    return ways


def _changes(key: str, old: Any, new: Any) -> Iterator[str]:
    """Return what differs; of lists of equally many sections, only what differs in these."""
    lists = isinstance(old, list) and isinstance(new, list) and len(old) == len(new)
    if lists and all(isinstance(each, Mapping) for each in (*old, *new)):
        old, new = (dict(enumerate(each)) for each in (old, new))
    if not (isinstance(old, Mapping) and isinstance(new, Mapping) and old.keys() == new.keys()):
        yield f"{key} was {_shown(old)} and is {_shown(new)}"
        return
    for name in (name for name in old if old[name] != new[name]):
        yield from _changes(f"{key}.{name}", old[name], new[name])


def _data_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Describe how data differ, as far as the checkpoint records it."""
    sentence = "data.train has other samples, or other tokens for them, than the run started with"
    counts = [
        f"{old[kind]:,} {kind} then and {new[kind]:,} now" for kind in ("samples", "tokens") if old[kind] != new[kind]
    ]
    then, now = old["first_ids"], new["first_ids"]
    if then != now:
        at = shared_length(then, now)
        counts.append(f"the first sample's ids from token {at} on {then[at : at + 4]} then and {now[at : at + 4]} now")
    return f"{sentence} ({', '.join(counts) or 'as many of both, and the first one is the same'})"


def date_of(start: Path | None) -> datetime.date | None:
    """Return the date that chat templates write: that of the first start of this checkpoint's run; None for a new run.

    Reads the checkpoint's state: call it on one rank. For a checkpoint that no run has written, which `check_start`
    refuses, it is today.
    """
    if start is None:
        return None
    saved = read_state_file(start, read_manifest(start)).state
    if "identity" not in saved:
        return datetime.date.today()
    try:
        return datetime.date.fromisoformat(saved["identity"]["date"])
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(start, error) from error


def find_start(config: Config) -> Path | None:
    """Return the checkpoint to continue from, or None to start anew. Reads the directory only; call it on one rank.

    Raises `InputError` for a missing checkpoint, and for `resume: never` in a directory with checkpoints.
    """
    directory = Path(config.output_dir) / CHECKPOINTS
    found = find(directory, "auto" if config.checkpoint.resume_weights_only else config.checkpoint.resume)
    if config.checkpoint.resume == "never" and (checkpoints := published(directory)):
        raise resume_is_never(directory, checkpoints[-1][1].name, "output_dir")
    return found


def resume_is_never(where: object, holds: str, place: str) -> InputError:
    """Return the error for checkpoints where a run is not to find any. `place`: the key that says where."""
    return InputError(
        f"checkpoint.resume is never, but {where} holds {holds}; set checkpoint.resume to auto to continue, or choose "
        f"another {place}",
        key="checkpoint.resume-is-never",
    )


def in_the_way(resume: object, where: object, holds: str, place: str) -> InputError:
    """Return the error for a start before a later checkpoint. `place`: the key that says where."""
    mend = f"set checkpoint.resume to auto to continue from that, or choose another {place}"
    return later_exists(f"checkpoint.resume names {resume}", where, holds, mend)


def other_configuration(where: str, forbidden: Mapping[str, str], checkpoint: Path | None) -> InputError:
    """Return the error for what is of another run by its configuration or data; arguments as of `ways_on`."""
    shown = "; ".join([*forbidden.values()][:_LISTED])
    shown += f"; and {len(forbidden) - _LISTED} more" * (len(forbidden) > _LISTED)
    return InputError(
        f"{where} is of a run with another configuration: {shown}; put it back to continue that "
        f"run{ways_on(forbidden, checkpoint)}, or choose another output_dir",
        key="run.other-configuration",
    )


def find_weights(config: Config) -> Path | None:
    """Return the checkpoint of another run from which a new one takes its weights, or None. Call it on one rank.

    Raises `InputError` for a missing one, or one of `output_dir` itself.
    """
    own = Path(config.output_dir) / CHECKPOINTS
    if not config.checkpoint.resume_weights_only or published(own):
        return None
    found = find(own, config.checkpoint.resume)
    if found is not None and own.resolve() in found.resolve().parents:
        raise InputError(
            f"checkpoint.resume_weights_only: {found} is of this output_dir; choose another output_dir for the new run",
            key="output.not-empty",
        )
    return found


def check_start(path: Path, identity: Identity, total_steps: int, config: Config) -> list[str]:
    """Return what has changed since the checkpoint was written, as sentences.

    Reads the manifest and the sizes of all files: call it on one rank. No collective.

    Raises:
        InputError: Names what makes this another run, or why it cannot go on from there in `output_dir`.
        IntegrityError: The checkpoint is damaged.
    """
    manifest = read_manifest(path)
    file = read_state_file(path, manifest)
    step, saved = file.step, file.state
    if not saved.keys() >= {"identity", "counters"}:
        raise InputError(
            f"{path} was not written by a training run; load it with expertmesh.load_checkpoint",
            key="checkpoint.not-of-a-run",
        )
    try:
        read_counters(path, saved["counters"], step)
        forbidden, changed = identity.differences(saved["identity"])
        rates = _rates(config, saved, step, total_steps)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _damaged(path, error) from error
    if forbidden:
        raise other_configuration(str(path), forbidden, path)
    if step > total_steps:
        raise InputError(
            f"{path} is after step {step}, but this configuration ends after {plural(total_steps, 'step')}; raise "
            "train.max_steps or train.num_epochs",
            key="checkpoint.after-last-step",
        )
    own = Path(config.output_dir) / CHECKPOINTS
    later = [checkpoint.name for number, checkpoint in published(own) if number > step]
    if later:
        raise in_the_way(path, own, later[-1], "output_dir")
    return [f"written by {plural(manifest.world_size, 'rank')}", *changed, *([": ".join(rates)] if rates else [])]


def _rates(config: Config, saved: Mapping[str, Any], step: int, now: int) -> list[str]:
    """Describe how another number of steps, peak or schedule changes the learning rate."""
    before, known = saved["total_steps"], saved["identity"]["config"]
    then = ScheduleConfig(**{k.removeprefix("schedule."): v for k, v in known.items() if k.startswith("schedule.")})
    old = known["optim.learning_rate"] * learning_rate_factor(then, step, before)
    new = config.optim.learning_rate * learning_rate_factor(config.schedule, step, now)
    lines = [f"{plural(now, 'step')} in all, not {before:,}"] if before != now else []
    if old != new:
        lines.append(f"by the {config.schedule.name} schedule the next has learning rate {new:.2e}, not {old:.2e}")
    return lines


def flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return `{"train": {"seed": 1}}` as `{"train.seed": 1}`; lists stay values."""
    found: dict[str, Any] = {}
    for key, value in section.items():
        nested = isinstance(value, Mapping) and value
        found |= flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return found


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
