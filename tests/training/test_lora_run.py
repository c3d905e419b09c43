"""Runs with adapters: what stock PEFT reads afterwards, resume across layouts, and the frozen base."""

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from expertmesh.config.errors import InputError, IntegrityError
from expertmesh.export.merge import merge
from expertmesh.training.run import train
from expertmesh.training.startup.preflight import preflight
from tests.support.errors import refused, refused_on_ranks
from tests.support.ranks import shared_ranks
from tests.training.tiny_run import metrics, run_config, train_steps, write_inputs
from tests.weights.published import FORMATS, is_linear, quantise

LORA = ["lora={r: 4, alpha: 8, targets: [attention, experts, router]}", "train.max_steps=4", "train.num_epochs=2"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def _adapter(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "adapter" / "adapter_model.safetensors")


def _worst(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).norm() / one[name].norm().clamp_min(1e-12)) for name in one)


@pytest.mark.slow(why="adapters/test_save.py has every layout without the trainer")
def test_every_layout_trains_the_same_adapter_and_peft_reads_it(inputs: Path, tmp_path: Path) -> None:
    layouts = [(1, "ep=1", "replicate=1"), (2, "ep=2", "replicate=1"), (4, "ep=2", "replicate=2")]
    for number, (world, ep, replicate) in enumerate(layouts):
        options = [*LORA, f"parallel.{ep}", f"parallel.{replicate}"]
        shared_ranks(train, world, run_config(inputs, tmp_path / str(number), *options))
    first = _adapter(tmp_path / "0")
    for number in (1, 2):
        assert _worst(first, _adapter(tmp_path / str(number))) <= 1e-5
    losses = [[row["loss"] for row in metrics(tmp_path / str(number))] for number in range(3)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    base = AutoModelForCausalLM.from_pretrained(inputs / "model")
    adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "1" / "adapter"))
    loaded = {name: tensor for name, tensor in adapted.named_parameters() if "lora_B" in name}
    assert all(tensor.count_nonzero() for name, tensor in loaded.items() if "experts" not in name)
    config = json.loads((tmp_path / "1" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(inputs / "model")
    assert not (tmp_path / "1" / "model").exists()


@pytest.mark.slow_cases(r"0.0", why="with dropout stays")
@pytest.mark.parametrize("dropout", ["0.0", "0.3"])
def test_two_and_two_steps_across_a_change_of_layout_are_four(inputs: Path, tmp_path: Path, dropout: str) -> None:
    options = [*LORA, f"lora.dropout={dropout}"]
    shared_ranks(train, 2, run_config(inputs, tmp_path / "whole", *options, "parallel.ep=2"))
    shared_ranks(train_steps, 2, run_config(inputs, tmp_path / "broken", *options, "parallel.ep=2"), 2)
    shared_ranks(train, 4, run_config(inputs, tmp_path / "broken", *options, "parallel.ep=4"))
    assert _worst(_adapter(tmp_path / "whole"), _adapter(tmp_path / "broken")) <= 1e-5
    held = json.loads((tmp_path / "broken" / "checkpoints" / "step-00000002" / "manifest.json").read_text())
    assert all("lora" in name for name in held["model"])


@pytest.mark.slow(why="adapters/test_dropout.py compares what is dropped")
def test_dropout_changes_what_is_learned(inputs: Path, tmp_path: Path) -> None:
    for dropout in ("0.0", "0.3"):
        shared_ranks(train, 1, run_config(inputs, tmp_path / dropout, *LORA, f"lora.dropout={dropout}"))
    assert _worst(_adapter(tmp_path / "0.0"), _adapter(tmp_path / "0.3")) > 1e-3


@pytest.mark.slow(why="adapters/test_start.py refuses another base")
def test_another_base_is_refused_when_a_run_is_resumed(inputs: Path, tmp_path: Path) -> None:
    other = write_inputs(tmp_path / "inputs")
    config = run_config(other, tmp_path / "run", *LORA)
    shared_ranks(train_steps, 1, config, 2)
    path = other / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.self_attn.o_proj.weight"][3, 5] += 1e-3
    save_file(tensors, path, metadata={"format": "pt"})
    with refused_on_ranks("adapter.other-base", IntegrityError):
        shared_ranks(train, 1, config)
    assert IntegrityError.exit_code == 3


def test_a_target_that_matches_nothing_is_refused_before_ranks_start(inputs: Path, tmp_path: Path) -> None:
    with refused("lora.targets-nothing", naming="q_projj"):
        preflight(run_config(inputs, tmp_path / "run", "lora={targets: [q_projj]}"), 2)
    assert InputError.exit_code == 2


def test_an_adapter_that_does_not_fit_its_config_is_refused_before_ranks_start(inputs: Path, tmp_path: Path) -> None:
    shared_ranks(
        train, 1, run_config(inputs, tmp_path / "first", "lora={r: 4, targets: [attention]}", "train.max_steps=1")
    )
    weights = tmp_path / "first" / "adapter" / "adapter_model.safetensors"
    tensors = load_file(weights)
    missing = min(tensors)
    save_file({name: tensor for name, tensor in tensors.items() if name != missing}, weights)
    with refused("adapter.differs-from-its-config", IntegrityError, naming=f"{weights}: has no {missing}"):
        preflight(run_config(inputs, tmp_path / "run", f"lora.from_adapter={weights.parent}"), 2)


def test_the_adapter_says_which_revision_of_the_base_it_was_trained_on(inputs: Path, tmp_path: Path) -> None:
    """Merging reads it, and with another revision would find another base."""
    shared_ranks(train_steps, 1, run_config(inputs, tmp_path / "run", *LORA, "model.revision=v1.2"), 1)
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert json.loads((checkpoint / "adapter" / "adapter_config.json").read_text())["revision"] == "v1.2"


@pytest.mark.slow(why="adapters/test_start.py reads PEFT's directory")
@pytest.mark.parametrize("frozen", ["null", "mxfp4"])
def test_a_run_from_a_peft_directory_is_resumed_from_its_own_config(frozen: str, inputs: Path, tmp_path: Path) -> None:
    shared_ranks(train, 1, run_config(inputs, tmp_path / "first", *LORA, f"precision.frozen={frozen}"))
    options = [f"lora.from_adapter={tmp_path / 'first' / 'adapter'}", "train.max_steps=4", "train.num_epochs=2"]
    options += [f"precision.frozen={frozen}"]
    shared_ranks(train, 1, run_config(inputs, tmp_path / "whole", *options))
    shared_ranks(train_steps, 1, run_config(inputs, tmp_path / "broken", *options), 2)
    shared_ranks(train, 2, run_config(inputs, tmp_path / "broken", *options, "parallel.ep=2"))
    assert _worst(_adapter(tmp_path / "whole"), _adapter(tmp_path / "broken")) <= 1e-5


@pytest.mark.slow(why="adapters/test_frozen.py has the gradients")
def test_a_quantised_base_trains_as_its_values_do_and_is_merged_as_plain_weights(inputs: Path, tmp_path: Path) -> None:
    for kind in ("quantised", "values"):
        base = quantise(inputs / "model", tmp_path / kind, FORMATS["fp8 partial blocks"](), is_linear) / kind
        for path in (inputs / "model").glob("tokenizer*"):
            shutil.copy(path, base)
        options = [*LORA, "parallel.ep=2", f"model.name_or_path={base}"]
        shared_ranks(train, 2, run_config(inputs, tmp_path / f"{kind}/run", *options))
        merge(tmp_path / f"{kind}/run/adapter", tmp_path / f"{kind}/merged", dtype=torch.bfloat16)
    rows = [[row["loss"] for row in metrics(tmp_path / f"{kind}/run")] for kind in ("quantised", "values")]
    assert rows[0] == rows[1]
    merged = [load_file(tmp_path / f"{kind}/merged/model.safetensors") for kind in ("quantised", "values")]
    assert merged[0].keys() == merged[1].keys()
    assert all(torch.equal(tensor, merged[1][name]) for name, tensor in merged[0].items())
    AutoModelForCausalLM.from_pretrained(tmp_path / "quantised/merged")
