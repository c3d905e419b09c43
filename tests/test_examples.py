"""Every example is dry-run against its model's published config.json, and the example script trains on two ranks."""

import contextlib
import functools
import io
import json
import math
import os
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from expertmesh.config import Config, load_config
from expertmesh.planning.forecast import forecast
from expertmesh.planning.hardware import hardware_table, parse_devices
from expertmesh.training.reporting.record import Forecast
from expertmesh.training.startup.model_check import check_model
from expertmesh.weights.meta_model import read_model_config
from tests.data.tokenizers_on_the_fly import bpe_tokenizer
from tests.support.errors import refused
from tests.support.models import tiny_model
from tests.support.ranks import run_ranks, shared_ranks

EXAMPLES = Path(__file__).parents[1] / "examples"
PUBLISHED = Path(__file__).parent / "published"
PREDICTED = re.compile(r"# Predicted for (?P<devices>[^:]+): (?P<figures>.+)\.\n")
FILES = sorted(EXAMPLES.glob("*.yaml"))


def _published(name: str, directory: Path) -> Path:
    """A directory with the published config.json of a model and, of MXFP4, headers of the experts' codes."""
    directory.mkdir()
    text = (PUBLISHED / f"{name.replace('/', '--')}.json").read_text()
    (directory / "config.json").write_text(text)
    content = json.loads(text)
    if content.get("quantization_config", {}).get("quant_method") == "mxfp4":
        _write_headers(content, directory / "model.safetensors")
    return directory


def _write_headers(content: dict[str, Any], path: Path) -> None:
    """Of the published files of GPT-OSS: experts in blocks of 32 codes of 4 bits and scales. The file is a hole."""
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(AutoConfig.for_model(**content)).state_dict()
    header, end = {}, 0
    for name, tensor in state.items():
        shapes = {name: ("BF16", [*tensor.shape], 2)}
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = tensor.shape
            scales = [experts, rows, columns // 32]
            shapes = {f"{name}_blocks": ("U8", [*scales, 16], 1), f"{name}_scales": ("U8", scales, 1)}
        for key, (dtype, shape, width) in shapes.items():
            size = width * math.prod(shape)
            header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
            end += size
    encoded = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + end)


def _dry_run(file: Path, directory: Path) -> tuple[str, Forecast]:
    """What the comment of an example says, and what a step on its devices is predicted to take."""
    said = PREDICTED.search(file.read_text())
    assert said is not None
    config = load_config(file)
    model_config, published = read_model_config(str(_published(config.model.name_or_path, directory)))
    devices = parse_devices(said["devices"], hardware_table())
    checked = check_model(config, model_config, published, devices.count, devices.per_node)
    return said["figures"], forecast(config, checked, devices)


@pytest.mark.slow_cases(r"(?!olmoe|mixtral).*", why="builds a published model of dozens of layers on meta; two stay")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_example_passes_with_the_published_config_as_its_comment_predicts(file: Path, tmp_path: Path) -> None:
    """Layout, targets, packing and precision, as `train` checks them before it reads weights."""
    figures, found = _dry_run(file, tmp_path / "model")
    assert found.line == figures
    assert found.warning is None


@pytest.mark.slow_cases(r"(?!olmoe|mixtral|gpt-oss-20b).*", why="the same; three stay")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_published_config_passes_with_the_default_of_every_key(file: Path, tmp_path: Path) -> None:
    """All but what says what is wanted: the model, the data, adapters, the objective, and a batch with a row a rank."""
    example = load_config(file)
    wanted = example.model_dump(mode="json", include={"model": {"name_or_path"}, "output_dir": True})
    given = example.model_dump(mode="json", include={"lora", "objective"}, exclude_none=True)
    sources = [source.model_dump(mode="json", include={"path"}) for source in example.data.train]
    batch = {"global_batch_size": example.train.global_batch_size}
    config = Config.model_validate({**wanted, **given, "data": {"train": sources}, "train": batch})
    said = PREDICTED.search(file.read_text())
    assert said is not None
    devices = parse_devices(said["devices"], hardware_table())
    model_config, published = read_model_config(str(_published(config.model.name_or_path, tmp_path / "model")))
    checked = check_model(config, model_config, published, devices.count, devices.per_node)
    assert checked.layout.world_size == devices.count


def test_a_default_that_a_published_config_contradicts_is_found(tmp_path: Path) -> None:
    for example, right, wrong, key in (
        ("olmoe-1b-7b", "ep: 8", "ep: 7", "layout.ep-divides-ranks"),
        ("olmoe-1b-7b", "max_length: 4096", "max_length: 8192", "model.max-positions"),
    ):
        text = (EXAMPLES / f"{example}.yaml").read_text()
        assert right in text
        spoilt = tmp_path / f"{key}.yaml"
        spoilt.write_text(text.replace(right, wrong))
        with refused(key):
            _dry_run(spoilt, tmp_path / key)


def _write_inputs(directory: Path) -> None:
    tokenizer = bpe_tokenizer()
    tiny_model("qwen3_moe", vocab_size=len(tokenizer)).save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    lines = [json.dumps({"text": f"one and one is {n}"}) + "\n" for n in range(8)]
    (directory / "train.jsonl").write_text("".join(lines))


def _run(directory: Path, source: str, arguments: list[str], **environment: str) -> str:
    """Run the code of an example as a rank of torchrun does, in a rank of `run_ranks`; returns what it printed."""
    world = str(dist.get_world_size())
    rank = {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank())}
    worlds = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {**rank, **worlds, "HF_HUB_OFFLINE": "1", **environment}
    os.chdir(directory)
    printed = io.StringIO()
    own_end = mock.patch.object(dist, "destroy_process_group")  # run_ranks ends the group itself
    with contextlib.redirect_stdout(printed), own_end, mock.patch.object(sys, "argv", ["example", *arguments]):
        exec(compile(source, "example", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def _run_with_trl(directory: Path, script: str, data: str, **environment: str) -> None:
    run_ranks(functools.partial(_run, **environment), 2, directory, _source(script), ["model", data, "out"])


def _source(script: str) -> str:
    return (EXAMPLES / script).read_text()


@pytest.mark.slow(why="test_sft.py has this trainer")
def test_the_example_with_trl_trains_and_resumes(tmp_path: Path) -> None:
    _write_inputs(tmp_path)
    for steps in (2, 4):
        _run_with_trl(tmp_path, "sft_with_trl.py", "train.jsonl", MAX_STEPS=str(steps))
        AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    state = json.loads((tmp_path / "out" / "checkpoint-4" / "trainer_state.json").read_text())
    assert [row["step"] for row in state["log_history"] if "loss" in row] == [1, 2, 3, 4]


@pytest.mark.slow(why="test_dpo.py and test_grpo.py have these trainers")
def test_the_examples_with_preferences_and_rewards_run(tmp_path: Path) -> None:
    _write_inputs(tmp_path)
    row = {"prompt": "one and one is", "chosen": " 2", "rejected": " not known to anybody"}
    (tmp_path / "pairs.jsonl").write_text((json.dumps(row) + "\n") * 8)
    _run_with_trl(tmp_path, "dpo_with_trl.py", "pairs.jsonl", MAX_STEPS="2")
    assert (tmp_path / "out" / "adapter" / "adapter_model.safetensors").exists()
    (tmp_path / "prompts.jsonl").write_text((json.dumps({"prompt": row["prompt"]}) + "\n") * 8)
    _run_with_trl(tmp_path, "grpo_with_trl.py", "prompts.jsonl", MAX_STEPS="2", MAX_COMPLETION="4")
    AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")


def _losses(printed: str) -> list[float]:
    return [float(line.split()[3]) for line in printed.splitlines() if line.startswith("step")]


@pytest.mark.slow(why="starts torchrun")
def test_the_python_example_trains_and_saves(tmp_path: Path) -> None:
    _write_inputs(tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += [str(EXAMPLES / "train_without_trainer.py"), "model", "train.jsonl", "out"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    losses = _losses(run.stdout)
    assert len(losses) == 10, run.stderr[-3000:]
    assert losses[-1] < losses[0]
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(not torch.equal(before[name], tensor) for name, tensor in after.items())  # everything trained


def _in_layout(directory: Path, parallel: str, rows: int) -> list[float]:
    """The example with another layout and as many rows in a step: its losses on rank 0."""
    source = _source("train_without_trainer.py")
    changes = {"em.ParallelConfig(ep=2)": f"em.ParallelConfig({parallel})", "= 10, 4, 256": f"= 3, {rows}, 256"}
    for old, new in changes.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return _losses(_run(directory, source, ["model", "train.jsonl", parallel]))


@pytest.mark.slow(why="test_readme.py runs a loop of the same interface")
def test_the_python_example_computes_the_same_in_every_layout(tmp_path: Path) -> None:
    _write_inputs(tmp_path)
    expected = shared_ranks(_in_layout, 2, tmp_path, "ep=2", 4)[0]
    assert len(expected) == 3
    for parallel in ("ep=2, tp=2", "ep=2, cp=2", "ep=1, pp=2"):
        assert shared_ranks(_in_layout, 2, tmp_path, parallel, 8)[0] == pytest.approx(expected, rel=1e-2), parallel


if __name__ == "__main__":  # `python -m tests.test_examples`: the comments' figures anew, after the planner has changed
    for example in FILES:
        with tempfile.TemporaryDirectory() as scratch:
            now = _dry_run(example, Path(scratch, "model"))[1].line
        line = PREDICTED.sub(lambda said, now=now: f"# Predicted for {said['devices']}: {now}.\n", example.read_text())
        example.write_text(line)
