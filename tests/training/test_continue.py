"""What a run may be continued with: another layout and another pace, yes; what makes it another run, by name, no."""

import datetime
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from expertmesh.checkpoint.directory import published
from expertmesh.checkpoint.write import SavedCheckpoint
from expertmesh.cli.main import main
from expertmesh.config import CheckpointConfig, Config
from expertmesh.config.errors import InputError
from expertmesh.config.sections import OptimConfig
from expertmesh.distributed.layout import Layout
from expertmesh.training import resume, run_state
from expertmesh.training.loop import TrainingLoop
from expertmesh.training.resume import Best, Counters
from expertmesh.training.run import train
from expertmesh.training.run_state import RunCheckpoints
from expertmesh.training.startup import prepare
from expertmesh.training.startup.output_dir import set_result_aside
from expertmesh.training.startup.preflight import preflight
from tests.data import tokenizers_on_the_fly as on_the_fly
from tests.support.errors import refused
from tests.support.ranks import run_ranks, shared_ranks
from tests.training.tiny_run import metrics, rows_without_times, run_config, train_steps, weights, write_inputs

# Steps 1 to 4 are the first epoch. The rate is the same whatever the number of steps.
RUN = ["train.num_epochs=2", "parallel.ep=2", "schedule={name: constant, warmup_ratio: 0}"]
RUN += ["checkpoint.every_steps=2", "checkpoint.keep_last=3"]
FOUR, SIX = "train.max_steps=4", "train.max_steps=6"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def whole(inputs: Path) -> Path:
    """A run of six steps."""
    shared_ranks(train, 2, run_config(inputs, inputs / "whole", *RUN, SIX))
    return inputs / "whole"


@pytest.fixture(scope="module")
def four(inputs: Path, whole: Path) -> Path:
    """What the same run leaves when it is stopped after step 4."""
    shutil.copytree(whole, inputs / "four")
    shutil.rmtree(inputs / "four" / "model")
    shutil.rmtree(inputs / "four" / "checkpoints" / "step-00000006")
    return inputs / "four"


def _contents(directory: Path) -> dict[str, bytes]:
    """But for prepared tokens, which are no part of a run."""
    paths = [path for path in directory.rglob("*") if path.is_file() and "prepared" not in path.parts]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


def _sentences(configs: list[Config]) -> list[str]:
    sentences = []
    for config in configs:
        with pytest.raises(InputError) as refused:
            train(config)
        sentences.append(str(refused.value))
        dist.barrier()
    return sentences


def _assert_same_weights(output: Path, expected: Path, tolerance: float = 0.0) -> None:
    want, got = weights(expected), weights(output)
    assert want.keys() == got.keys()
    for name, tensor in want.items():
        assert (got[name] - tensor).norm() <= tolerance * tensor.norm(), name


ANOTHER_RUN = {
    "train.seed=43": "train.seed was 42 and is 43",
    "train.global_batch_size=8": "train.global_batch_size was 4 and is 8",
    "optim.learning_rate=2.0e-2": "optim.learning_rate was 0.01 and is 0.02",
    "optim.weight_decay=0.0": "optim.weight_decay was 0.01 and is 0.0",
    "optim.betas=[0.9, 0.99]": "optim.betas was [0.9, 0.95] and is [0.9, 0.99]",
    "optim.eps=1.0e-7": "optim.eps was 1e-06 and is 1e-07",
    "optim.max_grad_norm=null": "optim.max_grad_norm was 0.5 and is null",
    "schedule.name=cosine": "schedule.name was constant and is cosine",
    "schedule.warmup_ratio=0.5": "schedule.warmup_ratio was 0.0 and is 0.5",
    "data.max_length=32": "data.max_length was 64 and is 32",
    "data.packing=true": "data.packing was false and is true",
    "data.shuffle=true": "data.shuffle was false and is true",
    "data.loss_on=all": "data.loss_on was assistant and is all",
    "precision.compute=bfloat16": "precision.compute was float32 and is bfloat16",
    "precision.reduce=bfloat16": "precision.reduce was float32 and is bfloat16",
    "moe.router=frozen": "moe.router was train and is frozen",
    "model.attention=eager": "model.attention was auto and is eager",
}


def test_what_makes_it_another_run_is_refused_by_name_and_nothing_is_written(
    inputs: Path, four: Path, tmp_path: Path
) -> None:
    shutil.copytree(inputs / "model", tmp_path / "model")
    shutil.copyfile(inputs / "train.jsonl", tmp_path / "train.jsonl")
    cases = {
        **ANOTHER_RUN,
        f"model.name_or_path={tmp_path / 'model'}": f"model.name_or_path was {inputs / 'model'} and is {tmp_path}",
        f"data.train=[{{path: {tmp_path / 'train.jsonl'}}}]": "data.train.0.path was ",
    }
    before = _contents(four)
    resume = f"checkpoint.resume={four / 'checkpoints' / 'step-00000004'}"
    same_place = [run_config(inputs, four, *RUN, SIX, case) for case in cases]
    elsewhere = [run_config(inputs, tmp_path / "new", *RUN, SIX, resume, case) for case in cases]
    for config in (same_place, elsewhere):
        sgd = OptimConfig(name="sgd", learning_rate=1e-2, weight_decay=0.01, max_grad_norm=0.5)
        config.append(config[0].model_copy(update={"optim": sgd, "train": config[1].train.model_copy()}))
    first, second = shared_ranks(_sentences, 2, [*same_place, *elsewhere])
    assert first == second
    expected = [*cases.values(), "optim.name was adamw and is sgd"]
    for text, here, there in zip(expected, first[: len(expected)], first[len(expected) :], strict=True):
        assert text in here
        assert here.startswith(f"output_dir {four} is of a run with another configuration: ")
        assert text in there
        assert "step-00000004 is of a run with another configuration: " in there
    assert _contents(four) == before
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["prepared"]  # tokens are no part of a run


@contextmanager
def _changed(path: Path, old: str, new: str) -> Iterator[None]:
    content = path.read_text()
    assert old in content
    path.write_text(content.replace(old, new))
    try:
        yield
    finally:
        path.write_text(content)


@pytest.mark.slow_cases(r"train\.jsonl-It is 0.*", why="a sample in the middle stays, and the model's configuration")
@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("model/config.json", '"rope_theta": 10000', '"rope_theta": 20000', "model.name_or_path has another config"),
        ("train.jsonl", "It is 0.", "It is 3.", "the first sample's ids from token "),
        ("train.jsonl", "It is 24.", "It is 42.", "(as many of both, and the first one is the same)"),
        ("train.jsonl", "It is 2. It is 2.", "It is 2.", " tokens then and "),
    ],
)
def test_other_content_under_the_same_name_is_refused_and_nothing_is_written(
    inputs: Path, four: Path, file: str, old: str, new: str, said: str
) -> None:
    before = _contents(four)
    with _changed(inputs / file, old, new):
        first, second = shared_ranks(_sentences, 2, [run_config(inputs, four, *RUN, SIX)])
    assert first == second
    assert said in first[0]
    assert _contents(four) == before


class _Tomorrow(datetime.date):
    @classmethod
    def today(cls) -> "_Tomorrow":
        return cls(2100, 1, 1)


def _two_steps_at_midnight(config: Config) -> None:
    with mock.patch.object(resume.datetime, "date", _Tomorrow if dist.get_rank() else datetime.date):
        train_steps(config, 2)


@pytest.mark.slow(why="what may not change stays")
def test_a_template_that_writes_the_date_writes_that_of_the_first_start_by_rank_0(inputs: Path, tmp_path: Path) -> None:
    said = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "."}]
    rows = [{"messages": said}] * 10
    (tmp_path / "chats").mkdir()
    for name in ("a.jsonl", "b.jsonl"):  # one for each rank
        (tmp_path / "chats" / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "template.jinja").write_text(on_the_fly.WRITES_DATE)
    data = [f"data.train=[{{path: {tmp_path / 'chats'}}}]", f"data.chat_template={tmp_path / 'template.jinja'}"]
    run_ranks(_two_steps_at_midnight, 2, run_config(inputs, tmp_path / "run", *RUN, *data, FOUR))
    of_rank = [path.read_bytes() for path in (tmp_path / "run" / "prepared").glob("*/tokens-*.bin")]
    assert len(of_rank) == 2
    assert len(set(of_rank)) == 1
    with mock.patch.object(resume.datetime, "date", _Tomorrow):
        run_ranks(train, 2, run_config(inputs, tmp_path / "run", *RUN, *data, FOUR))
    saved = (tmp_path / "run" / "model" / "chat_template.jinja").read_text()
    assert saved == on_the_fly.WRITES_DATE
    resumed = f"checkpoint.resume={tmp_path / 'run' / 'checkpoints' / 'step-00000002'}"
    with mock.patch.object(prepare, "date_of", return_value=_Tomorrow.today()):
        (first, _) = run_ranks(_sentences, 2, [run_config(inputs, tmp_path / "new", *RUN, *data, resumed, FOUR)])
    assert "the first sample's ids from token " in first[0]


def test_which_checkpoint_to_resume_from_is_refused_in_words_where_it_cannot_be(
    inputs: Path, four: Path, tmp_path: Path
) -> None:
    (tmp_path / "step-00000009").mkdir()
    cases = {
        "checkpoint.resume=never": "checkpoint.resume is never, but ",
        "checkpoint.resume=step-00000003": "checkpoint.resume: step-00000003: no such checkpoint; ",
        "checkpoint.resume=step-00000002": "holds step-00000004, which is later and would be in the way; set ",
        f"checkpoint.resume={tmp_path}/nowhere": "nowhere: no such checkpoint",
        "train.max_steps=3": "step-00000004 is after step 4, but this configuration ends after 3 steps; raise ",
    }
    before = _contents(four)
    first, second = shared_ranks(_sentences, 2, [run_config(inputs, four, *RUN, SIX, case) for case in cases])
    assert first == second
    for (case, text), sentence in zip(cases.items(), first, strict=True):
        assert text in sentence, case
    assert "step-00000002, step-00000004" in first[1]
    assert _contents(four) == before


FREE = {
    "train.max_steps": ("6", "7"),
    "train.num_epochs": ("2", "3"),
    "train.micro_batch_size": ("1", "2"),
    "train.activation_checkpointing": ("auto", "selective"),
    "train.checkpoint_layers": ("all", "2"),
    "moe.dispatch": ("auto", "all_to_all"),
    "moe.compute": ("auto", "loop"),
    "moe.kernels": ("auto", "torch"),
    "parallel.ep": ("2", "1"),
    "parallel.replicate": ("1", "2"),
    "checkpoint.every_steps": ("2", "3"),
    "checkpoint.keep_last": ("3", "1"),
    "checkpoint.asynchronous": ("true", "false"),
    "log.every_steps": ("1", "7"),
    "distributed.timeout_seconds": ("600", "60"),
}


@pytest.mark.slow(why="what may not change stays")
def test_what_may_change_is_printed_and_the_run_is_the_same_to_rounding(
    inputs: Path, four: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_ranks(train, 2, run_config(inputs, tmp_path / "seven", *RUN, "train.max_steps=7"))
    capfd.readouterr()
    resume = f"checkpoint.resume={four / 'checkpoints' / 'step-00000002'}"
    changes = [f"{key}={new.lower()}" for key, (_, new) in FREE.items()]
    run_ranks(train, 2, run_config(inputs, tmp_path / "run", *RUN, *changes, resume))
    (line,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("resume ")]
    assert line.startswith("resume     step-00000002, after step 2; written by 2 ranks; ")
    for key, (old, new) in FREE.items():
        assert f"{key} was {old} and is {new}" in line
    assert f"output_dir was {inputs / 'whole'} and is {tmp_path / 'run'}" in line
    assert [row["step"] for row in metrics(tmp_path / "run")] == [7]
    assert [path.name for _, path in published(tmp_path / "run" / "checkpoints")] == ["step-00000007"]
    _assert_same_weights(tmp_path / "run", tmp_path / "seven", 1e-5)


def test_a_finished_run_goes_on_with_more_steps_and_keeps_its_result(
    inputs: Path, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole, tmp_path / "run")
    here = f"output_dir={tmp_path / 'run'}"
    finished = weights(whole)
    for more in ([SIX], [SIX, "train.num_epochs=1"]):
        with refused("run.finished", naming="raise train.num_epochs ("):
            preflight(run_config(inputs, whole, *RUN, *more, here), 2)
    (_, said) = run_ranks(_sentences, 2, [run_config(inputs, whole, *RUN, SIX, "train.num_epochs=4", here)])
    model = tmp_path / "run" / "model"
    assert (
        f"finished; raise train.num_epochs (4) or train.max_steps (6) to train on, or set model.name_or_path to {model}"
        in said[0]
    )
    seven = run_config(inputs, whole, *RUN, "train.max_steps=7", here)
    capfd.readouterr()
    run_ranks(train, 2, seven)
    out = capfd.readouterr().out
    assert f"finished   before, after step-00000006; its result is now {model}-step-00000006" in out
    assert "train.max_steps was 6 and is 7; 7 steps in all, not 6\n" in out
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6, 7]
    for name, tensor in load_file(tmp_path / "run" / "model-step-00000006" / "model.safetensors").items():
        assert torch.equal(tensor, finished[name])
    assert not torch.equal(weights(tmp_path / "run")["lm_head.weight"], finished["lm_head.weight"])


def test_a_result_that_was_set_aside_before_stays(inputs: Path, tmp_path: Path) -> None:
    config = run_config(inputs, tmp_path, *RUN)
    for content in ("first", "second"):
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text(content)
        set_result_aside(config, tmp_path / "checkpoints" / "step-00000006")
    there = {path.parent.name: path.read_text() for path in tmp_path.glob("model*/config.json")}
    assert there == {"model-step-00000006": "first", "model-step-00000006-2": "second"}


def _best_after(config: Config, best: Best) -> Best | None:
    counters = Counters(best=best)
    run_state._forget_best_elsewhere(config, counters)
    return counters.best


def test_a_best_checkpoint_that_another_run_keeps_is_not_this_runs(inputs: Path, tmp_path: Path) -> None:
    best, config = Best("eval_loss", 1.0, 4), run_config(inputs, tmp_path, *RUN)
    assert shared_ranks(_best_after, 1, config, best) == [None]
    (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    assert shared_ranks(_best_after, 1, config, best) == [best]


def test_what_more_steps_make_of_the_learning_rate_is_said(inputs: Path, tmp_path: Path) -> None:
    config = run_config(inputs, tmp_path / "run", "schedule={name: cosine, warmup_ratio: 0}")
    saved = {"identity": {"config": resume.flat(config.model_dump(mode="json"))}, "total_steps": 4}
    assert resume._rates(config, saved, 4, 8) == [
        "8 steps in all, not 4",
        "by the cosine schedule the next has learning rate 5.00e-03, not 0.00e+00",
    ]


def test_a_run_goes_on_with_another_learning_rate_and_its_moments(
    inputs: Path, four: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the same gradients and moments, a step of AdamW and of its decay is as long as its rate."""
    triple, five = ["optim.learning_rate=3.0e-2", "schedule.name=inverse_sqrt"], "train.max_steps=5"
    for name in ("as it was", "changed"):
        shutil.copytree(four, tmp_path / name)
    with refused("run.other-configuration") as said:
        preflight(run_config(inputs, tmp_path / "changed", *RUN, *triple, five), 2)
    newest = tmp_path / "changed" / "checkpoints" / "step-00000004"
    assert str(said.value).partition("; put it back ")[2] == (
        "to continue that run, set checkpoint.resume_changed to [optim.learning_rate, schedule] to go on with the "
        f"change, set checkpoint.resume to {newest} and checkpoint.resume_weights_only to true, with another "
        "output_dir, to start anew from its weights, or choose another output_dir"
    )
    triple[1] = "checkpoint.resume_changed=[optim.learning_rate, schedule]"
    run_ranks(train, 2, run_config(inputs, tmp_path / "as it was", *RUN, five))
    capfd.readouterr()
    run_ranks(train, 2, run_config(inputs, tmp_path / "changed", *RUN, *triple, five))
    line = next(line for line in capfd.readouterr().out.splitlines() if line.startswith("resume "))
    assert "; optim.learning_rate was 0.01 and is 0.03; " in line
    assert "resume_changed" not in line
    assert line.endswith("by the constant schedule the next has learning rate 3.00e-02, not 1.00e-02")
    assert main(["export", str(newest), "--output", str(tmp_path / "after-4"), "--dtype", "float32"]) == 0
    before = load_file(tmp_path / "after-4" / "model.safetensors")
    for name, slow in weights(tmp_path / "as it was").items():
        step, other = slow - before[name], weights(tmp_path / "changed")[name] - before[name]
        assert (other - 3 * step).norm() <= 1e-4 * other.norm(), name
    with refused("run.finished"):  # what has changed is the run's own from now on
        preflight(run_config(inputs, tmp_path / "changed", *RUN, triple[0], five), 2)


@pytest.mark.slow(why="three launches")
def test_another_run_starts_from_the_weights_of_a_checkpoint_alone(
    inputs: Path, four: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint = four / "checkpoints" / "step-00000004"
    assert main(["export", str(checkpoint), "--output", str(tmp_path / "after-4"), "--dtype", "float32"]) == 0
    other = ["train.seed=7", "optim.learning_rate=2.0e-3", "train.max_steps=2", "data.shuffle=true", "parallel.ep=2"]
    run_ranks(train, 2, run_config(inputs, tmp_path / "exported", *other, f"model.name_or_path={tmp_path / 'after-4'}"))
    alone = [f"checkpoint={{resume: {checkpoint}, resume_weights_only: true, every_steps: 1}}"]
    config = run_config(inputs, tmp_path / "run", *other, *alone)
    capfd.readouterr()
    run_ranks(train_steps, 2, config, 1)
    assert f"weights    {checkpoint}, after step 4; all else begins anew\n" in capfd.readouterr().out
    run_ranks(train, 2, config)  # from its own checkpoint now
    assert "resume     step-00000001, after step 1; " in capfd.readouterr().out
    _assert_same_weights(tmp_path / "run", tmp_path / "exported")
    assert [row["learning_rate"] for row in metrics(tmp_path / "run")] == [
        row["learning_rate"] for row in metrics(tmp_path / "exported")
    ]
    with refused("run.other-configuration", naming="checkpoint.resume_weights_only was true and is false"):
        preflight(run_config(inputs, tmp_path / "run", *other), 2)


@pytest.mark.slow(why="checkpoint/test_layouts.py without the trainer, and test_lora_run.py across one change with it")
def test_four_ranks_then_two_then_one_then_eight_equal_two_all_the_way(inputs: Path, tmp_path: Path) -> None:
    base = ["train.global_batch_size=8", "train.max_steps=8", "train.num_epochs=4", "data.shuffle=true"]
    shared_ranks(train, 2, run_config(inputs, tmp_path / "whole", *base, "parallel.ep=2"))
    for world, ep in ((4, 4), (2, 2), (1, 1)):
        shared_ranks(train_steps, world, run_config(inputs, tmp_path / "run", *base, f"parallel.ep={ep}"), 2)
    last = ["parallel.ep=4", "parallel.replicate=2"]
    shared_ranks(train, 8, run_config(inputs, tmp_path / "run", *base, *last))
    expected, got = metrics(tmp_path / "whole"), metrics(tmp_path / "run")
    for key in ("step", "epoch", "target_tokens", "learning_rate"):
        assert [row[key] for row in got] == [row[key] for row in expected]
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in got] == pytest.approx([row[key] for row in expected], rel=1e-5)
    _assert_same_weights(tmp_path / "run", tmp_path / "whole", 1e-5)


def _train_by_a_clock(config: Config, minutes_per_step: float) -> list[int]:
    """The steps that were saved; rank 0's clock goes so fast, the others' stand still."""
    minutes, saved = [0.0], []

    def overdue(of_run: RunCheckpoints) -> bool:
        minutes[0] += minutes_per_step if of_run.run.mesh.rank == 0 else 0
        return asked(of_run)

    def save(of_run: RunCheckpoints) -> None:
        saved.append(of_run.state.counters.step)
        keep(of_run)

    asked, keep = RunCheckpoints.overdue, RunCheckpoints.save
    began = run_state.time.monotonic()
    clock = SimpleNamespace(monotonic=lambda: began + 60 * minutes[0])
    with (
        mock.patch.object(RunCheckpoints, "overdue", overdue),
        mock.patch.object(RunCheckpoints, "save", save),
        mock.patch.object(run_state, "time", clock),
    ):
        train(config)
    return saved


@pytest.mark.slow(why="checkpoints by steps stay")
def test_minutes_are_rank_0s_and_alone_decide_when_steps_do_not(inputs: Path, tmp_path: Path) -> None:
    every = ["checkpoint.every_steps=null", "checkpoint.every_minutes=5", "checkpoint.keep_last=1", "train.max_steps=8"]
    saved = shared_ranks(_train_by_a_clock, 2, run_config(inputs, tmp_path / "run", *RUN, *every), 2.1)
    assert saved == [[3, 6], [3, 6]]
    assert [path.name for _, path in published(tmp_path / "run" / "checkpoints")] == ["step-00000006"]


def test_the_best_interval_follows_from_what_saves_cost_and_how_often_ranks_fail(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def saved(paused: float, seconds: float) -> SavedCheckpoint:
        return SavedCheckpoint(Path("step-00000004"), 4, 1, 1, 1, paused, seconds)

    assert run_state.best_interval(saved(2, 60), 3600) == 120  # the root of 2 · 2 · 3600
    assert run_state.best_interval(saved(2, 300), 3600) == 300  # the disk does no more
    settings = CheckpointConfig(every_minutes="auto", device_hours_per_failure=4)
    mesh = SimpleNamespace(rank=0, layout=Layout(fsdp=4))
    run: Any = SimpleNamespace(config=SimpleNamespace(checkpoint=settings), mesh=mesh)
    none: Any = None
    kept = RunCheckpoints(run, none, none, {}, none, none, none, saved_at=time.monotonic() - 200)
    assert not kept.overdue()  # the first is after 5 minutes
    with caplog.at_level("INFO"):
        kept._note_saved(saved(2, 60))
        kept._note_saved(saved(2.1, 60))
    assert kept.overdue()
    said = "saved every 2 minutes from here on: a save pauses training for 2.00 s, and 4 ranks fail every 1 h"
    assert caplog.text.count("saved every") == caplog.text.count(said) == 1


def _train_and_count(config: Config, steps: int | None) -> list[int]:
    """The tokens that rank 0's reports are about."""
    tokens = []

    def report(loop: TrainingLoop, *args: Any) -> None:
        tokens.append(loop.state.counters.tokens)
        original(loop, *args)

    original = TrainingLoop._report
    with mock.patch.object(TrainingLoop, "_report", report):
        train(config) if steps is None else train_steps(config, steps)
    return tokens


@pytest.mark.slow(why="seven launches")
def test_counters_of_an_unfinished_report_continue(inputs: Path, tmp_path: Path) -> None:
    reports = ["train.max_steps=8", "log.every_steps=3"]
    counted = shared_ranks(_train_and_count, 2, run_config(inputs, tmp_path / "whole", *RUN, *reports), None)[0]
    config = run_config(inputs, tmp_path / "run", *RUN, *reports)
    before = shared_ranks(_train_and_count, 2, config, 2)[0]
    between = shared_ranks(_train_and_count, 2, config, 3)[0]
    after = shared_ranks(_train_and_count, 2, config, None)[0]
    assert (len(before), len(between), len(after)) == (0, 1, 2)
    assert before + between + after == counted
    assert rows_without_times(tmp_path / "run") == rows_without_times(tmp_path / "whole")
    assert all(torch.equal(t, weights(tmp_path / "run")[name]) for name, t in weights(tmp_path / "whole").items())
