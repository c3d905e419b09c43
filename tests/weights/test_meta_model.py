"""The empty model is, but for its values, the model that `from_pretrained` gives."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    Glm4MoeConfig,
    GptOssConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from expertmesh.config.errors import InputError, SecurityError
from expertmesh.weights.meta_model import build_meta_model, kept_in_fp32, materialize, read_model_config
from tests.support.errors import refused
from tests.support.models import tiny_config
from tests.weights.tiny import FAMILIES, deepseek_v3, qwen3_moe, random_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 5000.0,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def _gpt_oss() -> PreTrainedConfig:
    return GptOssConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, rope_parameters=YARN)


def _glm4_moe() -> PreTrainedConfig:
    own = {"n_routed_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "n_group": 1}
    return Glm4MoeConfig(**SMALL, **own, topk_group=1, first_k_dense_replace=1, rope_parameters=LLAMA3)


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    **FAMILIES,
    "qwen3_moe with yarn": lambda: qwen3_moe(rope_parameters=YARN),
    "qwen3_moe with dynamic rope": lambda: qwen3_moe(rope_parameters=DYNAMIC),
    "deepseek_v3 with yarn": lambda: deepseek_v3(rope_parameters=YARN),
    "qwen3_moe tied": lambda: qwen3_moe(tie_word_embeddings=True),
    "gpt_oss with yarn": _gpt_oss,
    "glm4_moe with llama3 rope": _glm4_moe,
}


def _loaded(config: PreTrainedConfig, directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    random_model(config).save_pretrained(directory)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_it_equals_what_from_pretrained_gives_but_for_the_values_in_files(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    reference = _loaded(CONFIGS[name](), tmp_path, dtype)
    config, directory = read_model_config(str(tmp_path))
    model = build_meta_model(config, dtype, directory=directory)
    assert type(model) is type(reference)
    state, expected = model.state_dict(keep_vars=True), reference.state_dict(keep_vars=True)
    kinds = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in state.items()}
    assert kinds == {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in expected.items()}
    assert all(tensor.is_meta for tensor in state.values())
    ties = [[state[a] is state[b] for a in state] for b in state]
    assert ties == [[expected[a] is expected[b] for a in state] for b in state]
    buffers, expected_buffers = dict(model.named_buffers()), dict(reference.named_buffers())
    assert buffers.keys() == expected_buffers.keys()
    computed = [key for key in buffers if key not in state]
    assert any("inv_freq" in key for key in computed)
    for key in computed:
        assert buffers[key].dtype == expected_buffers[key].dtype
        assert torch.equal(buffers[key], expected_buffers[key]), key


def test_the_correction_bias_stays_in_fp32_when_the_rest_is_narrower() -> None:
    model = build_meta_model(deepseek_v3(), torch.bfloat16)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert model.get_buffer(bias).dtype == torch.float32
    assert model.get_parameter("lm_head.weight").dtype == torch.bfloat16
    assert kept_in_fp32(model, torch.bfloat16)(bias)
    assert not kept_in_fp32(model, torch.bfloat16)("lm_head.weight")
    assert not kept_in_fp32(model, torch.float32)(bias)


def test_materializing_keeps_the_computed_buffers_and_the_ties() -> None:
    model = build_meta_model(qwen3_moe(tie_word_embeddings=True), torch.float32)
    before = {name: buffer.clone() for name, buffer in model.named_non_persistent_buffers()}
    materialize(model, "cpu")
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    for name, buffer in model.named_non_persistent_buffers():
        assert torch.equal(buffer, before[name])
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")


def test_building_neither_changes_the_config_nor_draws_random_numbers() -> None:
    config = qwen3_moe()
    before, state = config.to_dict(), torch.get_rng_state()
    build_meta_model(config, torch.bfloat16)
    assert config.to_dict() == before
    assert torch.equal(torch.get_rng_state(), state)


def test_attention_is_passed_on_and_refused_by_name() -> None:
    assert build_meta_model(qwen3_moe(), torch.float32, attention="eager").config._attn_implementation == "eager"
    with refused("model.no-causal-lm", naming="no_such_attention"):
        build_meta_model(qwen3_moe(), torch.float32, attention="no_such_attention")


def test_the_generation_config_of_the_directory_is_kept(tmp_path: Path) -> None:
    qwen3_moe().save_pretrained(tmp_path)
    GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9).save_pretrained(tmp_path)
    config, directory = read_model_config(str(tmp_path))
    model = build_meta_model(config, torch.float32, directory=directory)
    assert model.generation_config is not None
    assert (model.generation_config.temperature, model.generation_config.top_p) == (0.6, 0.9)


def test_unreadable_configs_are_refused_naming_the_file(tmp_path: Path) -> None:
    with refused("model.invalid-config", naming="config.json"):
        read_model_config(str(tmp_path))
    for content in ("{", "[1]", '{"no": "model_type"}', '{"model_type": "no_such_model"}'):
        (tmp_path / "config.json").write_text(content)
        with refused("model.invalid-config", naming="config.json"):
            read_model_config(str(tmp_path))


def test_models_that_are_not_causal_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    config, _ = read_model_config(str(tmp_path))
    with refused("model.no-causal-lm", naming="vit"):
        build_meta_model(config, torch.float32)


def test_remote_code_is_not_run_without_the_flag(tmp_path: Path) -> None:
    auto_map = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "my_moe", "auto_map": auto_map}))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with refused("model.remote-code", naming="code.Model"):
        read_model_config(str(tmp_path))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("trust", [False, True])
def test_kimi_k2_is_deepseek_v3_and_the_code_beside_it_never_runs(trust: bool, tmp_path: Path) -> None:
    auto_map = {"AutoConfig": "code.DeepseekV3Config", "AutoModelForCausalLM": "code.DeepseekV3ForCausalLM"}
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    published = deepseek_v3().to_dict()
    models = []
    for changes in ({}, {"model_type": "kimi_k2", "auto_map": auto_map}):
        (tmp_path / "config.json").write_text(json.dumps(published | changes))
        config, _ = read_model_config(str(tmp_path), trust_remote_code=trust)
        models.append(build_meta_model(config, torch.float32, directory=tmp_path, trust_remote_code=trust))
    first, second = models
    assert type(second) is type(first)
    assert second.config.to_dict() == first.config.to_dict()
    assert second.config.name_or_path == first.config.name_or_path == str(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_native_models_need_no_flag_for_the_code_they_also_bring(tmp_path: Path) -> None:
    content = qwen3_moe().to_dict() | {"auto_map": {"AutoModelForCausalLM": "code.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    config, _ = read_model_config(str(tmp_path))
    assert type(build_meta_model(config, torch.float32)).__name__ == "Qwen3MoeForCausalLM"


def test_what_is_neither_a_directory_nor_on_the_hub_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("no/such-model", "no such name!", "/no/such/directory"):
        with refused("model.not-found", naming=name):
            read_model_config(name, revision="main")


def build(directory: Path) -> None:
    config, files = read_model_config(str(directory))
    build_meta_model(config, torch.float32, directory=files)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"vocab_size": -5}, "vocab_size is -5, which must be from 1 to"),
        ({"vocab_size": 2**62}, "vocab_size is 4,611,686,018,427,387,904, which must be from 1 to"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but num_local_experts is 8"),
        ({"num_local_experts": 1}, "num_experts_per_tok is 2, but num_local_experts is 1"),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"num_experts": 10**9}, "num_experts is 1,000,000,000"),
        ({"num_experts": 60_000, "num_hidden_layers": 4000}, "num_experts is 60,000 in 4,000 layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1,000,000,000"),
        ({"num_hidden_layers": 10**400}, "num_hidden_layers is 1000000000000"),
        ({"rope_parameters": {"rope_theta": 0, "rope_type": "default"}}, "rope_parameters.rope_theta is 0"),
        ({"rope_parameters": {"rope_theta": float("inf"), "rope_type": "default"}}, "rope_theta is inf"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"auto_map": ["a", "b"]}, "auto_map is not an object of names"),
        ({"auto_map": {"AutoConfig": {"a": 1}}, "model_type": "new"}, "the model brings its own code"),
        ({"configuration_files": ["config.4.0.0.json"]}, "configuration_files names other files"),
        ({"hidden_act": "os.system"}, "transformers cannot build a causal LM of it: KeyError"),
        ({"hidden_size": "64"}, ""),
        ({"hidden_size": True}, ""),
        ({"num_hidden_layers": None}, ""),
        ({"layer_types": 7}, ""),
        ({"model_type": ["qwen3_moe"]}, ""),
        ({"text_config": {"text_config": {"num_hidden_layers": 10**9}}}, "text_config.text_config.num_hidden_layers"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_values_that_no_model_has_are_refused_by_name_and_at_once(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    content = tiny_config("qwen3_moe").to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**content, **changes}))
    started = time.process_time()
    with pytest.raises(InputError) as caught:
        build(tmp_path)
    assert sentence in str(caught.value)
    assert len(str(caught.value)) < 700
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pad_token_id": 97}, "pad_token_id is 97, but vocab_size is 96"),
        ({"torch_dtype": "torch.bfloat16"}, "torch_dtype is 'torch.bfloat16'"),
        ({"dtype": "auto"}, "dtype is 'auto'"),
        ({"rope_scaling": {"type": "spiral", "factor": 2.0}}, "rope_scaling.type is 'spiral'"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "rope_parameters.rope_type is 'spiral'"),
        ({"hidden_act": "swoosh"}, "hidden_act is 'swoosh'"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_value_that_transformers_refuses_is_named_with_file_and_key(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    content = {**tiny_config("qwen3_moe").to_dict(), "dtype": None, **changes}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(InputError) as caught:
        build(tmp_path)
    sentence = str(caught.value)
    assert sentence.startswith(f"{tmp_path / 'config.json'}: {said}")
    assert "\n" not in sentence


def test_a_padding_token_without_an_embedding_is_named_with_its_place(tmp_path: Path) -> None:
    text = {"model_type": "qwen3_5_moe", "text_config": {"model_type": "qwen3_5_moe_text", "pad_token_id": 10**6}}
    (tmp_path / "config.json").write_text(json.dumps(text))
    with refused("model.no-causal-lm", naming="config.json: text_config.pad_token_id is 1,000,000"):
        build(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_configs_that_are_no_files_or_have_no_end_are_refused(name: str, tmp_path: Path) -> None:
    tiny_config("qwen3_moe").save_pretrained(tmp_path)
    path = tmp_path / name

    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with refused("file.unsafe", SecurityError, naming=name):
        build(tmp_path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with refused("file.unsafe", SecurityError, naming=name):
        build(tmp_path)
    path.unlink()
    for content, key in (("[" * 100_000, ""), ('{"a":' * 500 + "1" + "}" * 500, ""), ("x", "file.too-large")):
        path.write_text(content)
        if key:
            os.truncate(path, 1 << 40)
        with pytest.raises(InputError) as caught:
            build(tmp_path)
        assert key in ("", caught.value.key)


def test_weights_in_another_form_are_not_downloaded_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-OSS has its weights a second time, in `original`."""
    tiny_config("gpt_oss").save_pretrained(tmp_path)
    there = ["config.json", "tokenizer.json", "original/config.json", "additional_chat_templates/tools.jinja"]
    there += ["model-00000-of-00002.safetensors", "original/model.safetensors", "metal/model.bin"]
    downloaded: list[str] = []

    def snapshot_download(name: str, revision: str | None = None, **patterns: list[str]) -> str:
        downloaded.extend(filter_repo_objects(there, **patterns))
        return str(tmp_path)

    monkeypatch.setattr("expertmesh.weights.meta_model.snapshot_download", snapshot_download)
    read_model_config("openai/gpt-oss-20b")
    assert downloaded == there[:5]
