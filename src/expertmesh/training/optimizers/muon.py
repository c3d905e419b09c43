"""Update matrices by Muon (Jordan et al. 2024): orthogonalised momentum, as torch.optim.Muon has it for whole matrices.

Steps are scaled to the size of AdamW's (arXiv 2502.16982), so that one learning rate and one weight decay serve
matrices and all other parameters, which AdamW updates. matrices.py has the matrices and their exchange.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from expertmesh.training.optimizers.adamw import AdamW
from expertmesh.training.optimizers.blocks import FACTORS, Plain, ShardRows
from expertmesh.training.optimizers.matrices import Matrices, orthogonalise

MOMENTUM = "momentum_buffer"
_SIZE_OF_ADAMW = 0.2


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
        """Return what is orthogonalised together: where parts are exchanged, a matrix for each rank, of similar
        sizes.
        """
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
