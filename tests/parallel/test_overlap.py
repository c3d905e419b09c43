"""Shared experts compute while rows of routed ones travel: the same bits, in an order that lets both go on at once."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import expertmesh as em
from expertmesh.distributed import collectives
from expertmesh.experts import dispatch
from expertmesh.experts.layer import SharedExpert
from tests.support.models import tiny_model
from tests.support.ranks import shared_ranks

HIDDEN = 32


def _gradients(
    overlap: bool, mode: Any, watched: Callable[[nn.Module], Any] = lambda model: None
) -> list[torch.Tensor]:
    """Of a micro-batch that each rank has for itself, in double precision."""
    model = tiny_model("deepseek_v3", dtype=torch.float64)
    mesh = em.init_mesh(em.ParallelConfig(ep=dist.get_world_size()))
    precision = em.PrecisionConfig(params="float64", compute="float64", reduce="float64")
    with ExitStack() as patched:
        if not overlap:
            target = "expertmesh.parallel.refusals.shared_behind_routed"
            patched.enter_context(mock.patch(target, return_value={}))
        em.parallelize(model, mesh, precision=precision, activation_checkpointing=mode)
    watched(model)
    torch.manual_seed(dist.get_rank())
    tokens = torch.randint(96, (1, 12 + 3 * dist.get_rank()))
    loss = em.causal_lm_loss(model, {"input_ids": tokens, "labels": tokens}, target_tokens=50)
    loss.backward()
    local = [parameter.grad.to_local() for parameter in model.parameters() if parameter.grad is not None]
    return [loss.detach(), *local]


def _both(mode: Any) -> tuple[bool, int, int]:
    """Whether all bits agree, and how often the shared expert was run and how often ahead; nothing of it is kept."""
    layers, runs, own = [], 0, SharedExpert.compute

    def compute(self: SharedExpert, hidden: torch.Tensor) -> None:
        layers.append(self)
        own(self, hidden)

    def watched(model: Any) -> None:
        def count(*_: Any) -> None:
            nonlocal runs
            runs += 1

        model.model.layers[1].mlp.shared_experts.up_proj.register_forward_hook(count)

    plain = _gradients(False, mode)
    with mock.patch.object(SharedExpert, "compute", compute):
        ahead = _gradients(True, mode, watched)
    assert all(each._ahead is None for each in layers)
    return len(plain) == len(ahead) and all(map(torch.equal, plain, ahead)), runs, len(layers)


# The first layer of two is dense; a recomputed block runs twice; a selective one has its routed experts' result.
@pytest.mark.slow_cases(r"none-.*", why="recomputed blocks stay")
@pytest.mark.parametrize(("mode", "runs", "ahead"), [("none", 1, 1), ("full", 2, 2), ("selective", 2, 0)])
def test_loss_and_every_gradient_are_those_without_overlap_bit_for_bit(mode: str, runs: int, ahead: int) -> None:
    assert shared_ranks(_both, 2, mode) == [(True, runs, ahead)] * 2


def _order(mode: Any) -> list[str]:
    """What is launched and waited for, in the order of the host."""
    events: list[str] = []

    def all_to_all(rows: torch.Tensor, *args: Any, wait: bool = True) -> Any:
        events.append(
            ("rows" if rows.shape[1:] == (HIDDEN,) else "pairs") + (" sent" if not wait else " sent, awaited")
        )
        return collectives.all_to_all(rows, *args, wait=wait)

    def waits(work: Any) -> None:
        events.append("wait")
        work.wait()

    def watched(model: Any) -> None:
        shared = model.model.layers[1].mlp.shared_experts

        def forward(module: nn.Module, inputs: Any, out: torch.Tensor) -> None:
            events.append("shared forward")
            if out.requires_grad:
                out.register_hook(lambda gradient: events.append("shared backward"))

        shared.down_proj.register_forward_hook(forward)

    with mock.patch.object(dispatch, "all_to_all", all_to_all), mock.patch.object(dispatch, "wait", waits):
        _gradients(True, mode, watched)
    return events


def test_rows_are_sent_before_the_shared_expert_runs_and_awaited_behind_it() -> None:
    forward = ["pairs sent", "rows sent", "wait", "shared forward", "wait", "rows sent, awaited"]
    backward = ["rows sent, awaited", "pairs sent", "rows sent", "shared backward", "wait", "wait"]
    for events in shared_ranks(_order, 2, "none"):
        assert events == forward + backward


def test_a_result_computed_ahead_is_for_the_same_values_alone() -> None:
    module, runs = nn.Linear(4, 4), []
    shared, hidden = SharedExpert(module), torch.randn(3, 4)
    module.register_forward_hook(lambda module, args, output: runs.append(output))
    with torch.no_grad():
        shared.compute(hidden)
        assert module(hidden.view(1, 3, 4)).data_ptr() == runs[0].data_ptr()
        shared.compute(hidden)
        hidden.add_(1)  # in place, as some models do between the two
        torch.testing.assert_close(module(hidden), nn.functional.linear(hidden, module.weight, module.bias))
        shared.compute(hidden)
        torch.testing.assert_close(module(hidden[:2]), nn.functional.linear(hidden[:2], module.weight, module.bias))
