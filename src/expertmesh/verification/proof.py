"""What the layers of a proof share: the job in its own precision and in fp32, and what the unsharded model gives.

Everything is made when it is first asked for and kept: a planted bug changes the job, never the reference, so the
self-test computes no reference twice.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expertmesh.config import PrecisionConfig
from expertmesh.verification import subject as job
from expertmesh.verification.compare import TOLERANCE
from expertmesh.verification.reference.model import Expected, Reference
from expertmesh.verification.seen import Places, Seen, forward
from expertmesh.verification.setup import Setup, in_float32
from expertmesh.verification.subject import Outcome, Subject

Tamper = Callable[[Subject], None]


@dataclass(frozen=True, slots=True)
class Graded:
    """One backward pass of the job: its losses, this rank's gradients before clipping, and the norm it reported.

    `clipped` is how much clipping to `max_norm` scaled each tensor's part here.
    """

    outcome: Outcome
    gradients: dict[str, Tensor]
    norm: float
    max_norm: float
    clipped: dict[str, float]


@dataclass(slots=True)
class Expectations:
    """The unsharded model's results on the first step, by dtype; shared by all jobs of one layout."""

    found: dict[torch.dtype, Expected] = field(default_factory=dict)
    forced: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    trajectories: dict[torch.dtype, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Proof:
    """One job under proof.

    `tamper` plants a bug after loading, `tamper_gradients` after backward,
    `tamper_optimizer` after each optimizer step, `tamper_resumed` after loading a checkpoint,
    `tamper_files` (on rank 0) in a directory just saved; `clip` may be another than the product's."""

    setup: Setup
    expectations: Expectations = field(default_factory=Expectations)
    tamper: Tamper | None = None
    tamper_gradients: Tamper | None = None
    tamper_optimizer: Tamper | None = None
    tamper_resumed: Tamper | None = None
    tamper_files: Callable[[Path], None] | None = None
    clip: Callable[[Subject, float | None], float] = job.clip
    escalates: bool = True
    noise: dict[str, float] = field(default_factory=dict)
    _subjects: dict[str, Subject] = field(default_factory=dict)
    _seen: dict[str, Seen] = field(default_factory=dict)
    _graded: dict[str, Graded] = field(default_factory=dict)
    _following: dict[str, Expected] = field(default_factory=dict)

    @property
    def precisions(self) -> list[PrecisionConfig]:
        """fp32 (or fp64) first, which is compared to a tolerance, then the run's own, if that is another."""
        own, exact = self.setup.config.precision, in_float32(self.setup.config.precision)
        return [exact] if own == exact else [exact, own]

    def subject(self, precision: PrecisionConfig) -> Subject:
        """The job, loaded and not yet stepped."""
        key = label(precision)
        if key not in self._subjects:
            self._subjects[key] = job.build(self.setup, precision=precision)
            if self.tamper is not None:
                self.tamper(self._subjects[key])
        return self._subjects[key]

    def forget(self) -> None:
        """Free the jobs; what was measured stays."""
        self._subjects.clear()

    def seen(self, precision: PrecisionConfig) -> Seen:
        key = label(precision)
        if key not in self._seen:
            self._seen[key] = forward(self.subject(precision), self.setup.steps[0], Places(0))
        return self._seen[key]

    def graded(self, precision: PrecisionConfig) -> Graded:
        """One backward pass, and clipping to half of the norm that the unsharded model has."""
        key = label(precision)
        if key not in self._graded:
            subject = self.subject(precision)
            outcome = job.backward(subject, subject.batches(self.setup.steps[0]))
            if self.tamper_gradients is not None:
                self.tamper_gradients(subject)
            before = job.gradients(subject)
            max_norm = self.expected(self.judge(precision)).norm / 2
            norm = self.clip(subject, max_norm)
            after = job.gradients(subject)
            scaled = {
                name: float(after[name].double().norm() / size)
                for name, value in before.items()
                if (size := float(value.double().norm()))
            }
            subject.model.zero_grad(set_to_none=True)
            self._graded[key] = Graded(outcome, before, norm, max_norm, scaled)
        return self._graded[key]

    def judge(self, precision: PrecisionConfig) -> torch.dtype:
        """The dtype of the unsharded model that a job in `precision` is compared with."""
        return torch.float64 if precision.compute == "float64" else torch.float32

    def expected(self, dtype: torch.dtype) -> Expected:
        if dtype not in self.expectations.found:
            # In bf16 choices are the unsharded model's own; how often they are others is what is compared.
            forced = {} if dtype == torch.bfloat16 else self.expectations.forced
            self.expectations.found[dtype] = self.reference(dtype).run(self.setup.steps[0], forced=forced)
        return self.expectations.found[dtype]

    def follow(self, forced: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Let the reference take the job's side in these ties from now on; what it gave before is forgotten."""
        self.expectations.forced = dict(forced)
        self.expectations.found.clear()

    def following(self, dtype: torch.dtype, precision: PrecisionConfig) -> Expected:
        """What the unsharded model gives when every token takes the experts that the job chose.

        In bf16 choices between near experts fall otherwise in every run, and one token's other expert outweighs all
        rounding; choices are therefore judged apart.
        """
        key = f"{label(precision)}, {dtype}"
        if key not in self._following:
            seen = self.seen(precision)
            forced = {name: (torch.ones(len(index), dtype=torch.bool), index) for name, index in seen.choices.items()}
            self._following[key] = self.reference(dtype).run(self.setup.steps[0], forced=forced)
        return self._following[key]

    def reference(self, dtype: torch.dtype) -> Reference:
        """A new one; its weights come from the files."""
        return Reference(self.setup, self.subject(self.precisions[0]), dtype)

    def tolerance(self, precision: PrecisionConfig) -> float:
        """0 where only the unsharded model's own error counts."""
        return TOLERANCE.get(getattr(torch, precision.compute), 0.0)


def label(precision: PrecisionConfig) -> str:
    """How reports name a precision."""
    if precision.params == precision.compute:
        return precision.compute
    return f"{precision.compute} over {precision.params}"
