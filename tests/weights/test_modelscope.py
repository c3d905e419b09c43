"""Models of ModelScope (ms://OWNER/NAME), by its own library: here a module that stands for it, and no network."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from expertmesh.config import ModelConfig
from expertmesh.data import load_tokenizer
from expertmesh.weights.meta_model import read_model_config
from tests.data.tokenizers_on_the_fly import CHATML, bpe_tokenizer
from tests.support.errors import refused
from tests.support.models import tiny_config

ID = "ms://Qwen/Qwen3-30B-A3B"


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is asked of a library whose hub has one model."""
    tiny_config("qwen3_moe").save_pretrained(tmp_path)
    bpe_tokenizer(CHATML).save_pretrained(tmp_path)
    found: list[dict[str, Any]] = []

    def snapshot_download(
        model_id: str, revision: str | None = None, *, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        assert ignore_patterns == ["*/*.safetensors"]
        found.append({"id": model_id, "revision": revision, "patterns": allow_patterns})
        if model_id != "Qwen/Qwen3-30B-A3B":
            raise ValueError(f"no model {model_id}")
        return str(tmp_path)

    library: Any = ModuleType("modelscope")
    library.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "modelscope", library)
    return found


def test_config_and_tokenizer_come_from_its_library(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    config, directory = read_model_config(ID, "v1")
    assert (config.model_type, directory) == ("qwen3_moe", tmp_path)
    assert load_tokenizer(ModelConfig(name_or_path=ID, revision="v1")).chat_template == CHATML
    read_model_config(ID, trust_remote_code=True, from_config=True)
    assert [each["id"] for each in asked] == ["Qwen/Qwen3-30B-A3B"] * 3
    assert [each["revision"] for each in asked] == ["v1", "v1", None]
    assert ["*.safetensors" in each["patterns"] for each in asked] == [True, False, False]
    assert ["*.py" in each["patterns"] for each in asked] == [False, False, True]


@pytest.mark.usefixtures("asked")
def test_what_its_hub_does_not_have_is_refused_in_its_words() -> None:
    with refused("model.not-found", naming="ms://Qwen/none at revision v1: ModelScope cannot provide it (no model"):
        read_model_config("ms://Qwen/none", "v1")
    for name in ("ms://Qwen", "ms://Qwen/a/b", "ms://"):
        with refused("model.not-found", naming="write ms://OWNER/NAME"):
            read_model_config(name)


def test_without_its_library_one_sentence_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with refused("install.missing-package", naming="pip install modelscope"):
        read_model_config(ID)
    with refused("install.missing-package", naming="pip install modelscope"):
        load_tokenizer(ModelConfig(name_or_path=ID))
