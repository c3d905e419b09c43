"""A few steps of the unsharded model, in memory: losses, norms, and how far its weights move.

AdamW divides by the size of each element's gradient, so that where a gradient is rounding alone its sign is chance and
the step as large as any. The limit for weights is therefore how far the unsharded model moves otherwise when noise of
the size that layer 3 allows is added to its gradients.
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
from expertmesh.verification.job import Job
from expertmesh.verification.proof import Proof
from expertmesh.verification.reference import unsharded
from expertmesh.verification.reference.model import Expected
from expertmesh.verification.reference.optimizer import plain_optimizer
from expertmesh.verification.result import Check, Figure
from expertmesh.verification.samples import StepData


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The unsharded model, trained in memory: as it is, and with noise on its gradients, each with this rank's parts of
    how far the weights went. `start`: the job's weights.
    """

    start: dict[str, Tensor]
    exact: unsharded.UnshardedRun
    noisy: unsharded.UnshardedRun

    def checks(self, job: Job, name: str, losses: list[float], norms: list[float]) -> list[Check]:
        """Of the job, which has taken the same steps."""
        limit = TOLERANCE[torch.promote_types(next(iter(self.start.values())).dtype, torch.float32)]
        moved, counted = {n: local_tensor(p) - self.start[n] for n, p in job.parameters().items()}, job.counted()
        found = distances(moved, self.exact.moved, counted)
        noise = distances(self.noisy.moved, self.exact.moved, counted)
        # Of any tensor: which of them have an element whose sign is chance is chance, too.
        allowed = max([limit, *(distance.relative() for distance in noise.values())])
        weights = [Figure(tensor, distance.relative(), allowed) for tensor, distance in found.items()]
        whole = max(limit, total(noise).relative())
        weights.append(Figure("all weights together", total(found).relative(), whole))
        scalars = []
        for what, got, wanted, noisy in (
            ("loss", losses, self.exact.losses, self.noisy.losses),
            ("norm", norms, self.exact.norms, self.noisy.norms),
        ):
            # The job is off by chance of the same kind, of which the noise is one draw: where a rounding decides which
            # experts or positions are chosen, another draw may move several times as much.
            chance = max(scalar(what, a, b, 0.0).error for a, b in zip(noisy, wanted, strict=True))
            allowed = max(limit, 2 * OWN_ERRORS * chance)
            steps = enumerate(zip(got, wanted, strict=True), 1)
            scalars += [scalar(f"{what} of step {number}", a, b, allowed) for number, (a, b) in steps]
        what = f"{name}: {len(losses)} steps unsharded"
        return [
            Check.of(f"{what}: losses and norms", scalars),
            Check.of(f"{what}: how far weights moved", weights),
        ]


def start_trajectory(proof: Proof, job: Job) -> Trajectory | str:
    """The unsharded steps, or why they cannot be taken. Before the job takes them; every rank calls it."""
    # Of the ranks of this machine: weights, where they started, gradients, and two moments.
    if (why := proof.no_memory_for(5 * int(os.environ.get("LOCAL_WORLD_SIZE", "1")))) is not None:
        return why
    start = {name: local_tensor(parameter).clone() for name, parameter in job.parameters().items()}
    if proof.expectations.trajectories is None:
        proof.expectations.trajectories = _train(proof), _train(proof, noise=proof.exact.limit)
    return Trajectory(start, *proof.expectations.trajectories)


def _train(proof: Proof, noise: float = 0.0) -> unsharded.UnshardedRun:
    """The steps of the setup on the unsharded model, every rank with all weights.

    `noise`: how much of each gradient's size is added to it at random; more where the model is worse conditioned.
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


def _move_biases(job: Job, expected: Expected, held: dict[str, Tensor]) -> None:
    """The balancing update of correction biases, by the unsharded model's own choices; the optimizer has no part in it.
    One gathering for each bias.
    """
    balance = attached_balance(job.model)
    for experts, bias in balance.biases:
        index = expected.forward.choices[experts] if job.answers_for_rows else expected.forward.choices[experts][:0]
        counts = torch.stack(gather(torch.bincount(index.reshape(-1).long(), minlength=balance.num_experts))).sum(0)
        direction = (counts.sum() - balance.num_experts * counts).sign()
        tensor = held[bias]
        tensor += (balance.bias_update_rate * direction).to(tensor.dtype).view(tensor.shape)
