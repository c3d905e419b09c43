"""Choose how `expertmesh init` trains a model on these devices: all weights, or adapters, by what the planner fits;
and how much an optimizer step takes of the data.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from transformers import PreTrainedConfig

from expertmesh.cli.data.check import FEW_STEPS
from expertmesh.cli.options import InitOptions, PlanOptions
from expertmesh.cli.plan.first_rows import FirstRows
from expertmesh.cli.plan.read import read_figures
from expertmesh.config import Config, LoraConfig, PrecisionConfig
from expertmesh.config.errors import InputError
from expertmesh.distributed.layout import Layout, resolve_layout
from expertmesh.launcher.launch import local_ranks
from expertmesh.planning.forecast import devices_here
from expertmesh.planning.hardware import Devices, hardware_table, parse_devices
from expertmesh.planning.read_model import figures_of_teacher
from expertmesh.planning.search import GIB, Candidate, Job, Plan, plan, variants
from expertmesh.training.startup.model_check import OrderWish
from expertmesh.training.teacher import Teacher
from expertmesh.weights.quantised.published import quantisation

# Of a step, where the data are enough for FEW_STEPS of them; and how often few data are trained on at most.
_SEQUENCES = 64
_MOST_EPOCHS = 10
# To what a length is rounded up: cp and tp divide it.
_LENGTH = 64


@dataclass(frozen=True, slots=True)
class Wishes:
    """Settings of the command line."""

    given: Mapping[str, Any]
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


def choose(options: InitOptions, wishes: Wishes, config: PreTrainedConfig, devices: Devices, sizes: Sizes) -> Choice:
    """Return the first way that fits; raises `InputError` where none does."""
    passed_over: list[str] = []
    refusals: list[InputError] = []
    ways = list(_ways(options.lora, wishes, quantised=quantisation(config) is not None))
    fixed = wishes.config.parallel if "parallel" in wishes.given else None
    for way in ways:
        try:
            job, why_unpacked = _job(options, wishes, way, devices, sizes)
        except InputError as error:
            refusals.append(error)
            passed_over.append(f"{way}: {error}")
            continue
        if fixed is not None:
            experts, traffic = job.model.anatomy.num_experts, job.model.traffic
            resolve_layout(fixed, devices.count, experts, devices.per_node, traffic)
        found = plan(job, fixed=fixed)
        best = next(_of_pairs(found), None) if wishes.config.objective.pairs else found.best
        if best is not None:
            return Choice(way, job, best, why_unpacked, tuple(passed_over))
        passed_over.append(f"{way} {_why_not(found)}")
    if len(refusals) == len(ways):
        raise refusals[0]
    raise InputError(
        "\n".join(
            [
                f"{options.model} does not fit on {devices} with rows of {sizes.length:,} tokens; more devices may",
                *passed_over,
            ]
        ),
        key="plan.nothing-fits",
    )


def _of_pairs(found: Plan) -> Iterator[Candidate]:
    """Yield the candidates whose micro-batch is a number of pairs, each of which is two rows."""
    job = found.job
    for each in found.candidates:
        if job.global_batch_size // 2 % each.layout.data_ranks == 0:
            even = [one for one in variants(job, [each.layout]) if one.workload.batch.rows % 2 == 0]
            yield from sorted(even, key=lambda one: one.speed.seconds)[:1]


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
        raise InputError(
            "the planner does not know the devices of this machine; name similar ones with --devices",
            key="plan.unknown-device",
        )
    return here


def _job(options: InitOptions, wishes: Wishes, way: Way, devices: Devices, sizes: Sizes) -> tuple[Job, str | None]:
    """Return the job in bfloat16, where devices and the model can; in float32 else."""
    config = wishes.config
    computes = ("float32",) if devices.name == "cpu" else ("bfloat16", "float32")
    if wishes.has("precision", "compute"):
        computes = (config.precision.compute,)
    for compute in computes:
        wanted = PlanOptions(
            options.model,
            str(devices),
            seq_len=sizes.length,
            params=config.precision.params,  # type: ignore[arg-type]
            no_packing=not sizes.packed,
            compute=compute,  # type: ignore[arg-type]
            frozen=way.frozen,  # type: ignore[arg-type]
            trust_remote_code=options.trust_remote_code,
        )
        try:
            model_config, figures, why_unpacked = read_figures(wanted, way.lora, devices.hardware.torch_device)
        except InputError as error:
            if error.key == "precision.compute-unsupported" and compute != computes[-1]:
                continue
            raise
        rows = sizes.global_batch_size * config.objective.sequences
        precision = PrecisionConfig(params=wanted.params, compute=wanted.compute, frozen=wanted.frozen)
        with_precision = config.model_copy(update={"precision": precision})
        teacher = figures_of_teacher(
            Teacher.of(with_precision, model_config, Layout(), weights=False),
            length=figures.length,
            packed=figures.packed,
            device=devices.hardware.torch_device,
        )
        order = OrderWish.of(config.train)
        return Job(figures, devices, rows, config.optim.name, order=order, teacher=teacher), why_unpacked
    raise AssertionError("float32 is never refused as a dtype to compute in")


def _why_not(found: Plan) -> str:
    if not found.rejected:
        return "does not fit: a micro-batch of one pair is two rows"
    least = min((each.least.memory.total for each in found.rejected if each.least is not None), default=None)
    if least is None:
        return f"has no layout: {found.rejected[0].reason}"
    return f"does not fit: {least / GIB:.1f} GiB a rank of {found.job.budget / GIB:.1f}"
