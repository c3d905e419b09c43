"""AdamW whose parameters and moments are stored in fewer bits than it computes with.

The arithmetic is torch's own AdamW in float32, a few rows at a time; only how results are stored is done here. Every
rank updates its own shards. Nothing here communicates.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from expertmesh.training.optimizers.rounding import Noise
from expertmesh.training.optimizers.shard_rows import ShardRows

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW(torch.optim.Optimizer):
    """Stores bfloat16 parameters and their moments with stochastic rounding. State is named and shaped as torch's.

    Parameters come with their names in the whole model: with `seed` and the count of steps they decide the rounding.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        seed: int,
    ) -> None:
        self.seed = seed
        super().__init__(list(parameters), {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None, "gradients come from a whole step; there is nothing to evaluate again"
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if parameter.grad is not None:
                    self._update(name, parameter, parameter.grad, group)

    def _update(self, name: str, parameter: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state.update({slot: torch.zeros_like(parameter).detach() for slot in MOMENTS})
        state["step"] += 1
        shard, wide = ShardRows.of(parameter), torch.promote_types(parameter.dtype, torch.float32)
        stored = {"": shard.view(parameter), **{slot: shard.view(state[slot]) for slot in MOMENTS}}
        noise = {}
        if parameter.dtype == torch.bfloat16:
            key = f"{self.seed}/{int(state['step'])}/{name}"
            noise = {slot: Noise.of(f"{key}/{slot}", shard.box, shard.shape, shard.device) for slot in stored}
        gradient = shard.read(grad)
        for rows in shard.passes():
            values = {slot: tensor[rows].to(wide) for slot, tensor in stored.items()}
            _adamw(values, gradient[rows].to(wide), int(state["step"]), group)
            for slot, bits in noise.items():
                stored[slot][rows] = bits.round(values[slot], rows)


def _adamw(values: dict[str, Tensor], gradient: Tensor, step: int, group: dict[str, Any]) -> None:
    """One step of torch's AdamW, in place, on float32 parameters (under the empty name) and moments."""
    beta1, beta2 = group["betas"]
    adamw(
        [values[""]],
        [gradient],
        [values["exp_avg"]],
        [values["exp_avg_sq"]],
        [],
        [torch.full((), step - 1.0, device=gradient.device)],  # which it counts up
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
