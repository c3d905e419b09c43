"""Every layout a job could have: which fit, how fast each is, and why the others are rejected.

All arithmetic; 16,384 devices take seconds. The code that trains decides what is refused, so a plan never proposes what
`train` refuses.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Literal, get_args

from expertmesh.anatomy import Anatomy, is_inside
from expertmesh.config import ParallelConfig
from expertmesh.config.errors import InputError
from expertmesh.config.sections import OptimizerName
from expertmesh.distributed.layout import Layout, divisors, explicit, least_moved, nodes_of_ep, resolve_layout
from expertmesh.experts import deepep
from expertmesh.experts.placement import busiest
from expertmesh.parallel.checkpointing import CheckpointingMode
from expertmesh.parallel.refusals import expert_shard_dim
from expertmesh.planning.hardware import Devices
from expertmesh.planning.memory import Memory, inputs_on_host, memory_of
from expertmesh.planning.model_figures import ModelFigures
from expertmesh.planning.speed import Speed, speed_of
from expertmesh.planning.stages import Batch, CheckpointedLayers, Workload, pipeline_rank, resident_state
from expertmesh.step.forward_backward import Order
from expertmesh.training.startup.model_check import OrderWish, choose_order, order_that_fits

Goal = Literal["speed", "memory"]
GIB = 2**30
# Layouts of which every mode and micro-batch size is looked at, and the most sequences of a micro-batch.
FULLY_CONSIDERED = 100
MOST_ROWS = 64


@dataclass(frozen=True, slots=True)
class Job:
    """The model and the devices of a plan: everything that is the same for all layouts."""

    model: ModelFigures
    devices: Devices
    global_batch_size: int
    """Sequences of an optimizer step."""
    optimizer: OptimizerName = "adamw"
    imbalance: float = 1.0
    """Rows of the busiest rank of an EP group over their mean, if they are not measured."""
    layers: CheckpointedLayers = "all"
    """train.checkpoint_layers."""
    offload: str = "none"
    """parallel.offload."""
    dispatch: str = "auto"
    """moe.dispatch."""
    order: OrderWish = field(default_factory=OrderWish)
    teacher: ModelFigures | None = None
    """The frozen model that the objective learns from."""
    measured: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    """The imbalance of each block, by ep; empty if it is not measured."""

    @property
    def budget(self) -> float:
        """Bytes of one device that may be used."""
        return self.devices.hardware.memory * (1 - self.devices.hardware.headroom)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One layout with a checkpointing mode and a micro-batch size, and what it will take."""

    workload: Workload
    memory: Memory
    speed: Speed
    order_reason: str
    """The reason for the order of its micro-batches, in words."""

    @property
    def layout(self) -> Layout:
        return self.workload.layout

    @property
    def tokens_per_second(self) -> float:
        """Input tokens of the full job in a second."""
        return self.speed.tokens / self.speed.seconds

    def fits(self, job: Job) -> bool:
        return self.memory.total <= job.budget


@dataclass(frozen=True, slots=True)
class Rejected:
    """A layout that the job cannot have."""

    layout: Layout
    why: str
    """One sentence."""
    advice: str = ""
    """Options of `plan`, or axes, to try instead."""
    least: Candidate | None = None
    """The candidate that needs least memory, if memory alone is missing."""

    @property
    def reason(self) -> str:
        return f"{self.why}; try {self.advice}" if self.advice else self.why


@dataclass(frozen=True, slots=True)
class Plan:
    """Feasible candidates and rejected layouts."""

    job: Job
    candidates: tuple[Candidate, ...]
    """Best first: the best mode and micro-batch size of each layout."""
    rejected: tuple[Rejected, ...]

    @property
    def best(self) -> Candidate | None:
        return self.candidates[0] if self.candidates else None


def plan(job: Job, goal: Goal = "speed", fixed: ParallelConfig | None = None) -> Plan:
    """Look at every layout of the job's devices.

    Args:
        goal: The order of candidates. For speed, ep is the one of those that fit that `ep: auto` would take; for
            memory every ep is a candidate.
        fixed: Axes that the user has set; those that are `auto` are free. None leaves all free.
    """

    def order(each: Candidate) -> tuple[float, float]:
        both = each.speed.seconds, each.memory.total
        return both if goal == "speed" else both[::-1]

    rejected: list[Rejected] = []
    frugal: dict[Hashable, list[Candidate]] = {}  # of layouts that differ in ep, or in nothing
    for layout in layouts(job, fixed):
        if (refused := _refused(job, layout)) is not None:
            rejected.append(refused)
            continue
        # One sequence at a time, recomputing as much as there is.
        batch = Batch(1, job.global_batch_size // layout.data_ranks)
        least = evaluate(job, layout, modes(job.model)[-1], batch)
        if least.fits(job):
            frugal.setdefault(replace(layout, ep=1) if goal == "speed" else layout, []).append(least)
        else:
            rejected.append(_too_large(job, least))
    # Thousands of layouts of a large job are compared by their most frugal form; the best get all their variants.
    found = {axes: _least_moved(job, each) for axes, each in frugal.items()}
    for axes in sorted(found, key=lambda axes: order(found[axes]))[:FULLY_CONSIDERED]:
        found[axes] = min([found[axes], *variants(job, [each.layout for each in frugal[axes]])], key=order)
    return Plan(job, tuple(sorted(found.values(), key=order)), tuple(rejected))


def nothing_fits(*lines: str) -> InputError:
    return InputError("\n".join(lines), key="plan.nothing-fits")


def _least_moved(job: Job, candidates: Sequence[Candidate]) -> Candidate:
    """Return the candidate, of several that differ in ep, that `ep: auto` takes."""
    workload, model = candidates[0].workload, job.model
    trips, tokens = 5 if workload.mode == "full" else 4, workload.batch.rows * model.length
    traffic = replace(model.traffic, tokens=tokens, trips=trips, can_have=lambda layout: True)
    chosen = least_moved([each.layout for each in candidates], traffic, job.devices.per_node)
    return next(each for each in candidates if each.layout == chosen)


def layouts(job: Job, fixed: ParallelConfig | None = None) -> Iterator[Layout]:
    """Yield every layout that the mesh accepts; equal splits come once. `fixed` as in `plan`."""
    world, model = job.devices.count, job.model
    limits = {"pp": len(model.blocks), "tp": job.devices.per_node, "cp": model.length, "replicate": world}
    sizes = [
        [size for size in divisors(world) if size <= most] if fixed is None else [getattr(fixed, axis)]
        for axis, most in limits.items()
    ]
    chosen = "auto" if fixed is None else fixed.ep
    offload = job.offload if fixed is None else fixed.offload
    expert_ranks = divisors(model.anatomy.num_experts) if chosen == "auto" else [chosen]
    # What a user has set stays; more than one stage a rank is never proposed.
    schedule: tuple[str, int] = ("1f1b", 1)
    if fixed is not None:
        auto = "1f1b" if fixed.pp_virtual_stages == 1 else "interleaved_1f1b"
        schedule = (auto if fixed.pp_schedule == "auto" else fixed.pp_schedule, fixed.pp_virtual_stages)
    for pp, tp, cp, replicate in product(*sizes):
        rest, shares = pp * tp * cp * replicate, cp * tp
        if world % rest or model.heads % shares or model.length % shares:
            continue
        for ep in expert_ranks:
            if world // (pp * replicate) % ep == 0:
                schedule_of_pp = schedule if pp > 1 else ("1f1b", 1)
                yield Layout(pp, replicate, world // rest, cp, tp, ep, *schedule_of_pp, offload)


def measured_imbalance(loads: Mapping[str, Sequence[int]], anatomy: Anatomy) -> dict[int, tuple[float, ...]]:
    """Return `Job.measured` of contiguous placement; a block without experts counts as 1.

    Args:
        loads: Tokens of each expert, by the full name of the layer's experts module.
    """
    order = range(anatomy.num_experts)
    block_of = {name: next(block for block in anatomy.blocks if is_inside(name, block)) for name in loads}
    found = {}
    for ep in divisors(anatomy.num_experts):
        of_block = {block_of[name]: busiest(load_E, order, ep) for name, load_E in loads.items()}
        found[ep] = tuple(of_block.get(block, 1.0) for block in anatomy.blocks)
    return found


def evaluate(job: Job, layout: Layout, mode: CheckpointingMode, batch: Batch) -> Candidate:
    """Return the memory and time of one layout with a mode and a batch, in the order that `train` would take."""
    on_cpu = job.devices.name == "cpu"
    nodes = nodes_of_ep(layout, job.devices.per_node) if job.dispatch == "hierarchical" else 1
    by_block = job.measured.get(layout.ep, ())
    workload = Workload(
        job.model, layout, batch, mode, job.layers, max(by_block, default=job.imbalance), on_cpu, job.optimizer, nodes
    )
    workload = replace(workload, teacher=job.teacher, by_block=by_block)
    buffers = deepep.buffer_bytes(layout, job.model.hidden) if job.dispatch == "deepep" and layout.ep > 1 else 0
    overhead = job.devices.hardware.overhead + buffers

    def fits(order: Order) -> bool:
        in_order = replace(workload, batch=replace(batch, order=order))
        if memory_of(in_order, overhead=overhead).total > job.budget:
            return False
        # Half of it for inputs: the remainder is for what ranks hold of their data, checkpoints and experts.
        return not order.inputs_on_host or inputs_on_host(in_order) <= job.devices.hardware.host_memory / 2

    recomputes_all = mode == "full" and job.layers == "all"
    refuse = partial(job.model.feasibility.refuse_by_layer, layout)
    chosen = choose_order(job.order, layout, batch.accumulation, recomputes_all=recomputes_all, refuse=refuse)
    may_use_host = recomputes_all and not on_cpu
    order, why = order_that_fits(job.order, chosen, batch.accumulation, fits, may_use_host=may_use_host)
    workload = replace(workload, batch=replace(batch, order=order))
    return Candidate(workload, memory_of(workload, overhead=overhead), speed_of(workload, job.devices), why)


def modes(model: ModelFigures) -> tuple[CheckpointingMode, ...]:
    """Return the checkpointing modes that this model has, the one that recomputes most last."""
    return get_args(CheckpointingMode) if model.checkpointable else ("none",)


def checkpoint_bytes(job: Job, layout: Layout) -> float:
    """Return the bytes of masters and moments in a checkpoint of the full job."""
    states = (resident_state(job.model, layout, stage, job.optimizer) for stage in range(layout.pp))
    return sum(state.master + state.moments for state in states) * layout.world_size / layout.replicate / layout.pp


def _refused(job: Job, layout: Layout) -> Rejected | None:
    """Return the layout as rejected, if `train` would refuse it."""
    model, data_ranks = job.model, layout.data_ranks
    try:
        if model.anatomy.num_experts % layout.ep:
            resolve_layout(explicit(layout), layout.world_size, model.anatomy.num_experts)  # which says so
        for block, _ in pipeline_rank(model).blocks:
            if block.experts is not None:
                expert_shard_dim(block.experts.spec, layout)
        if job.order.accumulate == "by_layer":
            model.feasibility.refuse_by_layer(layout)
    except InputError as error:
        return Rejected(layout, str(error))
    if (refusal := model.feasibility.refusal(layout)) is not None:
        return Rejected(layout, refusal)
    if job.global_batch_size % data_ranks:
        why = f"a step's {job.global_batch_size} sequences cannot be dealt evenly to {data_ranks} data ranks"
        fits = -(-job.global_batch_size // data_ranks) * data_ranks
        return Rejected(layout, why, f"--global-batch-size {fits}")
    return None


def variants(job: Job, layouts: Sequence[Layout]) -> Iterator[Candidate]:
    """Yield each mode with every micro-batch size from one sequence up to the first that does not fit.

    Args:
        layouts: Layouts that differ in ep alone; of those that fit, the one that moves least is taken.
    """
    each = job.global_batch_size // layouts[0].data_ranks
    for mode in modes(job.model):
        for rows in (size for size in divisors(each) if size <= MOST_ROWS):
            found = (evaluate(job, layout, mode, Batch(rows, each // rows)) for layout in layouts)
            fitting = [candidate for candidate in found if candidate.fits(job)]
            if not fitting:
                break
            yield _least_moved(job, fitting)


def _too_large(job: Job, least: Candidate) -> Rejected:
    """Return a layout as rejected, of which `least`, the most frugal form, does not fit."""
    memory, layout, per_node = least.memory, least.layout, job.devices.per_node
    advice = []
    if memory.state > job.budget / 2:
        needed = job.budget - (memory.total - memory.state)
        if layout.replicate > 1:
            advice.append(f"replicate={layout.replicate // 2}")
        elif needed > 0:
            ranks = -(-memory.state * layout.world_size // needed)
            advice.append(f"{int(-(-ranks // per_node) * per_node)} devices")
        if not job.model.adapted:
            advice.append("--lora r=16")
    elif layout.cp < per_node:
        advice.append(f"cp={2 * layout.cp}")
    else:
        advice.append(f"--seq-len {job.model.length // 2}")
    text = f"does not fit: {memory.total / GIB:.0f} GiB of {job.budget / GIB:.0f}; state {memory.state / GIB:.0f}"
    held = f"activations {memory.activations / GIB:.0f} ({least.workload.mode} checkpointing)"
    return Rejected(layout, f"{text}, {held}", " or ".join(advice or ["more devices"]), least)
