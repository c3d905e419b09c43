"""Router losses and correction biases of a model cut into stages are those of the whole model.

The references are those of the tests without stages: transformers' own losses on the global batch in one process, and
the bias rule in plain torch.
"""

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import expertmesh as em
from expertmesh.anatomy import describe
from expertmesh.distributed.mesh import Mesh
from expertmesh.experts.layer import layer_of
from expertmesh.state.model_view import ModelView, stage_names
from expertmesh.step import pipeline_schedule, router_losses
from tests.experts import test_balance as bias
from tests.parallel.test_router_loss import MOE, Expected, Found, expected
from tests.support.models import tiny_model
from tests.support.ranks import shared_ranks
from tests.support.reference import OPTIM, of_all_stages, padded

TOLERANCE = 1e-5
# (world, axes, rows of a micro-batch of 16, changes of the model)
LAYOUTS: dict[str, tuple[int, dict[str, Any], int, dict[str, Any]]] = {
    "one micro-batch": (2, {"pp": 2}, 16, {}),
    "pp 2": (2, {"pp": 2}, 4, {}),
    "pp 2, ep 2": (4, {"pp": 2, "ep": 2}, 2, {}),
    "interleaved": (2, {"pp": 2, "pp_virtual_stages": 2}, 4, {"num_hidden_layers": 4}),
    "pp 2, replicate 2": (4, {"pp": 2, "replicate": 2}, 4, {}),
}


def _train(
    want: Expected,
    parallel: em.ParallelConfig,
    micro_batch: int,
    moe: em.MoeConfig,
    tamper: Callable[[Mesh], None] | None = None,
    **options: Any,
) -> Found:
    model = copy.deepcopy(want.model)
    mesh = em.init_mesh(parallel)
    em.parallelize(model, mesh, moe=moe, **options)
    if tamper is not None:
        tamper(mesh)
    mine = want.rows[mesh.data_rank :: mesh.layout.data_ranks]
    batches = [padded(mine[start : start + micro_batch]) for start in range(0, len(mine), micro_batch)]
    total = sum(int((labels[1:] != -100).sum()) for _, labels in want.rows)
    step = em.forward_backward(model, batches, target_tokens=total, chunk_tokens=16)
    values = torch.stack([step.loss, step.aux_loss.double(), step.z_loss.double()])
    dist.all_reduce(values)
    gradients = of_all_stages(model, mesh, lambda parameter: parameter.grad)
    assert gradients.keys() == want.gradients.keys()
    errors = {n: float((g - want.gradients[n]).norm() / want.gradients[n].norm()) for n, g in gradients.items()}
    routers = max(error for name, error in errors.items() if ".gate." in name)
    relative = (float(a) / b - 1 for a, b in zip(values, (want.loss, want.aux_loss, want.z_loss), strict=True))
    worst = max((error, name) for name, error in errors.items())
    names = stage_names(model, [spec.name for spec in describe(model).experts])
    loads = [layer_of(model.get_submodule(name)).tokens_per_expert.counts_E for name in names]
    load = torch.stack([load_E for load_E in loads if load_E is not None]).sum()
    dist.all_reduce(load)
    return Found(*(abs(each) for each in relative), worst, routers, int(load))


@pytest.mark.slow_cases(r"interleaved", why="ep and replicas beside stages stay")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_router_losses_equal_the_unsharded_models_on_the_global_batch(layout: str) -> None:
    world, parallel, micro_batch, changes = LAYOUTS[layout]
    want = expected("qwen3_moe", **changes)
    config = em.ParallelConfig(**{"ep": 1, **parallel})
    layers = changes.get("num_hidden_layers", 2)
    for found in shared_ranks(_train, world, want, config, micro_batch, MOE):
        assert max(found.loss, found.aux_loss, found.z_loss, found.gradient[0]) <= TOLERANCE, found
        assert found.load == 2 * layers * sum(len(ids) for ids, _ in want.rows)


def test_recomputed_blocks_add_nothing_twice() -> None:
    options = {"activation_checkpointing": True}
    for found in shared_ranks(lambda: _train(expected("mixtral"), em.ParallelConfig(ep=1, pp=2), 4, MOE, **options), 2):
        assert max(found.loss, found.aux_loss, found.z_loss, found.gradient[0]) <= TOLERANCE, found


def _drop_the_first_stages_loss(mesh: Mesh) -> None:
    if mesh.coordinate("pp") == 0:
        share = router_losses.RouterLosses.__call__
        mock.patch.object(router_losses.RouterLosses, "__call__", lambda self: share(self) * 0).start()


def _fractions_of_one_stage(mesh: Mesh) -> None:
    silent = mock.Mock(all_reduce=lambda tensor: None)
    mock.patch.object(router_losses, "dist", silent).start()


def _no_gradient_for_the_term(mesh: Mesh) -> None:
    backward = pipeline_schedule._WithTerm.backward

    def without(ctx: Any, gradient: torch.Tensor) -> Any:
        hidden, term = backward(ctx, gradient)
        return hidden, term * 0

    mock.patch.object(pipeline_schedule._WithTerm, "backward", staticmethod(without)).start()


@pytest.mark.parametrize("bug", [_drop_the_first_stages_loss, _fractions_of_one_stage, _no_gradient_for_the_term])
def test_a_stage_that_drops_its_router_loss_is_seen(bug: Callable[[Mesh], None]) -> None:
    want = expected("qwen3_moe")
    for found in shared_ranks(_train, 2, want, em.ParallelConfig(ep=1, pp=2), 4, MOE, bug):
        assert found.router > 1e-2, found


def _move_biases(parallel: em.ParallelConfig, per_micro_batch: bool) -> list[torch.Tensor]:
    """The bias after each step of four micro-batches."""
    model = tiny_model("deepseek_v3")
    mesh = em.init_mesh(parallel)
    em.parallelize(model, mesh, moe=em.MoeConfig(bias_update_rate=bias.RATE))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **OPTIM)
    seen = []
    for step in range(bias.STEPS):
        rows = bias._rows(step)
        mine = rows[mesh.data_rank :: mesh.layout.data_ranks]
        total = sum(len(ids) - 1 for ids, _ in rows)
        batches = [padded(mine[start : start + 2]) for start in range(0, len(mine), 2)]
        for part in [[batch] for batch in batches] if per_micro_batch else [batches]:
            em.forward_backward(model, part, target_tokens=total)
            if per_micro_batch:
                em.update_router_bias(model)
        optimizer.step()
        optimizer.zero_grad()
        em.update_router_bias(model)
        own = ModelView(model).state[bias.BIAS]
        if mesh.coordinate("pp") == mesh.layout.pp - 1:  # deepseek_v3's first block is dense
            seen.append(own.detach().clone())
    return seen


@pytest.mark.slow_cases(r"2-parallel0", why="four ranks stay")
@pytest.mark.parametrize(("world", "parallel"), [(2, {"ep": 1, "pp": 2}), (4, {"ep": 2, "pp": 2})])
def test_biases_move_by_the_whole_steps_counts_on_the_stage_that_has_them(world: int, parallel: dict[str, Any]) -> None:
    want = bias.expected()
    for rank, biases in enumerate(shared_ranks(_move_biases, world, em.ParallelConfig(**parallel), False)):
        assert len(biases) == (0 if rank < world // 2 else bias.STEPS)
        for found, exact in zip(biases, want.biases, strict=False):
            assert torch.allclose(found, exact, atol=1e-6)


def test_a_bias_that_moves_per_micro_batch_is_seen() -> None:
    want = bias.expected()
    *_, biases = shared_ranks(_move_biases, 2, em.ParallelConfig(ep=1, pp=2), True)
    assert not torch.allclose(biases[-1], want.biases[-1], atol=1e-3)
