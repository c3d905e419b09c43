"""How `expertmesh init` would train a model on these devices: all weights, or adapters, by what the planner fits."""

from collections.abc import Iterator
from dataclasses import dataclass

from transformers import PreTrainedConfig

from expertmesh.cli.options import InitOptions, PlanOptions
from expertmesh.cli.plan.read import read_figures
from expertmesh.config import LoraConfig
from expertmesh.config.errors import InputError
from expertmesh.launcher.launch import local_ranks
from expertmesh.planning.forecast import devices_here
from expertmesh.planning.hardware import Devices, hardware_table, parse_devices
from expertmesh.planning.search import GIB, Candidate, Job, Plan, plan
from expertmesh.weights.quantised.published import quantisation

_SEQUENCES = 64


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train: all weights, or adapters on `targets` with experts kept in `frozen`."""

    targets: tuple[str, ...] = ()
    frozen: str | None = None

    @property
    def lora(self) -> LoraConfig | None:
        return LoraConfig(targets=self.targets) if self.targets else None

    def __str__(self) -> str:
        if not self.targets:
            return "full fine-tuning"
        kept = f", frozen experts in {self.frozen}" if self.frozen else ""
        return f"LoRA on {' and '.join(self.targets)}{kept}"


@dataclass(frozen=True, slots=True)
class Choice:
    """The first way that fits, its best layout, and why each way before it was not taken."""

    way: Way
    job: Job
    best: Candidate
    why_unpacked: str | None
    passed_over: tuple[str, ...]


def choose(options: InitOptions, config: PreTrainedConfig, length: int) -> Choice:
    """The first way that fits; `InputError` where none does."""
    devices = _devices(options)
    size = -(-_SEQUENCES // devices.count) * devices.count
    passed_over: list[str] = []
    refusals: list[InputError] = []
    ways = list(_ways(options.lora, quantised=quantisation(config) is not None))
    for way in ways:
        try:
            job, why_unpacked = _job(options, way, devices, length, size)
        except InputError as error:
            refusals.append(error)
            passed_over.append(f"{way}: {error}")
            continue
        found = plan(job)
        if found.best is not None:
            return Choice(way, job, found.best, why_unpacked, tuple(passed_over))
        passed_over.append(f"{way} {_why_not(found)}")
    if len(refusals) == len(ways):
        raise refusals[0]
    raise InputError(
        "\n".join(
            [f"{options.model} does not fit on {devices} at --max-length {length:,}; more devices may", *passed_over]
        ),
        key="plan.nothing-fits",
    )


def _ways(lora: bool | None, *, quantised: bool) -> Iterator[Way]:
    """The most wanted first: what trains most, then what keeps most digits of what is frozen."""
    if lora is not True:
        yield Way()
    if lora is not False:
        for frozen in ("as_published",) if quantised else (None, "nf4"):
            for targets in (("attention", "experts"), ("attention",)):
                yield Way(targets, frozen)


def _devices(options: InitOptions) -> Devices:
    if options.devices is not None:
        return parse_devices(options.devices, hardware_table())
    here = devices_here(local_ranks(None))
    if here is None:
        raise InputError(
            "the planner does not know the devices of this machine; name similar ones with --devices",
            key="plan.unknown-device",
        )
    return here


def _job(options: InitOptions, way: Way, devices: Devices, length: int, size: int) -> tuple[Job, str | None]:
    """In bfloat16, where devices and the model can; in float32 else."""
    computes = ("float32",) if devices.name == "cpu" else ("bfloat16", "float32")
    for compute in computes:
        wanted = PlanOptions(
            options.model,
            str(devices),
            seq_len=length,
            compute=compute,  # type: ignore[arg-type]
            frozen=way.frozen,  # type: ignore[arg-type]
            trust_remote_code=options.trust_remote_code,
        )
        try:
            _, figures, why_unpacked = read_figures(wanted, way.lora, devices.hardware.torch_device)
        except InputError as error:
            if error.key == "precision.compute-unsupported" and compute != computes[-1]:
                continue
            raise
        return Job(figures, devices, size), why_unpacked
    raise AssertionError("float32 is never refused as a dtype to compute in")


def _why_not(found: Plan) -> str:
    least = min((each.least.memory.total for each in found.rejected if each.least is not None), default=None)
    if least is None:
        return f"has no layout: {found.rejected[0].reason}"
    return f"does not fit: {least / GIB:.1f} GiB a rank of {found.job.budget / GIB:.1f}"
