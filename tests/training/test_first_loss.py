"""The first loss beside ln(vocabulary): no alarm for untrained weights, one for weights worse than a guess."""

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3MoeConfig

from expertmesh.training.objective import first_loss_lines, untrained_excess
from expertmesh.training.reporting.metrics import StepMetrics
from expertmesh.training.reporting.record import MoeLayer
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


LAYER = MoeLayer(name="experts", experts=128, top_k=8)


def _report(
    loss: float = 3.0,
    grad_norm: float = 1.0,
    dead: int = 0,
    load: float = 1.0,
    skipped: str | None = None,
    step: int = 9,
) -> StepMetrics:
    layers: list[dict[str, float | int]] = [
        {"max_over_mean": x, "entropy": 1.0, "dead": n} for x, n in ((1, 0), (load, dead))
    ]
    return StepMetrics(step, 0.1, loss, grad_norm, 1e-3, 4096, 1.0, 1, 1.0, 1.0, layers, skipped=skipped)


@pytest.mark.parametrize(
    ("report", "reports", "said"),
    [
        (_report(grad_norm=0.0), 3, "gradient norm has been 0"),
        (_report(loss=math.log(1000) * 1.004), 20, "uniform guess, ln 1,000 = 6.91"),
        (_report(dead=64), 50, "routers have collapsed, now in 1 of 2 layers: in one 64 of 128 experts are without"),
        (_report(dead=32, load=15.9), 50, "and the busiest has 15.9 times the mean of at most 16; lower"),
    ],
)
def test_a_run_that_learns_nothing_any_more_is_told_once(report: StepMetrics, reports: int, said: str) -> None:
    collapse = Collapse(1000, LAYER)
    told = [list(collapse.lines(report)) for _ in range(reports + 5)]
    assert [number for number, lines in enumerate(told, start=1) if lines] == [reports]
    assert said in told[reports - 1][0]
    collapse = Collapse(1000, LAYER)
    broken = [report] * (reports - 1) + [_report()] + [report] * (reports - 1)
    assert not [line for each in broken for line in collapse.lines(each)]


def test_steps_too_small_for_all_experts_and_losses_of_pairs_are_no_collapse() -> None:
    few, pairs = Collapse(1000, LAYER.model_copy(update={"experts": 4096})), Collapse(None, LAYER)
    assert not [line for _ in range(60) for line in few.lines(_report(dead=4000))]
    assert not [line for _ in range(30) for line in pairs.lines(_report(loss=math.log(1000)))]
    assert not [line for _ in range(30) for line in pairs.lines(_report(grad_norm=0.0, skipped="no finite loss"))]


def test_routers_have_collapsed_when_experts_starve_after_warm_up() -> None:
    """As the demo's routers do: one becomes a shared expert, and while they spread many are without a token."""
    shared, early = Collapse(1000, LAYER, warmup=8, reports=10), Collapse(1000, LAYER, warmup=9, reports=10)
    assert not [line for _ in range(60) for line in shared.lines(_report(load=16.0, dead=31))]
    assert not [line for _ in range(60) for line in early.lines(_report(load=16.0, dead=120))]
    assert [number for number in range(12) if list(early.lines(_report(load=16.0, dead=120, step=10)))] == [9]


def test_a_figure_of_routing_with_a_maximum_shows_it() -> None:
    report = _report(load=15.87, dead=5)
    assert report.load_summary(LAYER) == "15.9x of at most 16, 5 of 256 dead"
    assert "load 15.9x of at most 16, 5 of 256 dead" in report.line(100, 1.0, 8, LAYER)
    report.expert_load[0]["ranks_max_over_mean"], report.expert_load[1]["ranks_max_over_mean"] = 1.36, 1.0
    assert report.load_summary(LAYER) == "15.9x of at most 16, 5 of 256 dead, ranks 1.4x"
