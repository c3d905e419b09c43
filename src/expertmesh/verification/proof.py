"""Shared results for the layers of a proof: the job in its precision and in fp32, and the unsharded model's results.

Everything is computed at its first use and cached. A planted bug changes the job, never the reference, so the self-test
never computes a reference result twice.
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
from expertmesh.distributed.all_ranks import from_rank_0, gather_objects
from expertmesh.experts.install import close_library
from expertmesh.verification.compare import (
    TOLERANCE,
    Distance,
    differ,
    distances,
    figures,
    least_rms,
    own_errors,
)
from expertmesh.verification.forward_record import ForwardRecord, record_forward
from expertmesh.verification.job import Losses, ProvenJob, build
from expertmesh.verification.reference.model import Expected, Reference
from expertmesh.verification.reference.unsharded import UnshardedRun
from expertmesh.verification.result import Figure
from expertmesh.verification.setup import Setup, in_float32

_SHARE_OF_MEMORY = 0.5  # the part of the free memory that unsharded models may use


def _nothing(_: Any) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Hooks:
    """The places of a job in which a bug can be planted."""

    loaded: Callable[[ProvenJob], None] = _nothing
    """Called after the job is built and loaded."""
    backward: Callable[[ProvenJob], None] = _nothing
    """Called after each backward, before clipping."""
    updated: Callable[[ProvenJob], None] = _nothing
    """Called after each optimizer step."""
    resumed: Callable[[ProvenJob], None] = _nothing
    """Called after a checkpoint was loaded."""
    saved: Callable[[Path], None] = _nothing
    """Called on rank 0 with a directory that was just saved."""
    clip: Callable[[ProvenJob, float | None], float] = ProvenJob.clip
    """Clips to a maximum norm and returns the norm; by default the training loop's function."""


@dataclass(frozen=True, slots=True)
class BackwardResult:
    """The results of one backward pass of the job."""

    losses: Losses
    gradients: dict[str, Tensor]
    """This rank's shards of the gradients before clipping, by name."""
    norm: float
    """The global norm that clipping returned."""
    max_norm: float
    """The maximum norm that clipping was called with."""
    scaled: dict[str, float]
    """The factor by which clipping scaled each of this rank's shards that is not zero, by name."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The distance between the job and the unsharded model, tensor by tensor."""

    expected: Expected
    """The results of the unsharded model."""
    found: dict[str, Distance]
    """The distance of the job's tensors, by name."""
    own: dict[str, Distance] | None
    """The distance of the unsharded model in the job's dtype from the same model in a wider dtype; None if the
    tolerance alone is the limit.
    """
    limit: float
    """The tolerance, as a relative error."""
    floor: bool
    """Compare tensors that are nearly zero as if they were larger, as in compare.py."""

    @property
    def least_rms(self) -> float:
        """The RMS below which a tensor counts as nearly zero; 0 without `floor`."""
        return least_rms(self.found) if self.floor else 0.0

    @property
    def figures(self) -> list[Figure]:
        """The relative error and the limit of each tensor."""
        return list(figures(self.found, self.limit, self.own, floor=self.floor))


@dataclass(slots=True)
class Proof:
    """One job under proof, in each of its precisions, with the reference that it is compared with."""

    setup: Setup
    scratch: Path
    """A directory that all ranks can read."""
    results: dict[torch.dtype, Expected] = field(default_factory=dict)
    """The unsharded model's results of the first step by dtype, with the experts that it chooses."""
    trajectories: dict[float, UnshardedRun] = field(default_factory=dict)
    """Its runs over all steps, by the noise on their gradients (layers/update.py)."""
    hooks: Hooks = field(default_factory=Hooks)
    """The planted bug; by default none."""
    uses_float64: bool = True
    """If the job's fp32 result is outside the tolerance, compare with the reference in fp64 before blaming the job."""
    own_error: dict[str, float] = field(default_factory=dict)
    """The largest measured relative error of the unsharded fp32 model against fp64, by kind of tensor."""
    jobs: dict[str, ProvenJob] = field(default_factory=dict)
    """The loaded jobs, by the label of their precision."""
    references: dict[torch.dtype, Reference] = field(default_factory=dict)
    """The unsharded models, by dtype."""
    runs: "list[PrecisionRun]" = field(init=False)
    """The run in fp32 (or fp64), which has a tolerance; then the run in the configured precision, if it differs."""

    def __post_init__(self) -> None:
        own, exact = self.setup.config.precision, in_float32(self.setup.config.precision)
        self.runs = [PrecisionRun(self, precision) for precision in ([exact] if own == exact else [exact, own])]

    @property
    def exact(self) -> "PrecisionRun":
        """The run in fp32 (or fp64)."""
        return self.runs[0]

    def planted(self, hooks: Hooks) -> "Proof":
        """Return the same proof with a bug. It shares the loaded jobs, unless the bug changes loading; then free them.

        Collectives: every rank calls it.
        """
        if hooks.loaded is _nothing:
            return replace(self, hooks=hooks)
        self.free_jobs()
        return replace(self, hooks=hooks, jobs={}, references={})

    def free_jobs(self) -> None:
        """Free the jobs and the references; results that were computed stay. Collectives: every rank calls it."""
        for job in self.jobs.values():
            close_library(job.model)
        self.jobs.clear()
        self.references.clear()
        gc.collect()

    def expected(self, dtype: torch.dtype) -> Expected:
        """Return the unsharded model's results on the first step, with the experts that it chooses itself.

        Collectives: every rank calls it; those of `Reference.run` at the first call for a dtype.
        """
        found = self.results
        if dtype not in found:
            found[dtype] = self.reference(dtype).run(self.setup.steps[0])
        return found[dtype]

    def reference(self, dtype: torch.dtype) -> Reference:
        """Return the unsharded model in `dtype`. Collectives: every rank calls it; those of making a `Reference`."""
        if dtype not in self.references:
            self.references[dtype] = Reference(self.exact.job, dtype)
        return self.references[dtype]

    def no_memory_for(self, copies: int) -> str | None:
        """Return why `copies` of the unsharded model do not fit into the memory of rank 0's machine; None if they do.

        Collectives: every rank calls it and gets the same; one broadcast on the default group.
        """
        meta_model = self.setup.meta_model(self.exact.judge)
        needed = copies * sum(parameter.nbytes for parameter in meta_model.parameters())
        try:
            lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        except (OSError, StopIteration):  # not Linux
            free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        free = from_rank_0(free)
        if needed <= _SHARE_OF_MEMORY * free:
            return None
        return f"the unsharded model takes {needed / 2**30:.0f} GiB, and {free / 2**30:.0f} GiB are free"


@dataclass
class PrecisionRun:
    """The job of a proof in one precision and its results on the first step, each computed at its first use."""

    proof: Proof
    precision: PrecisionConfig
    _followed: dict[torch.dtype, Expected] = field(default_factory=dict)
    """Cache of `expected`: the unsharded model's results with the job's experts, by dtype."""

    @property
    def name(self) -> str:
        """The name of the precision in reports."""
        return label(self.precision)

    @property
    def limit(self) -> float:
        """The tolerance, a relative error; 0 if only the unsharded model's error sets the limit."""
        return TOLERANCE.get(getattr(torch, self.precision.compute), 0.0)

    @property
    def judge(self) -> torch.dtype:
        """The dtype of the unsharded model with which the job is compared."""
        return torch.float64 if self.precision.compute == "float64" else torch.float32

    @property
    def may_ask_float64(self) -> bool:
        """True if the reference in fp64 decides where the reference in fp32 cannot."""
        return self.proof.uses_float64 and self.precision.compute == "float32"

    @property
    def job(self) -> ProvenJob:
        """The job, loaded; built at its first use. Collectives: every rank reads it; those of `build`."""
        jobs = self.proof.jobs
        if self.name not in jobs:
            jobs[self.name] = build(self.proof.setup, precision=self.precision)
            self.proof.hooks.loaded(jobs[self.name])
        return jobs[self.name]

    @cached_property
    def forward(self) -> ForwardRecord:
        """The job's forward on the first step. Collectives: every rank reads it; those of `record_forward`."""
        return record_forward(self.job, self.proof.setup.steps[0])

    @cached_property
    def backward(self) -> BackwardResult:
        """The job's backward pass on the first step, clipped to half of the norm of the unsharded gradients.

        Collectives: every rank reads it; those of `ProvenJob.backward`, `ProvenJob.clip` and `Proof.expected`.
        """
        job, hooks = self.job, self.proof.hooks
        losses = job.backward(job.batches(self.proof.setup.steps[0]))
        hooks.backward(job)
        before = job.gradients()
        # Half of the norm, so that clipping has an effect that can be compared.
        max_norm = self.proof.expected(self.judge).norm / 2
        norm = hooks.clip(job, max_norm)
        after, sizes = job.gradients(), {name: float(value.double().norm()) for name, value in before.items()}
        scaled = {name: float(after[name].double().norm() / size) for name, size in sizes.items() if size}
        job.model.zero_grad(set_to_none=True)
        return BackwardResult(losses, before, norm, max_norm, scaled)

    def expected(self, dtype: torch.dtype) -> Expected:
        """Return the unsharded model's results when every token takes the experts that the job chose.

        Rounding decides between experts with nearly equal scores, and one token on another expert changes the result
        more than all rounding. So the chosen experts are checked separately, and everything else with equal experts.

        Collectives: every rank calls it; one all-gather of objects, to find out whether any chosen expert differs, and
        those of `Reference.run`.
        """
        if dtype not in self._followed:
            found, chosen = self.proof.expected(dtype), self.forward.choices
            both = [(chosen[name], index) for name, index in found.forward.choices.items() if name in chosen]
            if any(gather_objects(any(bool(differ(*each).any()) for each in both))):
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
        """Compare the job's tensors with those of the unsharded model.

        fp32 and fp64 have a tolerance. If fp32 cannot show whether the job or the model's conditioning is to blame,
        fp64 decides. In bf16 the unsharded fp32 model counts as exact, and the error of the unsharded bf16 model sets
        the limit.

        Args:
            got: The job's tensors, by name.
            part: Selects the same tensors from the unsharded model's results.
            counted: As in `distances`.
            floor: As in `figures`.

        Collectives: every rank calls it; those of `expected` and `distances`, for up to two dtypes.
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


def label(precision: PrecisionConfig) -> str:
    """Return the name of a precision in reports."""
    if precision.params == precision.compute:
        return precision.compute
    return f"{precision.compute} over {precision.params}"
