"""TRL's DPOTrainer on the unsharded model in one process: the reference of preference training."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from torch import Tensor
from transformers import AutoTokenizer, TrainerCallback

from expertmesh.config import Config
from tests.training.tiny_run import GLOBAL_BATCH, run_config

# Three steps and one of a single pair, which leaves ranks without one.
PAIRS = [
    {
        "prompt": [
            *([{"role": "system", "content": "Answer in a few words."}] if n % 3 == 0 else []),
            {"role": "user", "content": f"What is {n} plus {n}?"},
        ],
        "chosen": [{"role": "assistant", "content": " ".join([f"It is {2 * n}."] * (1 + n % 3))}],
        "rejected": [{"role": "assistant", "content": " ".join(["I do not know"] * (1 + n % 4)) + f", maybe {n}"}],
    }
    for n in range(13)
]
STEPS = 4
FIGURES = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")


def preference_config(inputs: Path, output: Path, *overrides: str) -> Config:
    """A run of `STEPS` steps on `PAIRS`, at a constant learning rate."""
    path = inputs / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    options = [f"data.train=[{{path: {path}}}]", "objective={name: dpo, beta: 0.2}", f"train.max_steps={STEPS}"]
    options += ["schedule={name: constant, warmup_ratio: 0.0}", "data.max_length=128", "optim.learning_rate=3.0e-4"]
    return run_config(inputs, output, *options, *overrides)


@dataclass(frozen=True, slots=True)
class ByTrl:
    """Per step what TRL logged; the first step's clipped gradients, and the weights at the end, by PEFT's names."""

    rows: list[dict[str, float]]
    evaluation: dict[str, float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def train_by_trl(config: Config, scratch: Path, model: Any = None, **args: Any) -> ByTrl:
    """What `config` says, by TRL, on `model` (default: the model directory), and on its training data evaluated."""
    return trained_by_trl(trl.DPOTrainer, trl.DPOConfig, PAIRS, PAIRS, config, scratch, model, **args)


def trained_by_trl(
    trainer_class: Any, config_class: Any, rows: list[Any], evaluated: list[Any], config: Config, scratch: Path,
    model: Any, **args: Any,
) -> ByTrl:  # fmt: skip
    """The same by one of TRL's trainers, on `rows`."""
    optim, path = config.optim, config.model.name_or_path
    arguments = config_class(
        output_dir=str(scratch),
        beta=config.objective.beta,
        per_device_train_batch_size=GLOBAL_BATCH,
        per_device_eval_batch_size=len(evaluated),
        num_train_epochs=1,
        max_length=config.data.max_length,
        max_grad_norm=optim.max_grad_norm,
        learning_rate=optim.learning_rate,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        **{"router_aux_loss_coef": 0.0, **args},
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    seen = _Gradients()
    trainer = trainer_class(
        model=str(path) if model is None else model,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(evaluated),
        processing_class=AutoTokenizer.from_pretrained(path),
        callbacks=[seen],
        optimizers=(None, None),
    )
    trained = {name: parameter for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    trainer.optimizer = torch.optim.AdamW(
        trained.values(), lr=optim.learning_rate, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay
    )
    trainer.train()
    logged = [row for row in trainer.state.log_history if "loss" in row]
    weights = {name: parameter.detach().clone() for name, parameter in trained.items()}
    return ByTrl(logged, trainer.evaluate(), seen.found, weights)


class _Gradients(TrainerCallback):
    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        named = model.named_parameters()
        self.found = self.found or {n: p.grad.detach().clone() for n, p in named if p.grad is not None}
