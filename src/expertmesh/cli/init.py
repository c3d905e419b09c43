"""`expertmesh init MODEL --data FILE [KEY=VALUE]`: a configuration of a dozen lines that fits a model, its data, these
devices.

For someone's first run. `plan` chooses layout, micro-batch and activation checkpointing, for full fine-tuning if that
fits, else for adapters, at last with experts in 4 bits; the data say what is trained and how much a step takes. Each
choice stands in the file with its reason, and gives way to KEY=VALUE. Reads config.json, the tokenizer and the first
rows of the data, which take a moment and show nearly every mistake (`expertmesh check` reads all of them); never
overwrites a file.
"""

import copy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from expertmesh.cli.data import FEW_STEPS, note_lines
from expertmesh.cli.options import InitOptions
from expertmesh.cli.plan import read_figures, usual_length
from expertmesh.config import Config, LoraConfig, ObjectiveConfig, PrecisionConfig
from expertmesh.config.errors import ExpertmeshError, InputError
from expertmesh.config.files import apply_override, config_from, make_config
from expertmesh.config.objective import ObjectiveName
from expertmesh.config.yaml_text import dump_yaml
from expertmesh.data import Recipe, build_dataset, load_tokenizer
from expertmesh.data.sources import locations
from expertmesh.distributed.layout import Layout, resolve_layout
from expertmesh.io.directory import report_errors
from expertmesh.io.terminal import bytes_text, plural
from expertmesh.launcher.launch import local_ranks
from expertmesh.model import ModelOptions
from expertmesh.planning.forecast import devices_here, forecast
from expertmesh.planning.hardware import Devices, hardware_table, parse_devices, unknown_device
from expertmesh.planning.read_model import figures_of_teacher
from expertmesh.planning.search import GIB, Candidate, Job, checkpoint_bytes, nothing_fits, plan, variants
from expertmesh.training.objective import Teacher
from expertmesh.training.startup.model_check import Checked, OrderWish, refuse_length
from expertmesh.training.startup.preflight import preflight
from expertmesh.weights.meta_model import read_model_config
from expertmesh.weights.quantised.published import quantisation

# Sections whose keys have a line each.
_BLOCKS = ("model", "data", "train")
# Of a step, where the data are enough for FEW_STEPS of them; and how often few data are trained on at most.
_SEQUENCES = 64
_MOST_EPOCHS = 10
# To what a length is rounded up: cp and tp divide it.
_LENGTH = 64
ROWS = 500
# Tried where sft cannot train on the rows, and no objective is given.
_OTHERS: tuple[ObjectiveName, ...] = ("dpo", "kto")


@dataclass(frozen=True, slots=True)
class Wishes:
    """Settings of the command line."""

    given: Mapping[str, Any]  # as YAML has them
    """The keys that were given."""
    config: Config
    """These keys, and the defaults of all others."""

    def has(self, section: str, key: str) -> bool:
        return key in (self.given.get(section) or {})


@dataclass(frozen=True, slots=True)
class Sizes:
    """The cut of the data into steps."""

    length: int
    """Tokens of a row, at most."""
    packed: bool
    global_batch_size: int
    """Sequences, or pairs, of a step."""
    epochs: int
    steps: int | None
    """Optimizer steps of an epoch; None if the data are not counted."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train."""

    lora: LoraConfig | None = None
    """Adapters; None trains all weights."""
    frozen: str | None = None
    """precision.frozen of the experts beside adapters."""

    def __str__(self) -> str:
        if self.lora is None:
            return "full fine-tuning"
        kept = f", frozen experts in {self.frozen}" if self.frozen else ""
        return f"LoRA on {' and '.join(self.lora.targets)}{kept}"


@dataclass(frozen=True, slots=True)
class Choice:
    """The first way that fits, and its best layout."""

    way: Way
    job: Job
    best: Candidate
    why_unpacked: str | None
    """The reason why the model cannot have packed rows; None if it can."""
    passed_over: tuple[str, ...]
    """The reasons why the ways before it were not taken."""


@dataclass(frozen=True, slots=True)
class FirstRows:
    """The kind of the data, by their first rows."""

    objective: ObjectiveConfig
    """The one that trains on them."""
    what: str
    """Format and targets, in a few words."""
    lengths: str
    """The longest row, or how many are cut, in a few words."""
    longest: int
    """Tokens of the longest sample."""
    tokens: float
    """Mean tokens of a sample."""
    rows: int | None
    """Rows that an epoch trains on, if the first ones are like the others; None for enough."""
    all_read: bool
    """True if these are all."""


def run(options: InitOptions) -> int:
    """Write the file and print it; returns 0. `InputError` for what `train` would refuse, and when nothing fits."""
    name = options.model.rstrip("/").rpartition("/")[2]
    path = Path(options.output or f"{name}.yaml")
    if path.exists():
        raise _refuse_existing(path)
    devices, overrides = devices_of(options), options.overrides or []
    wishes = _wishes(options, path, overrides)
    model = wishes.config.model
    config, directory = read_model_config(model.name_or_path, model.revision, model.trust_remote_code, weights=False)
    length = usual_length(config)
    if wishes.has("data", "max_length"):
        length = wishes.config.data.max_length
    refuse_length("data.max_length", length, config)
    data = wishes.config.data.model_copy(update={"max_length": length})
    found = first_rows(
        wishes.config.model_copy(update={"data": data}),
        load_tokenizer(model, data.chat_template),
        int(config.get_text_config().vocab_size),
        enough_rows(devices, length),
    )
    if found.objective != wishes.config.objective:
        wishes = replace(wishes, config=wishes.config.model_copy(update={"objective": found.objective}))
    sizes = sizes_of(found, wishes, devices, length)
    choice = choose(options, wishes, (config, directory), devices, sizes)
    values = _values(wishes, path, choice, sizes)
    for override in overrides:
        apply_override(values, override)
    values["output_dir"] = values.pop("output_dir")
    written = make_config(copy.deepcopy(values), source=str(path))
    notes: list[ExpertmeshError] = []
    checked = preflight(written, devices.count, devices.per_node, weights=False, notes=notes)
    comments = _comments(written, checked, choice, sizes, found)
    head = _head(written, checked, path, choice)
    # A key that was set has no reason of ours; the sizes of a step keep theirs.
    keys = [tuple(override.partition("=")[0].split(".")) for override in overrides]
    set_keys = {key for key in comments if any(key == each[: len(key)] or each == key[: len(each)] for each in keys)}
    for key in set_keys - {("train", "global_batch_size")}:
        del comments[key]
    text = "\n".join([*head, *_lines(values, comments)]) + "\n"
    assert config_from(text, str(path)) == written
    with report_errors(path):
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise _refuse_existing(path) from None
    sys.stdout.write(text)
    print(f"wrote {path}")
    if options.devices is None:
        print("\n".join(note_lines(notes)), end="\n" * bool(notes))
    return 0


def _refuse_existing(path: Path) -> InputError:
    return InputError(f"{path} exists already and stays as it is; choose another --output", key="init.exists")


def _wishes(options: InitOptions, path: Path, overrides: list[str]) -> Wishes:
    """Return the configuration that the command line requests; all else is chosen."""
    given: dict[str, Any] = {}
    for override in overrides:
        apply_override(given, override)
    values: dict[str, Any] = {
        "model": {"name_or_path": options.model, "trust_remote_code": options.trust_remote_code},
        "data": {"train": [{"path": options.data}]},
        "output_dir": f"runs/{path.stem}",
    }
    if options.max_length is not None:
        given["data"] = values["data"] = {"max_length": options.max_length, **values["data"], **given.get("data", {})}
    if (rows := (given.get("train") or {}).get("micro_batch_size")) is not None:
        values["train"] = {"global_batch_size": rows}  # what is chosen is a multiple as well
    if options.lora or (given.get("precision") or {}).get("frozen"):
        values["lora"] = {}
    return Wishes(given, make_config(values, overrides, "the command line"))


def _values(wishes: Wishes, path: Path, choice: Choice, sizes: Sizes) -> dict[str, Any]:
    """Return the keys that are written, before KEY=VALUE."""
    given, best, way = wishes.config, choice.best, choice.way
    responses = given.objective.of_responses
    values: dict[str, Any] = {"model": {"name_or_path": given.model.name_or_path}}
    if given.model.trust_remote_code:
        values["model"]["trust_remote_code"] = True
    compute = choice.job.model.precision.compute
    precision: dict[str, Any] = {"compute": compute} if compute != "bfloat16" else {}
    precision |= {"frozen": way.frozen} if way.frozen else {}
    if precision:
        values["precision"] = precision
    values["data"] = {"train": [{"path": given.data.train[0].path}], "max_length": choice.job.model.length}
    if not responses and (choice.why_unpacked is not None or not sizes.packed):
        values["data"]["packing"] = False
    if way.lora is not None:
        adapters = {"r": 16, "alpha": 32, "targets": list(way.lora.targets)}
        values["lora"] = {} if way.lora.from_adapter is not None else adapters
    if responses:
        values["objective"] = {"name": given.objective.name}
    rates = {(False, False): 1e-5, (True, False): 1e-4, (False, True): 1e-6, (True, True): 5e-6}
    values["optim"] = {"learning_rate": rates[way.lora is not None, responses]}
    values["train"] = {
        "global_batch_size": sizes.global_batch_size,
        "micro_batch_size": best.workload.batch.rows // given.objective.sequences,
        "activation_checkpointing": best.workload.mode,
        "num_epochs": sizes.epochs,
    }
    axes = {axis: best.layout.size(axis) for axis in ("ep", "fsdp", "replicate", "tp", "cp", "pp")}
    values["parallel"] = {axis: size for axis, size in axes.items() if size > 1 or axis in ("ep", "fsdp")}
    return values | {"output_dir": f"runs/{path.stem}"}


def _comments(
    config: Config, checked: Checked, choice: Choice, sizes: Sizes, found: FirstRows
) -> dict[tuple[str, ...], str]:
    """Return the reason of each choice, by its key."""
    layout, train = checked.layout, config.train
    accumulation = train.global_batch_size // (train.micro_batch_size * layout.data_ranks)
    ranks = plural(layout.data_ranks, "data rank")
    step = f"a step: micro-batch {train.micro_batch_size} × {ranks} × accumulation {accumulation}"
    if sizes.steps is not None:
        step += f"; about {sizes.steps:,} steps an epoch"
    experts = checked.anatomy.num_experts
    here = f"all {experts} experts" if layout.ep == 1 else f"{experts // layout.ep} of {experts} experts"
    size = bytes_text(checkpoint_bytes(choice.job, choice.best.layout))
    comments = {
        ("data", "train"): found.what,
        ("data", "max_length"): found.lengths,
        ("train", "global_batch_size"): step,
        ("train", "activation_checkpointing"): "none | selective | full: less memory, more time",
        ("parallel",): f"a rank holds {f'1/{layout.efsdp} of ' if layout.efsdp > 1 else ''}{here}",
        ("output_dir",): f"started again, it continues; a checkpoint has {size}",
    }
    if not sizes.packed:
        comments["data", "packing"] = "the data are few: each row is a sequence of its own"
    if choice.why_unpacked is not None:
        comments["data", "packing"] = choice.why_unpacked
    if sizes.epochs > 1:
        comments["train", "num_epochs"] = "the data are few"
    return comments


def _head(config: Config, checked: Checked, path: Path, choice: Choice) -> Iterator[str]:
    """Yield what the file is, what was predicted for it, and what to do with it."""
    devices: Devices = choice.job.devices
    predicted = forecast(config, checked, devices)
    assert predicted.prediction is not None, "a model that is planned has a prediction"
    memory, took = predicted.prediction.peak_memory_bytes or 0, predicted.prediction.step_seconds
    said = f"{memory / GIB:.1f} GiB a rank of {choice.job.budget / GIB:.1f}"
    if took is not None:
        rate = f"{predicted.prediction.tokens_per_second:,.0f} tokens/s"
        said += f", {took:.3g} s a step, {rate}, with full rows and even routing"
    yield f"# expertmesh init: {choice.way}, on {devices}. Predicted:"
    yield f"# {said}{f'; {predicted.warning}' if predicted.warning else ''}."
    yield from (f"# {line}." for reason in choice.passed_over for line in reason.splitlines())
    more = f" on each of {devices.nodes} nodes (docs/launching.md)" if devices.nodes > 1 else ""
    yield f"#   expertmesh check {path} --nproc {devices.count}    # every row, target tokens marked"
    yield f"#   expertmesh train {path} --nproc {devices.per_node}{more}"


def _lines(values: Mapping[str, Any], comments: Mapping[tuple[str, ...], str]) -> Iterator[str]:
    """Yield YAML, a line for each key."""
    for section, value in values.items():
        inside = section in _BLOCKS and isinstance(value, dict)
        if inside:
            yield f"{section}:"
        for key, one in value.items() if inside else [(section, value)]:
            comment = comments.get((section, key) if inside else (section,))
            line = f"{'  ' * inside}{key}: {dump_yaml(one, one_line=True)}"
            yield f"{line}  # {comment}" if comment else line


def enough_rows(devices: Devices, length: int) -> int:
    """Return a number of rows that makes `FEW_STEPS` steps even if `length` tokens pack dozens of them."""
    return min(10**6, FEW_STEPS * max(_SEQUENCES, devices.count) * max(1, length // 32))


def sizes_of(found: FirstRows, wishes: Wishes, devices: Devices, length: int) -> Sizes:
    """Return the sizes of a step: `_SEQUENCES` rows, or fewer where the data would make less than `FEW_STEPS` steps.

    The fewest are one for each device. If that is not enough, rows become no longer than the data, then each sample
    is a sequence of its own, and then there are several epochs.

    Args:
        length: Most tokens of a row.
    """
    train = wishes.config.train
    unit = devices.count * train.micro_batch_size if wishes.has("train", "micro_batch_size") else devices.count
    packings = [not found.objective.of_responses and wishes.config.data.packing]
    if packings == [True] and not wishes.has("data", "packing"):
        packings = [True, False]
    lengths = [length]
    if found.all_read and not wishes.has("data", "max_length"):
        lengths += [min(length, -(-found.longest // _LENGTH) * _LENGTH)]
    size, is_given = -(-_SEQUENCES // unit) * unit, wishes.has("train", "global_batch_size")
    if found.rows is None:
        return Sizes(length, packings[0], train.global_batch_size if is_given else size, 1, None)
    shapes = [(each, packings[0]) for each in lengths] + [(lengths[-1], packing) for packing in packings[1:]]
    # At least so many sequences: packed rows are never fuller than full.
    counts = {(each, packed): ceil(found.rows * (found.tokens / each if packed else 1)) for each, packed in shapes}
    unit = train.global_batch_size if is_given else unit
    length, packed = next((shape for shape in shapes if ceil(counts[shape] / unit) >= FEW_STEPS), shapes[-1])
    count = counts[length, packed]
    size = max(unit, min(size, count // FEW_STEPS // unit * unit)) if not is_given else unit
    steps = ceil(count / size)
    return Sizes(length, packed, size, min(_MOST_EPOCHS, ceil(FEW_STEPS / steps)), steps)


def choose(
    options: InitOptions, wishes: Wishes, read: tuple[PreTrainedConfig, Path], devices: Devices, sizes: Sizes
) -> Choice:
    """Return the first way that fits; raises `InputError` where none does. `read`: the model's config and directory."""
    passed_over: list[str] = []
    refusals: list[InputError] = []
    ways = list(_ways(options.lora, wishes, quantised=quantisation(read[0]) is not None))
    fixed = wishes.config.parallel if "parallel" in wishes.given else None
    for way in ways:
        try:
            job, why_unpacked = _job(wishes, read, way, devices, sizes)
        except InputError as error:
            refusals.append(error)
            passed_over.append(f"{way}: {error}")
            continue
        if fixed is not None:
            experts, traffic = job.model.anatomy.num_experts, job.model.traffic
            resolve_layout(fixed, devices.count, experts, devices.per_node, traffic)
        found = plan(job, fixed=fixed)
        best = found.best
        if wishes.config.objective.pairs:
            # The micro-batch has to be a number of pairs, each of which is two rows.
            fitting = [each for each in found.candidates if job.global_batch_size // 2 % each.layout.data_ranks == 0]
            every = ([one for one in variants(job, [e.layout]) if one.workload.batch.rows % 2 == 0] for e in fitting)
            best = next((min(even, key=lambda one: one.speed.seconds) for even in every if even), None)
        if best is not None:
            return Choice(way, job, best, why_unpacked, tuple(passed_over))
        least = min((each.least.memory.total for each in found.rejected if each.least is not None), default=None)
        why = "does not fit: a micro-batch of one pair is two rows"
        if least is not None:
            why = f"does not fit: {least / GIB:.1f} GiB a rank of {job.budget / GIB:.1f}"
        elif found.rejected:
            why = f"has no layout: {found.rejected[0].why}"
        passed_over.append(f"{way} {why}")
    if len(refusals) == len(ways):
        raise refusals[0]
    title = f"{options.model} does not fit on {devices} with rows of {sizes.length:,} tokens; more devices may"
    raise nothing_fits(title, *passed_over)


def _ways(lora: bool | None, wishes: Wishes, *, quantised: bool) -> Iterator[Way]:
    """Yield the most wanted first: the one that trains most, then the one that keeps most digits of what is frozen."""
    given = wishes.config.lora
    if "lora" in wishes.given:
        lora = given is not None
    frozen_as: tuple[str | None, ...] = ("as_published",) if quantised else (None, "nf4")
    if wishes.has("precision", "frozen"):
        frozen_as, lora = (wishes.config.precision.frozen,), True
    if lora is not True:
        yield Way()
    if lora is False or wishes.config.model.from_config:
        return
    is_said = given is not None and (wishes.has("lora", "targets") or given.from_adapter is not None)
    for frozen in frozen_as:
        for targets in ((),) if is_said else (("attention", "experts"), ("attention",)):
            base = given or LoraConfig()
            yield Way(base if is_said else base.model_copy(update={"targets": targets}), frozen)


def devices_of(options: InitOptions) -> Devices:
    """Return the named devices, or those of this machine."""
    if options.devices is not None:
        return parse_devices(options.devices, hardware_table())
    here = devices_here(local_ranks(None))
    if here is None:
        raise unknown_device("the devices of this machine", "name similar ones with --devices")
    return here


def _job(
    wishes: Wishes, read: tuple[PreTrainedConfig, Path], way: Way, devices: Devices, sizes: Sizes
) -> tuple[Job, str | None]:
    """Return the job in bfloat16, where devices and the model can; in float32 else."""
    config, kind = wishes.config, devices.hardware.torch_device
    computes = ("float32",) if devices.name == "cpu" else ("bfloat16", "float32")
    if wishes.has("precision", "compute"):
        computes = (config.precision.compute,)
    for compute in computes:
        precision_of = {"compute": compute, "params": config.precision.params, "frozen": way.frozen}
        precision = PrecisionConfig.model_validate(precision_of)
        trained = config.model_copy(update={"precision": precision, "lora": way.lora})
        # Some attention cannot be built where its package is missing, as it may be here.
        built = replace(ModelOptions.of(trained), attention="auto")
        try:
            figures, why_unpacked = read_figures(*read, built, sizes.length, packing=sizes.packed, device=kind)
        except InputError as error:
            if error.key == "precision.compute-unsupported" and compute != computes[-1]:
                continue
            raise
        rows = sizes.global_batch_size * config.objective.sequences
        teacher = Teacher.of(trained, read[0], Layout(), weights=False)
        of_teacher = figures_of_teacher(teacher, length=figures.length, packed=figures.packed, device=kind)
        order = OrderWish.of(config.train)
        return Job(figures, devices, rows, config.optim.name, order=order, teacher=of_teacher), why_unpacked
    raise AssertionError("float32 is never refused as a dtype to compute in")


def first_rows(config: Config, tokenizer: PreTrainedTokenizerBase, vocab_size: int, enough: int) -> FirstRows:
    """Read the first rows of `data.train` and count no more than `enough`.

    Rows of preferences, in pairs or with a label, are taken as such unless `objective` says sft. Raises `InputError`
    for what training would refuse about them, template included.
    """
    sources = [
        source.model_copy(update={"max_rows": min(ROWS, source.max_rows or ROWS)}) for source in config.data.train
    ]
    data, others = config.data.model_copy(update={"stream": False}), [ObjectiveConfig(name=name) for name in _OTHERS]
    for objective in (config.objective, *others):
        try:
            dataset, report = build_dataset(
                Recipe(sources, data, tokenizer, model_vocab_size=vocab_size, responses=objective.facts.format)
            )
            break
        except InputError as error:
            given = "objective" in config.model_fields_set or objective == others[-1]
            if error.key != "data.other-objective" or given:
                raise
    how = report.methods.most_common(1)[0][0]
    share = report.target_tokens / report.tokens
    counted, most = enough if config.data.stream else 0, max(enough, ROWS + 1)
    for source in () if config.data.stream else config.data.train:  # the rows of an epoch, at most `most` of each
        left = min(most, source.max_rows or most)
        rows = (row for location in locations(source.path) for row in location.rows(lambda number: True, {}))
        counted += source.repeat * sum(1 for _, row in zip(range(left), rows, strict=False) if row is not None)
    longest = int(dataset.lengths.max())
    lengths = f"the longest of the first {report.rows} rows has {longest:,} tokens"
    if report.cut:
        lengths = f"cuts {report.cut} of the first {report.rows} rows, which are longer"
    return FirstRows(
        objective,
        f"{report.sources[0].format}; {share:.0%} of the tokens are targets, found by {how}",
        lengths,
        longest,
        report.tokens / len(dataset),
        max(1, counted * report.samples // report.rows) if counted < enough else None,
        counted == report.rows,
    )
