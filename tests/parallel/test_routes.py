"""Experts that a batch's routes choose are those that compute, as in the unsharded model with the same choice.

The reference has routers written by hand here, which take the experts that they are given and nothing of the code under
test. Routes are random, so that they are far from a router's own choice, and a third of the tokens have none.
"""

import copy
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import expertmesh as em
from expertmesh.anatomy import describe
from expertmesh.config.errors import InputError
from expertmesh.experts.micro_batch import Routing, routing
from expertmesh.parallel.routes import confirm_routes, routed
from tests.families.catalogue import Family, families
from tests.families.tiny import model_class_of, tiny_config
from tests.support.errors import refused
from tests.support.models import tiny_model
from tests.support.one_launch import Launched, one_launch
from tests.support.ranks import shared_ranks
from tests.support.reference import Row, forward_and_backward, of_all_stages, padded, worst

ROWS, LAYERS, EXPERTS, TOP_K = 8, 2, 8, 2
Scores = Callable[[Any, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _of_softmax(router: Any, hidden_TH: torch.Tensor, index_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits_TE = hidden_TH @ router.weight.T
    weight_TK = logits_TE.softmax(-1, dtype=torch.float32).gather(1, index_TK)
    return logits_TE, weight_TK / weight_TK.sum(-1, keepdim=True)


def _of_logits(router: Any, hidden_TH: torch.Tensor, index_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits_TE = hidden_TH @ router.weight.T + router.bias
    return logits_TE, logits_TE.gather(1, index_TK).softmax(-1)


def _of_sigmoid(router: Any, hidden_TH: torch.Tensor, index_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits_TE = hidden_TH.float() @ router.weight.float().T
    weight_TK = logits_TE.sigmoid().gather(1, index_TK)
    return logits_TE, 1.5 * weight_TK / (weight_TK.sum(-1, keepdim=True) + 1e-20)


BY_HAND: dict[str, Scores] = {
    "qwen3_moe": _of_softmax,
    "mixtral": _of_softmax,
    "gpt_oss": _of_logits,
    "deepseek_v3": _of_sigmoid,
}


@dataclass(frozen=True, slots=True)
class Expected:
    model: nn.Module
    rows: list[Row]
    routes: list[torch.Tensor]
    loss: float
    gradients: dict[str, torch.Tensor]


def _layers(family: str) -> int:
    return 1 if family == "deepseek_v3" else LAYERS  # its first layer is dense


def random_routes(length: int, layers: int, generator: torch.Generator) -> torch.Tensor:
    """Routes of one row, int32 `[S, L, K]`; every third token has none."""
    routes = torch.rand(length, layers, EXPERTS, generator=generator).argsort(-1)[..., :TOP_K].int()
    routes[::3] = -1
    return routes


@functools.cache
def expected(family: str, dtype: torch.dtype = torch.float32) -> Expected:
    generator = torch.Generator().manual_seed(5)
    initial = tiny_model(family, dtype=dtype)
    rows, routes = [], []
    for row in range(ROWS):
        ids = torch.randint(96, (7 + 2 * row,), generator=generator)
        labels = ids.clone()
        labels[: 2 + row // 2] = -100
        rows.append((ids, labels))
        routes.append(random_routes(len(ids), _layers(family), generator))
    model: Any = copy.deepcopy(initial)
    now = force(model, family)
    total = sum(int((labels[1:] != -100).sum()) for _, labels in rows)
    loss = torch.zeros((), dtype=torch.float64)
    for (ids, labels), of_row in zip(rows, routes, strict=True):
        now[:] = [of_row.long()]
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        loss = loss + F.cross_entropy(logits, labels[1:], reduction="sum") / total
    loss.backward()
    return Expected(
        initial, rows, routes, float(loss.detach()), {n: p.grad.clone() for n, p in model.named_parameters()}
    )


def force(model: nn.Module, family: str) -> list[torch.Tensor]:
    """Give an unsharded model routers written by hand. Returns the place for the routes, `[T, L, K]`, of a forward."""
    now: list[torch.Tensor] = []
    for number, spec in enumerate(describe(model).experts):
        block: Any = model.get_submodule(spec.name.rpartition(".")[0])
        router = block.router if family == "gpt_oss" else block.gate
        router.forward = functools.partial(_forced, router, router.forward, BY_HAND[family], number, now)
    return now


def _forced(
    router: Any, own: Callable[..., Any], scores: Scores, number: int, now: list[torch.Tensor], hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden_TH, route_TK = hidden.reshape(-1, hidden.shape[-1]), now[0][:, number]
    with torch.no_grad():
        index_TK = torch.where(route_TK >= 0, route_TK, own(hidden_TH)[2])
    logits_TE, weight_TK = scores(router, hidden_TH, index_TK)
    return logits_TE, weight_TK.to(hidden.dtype), index_TK


def batch_of(rows: list[Row], routes: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    batch = padded(rows)
    length = batch["input_ids"].shape[1]
    return batch | {"routes": torch.stack([F.pad(x, (0, 0, 0, 0, 0, length - len(x)), value=-1) for x in routes])}


def packed(rows: list[Row], routes: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """All rows in one, each with positions of its own."""
    labels = [F.pad(labels[1:], (1, 0), value=-100) for _, labels in rows]
    return {
        "input_ids": torch.cat([ids for ids, _ in rows])[None],
        "labels": torch.cat(labels)[None],
        "position_ids": torch.cat([torch.arange(len(ids)) for ids, _ in rows])[None],
        "routes": torch.cat(routes)[None],
    }


@dataclass(frozen=True, slots=True)
class Found:
    loss: float
    gradient: tuple[float, str]


Prepare = Callable[[list[Row], list[torch.Tensor]], dict[str, torch.Tensor]]


def train(
    want: Expected,
    axes: dict[str, int],
    *,
    prepare: Prepare = batch_of,
    order: dict[str, Any] | None = None,
    lora: em.LoraConfig | None = None,
    **options: Any,
) -> Found:
    """One step in micro-batches of two rows, each data rank on rows of its own; how far it is from the reference."""
    model: Any = copy.deepcopy(want.model)
    mesh = em.init_mesh(em.ParallelConfig(**axes))
    em.parallelize(model, mesh, lora=lora, **options)
    total = sum(int((labels[1:] != -100).sum()) for _, labels in want.rows)
    mine = range(mesh.data_rank, ROWS, mesh.layout.data_ranks)
    pairs = [mine[start : start + 2] for start in range(0, len(mine), 2)]
    batches = [prepare([want.rows[row] for row in pair], [want.routes[row] for row in pair]) for pair in pairs]
    loss = forward_and_backward(model, mesh, batches, total, order)
    gradients = of_all_stages(model, mesh, lambda parameter: parameter.grad)
    wanted = want.gradients
    if lora is not None:
        # Of B, which starts as zero: that of the weight times A.
        values = of_all_stages(model, mesh, lambda parameter: parameter.detach())
        downs = [name for name in gradients if name.endswith("lora_A")]
        assert not any(gradients[name].any() for name in downs)
        gradients = {name: gradient for name, gradient in gradients.items() if name not in downs}
        scale = lora.alpha / lora.r
        weights = {name: re.sub(r"\.lora_A$", ".weight", name).removesuffix("_lora_A") for name in downs}
        wanted = {
            name.replace("lora_A", "lora_B"): scale * want.gradients[weight] @ values[name].mT
            for name, weight in weights.items()
        }
    return Found(abs(float(loss) / want.loss - 1), worst(gradients, wanted))


FULL = {"activation_checkpointing": "full"}
LORA = {"lora": em.LoraConfig(r=4, targets="all-linear")}
CASES: list[tuple[str, int, dict[str, int], dict[str, Any]]] = [
    ("qwen3_moe", 2, {"ep": 2}, {"order": {}}),
    ("qwen3_moe", 4, {"ep": 2, "replicate": 2}, FULL),
    ("deepseek_v3", 2, {"ep": 1}, FULL),
    ("gpt_oss", 4, {"ep": 4}, {"activation_checkpointing": "selective"}),
    ("mixtral", 2, {"ep": 2}, LORA),
    ("deepseek_v3", 2, {"tp": 2, "ep": 2}, {}),
    ("qwen3_moe", 2, {"ep": 2}, {"order": {"accumulate": "by_layer"}, **FULL}),
    ("qwen3_moe", 2, {"ep": 2}, {"prepare": packed}),
    ("mixtral", 4, {"cp": 2, "ep": 2}, FULL),
    ("qwen3_moe", 2, {"pp": 2}, FULL),
]


@pytest.mark.slow_cases(
    r"(qwen3_moe-4|gpt_oss|deepseek_v3-2-axes2).*", why="ep, tp, cp, pp, the other order and adapters stay"
)
@pytest.mark.parametrize(("family", "world", "axes", "options"), CASES)
@one_launch(lambda family, world, axes, options: (world, lambda: train(expected(family), axes, **options)))
def test_loss_and_gradients_equal_the_unsharded_model_with_the_same_routes(
    launched: Launched, family: str, world: int, axes: dict[str, int], options: dict[str, Any]
) -> None:
    for found in launched():
        assert max(found.loss, found.gradient[0]) <= 1e-5, found


@one_launch(lambda: (2, lambda: train(expected("gpt_oss", torch.float64), {"ep": 2}, moe=em.MoeConfig(compute="loop"))))
def test_in_double_precision_only_rounding_is_left(launched: Launched) -> None:
    for found in launched():
        assert max(found.loss, found.gradient[0]) <= 1e-10, found


def _shifted(dim: int, rows: list[Row], routes: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return batch_of(rows, [of_row.roll(1, dim) for of_row in routes])


@pytest.mark.parametrize("dim", [0, 1], ids=["token", "layer"])
@one_launch(lambda dim: (2, lambda: train(expected("qwen3_moe"), {"ep": 2}, prepare=functools.partial(_shifted, dim))))
def test_routes_shifted_by_one_turn_the_comparison_red(launched: Launched, dim: int) -> None:
    for found in launched():
        assert found.gradient[0] > 1e-2, found


def _recorded(axes: dict[str, int]) -> None:
    """On each rank, of rows of its own where the axes do not share them."""
    model: Any = tiny_model("qwen3_moe")
    mesh = em.init_mesh(em.ParallelConfig(**axes))
    em.parallelize(model, mesh, activation_checkpointing="full")
    generator = torch.Generator().manual_seed(mesh.data_rank)
    ids = torch.randint(96, (2, 9), generator=generator)  # tp makes it ten
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}

    def run(**routes: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        model.zero_grad()
        loss = em.causal_lm_loss(model, {**batch, **routes}, target_tokens=32)
        loss.backward()
        return loss.detach(), [p.grad.to_local().clone() for p in model.parameters()]

    with em.record_routes(model) as recorded:
        loss, gradients = run()
        again, same = run(routes=recorded[0])
        random = torch.stack([random_routes(9, LAYERS, generator) for _ in ids])
        other, _ = run(routes=random)
    run()
    assert len(recorded) == 3
    assert torch.equal(recorded[0], recorded[1])
    assert recorded[0].dtype == torch.int32
    assert torch.equal(loss, again)
    assert all(map(torch.equal, gradients, same))
    assert not torch.equal(loss, other)
    used = recorded[2][:, :9]
    assert torch.equal(torch.where(random < 0, used, random), used)
    assert int(used.min()) >= 0


@pytest.mark.parametrize("axes", [{"ep": 2}, {"tp": 2, "ep": 1}, {"cp": 2, "ep": 1}], ids=str)
@one_launch(lambda axes: (2, lambda: _recorded(axes)))
def test_recorded_routes_replayed_give_the_same_bits(launched: Launched, axes: dict[str, int]) -> None:
    launched()


def _called() -> None:
    """A call of the model itself, and its generation token by token."""
    model: Any = tiny_model("qwen3_moe")
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=2)))
    model.eval()
    ids = torch.randint(96, (2, 5), generator=torch.Generator().manual_seed(dist.get_rank()))
    with torch.no_grad(), em.record_routes(model) as recorded:
        tokens = model.generate(input_ids=ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)
        generated = torch.cat(recorded, dim=1)
        model(input_ids=tokens[:, :-1])
        assert torch.equal(generated, recorded[-1])
        own = model(input_ids=tokens[:, :-1]).logits
        assert torch.equal(own, model(input_ids=tokens[:, :-1], routes=generated).logits)
        assert not torch.equal(own, model(input_ids=tokens[:, :-1], routes=(generated + 1) % EXPERTS).logits)


def _refusals() -> None:
    """One rank's routes are wrong; both refuse them."""
    model: Any = tiny_model("qwen3_moe")
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=2)))
    ids = torch.arange(6).view(1, 6)
    right = torch.tensor([0, 7], dtype=torch.int32).expand(1, 6, LAYERS, TOP_K).clone()
    for values, key, naming in (
        (right[:, :5], "data.batch-shape", "(1, 6, 2, 2)"),
        (right[:, :, :1], "data.batch-shape", "(1, 6, 2, 2)"),
        (right.float(), "data.batch-shape", "float32"),
        (_with(right, [0, 8]), "data.routes", "position 2, MoE layer 1 are [0, 8]"),
        (_with(right, [-2, -2]), "data.routes", "[-2, -2]"),
        (_with(right, [3, 3]), "data.routes", "[3, 3]"),
        (_with(right, [3, -1]), "data.routes", "[3, -1]"),
    ):
        routes = values if dist.get_rank() == 1 else right
        with refused(key, naming=naming):
            em.causal_lm_loss(model, {"input_ids": ids, "labels": ids, "routes": routes}, target_tokens=10)
    order = {"target_tokens": 20, "accumulate": "by_layer"}
    with refused("layout.routes-not-recorded", naming="1 of 2"), em.record_routes(model):
        em.forward_backward(model, [{"input_ids": ids, "labels": ids}] * 2, **order)


def _with(routes: torch.Tensor, experts: list[int]) -> torch.Tensor:
    changed = routes.clone()
    changed[0, 2, 1] = torch.tensor(experts)
    return changed


def _refused_through_stages() -> None:
    model: Any = tiny_model("qwen3_moe")
    em.parallelize(model, em.init_mesh(em.ParallelConfig(pp=2)))
    with refused("layout.routes-not-recorded"), em.record_routes(model):
        pass
    ids = torch.arange(6).view(1, 6)
    routes = torch.full((1, 6, LAYERS, TOP_K), 8 if dist.get_rank() == 1 else -1, dtype=torch.int32)
    with refused("data.routes"):
        em.forward_backward(model, [{"input_ids": ids, "labels": ids, "routes": routes}], target_tokens=5)


@pytest.mark.parametrize("case", [_called, _refusals, _refused_through_stages])
def test_a_call_takes_routes_and_wrong_ones_are_refused(case: Callable[[], None]) -> None:
    shared_ranks(case, 2)


@pytest.mark.parametrize(
    ("name", "changes", "naming"),
    [
        ("phimoe", {}, "layers.0.mlp"),
        # Its weights come from scores in which other groups are zero.
        ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}, "mlp"),
        ("deepseek_v4", {}, "layers.0.mlp"),
    ],
)
def test_a_family_that_chooses_otherwise_is_refused(name: str, changes: dict[str, Any], naming: str) -> None:
    family = next(family for family in families() if family.name == name)
    with refused("model.routes-unsupported", naming=naming):
        _confirm(family, **changes)


def _confirm(family: Family, **changes: Any) -> None:
    assert family.model_class is not None
    with torch.device("meta"):
        config = tiny_config(family.model_class, family.name, **changes)
        model: Any = model_class_of(family.model_class, family.name)._from_config(config)
    confirm_routes(model, describe(model))


def test_a_layer_that_gets_a_part_of_the_tokens_is_refused() -> None:
    model: Any = tiny_model("qwen3_moe")
    spec = describe(model).experts[0]
    routes = torch.zeros(5, LAYERS, TOP_K, dtype=torch.int32)
    token = routing.set(Routing(1, routes))
    try:
        with refused("model.routes-unsupported", naming=f"{spec.name} gets 3 of a micro-batch's 5 tokens"):
            routed(torch.topk, spec, 0, torch.rand(3, EXPERTS), TOP_K)
    finally:
        routing.reset(token)


@pytest.mark.slow(why="builds every family; four of them are replayed above")
def test_all_other_families_follow_routes() -> None:
    def refusal(family: Family) -> str | None:
        try:
            _confirm(family)
        except InputError as error:
            return error.key
        return None

    # Those that are not trained at all have other keys.
    with_class = [family for family in families() if family.model_class is not None and family.interface]
    refusals = {family.name: refusal(family) for family in with_class if family.name != "qwen3_omni_moe"}
    assert [n for n, key in refusals.items() if key == "model.routes-unsupported"] == ["deepseek_v4", "phimoe", "zaya"]
    assert sum(key is None for key in refusals.values()) >= 57
