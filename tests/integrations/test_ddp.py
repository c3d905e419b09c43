"""A model of `em.like_ddp` in a loop of one's own gets DDP's gradients: each rank's own mean, averaged over ranks.

Real gloo ranks. Each has other rows, and another number of them; DDP itself, on the unsharded model in the same
process, is the reference for loss, norm, every gradient and the weights after clipped steps by torch's own clipping.
"""

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import expertmesh as em
from expertmesh.state import other_code
from tests.support.errors import refused
from tests.support.models import tiny_model
from tests.support.ranks import shared_ranks
from tests.support.reference import OPTIM, padded, rows_of_step, whole, worst

Loss = Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor]
LAYOUTS: list[dict[str, int]] = [{"ep": 2}, {"ep": 4}, {"ep": 2, "replicate": 2}]
STEPS, MAX_NORM = 3, 0.5


@dataclass(frozen=True, slots=True)
class Found:
    """What one model gave on this rank; gradients are the first step's, whole."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def own_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def from_several_outputs(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Hidden states appear among the outputs and are what the logits are made of; logits are changed in place."""
    output = model(**{key: value for key, value in batch.items() if key != "labels"}, output_hidden_states=True)
    logits = output.logits.div_(0.7)
    loss: torch.Tensor = logits.logsumexp(-1).mean() + sum(hidden.square().mean() for hidden in output.hidden_states)
    return loss


def fed_back(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """What leaves the model enters it again."""
    first = model(input_ids=batch["input_ids"], output_hidden_states=True)
    second = model(inputs_embeds=first.hidden_states[-1] * 0.5)
    loss: torch.Tensor = second.logits.logsumexp(-1).mean() + first.logits.square().mean()
    return loss


def _steps(model: Any, parameters: dict[str, nn.Parameter], loss_of: Loss) -> Found:
    optimizer = torch.optim.AdamW(parameters.values(), **OPTIM)
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        rows, mine = rows_of_step(step, ()), [0, 3, 6, 7]
        first = mine[dist.get_rank()]
        batch = padded(rows[first : first + 1 + dist.get_rank() % 3])  # one to three rows, few targets and many
        loss = loss_of(model, batch)
        loss.backward()
        gradients = gradients or whole({name: p.grad for name, p in parameters.items()})
        norm: Any = torch.nn.utils.clip_grad_norm_(parameters.values(), MAX_NORM)
        losses.append(float(loss.detach()))
        norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    return Found(losses, norms, gradients, whole(parameters))


def _compare(layout: dict[str, int], loss_of: Loss, tolerance: float) -> None:
    initial: Any = tiny_model("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.5)
    copied = copy.deepcopy(initial)
    expected = _steps(DistributedDataParallel(copied), dict(copied.named_parameters()), loss_of)
    sharded = em.like_ddp(em.parallelize(initial, em.init_mesh(em.ParallelConfig(**layout))))  # type: ignore[arg-type]
    assert em.like_ddp(sharded) is sharded
    found = _steps(sharded, dict(sharded.named_parameters()), loss_of)
    assert found.losses == pytest.approx(expected.losses, rel=tolerance)
    assert found.norms == pytest.approx(expected.norms, rel=tolerance)
    assert worst(found.gradients, expected.gradients)[0] <= tolerance
    assert worst(found.weights, expected.weights)[0] <= tolerance


def _every_layout(world: int, loss_of: Loss) -> None:
    for layout in LAYOUTS:
        if layout["ep"] * layout.get("replicate", 1) <= world:
            _compare(layout, loss_of, 1e-5)


@pytest.mark.slow_cases(r"own_loss", why="what leaves the model in other ways stays")
@pytest.mark.parametrize(
    ("world", "loss_of"),
    [(4, own_loss), (2, from_several_outputs), (2, fed_back)],
    ids=["own_loss", "several_outputs", "fed_back"],
)
def test_gradients_and_steps_are_ddps(world: int, loss_of: Loss) -> None:
    shared_ranks(_every_layout, world, world, loss_of)


def _counted_over_ranks() -> None:
    """Gradients of `causal_lm_loss`, with and without `like_ddp`."""
    gradients = []
    for prepare in (em.like_ddp, lambda model: model):
        model = prepare(em.parallelize(tiny_model("qwen3_moe"), em.init_mesh(em.ParallelConfig(ep=2))))  # type: ignore[arg-type,operator]
        em.causal_lm_loss(model, padded(rows_of_step(0, ())[dist.get_rank() :: 2]), target_tokens=40).backward()
        gradients.append(whole({name: parameter.grad for name, parameter in model.named_parameters()}))
    assert all(torch.equal(tensor, gradients[1][name]) for name, tensor in gradients[0].items())


def test_a_loss_over_the_targets_of_all_ranks_stays_as_it_is() -> None:
    shared_ranks(_counted_over_ranks, 2)


def _summed() -> None:
    other_code._scale_outputs = lambda model, args, output: output  # type: ignore[assignment]
    _compare({"ep": 2}, own_loss, 1e-5)


def test_gradients_that_are_summed_are_caught() -> None:
    with pytest.raises(AssertionError, match=r"assert .* == approx"):
        shared_ranks(_summed, 2)


def _with_accelerate() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {name: str(value) for name, value in ranks.items()} | {"ACCELERATE_USE_CPU": "true"}
    initial: Any = tiny_model("qwen3_moe")
    weights = []
    for is_ours in (False, True):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        assert accelerator.num_processes == world
        model: Any = copy.deepcopy(initial)
        if is_ours:
            em.like_ddp(em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=2))))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rows = [row for step in range(2) for row in rows_of_step(step, ())]
        loader = torch.utils.data.DataLoader(rows, batch_size=2, collate_fn=padded)  # type: ignore[arg-type]
        optimizer, loader = accelerator.prepare(optimizer, loader)
        run = model if is_ours else accelerator.prepare(model)
        for batch in loader:
            with accelerator.accumulate(run):
                accelerator.backward(run(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
        weights.append(whole(dict(model.named_parameters())))
    assert worst(weights[1], weights[0])[0] <= 1e-5
    before = dict(initial.named_parameters())
    assert all(not torch.equal(tensor, before[name]) for name, tensor in weights[0].items())


def test_a_loop_of_accelerate_trains_as_with_ddp() -> None:
    shared_ranks(_with_accelerate, 2)


def _by_layer() -> None:
    """Gradients of three micro-steps of a loss of its own, one after the other and by layer."""
    batches = [padded(rows_of_step(step, ())[dist.get_rank() :: 2]) for step in range(3)]
    gradients = []
    mesh = em.init_mesh(em.ParallelConfig(ep=2))

    def micro_step(model: Any, number: int) -> float:
        # None leaves the router logits to the config, which asks for them.
        output = model(**batches[number], output_router_logits=None)
        loss = (output.logits.logsumexp(-1) * batches[number]["input_ids"]).square().mean() + 1e3 * output.aux_loss
        loss.backward()
        return float(loss.detach())

    for by_layer in (False, True):
        model: Any = tiny_model("qwen3_moe", num_hidden_layers=3)
        step = partial(micro_step, em.like_ddp(em.parallelize(model, mesh)))
        model.config.output_router_logits = True
        calls = [{**batch, "output_router_logits": None} for batch in batches]
        run = partial(em.accumulate_by_layer, model, calls, step, round=2)
        gradients.append((run() if by_layer else [*map(step, range(3))], whole(_gradients_of(model))))
    (losses, expected), (found, by_layers) = gradients
    assert found == pytest.approx(losses, rel=1e-5)
    assert worst(by_layers, expected)[0] <= 1e-5
    with refused("train.accumulate-unsupported", naming="input_ids"):
        em.accumulate_by_layer(model, [{"inputs_embeds": torch.zeros(1, 2, 32)}], step)
    with refused("data.no-micro-batch"):
        em.accumulate_by_layer(model, [], step)


def _gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_a_loop_with_a_loss_of_its_own_runs_by_layer() -> None:
    shared_ranks(_by_layer, 2)


def _on_shared_rows() -> None:
    model: Any = tiny_model("qwen3_moe")
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=2, tp=2)))
    with refused("layout.ranks-share-rows", naming="tp"):
        em.like_ddp(model)
    with refused("layout.ranks-share-rows", naming="causal_lm_loss"):
        model(**padded(rows_of_step(0, ())))


def test_ranks_that_share_rows_are_refused() -> None:
    shared_ranks(_on_shared_rows, 2)
    with refused("model.not-parallelized"):
        em.like_ddp(tiny_model("qwen3_moe"))
