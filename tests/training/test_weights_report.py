"""What `train` says about weights: the audit, what the model leaves out, the first loss; and that it is so."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import expertmesh.model as loading
from expertmesh.config import Config
from expertmesh.config.errors import IntegrityError
from expertmesh.export.checkpoint import export
from expertmesh.export.merge import convert
from expertmesh.state.shards import local_tensor
from expertmesh.training.control import Control
from expertmesh.training.reporting.weights import loaded_lines, saved_lines
from expertmesh.training.run import train
from expertmesh.training.startup.preflight import preflight
from expertmesh.weights.audit import AuditReport
from expertmesh.weights.load import LoadReport, UnmappedTensors, fill
from expertmesh.weights.save import SaveReport
from tests.support.errors import refused
from tests.support.ranks import run_ranks, shared_ranks
from tests.training.tiny_run import metrics, run_config, weights, write_inputs
from tests.weights.published import FORMATS, is_linear, quantise

MTP = {
    "model.layers.61.enorm.weight": torch.arange(32).bfloat16(),
    "model.layers.61.mlp.experts.0.up_proj.weight": torch.randn(16, 32),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeepSeek-V3 directory with an MTP layer, and data."""
    root = write_inputs(tmp_path_factory.mktemp("inputs"), "deepseek_v3")
    path = root / "model" / "model.safetensors"
    save_file({**load_file(path), **MTP}, path, metadata={"format": "pt"})
    return root


@pytest.mark.slow(why="weights/test_audit.py stays")
def test_a_run_audits_in_full_keeps_the_mtp_layer_and_says_so(
    inputs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_ranks(train, 2, run_config(inputs, tmp_path / "run", "parallel.ep=2"), Control(audit="full"))
    out = capfd.readouterr().out
    audit = json.loads((tmp_path / "run" / "audit.json").read_text())
    source = load_file(inputs / "model" / "model.safetensors")
    compared = sum(tensor.nbytes for name, tensor in source.items() if name not in MTP)
    assert compared <= audit["bytes_compared"] <= 1.01 * compared
    assert [len(experts["sha256"]) for experts in audit["experts"]] == [8]
    assert len(set(audit["experts"][0]["sha256"])) == 8
    assert f"audit      full: all {audit['bytes_compared']:,} bytes on all ranks equal the files" in out
    assert out.count("left out   model.layers.61.* (2 tensors, 2.1 KiB)") == 1
    assert out.count("kept       model.layers.61.* (2 tensors, 2.1 KiB)") == 1

    saved = weights(tmp_path / "run")
    assert saved.keys() == source.keys()
    assert all(torch.equal(saved[name], tensor) and saved[name].dtype == tensor.dtype for name, tensor in MTP.items())
    _, notes = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", output_loading_info=True)
    assert not any(notes.values()), notes

    vocabulary = len(source["lm_head.weight"])
    loss = metrics(tmp_path / "run")[0]["loss"]
    guess = f"ln {vocabulary:,} = {math.log(vocabulary):.3f}"
    assert out.count(f"first loss {loss:.3f} before any update; a uniform guess scores {guess}") == 1
    assert "warning" not in out


def test_the_model_of_a_run_and_that_of_its_last_checkpoint_are_the_same_in_the_dtypes_of_the_source(
    inputs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(inputs, tmp_path / "inputs")
    path = tmp_path / "inputs" / "model" / "model.safetensors"
    save_file({name: value.bfloat16() for name, value in load_file(path).items()}, path, metadata={"format": "pt"})
    config = run_config(tmp_path / "inputs", tmp_path / "run", "parallel.ep=2", "checkpoint.every_steps=2")
    run_ranks(train, 2, config)
    saved = weights(tmp_path / "run")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    assert f"saved {tmp_path / 'run' / 'model'} in bfloat16" in capfd.readouterr().out
    export(tmp_path / "run" / "checkpoints" / "step-00000003", tmp_path / "exported")
    for file in (tmp_path / "exported").iterdir():
        assert file.read_bytes() == (tmp_path / "run" / "model" / file.name).read_bytes(), file.name


@pytest.mark.slow(why="weights/test_encoding.py has the bytes")
def test_a_run_on_quantised_files_leaves_them_as_loaded_and_that_model_is_loaded_and_equal(tmp_path: Path) -> None:
    """Every tensor is the trained one to the rounding of its format, what has no codes bit for bit."""
    root = write_inputs(tmp_path / "inputs", hidden_size=64, moe_intermediate_size=64)
    base = quantise(root / "model", tmp_path / "base", FORMATS["fp8 blocks"](), is_linear) / "quantised"
    for path in (root / "model").glob("tokenizer*"):
        shutil.copy(path, base)
    for dtype in ("as_loaded", "float32"):
        options = ("parallel.ep=2", f"model.name_or_path={base}", f"save.dtype={dtype}")
        shared_ranks(train, 2, run_config(root, tmp_path / dtype, *options))
    written = json.loads((tmp_path / "as_loaded/model/config.json").read_text())
    assert written["quantization_config"] == json.loads((base / "config.json").read_text())["quantization_config"]
    convert(str(tmp_path / "as_loaded/model"), tmp_path / "plain", dtype="float32")
    got, trained, before = (load_file(each / "model.safetensors") for each in (tmp_path / "plain", *_models(tmp_path)))
    assert got.keys() == trained.keys()
    for name, tensor in trained.items():
        error = float((got[name] - tensor).norm() / tensor.norm())
        assert error <= (0.04 if f"{name}_scale_inv" in before else 0.0), name
    AutoModelForCausalLM.from_pretrained(tmp_path / "plain")


def _models(path: Path) -> tuple[Path, Path]:
    return path / "float32/model", path / "as_loaded/model"


def test_a_plain_model_cannot_be_saved_as_quantised_files_were(inputs: Path, tmp_path: Path) -> None:
    with refused("weights.not-quantised", naming="is not quantised"):
        preflight(run_config(inputs, tmp_path / "run", "save.dtype=as_loaded"), 1)


def _fill_and_lose_experts(model: PreTrainedModel, *arguments: Any, **options: Any) -> LoadReport:
    report = fill(model, *arguments, **options)
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            local_tensor(parameter).zero_()
    return report


def _error_of(config: Config) -> str:
    with pytest.raises(IntegrityError) as caught:
        train(config)
    return str(caught.value)


def test_a_run_on_weights_that_differ_from_their_files_does_not_start(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loading, "fill", _fill_and_lose_experts)
    first, second = run_ranks(_error_of, 2, run_config(inputs, tmp_path / "run", "parallel.ep=2"))
    assert first == second
    assert "tensor model.layers.1.mlp.experts.0." in first
    assert "where rank 0 has 0 (expert 0, parameter model.layers.1.mlp.experts." in first
    assert not (tmp_path / "run" / "model").exists()
    assert "first loss" not in capfd.readouterr().out


def test_long_lists_are_cut_and_counted_and_dropped_tensors_named() -> None:
    groups = tuple(UnmappedTensors(f"model.layers.{n}.rotary_emb.*", 2, 2**20) for n in range(12))
    loaded = LoadReport(1, 1, 1, (), groups)
    audit, *lines = loaded_lines(loaded, AuditReport("sampled", 7, 1234, 99, 0.04), Path("out"))
    assert audit == (
        "audit      sampled: 1,234 places in rank 0's shards, and like that on every rank, equal the files (0.0 s)"
    )
    assert len(lines) == 11
    assert lines[0].startswith(
        "left out   model.layers.0.rotary_emb.* (2 tensors, 1.0 MiB): in the files, not in the model"
    )
    assert lines[10].startswith(
        "left out   2 more of the kind of model.layers.10.rotary_emb.* (4 tensors, 2.0 MiB): in the files"
    )
    saved = SaveReport(Path("out"), (), 1, torch.float32, 1, 1, 1.0, kept=(), dropped=groups[:1])
    assert list(saved_lines(saved)) == [
        "dropped    model.layers.0.rotary_emb.* (2 tensors, 1.0 MiB): not in the model, and the files it was loaded "
        "from are gone or have changed"
    ]
