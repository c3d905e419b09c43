"""Update matrices by Muon (Jordan et al. 2024): orthogonalised momentum, as torch.optim.Muon has it for full matrices.

Steps are scaled to the size of AdamW's (arXiv 2502.16982), so that one learning rate and one weight decay serve
matrices and all other parameters, which AdamW updates.

A stack of experts is one matrix for each expert. A rank that holds full matrices (experts that ep and efsdp shard by
expert) orthogonalises them alone. Of a matrix in parts, one rank gets all parts, orthogonalises it and sends the parts
back: as many matrices at a time as there are ranks, each on another rank. So each rank computes its share, and the
group issues two all-to-alls of about the size of its own shards.

Shapes: N matrices of A rows and B columns.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from expertmesh.anatomy import Anatomy, head_of, is_inside
from expertmesh.distributed.collectives import all_to_all
from expertmesh.io.boxes import Box, extents, full_box, intersect, slices, volume
from expertmesh.state.model_view import is_adapter
from expertmesh.state.shards import box_at
from expertmesh.training.optimizers.adamw import FACTORS, AdamW, Plain, ShardRows

# Keller Jordan's: they bring singular values to between 0.7 and 1.2 in five steps, not to 1.
_COEFFICIENTS, _STEPS, _LEAST_NORM = (3.4445, -4.7750, 2.0315), 5, 1e-7
_ELEMENTS_AT_ONCE = 1 << 25
MOMENTUM = "momentum_buffer"
_SIZE_OF_ADAMW = 0.2


@dataclass(frozen=True)
class Matrices:
    """A parameter as a stack of matrices."""

    parameter: nn.Parameter
    count: int
    """Number of matrices."""
    group: dist.ProcessGroup | None
    """The ranks that hold parts of them; None if no other rank does."""

    @cached_property
    def shape(self) -> tuple[int, int]:
        """The shape of one matrix."""
        *_, columns = self.parameter.shape
        return self.parameter.numel() // self.count // columns, columns

    @cached_property
    def boxes(self) -> list[Box]:
        """Return the box of the parameter that each rank of the group holds."""
        if self.group is None:
            return [full_box(self.parameter.shape)]
        assert isinstance(self.parameter, DTensor)
        mesh = self.parameter.device_mesh
        places = dict(zip(mesh.mesh.flatten().tolist(), product(*map(range, mesh.shape)), strict=True))
        return [box_at(self.parameter, places[rank]) for rank in dist.get_process_group_ranks(self.group)]

    @cached_property
    def wholes(self) -> list[Box]:
        """Return the boxes of the matrices of which ranks of the group hold a part."""
        size = self.parameter.shape[0] // self.count
        first = [full_box(self.parameter.shape)] if self.count == 1 else []
        stacked = [
            ((number * size, (number + 1) * size), *full_box(self.parameter.shape[1:])) for number in range(self.count)
        ]
        return [box for box in first or stacked if any(intersect(box, held) is not None for held in self.boxes)]

    @cached_property
    def are_local(self) -> bool:
        """Return whether every matrix is complete on one rank."""
        return all(any(intersect(box, held) == box for held in self.boxes) for box in self.wholes)


class Muon(AdamW):
    """Muon for the parameters in `matrices`, which has the number of matrices of each.

    `group`: the ranks that together hold all parameters, None without sharding; every one of them calls `step`.
    Products are computed in `compute`.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        matrices: Mapping[str, int],
        *,
        momentum: float,
        compute: torch.dtype,
        group: dist.ProcessGroup | None,
        **adamw: Any,
    ) -> None:
        parameters = list(parameters)
        self.compute, self.momentum = compute, momentum
        self._matrices = {
            parameter: Matrices(parameter, matrices[name], _holders(parameter, group))
            for name, parameter in parameters
            if name in matrices
        }
        super().__init__(parameters, **adamw)

    def empty_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        if parameter not in self._matrices:
            return super().empty_state(parameter)
        return {"step": torch.zeros(()), MOMENTUM: torch.zeros_like(parameter).detach()}

    def _update_all(self, group: dict[str, Any]) -> None:
        super()._update_all({**group, "params": [p for p in group["params"] if p not in self._matrices]})
        for together in self._sets(group["params"]):
            moving = [self._moving(each.parameter) for each in together]
            for each, direction in zip(together, orthogonalise(together, moving), strict=True):
                self._move(each, direction, group)

    def _sets(self, parameters: list[nn.Parameter]) -> Iterator[list[Matrices]]:
        """Yield what is orthogonalised together: where parts are exchanged, a matrix of similar size for each rank."""
        found = [each for p in parameters if (each := self._matrices.get(p)) is not None and p.grad is not None]
        single = [each for each in found if each.count == 1 and not each.are_local]
        yield from ([each] for each in found if each.count > 1 or each.are_local)
        single.sort(key=lambda each: each.parameter.numel() * min(each.shape), reverse=True)
        ranks = single[0].boxes if single else [()]
        for start in range(0, len(single), len(ranks)):
            yield single[start : start + len(ranks)]

    def _moving(self, parameter: nn.Parameter) -> Tensor:
        """Count a step, and add the gradient to the momentum: this rank's part of what is orthogonalised."""
        state = self.state[parameter]
        if not state:
            state.update(self.empty_state(parameter))
        state["step"] += 1
        shard, stored = self._plain(parameter, state[MOMENTUM], FACTORS[1])
        assert parameter.grad is not None
        gradient = shard.read(parameter.grad)
        found = torch.empty_like(gradient, dtype=self.compute)
        for rows in shard.passes():
            average = stored.read(rows)
            fresh = gradient[rows].to(average.dtype) * (1 - self.momentum)
            average.mul_(self.momentum).add_(fresh)
            found[rows] = fresh.add_(average * self.momentum)  # Nesterov's
            stored.write(rows, average)
        return found.view([stop - start for start, stop in shard.box])

    def _move(self, matrices: Matrices, direction: Tensor, group: dict[str, Any]) -> None:
        shard, stored = self._plain(matrices.parameter, matrices.parameter.detach(), FACTORS[0])
        direction_RC = direction.reshape(shard.rows, shard.columns)
        rate = group["lr"] * _SIZE_OF_ADAMW * math.sqrt(max(matrices.shape))
        for rows in shard.passes():
            value = stored.read(rows)
            value.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction_RC[rows].to(value.dtype) * rate)
            stored.write(rows, value)

    def _plain(self, parameter: nn.Parameter, tensor: Tensor, factor: int) -> tuple[ShardRows, Plain]:
        shard, wide = ShardRows.of(parameter), torch.promote_types(parameter.dtype, torch.float32)
        return shard, Plain(shard.view(tensor), wide, self._noise(self._names[parameter], parameter, shard), factor)


def _holders(parameter: nn.Parameter, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the ranks that hold parts of this rank's matrices: of experts those along efsdp, else the whole group."""
    if group is None or not isinstance(parameter, DTensor):
        return None
    axes = parameter.device_mesh.mesh_dim_names or ()
    return parameter.device_mesh.get_group("efsdp") if "efsdp" in axes else group


def matrices_of(model: nn.Module, anatomy: Anatomy) -> dict[str, int]:
    """Return the number of matrices in each parameter that Muon updates: linear layers, routers, experts and adapters.

    Embeddings, heads, norms, biases and convolutions are not among them. `model` is the full model; it may be on meta.
    """
    experts = {f"{spec.name}.{leaf}": spec for spec in anatomy.experts for leaf in spec.parameters}
    stacks = {holder: spec.num_experts for spec in anatomy.experts for holder in spec.holders}
    embeddings = model.get_input_embeddings(), head_of(model)  # type: ignore[operator]  # of transformers
    around = [module for module in embeddings if module is not None]
    vocabulary = [
        name for name, module in model.named_modules() if isinstance(module, nn.Embedding) or module in around
    ]
    found = {}
    for name, parameter in model.named_parameters():
        owner = name.rpartition(".")[0]
        if name in experts:
            if parameter.dim() == 3 or experts[name].flat_gate is not None:
                found[name] = experts[name].num_experts
        elif parameter.dim() == 3 and is_adapter(name) and owner in stacks:
            found[name] = stacks[owner]
        elif parameter.dim() == 2 and not any(owner == each or is_inside(name, each) for each in vocabulary):
            found[name] = 1
    return found


@torch.no_grad()
def orthogonalised(matrix_NAB: Tensor) -> Tensor:
    """Take five Newton-Schulz steps towards the nearest matrices with orthonormal rows or columns, in their dtype."""
    is_tall = matrix_NAB.shape[-2] > matrix_NAB.shape[-1]
    value = matrix_NAB.mT if is_tall else matrix_NAB
    value = value / value.norm(dim=(-2, -1), keepdim=True).clamp(min=_LEAST_NORM)
    a, b, c = _COEFFICIENTS
    for _ in range(_STEPS):
        gram = value @ value.mT
        value = torch.baddbmm(value, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), value, beta=a)
    return value.mT if is_tall else value


def orthogonalise(together: Sequence[Matrices], local: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of the orthogonalised matrices, of the parts of parameters that this rank holds.

    Collectives: none if all of them are local. Otherwise all have one group, every rank of which calls it with equal
    arguments.
    """
    if all(each.are_local for each in together):
        parts = []
        for each, value in zip(together, local, strict=True):
            value_NAB = value.reshape(-1, *each.shape)
            at_once = max(1, _ELEMENTS_AT_ONCE // max(1, value_NAB[:1].numel()))
            parts.append(torch.cat([orthogonalised(part) for part in value_NAB.split(at_once)]).reshape(value.shape))
        return parts
    group = together[0].group
    assert group is not None
    units = [_Unit(index, box, each) for index, each in enumerate(together) for box in each.wholes]
    results = [torch.empty_like(value) for value in local]
    for start in range(0, len(units), group.size()):
        _exchange(units[start : start + group.size()], local, results, group)
    return results


@dataclass(frozen=True, slots=True)
class _Unit:
    """One matrix of a parameter."""

    index: int
    """Number of the parameter."""
    box: Box
    """The matrix in the parameter."""
    of: Matrices

    def piece(self, rank: int) -> Box:
        """Return the part of the matrix on a rank of the group; an empty one has no volume."""
        nothing = tuple((start, start) for start, _ in self.box)
        return intersect(self.box, self.of.boxes[rank]) or nothing


def _exchange(units: list[_Unit], local: Sequence[Tensor], results: list[Tensor], group: dist.ProcessGroup) -> None:
    """Orthogonalise the k-th of `units` on the k-th rank. Collectives: two all-to-alls over the group."""
    me, ranks = group.rank(), group.size()
    own = [(unit.piece(me), unit.of.boxes[me], unit.index) for unit in units]
    send = [volume(piece) for piece, _, _ in own] + [0] * (ranks - len(units))
    pieces = [units[me].piece(rank) for rank in range(ranks)] if me < len(units) else []
    receive = [volume(piece) for piece in pieces] or [0] * ranks
    parts = [local[index][slices(piece, held)].reshape(-1) for piece, held, index in own if volume(piece)]
    received, _ = all_to_all(torch.cat([local[0].new_empty(0), *parts]), send, receive, group)
    if pieces:
        unit = units[me]
        whole = received.new_empty(extents(unit.box))
        for piece, values in zip(pieces, received.split(receive), strict=True):
            whole[slices(piece, unit.box)] = values.view(extents(piece))
        whole = orthogonalised(whole.view(1, *unit.of.shape)).reshape(whole.shape)
        received = torch.cat([whole[slices(piece, unit.box)].reshape(-1) for piece in pieces])
    returned, _ = all_to_all(received, receive, send, group)
    for (piece, held, index), values in zip(own, returned.split(send), strict=False):
        if volume(piece):
            results[index][slices(piece, held)] = values.view(extents(piece))
