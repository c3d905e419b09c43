"""Adapters trained on ranks are stock PEFT's on the unsharded model: loss, norm, every gradient, four AdamW steps.

Real gloo ranks, different rows on every data rank, very uneven target counts, accumulation, clipping; every adapter
starts with a random B, read from the files that PEFT wrote. The base is compared bit for bit before and after. The
planted bugs show that each of these comparisons can fail.
"""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import expertmesh as em
from expertmesh.distributed.mesh import Mesh
from expertmesh.experts import expert_mlp
from expertmesh.state.model_view import module_state
from tests.adapters.reference import EXPERTS, AdapterDistance, PeftRun, tiny_peft_run, train_adapters
from tests.parallel.test_uneven_routing import EVERY_ROW, FIRST_EP_GROUP, route_by_half
from tests.support.one_launch import Launched, one_launch
from tests.support.ranks import shared_ranks

Layout = tuple[int, int, int]  # ep, replicate, rows of a micro-batch; the accumulation count follows from 8 rows a step
# By world size; every layout for three families, and each of the others at two (`make families` has them at more).
LAYOUTS: dict[int, list[Layout]] = {1: [(1, 1, 1)], 2: [(2, 1, 2)], 4: [(2, 1, 2), (4, 1, 1), (2, 2, 1)]}
MATRIX = [(family, world, LAYOUTS[world]) for family in ("qwen3_moe", "deepseek_v3", "gpt_oss") for world in LAYOUTS]
MATRIX += [("mixtral", 4, LAYOUTS[4][:2]), ("glm4_moe", 4, LAYOUTS[4][1:]), ("olmoe", 2, LAYOUTS[2])]
MATRIX += [("olmoe", 4, LAYOUTS[4][2:])]
TOLERANCE = 1e-5
Expected = Callable[..., PeftRun]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    @functools.cache
    def run(family: str, **options: Any) -> PeftRun:
        return tiny_peft_run(family, tmp_path_factory.mktemp(family), **options)

    return run


def _train(run: PeftRun, world: int, layouts: list[Layout], **options: Any) -> list[list[AdapterDistance]]:
    """By rank and layout; the ranks are started once for all layouts."""
    return shared_ranks(_case(run, world, layouts, **options)[1], world)


def _case(
    run: PeftRun, world: int, layouts: list[Layout], **options: Any
) -> tuple[int, Callable[[], list[AdapterDistance]]]:
    def all_layouts() -> list[AdapterDistance]:
        parallels = [(em.ParallelConfig(ep=ep, replicate=replicate), micro) for ep, replicate, micro in layouts]
        return [train_adapters(run, parallel, micro, **options) for parallel, micro in parallels]

    return world, all_layouts


def _check(by_rank: list[list[AdapterDistance]], tolerance: float = TOLERANCE) -> None:
    for distances in by_rank:
        for distance in distances:
            distance.check(tolerance)


@pytest.mark.slow_cases(r"olmoe-2-.*", why="two families stay")
@pytest.mark.slow_cases(r"gpt_oss-4-.*", why="test_save.py has GPT-OSS on four ranks, as stock PEFT reads it")
@pytest.mark.slow_cases(
    r"(deepseek_v3-[14]|gpt_oss-[12]|glm4_moe-4|olmoe-4|mixtral-4|qwen3_moe-[14])-.*",
    why="pairwise: each family and each layout is left once",
)
@pytest.mark.parametrize(("family", "world", "layouts"), MATRIX)
@one_launch(lambda expected, family, world, layouts: _case(expected(family), world, layouts))
def test_every_adapter_gradient_and_two_steps_equal_stock_peft(
    launched: Launched, family: str, world: int, layouts: list[Layout]
) -> None:
    _check(launched())


@pytest.mark.slow_cases(
    r"(checkpointed|loop)", why="parallel/test_parity.py has them without adapters, selective stays"
)
@pytest.mark.parametrize(
    "options",
    [
        {"moe": em.MoeConfig(compute="loop")},
        {"activation_checkpointing": True},
        {"activation_checkpointing": "selective"},
    ],
    ids=["loop", "checkpointed", "selective"],
)
@one_launch(lambda expected, options: _case(expected("deepseek_v3"), 4, [(2, 1, 1)], **options))
def test_the_other_ways_to_compute_give_the_same(launched: Launched, options: dict[str, Any]) -> None:
    _check(launched())


@pytest.mark.slow(why="float32 stays")
@one_launch(lambda expected: _case(expected("qwen3_moe", dtype=torch.float64), 4, [(2, 1, 1)]))
def test_in_double_precision_nothing_is_left_but_the_last_digits(launched: Launched) -> None:
    _check(launched(), 1e-10)


@pytest.mark.slow_cases(r"three experts on two", why="six on four stays")
@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 1, 1)], ids=["three experts on two", "six experts on four"])
@one_launch(lambda expected, layout: _case(expected("qwen3_moe", num_experts=6), 4, [layout]))
def test_adapters_that_efsdp_does_not_divide_by_experts_are_sharded_on_a_later_dim(
    launched: Launched, layout: Layout
) -> None:
    _check(launched())


@one_launch(lambda expected: _case(expected("qwen3_moe", lora=(("r", 3), ("use_rslora", True))), 2, [(2, 1, 1)]))
def test_a_rank_that_the_grouped_kernel_does_not_take_and_the_other_scaling(launched: Launched) -> None:
    _check(launched())


# What all-linear means to PEFT in this family: attention, experts and router, with twice the rank for gate and up.
OF_OTHERS = {
    "modules": "all-linear",
    "lora": (
        ("rank_pattern", ((r"layers\.1\.self_attn\.q_proj", 8), ("gate.weight", 2))),
        ("alpha_pattern", (("v_proj", 3.0), ("experts.down_proj", 5.0))),
        ("exclude_modules", ("k_proj",)),
    ),
}


@pytest.mark.slow(why="adapters/test_from_peft.py reads them; one rank for all stays")
def test_ranks_and_scalings_of_their_own_as_other_people_s_adapters_have_them(expected: Expected) -> None:
    run = expected("qwen3_moe", **OF_OTHERS)
    _check(_train(run, 4, [(2, 1, 1), (4, 1, 1)]))
    run_of_base = _train(run, 2, [(2, 1, 1)], tamper=_one_scaling)[0][0]
    with pytest.raises(AssertionError, match="AdapterDistance"):
        run_of_base.check(TOLERANCE)
    assert run_of_base.loss > 1e-3


def _one_scaling(model: nn.Module, mesh: Mesh) -> None:
    """As if alpha_pattern were not there."""
    for module in model.modules():
        if (state := module_state(module)).lora_scaling:
            state.lora_scaling = dict.fromkeys(state.lora_scaling, 2.0)


def test_heads_dense_mlps_and_shared_experts(expected: Expected) -> None:
    parameters = ("shared_experts.gate_proj.weight", "shared_experts.down_proj.weight", "layers.0.mlp.up_proj.weight")
    run = expected("deepseek_v3", modules=("lm_head", "kv_a_proj_with_mqa"), parameters=parameters)
    _check(_train(run, 4, [(2, 1, 2), (2, 2, 1)]))


@pytest.mark.slow(why="experts that say so stay")
def test_transposed_experts_that_do_not_say_so(expected: Expected) -> None:
    """PEFT takes their outputs for inputs, so that its A is our B."""
    parameters = ("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj")
    _check(_train(expected("llama4", parameters=parameters), 2, [(2, 1, 1)]))


@one_launch(lambda expected: _case(expected("qwen3_moe", parameters=tuple(EXPERTS[1:])), 2, [(2, 1, 1), (1, 1, 1)]))
def test_experts_alone_with_everything_before_them_frozen(launched: Launched) -> None:
    """The rows that reach the first layer's experts have no gradient at all."""
    _check(launched())


def _half(expected: Expected, confined: tuple[int, ...]) -> PeftRun:
    return expected("qwen3_moe", dtype=torch.float64, prepare=route_by_half, confined=confined)


@pytest.mark.slow_cases(r"(1|4)-.*", why="ep 2 stays")
@pytest.mark.parametrize(
    ("ep", "confined"),
    [
        (4, EVERY_ROW),  # efsdp 1: ranks 1, 2 and 3 never compute a token
        (2, FIRST_EP_GROUP),  # efsdp 2: of the two ranks that share experts 4..7, one is idle and one is not
        (1, FIRST_EP_GROUP),  # efsdp 4
    ],
)
@one_launch(lambda expected, ep, confined: _case(_half(expected, confined), 4, [(ep, 1, 1)]))
def test_ranks_whose_experts_get_no_token_take_part(
    launched: Launched, expected: Expected, ep: int, confined: tuple[int, ...]
) -> None:
    idle = (
        _half(expected, confined)
        .gradients["base_model.model.model.layers.0.mlp.experts.lora_A.weight"]
        .unflatten(0, (8, -1))
    )
    assert idle[2:4].abs().sum() == 0
    assert bool(idle[4:].abs().sum() == 0) is (confined == EVERY_ROW)
    _check(launched(), 1e-10)


def _adapters_of(model: nn.Module, part: str) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad and part in name}


def _local(parameter: nn.Parameter) -> torch.Tensor:
    data = parameter.data
    return data.to_local() if isinstance(data, DTensor) else data


def _shift_experts_by_one(model: nn.Module, mesh: Mesh) -> None:
    for parameter in _adapters_of(model, "experts.").values():
        local = _local(parameter)
        local.copy_(local.roll(1, 0))


def _every_replica_starts_for_itself(model: nn.Module, mesh: Mesh) -> None:
    """huggingface/transformers 48873: adapters that were made after sharding differ between replicas."""
    if mesh.rank >= 2:
        for parameter in _adapters_of(model, "q_proj").values():
            _local(parameter).mul_(1.01)


def _double_gradients(model: nn.Module, mesh: Mesh) -> None:
    backward = expert_mlp._ExpertMlp.backward

    def doubled(ctx: Any, grad_out_RH: torch.Tensor) -> Any:
        rows, weights, *rest = backward(ctx, grad_out_RH)
        return rows, weights, *(None if gradient is None else 2 * gradient for gradient in rest)

    mock.patch.object(expert_mlp._ExpertMlp, "backward", staticmethod(doubled)).start()


def _train_the_base(model: nn.Module, mesh: Mesh) -> None:
    """modelscope/twinkle: expert parallelism switches training of frozen experts on again."""
    frozen = _local(model.get_parameter("model.layers.1.mlp.experts.down_proj"))

    def nudge(*_: object) -> None:
        with torch.no_grad():
            frozen[0, 0, 0] += 1e-6

    model.register_forward_hook(nudge)


@pytest.mark.parametrize(
    ("bug", "shows_in"),
    [
        (_shift_experts_by_one, "loss"),
        (_every_replica_starts_for_itself, "replicas_equal"),
        (_double_gradients, "gradient"),
        (_train_the_base, "base_unchanged"),
    ],
)
def test_a_planted_bug_turns_the_comparison_red(
    expected: Expected, bug: Callable[[nn.Module, Mesh], None], shows_in: str
) -> None:
    distance = _train(expected("qwen3_moe"), 4, [(2, 2, 1)], tamper=bug)[0][0]
    with pytest.raises(AssertionError):
        distance.check(TOLERANCE)
    found = getattr(distance, shows_in)
    assert found is False if isinstance(found, bool) else (found[0] if isinstance(found, tuple) else found) > 1e-3
