"""The reference of every proof: the unsharded Hugging Face model in one process, row by row, as `verify` has it.

`reference` is computed once in the test process and inherited by the forked ranks; `train_sharded` runs the same steps
on a sharded copy, each data rank on rows of its own, and returns how far everything is from the reference.
"""

import copy
import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import expertmesh as em
from expertmesh.compat import update_as
from expertmesh.distributed.mesh import Mesh
from expertmesh.io.boxes import slices
from expertmesh.state.model_view import ModelView
from expertmesh.state.packed import PackedTensor
from expertmesh.state.shards import full_values, held_boxes, local_tensor, placed_like
from expertmesh.verification.reference import unsharded
from tests.support.models import tiny_model

ROWS, VOCABULARY, MAX_NORM = 8, 96, 0.5
# An epsilon near the gradients' size: with a small one the first updates are signs, in which the rounding of gradients
# that are nearly zero grows until weights differ by more than gradients do, more on one processor than on another.
OPTIM: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01, "eps": 1e-4}
Row = unsharded.Sample


@dataclass(frozen=True, slots=True)
class Reference:
    """What the unsharded model gave: per step loss and norm, the first step's gradients, the final weights."""

    model: nn.Module
    rows: list[list[Row]]
    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


@functools.cache
def reference(
    family: str,
    dtype: torch.dtype = torch.float32,
    prepare: Callable[[nn.Module], None] | None = None,
    confined: Collection[int] = (),
    **changes: Any,
) -> Reference:
    """Train `family` for some clipped AdamW steps on one process.

    `changes` go into the config, `prepare` changes the model. Rows whose number modulo 4 is in `confined` use the lower
    half of the vocabulary.
    """
    initial = tiny_model(family, dtype=dtype, **changes)
    if prepare is not None:
        prepare(initial)
    model = copy.deepcopy(initial)
    rows = [rows_of_step(step, confined) for step in range(steps_in(dtype))]
    run, weights = unsharded_steps(model, dict(model.named_parameters()), rows)
    return Reference(initial, rows, run.losses, run.norms, run.gradients, weights)


def steps_in(dtype: torch.dtype) -> int:
    """Return how many steps are compared: the second has the first's weights and moments, so that it shows what any
    later one does. Double precision, which each axis has once, takes four.
    """
    return 4 if dtype == torch.float64 else 2


def unsharded_steps(
    model: nn.Module, trained: dict[str, nn.Parameter], rows: list[list[Row]]
) -> tuple[unsharded.UnshardedRun, dict[str, torch.Tensor]]:
    """Clipped AdamW steps on one process, and the weights at the end."""
    optimizer = torch.optim.AdamW(trained.values(), **OPTIM)
    run = unsharded.train(trained, optimizer, rows, functools.partial(add_gradients, model), max_norm=MAX_NORM)
    return run, {name: parameter.detach().clone() for name, parameter in trained.items()}


def add_gradients(model: Any, samples: Sequence[Row]) -> float:
    """Add the gradients of one step to the model's, one sample at a time; return the step's mean loss per target."""
    targets = sum(int((labels[1:] != -100).sum()) for _, labels in samples)
    total = 0.0
    for sample in samples:
        loss = unsharded.forward(model, unsharded.PaddedSamples.of([sample]))[1].sum() / targets
        loss.backward()
        total += float(loss.detach())
    return total


def rows_of_step(step: int, confined: Collection[int]) -> list[Row]:
    """Rows of different lengths, with very different numbers of targets; one has a single target."""
    generator = torch.Generator().manual_seed(step)
    rows = []
    for row in range(ROWS):
        highest = VOCABULARY // 2 if row % 4 in confined else VOCABULARY
        ids = torch.randint(highest, (9 + 2 * row,), generator=generator)
        labels = ids.clone()
        labels[: 2 + row] = -100
        if row == 3:
            labels[:-1] = -100
        rows.append((ids, labels))
    return rows


def padded(rows: list[Row]) -> dict[str, torch.Tensor]:
    """Return a right-padded micro-batch."""
    length = max(len(ids) for ids, _ in rows)
    return {
        "input_ids": torch.stack([F.pad(ids, (0, length - len(ids))) for ids, _ in rows]),
        "labels": torch.stack([F.pad(labels, (0, length - len(labels)), value=-100) for _, labels in rows]),
        "attention_mask": torch.stack([F.pad(torch.ones_like(ids), (0, length - len(ids))) for ids, _ in rows]),
    }


@dataclass(frozen=True, slots=True)
class Distance:
    """How far a sharded run was from the reference; relative errors, the worst tensor named."""

    loss: float
    norm: float
    gradient: tuple[float, str]
    weight: tuple[float, str]
    expert_ratio: float
    replicas_equal: bool

    def check(self, tolerance: float) -> None:
        assert self.loss <= tolerance, self
        assert self.norm <= tolerance, self
        assert self.gradient[0] <= tolerance, self
        assert self.weight[0] <= tolerance, self
        assert abs(self.expert_ratio - 1) <= 1e-3, self
        assert self.replicas_equal, self


def train_sharded(
    expected: Reference,
    parallel: em.ParallelConfig,
    micro_batch: int = 1,
    moe: em.MoeConfig | None = None,
    tamper: Callable[[nn.Module, Mesh], None] | None = None,
    device: torch.device | None = None,
    order: dict[str, Any] | None = None,
    **options: Any,
) -> Distance:
    """Run the reference's steps sharded; every rank calls it.

    `tamper` plants a bug after sharding; `order` are the arguments of `forward_backward` for accumulation by layer.
    """
    model = copy.deepcopy(expected.model)
    mesh = em.init_mesh(parallel, device=device)
    em.parallelize(model, mesh, moe=moe, **options)
    if tamper is not None:
        tamper(model, mesh)
    run = take_steps(model, mesh, expected.rows, micro_batch, order)
    weights = of_all_stages(model, mesh, lambda parameter: parameter.detach())
    experts = [name for name in run.gradients if ".experts." in name]
    joint = [
        torch.cat([part[name].flatten() for name in experts]).norm() for part in (run.gradients, expected.gradients)
    ]
    return Distance(
        loss=relative_error(run.losses, expected.losses),
        norm=relative_error(run.norms, expected.norms),
        gradient=worst(run.gradients, expected.gradients),
        weight=worst(weights, expected.weights),
        expert_ratio=float(joint[0] / joint[1]),
        replicas_equal=equal_on_every_rank(weights),
    )


@dataclass(frozen=True, slots=True)
class StepsTaken:
    """What steps on ranks gave; gradients are the first step's, whole, by our names."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]


def take_steps(
    model: Any,
    mesh: Mesh,
    rows: Sequence[Sequence[Row]],
    micro_batch: int = 1,
    order: dict[str, Any] | None = None,
) -> StepsTaken:
    """Clipped AdamW steps on this data rank's share of `rows`; every rank calls it."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **OPTIM, fused=True)
    update_as(optimizer, local_tensor)  # as `train` does
    losses, norms, gradients = [], [], {}
    for step, step_rows in enumerate(rows):
        total = sum(int((labels[1:] != -100).sum()) for _, labels in step_rows)
        mine = range(mesh.data_rank, len(step_rows), mesh.layout.data_ranks)
        batches = []
        for first in range(0, len(mine), micro_batch):
            chosen = mine[first : first + micro_batch]
            batch = padded([step_rows[row] for row in chosen])
            batch["row_numbers"] = torch.tensor([step * len(step_rows) + row for row in chosen])
            batches.append({name: tensor.to(mesh.device) for name, tensor in batch.items()})
        losses.append(float(forward_and_backward(model, mesh, batches, total, order)))
        gradients = gradients or of_all_stages(model, mesh, lambda parameter: parameter.grad)
        norms.append(float(em.clip_grad_norm_(model, MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    return StepsTaken(losses, norms, gradients)


def forward_and_backward(
    model: nn.Module,
    mesh: Mesh,
    batches: Sequence[dict[str, torch.Tensor]],
    total: int,
    order: dict[str, Any] | None = None,
) -> torch.Tensor:
    """Run a step's micro-batches, by the loss alone where nothing asks for more; returns the loss of all ranks."""
    loss = torch.zeros((), dtype=torch.float64, device=mesh.device)
    # By the loss alone, replicas would reduce in each backward.
    if mesh.layout.pp > 1 or mesh.layout.replicate > 1 or order is not None:
        loss = em.forward_backward(model, batches, target_tokens=total, chunk_tokens=16, **(order or {})).loss
    else:
        for batch in batches:
            share = em.causal_lm_loss(model, batch, target_tokens=total, chunk_tokens=16)
            share.backward()
            loss += share.detach()
    dist.all_reduce(loss)
    return loss


def relative_error(got: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(a / b - 1) for a, b in zip(got, expected, strict=True))


def of_all_stages(model: nn.Module, mesh: Mesh, value: Callable[[nn.Parameter], Any]) -> dict[str, torch.Tensor]:
    """`value` of each parameter that trains, whole, by name; with pipeline stages, those of all of them. Collective."""
    trained = {name: parameter for name, parameter in ModelView(model).parameters.items() if parameter.requires_grad}
    own = whole({name: placed_like(value(parameter), parameter) for name, parameter in trained.items()})
    if mesh.layout.pp == 1:
        return own
    return joined_stages(own, mesh)


def whole(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Copies of whole tensors, on the CPU: as `full` of each, in one exchange. Collective over all ranks.

    Each is joined of the shards of this rank's own replica, so that replicas that differ are seen.
    """
    boxes = {name: held_boxes(tensor) for name, tensor in tensors.items() if _is_plain(tensor)}
    parts = _gathered(boxes, {name: local_tensor(tensors[name]) for name in boxes})
    joined = {}
    for name, tensor in tensors.items():
        if name not in boxes:
            joined[name] = full(tensor)
            continue
        all_of_it = joined[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        coordinate = tensor.device_mesh.get_coordinate()
        of_replica = (
            at if kind.is_replicate() else slice(None) for at, kind in zip(coordinate, tensor.placements, strict=True)
        )
        ranks = tensor.device_mesh.mesh[tuple(of_replica)].flatten().tolist()
        assert sum(parts[rank][1][name].numel() for rank in ranks) == all_of_it.numel()
        for rank in ranks:
            of_rank, local = parts[rank]
            start = 0
            for box in of_rank[name]:
                rows = box[0][1] - box[0][0]
                all_of_it[slices(box)] = local[name][start : start + rows]
                start += rows
    return joined


def _is_plain(tensor: Any) -> bool:
    return isinstance(tensor, DTensor) and not isinstance(tensor.to_local(), PackedTensor)


def _gathered(
    about: Any, tensors: dict[str, torch.Tensor], group: Any = None
) -> list[tuple[Any, dict[str, torch.Tensor]]]:
    """`about` and `tensors` of each rank of `group`. As one array of bytes: pickle takes 0.1 ms for every tensor."""
    flat = {name: tensor.detach().cpu().contiguous().flatten().view(torch.uint8) for name, tensor in tensors.items()}
    kinds = {name: (tensor.dtype, tensor.shape, len(flat[name])) for name, tensor in tensors.items()}
    joined = torch.cat(list(flat.values())) if flat else torch.empty(0, dtype=torch.uint8)
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, (about, kinds, joined.numpy()), group=group)
    found = []
    for of_rank, its_kinds, array in gathered:
        parts = torch.from_numpy(array).split([length for *_, length in its_kinds.values()])
        views = zip(its_kinds.items(), parts, strict=True)
        found.append(
            (of_rank, {name: part.clone().view(dtype).view(shape) for (name, (dtype, shape, _)), part in views})
        )
    return found


def joined_stages(own: dict[str, torch.Tensor], mesh: Mesh) -> dict[str, torch.Tensor]:
    """Return what each stage has, of all of them; what several have must be equal. Collective along pp."""
    joined: dict[str, torch.Tensor] = {}
    for _, stage in _gathered(None, own, mesh.pp_group):
        for name, tensor in stage.items():
            assert name not in joined or torch.equal(joined[name], tensor), f"{name} differs between stages"
            joined[name] = tensor
    return joined


def full(tensor: Any) -> torch.Tensor:
    """Return a copy of the whole tensor, on the CPU. Collective for a DTensor."""
    whole: torch.Tensor = full_values(tensor) if isinstance(tensor, DTensor) else tensor
    return whole.detach().cpu().clone()


def worst(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Return the largest relative error of any tensor, and its name."""
    assert got.keys() == expected.keys(), (sorted(got)[:4], sorted(expected)[:4])
    errors = [(float((got[n] - expected[n]).norm() / expected[n].norm().clamp_min(1e-12)), n) for n in got]
    assert all(math.isfinite(error) for error, _ in errors), errors  # max would pass over a NaN
    return max(errors)


def equal_on_every_rank(weights: dict[str, torch.Tensor]) -> bool:
    sums = torch.stack([weight.double().sum() for weight in weights.values()])
    low, high = sums.clone(), sums.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    return bool((low == high).all())
