"""The first loss beside ln(vocabulary): no alarm for untrained weights, one for weights worse than a guess."""

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3MoeConfig

from expertmesh.training.reporting.first_loss import first_loss_lines, untrained_excess
from expertmesh.training.reporting.metrics import StepMetrics
from expertmesh.training.reporting.reporter import Collapse
from tests.support.models import tiny_config


def _config(vocabulary: int, hidden: int, initializer_range: float = 0.02) -> PreTrainedConfig:
    return Qwen3MoeConfig(vocab_size=vocabulary, hidden_size=hidden, initializer_range=initializer_range)


def test_a_broken_checkpoint_s_loss_is_a_warning_beside_the_uniform_guess() -> None:
    lines = list(first_loss_lines(_config(129_280, 7168), 15.03, 4096))
    assert lines == [
        "first loss 15.030 before any update; a uniform guess scores ln 129,280 = 11.770",
        "warning: step 1 loss 15.030 is worse than a uniform guess (ln 129,280 = 11.770), and than an untrained model "
        "of this shape would be (13.711): the weights may not be what the config describes, or the data not what the "
        "tokenizer was made for",
    ]


@pytest.mark.parametrize("loss", [1.9, 11.77, 12.5])
def test_pretrained_and_untrained_losses_are_no_warning(loss: float) -> None:
    (line,) = first_loss_lines(_config(129_280, 7168), loss, 4096)
    assert line.startswith("first loss ")


def test_an_untrained_model_on_english_is_no_warning() -> None:
    """Measured: 5.5 M random parameters on 4,900 targets, among which the commonest token is one in 23."""
    assert len(list(first_loss_lines(_config(4096, 192), 8.3703, 4900))) == 1


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_left_to_the_step_to_report(loss: float) -> None:
    assert list(first_loss_lines(_config(100, 32), loss, 10)) == []


@pytest.mark.parametrize("targets", [12, 500])
@pytest.mark.parametrize(("family", "initializer"), [("qwen3_moe", 0.02), ("qwen3_moe", 0.4), ("mixtral", 0.2)])
def test_untrained_models_lie_within_the_margin_and_near_its_estimate(
    family: str, initializer: float, targets: int
) -> None:
    config = tiny_config(family, initializer_range=initializer)
    losses = []
    for seed in range(5):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        ids = torch.randint(config.vocab_size, (targets // 4, 5))
        with torch.no_grad():
            logits = model(ids).logits[:, :-1]
        losses.append(float(F.cross_entropy(logits.reshape(-1, config.vocab_size), ids[:, 1:].reshape(-1))))
        assert len(list(first_loss_lines(config, losses[-1], targets))) == 1, losses
    if initializer >= 0.2 and targets == 500:  # the margin is no wider than it has to be
        excess = sum(losses) / len(losses) - math.log(config.vocab_size)
        assert excess > untrained_excess(config, 10**9) / 2


def _report(loss: float = 3.0, grad_norm: float = 1.0, dead: int = 0, skipped: str | None = None) -> StepMetrics:
    load: list[dict[str, float | int]] = [{"max_over_mean": 1.0, "entropy": 1.0, "dead": each} for each in (0, dead)]
    return StepMetrics(1, 0.1, loss, grad_norm, 1e-3, 4096, 1.0, 1, 1.0, 1.0, load, skipped=skipped)


@pytest.mark.parametrize(
    ("report", "reports", "said"),
    [
        (_report(grad_norm=0.0), 3, "gradient norm has been 0"),
        (_report(loss=math.log(1000) * 1.004), 20, "uniform guess, ln 1,000 = 6.91"),
        (_report(dead=65), 20, "more than half of a layer's experts"),
    ],
)
def test_a_run_that_learns_nothing_any_more_is_told_once(report: StepMetrics, reports: int, said: str) -> None:
    collapse = Collapse(1000, experts=128, top_k=8)
    told = [list(collapse.lines(report)) for _ in range(reports + 5)]
    assert [number for number, lines in enumerate(told, start=1) if lines] == [reports]
    assert said in told[reports - 1][0]
    collapse = Collapse(1000, experts=128, top_k=8)
    broken = [report] * (reports - 1) + [_report()] + [report] * (reports - 1)
    assert not [line for each in broken for line in collapse.lines(each)]


def test_steps_too_small_for_all_experts_and_losses_of_pairs_are_no_collapse() -> None:
    few, pairs = Collapse(1000, experts=4096, top_k=8), Collapse(None, experts=128, top_k=8)
    assert not [line for _ in range(30) for line in few.lines(_report(dead=4000))]
    assert not [line for _ in range(30) for line in pairs.lines(_report(loss=math.log(1000)))]
    assert not [line for _ in range(30) for line in pairs.lines(_report(grad_norm=0.0, skipped="no finite loss"))]
