"""What selective checkpointing keeps is used once, cannot be corrupted, and shifts no random number."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from expertmesh.experts.activation_checkpointing import block_contexts, computed_once

keeping_contexts = partial(block_contexts, selective=True)


class _Experts(torch.nn.Module):
    """`[T, 4]` to `[T, 4]`; counts its runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight_44 = torch.nn.Parameter(torch.randn(4, 4))
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def compute() -> torch.Tensor:
            self.runs += 1
            return (x @ self.weight_44).sin()

        return computed_once(compute)


def _block(experts: _Experts, x: torch.Tensor) -> torch.Tensor:
    out = experts(x.exp())
    out *= 3  # several families add to the result in place
    return out.cos() + x


def _gradients(checkpointed: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
    experts, x = _Experts(), torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
    out = (
        checkpoint(_block, experts, x, use_reentrant=False, context_fn=keeping_contexts)
        if checkpointed
        else _block(experts, x)
    )
    out.square().sum().backward()
    assert x.grad is not None
    assert experts.weight_44.grad is not None
    return x.grad, experts.weight_44.grad, experts.runs


def test_experts_run_once_with_the_gradients_of_a_plain_run() -> None:
    *kept, runs = _gradients(checkpointed=True)
    *plain, _ = _gradients(checkpointed=False)
    assert runs == 1
    assert all(torch.equal(a, b) for a, b in zip(kept, plain, strict=True))


def test_a_kept_tensor_that_is_changed_in_place_is_refused_as_autograd_does() -> None:
    experts, x = _Experts(), torch.ones(2, 4, requires_grad=True)
    inputs = []

    def block(x: torch.Tensor) -> torch.Tensor:
        inputs.append(x.exp())
        return experts(inputs[0])

    out = checkpoint(block, x, use_reentrant=False, context_fn=keeping_contexts)
    with torch.no_grad():
        inputs[0].mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        out.sum().backward()


class _Attentions(TorchDispatchMode):
    """Counts the runs of fused attention, forward only."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.runs += "_scaled_dot_product" in str(func) and "backward" not in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("dropout", "runs"), [(0.0, 1), (0.5, 2)])
def test_attention_runs_once_unless_it_draws_random_numbers(dropout: float, runs: int) -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        query, key, value = (x * 2).sin(), x.cos(), x.sigmoid()
        out = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return F.dropout(out.exp(), 0.5).sin()

    gradients = []
    for context_fn in (keeping_contexts, None):
        torch.manual_seed(0)
        x = torch.randn(1, 2, 8, 4, requires_grad=True)
        with _Attentions() as seen:
            options = {} if context_fn is None else {"context_fn": context_fn}
            checkpoint(block, x, use_reentrant=False, **options).sum().backward()
        assert context_fn is None or dropout > 0 or seen.runs == runs
        gradients.append(x.grad)
    assert torch.equal(*gradients)  # the second dropout drops the same, whatever ran before it


def test_nothing_is_kept_outside_of_a_checkpointed_block() -> None:
    experts = _Experts()
    for _ in range(2):
        experts(torch.ones(2, 4)).sum().backward()
    assert experts.runs == 2
