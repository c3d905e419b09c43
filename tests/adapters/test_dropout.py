"""Dropout of adapters: one mask for each token in every layout, micro-batch and recomputation; none in evaluation."""

import copy
import functools
import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import expertmesh as em
from expertmesh.adapters.plan import attach_adapters
from expertmesh.adapters.targets import Target
from expertmesh.experts import lora_state
from expertmesh.experts.lora_state import Dropout, adapter_state, keep_mask, salt_of
from tests.adapters.reference import TARGETS, random_adapter, take_steps, trainables, worst
from tests.families.tiny import random_model
from tests.support.errors import refused, refused_on_ranks
from tests.support.models import tiny_model
from tests.support.ranks import shared_ranks
from tests.support.reference import rows_of_step

FAMILY = "deepseek_v3"
ROWS = [rows_of_step(step, ()) for step in range(2)]
BLOCKS = {"num_hidden_layers": 3}


def with_dropout(
    adapter: Path,
    ep: int,
    replicate: int = 1,
    micro_batch: int = 1,
    moe: em.MoeConfig | None = None,
    rank_in_mask: bool = False,
    order: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, torch.Tensor]:
    model: Any = tiny_model(FAMILY, **BLOCKS)
    mesh = em.init_mesh(em.ParallelConfig(ep=ep, replicate=replicate))
    lora = em.LoraConfig(from_adapter=str(adapter), dropout=0.3)
    em.parallelize(model, mesh, lora=lora, moe=moe, **options)
    if rank_in_mask:
        mock.patch.object(lora_state, "salt_of", lambda *parts: salt_of(dist.get_rank(), *parts)).start()
    take_steps(model, mesh, ROWS, micro_batch, order)
    return trainables(model)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapter")
    random_adapter(tiny_model(FAMILY, **BLOCKS), directory, *TARGETS[FAMILY])
    return directory


@pytest.fixture(scope="module")
def alone(adapter: Path) -> dict[str, torch.Tensor]:
    (trained,) = shared_ranks(with_dropout, 1, adapter, 1)
    return trained


WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "two rows at once": (2, {"ep": 2, "micro_batch": 2}),
    "selective": (2, {"ep": 2, "activation_checkpointing": "selective"}),
    "by layer": (2, {"ep": 2, "activation_checkpointing": "full", "order": {"accumulate": "by_layer"}}),
    "expert by expert": (2, {"ep": 2, "moe": em.MoeConfig(compute="loop")}),
    "replicas": (4, {"ep": 2, "replicate": 2, "activation_checkpointing": True}),
}


@pytest.mark.slow_cases(r"(expert by expert|replicas|selective)", why="other rows and another order stay")
@pytest.mark.parametrize("way", WAYS)
def test_every_layout_and_batch_drops_the_same(adapter: Path, alone: dict[str, torch.Tensor], way: str) -> None:
    world, options = WAYS[way]
    trained = shared_ranks(functools.partial(with_dropout, adapter, **options), world)[0]
    assert worst(trained, alone)[0] <= 1e-5


def _called(adapter: Path, give: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of a micro-batch, by our own function and by the model called alone, in that order."""
    model: Any = tiny_model(FAMILY, **BLOCKS)
    em.parallelize(
        model, em.init_mesh(em.ParallelConfig(ep=1)), lora=em.LoraConfig(from_adapter=str(adapter), dropout=0.3)
    )
    ids_BS = torch.randint(96, (2, 10), generator=torch.Generator().manual_seed(0))
    numbers = torch.arange(2) + 7
    batch = {"input_ids": ids_BS, "labels": ids_BS, "row_numbers": numbers}
    ours = em.causal_lm_loss(model, batch, target_tokens=18)
    logits = model(input_ids=ids_BS, **({"row_numbers": numbers} if give else {})).logits
    return ours.detach(), F.cross_entropy(logits[:, :-1].flatten(0, 1), ids_BS[:, 1:].flatten()).detach()


def test_a_model_that_is_called_alone_takes_row_numbers_and_is_refused_without(adapter: Path) -> None:
    ((ours, alone),) = shared_ranks(_called, 1, adapter, True)
    torch.testing.assert_close(alone, ours)
    with refused_on_ranks("data.row-numbers-mismatch", naming="none are numbered"):
        shared_ranks(_called, 1, adapter, False)


def test_a_mask_that_depends_on_the_rank_is_seen(adapter: Path, alone: dict[str, torch.Tensor]) -> None:
    trained = shared_ranks(lambda: with_dropout(adapter, 2, rank_in_mask=True), 2)[0]
    assert worst(trained, alone)[0] > 1e-2


def test_a_linear_layers_adapter_drops_its_input_in_training_alone() -> None:
    linear: Any = torch.nn.Linear(6, 5)
    plain = copy.deepcopy(linear)
    root = torch.nn.ModuleDict({"linear": linear})
    target = Target("linear", None, 6, 5, None, "attention", r=2, scaling=16.0)
    attach_adapters(root, [target], {}, em.LoraConfig(r=2, dropout=0.5), torch.float32)
    torch.nn.init.normal_(linear.lora_A)
    torch.nn.init.normal_(linear.lora_B)
    state = adapter_state(root)
    assert state is not None
    state.token_number_T = torch.arange(3)
    x = torch.randn(1, 3, 6)
    kept = keep_mask(Dropout(0.5, salt_of(0, "linear"), torch.arange(3)), 6, torch.float32)
    for dropped, mode in ((x * kept, True), (x, False)):
        added = F.linear(F.linear(dropped, linear.lora_A), linear.lora_B)
        torch.testing.assert_close(root.train(mode)["linear"](x), plain(x) + 16 * added)
        assert added.any()


class _Router(torch.nn.Module):
    def __init__(self, by_linear: bool) -> None:
        super().__init__()
        self.weight, self.by_linear = torch.nn.Parameter(torch.randn(5, 6)), by_linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = F.linear(x.double(), self.weight.double()) if self.by_linear else x @ self.weight.t()
        return logits.softmax(-1)


def _with_router(by_linear: bool) -> Any:
    root: Any = torch.nn.ModuleDict({"router": _Router(by_linear)})
    target = Target("router", "weight", 6, 5, None, "router", r=2, scaling=16.0)
    attach_adapters(root, [target], {}, em.LoraConfig(r=2, dropout=0.5), torch.float32)
    torch.nn.init.normal_(root.router.weight_lora_A)
    torch.nn.init.normal_(root.router.weight_lora_B, std=0.02)  # more would be lost in the softmax
    adapter_state(root).token_number_T = torch.arange(3)  # type: ignore[union-attr]
    return root


def test_a_routers_adapter_drops_its_input_in_training_alone() -> None:
    root, x = _with_router(by_linear=True), torch.randn(3, 6)
    router = root.router
    kept = keep_mask(Dropout(0.5, salt_of(0, "router.weight"), torch.arange(3)), 6, torch.float32)
    for dropped, mode in ((x * kept, True), (x, False)):
        added = F.linear(F.linear(dropped, router.weight_lora_A), router.weight_lora_B)
        expected = (F.linear(x, router.weight) + 16 * added).softmax(-1)
        torch.testing.assert_close(root.train(mode)["router"](x).float(), expected, rtol=1e-4, atol=1e-6)
        assert added.any()


def test_a_router_that_multiplies_in_another_way_is_refused_with_dropout() -> None:
    with refused("lora.dropout-without-token-order", naming="router.weight"):
        _with_router(by_linear=False).router(torch.randn(3, 6))


def test_numbers_are_forgotten_after_a_forward_that_fails() -> None:
    root = torch.nn.ModuleDict({"linear": torch.nn.Linear(6, 5)})  # has no forward of its own
    attach_adapters(root, [Target("linear", None, 6, 5, None, "attention")], {}, em.LoraConfig(r=2), torch.float32)
    state = adapter_state(root)
    assert state is not None
    state.token_number_T = torch.arange(3)
    with pytest.raises(NotImplementedError):
        root()
    assert state.token_number_T is None


def _two_forwards_then_two_backwards(adapter: Path, checkpointed: bool) -> dict[str, torch.Tensor]:
    model: Any = tiny_model(FAMILY, **BLOCKS)
    mesh = em.init_mesh(em.ParallelConfig(ep=1))
    lora = em.LoraConfig(from_adapter=str(adapter), dropout=0.3)
    em.parallelize(model, mesh, lora=lora, activation_checkpointing=checkpointed)
    batches = [torch.randint(96, (2, 10), generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    losses = [
        em.causal_lm_loss(
            model,
            {"input_ids": ids_BS, "labels": ids_BS, "row_numbers": torch.arange(2) + 2 * number},
            target_tokens=36,
        )
        for number, ids_BS in enumerate(batches)
    ]
    for loss in losses:
        loss.backward()
    return {name: p.grad.full_tensor().clone() for name, p in model.named_parameters() if p.requires_grad}


def test_a_recomputed_block_drops_what_its_own_forward_dropped(adapter: Path) -> None:
    kept, recomputed = (shared_ranks(_two_forwards_then_two_backwards, 1, adapter, each)[0] for each in (False, True))
    assert worst(recomputed, kept)[0] <= 1e-6


def _packed_and_apart(model_class: str, family: str, targets: list[str]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The logits of each sample of two packed rows, there and alone, of tokens with the same numbers."""
    model: Any = random_model(model_class, family)
    lora = em.LoraConfig(r=4, dropout=0.3, targets=targets)
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=1)), lora=lora)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            parameter.data.to_local().normal_(std=0.2, generator=generator)
    ids = torch.arange(48).view(2, 24) * 7 % 89
    lengths = ((11, 1, 12), (5, 19))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    packed = model(input_ids=ids, position_ids=positions, row_numbers=torch.tensor([3, 4]), use_cache=False).logits
    state, found = adapter_state(model), []
    assert state is not None
    for row, each in enumerate(lengths):
        for start, end in itertools.pairwise(itertools.accumulate(each, initial=0)):
            state.token_number_T = (3 + row << 24) + torch.arange(start, end)
            alone = model(input_ids=ids[row : row + 1, start:end], use_cache=False).logits
            found.append((packed[row, start:end].detach(), alone[0].detach()))
    return found


@pytest.mark.slow_cases(r"Qwen3Next.*", why="another family stays")
@pytest.mark.parametrize(
    ("model_class", "family", "targets"),
    [("Qwen3NextForCausalLM", "qwen3_next", ["attention"]), ("Lfm2MoeForCausalLM", "lfm2_moe", ["in_proj", "experts"])],
)
def test_layers_that_run_by_samples_drop_what_the_tokens_numbers_say(
    model_class: str, family: str, targets: list[str]
) -> None:
    for packed, alone in shared_ranks(_packed_and_apart, 1, model_class, family, targets)[0]:
        torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)
