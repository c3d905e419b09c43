"""The shard plan is what FSDP2 has been told: every parameter in the group and on the mesh that the plan names."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import expertmesh as em
from expertmesh.distributed.layout import Layout, resolve_layout
from expertmesh.model import plan_model
from expertmesh.parallel.apply import shard_model
from expertmesh.parallel.shard_plan import ShardOptions, expert_traffic
from expertmesh.state.model_view import ModelView
from tests.support.errors import refused
from tests.support.models import tiny_model
from tests.support.ranks import shared_ranks

FP32 = em.PrecisionConfig(params="float32", compute="float32", reduce="float32")
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep": {"ep": 2},
    "efsdp": {"ep": 1},
    "tp": {"ep": 2, "tp": 2},
    "replicate": {"ep": 1, "replicate": 2},
    "stages": {"pp": 2, "ep": 1},
}


def _groups(model: nn.Module) -> dict[str, list[str]]:
    """What FSDP2 manages in each module that has a group, by its own account."""
    names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
    found = {}
    for module_name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            group: Any = module._get_fsdp_state()._fsdp_param_group  # type: ignore[no-untyped-call]
            if group is not None:
                found[module_name] = sorted(names[id(each.sharded_param)] for each in group.fsdp_params)
    return found


def _planned_and_done(family: str, axes: dict[str, Any]) -> tuple[Any, Any, bool]:
    torch.manual_seed(0)
    model: Any = tiny_model(family)
    mesh = em.init_mesh(em.ParallelConfig(**axes), num_experts=8)
    plan = plan_model(model, mesh.layout, ShardOptions(FP32, em.MoeConfig(aux_loss_coef=0.0)))
    shard_model(model, plan, mesh)
    here = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    planned = {
        group.modules[0]: names for group in plan.groups if (names := sorted(n for n in group.parameters if n in here))
    }
    split = all(
        isinstance(parameter, DTensor) and plan.splits[name].axis in (parameter.device_mesh.mesh_dim_names or ())
        for name, parameter in model.named_parameters()
        if name in plan.splits
    )
    assert ModelView(model).full is (model if plan.cut is None else plan.view.meta)
    return planned, _groups(model), split


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_parameter_is_in_the_group_that_the_plan_names(layout: str, family: str) -> None:
    for planned, done, split in shared_ranks(_planned_and_done, 2, family, LAYOUTS[layout]):
        assert done == planned
        assert split


def test_planning_leaves_the_model_as_it_is() -> None:
    model: Any = tiny_model("qwen3_moe")
    before = {name: (tensor.dtype, tensor.device.type) for name, tensor in model.state_dict().items()}
    modules = [type(module) for module in model.modules()]
    layout = resolve_layout(em.ParallelConfig(pp=2, ep=1), 2, 8)
    bf16 = em.PrecisionConfig(params="float32", compute="bfloat16")
    plan = plan_model(model, layout, ShardOptions(bf16, em.MoeConfig(aux_loss_coef=0.0)))
    twin: Any = plan.view.meta
    for seen in (model, twin):
        assert [type(module) for module in seen.modules()] == modules
        assert not any("forward" in vars(module) for module in seen.modules())
        assert seen.training == model.training
    assert {name: (tensor.dtype, tensor.device.type) for name, tensor in model.state_dict().items()} == before
    assert {name: tensor.dtype for name, tensor in twin.state_dict().items()} == {n: d for n, (d, _) in before.items()}
    assert plan.layout == Layout(pp=2)


def test_an_ep_that_does_not_divide_the_experts_is_refused_though_the_mesh_knew_no_model() -> None:
    layout = resolve_layout(em.ParallelConfig(ep=4), 4)
    with refused("layout.ep-divides-experts", naming="6 experts"):
        plan_model(tiny_model("qwen3_moe", num_experts=6), layout, ShardOptions(FP32))


@pytest.mark.parametrize("moe", [{"dispatch": "deepep"}, {"dispatch": "all_to_all"}])
def test_auto_takes_no_ep_with_which_an_option_has_no_effect(moe: dict[str, Any]) -> None:
    """A tiny model on a rank of millions of tokens: nothing but the option is against ep 1."""
    for given, expected in (({}, 1), (moe, 2)):
        options = ShardOptions(FP32, em.MoeConfig(aux_loss_coef=0.0, **given))
        traffic = expert_traffic(tiny_model("qwen3_moe"), options, 2**24)
        assert resolve_layout(em.ParallelConfig(), 4, 8, None, traffic).ep == expected
