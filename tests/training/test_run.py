"""A whole run on real ranks: files in, trained Hugging Face directory out, against plain torch on the same rows."""

import gzip
import json
import math
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from expertmesh.cli.main import main
from expertmesh.config import Config, load_config
from expertmesh.config.errors import InputError, IntegrityError
from expertmesh.data import TokenizedDataset
from expertmesh.launcher.worker import run_rank
from expertmesh.planning.forecast import train_with_forecast
from expertmesh.state import model_view
from expertmesh.step import forward_backward as step_module
from expertmesh.step.loss import Term
from expertmesh.training import run as run_module
from expertmesh.training.control import Control
from expertmesh.training.run import train
from expertmesh.training.startup.preflight import preflight
from expertmesh.weights import meta_model
from tests.support.errors import refused, refused_on_ranks
from tests.support.models import tiny_model
from tests.support.ranks import RankFailed, run_ranks, shared_ranks
from tests.training.tiny_run import GLOBAL_BATCH, ROWS, STEPS, metrics, run_config, write_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory and a data file."""
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def _by_hand(inputs: Path) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """The same run in plain torch and transformers: rows s*G .. s*G+G-1 at step s, one process."""
    model = AutoModelForCausalLM.from_pretrained(inputs / "model").train()
    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.01)
    warmup, rows = 2, []
    for step in range(STEPS):
        factor = (step + 1) / warmup if step < warmup else 1 - (step - warmup) / (STEPS - warmup)
        samples = []
        for row in ROWS[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH]:
            prompt = tokenizer(row["prompt"], add_special_tokens=False).input_ids
            answer = [*tokenizer(row["completion"], add_special_tokens=False).input_ids, tokenizer.eos_token_id]
            samples.append((prompt + answer, [-100] * len(prompt) + answer))
        targets = sum(label != -100 for _, labels in samples for label in labels[1:])
        total = 0.0
        for ids, labels in samples:
            logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
            loss = F.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum", ignore_index=-100) / targets
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
        optimizer.param_groups[0]["lr"] = 1e-2 * factor
        optimizer.step()
        optimizer.zero_grad()
        rows.append({"loss": total, "grad_norm": norm, "learning_rate": 1e-2 * factor, "target_tokens": float(targets)})
    return rows, {name: tensor.detach() for name, tensor in model.state_dict().items()}


@pytest.mark.slow_cases(r"(1|2)-overrides[013]", why="four ranks in two groups stay")
@pytest.mark.parametrize(
    ("world", "overrides"),
    [(1, []), (2, ["parallel.ep=2"]), (4, ["parallel.ep=2"]), (2, ["parallel.replicate=2"])],
)
def test_a_run_equals_plain_torch_on_the_rows_in_file_order(
    inputs: Path, tmp_path: Path, world: int, overrides: list[str]
) -> None:
    config = run_config(inputs, tmp_path / "run", *overrides)
    shared_ranks(train, world, config)
    expected, weights = _by_hand(inputs)
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row, want in zip(rows, expected, strict=True):
        for key, value in want.items():
            assert row[key] == pytest.approx(value, rel=1e-5), (key, row["step"])
        assert row["tokens_per_second"] > 0
        assert row["peak_memory_bytes"] > 0
        keys = {"max_over_mean", "entropy", "dead", *(["ranks_max_over_mean"] if "parallel.ep=2" in overrides else [])}
        assert [set(layer) for layer in row["expert_load"]] == [keys] * 2

    trained, report = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, tensor in trained.state_dict().items():
        assert (tensor - weights[name]).norm() <= 1e-5 * weights[name].norm(), name
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "model").chat_template
    assert load_config(tmp_path / "run" / "config.yaml") == config


def test_packed_shuffled_epochs_evaluation_tensorboard_and_profile(
    inputs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["data.packing=true", "data.shuffle=true", "train.max_steps=null", "train.num_epochs=2"]
    options += [f"data.eval=[{{path: {inputs / 'train.jsonl'}}}]", "train.eval_every_steps=1"]
    options += [
        "train.activation_checkpointing=selective",
        "train.checkpoint_layers=[1]",
        "log.report_to=[tensorboard]",
        "optim={name: sgd}",
    ]
    run_ranks(train, 2, run_config(inputs, tmp_path / "run", *options), Control(profile=(2, 2)))
    for rank in (0, 1):
        with gzip.open(tmp_path / "run" / "profile" / f"steps-2-2-rank-{rank}.json.gz") as file:
            spans = Counter(event["name"] for event in json.load(file)["traceEvents"] if event.get("ph") == "X")
        (times,) = {spans[f"expertmesh::{part}"] for part in ("dispatch", "experts", "combine")}
        assert times >= 2 * 2  # two layers, in training and in evaluation
        assert "ProfilerStep#1" in spans
        assert "ProfilerStep#0" not in spans
    said = capfd.readouterr()
    assert "memory     activation checkpointing selective of 1 of 2 blocks (1)\n" in said.out
    assert "USDT" not in said.out + said.err
    rows = metrics(tmp_path / "run")
    steps = [row for row in rows if "loss" in row]
    evaluations = [row for row in rows if "eval_loss" in row]
    assert len(steps) == len(evaluations) >= 2
    assert evaluations[-1]["eval_loss"] < evaluations[0]["eval_loss"]
    assert steps[-1]["epoch"] == 2.0
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def _train_with_bad_losses(config: Config, bad_steps: set[int]) -> None:
    real, step = step_module.loss_of_batch, 0

    def poisoned(*args: Any, **kwargs: Any) -> Term:
        nonlocal step
        step += 1  # one micro-batch a step
        term = real(*args, **kwargs)
        return replace(term, loss=term.loss * float("nan")) if step in bad_steps and dist.get_rank() == 1 else term

    with mock.patch.object(step_module, "loss_of_batch", poisoned):
        train(config)


def _run_rank(config: Config) -> tuple[int, bool, str | None]:
    code = run_rank(config, "expertmesh.training.run:train", Control())
    return code, torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")


def test_a_deterministic_run_takes_torchs_deterministic_algorithms_in_all_that_it_does(
    inputs: Path, tmp_path: Path
) -> None:
    options = ("train.deterministic=true", "train.max_steps=1", "checkpoint.every_steps=1")
    assert shared_ranks(_run_rank, 1, run_config(inputs, tmp_path / "run", *options)) == [(0, True, ":4096:8")]


def test_a_loss_that_is_not_finite_on_one_rank_skips_the_step_on_every_rank(inputs: Path, tmp_path: Path) -> None:
    # Reported although only every third step is.
    options = ["parallel.ep=2", "train.micro_batch_size=2", "log.every_steps=3"]
    shared_ranks(_train_with_bad_losses, 2, run_config(inputs, tmp_path / "run", *options), {2})
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [2, 3]
    assert rows[0]["loss"] is None
    assert rows[0]["skipped"] == "the loss is nan on rank 1"
    assert math.isfinite(rows[1]["loss"])
    assert math.isfinite(rows[1]["grad_norm"])


def test_three_such_steps_in_a_row_end_the_run_with_rank_and_step(inputs: Path, tmp_path: Path) -> None:
    config = run_config(
        inputs, tmp_path / "run", "parallel.ep=2", "train.micro_batch_size=2", "train.num_epochs=2", "train.max_steps=6"
    )
    with refused_on_ranks("train.not-finite", IntegrityError, naming="step 4: the loss is nan on rank 1"):
        shared_ranks(_train_with_bad_losses, 2, config, {2, 3, 4})
    assert not (tmp_path / "run" / "model").exists()


def _train_on_other_data_on_rank_1(config: Config) -> str:
    own_file = mock.patch.object(TokenizedDataset, "sha256", side_effect=lambda: f"of rank {dist.get_rank()}")
    with own_file, pytest.raises(InputError) as refused:
        train(config)
    return str(refused.value)


def test_ranks_with_other_files_than_rank_0_are_named_before_weights_are_read(inputs: Path, tmp_path: Path) -> None:
    first, second = shared_ranks(
        _train_on_other_data_on_rank_1, 2, run_config(inputs, tmp_path / "run", "parallel.ep=2")
    )
    assert first == second
    assert re.fullmatch(r"rank 1 on host .* has not what rank 0 has: the data; give every machine .*", first)


REFUSALS = {
    "the same run, finished": ([], "run.finished"),
    "another run": (["train.seed=1"], "run.other-configuration"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_directory_that_holds_a_run_is_never_written_into(inputs: Path, tmp_path: Path, case: str) -> None:
    overrides, key = REFUSALS[case]
    first = run_config(inputs, tmp_path / "run", "train.max_steps=1")
    shared_ranks(train, 1, first)
    with refused(key):
        preflight(run_config(inputs, tmp_path / "run", "train.max_steps=1", *overrides), 1)


def _run_out_of_memory(config: Config) -> str:
    failing = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of")
    with mock.patch.object(run_module, "load_state", side_effect=failing), pytest.raises(InputError) as caught:
        train_with_forecast(config)
    assert caught.value.key == "run.out-of-memory"
    return str(caught.value)


@pytest.mark.slow(why="that another configuration is refused stays")
def test_a_start_that_did_no_step_gives_its_directory_to_any_configuration(inputs: Path, tmp_path: Path) -> None:
    config = run_config(inputs, tmp_path / "run", "train.max_steps=1", "parallel.ep=2")
    said = shared_ranks(_run_out_of_memory, 2, config)
    assert (tmp_path / "run" / "config.yaml").exists()
    for rank, sentence in enumerate(said):
        assert sentence.startswith(f"rank {rank} ran out of memory before the first step, ")
        assert ": CUDA out of memory; predicted " in sentence
        assert "predicted to fit, the fastest first: train.activation_checkpointing=" in sentence
    shared_ranks(train, 1, run_config(inputs, tmp_path / "run", "train.max_steps=1", "train.seed=7"))
    with refused("run.other-configuration"):
        preflight(config, 2)


def test_fewer_steps_than_max_steps_are_said(inputs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(train, 1, run_config(inputs, tmp_path / "run", "train.max_steps=9"))
    assert (
        "steps      4 optimizer steps in 1 epoch of the data, fewer than train.max_steps 9, " in capfd.readouterr().out
    )


@pytest.mark.parametrize(
    ("overrides", "world", "sentence"),
    [
        (["parallel.ep=3"], 2, "ep 3 does not divide"),
        (["train.global_batch_size=3"], 2, "global_batch_size 3 is not a multiple"),
        (["data.train.0.path=./absent.jsonl"], 1, "absent.jsonl does not exist"),
        (["model.name_or_path=/nowhere/model"], 1, "/nowhere/model"),
        (["moe.compute=grouped_mm", "precision={params: float64, compute: float64, reduce: float64}"], 1, "float64"),
        (["moe.dispatch=hierarchical"], 2, "ep 1 is not several whole nodes"),
    ],
)
def test_what_cannot_work_is_refused_before_any_rank_starts(
    inputs: Path, tmp_path: Path, overrides: list[str], world: int, sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        preflight(run_config(inputs, tmp_path / "run", *overrides), world)
    assert not (tmp_path / "run").exists()


def _without_weights(root: Path) -> None:
    (root / "model" / "model.safetensors").unlink()


def _in_two_shards(root: Path) -> dict[str, str]:
    """Names of tensors to the file that holds them."""
    file = root / "model" / "model.safetensors"
    tensors = load_file(file)
    names, index = sorted(tensors), {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        shard = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, file.with_name(shard))
        index |= dict.fromkeys(part, shard)
    file.unlink()
    file.with_name("model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return index


def _without_a_shard(root: Path) -> None:
    (root / "model" / min(_in_two_shards(root).values())).unlink()


def _an_index_alone(root: Path) -> None:
    for shard in set(_in_two_shards(root).values()):
        (root / "model" / shard).unlink()


def _without_a_tensor(root: Path) -> None:
    file = root / "model" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file)


def _without_a_tokenizer(root: Path) -> None:
    (root / "model" / "tokenizer.json").unlink()


def _a_file_above_output_dir(root: Path) -> None:
    (root / "runs").write_text("not a directory")


def _no_right_to_write(root: Path) -> None:
    (root / "runs").mkdir(mode=0o500)


def _data_in(name: str) -> Callable[[Path], None]:
    def write(root: Path) -> None:
        (root / "data").mkdir()
        (root / "data" / name).touch()

    return write


def _nothing(root: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("spoil", "override", "key"),
    [
        (_without_weights, "", "weights.not-found"),
        (_without_a_shard, "", "weights.not-found"),
        (_an_index_alone, "", "weights.not-found"),
        (_without_a_tensor, "", "weights.does-not-fit"),
        (_without_a_tokenizer, "", "tokenizer.not-loaded"),
        (_a_file_above_output_dir, "", "output.is-a-file"),
        (_no_right_to_write, "", "output.unwritable"),
        (_nothing, "data.train=data/absent.csv", "data.not-found"),
        (_nothing, "data.train=absent.jsonl.gz", "data.not-found"),
        (_data_in("notes.md"), "data.train=data/notes.md", "data.unsupported-file"),
        (_data_in("notes.md"), "data.eval=./data", "data.no-files"),
        (_nothing, "data.chat_template=absent.jinja", "data.not-found"),
        (_nothing, "lora.from_adapter=absent", "adapter.unreadable-config"),
        (_nothing, "checkpoint.resume=absent/step-00000004", "checkpoint.not-found"),
    ],
)
def test_a_file_that_is_not_there_is_refused_before_any_rank_starts(
    inputs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], None],
    override: str,
    key: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(inputs / "model", tmp_path / "model")
    spoil(tmp_path)
    run_config(inputs, tmp_path / "run")
    given = ["model.name_or_path=model", "output_dir=runs/first", *([override] if override else [])]
    if key == "output.unwritable" and os.geteuid() == 0:  # who may write everywhere
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert main(["--error-format", "json", "train", "run.yaml", *given, "--nproc", "2"]) in (2, 3)
    out, err = capsys.readouterr()
    assert json.loads(err)["key"] == key
    assert "each of which imports" not in out
    assert not Path("runs/first").exists()


def test_a_starting_point_with_a_value_that_is_not_finite_is_refused(inputs: Path, tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", vocab_size=len(AutoTokenizer.from_pretrained(inputs / "model")))
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj[5, 3, 2] = float("inf")
    model.save_pretrained(tmp_path / "bad")
    AutoTokenizer.from_pretrained(inputs / "model").save_pretrained(tmp_path / "bad")
    config = run_config(inputs, tmp_path / "run", f"model.name_or_path={tmp_path / 'bad'}", "parallel.ep=2")
    with pytest.raises(RankFailed, match=r"IntegrityError.*layers\.0\.mlp\.experts"):
        shared_ranks(train, 2, config)


HOMES = {"build_meta_model": meta_model, "meta_copy": model_view}


def _counted(config: Config) -> tuple[int, int]:
    """Models built on meta and twins copied in one rank of a run, whoever calls for them."""
    counts = dict.fromkeys(HOMES, 0)
    with ExitStack() as stack:
        for name, home in HOMES.items():
            real = getattr(home, name)

            def count(*args: Any, name: str = name, real: Any = real, **options: Any) -> Any:
                counts[name] += 1
                return real(*args, **options)

            for module in [module for key, module in sys.modules.items() if key.startswith("expertmesh.")]:
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, count))
        train_with_forecast(config)
    return counts["build_meta_model"], counts["meta_copy"]


@pytest.mark.slow_cases(r".*pp.*", why="ep stays")
@pytest.mark.parametrize("parallel", ["parallel.ep=2", "parallel={pp: 2, ep: 1}"])
def test_a_start_builds_one_model_on_meta_and_copies_it_at_most_once(
    inputs: Path, tmp_path: Path, parallel: str
) -> None:
    bf16 = "precision={params: float32, compute: bfloat16}"
    config = run_config(inputs, tmp_path / "run", bf16, parallel, "train.max_steps=1")
    for built, copied in shared_ranks(_counted, 2, config):
        assert built == 1
        assert copied <= 1
