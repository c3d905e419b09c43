"""Trainers on tiny models, stock and ours, in forked ranks: `stock(job)` in one process, `sharded(job, world)` on many.

Data is made of token ids, a tokenizer of 96 words; nothing is loaded from anywhere. The stock trainer in one process
accumulates over as many micro-batches as the ranks have together, so that both train on the same ones in each step.
"""

import math
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerFast, Trainer, TrainerCallback, TrainingArguments
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

import expertmesh as em
from tests.support.models import tiny_model
from tests.support.ranks import shared_ranks

CONFIGS: dict[type[Trainer], type[TrainingArguments]] = {
    Trainer: TrainingArguments,
    SFTTrainer: SFTConfig,
    DPOTrainer: DPOConfig,
    GRPOTrainer: GRPOConfig,
    RewardTrainer: RewardConfig,
}
VOCABULARY, ROWS = 96, 48
# Where layers are not the subject: "ep 2, accumulated" of test_sft.py and each `layers=2` have two.
ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1}
FP32 = em.PrecisionConfig(params="float32", compute="float32", reduce="float32")


@dataclass(frozen=True)
class Job:
    """What is trained; `args` go to the config, `given` to the trainer beside it, `changes` to the model's config."""

    output: Path
    kind: type[Trainer] = SFTTrainer
    args: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    rows: Callable[[], list[dict[str, Any]]] | None = None
    model: str | None = None
    prepare: Callable[[nn.Module], nn.Module] | None = None
    resume: str | bool | None = None
    after: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Result:
    """`logs` are the trainer's, `initial` and `weights` whole; `extra` is what `Job.after` returned."""

    logs: list[dict[str, float]]
    initial: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    rates: list[list[float]]
    extra: Any = None

    def series(self, key: str) -> list[float]:
        return [row[key] for row in self.logs if key in row]


def stock(job: Job, world: int = 1) -> Result:
    """The class of transformers or TRL as it is; on several ranks, under DDP."""
    found: Result = shared_ranks(run_script, world, job, None)[0]
    return found


def sharded(job: Job, world: int, **parallel: Any) -> Result:
    found: Result = shared_ranks(run_script, world, job, em.ParallelConfig(**parallel))[0]
    return found


def uneven_rows() -> list[dict[str, Any]]:
    """Rows of different lengths with very different numbers of targets; some have a single one."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for number in range(ROWS):
        length = 6 + number * 7 % 19
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        first = length - 1 if number % 4 == 1 else 1 + number % 3
        rows.append({"input_ids": ids, "labels": [-100] * first + ids[first:]})
    return rows


def even_rows() -> list[dict[str, Any]]:
    """Rows of one length, all targets: where batches weigh the same whoever averages them."""
    generator = torch.Generator().manual_seed(6)
    ids = torch.randint(3, VOCABULARY, (ROWS, 12), generator=generator).tolist()
    return [{"input_ids": row, "labels": list(row)} for row in ids]


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *(f"w{n}" for n in range(3, 96))])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=128
    )


def accumulating(job: Job, world: int) -> Job:
    """The job in one process: as many micro-batches in each step as `world` ranks have together."""
    steps = job.args.get("gradient_accumulation_steps", 1) * world
    return replace(job, args={**job.args, "gradient_accumulation_steps": steps}, output=job.output / "stock")


def compare(
    ours: Result,
    expected: Result,
    keys: tuple[str, ...] = ("loss",),
    absolute: float = 1e-12,
    relative: float = 1e-5,
    of_move: float = 5e-4,
) -> None:
    """Losses, norms, learning rates, what is evaluated to `relative`; each weight to `of_move` of its move."""
    for key in (*keys, "grad_norm", "learning_rate", "eval_loss"):
        here, there = ours.series(key), expected.series(key)
        assert len(here) == len(there), key
        for number, (a, b) in enumerate(zip(here, there, strict=True)):
            assert math.isclose(a, b, rel_tol=relative, abs_tol=absolute), (key, number, a, b)
    distance, name = furthest(ours.weights, expected)
    assert distance <= of_move, (name, distance)


def furthest(weights: dict[str, torch.Tensor], expected: Result) -> tuple[float, str]:
    """The tensor furthest from the expected one, as a share of how far training moved it."""
    assert weights.keys() == expected.weights.keys(), weights.keys() ^ expected.weights.keys()
    moves = {name: (expected.weights[name] - first).norm() for name, first in expected.initial.items()}
    assert all(moves[name] > 0 for name in expected.weights if name in moves), "a weight did not move"
    found = [((weights[n] - w).norm().item() / max(moves[n].item(), 1e-12), n) for n, w in expected.weights.items()]
    return max(found)


class _Rates(TrainerCallback):  # type: ignore[misc]
    """The learning rate of every group as the optimizer steps with it."""

    def __init__(self) -> None:
        self.rates: list[list[float]] = []

    def on_pre_optimizer_step(self, *args: Any, optimizer: Any, **kwargs: Any) -> None:
        self.rates.append([float(group["lr"]) for group in optimizer.param_groups])


def build(job: Job, parallel: em.ParallelConfig | None) -> Any:
    """The trainer of a job, in a rank."""
    _set_environment()
    defaults: dict[str, Any] = {
        "output_dir": str(job.output),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "adam_epsilon": 1e-6,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    if job.kind in (SFTTrainer, DPOTrainer, GRPOTrainer):
        defaults["router_aux_loss_coef"] = 0.0
    if job.kind in (SFTTrainer, DPOTrainer, RewardTrainer):
        defaults["max_length"] = None
    config: Any = next(CONFIGS[kind] for kind in job.kind.__mro__ if kind in CONFIGS)
    args = config(**{**defaults, **job.args})
    rows = (job.rows or uneven_rows)()
    given: dict[str, Any] = {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer(), **job.given}
    if args.eval_strategy != "no":
        given.setdefault("eval_dataset", Dataset.from_list(rows[:8]))
    model: Any = job.model or tiny_model("qwen3_moe", **job.changes)
    if config is TrainingArguments:
        given.setdefault("data_collator", collate)
    model = job.prepare(model) if job.prepare is not None else model
    if parallel is None:
        return job.kind(model=model, args=args, **given)
    ours: Any = em.trainer(job.kind)
    return ours(model=model, args=args, parallel=parallel, **given)


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Right-padded, as TRL's collator does it."""
    length = max(len(row["input_ids"]) for row in rows)

    def padded(key: str, value: int) -> torch.Tensor:
        return torch.tensor([[*row[key], *[value] * (length - len(row[key]))] for row in rows])

    mask = [[1] * len(row["input_ids"]) + [0] * (length - len(row["input_ids"])) for row in rows]
    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100), "attention_mask": torch.tensor(mask)}


def run_script(job: Job, parallel: em.ParallelConfig | None) -> Result:
    trainer = build(job, parallel)
    initial = whole(trainer.model)
    rates = _Rates()
    trainer.add_callback(rates)
    trainer.train(resume_from_checkpoint=job.resume)
    extra = job.after(trainer) if job.after is not None else None
    return Result(trainer.state.log_history, initial, whole(trainer.model), rates.rates, extra)


@torch.no_grad()
def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every trained parameter in full. Collective for a sharded model."""
    model = getattr(model, "module", model)
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for name, p in named.items()}


def _set_environment() -> None:
    """What torchrun would have set, for accelerate; and nothing is to be looked for on a hub."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if world > 1:
        sizes = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ.update({key: str(value) for key, value in sizes.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false", CI="1")
    warnings.simplefilter("ignore")
