"""A recomputed block chooses the same experts, even when its scores would now say otherwise."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from expertmesh.experts.activation_checkpointing import block_contexts, confirm_choice, is_recomputing

CONTEXTS = [block_contexts, partial(block_contexts, selective=True)]


@pytest.mark.parametrize("context_fn", CONTEXTS)
def test_the_second_run_keeps_the_first_choice_and_follows_the_new_scores(context_fn: Any) -> None:
    runs: list[tuple[torch.Tensor, torch.Tensor, bool]] = []

    def router(scores: torch.Tensor) -> torch.Tensor:
        # What a tie or a non-deterministic kernel may do: the second run sees the opposite order.
        values, index = torch.topk(-scores if runs else scores, 2, dim=-1)
        runs.append((values.detach().clone(), index.clone(), is_recomputing()))
        values /= values.sum(dim=-1, keepdim=True)  # several families normalise in place
        index += 0  # and may change their copy of the choice
        return values * values

    scores = torch.tensor([[0.1, 0.9, 0.5, 0.2]], requires_grad=True)
    checkpoint(router, scores, use_reentrant=False, context_fn=context_fn).sum().backward()
    (_, first, recomputing_first), (values, second, recomputing_second) = runs
    assert first.tolist() == second.tolist() == [[1, 2]]
    assert torch.equal(values, torch.tensor([[-0.9, -0.5]]))
    assert (recomputing_first, recomputing_second) == (False, True)
    assert not is_recomputing()


@pytest.mark.parametrize("context_fn", CONTEXTS)
def test_a_router_that_decides_by_other_means_is_held_to_its_first_choice(context_fn: Any) -> None:
    runs = 0

    def router(scores: torch.Tensor) -> torch.Tensor:
        nonlocal runs
        runs += 1
        index = torch.tensor([[runs]])
        confirm_choice(index)
        return torch.gather(scores, 1, index).square()

    scores = torch.rand(1, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="chose other experts"):
        checkpoint(router, scores, use_reentrant=False, context_fn=context_fn).sum().backward()


def test_without_replay_the_choice_would_have_changed() -> None:
    chosen = []

    def router(scores: torch.Tensor) -> torch.Tensor:
        values, index = torch.topk(-scores if chosen else scores, 2, dim=-1)
        chosen.append(index.tolist())
        return values * values

    scores = torch.tensor([[0.1, 0.9, 0.5, 0.2]], requires_grad=True)
    checkpoint(router, scores, use_reentrant=False).sum().backward()
    assert chosen == [[[1, 2]], [[0, 3]]]
