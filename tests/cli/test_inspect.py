"""`inspect`: its counts are the model's, and it reads no weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from expertmesh.cli import inspect
from expertmesh.config.errors import IntegrityError
from expertmesh.io.safetensors_reader import WeightFiles
from tests.support.errors import refused
from tests.support.models import tiny_config, tiny_model


def meta_model(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.fixture
def config_only(tmp_path: Path) -> Path:
    tiny_config("deepseek_v3", num_hidden_layers=3, architectures=["DeepseekV3ForCausalLM"]).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    tiny_model("qwen3_moe", dtype=torch.bfloat16).save_pretrained(directory)
    return directory


def test_counts_of_qwen3_30b_a3b_are_the_published_ones() -> None:
    sizes = {"vocab_size": 151936, "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    config = Qwen3MoeConfig(**sizes, **heads, num_experts=128, num_experts_per_tok=8)
    facts = inspect.examine(meta_model(config))
    assert inspect.count_text(facts.total) == "30.53 B"
    assert inspect.count_text(facts.active) == "3.353 B"
    assert facts.expert == 48 * 128 * 3 * 2048 * 768
    assert (facts.blocks, facts.moe_blocks) == (48, 48)


def test_dense_layers_and_shared_experts_are_counted_apart() -> None:
    facts = inspect.examine(meta_model(tiny_config("deepseek_v3", num_hidden_layers=3)))
    assert (facts.blocks, facts.moe_blocks, facts.shared_experts) == (3, 2, 2)
    assert facts.expert == 2 * 8 * 3 * 32 * 16
    assert facts.active == facts.dense + facts.expert // 4


def test_tied_embeddings_count_once() -> None:
    tied, untied = (inspect.examine(tiny_model("qwen3_moe", tie_word_embeddings=tie)).total for tie in (True, False))
    assert untied - tied == 96 * 32


@pytest.mark.parametrize(
    ("config", "router"),
    [
        (tiny_config("qwen3_moe"), "weights renormalised"),
        (tiny_config("mixtral"), ""),
        (tiny_config("ernie4_5_moe"), "correction bias"),  # of shape [1, E]
        (
            tiny_config("deepseek_v3"),
            "2 of 4 groups, correction bias, weights renormalised, scaled by 1.5",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_the_router_is_described_by_its_settings_and_tensors(config: Any, router: str) -> None:
    assert inspect.examine(meta_model(config)).router == router


def test_a_directory_with_a_config_alone_is_enough(config_only: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect.run(str(config_only)) == 0
    text = capsys.readouterr().out
    assert "deepseek_v3 (DeepseekV3ForCausalLM)" in text
    assert "3: 2 MoE, 1 dense" in text
    assert "no weight files here" in text


def test_headers_give_dtype_and_bytes_on_disk_and_no_weight_is_read(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object) -> None:
        raise AssertionError("inspect read a weight")

    monkeypatch.setattr(WeightFiles, "read", read)
    assert inspect.run(str(checkpoint)) == 0
    text = capsys.readouterr().out
    facts = inspect.examine(tiny_model("qwen3_moe"))
    size = inspect.bytes_text(2 * facts.total)
    assert f"{size} in 1 file (bfloat16 {size})" in text
    assert all(line.isascii() for line in text.splitlines())


def test_weights_that_are_not_all_here_are_reported_not_refused(
    config_only: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (config_only / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    inspect.run(str(config_only))
    assert "no weight files here" in capsys.readouterr().out
    (config_only / weight_map["a"]).write_bytes(b"")
    inspect.run(str(config_only))
    assert "1 of 2 weight files" in capsys.readouterr().out


def test_a_dense_model_is_refused_by_name(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 96, "intermediate_size": 32}
    Qwen3Config(**sizes, architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)
    with refused("model.no-experts", naming="qwen3"):
        inspect.run(str(tmp_path))


def test_a_damaged_weight_file_is_an_integrity_error(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    with refused("weights.damaged", IntegrityError, naming="ends inside tensor"):
        inspect.run(str(tmp_path))


def test_a_missing_model_is_refused(tmp_path: Path) -> None:
    with refused("model.not-found"):
        inspect.run(str(tmp_path / "nothing"))


def test_remote_code_is_refused_unless_allowed(tmp_path: Path) -> None:
    config = {"model_type": "made_up", "auto_map": {"AutoConfig": "made_up.MadeUpConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "made_up.py").write_text("raise SystemExit('remote code ran')\n")
    with refused("model.remote-code"):
        inspect.run(str(tmp_path))
