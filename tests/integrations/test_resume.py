"""A Trainer's checkpoints: stopped on four ranks, resumed on two past an incomplete one; the best model to the bit."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback

import expertmesh as em
from expertmesh.config.errors import IntegrityError
from expertmesh.integrations import checkpoints
from tests.adapters.reference import random_adapter
from tests.integrations.support import ONE_LAYER, Job, Result, accumulating, compare, sharded, stock, whole
from tests.integrations.test_sft import ATTENTION_AND_EXPERTS
from tests.support.errors import refused_on_ranks
from tests.support.models import tiny_model
from tests.support.ranks import RankFailed

SAVED = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "lr_scheduler_type": "cosine", "warmup_steps": 4}
BEST = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "greater_is_better": True}


class _StopAfter(TrainerCallback):  # type: ignore[misc]
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == self.step


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Result]:
    """A job of six steps that was killed on four ranks in saving step 4, and the stock trainer's whole run of it."""
    job = Job(tmp_path_factory.mktemp("stopped"), args=SAVED, changes=ONE_LAYER)
    real, calls = checkpoints.mark_complete, []

    def dies(checkpoint: Path) -> None:
        calls.append(checkpoint)
        if len(calls) == 2:
            raise RuntimeError("killed while saving")
        real(checkpoint)

    checkpoints.mark_complete = dies
    try:
        with pytest.raises(RankFailed, match="killed while saving"):
            sharded(job, 4, ep=4)
    finally:
        checkpoints.mark_complete = real
    assert sorted(path.name for path in job.output.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    return job, stock(replace(accumulating(job, 4), args={**accumulating(job, 4).args, "save_strategy": "no"}))


def test_from_weights_alone_the_optimizer_and_the_learning_rates_begin_anew(tmp_path: Path) -> None:
    """As in the stock Trainer, which leaves fused experts of a checkpoint's weights out, so that it is no reference."""
    job = Job(tmp_path / "run", args={**SAVED, "save_only_model": True}, changes=ONE_LAYER)
    sharded(replace(job, given={"callbacks": [_StopAfter(2)]}), 2, ep=2)
    resumed = sharded(replace(job, resume=True), 2, ep=2)
    whole_run = sharded(replace(job, output=tmp_path / "whole"), 2, ep=2)
    assert resumed.series("loss")[:3] == pytest.approx(whole_run.series("loss")[:3], rel=1e-6)
    assert resumed.rates == whole_run.rates[:4]


def _on_two(job: Job, output: Path) -> Job:
    """The same on two ranks, from what is in a directory of its own."""
    shutil.copytree(job.output, output)
    return replace(job, output=output, args={**job.args, "gradient_accumulation_steps": 2}, resume=True)


@pytest.mark.slow(why="a resume on the same layout stays")
def test_stopped_on_four_ranks_and_resumed_on_two_past_an_incomplete_checkpoint(
    stopped: tuple[Job, Result], tmp_path: Path
) -> None:
    job, expected = stopped
    ours = sharded(_on_two(job, tmp_path / "run"), 2, ep=2)
    first = replace(ours, logs=[row for row in ours.logs if row["step"] > 2 or "loss" in row])
    compare(first, expected)
    # The groups' own rates, as the optimizer steps with them, not what the schedule logs.
    rates = [set(groups) for groups in ours.rates]
    assert rates == [set(groups) for groups in expected.rates[2:]]
    assert len(rates) == 4
    names = {path.name for path in (tmp_path / "run").iterdir() if path.is_dir()}
    assert names >= {"checkpoint-4", "checkpoint-6", "incomplete-checkpoint-4"}
    assert checkpoints.is_complete(tmp_path / "run" / "checkpoint-4")


def test_experts_that_stay_at_the_base_are_seen(
    stopped: tuple[Job, Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = em.load_weights

    def all_but_experts(model: Any, directory: Any) -> None:
        experts = {name: p for name, p in model.named_parameters() if ".experts." in name}
        before = {name: p.detach().to_local().clone() for name, p in experts.items()}
        real(model, directory)
        with torch.no_grad():
            for name, parameter in experts.items():
                parameter.to_local().copy_(before[name])

    monkeypatch.setattr(em, "load_weights", all_but_experts, raising=False)
    job, expected = stopped
    ours = sharded(_on_two(job, tmp_path / "run"), 2, ep=2)
    with pytest.raises(AssertionError, match="loss"):
        compare(ours, expected)


@pytest.mark.slow(why="the resumed run, its planted bug and the best model stay")
def test_weights_lie_in_a_checkpoint_once(stopped: tuple[Job, Result]) -> None:
    checkpoint = stopped[0].output / "checkpoint-2"
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    weights = sum(parameter.numel() for parameter in model.parameters())
    sizes = {path: _numbers(path) for path in checkpoint.rglob("*.safetensors") if path.parent.name != "rng"}
    assert sum(size for path, size in sizes.items() if path.parent == checkpoint) == weights
    moments = sum(size for path, size in sizes.items() if path.parent != checkpoint)
    assert 2 * weights <= moments <= 2 * weights + 100  # and a count of steps for each weight


def _numbers(path: Path) -> int:
    return sum(tensor.numel() for tensor in load_file(path).values())


@pytest.mark.slow(why="the resumed run, its planted bug and the best model stay")
def test_resumed_in_the_same_layout_it_is_the_uninterrupted_run_bit_for_bit(tmp_path: Path) -> None:
    job = Job(tmp_path / "stopped", args=SAVED, given={"callbacks": [_StopAfter(3)]}, changes=ONE_LAYER)
    sharded(job, 2, ep=2)
    resumed = sharded(replace(job, given={}, resume=str(tmp_path / "stopped" / "checkpoint-2")), 2, ep=2)
    whole_run = sharded(Job(tmp_path / "whole", args=SAVED, changes=ONE_LAYER), 2, ep=2)
    assert resumed.series("loss") == whole_run.series("loss")
    assert all(torch.equal(resumed.weights[name], tensor) for name, tensor in whole_run.weights.items())


def _and_best(trainer: Any) -> Any:
    best = Path(trainer.state.best_model_checkpoint)
    here = whole(trainer.model)
    there = AutoModelForCausalLM.from_pretrained(best)
    differing = [n for n, p in there.named_parameters() if not torch.equal(here[n], p)]
    names = sorted(path.name for path in best.parent.glob("checkpoint-*"))
    return best.name, len(list(there.parameters())), differing, names


@pytest.mark.slow_cases(r"all", why="the resumed run, its planted bug and the best model stay")
@pytest.mark.parametrize("only_model", [False, True], ids=["all", "save_only_model"])
def test_the_best_model_comes_back_bit_for_bit(only_model: bool, tmp_path: Path) -> None:
    args = {**SAVED, **BEST, "save_only_model": only_model, "save_total_limit": 1}
    result = sharded(Job(tmp_path, args=args, changes=ONE_LAYER, after=_and_best), 2, ep=2)
    losses = result.series("eval_loss")
    assert losses[0] == max(losses) > losses[-1]
    name, parameters, differing, names = result.extra
    assert (name, differing, names) == ("checkpoint-2", [], ["checkpoint-2"])
    assert parameters == len(result.weights)


@pytest.mark.slow(why="the resumed run, its planted bug and the best model stay")
def test_adapters_are_resumed_in_another_layout(tmp_path: Path) -> None:
    random_adapter(tiny_model("qwen3_moe", **ONE_LAYER), tmp_path / "start", *ATTENTION_AND_EXPERTS)
    given = {"lora": em.LoraConfig(from_adapter=str(tmp_path / "start"))}
    base = tmp_path / "base"
    tiny_model("qwen3_moe", **ONE_LAYER).save_pretrained(base)
    args = {**SAVED, "gradient_accumulation_steps": 2}
    job = Job(tmp_path / "run", args=args, given=given, model=str(base), after=_files)
    sharded(replace(job, given={**given, "callbacks": [_StopAfter(2)]}, after=None), 2, ep=2)
    resumed = sharded(replace(job, args=SAVED, resume=True), 4, ep=2)
    expected = sharded(replace(job, output=tmp_path / "whole"), 2, ep=2)
    first = load_file(tmp_path / "start" / "adapter_model.safetensors")
    both = [replace(result, initial=first, weights=result.extra) for result in (resumed, expected)]
    compare(*both)


def _files(trainer: Any) -> dict[str, torch.Tensor]:
    trainer.save_model()
    return dict(load_file(Path(trainer.args.output_dir) / "adapter_model.safetensors"))


@pytest.mark.slow(why="the resumed run, its planted bug and the best model stay")
def test_what_cannot_be_resumed_is_refused_before_training(stopped: tuple[Job, Result], tmp_path: Path) -> None:
    job = _on_two(stopped[0], tmp_path / "run")
    with refused_on_ranks("trainer.checkpoint-exists", naming="checkpoint-2"):
        sharded(replace(job, resume=None), 2, ep=2)
    with refused_on_ranks("trainer.incomplete-checkpoint", IntegrityError, naming="checkpoint-4"):
        sharded(replace(job, resume=str(job.output / "checkpoint-4")), 2, ep=2)
    with refused_on_ranks("trainer.no-checkpoint", naming="0 incomplete"):
        sharded(replace(job, output=tmp_path / "empty"), 2, ep=2)
    shutil.rmtree(job.output / "checkpoint-4")
    next((job.output / "checkpoint-2").glob("model*.safetensors")).write_bytes(b"short")
    with refused_on_ranks("trainer.no-checkpoint", naming="1 incomplete"):
        sharded(job, 2, ep=2)


@pytest.mark.slow(why="the resumed run, its planted bug and the best model stay")
def test_saved_over_earlier_weights_it_is_the_trained_model(tmp_path: Path) -> None:
    def saved_twice(trainer: Any) -> list[str]:
        trainer.save_model()
        trainer.save_model()
        here = whole(trainer.model)
        there = AutoModelForCausalLM.from_pretrained(tmp_path)
        return [name for name, p in there.named_parameters() if not torch.equal(here[name], p)]

    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"of an earlier run")
    assert sharded(Job(tmp_path, args={"max_steps": 1}, changes=ONE_LAYER, after=saved_twice), 2, ep=2).extra == []
    assert not (tmp_path / "model-00001-of-00002.safetensors").exists()
    assert (tmp_path / "tokenizer.json").exists()


def test_a_schedule_that_starts_at_infinity_is_json_and_back() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    state = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer).state_dict()
    assert state["best"] == float("inf")
    written = json.dumps(checkpoints._to_json(state), allow_nan=False)
    assert checkpoints._from_json(json.loads(written)) == state
