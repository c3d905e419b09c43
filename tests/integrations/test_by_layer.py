"""`em.trainer(...)(accumulate="by_layer")` computes what the stock class computes, and reduces each layer once a step.

Three accumulated micro-batches of other lengths on each rank, and one at the end of each epoch: 28 rows, two of them in
a micro-batch.
"""

import functools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import IterableDataset
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardTrainer, SFTConfig, SFTTrainer

import expertmesh as em
from tests.adapters.reference import random_adapter
from tests.families.tiny import tiny_config
from tests.integrations.support import (
    Job,
    accumulating,
    build,
    compare,
    sharded,
    stock,
    uneven_rows,
)
from tests.integrations.test_dpo import pairs
from tests.support.collectives import Collectives
from tests.support.errors import refused
from tests.support.models import tiny_model
from tests.support.ranks import shared_ranks
from tests.support.reference import worst

BY_LAYER: dict[str, Any] = {"accumulate": "by_layer"}
ACCUMULATED: dict[str, Any] = {"gradient_accumulation_steps": 3, "max_steps": -1, "num_train_epochs": 2}
# Between the first and the last, blocks are called alone.
LAYERS: dict[str, Any] = {"num_hidden_layers": 3}
ON_HOST: dict[str, Any] = {"keep_inputs": "host", "round": 2}
CHECKPOINTED: dict[str, Any] = {"gradient_checkpointing": True}


def _rows() -> list[dict[str, Any]]:
    return uneven_rows()[:28]


def _pairs() -> list[dict[str, Any]]:
    return pairs()[:28]


def _job(output: Path, args: dict[str, Any], **options: Any) -> Job:
    return Job(output, args={**ACCUMULATED, **args}, **{"rows": _rows, "changes": LAYERS, **options})


class Gradients(TrainerCallback):  # type: ignore[misc]
    """Every gradient of the first and of the shorter third step, whole, as clipped."""

    def __init__(self) -> None:
        self.found: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        if state.global_step in (0, 2):
            named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            full = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in named.items()}
            self.found.append({name: grad.clone() for name, grad in full.items()})


def _gradients(trainer: Any) -> list[dict[str, torch.Tensor]]:
    found = next(each for each in trainer.callback_handler.callbacks if isinstance(each, Gradients)).found
    return list(found)


def _double(model: nn.Module) -> nn.Module:
    return model.double()


def _cross_entropy(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """In the dtype of the logits; transformers' own is of fp32."""
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    loss: torch.Tensor = nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch
    return loss


def test_in_double_precision_every_gradient_and_weight_is_the_stock_trainers(tmp_path: Path) -> None:
    given = {"callbacks": [Gradients()], "compute_loss_func": _cross_entropy}
    job = _job(tmp_path, {}, kind=Trainer, given=given, prepare=_double, after=_gradients)
    expected = stock(accumulating(job, 2))
    ours = sharded(replace(job, given={**given, **BY_LAYER}), 2, ep=2)
    assert len(ours.extra) == len(expected.extra) == 2
    for here, there in zip(ours.extra, expected.extra, strict=True):
        assert worst(here, there)[0] <= 1e-10
    # Losses and norms are logged in fp32.
    compare(ours, expected, relative=1e-6, of_move=1e-7)


@pytest.mark.slow_cases(r"(?!router loss$).*", why="the auxiliary loss, with gradients of all layers, stays")
@pytest.mark.parametrize(
    ("world", "parallel", "args", "order"),
    [
        pytest.param(2, {"ep": 2}, {"router_aux_loss_coef": 0.05}, {}, id="router loss"),
        pytest.param(2, {"ep": 2}, {"router_aux_loss_coef": 0.05, **CHECKPOINTED}, ON_HOST, id="router loss, on host"),
        pytest.param(2, {"ep": 1}, CHECKPOINTED, {}, id="ep 1, checkpointed"),
        pytest.param(4, {"ep": 2, "replicate": 2}, {}, {"round": 1}, id="replicas, rounds"),
        pytest.param(2, {"ep": 2}, {"padding_free": True}, {}, id="padding-free"),
    ],
)
def test_sft_equals_the_stock_trainer(
    world: int, parallel: dict[str, int], args: dict[str, Any], order: dict[str, Any], tmp_path: Path
) -> None:
    rows = {"rows": functools.partial(list, [*_rows(), *_rows()])} if world == 4 else {}
    job = _job(tmp_path, args, **rows)
    plain = {key: value for key, value in accumulating(job, world).args.items() if key not in CHECKPOINTED}
    expected = stock(replace(accumulating(job, world), args=plain))
    compare(sharded(replace(job, given={**BY_LAYER, **order}), world, **parallel), expected)


@pytest.mark.slow_cases(r"(?!rounds on host).*", why="with rounds, recomputation and inputs on the host it stays")
@pytest.mark.parametrize(
    ("args", "order"),
    [pytest.param(CHECKPOINTED, ON_HOST, id="rounds on host"), pytest.param({}, {}, id="one round")],
)
def test_dropout_of_adapters_drops_as_by_micro_batch(
    args: dict[str, Any], order: dict[str, Any], tmp_path: Path
) -> None:
    targets = ("q_proj", "v_proj"), ("experts.gate_up_proj", "experts.down_proj")
    random_adapter(tiny_model("qwen3_moe", **LAYERS), tmp_path / "start", *targets)
    given = {"lora": em.LoraConfig(from_adapter=str(tmp_path / "start"), dropout=0.3)}
    job = _job(tmp_path / "run", {**args, "learning_rate": 1e-2}, given=given)
    compare(sharded(replace(job, given={**given, **BY_LAYER, **order}), 2, ep=2), sharded(job, 2, ep=2))


@pytest.mark.slow(why="SFT and the plain Trainer stay")
def test_rewards_equal_the_stock_trainer(tmp_path: Path) -> None:
    tiny_model("qwen3_moe", **LAYERS).save_pretrained(tmp_path / "base")
    job = _job(tmp_path / "run", {}, kind=RewardTrainer, rows=_pairs, model=str(tmp_path / "base"))
    ours, expected = sharded(replace(job, given=BY_LAYER), 2, ep=2), stock(accumulating(job, 2))
    compare(ours, expected, keys=("loss", "accuracy", "margin", "mean_reward"), absolute=1e-6)


@pytest.mark.slow(why="the label smoother takes what the model returns, as compute_loss_func does")
def test_smoothed_labels_equal_the_stock_trainer(tmp_path: Path) -> None:
    job = _job(tmp_path, {"label_smoothing_factor": 0.1}, kind=Trainer)
    compare(sharded(replace(job, given=BY_LAYER), 2, ep=2), stock(accumulating(job, 2)))


def _stream() -> Iterator[dict[str, Any]]:
    yield from _rows()


@pytest.mark.slow(why="a stream that ends within a step is rare")
def test_micro_batches_of_an_epoch_that_ends_within_a_step_enter_the_next(tmp_path: Path) -> None:
    """As their gradients do by micro-batch: 7 micro-batches of a stream are two steps and a third of one.

    The auxiliary loss is divided by the number of micro-batches that a step has loaded: three, or one.
    """
    given = {"train_dataset": IterableDataset.from_generator(_stream)}
    args = {"max_steps": 5, "router_aux_loss_coef": 0.5, "accelerator_config": {"dispatch_batches": False}}
    job = _job(tmp_path, args, given=given)
    compare(sharded(replace(job, given={**given, **BY_LAYER}), 2, ep=2), sharded(job, 2, ep=2))


def _count(output: Path, micro_batches: int) -> tuple[int, int]:
    """The gathers and reductions of the second step; FSDP2 begins in the first."""
    args = {"gradient_accumulation_steps": micro_batches, "max_steps": 2, **CHECKPOINTED}
    trainer = build(
        Job(output, args=args, given=BY_LAYER, changes=LAYERS, kind=Trainer, rows=uneven_rows), em.ParallelConfig(ep=1)
    )
    collectives, step = Collectives(), trainer.training_step

    def counted(*arguments: Any) -> torch.Tensor:
        with collectives if trainer.state.global_step else nullcontext():
            loss: torch.Tensor = step(*arguments)
            return loss

    trainer.training_step = counted
    trainer.train()
    return collectives.counts["_allgather"], collectives.counts["_reduce_scatter"]


def test_gathers_and_reductions_of_a_step_do_not_grow_with_its_micro_batches(tmp_path: Path) -> None:
    """Units: embedding, three blocks and their experts, and the root; the last block and the root are gathered once."""
    for micro_batches in (2, 5):
        for gathers, reductions in shared_ranks(_count, 2, tmp_path, micro_batches):
            assert (gathers, reductions) == (2 + 2 * 4 + 2 + 1, 1 + 6 + 1)


class _Twice(Trainer):  # type: ignore[misc]
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        model(input_ids=inputs["input_ids"])
        return super().compute_loss(model, inputs, *args, **kwargs)


class _Random(Trainer):  # type: ignore[misc]
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs["input_ids"] = torch.randint(3, 96, inputs["input_ids"].shape)
        return super().compute_loss(model, inputs, *args, **kwargs)


class _Never(Trainer):  # type: ignore[misc]
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return torch.zeros((), requires_grad=True)


class _States(Trainer):  # type: ignore[misc]
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return model(**inputs, output_hidden_states=True).hidden_states[0].mean()


REFUSED: dict[type[Trainer], tuple[str, str]] = {
    _Twice: ("trainer.unsupported-argument", "more than once"),
    _Random: ("trainer.unsupported-argument", "other values"),
    _Never: ("trainer.unsupported-argument", "does not call the model"),
    _States: ("train.accumulate-unsupported", "output_hidden_states"),
}


def _train_with(kind: type[Trainer], output: Path) -> None:
    job = Job(output, args={"gradient_accumulation_steps": 2}, given=BY_LAYER, changes=LAYERS, kind=kind)
    key, said = REFUSED[kind]
    with refused(key, naming=said):
        build(job, em.ParallelConfig(ep=1)).train()


@pytest.mark.parametrize("kind", REFUSED)
def test_a_loss_that_cannot_run_by_layer_is_refused(kind: type[Trainer], tmp_path: Path) -> None:
    shared_ranks(_train_with, 1, kind, tmp_path)


def _train_zaya(directory: Path) -> None:
    tiny_config("ZayaForCausalLM", "zaya").save_pretrained(directory)
    with refused("train.accumulate-unsupported", naming="beside the hidden state"):
        build(Job(directory / "run", given=BY_LAYER, kind=Trainer, model=str(directory)), em.ParallelConfig(ep=1))


def test_a_family_whose_blocks_read_more_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    """The directory has no weights, which would be refused later."""
    shared_ranks(_train_zaya, 1, tmp_path)


@pytest.fixture
def args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return lambda kind, **own: kind(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **own)


@pytest.mark.parametrize(
    ("kind", "own", "given", "naming"),
    [
        (SFTTrainer, {}, {"accumulate": "by layer"}, "accumulate is 'by layer'"),
        (SFTTrainer, {}, {"round": 2}, "round is 2"),
        (SFTTrainer, {}, {**BY_LAYER, "keep_inputs": "disk"}, "keep_inputs is 'disk'"),
        (DPOTrainer, {}, BY_LAYER, "DPOTrainer"),
        (GRPOTrainer, {}, BY_LAYER, "GRPOTrainer"),
        (SFTTrainer, {"label_smoothing_factor": 0.1}, BY_LAYER, "label_smoothing_factor"),
        (SFTTrainer, {}, {**BY_LAYER, "compute_loss_func": _cross_entropy}, "compute_loss_func"),
        (
            SFTTrainer,
            {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
            BY_LAYER,
            "sync_each_batch",
        ),
    ],
)
def test_orders_are_refused_before_anything_is_loaded(
    kind: type[Trainer], own: dict[str, Any], given: dict[str, Any], naming: str, args: Any
) -> None:
    config = {SFTTrainer: SFTConfig, DPOTrainer: DPOConfig, GRPOTrainer: GRPOConfig}[kind]
    ours: Any = em.trainer(kind)
    if kind is GRPOTrainer:
        given = {**given, "reward_funcs": len}
    key = "config.wrong-value" if " is " in naming else "trainer.unsupported-argument"
    with refused(key, naming=naming):
        ours("nowhere/to-be-found", args=args(config, **own), parallel=em.ParallelConfig(ep=2), **given)
