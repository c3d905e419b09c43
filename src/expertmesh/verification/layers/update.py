"""Layer 4: compare optimizer steps with plain torch, the result of a few steps with the unsharded model, and replicas.

Each rank repeats the arithmetic of its optimizer in fp64, from its weights and clipped gradients, on a sample of the
elements of each shard; weights and moments must be equal to that up to rounding. An optimizer that combines many
elements cannot be repeated on a sample. If the full unsharded model fits into the machine, it takes the same steps
(trajectory.py).
"""

import torch
from torch import Tensor, nn

from expertmesh.state.shards import local_tensor
from expertmesh.verification.compare import TOLERANCE, gather
from expertmesh.verification.job import ProvenJob
from expertmesh.verification.layers.bytes import replicas
from expertmesh.verification.layers.trajectory import Trajectory, start_trajectory
from expertmesh.verification.proof import Proof
from expertmesh.verification.reference.optimizer import plain_optimizer
from expertmesh.verification.result import Check, Figure

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


def _steps(proof: Proof, job: ProvenJob, name: str, trajectory: Trajectory | str | None) -> list[Check]:
    """Take all steps of the setup; return the checks of the arithmetic, and of the trajectory if there is one.

    Args:
        proof: The proof with its hooks and steps.
        job: The job to step.
        name: The name of its precision.
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
    return [figure for figure in gather(worst) if figure is not None]


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
                    error, limit = self._moment(held[slot], wanted[slot])
                found.append(Figure(f"{slot} of {name}", error, limit))
        return found

    def _moment(self, held: Tensor | float, wanted: Tensor) -> tuple[float, float]:
        """Return error and limit of one state tensor, or of the count of steps."""
        if not isinstance(held, Tensor) or not held.dim():
            return abs(float(held) - float(wanted)), 0.0
        size, error = float(wanted.norm()), float((_sample(held) - wanted).norm())
        tolerance, epsilon = _precision(held.dtype)
        return (error / size, max(tolerance, self.steps * epsilon)) if size else (error, 0.0)


def _sample(tensor: Tensor) -> Tensor:
    """Return up to `_SAMPLED` evenly spaced elements of this rank's part, as a flat copy in fp64 on the host."""
    flat = local_tensor(tensor.detach()).reshape(-1)
    return flat[:: max(1, -(-flat.numel() // _SAMPLED))].to("cpu", torch.float64, copy=True)


def _precision(dtype: torch.dtype) -> tuple[float, float]:
    """Return the tolerance for arithmetic in fp32 or wider, and the relative error of one rounding to `dtype`."""
    return TOLERANCE[torch.promote_types(dtype, torch.float32)], torch.finfo(dtype).eps
