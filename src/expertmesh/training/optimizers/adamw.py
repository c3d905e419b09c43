"""Update parameters by AdamW, with parameters and moments stored in fewer bits than it computes with.

The arithmetic is that of torch's AdamW in float32, a few rows at a time; blocks.py stores the results.
Every rank updates its own shards; only blocks of 8 bits that several ranks share need communication.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.training.optimizers.blocks import (
    FACTORS,
    Blocks,
    Noise,
    Plain,
    ShardRows,
    Stored,
    empty_blocks,
    is_quantised,
)

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW(torch.optim.Optimizer):
    """AdamW with `stochastic_rounding` of bfloat16 parameters and their moments. State is named and shaped as torch's.

    Parameters come with their names in the full model: with `seed` and the step count they decide the rounding.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        stochastic_rounding: bool,
        seed: int,
    ) -> None:
        self.stochastic_rounding, self.seed = stochastic_rounding, seed
        self._names = {parameter: name for name, parameter in parameters}
        super().__init__(self._names, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def empty_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the state from which the first step starts."""
        return {"step": torch.zeros(()), **{slot: torch.zeros_like(parameter).detach() for slot in MOMENTS}}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Every rank calls it, for `Blocks` that several ranks share."""
        assert closure is None, "gradients come from a whole step; there is nothing to evaluate again"
        for group in self.param_groups:
            self._update_all(group)

    def _update_all(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            if parameter.grad is not None:
                self._update(self._names[parameter], parameter, parameter.grad, group)

    def _update(self, name: str, parameter: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(self.empty_state(parameter))
        state["step"] += 1
        shard, wide = ShardRows.of(parameter), torch.promote_types(parameter.dtype, torch.float32)
        stored = self._stored(name, parameter, shard, wide)
        gradient = shard.read(grad)
        for rows in shard.passes():
            values = {slot: tensor.read(rows) for slot, tensor in stored.items()}
            _adamw(values, gradient[rows].to(wide), int(state["step"]), group)
            for slot, tensor in stored.items():
                tensor.write(rows, values[slot])

    def _stored(self, name: str, parameter: nn.Parameter, shard: ShardRows, wide: torch.dtype) -> dict[str, Stored]:
        """Return the parameter, under the empty name, and its moments."""
        state, stored, noise = self.state[parameter], dict[str, Stored](), self._noise(name, parameter, shard)
        tensors = {"": parameter.detach(), **{slot: state[slot] for slot in MOMENTS}}
        for (slot, tensor), factor in zip(tensors.items(), FACTORS, strict=True):
            if (scale := state.get(f"{slot}_scale")) is not None:
                stored[slot] = Blocks(shard, tensor, scale, wide, signed=slot == "exp_avg")
            else:
                stored[slot] = Plain(shard.view(tensor), wide, noise, factor)
        return stored

    def _noise(self, name: str, parameter: nn.Parameter, shard: ShardRows) -> Noise | None:
        if not self.stochastic_rounding or parameter.dtype != torch.bfloat16:
            return None
        return Noise(f"{self.seed}/{int(self.state[parameter]['step'])}/{name}", shard.boxes, shard.shape, shard.device)


class AdamW8bit(AdamW):
    """AdamW with moments in 8 bits, except for vectors and small tensors; parameters are stored as they are."""

    def empty_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        if not is_quantised(parameter.shape):
            return super().empty_state(parameter)
        state = {"step": torch.zeros(())}
        for slot in MOMENTS:
            state[slot], state[f"{slot}_scale"] = empty_blocks(parameter)
        return state


def _adamw(values: dict[str, Tensor], gradient: Tensor, step: int, group: dict[str, Any]) -> None:
    """Take one step of torch's AdamW, in place, on parameters (under the empty name) and moments.

    One operation at a time, each of which is rounded correctly: kernels that fuse some differ in the last bit between
    the body of a vectorised loop and its end, and the place of that end depends on the layout.
    """
    parameter, average, square = values[""], values["exp_avg"], values["exp_avg_sq"]
    (beta1, beta2), rate = group["betas"], group["lr"]
    average.mul_(beta1).add_(gradient * (1 - beta1))
    square.mul_(beta2).add_((gradient * gradient).mul_(1 - beta2))
    size = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
    parameter.mul_(1 - rate * group["weight_decay"]).sub_((average / size).mul_(rate / (1 - beta1**step)))
