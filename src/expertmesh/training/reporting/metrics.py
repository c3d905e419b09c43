"""Define the reports of a step and an evaluation (rows of `metrics.jsonl`), and count over all ranks for them."""

import json
import math
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from expertmesh.anatomy import Anatomy
from expertmesh.distributed.mesh import Mesh
from expertmesh.experts.layer import ExpertLayer, layer_of
from expertmesh.experts.placement import LOAD_FILE, Placement, balanced, write_loads
from expertmesh.io.terminal import duration
from expertmesh.state.model_view import stage_names
from expertmesh.training.reporting.record import MoeLayer

EVAL_SAMPLES = "eval_samples"
# Characters of a prompt, and of an answer, in a log.
_SHOWN = 160
# A run reports the tokens of every expert so many times.
_TIMES_TOKENS = 100
# A new placement is advised if it leaves at most this share of the busiest EP rank's tokens.
_WORTH_PLACING = 0.9
# Tokens of an expert, in the mean, from which on a load is more than chance.
_LEAST_TOKENS = 20


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One row of `metrics.jsonl`."""

    step: int
    epoch: float
    """Passes over the data, fractions included."""
    loss: float
    """Summed token loss over target tokens of the whole step, auxiliary losses left out."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    target_tokens: int
    """Target tokens of the whole step."""
    tokens_per_second: float
    """Input tokens of the full job, without padding."""
    peak_memory_bytes: int
    """The largest of all ranks since the start: device memory, on a CPU resident memory."""
    elapsed_seconds: float
    """Training time of the run so far, over all starts."""
    step_seconds: float
    """Seconds of a step, pauses left out."""
    expert_load: list[dict[str, float | int]]
    """For each MoE layer, the busiest expert's tokens over the mean, the entropy of the experts' shares over that of
    equal ones, and the number of experts without a token; where ep > 1 the busiest EP rank's tokens over the mean."""
    mfu: float | None = None
    """Model FLOP utilisation, a share of 1; None if the device or the model's FLOPs are not known."""
    aux_loss: float | None = None
    """Auxiliary loss of the whole step, without its factor; None if it is off."""
    z_loss: float | None = None
    """Router z-loss of the whole step, without its factor; None if it is off."""
    skipped: str | None = None
    """The reason why the optimizer did not step; None if it did."""
    expert_tokens: list[list[int]] | None = None
    """Tokens `[L][E]`, which `expert_load` summarises; in some rows."""
    figures: dict[str, float] = field(default_factory=dict)
    """Figures of the objective beside its loss, each a key of the row."""

    def row(self) -> dict[str, Any]:
        """Return the row of `metrics.jsonl`, without what is off."""
        return {
            key: value for key, value in asdict(self).items() if value is not None and key != "figures"
        } | self.figures

    def line(self, total_steps: int, seconds_left: float, devices: int, layer: MoeLayer) -> str:
        """Return one line for the log of a job on that many devices; `layer` is any of the model's."""
        rate = f"{self.step_seconds:.3g} s/step"
        if self.step_seconds < 1:
            rate = f"{1 / max(self.step_seconds, 1e-9):.3g} steps/s"
        speed = f"{self.tokens_per_second:,.0f} tokens/s"
        speed += f" ({self.tokens_per_second / devices:,.0f} a device)" if devices > 1 else ""
        parts = [f"{datetime.now():%H:%M:%S}", f"step {self.step}/{total_steps}", f"epoch {self.epoch:.2f}"]
        parts += [f"loss {self.loss:.4f}", *shown(self.figures), f"grad norm {self.grad_norm:.3f}"]
        parts += [f"lr {self.learning_rate:.2e}", rate, speed]
        parts += [f"MFU {self.mfu:.1%}"] if self.mfu is not None else []
        parts += [f"{self.peak_memory_bytes / 2**30:.2f} GiB", f"load {self.load_summary(layer)}"]
        parts += [f"{duration(round(seconds_left))} left"] if self.step < total_steps else []
        return "  ".join(parts) + (f"  SKIPPED: {self.skipped}" if self.skipped else "")

    def load_summary(self, layer: MoeLayer) -> str:
        """Return the worst layer's max/mean of experts and of EP ranks, and all dead experts.

        Args:
            layer: Any of the model's, for the maxima.
        """
        worst, dead = max(x["max_over_mean"] for x in self.expert_load), sum(x["dead"] for x in self.expert_load)
        ranks = max(x.get("ranks_max_over_mean", 0) for x in self.expert_load)
        of_ranks = f", ranks {ranks:.1f}x" if ranks else ""
        every = layer.experts * len(self.expert_load)
        return f"{worst:.1f}x of at most {layer.most_load:.3g}, {dead} of {every} dead{of_ranks}"


@dataclass(frozen=True, slots=True)
class EvalSample:
    """The model's greedy answer to a prompt of an evaluation set."""

    set: str
    """Name of the set."""
    source: str
    prompt: str
    answer: str
    expected: str
    """The answer in the data."""

    def line(self) -> str:
        """Return a line for the log: the end of the prompt, and the beginnings of the answers."""
        texts = [self.prompt if len(self.prompt) <= _SHOWN else f"...{self.prompt[-_SHOWN:]}"]
        texts += [each if len(each) <= _SHOWN else f"{each[:_SHOWN]}..." for each in (self.answer, self.expected)]
        prompt, answer, expected = (json.dumps(text, ensure_ascii=False) for text in texts)
        return f"sample {self.source}: {prompt} answered by {answer}, in the data by {expected}"


@dataclass(frozen=True, slots=True)
class EvalMetrics:
    """The figures of an evaluation set, or of several together."""

    loss: float
    """The objective's, per `over`."""
    target_tokens: int
    figures: dict[str, float]
    """The objective's others, per `over`."""
    count: int
    """Number of what `over` names."""
    over: str
    """Name of what `count` counts."""
    desirable: int | None = None
    """Desirable rows among them; None where rows have no label."""
    sets: dict[str, "EvalMetrics"] = field(default_factory=dict)
    """Figures of each named set."""
    samples: list[EvalSample] = field(default_factory=list)
    """The model's answers."""
    seconds: float | None = None
    """Duration of the evaluation."""
    step: int = 0
    """The step after which it was."""

    @classmethod
    def together(cls, sets: dict[str, "EvalMetrics"]) -> "EvalMetrics":
        """Return all sets as if they were one."""
        parts = list(sets.values())
        count = sum(each.count for each in parts)
        rows = [each.count for each in parts]
        of_kind: dict[str, list[int]] = {}
        if parts[0].desirable is not None:  # whose rewards are means over the rows of one kind
            good = [each.desirable or 0 for each in parts]
            of_kind = {"rewards/chosen": good, "rewards/rejected": [a - b for a, b in zip(rows, good, strict=True)]}
        figures = {}
        for name in parts[0].figures:
            counts = of_kind.get(name, rows)
            total = sum(each.figures[name] * of_set for each, of_set in zip(parts, counts, strict=True))
            figures[name] = total / max(1, sum(counts))
        if of_kind:
            figures["rewards/margins"] = figures["rewards/chosen"] - figures["rewards/rejected"]
        loss = sum(each.loss * each.count for each in parts) / count
        named = {name: each for name, each in sets.items() if name}
        return cls(loss, sum(each.target_tokens for each in parts), figures, count, parts[0].over, sets=named)

    def row(self) -> dict[str, Any]:
        """Return the row of `metrics.jsonl`."""
        row: dict[str, Any] = {"step": self.step, "eval_loss": self.loss, "eval_target_tokens": self.target_tokens}
        row |= {f"eval_{name}": value for name, value in self.figures.items()}
        row |= {"eval_runtime": self.seconds} if self.seconds is not None else {}
        for name, each in self.sets.items():
            row |= {f"eval_{name}_{key}": value for key, value in {"loss": each.loss, **each.figures}.items()}
        return row | ({EVAL_SAMPLES: [asdict(each) for each in self.samples]} if self.samples else {})

    def lines(self) -> list[str]:
        """Return lines for the log."""
        found = [("eval", self), *((f"eval {name}", each) for name, each in self.sets.items())]
        figures = [
            "  ".join([f"{name} loss {each.loss:.4f} over {each.count:,} {each.over}", *shown(each.figures)])
            for name, each in found
        ]
        return figures + [each.line() for each in self.samples]


def shown(figures: dict[str, float]) -> list[str]:
    return [f"{name} {value:.4f}" for name, value in figures.items()]


class ExpertLoad:
    """Tokens per MoE layer and expert since the last report, and their summaries.

    The layers count them on each rank; every rank calls the methods. `L` MoE layers of the full model, `E` experts.
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy, mesh: Mesh, placement: Placement) -> None:
        here = set(stage_names(model, [spec.name for spec in anatomy.experts]))
        # None for a layer of another pipeline stage.
        self._layers: list[ExpertLayer | None] = [
            layer_of(model.get_submodule(spec.name)) if spec.name in here else None for spec in anatomy.experts
        ]
        self._num_experts, self._mesh, self._placement = anatomy.num_experts, mesh, placement
        self._names = [spec.name for spec in anatomy.experts]
        self._total_LE = torch.zeros(len(self._names), self._num_experts, dtype=torch.int64)
        self._steps = (1, 0)

    def take(self, step: int = 0) -> tuple[torch.Tensor, int]:
        """Return tokens over all ranks `[L, E]` on the host, and the largest peak memory of a rank. Restarts counting.

        Args:
            step: The last step that was counted, for `write`.

        Collectives: two all-reduces on the default group, and one wait for the device.
        """
        counts_LE = self._stacked([None if layer is None else layer.tokens_per_expert.pop() for layer in self._layers])
        peak = torch.tensor([peak_memory(self._mesh.device)], device=self._mesh.device)
        dist.all_reduce(counts_LE)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        *counts, most = torch.cat([counts_LE.flatten(), peak]).tolist()
        tokens_LE = torch.tensor(counts).view(counts_LE.shape)
        self._total_LE += tokens_LE
        self._steps = self._steps[0], step
        return tokens_LE, most

    def pending(self) -> list[list[int]]:
        """Return what `take` would summarise now, `[L][E]`, without taking it. Collectives: one all-reduce."""
        counts_LE = self._stacked(
            [None if layer is None else layer.tokens_per_expert.counts_E for layer in self._layers]
        )
        dist.all_reduce(counts_LE)
        pending: list[list[int]] = counts_LE.tolist()
        return pending

    def summary(self, tokens_LE: torch.Tensor) -> list[dict[str, float | int]]:
        """Return `StepMetrics.expert_load` of tokens `[L, E]` on the host."""
        summaries = expert_load(tokens_LE)
        if self._placement.ep > 1:
            for summary, (name, load_E) in zip(summaries, self._by_name(tokens_LE).items(), strict=True):
                summary["ranks_max_over_mean"] = self._placement.busiest(name, load_E)
        return summaries

    def last_lines(self) -> list[str]:
        """Return the lines for the end of the run: what a placement by the load since this start would gain."""
        return placement_advice(self._by_name(self._total_LE), self._placement)

    def write(self, directory: Path) -> None:
        """Write the tokens of the reported steps since this start into a run's directory. For rank 0."""
        if self._steps[1] >= self._steps[0] and self._names:
            write_loads(directory / LOAD_FILE, self._by_name(self._total_LE), *self._steps)

    def restore(self, pending: list[list[int]] | None, first_step: int) -> None:
        """Give the counts of all ranks back to one rank of each stage: they are summed again from `first_step` on."""
        self._steps = first_step, 0
        if pending is not None:
            self._total_LE -= torch.tensor(pending)  # of steps before this start
        if pending is not None and self._mesh.rank % self._mesh.layout.ranks_per_stage == 0:
            for layer, count_E in zip(self._layers, pending, strict=True):
                if layer is not None:
                    layer.tokens_per_expert.counts_E = torch.tensor(count_E, device=self._mesh.device)

    def _by_name(self, tokens_LE: torch.Tensor) -> dict[str, list[int]]:
        return dict(zip(self._names, tokens_LE.tolist(), strict=True))

    def _stacked(self, counts: list[torch.Tensor | None]) -> torch.Tensor:
        """Return `[L, E]`, with zeros for layers of other stages."""
        nothing_E = torch.zeros(self._num_experts, dtype=torch.int64, device=self._mesh.device)
        return torch.stack([nothing_E if count_E is None else count_E for count_E in counts])


def tokens_are_due(step: int, every: int, total_steps: int) -> bool:
    """Return whether the report of `step`, one per `every` steps, has the tokens of every expert: some hundred do."""
    return step % max(1, total_steps // _TIMES_TOKENS) < every or step == total_steps


def expert_load(counts_LE: torch.Tensor) -> list[dict[str, float | int]]:
    """Summarise token counts per layer and expert `[L, E]` on the host."""
    summaries: list[dict[str, float | int]] = []
    for count_E in counts_LE:
        share_E = count_E.double() / max(int(count_E.sum()), 1)
        summaries.append(
            {
                "max_over_mean": float(count_E.max() / max(float(count_E.float().mean()), 1e-9)),
                # Relative: 1 when all experts get the same, 0 when one gets everything.
                "entropy": float(torch.special.entr(share_E).sum() / math.log(max(len(count_E), 2))),
                "dead": int((count_E == 0).sum()),
            }
        )
    return summaries


def placement_advice(loads: Mapping[str, Sequence[int]], placement: Placement) -> list[str]:
    """Return a line if experts placed by these loads would take more than 10 % off the busiest EP rank, else nothing.

    Args:
        loads: Tokens of each expert, by the full name of the layer's experts module.
        placement: As they ran.
    """
    # Of few tokens the busiest rank is one by chance.
    if placement.ep == 1 or not all(sum(load_E) >= _LEAST_TOKENS * len(load_E) for load_E in loads.values()):
        return []
    found = balanced(loads, placement.ep, placement.replicas)
    ran, best = (each.over(loads)[0] for each in (placement, found))
    if best >= _WORTH_PLACING * ran:
        return []
    where, new = (" under its placement", "a new one") if placement.orders else ("", "moe.placement: balanced")
    return [
        f"placement  the busiest EP rank had {ran:.2f} times the mean load{where} (mean of layers); {new} would give "
        f"{best:.2f} by this run's {LOAD_FILE}"
    ]


def peak_memory(device: torch.device) -> int:
    """Return the peak in bytes: the accelerator's allocations by this process, or the process's resident memory."""
    if device.type == "cpu":
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return int(torch.accelerator.max_memory_allocated(device))
