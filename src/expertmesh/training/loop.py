"""The training loop, to be read from top to bottom: steps, accumulation, clipping, update, report, evaluation.

It knows a sharded model and batches; it does not know how either came to be. Every rank runs it in step: each call
of `train_step` is the same sequence of collectives on all of them.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from expertmesh.anatomy import Anatomy
from expertmesh.config import Config
from expertmesh.data import EvaluationBatches, Step, TrainingBatches
from expertmesh.experts.collectives import all_gather
from expertmesh.experts.layer import layer_of
from expertmesh.mesh import Mesh, set_timeout
from expertmesh.parallel.gradients import clip_grad_norm_
from expertmesh.training.faults import NonFiniteGuard, gradients_are_finite
from expertmesh.training.loss import causal_lm_loss
from expertmesh.training.metrics import Reporter, StepMetrics, expert_load, peak_memory


@dataclass(slots=True)
class TrainingLoop:
    """Everything a run needs once it is set up. `run` trains to the end."""

    config: Config
    mesh: Mesh
    model: nn.Module
    anatomy: Anatomy
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    train_batches: TrainingBatches
    eval_batches: EvaluationBatches | None
    total_steps: int
    reporter: Reporter

    def run(self) -> None:
        """Train `total_steps` optimizer steps. Raises `IntegrityError` when losses stay non-finite."""
        guard, started, since = NonFiniteGuard(), time.monotonic(), time.monotonic()
        tokens = 0  # since the last report
        for done, step in enumerate(self._steps(), start=1):
            result = self._train_step(done, step, guard)
            tokens += step.tokens
            if done == 1:
                set_timeout(self.mesh, self.config.distributed.timeout_seconds)
            if result.skipped or done % self.config.log.every_steps == 0 or done == self.total_steps:
                loads = self._expert_load()
                now = time.monotonic()
                self.reporter.step(
                    StepMetrics(
                        step=done,
                        epoch=step.epoch + (step.step_in_epoch + 1) / self.train_batches.steps_in_epoch(step.epoch),
                        loss=result.loss,
                        grad_norm=result.grad_norm,
                        learning_rate=result.learning_rate,
                        target_tokens=step.target_tokens,
                        tokens_per_second=tokens / (now - since),
                        peak_memory_bytes=result.peak_memory,
                        elapsed_seconds=now - started,
                        expert_load=loads,
                        skipped=result.skipped,
                    )
                )
                tokens, since = 0, now
            every = self.config.train.eval_every_steps
            if self.eval_batches is not None and (done == self.total_steps or (every and done % every == 0)):
                paused = time.monotonic()
                self.reporter.evaluation(done, self.evaluate(self.eval_batches), self.eval_batches.target_tokens)
                since += time.monotonic() - paused

    def _steps(self) -> Iterator[Step]:
        remaining = self.total_steps
        for epoch in range(self.config.train.num_epochs):
            for step in self.train_batches.epoch(epoch):
                if remaining == 0:
                    return
                yield step
                remaining -= 1

    def _train_step(self, number: int, step: Step, guard: NonFiniteGuard) -> "_StepResult":
        """One optimizer step: backward over all micro-batches, one norm, one decision, one update.

        A skipped step uses up its place in the schedule.
        """
        share = torch.zeros((), dtype=torch.float64)
        last = len(step.micro_batches) - 1
        for index, batch in enumerate(step.micro_batches):
            if isinstance(self.model, FSDPModule) and self.mesh.layout.replicate > 1:
                self.model.set_requires_all_reduce(index == last)  # between replicas once per step is enough
            loss = causal_lm_loss(self.model, self._on_device(batch), target_tokens=step.target_tokens)
            loss.backward()
            share = share + loss.detach()
            del loss  # and with it what the graph still holds
        grad_norm = clip_grad_norm_(self.model, self.config.optim.max_grad_norm)

        losses, norms, memory, finite = self._exchange(share, grad_norm)
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        skipped = guard.check(number, losses, norms, finite)
        if skipped is None:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()
        return _StepResult(sum(losses), norms, learning_rate, memory, skipped)

    def _exchange(self, share: torch.Tensor, grad_norm: torch.Tensor) -> tuple[list[float], float, int, list[bool]]:
        """Each rank's facts about the step, on every rank: one all-gather and one wait for the device."""
        loss, norm = torch.stack([share.to(self.mesh.device), grad_norm.to(torch.float64)]).tolist()
        finite = math.isfinite(loss) and (math.isfinite(norm) or gradients_are_finite(self.model))
        facts = [loss, float(peak_memory(self.mesh.device)), float(finite)]
        assert dist.group.WORLD is not None
        gathered = all_gather(torch.tensor([facts], dtype=torch.float64), dist.group.WORLD).tolist()
        return (
            [row[0] for row in gathered],
            norm,
            int(max(row[1] for row in gathered)),
            [bool(row[2]) for row in gathered],
        )

    def _expert_load(self) -> list[dict[str, float | int]]:
        """Tokens per layer and expert since the last report, over all ranks (one all-reduce)."""
        counts = [layer_of(self.model.get_submodule(spec.name)).take_load() for spec in self.anatomy.experts]
        counts_LE = torch.stack([count_E for count_E in counts if count_E is not None])
        dist.all_reduce(counts_LE)
        return expert_load(counts_LE.cpu())

    @torch.no_grad()
    def evaluate(self, batches: EvaluationBatches) -> float:
        """Mean loss per target token over the whole evaluation set; the same on every rank (one all-reduce)."""
        self.model.eval()
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            total = total + causal_lm_loss(self.model, self._on_device(batch), target_tokens=batches.target_tokens)
        self.model.train()
        total = total.to(self.mesh.device)
        dist.all_reduce(total)
        return float(total)

    def _on_device(self, batch: Any) -> dict[str, torch.Tensor]:
        return {key: value.to(self.mesh.device, non_blocking=True) for key, value in batch.items()}


@dataclass(frozen=True, slots=True)
class _StepResult:
    loss: float
    grad_norm: float
    learning_rate: float
    peak_memory: int
    skipped: str | None
