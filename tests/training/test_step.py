"""What a step returns can be reduced over all ranks together, and how often ranks and devices wait for each other."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import expertmesh as em
from expertmesh.checkpoint.write import WRITING, WRITTEN
from expertmesh.config import Config
from expertmesh.state.model_view import attach
from expertmesh.step import forward_backward
from expertmesh.step.forward_backward import StepLosses
from expertmesh.step.objectives import Dpo
from expertmesh.training import exchange as exchange_module
from expertmesh.training.control import StopReason
from expertmesh.training.exchange import NonFiniteGuard, RankFacts, exchange
from expertmesh.training.loop import TrainingLoop
from expertmesh.training.run import train
from tests.support.collectives import Collectives
from tests.support.ranks import shared_ranks
from tests.training.tiny_run import run_config, write_inputs


def test_losses_of_a_stage_that_has_none_are_on_its_device() -> None:
    # On an accelerator the last stage's loss is on it, and an all-reduce of one here and one on the CPU never ends.
    ids = torch.zeros(1, 4, dtype=torch.int64, device="meta")
    batch, model = {"input_ids": ids, "labels": ids}, nn.Module()
    attach(model, pipeline=mock.Mock(local_stages=(0,)))
    with mock.patch.object(forward_backward, "run_pipeline"):
        losses = forward_backward.run_step(model, [batch], Dpo(beta=0.1, count=1))
    shares = (losses.loss, losses.aux_loss, losses.z_loss, losses.figures_F)
    assert {share.device.type for share in shares} == {"meta"}


def test_router_losses_that_are_off_are_on_the_device_of_the_batches() -> None:
    ids = torch.zeros(1, 4, dtype=torch.int64, device="meta")
    with em.router_losses(nn.Module(), [{"input_ids": ids}]) as router_loss:
        pass
    assert {router_loss.aux_loss.device.type, router_loss.z_loss.device.type} == {"meta"}


def _count_per_step(config: Config) -> list[dict[str, int]]:
    """What the last step and its report needed."""
    counts: dict[str, dict[str, int]] = {}

    def counted(name: str) -> Any:
        original = getattr(TrainingLoop, name)

        def call(*args: Any) -> Any:
            with Collectives() as counter:
                result = original(*args)
            counts[name] = dict(counter.counts)
            return result

        return mock.patch.object(TrainingLoop, name, call)

    with counted("_train_step"), counted("_report"):
        train(config)
    return list(counts.values())


MICRO_BATCHES, LAYERS = 2, 2
EXPERT_CALLS = MICRO_BATCHES * LAYERS


# Of each call: counts, pairs, rows there and back; the last three again in backward. A recomputed block, which ends
# before the down projection, has pairs and rows there again.
@pytest.mark.slow_cases(r"2-none.*", why="with and without ranks it stays")
@pytest.mark.parametrize(
    ("ep", "mode", "all_to_alls", "waits_of_experts"),
    [(1, "none", 0, 0), (2, "none", 7 * EXPERT_CALLS, EXPERT_CALLS), (2, "full", 9 * EXPERT_CALLS, EXPERT_CALLS)],
)
def test_ranks_tell_each_other_about_a_step_in_one_all_reduce_and_one_wait(
    tmp_path: Path, ep: int, mode: str, all_to_alls: int, waits_of_experts: int
) -> None:
    inputs = write_inputs(tmp_path)
    checkpointing = f"train.activation_checkpointing={mode}"
    config = run_config(inputs, tmp_path / "run", f"parallel.ep={ep}", "train.max_steps=2", checkpointing)
    for step, report in shared_ranks(_count_per_step, 2, config):
        assert step["allreduce"] == 2  # the gradient norm, and what ranks tell each other
        assert step.get("alltoall", 0) == all_to_alls
        # transformers looks once at each micro-batch's mask; by layer again at positions, behind the blocks.
        looks = MICRO_BATCHES * (2 if mode == "full" else 1)  # `accumulate: auto` is by layer then
        assert step["waits"] == 1 + looks + waits_of_experts
        assert step.keys() <= {"allreduce", "alltoall", "waits", "_allgather", "_reduce_scatter"}  # FSDP2's
        assert report["allreduce"] == 2  # tokens per expert, peak memory


@pytest.mark.parametrize("bad", [None, 1])
def test_only_a_loss_that_is_not_finite_is_gathered(bad: int | None) -> None:
    assert shared_ranks(_gathers, 3, bad) == [0 if bad is None else 1] * 3


def _gathers(bad: int | None) -> int:
    rank = dist.get_rank()
    share = torch.tensor(float("nan") if rank == bad else 1.0 + rank, dtype=torch.float64)
    losses = StepLosses(share, share, share, figures_F=torch.full((2,), 0.5 * rank, dtype=torch.float64))
    own = RankFacts(StopReason(15 * (rank == 2) + 2 * (rank == 0)), rank == 1, WRITTEN if rank else WRITING)
    facts = exchange(losses, torch.tensor(2.0), own, ("margins", "others"), torch.device("cpu"))
    assert facts.figures == {"margins": 1.5, "others": 1.5}
    assert (facts.stop, facts.overdue, facts.statuses[WRITTEN]) == (StopReason.SIGTERM, False, 2)
    assert bad is not None or (facts.loss, facts.z_loss, facts.grad_norm) == (6.0, 6.0, 2.0)
    with mock.patch.object(exchange_module, "all_gather", wraps=exchange_module.all_gather) as gathers:
        said = NonFiniteGuard().check(1, facts, losses, nn.Linear(1, 1))
    assert said == (None if bad is None else "the loss is nan on rank 1")
    return gathers.call_count
