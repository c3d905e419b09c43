"""Router losses equal the unsharded model's own on the whole global batch: values and every gradient, any layout.

The reference runs all rows of a step in one padded batch through transformers, with its own `load_balancing_loss_func`.
Factors are large, so that a lost, doubled or local auxiliary gradient is far above the tolerance.
"""

import copy
import functools
import inspect
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import expertmesh as em
from expertmesh.anatomy import describe
from expertmesh.experts.balance import chosen_pairs
from expertmesh.experts.layer import layer_of
from expertmesh.step import router_losses
from tests.families.tiny import tiny_config as family_config
from tests.support.errors import refused
from tests.support.models import tiny_model
from tests.support.one_launch import Launched, one_launch
from tests.support.ranks import shared_ranks
from tests.support.reference import Row, padded

AUX, Z = 0.5, 0.05
MOE = em.MoeConfig(aux_loss_coef=AUX, z_loss_coef=Z)
TOLERANCE = 1e-5
# (world size, ep, replicate, rows of a micro-batch): 16 rows, so a step has one micro-batch or four
LAYOUTS = [(1, 1, 1, 16), (1, 1, 1, 4), (2, 2, 1, 2), (4, 2, 1, 4), (4, 4, 1, 1), (4, 2, 2, 1), (4, 1, 2, 4)]
CASES = [("qwen3_moe", layout) for layout in LAYOUTS]
# Attention is a mixture, too, and transformers counts its router twice.
CASES += [("jetmoe", (2, 2, 1, 8))]
CASES += [(family, layout) for family in ("mixtral", "olmoe") for layout in ((2, 2, 1, 8), (4, 4, 1, 1))]


@dataclass(frozen=True, slots=True)
class Expected:
    model: nn.Module
    rows: list[Row]
    loss: float
    aux_loss: float
    z_loss: float
    gradients: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Found:
    loss: float
    aux_loss: float
    z_loss: float
    gradient: tuple[float, str]
    router: float
    load: int


def _rows(count: int) -> list[Row]:
    """Rows of different lengths and numbers of targets; some ranks' rows know one corner of the vocabulary only."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for row in range(count):
        ids = torch.randint(12 if row % 4 == 1 else 96, (5 + row,), generator=generator)
        labels = ids.clone()
        labels[: 2 + row // 2] = -100
        rows.append((ids, labels))
    return rows


@functools.cache
def expected(family: str, count: int = 16, dtype: torch.dtype = torch.float32, **changes: Any) -> Expected:
    initial = tiny_model(family, dtype=dtype, **changes)
    model, rows = copy.deepcopy(initial), _rows(count)
    batch = padded(rows)
    own: Any = inspect.getmodule(type(model))
    output = model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        use_cache=False,
        output_router_logits=True,
    )
    targets = batch["labels"][:, 1:].flatten()
    total = int((targets != -100).sum())
    loss = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), targets, reduction="sum") / total
    aux_loss = own.load_balancing_loss_func(output.router_logits, 8, 2, batch["attention_mask"])
    assert torch.equal(aux_loss, output.aux_loss)
    mask = batch["attention_mask"].flatten().bool()
    z_loss = torch.cat([layer[mask].logsumexp(-1).square() for layer in output.router_logits]).mean()
    (loss + AUX * aux_loss + Z * z_loss).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return Expected(initial, rows, loss.item(), aux_loss.item(), z_loss.item(), gradients)


Prepare = Callable[[list[Row]], dict[str, torch.Tensor]]


def with_losses(
    want: Expected,
    parallel: em.ParallelConfig,
    micro_batch: int,
    prepare: Prepare = padded,
    tamper: Callable[[nn.Module, int], None] | None = None,
    order: dict[str, Any] | None = None,
    **options: Any,
) -> Found:
    model = copy.deepcopy(want.model)
    mesh = em.init_mesh(parallel)
    em.parallelize(model, mesh, **{"moe": MOE, **options})
    if tamper is not None:
        tamper(model, mesh.rank)
    mine = want.rows[mesh.data_rank :: mesh.layout.data_ranks]
    passes = -(-len(want.rows) // mesh.layout.data_ranks)
    batches = []
    for start in range(0, passes, micro_batch):
        part = mine[start : start + micro_batch]
        batch = prepare(part or want.rows[:1])
        if not part:  # as the loader does for a rank that has run out of rows
            nothing = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
            batch |= {"labels": torch.full_like(batch["labels"], -100), "real_tokens": nothing}
        batches.append(batch)
    total = sum(int((labels[1:] != -100).sum()) for _, labels in want.rows)
    loss = torch.zeros((), dtype=torch.float64)
    router: Any
    if order is not None:
        router = em.forward_backward(model, batches, target_tokens=total, chunk_tokens=16, **order)
        loss = router.loss
    else:
        with em.router_losses(model, batches) as router:
            for batch in batches:
                share = em.causal_lm_loss(model, batch, target_tokens=total, chunk_tokens=16)
                (share + router()).backward()
                loss += share.detach()
    values = torch.stack([loss, router.aux_loss.double(), router.z_loss.double()])
    dist.all_reduce(values)
    gradients = {name: _full(p.grad) for name, p in model.named_parameters()}
    errors = {n: float((g - want.gradients[n]).norm() / want.gradients[n].norm()) for n, g in gradients.items()}
    assert all(math.isfinite(error) for error in errors.values()), errors  # max would pass over a NaN
    routers = max(error for name, error in errors.items() if ".gate." in name or ".router." in name)
    relative = (float(a) / b - 1 for a, b in zip(values, (want.loss, want.aux_loss, want.z_loss), strict=True))
    worst = max((error, name) for name, error in errors.items())
    loads = [layer_of(model.get_submodule(spec.name)).tokens_per_expert.counts_E for spec in describe(model).experts]
    load = torch.stack([load_E for load_E in loads if load_E is not None]).sum()
    dist.all_reduce(load)
    return Found(*(abs(each) for each in relative), worst, routers, int(load))


def _full(tensor: Any) -> torch.Tensor:
    full: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.clone()


def _case(want: Expected, layout: tuple[int, int, int, int], **options: Any) -> tuple[int, Callable[[], Found]]:
    world, ep, replicate, micro_batch = layout
    parallel = em.ParallelConfig(ep=ep, replicate=replicate)
    return world, lambda: with_losses(want, parallel, micro_batch, **options)


def _prove(launched: Launched, want: Expected, tolerance: float = TOLERANCE) -> None:
    for each in launched():
        assert max(each.loss, each.aux_loss, each.z_loss, each.gradient[0]) <= tolerance, each
        # Top 2 in two layers: neither the counting forwards nor recomputed ones are load.
        assert each.load == 2 * 2 * sum(len(ids) for ids, _ in want.rows)


@pytest.mark.slow_cases(
    r"(qwen3_moe-layout[012345]|mixtral-layout8|olmoe-.*)", why="pairwise over families and layouts"
)
@pytest.mark.parametrize(("family", "layout"), CASES)
@one_launch(lambda family, layout: _case(expected(family), layout))
def test_values_and_every_gradient_equal_the_unsharded_models_own_losses(
    launched: Launched, family: str, layout: tuple[int, int, int, int]
) -> None:
    _prove(launched, expected(family))


@pytest.mark.slow_cases(r"layout1-selective", why="full stays")
@pytest.mark.parametrize(("layout", "mode"), [((2, 2, 1, 8), "full"), ((4, 2, 1, 2), "selective")])
@one_launch(lambda layout, mode: _case(expected("qwen3_moe"), layout, activation_checkpointing=mode))
def test_checkpointed_blocks_add_nothing_twice(
    launched: Launched, layout: tuple[int, int, int, int], mode: str
) -> None:
    _prove(launched, expected("qwen3_moe"))


@one_launch(lambda: _case(expected("mixtral", count=5), (4, 2, 1, 1)))
def test_ranks_without_rows_of_their_own_count_nothing(launched: Launched) -> None:
    _prove(launched, expected("mixtral", count=5))


def _by_layer(round: int | None) -> tuple[int, Callable[[], Found]]:
    order = {"accumulate": "by_layer", "round": round}
    return _case(expected("qwen3_moe"), (2, 2, 1, 2), order=order, activation_checkpointing="full")


@pytest.mark.parametrize("round", [None, 2])
@one_launch(_by_layer)
def test_by_layer_the_fractions_are_those_of_the_whole_step(launched: Launched, round: int | None) -> None:
    _prove(launched, expected("qwen3_moe"))


ORDERS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "by_micro_batch": ({"ep": 2}, {}),
    "by_layer": ({"ep": 2}, {"accumulate": "by_layer", "round": 4}),
    "in_rounds": ({"ep": 2}, {"accumulate": "by_layer", "round": 2}),
    "stages": ({"pp": 2}, {}),
}


def _deepseek_v4() -> nn.Module:
    """Its first layers choose experts by a hash, and have no router logits."""
    torch.manual_seed(5)
    model: nn.Module = AutoModelForCausalLM.from_config(family_config("DeepseekV4ForCausalLM", "deepseek_v4"))
    return model.float()


def _figures_of_two_steps(family: str, moe: em.MoeConfig, order: str) -> list[list[float]]:
    """Of each step: auxiliary loss, z-loss, norm."""
    parallel, options = ORDERS[order]
    model = _deepseek_v4() if family == "deepseek_v4" else tiny_model(family)
    mesh = em.init_mesh(em.ParallelConfig(**parallel))
    em.parallelize(model, mesh, moe=moe)
    rows = _rows(16)
    mine, of_one = rows[mesh.data_rank :: mesh.layout.data_ranks], 4 // mesh.layout.data_ranks
    batches = [padded(mine[start : start + of_one]) for start in range(0, len(mine), of_one)]
    found = []
    for _ in range(2):
        losses = em.forward_backward(model, batches, target_tokens=100, chunk_tokens=16, **options)
        values = torch.stack([losses.aux_loss.double(), losses.z_loss.double()])
        dist.all_reduce(values)
        found.append([*values.tolist(), float(em.clip_grad_norm_(model, None))])
        model.zero_grad()
    return found


@pytest.mark.slow_cases(r"(jetmoe-moe0|deepseek_v4-moe2-(by_layer|in_rounds)).*", why="the z-loss alone stays")
@pytest.mark.parametrize("order", [order for order in ORDERS if order != "by_micro_batch"])
@pytest.mark.parametrize(
    ("family", "moe"),
    [("jetmoe", MOE), ("jetmoe", em.MoeConfig(z_loss_coef=Z)), ("deepseek_v4", em.MoeConfig(z_loss_coef=Z))],
)
def test_routers_of_attention_and_layers_without_logits_count_alike_in_every_order(
    family: str, moe: em.MoeConfig, order: str
) -> None:
    wanted = shared_ranks(_figures_of_two_steps, 2, family, moe, "by_micro_batch")
    assert shared_ranks(_figures_of_two_steps, 2, family, moe, order)[0] == [
        pytest.approx(each, rel=TOLERANCE) for each in wanted[0]
    ]


def packed_rows(rows: list[Row]) -> dict[str, torch.Tensor]:
    """All rows in one, each with positions of its own, and a tail of padding."""
    lengths = [len(ids) for ids, _ in rows] + [3]
    labels = torch.cat([F.pad(labels[1:], (1, 0), value=-100) for _, labels in rows])
    return {
        "input_ids": F.pad(torch.cat([ids for ids, _ in rows]), (0, 3))[None],
        "labels": F.pad(labels, (0, 3), value=-100)[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "real_tokens": (torch.arange(sum(lengths)) < sum(lengths) - 3)[None],
    }


@pytest.mark.slow_cases(r"layout0", why="two ranks stay")
@pytest.mark.parametrize("layout", [(1, 1, 1, 16), (2, 2, 1, 2)])
@one_launch(lambda layout: _case(expected("qwen3_moe"), layout, prepare=packed_rows))
def test_packed_rows_leave_their_padding_out(launched: Launched, layout: tuple[int, int, int, int]) -> None:
    _prove(launched, expected("qwen3_moe"))


def _local_fractions(model: nn.Module, rank: int) -> None:
    """Each rank's own auxiliary loss, so that their sum is the loss times the ranks (platform: Trainer, NeMo 1408)."""
    silent = SimpleNamespace(all_reduce=lambda *args, **kwargs: None)
    mock.patch.object(router_losses, "dist", silent).start()


def _no_share_on_one_rank(model: nn.Module, rank: int) -> None:
    if rank == 1:
        share = router_losses.RouterLosses.__call__
        mock.patch.object(router_losses.RouterLosses, "__call__", lambda self: share(self) * 0).start()


def _fractions_of_the_first_micro_batch(model: nn.Module, rank: int) -> None:
    run_ahead = router_losses.RouterLosses.run_ahead
    first = lambda self, batches: (setattr(self, "_real", self._real[:1]), run_ahead(self, batches[:1]))  # noqa: E731
    mock.patch.object(router_losses.RouterLosses, "run_ahead", first).start()


def _share_per_micro_batch(model: nn.Module, rank: int) -> None:
    share = router_losses.RouterLosses.__call__
    mock.patch.object(router_losses.RouterLosses, "__call__", lambda self: share(self) * 4).start()


@pytest.mark.parametrize(
    "bug", [_local_fractions, _no_share_on_one_rank, _fractions_of_the_first_micro_batch, _share_per_micro_batch]
)
def test_a_planted_bug_turns_the_comparison_red(bug: Callable[[nn.Module, int], None]) -> None:
    world, train = _case(expected("qwen3_moe"), (2, 2, 1, 2), tamper=bug)
    for found in shared_ranks(train, world):
        assert found.router > 1e-2, found


class _Collectives(TorchDispatchMode):
    """The name of each collective, and the bytes of each all-reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.reduced: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("c10d::"):
            self.names.append(name)
        if name == "c10d::allreduce_":
            self.reduced += [tensor.numel() * tensor.element_size() for tensor in args[0]]
        return func(*args, **(kwargs or {}))


def _communicate(want: Expected, moe: em.MoeConfig, micro_batches: int) -> tuple[int, list[int]]:
    """How many collectives one step issues, and the bytes of each all-reduce among them."""
    model = copy.deepcopy(want.model)
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=2)), moe=moe)
    batches = [padded(want.rows[:2])] * micro_batches
    with _Collectives() as seen, em.router_losses(model, batches) as router:
        for batch in batches:
            (em.causal_lm_loss(model, batch, target_tokens=30) + router()).backward()
    return len(seen.names), seen.reduced


@pytest.mark.slow_cases(r"1", why="three micro-batches stay")
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_step_costs_one_small_all_reduce_and_nothing_where_the_losses_are_off(micro_batches: int) -> None:
    want, settings = expected("mixtral"), (em.MoeConfig(), em.MoeConfig(z_loss_coef=Z), MOE)
    off, z_only, both = shared_ranks(lambda: [_communicate(want, moe, micro_batches) for moe in settings], 2)[0]
    assert off[1] == []
    assert z_only == (off[0] + 1, [(8 + 2) * 8])  # E + 2 integers
    assert both[1] == [(8 + 2) * 8]
    assert both[0] == off[0] + 1 if micro_batches == 1 else both[0] > off[0] + 1  # the counting forwards communicate


@one_launch(lambda: _case(expected("qwen3_moe", dtype=torch.float64), (2, 2, 1, 4)))
def test_in_double_precision_only_transformers_own_rounding_is_left(launched: Launched) -> None:
    _prove(launched, expected("qwen3_moe", dtype=torch.float64), 1e-6)


def _without_a_step(moe: em.MoeConfig | None, changes: dict[str, Any], calls: str = "loss") -> None:
    model = tiny_model("mixtral", **changes)
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=1)), moe=moe)
    batch = padded(_rows(2))
    with torch.no_grad():
        em.causal_lm_loss(model, batch, target_tokens=9)  # an evaluation has no router loss
    if calls == "loss":
        em.causal_lm_loss(model, batch, target_tokens=9)
    with em.router_losses(model, [batch]) as router:
        em.causal_lm_loss(model, batch, target_tokens=9)
        if calls == "twice":
            em.causal_lm_loss(model, batch, target_tokens=9)
        if calls != "never":
            router()


def _with_an_own_loss() -> None:
    own = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    with refused("moe.loss-outside-router-losses"):
        _without_a_step(None, own)
    with refused("moe.router-loss-incomplete"):
        _without_a_step(None, own, "never")
    with refused("moe.router-loss-order"):
        _without_a_step(None, own, "twice")
    _without_a_step(em.MoeConfig(aux_loss_coef=0.0), own)
    _without_a_step(None, {})


def test_a_models_own_auxiliary_loss_is_not_dropped_silently() -> None:
    shared_ranks(_with_an_own_loss, 1)


def _in_a_loop(ep: int) -> None:
    batch = padded(_rows(2))
    for moe in (em.MoeConfig(z_loss_coef=Z), em.MoeConfig(aux_loss_coef=AUX), None):
        model: Any = tiny_model("qwen3_moe")
        em.like_ddp(em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=ep)), moe=moe))
        loops: list[Callable[[], Any]] = [
            lambda model=model: model(**batch).loss.backward(),
            lambda model=model: em.accumulate_by_layer(
                model, [batch], lambda number: model(**batch).logits.sum().backward()
            ),
        ]
        for loop in loops:
            with refused("moe.loss-outside-router-losses") if moe is not None else nullcontext():
                loop()
        em.forward_backward(model, [batch], target_tokens=9)
        model.eval()(**batch)


@pytest.mark.parametrize("ep", [1, 2])
def test_what_moe_asks_for_is_not_dropped_silently_in_a_loop_with_the_models_own_loss(ep: int) -> None:
    shared_ranks(_in_a_loop, ep, ep)


OWN_FACTOR: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": AUX}


@one_launch(lambda: _case(expected("mixtral", **OWN_FACTOR), (2, 2, 1, 2), moe=em.MoeConfig(z_loss_coef=Z)))
def test_from_model_takes_the_models_own_factor(launched: Launched) -> None:
    _prove(launched, expected("mixtral", **OWN_FACTOR))


def _adapter_errors(want: Expected) -> list[float]:
    """How far the gradients of adapters' B are from what the unsharded model's own weight gradients make of them."""
    model, lora = copy.deepcopy(want.model), em.LoraConfig(r=4, targets=("attention",))
    mesh = em.init_mesh(em.ParallelConfig(ep=2))
    em.parallelize(model, mesh, moe=MOE, lora=lora)
    batches = [padded(want.rows[mesh.data_rank + start :: 4]) for start in (0, 2)]
    total = sum(int((labels[1:] != -100).sum()) for _, labels in want.rows)
    with em.router_losses(model, batches) as router:
        for batch in batches:
            (em.causal_lm_loss(model, batch, target_tokens=total) + router()).backward()
    found = {
        name: _full(p if name.endswith("A") else p.grad) for name, p in model.named_parameters() if "lora_" in name
    }
    errors = []
    for name, gradient in found.items():
        if name.endswith("B"):  # zero at the start, so the model is still the reference's
            weight = want.gradients[name.removesuffix("lora_B").rstrip("._") + ".weight"]
            exact = lora.scaling * weight @ found[name.removesuffix("B") + "A"].T
            errors.append(float((gradient - exact).norm() / exact.norm()))
    return errors


def _case_of_adapters() -> tuple[int, Callable[[], list[float]]]:
    want = expected("qwen3_moe")
    return 2, lambda: _adapter_errors(want)


@one_launch(_case_of_adapters)
def test_adapters_that_feed_the_routers_get_the_exact_gradient(launched: Launched) -> None:
    for errors in launched():
        assert len(errors) == 2 * 4
        assert max(errors) <= TOLERANCE


def _counted_and_trained() -> tuple[list[float], list[float]]:
    """Chosen pairs `[E]` of a step: by the counting forwards, and by those that train."""
    model = tiny_model("mixtral", router_jitter_noise=0.5)
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=1)), moe=MOE)
    batches = [padded(_rows(8)[:4]), padded(_rows(8)[4:])]
    trained = torch.zeros(8, dtype=torch.int64)
    with em.router_losses(model, batches) as router:
        add = router.add

        def adding(logits: Any, batch: Any) -> None:
            nonlocal trained
            trained = trained + sum(chosen_pairs(each, 2, batch["attention_mask"].flatten()) for each in logits)
            add(logits, batch)

        with mock.patch.object(router, "add", adding):
            for batch in batches:
                (em.causal_lm_loss(model, batch, target_tokens=9) + router()).backward()
        assert router._step is not None
        return router._step.pairs_E.tolist(), trained.tolist()


def test_counting_forwards_draw_the_random_numbers_of_training() -> None:
    counted, trained = shared_ranks(_counted_and_trained, 1)[0]
    assert counted == trained
