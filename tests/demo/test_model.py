"""The demo's tokenizer and checkpoint: what plain transformers loads, laid out like published models."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from expertmesh.demo.run import train_tokenizer, write_checkpoint

CHAT = [
    {"role": "user", "content": "What does `os.path.join` do?"},
    {"role": "assistant", "content": "Join two paths — naïvely."},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "Nothing."},
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer(["Join two or more pathname components.", "Return the area of a shape."] * 4, 320)


@pytest.fixture(scope="module")
def directory(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "model"
    write_checkpoint(path, tokenizer)
    return path


def test_the_saved_tokenizer_marks_exactly_the_assistant_turns_as_targets(directory: Path) -> None:
    saved = AutoTokenizer.from_pretrained(directory)
    encoded = saved.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    targets = [i for i, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
    assert saved.decode(targets) == "Join two paths — naïvely.<|im_end|>Nothing.<|im_end|>"
    prompt = saved.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
    assert saved.apply_chat_template(CHAT[:2], tokenize=False).startswith(prompt)
    assert saved.eos_token == "<|im_end|>"


def test_training_the_tokenizer_twice_gives_the_same_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    again = train_tokenizer(["Join two or more pathname components.", "Return the area of a shape."] * 4, 320)
    assert again.get_vocab() == tokenizer.get_vocab()
    text = "Return the pathname."
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_experts_are_on_disk_one_by_one_as_in_published_checkpoints(directory: Path) -> None:
    with safe_open(directory / "model.safetensors", "pt") as file:
        keys = set(file.keys())
    assert {f"model.layers.1.mlp.experts.7.{part}_proj.weight" for part in ("gate", "up", "down")} <= keys
    assert not any("gate_up_proj" in key for key in keys)


def test_plain_transformers_loads_the_checkpoint_completely(directory: Path) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.config.num_experts == 8
    assert model.get_input_embeddings().num_embeddings == len(AutoTokenizer.from_pretrained(directory))
    assert model.generation_config.eos_token_id == AutoTokenizer.from_pretrained(directory).eos_token_id


def test_the_checkpoint_is_the_same_every_time_and_leaves_the_random_state_alone(
    tokenizer: PreTrainedTokenizerBase, directory: Path, tmp_path: Path
) -> None:
    torch.manual_seed(12345)
    state = torch.random.get_rng_state()
    write_checkpoint(tmp_path, tokenizer)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert (tmp_path / "model.safetensors").read_bytes() == (directory / "model.safetensors").read_bytes()
