"""Compare a few steps with the unsharded model in memory: losses, norms and the movement of the weights.

For layer 4. AdamW divides by the size of each element's gradient. If a gradient is only rounding, its sign is random
and the step is as large as any other. So the limit for weights is measured: how much the movement of the unsharded
model changes when noise of the size that layer 3 allows is added to its gradients.
"""

import os
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from expertmesh.experts.balance import attached_balance
from expertmesh.state.shards import local_tensor
from expertmesh.verification.compare import (
    OWN_ERRORS,
    TOLERANCE,
    distances,
    gather,
    scalar,
    total,
    without_numbers,
)
from expertmesh.verification.job import ProvenJob
from expertmesh.verification.proof import Proof
from expertmesh.verification.reference import unsharded
from expertmesh.verification.reference.model import Expected
from expertmesh.verification.reference.optimizer import plain_optimizer
from expertmesh.verification.result import Check, Figure
from expertmesh.verification.samples import StepData


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The steps of the unsharded model in memory, with this rank's parts of the movement of the weights."""

    start: dict[str, Tensor]
    """This rank's shards of the job's weights before the first step, by name."""
    exact: unsharded.UnshardedRun
    """The steps without noise."""
    noisy: unsharded.UnshardedRun
    """The steps with noise on the gradients."""

    def checks(self, job: ProvenJob, name: str, losses: list[float], norms: list[float]) -> list[Check]:
        """Compare the job, which has taken the same steps, with the unsharded model.

        Args:
            job: The job after its last step.
            name: The name of its precision.
            losses: The job's loss of each step.
            norms: The job's gradient norm of each step.

        Collectives: every rank calls it; two all-gathers of objects.
        """
        limit = TOLERANCE[torch.promote_types(next(iter(self.start.values())).dtype, torch.float32)]
        moved, counted = {n: local_tensor(p) - self.start[n] for n, p in job.parameters().items()}, job.counted()
        found = distances(moved, self.exact.moved, counted)
        noise = distances(self.noisy.moved, self.exact.moved, counted)
        # One limit for all tensors: which of them has an element with a random sign is random as well.
        allowed = max([limit, *(distance.relative() for distance in noise.values())])
        weights = [Figure(tensor, distance.relative(), allowed) for tensor, distance in found.items()]
        whole = max(limit, total(noise).relative())
        weights.append(Figure("all weights together", total(found).relative(), whole))
        scalars = []
        for what, got, wanted, noisy in (
            ("loss", losses, self.exact.losses, self.noisy.losses),
            ("norm", norms, self.exact.norms, self.noisy.norms),
        ):
            # The job's error is random in the same way, and the noise is one draw of it. If rounding decides which
            # experts or positions are chosen, another draw may move the weights several times as far.
            chance = max(scalar(what, a, b, 0.0).error for a, b in zip(noisy, wanted, strict=True))
            allowed = max(limit, 2 * OWN_ERRORS * chance)
            steps = enumerate(zip(got, wanted, strict=True), 1)
            scalars += [scalar(f"{what} of step {number}", a, b, allowed) for number, (a, b) in steps]
        what = f"{name}: {len(losses)} steps unsharded"
        return [
            Check.of(f"{what}: losses and norms", scalars),
            Check.of(f"{what}: how far weights moved", weights),
        ]


def start_trajectory(proof: Proof, job: ProvenJob) -> Trajectory | str:
    """Take the unsharded steps before the job takes them, or return why they cannot be taken.

    Collectives: every rank calls it; one broadcast, and those of `Reference.run` for each step, twice.
    """
    # Each rank of this machine needs five copies: weights, weights before the first step, gradients and two moments.
    if (why := proof.no_memory_for(5 * int(os.environ.get("LOCAL_WORLD_SIZE", "1")))) is not None:
        return why
    start = {name: local_tensor(parameter).clone() for name, parameter in job.parameters().items()}
    if proof.expectations.trajectories is None:
        proof.expectations.trajectories = _train(proof), _train(proof, noise=proof.exact.limit)
    return Trajectory(start, *proof.expectations.trajectories)


def _train(proof: Proof, noise: float = 0.0) -> unsharded.UnshardedRun:
    """Take the steps of the setup on the unsharded model, with all weights in the memory of every rank.

    Args:
        proof: The proof with the reference.
        noise: The size of random noise on each gradient, relative to the gradient; more where the model is worse
            conditioned.

    Collectives: every rank calls it; those of `Reference.run` and `_move_biases` for each step.
    """
    reference = proof.reference(proof.exact.judge)
    weights, held = reference.weights.in_memory(dict.fromkeys(reference.streamed.names.values()))
    trained = {name: nn.Parameter(held[name]) for name in sorted(reference.trained & held.keys())}
    generator = torch.Generator().manual_seed(0)

    def backward(data: StepData) -> float:
        gradients: dict[str, Tensor] = {}
        expected = reference.run(data, weights=weights, whole=lambda name, value: gradients.update({name: value.cpu()}))
        for name, parameter in trained.items():
            gradient = gradients.get(name)
            if gradient is not None and noise:
                level = max(noise, OWN_ERRORS * proof.own_error.get(without_numbers(name), 0.0))
                size = level * float(gradient.norm()) / gradient.numel() ** 0.5
                gradient = gradient + size * torch.randn(gradient.shape, generator=generator, dtype=gradient.dtype)
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
        _move_biases(reference.job, expected, held)
        return expected.losses.loss

    config = proof.setup.config.optim
    optimizer = plain_optimizer(trained, config, reference.job)
    run = unsharded.train(
        trained, optimizer, proof.setup.steps, backward, max_norm=config.max_grad_norm, keep_gradients=False
    )
    local = reference.local_parts()
    for name, moved in run.moved.items():
        local.take(name, moved)
    return replace(run, moved=local.parts)


def _move_biases(job: ProvenJob, expected: Expected, held: dict[str, Tensor]) -> None:
    """Update the routers' correction biases from the experts that the unsharded model chose, without the optimizer.

    Collectives: every rank calls it; one all-gather of objects for each bias.
    """
    balance = attached_balance(job.model)
    for experts, bias in balance.biases:
        index = expected.forward.choices[experts] if job.answers_for_rows else expected.forward.choices[experts][:0]
        counts = torch.stack(gather(torch.bincount(index.reshape(-1).long(), minlength=balance.num_experts))).sum(0)
        direction = (counts.sum() - balance.num_experts * counts).sign()
        tensor = held[bias]
        tensor += (balance.bias_update_rate * direction).to(tensor.dtype).view(tensor.shape)
