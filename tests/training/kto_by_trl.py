"""TRL's KTOTrainer on the unsharded model in one process, and the same steps written out: the references of kto.

TRL pairs a prompt with the completion of the row before it, in its batch; a run with that of the row after. So TRL gets
the rows of each step from the last to the first.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import trl
from torch import Tensor
from transformers import AutoTokenizer

from expertmesh.config import Config
from expertmesh.data import Recipe, build_dataset
from expertmesh.data.formats import UNPAIRED
from expertmesh.step.objectives import Kto
from expertmesh.verification.reference import unsharded
from tests.training.dpo_by_trl import PAIRS, ByTrl, trained_by_trl
from tests.training.tiny_run import GLOBAL_BATCH, run_config

# Three steps and one of a single row, which leaves ranks without one.
ROWS = [
    {"prompt": pair["prompt"], "completion": pair["chosen" if good else "rejected"], "label": good}
    for pair, good in zip(PAIRS, [n in (1, 2, 6, 8, 9, 11, 12) for n in range(13)], strict=True)
]
EVALUATED = ROWS[8:12]
STEPS = 4
FIGURES = ("rewards/chosen", "rewards/rejected", "rewards/margins", "kl")
OBJECTIVE = "objective={name: kto, beta: 0.4, desirable_weight: 1.5, undesirable_weight: 0.75}"


def kto_config(inputs: Path, output: Path, *overrides: str) -> Config:
    """A run of `STEPS` steps on `ROWS`, at a constant learning rate."""
    path = inputs / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    options = [f"data.train=[{{path: {path}}}]", OBJECTIVE, f"train.max_steps={STEPS}", "optim.learning_rate=3.0e-4"]
    options += ["schedule={name: constant, warmup_ratio: 0.0}", "data.max_length=128"]
    return run_config(inputs, output, *options, *overrides)


def kl_of_own_rows(kto: Kto, ratios: list[Tensor], desirable: int, device: torch.device) -> Kto:
    """A planted bug, in the place of `Kto.measured`: each rank has the mean of its own rows."""
    return replace(kto, kl=torch.cat(ratios).mean().clamp(min=0), desirable=desirable)


def steps_of(rows: list[Any]) -> list[list[Any]]:
    return [rows[start : start + GLOBAL_BATCH] for start in range(0, len(rows), GLOBAL_BATCH)]


def train_kto_by_trl(config: Config, scratch: Path, model: Any = None) -> ByTrl:
    """What `config` says, by TRL, on `model` (default: the model directory)."""
    rows = [row for step in steps_of(ROWS) for row in reversed(step)]
    objective = config.objective
    weights = {key: getattr(objective, key) for key in ("desirable_weight", "undesirable_weight")}
    return trained_by_trl(trl.KTOTrainer, trl.KTOConfig, rows, EVALUATED[::-1], config, scratch, model, **weights)


def train_kto_by_hand(config: Config, model: Any) -> ByTrl:
    """Take the steps of `config` on `model`, whose first values are the reference."""
    tokenizer = AutoTokenizer.from_pretrained(config.model.name_or_path)
    dataset, _ = build_dataset(
        Recipe(config.data.train, config.data, tokenizer, model_vocab_size=len(tokenizer), responses=UNPAIRED)
    )
    samples = [dataset.sample(number) for number in range(len(dataset))]
    halves = [(s.input_ids[s.labels == -100], s.input_ids[s.labels != -100]) for s in samples]

    def batch_of(step: list[int], shift: int) -> unsharded.PaddedSamples:
        after = step[shift:] + step[:shift]
        parts = [(torch.tensor(halves[a][0]), torch.tensor(halves[b][1])) for a, b in zip(step, after, strict=True)]
        return unsharded.PaddedSamples.of(
            [(torch.cat([p, c]), torch.cat([torch.full_like(p, -100), c])) for p, c in parts]
        )

    def log_probabilities(batch: unsharded.PaddedSamples) -> Tensor:
        return unsharded.row_log_probabilities(unsharded.forward(model, batch)[1], batch)

    steps, optim = steps_of(list(range(len(dataset)))), config.optim
    batches = [(batch_of(step, 0), batch_of(step, 1)) for step in steps]
    with torch.no_grad():
        references = [tuple(map(log_probabilities, each)) for each in batches]
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(
        trained.values(), lr=optim.learning_rate, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay
    )
    rows: list[dict[str, float]] = []
    gradients: dict[str, Tensor] = {}
    for step, (batch, mismatched), (reference_B, other_B) in zip(steps, batches, references, strict=True):
        good_B = torch.tensor([ROWS[number]["label"] for number in step])
        with torch.no_grad():
            kl = (log_probabilities(mismatched) - other_B).mean().clamp(min=0)
        token_losses = unsharded.forward(model, batch)[1]
        loss = unsharded.judged_loss(token_losses, batch, config.objective, reference_B, good_B, kl) / len(step)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(trained.values()), optim.max_grad_norm or torch.inf)
        gradients = gradients or {n: p.grad.clone() for n, p in trained.items() if p.grad is not None}
        rows.append({"loss": float(loss.detach()), "grad_norm": float(norm), "kl": float(kl)})
        optimizer.step()
        optimizer.zero_grad()
    return ByTrl(rows, {}, gradients, {name: parameter.detach().clone() for name, parameter in trained.items()})
