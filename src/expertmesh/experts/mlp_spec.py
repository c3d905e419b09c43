"""Describe how one family's experts compute between the two projections; both ways of multiplying use it.

The activation is the model's own code. Where it is `silu(gate) * up` its derivative is known in closed form; elsewhere
autograd runs on the small recomputed part.

    P pairs, I intermediate, 2I columns of the up projection (I when the experts are not gated)
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from expertmesh.experts import triton_ops

# Few enough parts to keep an accelerator busy, many enough to keep their temporaries small.
_PARTS, _LEAST_ELEMENTS = 8, 1 << 20


@dataclass(frozen=True, slots=True)
class Gate:
    """A gated activation in closed form: `gate * sigmoid(alpha * gate) * (up + offset)`."""

    interleaved: bool = False
    """True if columns of gate and up alternate; else they are `[gate; up]`."""
    alpha: float = 1.0
    """The factor inside the sigmoid."""
    limit: float | None = None
    """The most of gate, and of up's absolute value."""
    offset: float = 0.0
    """The number added to up."""

    def __call__(self, pre_P2I: torch.Tensor) -> torch.Tensor:
        gate_PI, up_PI = (pre_P2I[:, ::2], pre_P2I[:, 1::2]) if self.interleaved else pre_P2I.chunk(2, dim=1)
        if self.limit is not None:
            gate_PI, up_PI = gate_PI.clamp(max=self.limit), up_PI.clamp(-self.limit, self.limit)
        return gate_PI * torch.sigmoid(self.alpha * gate_PI) * (up_PI + self.offset)

    def flat(self) -> tuple[bool, float, float | None, float]:
        """Return the fields as operators take them."""
        return self.interleaved, self.alpha, self.limit, self.offset


@dataclass(frozen=True, slots=True)
class ExpertMlpSpec:
    """The arithmetic of one family's experts, for any sizes."""

    activation: Callable[[torch.Tensor], torch.Tensor]
    """Maps pre-activations `[P, 2I]` to `[P, I]` by the model's own code."""
    silu_gated: bool
    """True if it is `silu(gate) * up` with gate and up concatenated."""
    transposed: bool
    """True if weights are `[L, in, out]`."""
    per_expert: bool
    """True if one expert is multiplied after the other."""
    triton: bool = False
    """True if sums, and activations that are a `gate`, run Triton's kernels."""
    gate: Gate | None = None
    """The activation in closed form, if it has one."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """This rank's experts."""

    up: torch.Tensor
    """`[L, 2I, H]`, transposed `[L, H, 2I]`."""
    down: torch.Tensor
    """`[L, H, I]`, transposed `[L, I, H]`."""
    up_bias: torch.Tensor | None = None
    """`[L, 2I]`."""
    down_bias: torch.Tensor | None = None
    """`[L, H]`."""

    def flat(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return the fields as autograd functions take them."""
        return self.up, self.down, self.up_bias, self.down_bias


@dataclass(frozen=True, slots=True)
class Adapter:
    """One projection's adapter on this rank."""

    a_LrK: torch.Tensor
    """`[L, r, in]`."""
    b_LNr: torch.Tensor
    """`[L, out, r]`."""
    scaling: float
    """The factor of B A."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of this rank's experts; None for a projection without."""

    up: Adapter | None
    """The adapter of the up projection."""
    down: Adapter | None
    """The adapter of the down projection."""
    expert_L: torch.Tensor
    """The experts that this rank holds, copies among them: their numbers in the model, int64."""


def activate(pre_P2I: torch.Tensor, weight_P: torch.Tensor, mlp: ExpertMlpSpec) -> torch.Tensor:
    """Return the activation `[P, I]`, times the routing weights."""
    act_PI: torch.Tensor
    if mlp.triton and mlp.gate is not None:
        act_PI = triton_ops.swiglu(pre_P2I, weight_P, *mlp.gate.flat())
        return act_PI
    if mlp.silu_gated:
        gate_PI, up_PI = pre_P2I.chunk(2, dim=1)
        act_PI = F.silu(gate_PI).mul_(up_PI)
    else:
        # The model's own code may return its argument or a view of it; clone, because what follows works in place.
        act_PI = mlp.activation(pre_P2I).clone()
    return act_PI.mul_(weight_P.unsqueeze(1))


def activation_backward(
    pre_P2I: torch.Tensor, grad_act_PI: torch.Tensor, weight_P: torch.Tensor, mlp: ExpertMlpSpec
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of the weighted activation of `activate`, in place.

    Both arguments are consumed: the activation replaces its gradient, d(pre-activation) the pre-activation. So backward
    holds no third tensor of their size, and can run once (a second one raises: autograd sees that a saved tensor was
    changed). Torch works on rows in parts, whose temporaries are small.

    Args:
        pre_P2I: the pre-activation.
        grad_act_PI: the gradient of the weighted activation.
        weight_P: the routing weights, possibly in a wider dtype.

    Returns:
        (the weighted activation `[P, I]`, d(pre-activation) `[P, 2I]`, d(routing weight) `[P]`).
    """
    if mlp.triton and mlp.gate is not None:
        return grad_act_PI, pre_P2I, triton_ops.swiglu_backward_(pre_P2I, grad_act_PI, weight_P, *mlp.gate.flat())
    grad_weight_P = torch.empty_like(weight_P)
    pairs = pre_P2I.shape[0]
    rows = max(-(-pairs // _PARTS), _LEAST_ELEMENTS // max(1, pre_P2I.shape[1]))
    for start in range(0, pairs, rows):
        part = slice(start, start + rows)
        grad_weight_P[part] = _part_backward(pre_P2I[part], grad_act_PI[part], weight_P[part], mlp)
    return grad_act_PI, pre_P2I, grad_weight_P


def _part_backward(
    pre_P2I: torch.Tensor, grad_act_PI: torch.Tensor, weight_P: torch.Tensor, mlp: ExpertMlpSpec
) -> torch.Tensor:
    """Run `activation_backward` on some rows, in place; return d(routing weight)."""
    weight_P1 = weight_P.unsqueeze(1)  # possibly wider than the activation: multiplied as it is, like in forward
    weighted_PI = (grad_act_PI * weight_P1).to(pre_P2I.dtype)
    if mlp.silu_gated:
        gate_PI, up_PI = pre_P2I.chunk(2, dim=1)
        silu_PI = F.silu(gate_PI)
        act_PI = silu_PI * up_PI
        grad_weight_P = (grad_act_PI * act_PI).sum(1, dtype=weight_P.dtype)
        grad_gate_PI = torch.ops.aten.silu_backward(weighted_PI * up_PI, gate_PI)
        torch.mul(weighted_PI, silu_PI, out=up_PI)
        gate_PI.copy_(grad_gate_PI)
    else:
        with torch.enable_grad():
            leaf_P2I = pre_P2I.detach().clone().requires_grad_()
            act_PI = mlp.activation(leaf_P2I)
            (grad_pre_P2I,) = torch.autograd.grad(act_PI, leaf_P2I, weighted_PI.to(act_PI.dtype))
        act_PI = act_PI.detach()
        grad_weight_P = (grad_act_PI * act_PI).sum(1, dtype=weight_P.dtype)
        pre_P2I.copy_(grad_pre_P2I)
    grad_act_PI.copy_(act_PI * weight_P1)
    return grad_weight_P
