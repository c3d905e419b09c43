"""A tokenizer is whole or refused in one sentence; code that comes with a model never runs unasked."""

import json
import os
from pathlib import Path

import pytest
from transformers import DeepseekV3Config, Qwen3MoeConfig

from expertmesh.config import ModelConfig
from expertmesh.config.errors import InputError, SecurityError
from expertmesh.data import load_tokenizer
from tests.data.tokenizers_on_the_fly import CHATML, bpe_tokenizer
from tests.support.errors import refused


def test_tokenizer_comes_with_its_chat_template(tmp_path: Path) -> None:
    bpe_tokenizer(CHATML).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(ModelConfig(name_or_path=str(tmp_path)))
    assert tokenizer.chat_template == CHATML
    assert tokenizer("some text")["input_ids"] == bpe_tokenizer()("some text")["input_ids"]


@pytest.mark.parametrize("family", [Qwen3MoeConfig, DeepseekV3Config])
def test_missing_tokenizer_files_are_refused(family: type[Qwen3MoeConfig], tmp_path: Path) -> None:
    family().save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"no vocabulary|cannot be loaded"):
        load_tokenizer(ModelConfig(name_or_path=str(tmp_path)))


def test_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    bpe_tokenizer().save_pretrained(tmp_path)
    text = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text[: len(text) // 2])
    with refused("tokenizer.not-loaded"):
        load_tokenizer(ModelConfig(name_or_path=str(tmp_path)))


def test_code_of_a_model_does_not_run_unless_trusted(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "code.py").write_text(f"open({str(ran)!r}, 'w')\n")
    wanted = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["code.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(wanted))
    DeepseekV3Config().save_pretrained(tmp_path)
    with refused("model.remote-code"):
        load_tokenizer(ModelConfig(name_or_path=str(tmp_path)))
    assert not ran.exists()


def test_a_normaliser_that_explodes_is_refused(tmp_path: Path) -> None:
    bpe_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    doubling = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    content["normalizer"] = {"type": "Sequence", "normalizers": [doubling] * 64}
    path.write_text(json.dumps(content))
    with refused("tokenizer.unsafe", SecurityError, naming="18,446,744,073,709,551,616 characters of one"):
        load_tokenizer(ModelConfig(name_or_path=str(tmp_path)))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.txt"])
def test_tokenizer_files_that_are_no_files_or_have_no_end_are_refused(tmp_path: Path, name: str) -> None:
    bpe_tokenizer(CHATML).save_pretrained(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with refused("file.unsafe", SecurityError, naming=name):
        load_tokenizer(ModelConfig(name_or_path=str(tmp_path)))
    (tmp_path / name).unlink()
    (tmp_path / name).touch()
    os.truncate(tmp_path / name, 1 << 40)
    with refused("file.too-large", naming=name):
        load_tokenizer(ModelConfig(name_or_path=str(tmp_path)))
