"""Layer 4: optimizer steps are those of plain torch, a few steps end where the unsharded model ends, replicas agree.

First each rank repeats its optimizer's arithmetic in fp64, from its own weights and clipped gradients, on a sample of
elements of each shard: weights and moments must be the rounding of that. Then, where the whole unsharded model fits in
the machine, it takes the same steps: losses, norms and weights are compared. AdamW divides by the size of each
element's gradient, so that where a gradient is rounding alone its sign is chance and the step as large as any. The
limit for weights is therefore how far the unsharded model moves otherwise when noise of the size that layer 3 allows is
added to its gradients.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from expertmesh.config import OptimConfig
from expertmesh.distributed.all_ranks import from_rank_0
from expertmesh.experts.balance import attached_balance
from expertmesh.state.shards import local_tensor
from expertmesh.verification import subject as job
from expertmesh.verification.compare import OWN_ERRORS, TOLERANCE, distances, gathered, joint, kind, scalar
from expertmesh.verification.layers.bytes import replicas
from expertmesh.verification.proof import Proof, label
from expertmesh.verification.reference.model import Expected, Parts, Reference
from expertmesh.verification.reference.streaming import Weights
from expertmesh.verification.reference.weights import Adapted, MemoryWeights, in_memory
from expertmesh.verification.result import Check, Figure
from expertmesh.verification.subject import Subject, owned

_SAMPLED = 1 << 18
# Of the memory that is free, what a trajectory of the unsharded model may use.
_SHARE_OF_MEMORY = 0.5


def check_update(proof: Proof) -> list[Check]:
    """Every rank calls it. Steps the jobs of `proof`, which are of no use to earlier layers afterwards."""
    checks = []
    for precision in proof.precisions:
        subject = proof.subject(precision)
        first = precision == proof.precisions[0]
        trajectory = _Trajectory.of(proof, subject) if first else None
        checks += _steps(proof, subject, label(precision), trajectory)
        state = {
            f"{slot} of {name}": value
            for name, parameter in subject.parameters().items()
            for slot, value in subject.optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.dim()
        }
        checks.append(replicas(subject, f"{label(precision)}: replicas equal, with their moments", state))
    return checks


def _steps(proof: Proof, subject: Subject, name: str, trajectory: "_Trajectory | str | None") -> list[Check]:
    """All steps of the setup: checks of the arithmetic, and of the trajectory if there is one."""
    config = subject.setup.config.optim
    plain, losses, norms = _Plain(subject), [], []
    for data in subject.setup.steps:
        outcome = job.backward(subject, subject.batches(data))
        if proof.tamper_gradients is not None:
            proof.tamper_gradients(subject)
        losses.append(outcome.loss)
        norms.append(proof.clip(subject, config.max_grad_norm))
        plain.step(subject)
        job.update(subject)
        if proof.tamper_optimizer is not None:
            proof.tamper_optimizer(subject)
    steps = len(losses)
    weights = gathered_worst(plain.weights(subject))
    lost = "storing the weights rounds more than they move" if any(figure.limit >= 1 for figure in weights) else ""
    checks = [
        Check.of(f"{name}: {steps} steps of {config.name} in fp64: weights", weights, lost),
        Check.of(f"{name}: {steps} steps of {config.name} in fp64: moments", gathered_worst(plain.moments(subject))),
    ]
    if isinstance(trajectory, str):
        checks.append(Check.not_run(f"{name}: trajectory of the unsharded model", trajectory))
    elif trajectory is not None:
        checks += trajectory.checks(subject, name, losses, norms)
    return checks


def gathered_worst(mine: list[Figure]) -> list[Figure]:
    """The figures of all ranks: each rank's worst for every tensor kind would be too many, so its worst alone."""
    worst = max(mine, key=lambda figure: figure.share, default=None)
    return [figure for figure in gathered(worst) if figure is not None]


class _Plain:
    """torch's own optimizer, one tensor at a time, in fp64, on a sample of the elements that this rank holds."""

    def __init__(self, subject: Subject) -> None:
        self.start: dict[str, Tensor] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        for name, parameter in subject.parameters().items():
            held = _sample(local_tensor(parameter))
            self.start[name] = held.double().cpu().clone()
            self.parameters[name] = nn.Parameter(self.start[name].clone())
        self.optimizer = plain_optimizer(list(self.parameters.values()), subject.setup.config.optim)
        self.steps = 0

    def step(self, subject: Subject) -> None:
        """With the gradients that the job is about to use."""
        for name, parameter in subject.parameters().items():
            grad = parameter.grad
            own = self.parameters[name]
            own.grad = None if grad is None else _sample(local_tensor(grad)).double().cpu()
        self.optimizer.step()
        self.steps += 1

    @torch.no_grad()
    def weights(self, subject: Subject) -> list[Figure]:
        """The error of all steps together, relative to how far the weights have moved; storing them costs one rounding
        of each element at each step, and computing the step in fp32 a little of itself.
        """
        found = []
        for name, parameter in subject.parameters().items():
            wanted, held = self.parameters[name].detach(), _sample(local_tensor(parameter))
            moved = float((wanted - self.start[name]).norm())
            error = float((held.double().cpu() - wanted).norm())
            grain = torch.finfo(held.dtype).eps * float(wanted.norm()) * self.steps
            if moved:
                found.append(Figure(name, error / moved, TOLERANCE[_wide(held.dtype)] + grain / moved))
            else:
                found.append(Figure(name, error, 0.0))
        return found

    def moments(self, subject: Subject) -> list[Figure]:
        found = []
        for name, parameter in subject.parameters().items():
            wanted = self.optimizer.state.get(self.parameters[name], {})
            held = subject.optimizer.state.get(parameter, {})
            for slot in sorted(wanted.keys() | held.keys()):
                one, other = held.get(slot), wanted.get(slot)
                if one is None or other is None:
                    found.append(Figure(f"{slot} of {name}", float("inf"), 0.0))
                elif isinstance(one, Tensor) and one.dim():
                    value, size = _sample(local_tensor(one)), float(other.norm())
                    error = float((value.double().cpu() - other).norm())
                    grain = self.steps * torch.finfo(value.dtype).eps
                    limit = max(TOLERANCE[_wide(value.dtype)], grain)
                    found.append(Figure(f"{slot} of {name}", error / size if size else error, limit if size else 0.0))
                else:
                    found.append(Figure(f"{slot} of {name}", abs(float(one) - float(other)), 0.0))
        return found


def plain_optimizer(parameters: list[nn.Parameter], config: OptimConfig) -> torch.optim.Optimizer:
    """What the configuration asks for, by torch alone, one tensor after the other."""
    if config.name == "sgd":
        return torch.optim.SGD(
            parameters, lr=config.learning_rate, weight_decay=config.weight_decay, foreach=False, fused=False
        )
    return torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        foreach=False,
        fused=False,
    )


def _sample(local: Tensor) -> Tensor:
    """Up to `_SAMPLED` elements, evenly spread, as a flat copy."""
    flat = local.reshape(-1)
    return flat[:: max(1, -(-flat.numel() // _SAMPLED))].clone()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@dataclass(slots=True)
class _Run:
    """The unsharded model's steps in one dtype. `moved` are this rank's parts of how far the weights went."""

    losses: list[float]
    norms: list[float]
    moved: dict[str, Tensor]


@dataclass(slots=True)
class _Trajectory:
    """The unsharded model, trained in memory: as it is, and with noise on its gradients."""

    start: dict[str, Tensor]
    run: _Run
    noisy: _Run

    @classmethod
    def of(cls, proof: Proof, subject: Subject) -> "_Trajectory | str":
        """The steps, or why they cannot be taken. Before the job takes them."""
        dtype = proof.judge(subject.precision)
        if (refusal := _refusal(proof, dtype)) is not None:
            return refusal
        start = {name: local_tensor(p).clone() for name, p in subject.parameters().items()}
        known = proof.expectations.trajectories
        if dtype not in known:
            known[dtype] = (_train(proof, dtype), _train(proof, dtype, noise=proof.tolerance(subject.precision)))
        return cls(start, *known[dtype])

    def checks(self, subject: Subject, name: str, losses: list[float], norms: list[float]) -> list[Check]:
        counts = owned(subject).__getitem__
        limit = TOLERANCE[torch.promote_types(next(iter(self.start.values())).dtype, torch.float32)]
        moved = {n: local_tensor(p) - self.start[n] for n, p in subject.parameters().items()}
        found = distances(moved, self.run.moved, counts)
        noise = distances(self.noisy.moved, self.run.moved, counts)
        # Of any tensor: which of them have an element whose sign is chance is chance, too.
        allowed = max([limit, *(distance.relative() for distance in noise.values())])
        weights = [Figure(n, each.relative(), allowed) for n, each in found.items()]
        weights.append(Figure("all weights together", joint(found).relative(), max(limit, joint(noise).relative())))
        scalars = []
        for what, got, wanted, off in (
            ("loss", losses, self.run.losses, self.noisy.losses),
            ("norm", norms, self.run.norms, self.noisy.norms),
        ):
            apart = max(scalar(what, a, b, 0.0).error for a, b in zip(off, wanted, strict=True))
            scalars += [
                scalar(f"{what} of step {n}", a, b, max(limit, apart))
                for n, (a, b) in enumerate(zip(got, wanted, strict=True), 1)
            ]
        steps = len(losses)
        return [
            Check.of(f"{name}: {steps} steps unsharded: losses and norms", scalars),
            Check.of(f"{name}: {steps} steps unsharded: how far weights moved", weights),
        ]


def _train(proof: Proof, dtype: torch.dtype, noise: float = 0.0) -> _Run:
    """The steps of the setup on the unsharded model in `dtype`, every rank with all weights.

    `noise`: how much of each gradient's size is added to it at random; more where the model is worse conditioned.
    """
    reference = proof.reference(dtype)
    memory, weights = _loaded(reference)
    config = proof.setup.config.optim
    trained = {name: nn.Parameter(memory.tensors[name]) for name in sorted(reference.trained & memory.tensors.keys())}
    memory.tensors.update({name: parameter.data for name, parameter in trained.items()})
    before = {name: value.clone() for name, value in memory.tensors.items() if name in trained}
    optimizer = plain_optimizer(list(trained.values()), config)
    generator = torch.Generator().manual_seed(0)
    losses, norms = [], []
    for data in proof.setup.steps:
        whole: dict[str, Tensor] = {}
        expected = reference.run(data, weights=weights, whole=lambda name, total: whole.update({name: total.cpu()}))  # noqa: B023
        losses.append(expected.loss)
        norms.append(expected.norm)
        factor = 1.0 if config.max_grad_norm is None else min(1.0, config.max_grad_norm / (expected.norm + 1e-6))
        for name, parameter in trained.items():
            gradient = whole.get(name)
            if gradient is not None and noise:
                level = max(noise, OWN_ERRORS * proof.noise.get(kind(name), 0.0))
                size = level * float(gradient.norm()) / gradient.numel() ** 0.5
                gradient = gradient + size * torch.randn(gradient.shape, generator=generator, dtype=gradient.dtype)
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype) * factor
        optimizer.step()
        _move_biases(proof, expected, memory)
    moved = {name: parameter.data - before[name] for name, parameter in trained.items()}
    return _Run(losses, norms, _parts(reference, moved))


def _loaded(reference: Reference) -> tuple[MemoryWeights, Weights]:
    device, weights = reference.subject.mesh.device, reference.weights
    memory = in_memory(dict.fromkeys(reference.streamed.names.values()), weights, device)
    if not isinstance(weights, Adapted):
        return memory, memory
    adapted = Adapted(memory, weights.plan, weights.anatomy, weights.dtype, device, held=memory.tensors)
    return memory, adapted


def _parts(reference: Reference, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """What this rank of the job holds of whole tensors, in the job's names."""
    kept = Parts(reference)
    for name, value in whole.items():
        kept.take(name, value)
    return kept.parts


def _move_biases(proof: Proof, expected: Expected, memory: MemoryWeights) -> None:
    """The balancing update of correction biases, by the unsharded model's own choices."""
    subject = proof.subject(proof.precisions[0])
    balance = attached_balance(subject.model)
    for experts, bias in balance.biases:
        index = expected.seen.choices[experts] if subject.speaks else expected.seen.choices[experts][:0]
        counts = torch.bincount(index.reshape(-1).long(), minlength=balance.num_experts)
        total = torch.stack(gathered(counts)).sum(0)
        direction = (total.sum() - balance.num_experts * total).sign()
        tensor = memory.tensors[bias]
        tensor += (balance.bias_update_rate * direction).to(tensor.dtype).view(tensor.shape)


def _refusal(proof: Proof, dtype: torch.dtype) -> str | None:
    """Why the whole unsharded model cannot be trained here; the same on every rank."""
    elements = sum(p.numel() for p in proof.setup.meta_model(dtype).parameters())
    # Weights, where they started, gradients, and two moments.
    needed = elements * dtype.itemsize * 5 * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free = int(from_rank_0(str(free_memory())))
    if needed <= _SHARE_OF_MEMORY * free:
        return None
    return f"the unsharded model takes {needed / 2**30:.0f} GiB, and {free / 2**30:.0f} GiB are free"


def free_memory() -> int:
    """Bytes of host memory that could be had."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
