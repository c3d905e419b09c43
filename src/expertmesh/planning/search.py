"""Every layout a job could have: which fit, how fast each is, and why the others are rejected.

An axis, a checkpointing mode or a combination is considered exactly if the configuration accepts it, so a plan never
names what `train` refuses. All arithmetic; 16,384 devices take seconds.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from expertmesh.config import ParallelConfig, TrainConfig
from expertmesh.config.errors import InputError
from expertmesh.distributed.layout import Layout, explicit, resolve_layout
from expertmesh.planning.facts import Facts
from expertmesh.planning.hardware import Devices
from expertmesh.planning.memory import Batch, Memory, memory_of, shards_evenly
from expertmesh.planning.speed import Speed, speed_of
from expertmesh.planning.state import CheckpointedLayers, Mode

Goal = Literal["speed", "memory"]
MODES: tuple[Mode, ...] = ("none", "selective", "full")
GIB = 2**30
# Layouts of which every mode and micro-batch size is looked at.
FULLY_CONSIDERED = 100


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be trained on what: everything that is the same for all layouts. `layers`: train.checkpoint_layers."""

    facts: Facts
    devices: Devices
    global_batch_size: int
    optimizer_moments: int = 2
    imbalance: float = 1.0
    gloo: bool = False
    layers: CheckpointedLayers = "all"

    @property
    def budget(self) -> float:
        """Bytes of one device that may be used."""
        return self.devices.hardware.memory * (1 - self.devices.hardware.headroom)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One layout with a checkpointing mode and a micro-batch size, and what it will take."""

    layout: Layout
    mode: Mode
    batch: Batch
    memory: Memory
    speed: Speed

    def fits(self, job: Job) -> bool:
        return self.memory.total <= job.budget


@dataclass(frozen=True, slots=True)
class Rejected:
    """A layout that cannot be, and why, in a sentence."""

    layout: Layout
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Feasible candidates, best first (the best mode and micro-batch of each layout), and rejected layouts."""

    job: Job
    goal: Goal
    candidates: tuple[Candidate, ...]
    rejected: tuple[Rejected, ...]
    considered: int

    @property
    def best(self) -> Candidate | None:
        return self.candidates[0] if self.candidates else None


def plan(job: Job, goal: Goal = "speed", fixed: ParallelConfig | None = None) -> Plan:
    """Look at every layout of the job's devices. `fixed` holds axes the user has set; `auto` ones are free."""
    feasible: list[Candidate] = []
    rejected: list[Rejected] = []
    frugal: list[Candidate] = []
    for layout in layouts(job, fixed):
        if (reason := _refusal(job, layout)) is not None:
            rejected.append(Rejected(layout, reason))
            continue
        least = _most_frugal(job, layout)
        if least.fits(job):
            frugal.append(least)
        else:
            rejected.append(Rejected(layout, _too_large(job, least)))
    # Thousands of layouts of a large job are told apart by their most frugal form; the best get all their variants.
    frugal.sort(key=_order(goal))
    considered = len(frugal)
    for least in frugal[:FULLY_CONSIDERED]:
        fitting = [candidate for candidate in _variants(job, least.layout) if candidate.fits(job)]
        considered += len(fitting)
        feasible.append(min([least, *fitting], key=_order(goal)))
    feasible += frugal[FULLY_CONSIDERED:]
    feasible.sort(key=_order(goal))
    return Plan(job, goal, tuple(feasible), tuple(rejected), considered)


def _order(goal: Goal) -> Any:
    if goal == "memory":
        return lambda candidate: (candidate.memory.total, candidate.speed.seconds)
    return lambda candidate: (candidate.speed.seconds, candidate.memory.total)


def layouts(job: Job, fixed: ParallelConfig | None = None) -> Iterator[Layout]:
    """Every layout that the configuration and the mesh accept; equal splits come once."""
    world, facts = job.devices.count, job.facts
    blocks = len(facts.blocks)
    experts = facts.moe[0].experts
    assert experts is not None
    limits = {"pp": blocks, "replicate": world, "cp": facts.length, "tp": job.devices.per_node}
    sizes: dict[str, list[int]] = {}
    for axis, most in limits.items():
        given = getattr(fixed, axis, None) if fixed is not None else None
        if given is not None:
            sizes[axis] = [given]
        elif axis == "replicate" or accepts_parallel(axis):
            sizes[axis] = [size for size in divisors(world) if size <= most]
        else:
            sizes[axis] = [1]
    chosen = "auto" if fixed is None else fixed.ep
    expert_ranks = divisors(experts.spec.num_experts) if chosen == "auto" else [chosen]
    for pp in sizes["pp"]:
        for tp in sizes["tp"]:
            for cp in (
                size for size in sizes["cp"] if facts.heads % (size * tp) == 0 and facts.length % (size * tp) == 0
            ):
                for replicate in sizes["replicate"]:
                    rest = pp * tp * cp * replicate
                    if world % rest:
                        continue
                    for ep in expert_ranks:
                        axes = {"pp": pp, "replicate": replicate, "cp": cp, "tp": tp, "ep": ep}
                        if world // (pp * replicate) % ep == 0 and _accepted(axes):
                            yield Layout(pp, replicate, world // rest, cp, tp, ep, *_schedule(pp, fixed))


def _schedule(pp: int, fixed: ParallelConfig | None) -> tuple[str, int]:
    """The schedule and the stages of a rank; what a user has set stays, and more than one stage are never proposed."""
    if fixed is None or pp == 1 or fixed.pp_schedule == "auto":
        virtual = 1 if fixed is None or pp == 1 else fixed.pp_virtual_stages
        return "1f1b" if virtual == 1 else "interleaved_1f1b", virtual
    return fixed.pp_schedule, fixed.pp_virtual_stages


_answers: dict[str, bool] = {}


def accepts_parallel(axis: str) -> bool:
    """Whether this version's configuration takes more than one rank on an axis."""
    return _asked(f"parallel.{axis}", lambda: ParallelConfig.model_validate({axis: 2}))


def accepts_mode(mode: str) -> bool:
    """Whether this version's configuration has a checkpointing mode."""
    return _asked(f"train.{mode}", lambda: TrainConfig(activation_checkpointing=mode))  # type: ignore[arg-type]


def _asked(key: str, build: Any) -> bool:
    if key not in _answers:
        try:
            build()
            _answers[key] = True
        except InputError:
            _answers[key] = False
    return _answers[key]


def _accepted(axes: dict[str, int]) -> bool:
    """Whether the configuration takes these axes together."""
    used = tuple(sorted(axis for axis, size in axes.items() if size > 1))
    return len(used) < 2 or _asked(
        f"parallel.{used}", lambda: ParallelConfig.model_validate({axis: axes[axis] for axis in used})
    )


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _refusal(job: Job, layout: Layout) -> str | None:
    """Why `train` would refuse a layout, or None."""
    try:
        experts = job.facts.anatomy.num_experts
        if experts % layout.ep or layout.world_size // (layout.pp * layout.replicate) % layout.ep:
            resolve_layout(explicit(layout), layout.world_size, experts)  # which says so; all else fits by construction
        shards_evenly(job.facts, layout)
    except InputError as error:
        return str(error)
    if (refusal := job.facts.asked.refusal(layout)) is not None:
        return refusal
    if job.global_batch_size % layout.data_ranks:
        return (
            f"a step's {job.global_batch_size} sequences cannot be dealt evenly to {layout.data_ranks} data ranks; try "
            f"--global-batch-size {-(-job.global_batch_size // layout.data_ranks) * layout.data_ranks}"
        )
    return None


def evaluate(job: Job, layout: Layout, mode: Mode, batch: Batch) -> Candidate:
    """What one choice will take."""
    memory = memory_of(
        job.facts,
        layout,
        batch,
        mode,
        layers=job.layers,
        moments=job.optimizer_moments,
        overhead=job.devices.hardware.overhead,
        imbalance=job.imbalance,
        gloo=job.gloo,
    )
    speed = speed_of(job.facts, layout, batch, mode, job.devices, layers=job.layers, imbalance=job.imbalance)
    return Candidate(layout, mode, batch, memory, speed)


def modes(facts: Facts) -> list[Mode]:
    """The checkpointing modes that this model and this version have."""
    return [mode for mode in MODES if accepts_mode(mode) and (mode == "none" or facts.checkpointable)]


def _variants(job: Job, layout: Layout) -> Iterator[Candidate]:
    """Each mode with every micro-batch size from one sequence up to the first that does not fit."""
    each = job.global_batch_size // layout.data_ranks
    for mode in modes(job.facts):
        for rows in (size for size in divisors(each) if size <= 64):
            candidate = evaluate(job, layout, mode, Batch(rows, each // rows))
            yield candidate
            if not candidate.fits(job):
                break


def _most_frugal(job: Job, layout: Layout) -> Candidate:
    """One sequence at a time, recomputing as much as there is."""
    return evaluate(job, layout, modes(job.facts)[-1], Batch(1, job.global_batch_size // layout.data_ranks))


def _too_large(job: Job, least: Candidate) -> str:
    """By how much the most frugal form does not fit, what of it is largest, and what to try."""
    memory = least.memory
    state, held = memory.state / GIB, memory.activations / GIB
    text = f"does not fit: {memory.total / GIB:.0f} GiB of {job.budget / GIB:.0f}; state {state:.0f}"
    return f"{text}, activations {held:.0f} ({least.mode} checkpointing); try {' or '.join(_advice(job, least))}"


def _advice(job: Job, least: Candidate) -> list[str]:
    memory, layout = least.memory, least.layout
    advice = []
    if memory.state > job.budget / 2:
        if layout.replicate > 1:
            advice.append(f"replicate={layout.replicate // 2}")
        else:
            needed = job.budget - (memory.total - memory.state)
            if needed > 0:
                ranks = -(-memory.state * layout.world_size // needed)
                per_node = job.devices.per_node
                advice.append(f"{int(-(-ranks // per_node) * per_node)} devices")
        if not job.facts.adapted:
            advice.append("--lora r=16")
    elif accepts_parallel("cp") and layout.cp < job.devices.per_node:
        advice.append(f"cp={2 * layout.cp}")
    else:
        advice.append(f"--seq-len {job.facts.length // 2}")
    return advice or ["more devices"]
