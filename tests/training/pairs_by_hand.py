"""Preference losses on the unsharded model in one process, as their papers have them, held against TRL's functions."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

from expertmesh.config import Config, ObjectiveConfig
from expertmesh.data import Recipe, build_dataset
from expertmesh.data.formats import PREFERENCE
from expertmesh.verification.reference import unsharded
from tests.training.dpo_by_trl import FIGURES, ByTrl


def train_by_hand(config: Config, model: Any) -> ByTrl:
    """Take the steps of `config` on `model`; the result is of the kind that TRL's trainer gives."""
    data, optim, size = config.data, config.optim, 2 * config.train.global_batch_size
    tokenizer = AutoTokenizer.from_pretrained(config.model.name_or_path)
    dataset, _ = build_dataset(
        Recipe(data.train, data, tokenizer, model_vocab_size=len(tokenizer), responses=PREFERENCE)
    )
    samples = [dataset.sample(number) for number in range(len(dataset))]
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(
        trained.values(), lr=optim.learning_rate, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay
    )
    rows: list[dict[str, float]] = []
    gradients: dict[str, Tensor] = {}
    for step in (samples[start : start + size] for start in range(0, len(samples), size)):
        pairs = [(torch.from_numpy(each.input_ids), torch.from_numpy(each.labels)) for each in step]
        batch = unsharded.PaddedSamples.of(pairs)
        logits, token_losses = unsharded.forward(model, batch)
        loss = unsharded.preference_loss(token_losses, batch, config.objective, None) / (len(step) // 2)
        rewards_2P = _by_trl(config.objective, logits, batch.labels_BS, float(loss.detach()))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(trained.values()), optim.max_grad_norm or torch.inf)
        gradients = gradients or {n: p.grad.clone() for n, p in trained.items() if p.grad is not None}
        margin_P = rewards_2P[0] - rewards_2P[1]
        figures = [*rewards_2P.mean(dim=1), (margin_P > 0).double().mean(), margin_P.mean()]
        rows.append({"loss": float(loss.detach()), "grad_norm": float(norm)})
        rows[-1] |= dict(zip(FIGURES, map(float, figures), strict=True))
        optimizer.step()
        optimizer.zero_grad()
    return ByTrl(rows, {}, gradients, {name: parameter.detach().clone() for name, parameter in trained.items()})


def _by_trl(objective: ObjectiveConfig, logits: Tensor, labels: Tensor, loss: float) -> Tensor:
    """Return the rewards of chosen and rejected responses, `[2, P]`. TRL's function has to give them, and `loss`.

    That of reward is a line of RewardTrainer's `compute_loss`; test_reward.py runs the trainer.
    """
    if objective.name == "reward":
        chosen_P, rejected_P = rewards_2P = logits[:, 0, 0].detach().view(-1, 2).T
        limit = 1e-10 if logits.dtype == torch.float64 else 1e-5
        assert float(-F.logsigmoid(chosen_P - rejected_P).mean()) == pytest.approx(loss, rel=limit)
        return rewards_2P
    trainer: Any = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu"),
        beta=objective.beta,
        alpha=0.0,
        label_smoothing=0.0,
        loss_type="simpo",
        simpo_gamma=objective.gamma,
    )
    mean_2P = CPOTrainer.get_batch_logps(logits.detach(), labels, average_log_prob=True).view(-1, 2).T
    if objective.name == "simpo":
        losses, *rewards = CPOTrainer.cpo_loss(trainer, *mean_2P)
    else:
        ratios, *rewards = ORPOTrainer.odds_ratio_loss(trainer, *mean_2P)[:3]
        losses = -mean_2P[0] - ratios
    # TRL computes the odds in fp32.
    exact = objective.name == "simpo" and logits.dtype == torch.float64
    assert float(losses.mean()) == pytest.approx(loss, rel=1e-10 if exact else 1e-5)
    reward_2P = objective.beta * mean_2P.double()
    torch.testing.assert_close(torch.stack(rewards).double(), reward_2P, rtol=1e-5, atol=0.0)
    return reward_2P
