"""`em.trainer(GRPOTrainer)` with `replay_routes=True`: losses replay the experts of the rollout.

The engine and the reference are unsharded models whose routers are written by hand (test_routes.py). The engine chooses
at random, far from what the router would, as no real one does; a third of its tokens have no routes.
"""

import functools
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import expertmesh as em
from expertmesh.integrations import refusals, routes
from tests.integrations.support import Job, Result, compare, sharded, stock
from tests.integrations.test_grpo import LOGGED, prompts, reward_of_length
from tests.parallel.test_routes import force, random_routes
from tests.support.errors import refused, refused_on_ranks
from tests.support.models import tiny_model
from tests.support.reference import worst

LAYERS = 2
METRICS = ("changed_tokens", "changed_choices", "logp_difference_of_routing", "logp_difference_remainder")


def routes_of(ids: list[int]) -> torch.Tensor:
    """The engine's routes of a text, `[tokens, L, K]`."""
    return random_routes(len(ids), LAYERS, torch.Generator().manual_seed(zlib.crc32(bytes(ids))))


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Texts drawn by a generator, as an engine with the weights of the first step would have sampled them."""
    engine: Any = tiny_model("qwen3_moe")
    now, known = force(engine, "qwen3_moe"), {}
    found: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "routes": []}
    for number, prompt in enumerate(prompts):
        ids = trainer.processing_class(prompt)["input_ids"]
        generator = torch.Generator().manual_seed(zlib.crc32(bytes(ids)) + number)
        completion = torch.randint(3, 96, (3 + 5 * number % 9,), generator=generator).tolist()
        text = ids + completion
        now[:] = [routes_of(text).long()]
        with torch.no_grad():
            logits = engine(input_ids=torch.tensor([text])).logits[0, len(ids) - 1 : -1]
        known[tuple(text)] = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
        found["prompt_ids"].append(ids)
        found["completion_ids"].append(completion)
        found["logprobs"].append(known[tuple(text)].tolist())
        # The last token is none that an engine runs; some return NumPy's arrays.
        found["routes"].append(routes_of(text)[: -1 if number % 2 else None].numpy())
    _watch(trainer, known)
    return found


def _watch(trainer: Any, known: dict[tuple[int, ...], torch.Tensor]) -> None:
    """Notes how far the policy's probabilities in a loss are from those of the engine, as ratios."""
    own, trainer.ratios = trainer._get_per_token_logps_and_entropies, []

    def watched(model: Any, input_ids: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        found = own(model, input_ids, attention_mask, *args, **kwargs)
        for ids, mask, logps in zip(input_ids, attention_mask, found[0].detach(), strict=True):
            if torch.is_grad_enabled():
                sampled = known[tuple(ids[mask.bool()].tolist())]
                trainer.ratios.append(float((logps[: len(sampled)] - sampled).exp().sub(1).abs().max()))
        return found

    trainer._get_per_token_logps_and_entropies = watched


def forced(model: nn.Module) -> nn.Module:
    """The model, whose forwards take the engine's routes of their rows."""
    now = force(model, "qwen3_moe")

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        ids, mask = kwargs["input_ids"], kwargs["attention_mask"].bool()
        found = torch.full((*ids.shape, LAYERS, 2), -1)
        for row in range(len(ids)):
            found[row, mask[row]] = routes_of(ids[row, mask[row]].tolist()).long()
        now[:] = [found.flatten(0, 1)]

    model.register_forward_pre_hook(before, with_kwargs=True)
    return model


class _Gradients(TrainerCallback):  # type: ignore[misc]
    """Every gradient of each step, whole."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, *args: Any, model: Any, **kwargs: Any) -> None:
        found = {name: p.grad for name, p in model.named_parameters()}
        self.steps.append({n: (g.full_tensor() if isinstance(g, DTensor) else g).clone() for n, g in found.items()})


def _after(trainer: Any) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    watching = next(each for each in trainer.callback_handler.callbacks if isinstance(each, _Gradients))
    return trainer.ratios, watching.steps


def _job(tmp_path: Path, **args: Any) -> Job:
    own = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 16, "max_steps": 2}
    given = {"reward_funcs": reward_of_length, "rollout_func": rollout, "callbacks": [_Gradients()]}
    return Job(tmp_path, kind=GRPOTrainer, args={**own, **args}, given=given, rows=prompts, after=_after)


def _replaying(job: Job, replays: bool = True) -> Result:
    return sharded(replace(job, given={**job.given, "replay_routes": replays}), 2, ep=2)


ARGS = {"loss_type": "grpo", "num_iterations": 2, "pad_to_multiple_of": 8}


def test_losses_and_gradients_are_those_of_the_unsharded_model_with_the_engines_routes(tmp_path: Path) -> None:
    job = _job(tmp_path, **ARGS)
    ours, theirs = _replaying(job), stock(replace(job, prepare=forced), 2)
    compare(ours, theirs, keys=("loss", "reward", "entropy"), absolute=1e-6)
    for found, expected in zip(ours.extra[1], theirs.extra[1], strict=True):
        assert worst(found, expected)[0] <= 1e-5
    # Of the first update; the engine has the weights of before it.
    assert max(ours.extra[0][:4]) <= 1e-5
    assert ours.series("routes/logp_difference_remainder")[0] <= 1e-6
    assert ours.series("routes/logp_difference_of_routing")[0] > 1e-3
    assert ours.series("routes/changed_tokens")[0] > 0.9
    assert 0.9 < ours.series("routes/changed_choices")[0] < 1
    without = _replaying(job, replays=False)
    assert max(without.extra[0][:4]) > 1e-2
    assert "routes/changed_tokens" not in without.logs[0]


@pytest.mark.parametrize("dim", [1, 2], ids=["token", "layer"])
def test_routes_shifted_by_one_are_seen(dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = routes.placed
    monkeypatch.setattr(routes, "placed", lambda *args: real(*args).roll(1, dim))
    job = _job(tmp_path, **ARGS, max_steps=1)
    ours, theirs = _replaying(job), stock(replace(job, prepare=forced), 2)
    assert worst(ours.extra[1][0], theirs.extra[1][0])[0] > 1e-2
    assert max(ours.extra[0]) > 1e-2
    assert ours.series("routes/logp_difference_remainder")[0] > 1e-3


def _generating(tmp_path: Path, args: dict[str, Any], **given: Any) -> Job:
    own = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 16, "max_steps": 3}
    base: Any = tiny_model("qwen3_moe")
    with torch.no_grad():
        base.lm_head.weight[1] *= 8  # completions end at very different lengths
    base.save_pretrained(tmp_path / "base")
    given = {"reward_funcs": reward_of_length, "replay_routes": True, **given}
    return Job(
        tmp_path, kind=GRPOTrainer, args={**own, **args}, given=given, rows=prompts, model=str(tmp_path / "base")
    )


def _without_replay(job: Job) -> Job:
    return replace(job, given={key: value for key, value in job.given.items() if key != "replay_routes"})


@pytest.mark.slow_cases("checkpointed", why="the accumulated one stays")
@pytest.mark.parametrize(
    "args",
    [
        pytest.param({"gradient_accumulation_steps": 2, "beta": 0.1, "temperature": 0.7}, id="accumulated"),
        pytest.param({"gradient_checkpointing": True, "pad_to_multiple_of": 8}, id="checkpointed"),
    ],
)
def test_in_fp32_the_sharded_models_own_routes_change_nothing(args: dict[str, Any], tmp_path: Path) -> None:
    job = _generating(tmp_path, {**args, "max_steps": 2, "eval_strategy": "steps", "eval_steps": 2})
    ours, theirs = sharded(job, 2, ep=2), stock(_without_replay(replace(job, args=_stock_args(job.args))), 2)
    assert min(theirs.series("completions/min_length")) < 16
    compare(ours, theirs, keys=LOGGED, absolute=1e-6)
    for prefix in ("routes", "eval_routes"):
        assert set(ours.series(f"{prefix}/changed_choices")) == {0.0}
        assert max(ours.series(f"{prefix}/logp_difference_of_routing")) <= 1e-6
        assert 0 < max(ours.series(f"{prefix}/logp_difference_remainder")) <= 1e-6


def _stock_args(args: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in args.items() if key != "gradient_checkpointing"}


def test_generated_routes_shifted_by_a_token_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = routes.placed
    monkeypatch.setattr(routes, "placed", lambda *args: real(*args).roll(1, 1))
    ours = sharded(_generating(tmp_path, {"max_steps": 1}), 2, ep=2)
    assert ours.series("routes/changed_tokens")[0] > 0.1
    assert ours.series("routes/logp_difference_remainder")[0] > 1e-4


def test_with_adapters_the_reference_chooses_itself(tmp_path: Path) -> None:
    """Adapters start at the base, so that without divergence the policy's routes are its own as well."""
    job = _generating(tmp_path, {"beta": 0.1, "max_steps": 2}, lora=em.LoraConfig(r=4, targets="all-linear"))
    result = sharded(job, 2, ep=2)
    assert result.series("kl")[0] == pytest.approx(0.0, abs=1e-7)
    assert result.series("kl")[1] > 1e-9
    assert set(result.series("routes/changed_choices")) == {0.0}


def _rollout_with(change: Any, prompts: list[str], trainer: Any) -> dict[str, Any]:
    found = rollout(prompts, trainer)
    if torch.distributed.get_rank() == 1:
        change(found)
    return found


def _drop_routes(found: dict[str, Any]) -> None:
    del found["routes"]


def _drop_row(found: dict[str, Any]) -> None:
    found["routes"].pop()


def _drop_tokens(found: dict[str, Any]) -> None:
    found["routes"][0] = found["routes"][0][2:]


def _ragged(found: dict[str, Any]) -> None:
    found["routes"][0] = [[[0, 1]], [[0]]]


def _no_integers(found: dict[str, Any]) -> None:
    found["routes"][0] = found["routes"][0].astype(bool)


@pytest.mark.parametrize(
    ("change", "naming"),
    [
        (_drop_routes, "returned no routes"),
        (_drop_row, "of 3 rows for 4"),
        (_drop_tokens, "for row 0 of "),
        (_ragged, "that are no tensors"),
        (_no_integers, "torch.bool for row 0 of "),
    ],
)
def test_a_rollout_without_fitting_routes_is_refused_on_all_ranks(change: Any, naming: str, tmp_path: Path) -> None:
    job = _job(tmp_path, max_steps=1)
    job = replace(job, given={**job.given, "rollout_func": functools.partial(_rollout_with, change)})
    with refused_on_ranks("trainer.routes", naming=naming):
        _replaying(job)


@pytest.mark.parametrize(
    ("own", "given", "naming"),
    [
        ({}, {"tools": [print]}, "tools= is given"),
        ({}, {"environment_factory": print}, "environment_factory= is given"),
        ({"use_vllm": True}, {}, "args.use_vllm is True"),
        ({"generation_kwargs": {"num_beams": 2}}, {}, "args.generation_kwargs has num_beams"),
        ({"cache_implementation": "static"}, {}, "args.cache_implementation is 'static'"),
    ],
)
def test_where_routes_cannot_be_known_they_are_refused_by_name(
    own: dict[str, Any], given: dict[str, Any], naming: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "_has_vllm", lambda: True)
    args = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **own)
    ours: Any = em.trainer(GRPOTrainer)
    with refused("trainer.routes", naming=naming):
        ours(model="nowhere", args=args, parallel=em.ParallelConfig(ep=2), replay_routes=True, **given)


def test_a_trainer_without_rollouts_has_no_routes_to_replay(tmp_path: Path) -> None:
    args = SFTConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    ours: Any = em.trainer(SFTTrainer)
    with refused("trainer.routes", naming="SFTTrainer has no rollouts"):
        ours(model="nowhere", args=args, parallel=em.ParallelConfig(ep=2), replay_routes=True)
