"""Layer 4: compare optimizer steps with plain torch, the result of a few steps with the unsharded model, and replicas.

Each rank repeats the arithmetic of its optimizer in fp64, from its weights and clipped gradients, on a sample of the
elements of each shard; weights and moments must be equal to that up to rounding. An optimizer that combines many
elements cannot be repeated on a sample.

If the full unsharded model fits into the machine, it takes the same steps: losses, norms and the movement of the
weights are compared. AdamW divides by the size of each element's gradient. If a gradient is only rounding, its sign is
random and the step is as large as any other. So the limit for weights is measured: how much the movement of the
unsharded model changes when noise of the size that layer 3 allows is added to its gradients.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.config import OptimConfig
from expertmesh.distributed.all_ranks import gather_objects
from expertmesh.experts.balance import attached_balance
from expertmesh.state.model_view import ModelView
from expertmesh.state.shards import local_tensor
from expertmesh.training.optimizers.adamw import AdamW8bit
from expertmesh.training.optimizers.muon import Muon, matrices_of
from expertmesh.verification.compare import OWN_ERRORS, TOLERANCE, distances, scalar, total, without_numbers
from expertmesh.verification.job import ProvenJob
from expertmesh.verification.layers.step import replicas
from expertmesh.verification.proof import Proof
from expertmesh.verification.reference import unsharded
from expertmesh.verification.reference.model import Expected
from expertmesh.verification.result import Check, Figure
from expertmesh.verification.setup import StepData

_SAMPLED = 1 << 18
NOT_BY_ELEMENT = {
    "adamw_8bit": "moments are in blocks, of which a sample of elements has none whole",
    "muon": "matrices are orthogonalised, of which a sample of elements has none whole",
}


def check_update(proof: Proof) -> list[Check]:
    """Take the steps of the setup with each job of `proof`, check them, and free the jobs.

    Collectives: every rank calls it; those of the steps of the job and of the unsharded model, and a few all-gathers of
    objects.
    """
    checks = []
    for run in proof.runs:
        job, name = run.job, run.name
        trajectory = start_trajectory(proof, job) if run is proof.exact else None
        checks += _steps(proof, job, name, trajectory)
        moments = {key: value for key, value in job.optimizer_tensors().items() if value.dim()}
        checks.append(replicas(job, f"{name}: replicas equal, with their moments", moments))
    proof.free_jobs()
    return checks


def _steps(proof: Proof, job: ProvenJob, name: str, trajectory: "Trajectory | str | None") -> list[Check]:
    """Take all steps of the setup; return the checks of the arithmetic, and of the trajectory if there is one.

    Args:
        trajectory: The unsharded steps, the reason why there are none, or None if they are not compared.

    Collectives: every rank calls it; those of the steps, and a few all-gathers of objects.
    """
    config = proof.setup.config.optim
    repeated = None if config.name in NOT_BY_ELEMENT else _RepeatedOptimizer(job)
    losses, norms = [], []
    for data in proof.setup.steps:
        losses.append(job.backward(job.batches(data)).loss)
        proof.hooks.backward(job)
        norms.append(proof.hooks.clip(job, config.max_grad_norm))
        if repeated is not None:
            repeated.step(job)
        job.update()
        proof.hooks.updated(job)
    what = f"{name}: {len(losses)} steps of {config.name} in fp64"
    if repeated is None:
        checks = [Check.not_run(what, NOT_BY_ELEMENT[config.name])]
    else:
        weights = _worst_of_each_rank(repeated.weights(job))
        lost = "storing the weights rounds more than they move" if any(figure.limit >= 1 for figure in weights) else ""
        checks = [
            Check.of(f"{what}: weights", weights, lost),
            Check.of(f"{what}: moments", _worst_of_each_rank(repeated.moments(job))),
        ]
    if isinstance(trajectory, str):
        checks.append(Check.not_run(f"{name}: trajectory of the unsharded model", trajectory))
    elif trajectory is not None:
        checks += trajectory.checks(job, name, losses, norms)
    return checks


def _worst_of_each_rank(mine: list[Figure]) -> list[Figure]:
    """Return the worst figure of each rank; all figures of all ranks would be too many.

    Collectives: every rank calls it; one all-gather of objects.
    """
    worst = max(mine, key=lambda figure: figure.share, default=None)
    return [figure for figure in gather_objects(worst) if figure is not None]


class _RepeatedOptimizer:
    """torch's optimizer in fp64, one tensor at a time, on a sample of the elements that this rank holds."""

    def __init__(self, job: ProvenJob) -> None:
        self.start = {name: _sample(parameter) for name, parameter in job.parameters().items()}
        self.parameters = {name: nn.Parameter(value.clone()) for name, value in self.start.items()}
        self.optimizer = plain_optimizer(self.parameters, job.setup.config.optim, job)
        self.steps = 0

    def step(self, job: ProvenJob) -> None:
        """Take a step with the gradients that the job is about to use."""
        for name, parameter in job.parameters().items():
            self.parameters[name].grad = None if parameter.grad is None else _sample(parameter.grad)
        self.optimizer.step()
        self.steps += 1

    @torch.no_grad()
    def weights(self, job: ProvenJob) -> list[Figure]:
        """Return the error of the weights after all steps, relative to their movement.

        The limit allows one rounding of each stored element per step, and the tolerance for arithmetic in fp32.
        """
        found = []
        for name, parameter in job.parameters().items():
            wanted = self.parameters[name]
            moved = float((wanted - self.start[name]).norm())
            error = float((_sample(parameter) - wanted).norm())
            tolerance, epsilon = _precision(parameter.dtype)
            rounding = epsilon * float(wanted.norm()) * self.steps
            found.append(Figure(name, error / moved, tolerance + rounding / moved) if moved else Figure(name, error, 0))
        return found

    def moments(self, job: ProvenJob) -> list[Figure]:
        """Return the relative error of each state tensor; infinite if only one of both optimizers has it."""
        found = []
        for name, parameter in job.parameters().items():
            wanted = self.optimizer.state.get(self.parameters[name], {})
            held = job.optimizer.state.get(parameter, {})
            for slot in sorted(wanted.keys() | held.keys()):
                error, limit = float("inf"), 0.0
                if slot in wanted and slot in held:
                    ours, size = held[slot], float(wanted[slot].norm())
                    if not isinstance(ours, Tensor) or not ours.dim():  # the count of steps
                        error = abs(float(ours) - float(wanted[slot]))
                    else:
                        tolerance, epsilon = _precision(ours.dtype)
                        error = float((_sample(ours) - wanted[slot]).norm()) / (size or 1.0)
                        limit = max(tolerance, self.steps * epsilon) if size else 0.0
                found.append(Figure(f"{slot} of {name}", error, limit))
        return found


def _sample(tensor: Tensor) -> Tensor:
    """Return up to `_SAMPLED` evenly spaced elements of this rank's part, as a flat copy in fp64 on the host."""
    local = local_tensor(tensor.detach())
    step = max(1, -(-local.numel() // _SAMPLED))
    while local.dim() and gcd(step, local.shape[-1]) > 1:  # else it would see few columns
        step += 1
    return local.reshape(-1)[::step].to("cpu", torch.float64, copy=True)


def _precision(dtype: torch.dtype) -> tuple[float, float]:
    """Return the tolerance for arithmetic in fp32 or wider, and the relative error of one rounding to `dtype`."""
    return TOLERANCE[torch.promote_types(dtype, torch.float32)], torch.finfo(dtype).eps


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
        return [Check.of(f"{what}: losses and norms", scalars), Check.of(f"{what}: how far weights moved", weights)]


def start_trajectory(proof: Proof, job: ProvenJob) -> Trajectory | str:
    """Take the unsharded steps before the job takes them, or return why they cannot be taken.

    Collectives: every rank calls it; one broadcast, and those of `Reference.run` for each step, twice.
    """
    # Each rank of this machine needs five copies: weights, weights before the first step, gradients and two moments.
    if (why := proof.no_memory_for(5 * int(os.environ.get("LOCAL_WORLD_SIZE", "1")))) is not None:
        return why
    start = {name: local_tensor(parameter).clone() for name, parameter in job.parameters().items()}
    noises = 0.0, proof.exact.limit
    for noise in noises:
        if noise not in proof.trajectories:
            proof.trajectories[noise] = _train(proof, noise)
    return Trajectory(start, *(proof.trajectories[noise] for noise in noises))


def _train(proof: Proof, noise: float) -> unsharded.UnshardedRun:
    """Take the steps of the setup on the unsharded model, with all weights in the memory of every rank.

    Args:
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
        mine = torch.bincount(index.reshape(-1).long(), minlength=balance.num_experts)
        counts = torch.stack(gather_objects(mine)).sum(0)
        direction = (counts.sum() - balance.num_experts * counts).sign()
        tensor = held[bias]
        tensor += (balance.bias_update_rate * direction).to(tensor.dtype).view(tensor.shape)


def plain_optimizer(
    parameters: Mapping[str, nn.Parameter], config: OptimConfig, job: ProvenJob
) -> torch.optim.Optimizer:
    """Return the configured optimizer on plain tensors, which have the names of the job's parameters."""
    learning_rate, decay = config.learning_rate, config.weight_decay
    if config.name == "sgd":
        return torch.optim.SGD(parameters.values(), lr=learning_rate, weight_decay=decay, foreach=False, fused=False)
    adamw: dict[str, Any] = {"lr": learning_rate, "betas": config.betas, "eps": config.eps, "weight_decay": decay}
    if config.name == "adamw":
        return torch.optim.AdamW(parameters.values(), **adamw, foreach=False, fused=False)
    adamw |= {"stochastic_rounding": False, "seed": 0}
    if config.name == "adamw_8bit":
        return AdamW8bit(parameters.items(), **adamw)
    matrices = matrices_of(ModelView(job.model).full, job.setup.anatomy)
    compute = next(iter(parameters.values())).dtype
    return Muon(parameters.items(), matrices, momentum=config.momentum, compute=compute, group=None, **adamw)
