"""The learning rate at every step, against transformers' schedules where these start and end alike."""

from typing import Any

import pytest
import torch
from transformers import get_scheduler

from expertmesh.config import InputError, ScheduleConfig
from expertmesh.training.optimizers.build import learning_rate_factor

TOTAL, WARMUP = 40, 8


def factors(**schedule: Any) -> list[float]:
    config = ScheduleConfig(warmup_steps=WARMUP, **schedule)
    return [learning_rate_factor(config, step, TOTAL) for step in range(TOTAL)]


def of_transformers(name: str, **options: Any) -> list[float]:
    """Its warm-up begins with a rate of zero, which ours leaves out; behind it the two agree."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_scheduler(name, optimizer, WARMUP, TOTAL, scheduler_specific_kwargs=options)
    rates = []
    for _ in range(TOTAL):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize(
    ("ours", "name", "options"),
    [
        ({"name": "cosine"}, "cosine", {}),
        ({"name": "cosine", "min_ratio": 0.1}, "cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ({"name": "linear"}, "linear", {}),
        ({"name": "constant"}, "constant_with_warmup", {}),
        (
            {"name": "wsd", "decay_ratio": 0.25, "min_ratio": 0.2},
            "warmup_stable_decay",
            {"num_decay_steps": 10, "decay_type": "linear", "min_lr_ratio": 0.2},
        ),
    ],
)
def test_after_the_warm_up_it_is_transformers(ours: dict[str, Any], name: str, options: dict[str, Any]) -> None:
    assert factors(**ours)[WARMUP:] == pytest.approx(of_transformers(name, **options)[WARMUP:], abs=1e-12)


def test_the_warm_up_ends_with_the_whole_rate_and_counts_as_a_share_or_in_steps() -> None:
    assert factors(name="constant")[:WARMUP] == [(step + 1) / WARMUP for step in range(WARMUP)]
    share = ScheduleConfig(warmup_ratio=WARMUP / TOTAL)
    assert [learning_rate_factor(share, step, TOTAL) for step in range(TOTAL)] == factors(name="cosine")


def test_it_falls_with_the_square_root_of_the_steps() -> None:
    found = factors(name="inverse_sqrt")
    assert found[WARMUP - 1] == 1.0
    assert found[4 * WARMUP - 1] == pytest.approx(0.5)
    assert max(found[WARMUP:]) < 1.0


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ({"name": "constant", "min_ratio": 0.1}, "schedule.min_ratio does nothing with schedule.name constant"),
        ({"name": "cosine", "decay_ratio": 0.2}, "schedule.decay_ratio does nothing with schedule.name cosine"),
        ({"warmup_ratio": 0.1, "warmup_steps": 3}, "schedule.warmup_ratio does nothing with schedule.warmup_steps"),
    ],
)
def test_what_does_nothing_is_refused(schedule: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        ScheduleConfig(**schedule)
