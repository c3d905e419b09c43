"""bf16 compute over fp32 master weights: no further from the fp32 reference than the unsharded bf16 model itself."""

import copy
import functools
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import expertmesh as em
from expertmesh.anatomy import describe
from expertmesh.compat import tree_leaves
from tests.support.models import tiny_model
from tests.support.ranks import shared_ranks
from tests.support.reference import full

FAMILIES = ["qwen3_moe", "mixtral", "deepseek_v3", "ernie4_5_moe"]
IDS = torch.randint(96, (4, 2, 32), generator=torch.Generator().manual_seed(0))  # one micro-batch for each data rank
TARGETS = 4 * 2 * 31
MANY = torch.randint(96, (16, 64), generator=torch.Generator().manual_seed(1))
BF16 = em.PrecisionConfig(params="float32", compute="bfloat16", reduce="float32")


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """All gradients of the unsharded model on the whole batch, in fp32."""
    for ids in IDS:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
        (F.cross_entropy(logits.float(), ids[:, 1:].flatten(), reduction="sum") / TARGETS).backward()
    return {name: parameter.grad.float() for name, parameter in model.named_parameters() if parameter.requires_grad}


def _sharded(model: nn.Module, ep: int, router: Any) -> tuple[dict[str, torch.Tensor], set[str], set[str]]:
    model = copy.deepcopy(model)
    mesh = em.init_mesh(em.ParallelConfig(ep=ep), num_experts=8)
    em.parallelize(model, mesh, precision=BF16, moe=em.MoeConfig(router_dtype=router))
    batch = {"input_ids": IDS[mesh.data_rank], "labels": IDS[mesh.data_rank]}
    em.causal_lm_loss(model, batch, target_tokens=TARGETS).backward()
    dtypes = {str(parameter.dtype) for parameter in model.parameters()}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    grad_dtypes = {str(gradient.dtype) for gradient in gradients.values()}
    return {name: gradient.full_tensor() for name, gradient in gradients.items()}, dtypes, grad_dtypes


@pytest.mark.slow_cases(r"4-compute-qwen3_moe", why="what the family keeps in fp32 stays, and fp32 reductions")
@pytest.mark.slow_cases(
    r"(2-float32-(?!deepseek).*|4-compute-(mixtral|deepseek_v3))",
    why="pairwise over families, layouts and dtypes of routers",
)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("ep", "router"), [(4, "compute"), (2, "float32")])
def test_bf16_error_is_at_most_one_and_a_half_times_the_unsharded_models(family: str, ep: int, router: Any) -> None:
    model = tiny_model(family, initializer_range=0.1)
    exact = gradients_of(copy.deepcopy(model))
    unsharded = gradients_of(_in_bf16(model, family))
    for got, dtypes, grad_dtypes in shared_ranks(_sharded, 4, model, ep, router):
        assert dtypes == grad_dtypes == {"torch.float32"}  # what the optimizer updates, and with what
        errors = {name: float((got[name] - exact[name]).norm() / exact[name].norm()) for name in exact}
        theirs = {name: float((unsharded[name] - exact[name]).norm() / exact[name].norm()) for name in exact}
        assert joint_error(got, exact) <= 1.5 * joint_error(unsharded, exact)
        assert min(errors.values()) > 0  # it did compute in bf16
        # Tensor by tensor the two errors are different draws of the same rounding; none may be out of line.
        worst = max(errors, key=lambda name: errors[name] / theirs[name])
        assert errors[worst] <= 4 * theirs[worst], (worst, errors[worst], theirs[worst])


def joint_error(got: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """The error of all gradients together."""
    return sum(float((got[name] - exact[name]).norm()) ** 2 for name in exact) ** 0.5


def _dtypes_in_forward() -> dict[str, torch.dtype]:
    model = tiny_model("ernie4_5_moe")
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=1), num_experts=8), precision=BF16)
    seen: dict[str, torch.dtype] = {}

    def note(name: str, module: nn.Module, args: Any, out: Any) -> None:
        seen[name] = module.weight.dtype

    for name in ("model.layers.0.mlp.gate", "model.layers.0.self_attn.q_proj"):
        model.get_submodule(name).register_forward_hook(functools.partial(note, name))
    em.causal_lm_loss(model, {"input_ids": IDS[0], "labels": IDS[0]}, target_tokens=TARGETS).backward()
    return seen


def test_what_the_family_keeps_in_fp32_is_never_cast() -> None:
    """ERNIE declares its router so; transformers keeps it in fp32 inside bf16 models."""
    for seen in shared_ranks(_dtypes_in_forward, 2):
        assert seen == {
            "model.layers.0.mlp.gate": torch.float32,
            "model.layers.0.self_attn.q_proj": torch.bfloat16,
        }


def _in_bf16(model: nn.Module, family: str) -> nn.Module:
    """Return a copy in bf16, as `from_pretrained(dtype=torch.bfloat16)` would: the router of ERNIE stays in fp32."""
    model = copy.deepcopy(model)
    for name, parameter in model.named_parameters():
        if family != "ernie4_5_moe" or not name.endswith("gate.weight"):
            parameter.data = parameter.data.to(torch.bfloat16)
    return model


def _all_bf16(family: str) -> tuple[dict[str, torch.Tensor], dict[str, tuple[torch.dtype, torch.dtype]]]:
    model = _in_bf16(tiny_model(family, initializer_range=0.1), family)
    mesh = em.init_mesh(em.ParallelConfig(ep=2))
    em.parallelize(model, mesh)  # without a precision everything keeps the model's dtype
    batch = {"input_ids": IDS[mesh.data_rank], "labels": IDS[mesh.data_rank]}
    em.causal_lm_loss(model, batch, target_tokens=TARGETS).backward()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradients = {name: parameter.grad.full_tensor().float() for name, parameter in trained.items()}
    return gradients, {name: (parameter.dtype, parameter.grad.dtype) for name, parameter in trained.items()}


@pytest.mark.parametrize("family", ["qwen3_moe", "ernie4_5_moe"])
def test_bf16_parameters_are_no_further_off_than_the_unsharded_bf16_model(family: str) -> None:
    model = tiny_model(family, initializer_range=0.1)
    exact, unsharded = gradients_of(copy.deepcopy(model)), gradients_of(_in_bf16(model, family))
    for got, dtypes in shared_ranks(_all_bf16, 4, family):
        in_fp32 = {name for name, each in dtypes.items() if each == (torch.float32, torch.float32)}
        assert in_fp32 == {name for name in exact if family == "ernie4_5_moe" and name.endswith("gate.weight")}
        assert {each for name, each in dtypes.items() if name not in in_fp32} == {(torch.bfloat16, torch.bfloat16)}
        assert 0 < joint_error(got, exact) <= 1.5 * joint_error(unsharded, exact)


def _parameters_in_memory(ep: int) -> int:
    model = tiny_model("qwen3_moe")
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=ep), num_experts=8), precision=BF16)
    held = torch.tensor(sum(parameter.to_local().numel() for parameter in model.parameters()))
    dist.all_reduce(held)
    return int(held)


@pytest.mark.slow_cases(r"[12]", why="four ranks stay")
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_every_parameter_is_held_exactly_once(ep: int) -> None:
    total = sum(parameter.numel() for parameter in tiny_model("qwen3_moe").parameters())
    assert shared_ranks(_parameters_in_memory, 4, ep) == [total] * 4


def _choices(model: nn.Module, seen: dict[str, torch.Tensor]) -> None:
    """Note which experts each token chooses in each layer."""

    def note(name: str, experts: nn.Module, args: Any, kwargs: Any) -> None:
        index = next(value for value in (*args, *kwargs.values()) if not value.is_floating_point())
        seen[name] = index.sort(-1).values

    for spec in describe(model).experts:
        model.get_submodule(spec.name).register_forward_pre_hook(functools.partial(note, spec.name), with_kwargs=True)


def _routed(model: nn.Module, dtype: Literal["float32", "compute"]) -> tuple[dict[str, torch.Tensor], set[str], Any]:
    model, seen, dtypes = copy.deepcopy(model), {}, set()
    mesh = em.init_mesh(em.ParallelConfig(ep=2))
    em.parallelize(model, mesh, precision=BF16, moe=em.MoeConfig(router_dtype=dtype))
    _choices(model, seen)

    def note(router: nn.Module, args: Any, output: Any) -> None:
        given = (args[0], router.weight, *tree_leaves(output))
        dtypes.update(str(tensor.dtype) for tensor in given if tensor.is_floating_point())

    model.get_submodule("model.layers.0.mlp.gate").register_forward_hook(note)
    model(input_ids=MANY, use_cache=False)
    files = {name: full(tensor) for name, tensor in model.state_dict().items()}
    return seen, dtypes, files


def test_routers_in_float32_choose_as_the_fp32_model_for_more_tokens() -> None:
    """Where scores have a large part in common, whose rounding is more than what tells experts apart."""
    model = tiny_model("qwen3_moe", initializer_range=0.1, num_experts=64)
    with torch.no_grad():
        model.get_parameter("model.embed_tokens.weight").add_(0.3)
        for layer in range(2):
            model.get_parameter(f"model.layers.{layer}.mlp.gate.weight").add_(0.1)
    exact: dict[str, torch.Tensor] = {}
    unsharded = copy.deepcopy(model)
    _choices(unsharded, exact)
    unsharded(input_ids=MANY, use_cache=False)
    differ = {}
    for dtype, expected in (("float32", "torch.float32"), ("compute", "torch.bfloat16")):
        seen, dtypes, files = shared_ranks(_routed, 2, model, dtype)[0]
        assert dtypes == {expected}  # input, weight, logits, weights of the experts
        assert all(torch.equal(files[name], tensor) for name, tensor in model.state_dict().items())
        differ[dtype] = sum(int((seen[name] != exact[name]).any(-1).sum()) for name in exact)
    assert 0 < differ["float32"] < 0.5 * differ["compute"], differ
