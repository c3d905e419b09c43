"""What the layers of a proof share: the job in its own precision and in fp32, and what the unsharded model gives.

Everything is made when it is first asked for and kept: a planted bug changes the job, never the reference, so the
self-test computes no reference twice.
"""

import gc
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expertmesh.config import PrecisionConfig
from expertmesh.distributed.all_ranks import from_rank_0
from expertmesh.experts.dispatchers.choose import close_library
from expertmesh.verification.build import build
from expertmesh.verification.compare import (
    TOLERANCE,
    Distance,
    differ,
    distances,
    figures,
    gather,
    least_rms,
    own_errors,
)
from expertmesh.verification.forward_record import ForwardRecord, record_forward
from expertmesh.verification.job import Job, Losses
from expertmesh.verification.reference.model import Expected, Reference
from expertmesh.verification.result import Figure
from expertmesh.verification.setup import Setup, in_float32

_SHARE_OF_MEMORY = 0.5  # of the memory that is free, what unsharded models in memory may use


def _nothing(_: Any) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Hooks:
    """Where a bug can be planted in a job: called after loading, after backward, after each optimizer step, after a
    checkpoint was loaded, and on rank 0 with a directory just saved; `clip` is the training loop's own.
    """

    loaded: Callable[[Job], None] = _nothing
    backward: Callable[[Job], None] = _nothing
    updated: Callable[[Job], None] = _nothing
    resumed: Callable[[Job], None] = _nothing
    saved: Callable[[Path], None] = _nothing
    clip: Callable[[Job, float | None], float] = Job.clip


@dataclass(frozen=True, slots=True)
class BackwardResult:
    """One backward pass of the job: its losses, this rank's gradients before clipping, and the norm it reported.

    `scaled` is how much clipping to `max_norm` scaled each tensor's part here.
    """

    losses: Losses
    gradients: dict[str, Tensor]
    norm: float
    max_norm: float
    scaled: dict[str, float]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far the job is from what is `expected`, tensor by tensor, and the unsharded model in the job's dtype (`own`,
    where that counts) from the same model in a wider one.
    """

    expected: Expected
    found: dict[str, Distance]
    own: dict[str, Distance] | None
    limit: float
    floor: bool

    @property
    def least_rms(self) -> float:
        return least_rms(self.found) if self.floor else 0.0

    @property
    def figures(self) -> list[Figure]:
        return list(figures(self.found, self.limit, self.own, floor=self.floor))


@dataclass(slots=True)
class Expectations:
    """The unsharded model's results: of the first step by dtype, with its own choices of experts, and of all steps.
    Shared by all jobs of one layout.
    """

    found: dict[torch.dtype, Expected] = field(default_factory=dict)
    trajectories: Any = None


@dataclass(slots=True)
class Proof:
    """One job under proof. `scratch` is a directory that all ranks see.

    `uses_float64`: where fp32 is not near enough, the reference in fp64 says whether the job is to blame. `own_error`:
    by tensor kind, how far the unsharded fp32 model was found to be from fp64. `runs`: fp32 (or fp64) first, which is
    compared to a tolerance, then the run's own precision, if that is another.
    """

    setup: Setup
    scratch: Path
    expectations: Expectations = field(default_factory=Expectations)
    hooks: Hooks = field(default_factory=Hooks)
    uses_float64: bool = True
    own_error: dict[str, float] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    references: dict[torch.dtype, Reference] = field(default_factory=dict)
    runs: "list[PrecisionRun]" = field(init=False)

    def __post_init__(self) -> None:
        own, exact = self.setup.config.precision, in_float32(self.setup.config.precision)
        self.runs = [PrecisionRun(self, precision) for precision in ([exact] if own == exact else [exact, own])]

    @property
    def exact(self) -> "PrecisionRun":
        return self.runs[0]

    def planted(self, hooks: Hooks) -> "Proof":
        """The same with a bug. The job is shared where it is loaded as it should be, else this one is freed."""
        if hooks.loaded is _nothing:
            return replace(self, hooks=hooks)
        self.free_jobs()
        return replace(self, hooks=hooks, jobs={}, references={})

    def free_jobs(self) -> None:
        """What was measured stays. Every rank calls it."""
        for job in self.jobs.values():
            close_library(job.model)
        self.jobs.clear()
        self.references.clear()
        gc.collect()

    def expected(self, dtype: torch.dtype) -> Expected:
        """What the unsharded model gives on the first step, with its own choices of experts."""
        found = self.expectations.found
        if dtype not in found:
            found[dtype] = self.reference(dtype).run(self.setup.steps[0])
        return found[dtype]

    def reference(self, dtype: torch.dtype) -> Reference:
        if dtype not in self.references:
            self.references[dtype] = Reference(self.exact.job, dtype)
        return self.references[dtype]

    def no_memory_for(self, copies: int) -> str | None:
        """Why so many copies of the unsharded model are too many for the memory of rank 0's machine; None if not, on
        every rank alike. Every rank calls it; one broadcast.
        """
        meta_model = self.setup.meta_model(self.exact.judge)
        needed = copies * sum(parameter.nbytes for parameter in meta_model.parameters())
        free = int(from_rank_0(str(_free_memory())))
        if needed <= _SHARE_OF_MEMORY * free:
            return None
        return f"the unsharded model takes {needed / 2**30:.0f} GiB, and {free / 2**30:.0f} GiB are free"


@dataclass
class PrecisionRun:
    """The job of a proof in one precision, and what it gave on the first step, made when it is first asked for."""

    proof: Proof
    precision: PrecisionConfig
    _followed: dict[torch.dtype, Expected] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return label(self.precision)

    @property
    def limit(self) -> float:
        """The tolerance; 0 where only the unsharded model's own error counts."""
        return TOLERANCE.get(getattr(torch, self.precision.compute), 0.0)

    @property
    def judge(self) -> torch.dtype:
        """The dtype of the unsharded model that the job is compared with."""
        return torch.float64 if self.precision.compute == "float64" else torch.float32

    @property
    def may_ask_float64(self) -> bool:
        """Whether the reference in fp64 decides where fp32 cannot."""
        return self.proof.uses_float64 and self.precision.compute == "float32"

    @property
    def job(self) -> Job:
        """Loaded and not yet stepped."""
        jobs = self.proof.jobs
        if self.name not in jobs:
            jobs[self.name] = build(self.proof.setup, precision=self.precision)
            self.proof.hooks.loaded(jobs[self.name])
        return jobs[self.name]

    @cached_property
    def forward(self) -> ForwardRecord:
        return record_forward(self.job, self.proof.setup.steps[0])

    @cached_property
    def backward(self) -> BackwardResult:
        """One backward pass, and clipping to half of the norm that the unsharded model has."""
        job, hooks = self.job, self.proof.hooks
        losses = job.backward(job.batches(self.proof.setup.steps[0]))
        hooks.backward(job)
        before = job.gradients()
        max_norm = self.proof.expected(self.judge).norm / 2
        norm = hooks.clip(job, max_norm)
        after, sizes = job.gradients(), {name: float(value.double().norm()) for name, value in before.items()}
        scaled = {name: float(after[name].double().norm() / size) for name, size in sizes.items() if size}
        job.model.zero_grad(set_to_none=True)
        return BackwardResult(losses, before, norm, max_norm, scaled)

    def expected(self, dtype: torch.dtype) -> Expected:
        """What the unsharded model gives when every token takes the experts that the job chose.

        Between near experts rounding decides, and one token's other expert outweighs all rounding: choices are judged
        on their own. One gathering, to see whether any differ.
        """
        if dtype not in self._followed:
            found, chosen = self.proof.expected(dtype), self.forward.choices
            both = [(chosen[name], index) for name, index in found.forward.choices.items() if name in chosen]
            if any(gather(any(bool(differ(*each).any()) for each in both))):
                found = self.proof.reference(dtype).run(self.proof.setup.steps[0], forced=chosen)
            self._followed[dtype] = found
        return self._followed[dtype]

    def compared(
        self,
        got: Mapping[str, Tensor],
        part: Callable[[Expected], Mapping[str, Tensor]],
        counted: Mapping[str, bool] | bool,
        *,
        floor: bool = False,
    ) -> Comparison:
        """What the job `got` beside `part` of what the unsharded model gives; `counted` and `floor` as in compare.py.

        A tolerance limits fp32 and fp64. Where fp32 cannot tell by itself whether the job or the model's conditioning
        is to blame, fp64 does. In bf16 the unsharded fp32 model is taken for exact, and the error of the unsharded bf16
        model sets the limit.
        """

        def distance(got: Mapping[str, Tensor], expected: Expected) -> dict[str, Distance]:
            return distances(got, part(expected), counted)

        expected = self.expected(self.judge)
        if not self.limit:
            own = distance(part(self.expected(torch.bfloat16)), expected)
            return Comparison(expected, distance(got, expected), own, self.limit, floor)
        found = Comparison(expected, distance(got, expected), None, self.limit, floor)
        if not self.may_ask_float64 or all(each.share <= 1 for each in found.figures):
            return found
        exact = self.expected(torch.float64)
        found = Comparison(expected, distance(got, exact), distance(part(expected), exact), self.limit, floor)
        for kind, error in own_errors(found.own or {}, found.least_rms).items():
            self.proof.own_error[kind] = max(self.proof.own_error.get(kind, 0.0), error)
        return found


def _free_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def label(precision: PrecisionConfig) -> str:
    """How reports name a precision."""
    if precision.params == precision.compute:
        return precision.compute
    return f"{precision.compute} over {precision.params}"
