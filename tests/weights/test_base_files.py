"""What stands beside saved weights is the base's own, key by key and byte for byte, but for what has changed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from expertmesh.config.errors import ExpertmeshError
from expertmesh.state.model_view import ModelView
from expertmesh.weights.meta_model import build_meta_model, read_model_config
from expertmesh.weights.save import save_model
from expertmesh.weights.sidecars import config_files, write_config
from tests.data.tokenizers_on_the_fly import CHATML, bpe_tokenizer
from tests.families.catalogue import families
from tests.families.tiny import tiny_config as tiny_config_of
from tests.support.models import tiny_model
from tests.support.published_files import as_published

PUBLISHED = sorted((Path(__file__).parents[1] / "published").glob("*.json"))
KEPT = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("vocab.json", "merges.txt"),
)


def _model(directory: Path, content: str) -> PreTrainedModel:
    (directory / "config.json").write_text(content)
    config, _ = read_model_config(str(directory), weights=False)
    return build_meta_model(config, torch.float32, directory=directory)


def _config_in(model: PreTrainedModel, directory: Path, dtype: torch.dtype, **quantised: Any) -> dict[str, Any]:
    directory.mkdir(exist_ok=True)
    write_config(ModelView(model), directory, None, dtype, **quantised)
    content: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return content


@pytest.mark.parametrize("file", PUBLISHED, ids=lambda file: file.stem)
def test_what_each_published_config_says_is_kept(file: Path, tmp_path: Path) -> None:
    base = json.loads(file.read_text())
    model = _model(tmp_path, file.read_text())
    plain = {key: value for key, value in base.items() if key != "quantization_config"}
    kept = config_files(ModelView(model), None)["config.json"]
    assert kept == file.read_bytes() if plain == base else json.loads(kept) == plain
    quantised = base.get("quantization_config")
    assert _config_in(model, tmp_path / "codes", torch.bfloat16, quantisation=quantised) == base
    # Values in place of codes are in a dtype, which not every base names.
    named = {} if "torch_dtype" in base or quantised is None else {"torch_dtype": "bfloat16"}
    assert _config_in(model, tmp_path / "values", torch.bfloat16) == plain | named
    text = json.dumps(plain | named)
    spelled = [(f'"{key}": "bfloat16"', f'"{key}": "float32"') for key in ("dtype", "torch_dtype")]
    for old, new in spelled:
        text = text.replace(old, new)
    assert _config_in(model, tmp_path / "wider", torch.float32) == json.loads(text)


@pytest.mark.slow(why="each published config stays")
def test_what_a_config_of_each_family_says_is_kept(tmp_path: Path) -> None:
    changed, built = [], 0
    for family in families():
        if family.model_class is None:
            continue
        content = tiny_config_of(family.model_class, family.name)
        content.architectures = [family.model_class]
        try:
            model = _model(tmp_path, content.to_json_string())
        except ExpertmeshError:
            continue  # not one that is built: tests/families
        built += 1
        if config_files(ModelView(model), None)["config.json"] != content.to_json_string().encode():
            changed.append(family.name)
    assert built > 60
    assert changed == []


def _more_experts(model: PreTrainedModel) -> None:
    model.config.num_experts = 16


def _other_base(model: PreTrainedModel) -> None:
    model.config.rope_parameters["rope_theta"] = 5e6


def _longer(model: PreTrainedModel) -> None:
    model.config.rope_parameters |= {"rope_type": "linear", "factor": 4.0}


def _coefficient(model: PreTrainedModel) -> None:
    model.config.router_aux_loss_coef = 0.5


ROPE = {"rope_theta": 1000000.0, "rope_type": "linear", "factor": 4.0}
CHANGES: dict[str, tuple[Callable[[PreTrainedModel], None], dict[str, Any]]] = {
    "nothing": (lambda model: None, {}),
    "a name of its own": (_more_experts, {"num_experts": 16}),
    "one name": (_coefficient, {"router_aux_loss_coef": 0.5}),
    "rope_theta": (
        _other_base,
        {"rope_theta": 5e6, "rope_parameters": {"rope_theta": 5e6, "rope_type": "default"}},
    ),
    "rope_scaling": (
        _longer,
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_parameters": ROPE},
    ),
}


@pytest.mark.parametrize(("change", "said"), CHANGES.values(), ids=CHANGES)
def test_a_changed_setting_is_said_under_each_name_that_readers_know(
    change: Callable[[PreTrainedModel], None], said: dict[str, Any], tmp_path: Path
) -> None:
    file = next(file for file in PUBLISHED if "30B" in file.stem)
    model = _model(tmp_path, file.read_text())
    change(model)
    assert json.loads(config_files(ModelView(model), None)["config.json"]) == json.loads(file.read_text()) | said


def test_a_changed_setting_is_said_where_the_base_says_it(tmp_path: Path) -> None:
    file = next(file for file in PUBLISHED if "3.5" in file.stem)
    model, expected = _model(tmp_path, file.read_text()), json.loads(file.read_text())
    model.config.text_config.router_aux_loss_coef = 0.5
    expected["text_config"]["router_aux_loss_coef"] = 0.5
    assert json.loads(config_files(ModelView(model), None)["config.json"]) == expected


def test_the_class_is_named_anew_only_where_it_is_another(tmp_path: Path) -> None:
    content = json.loads(next(file for file in PUBLISHED if "30B" in file.stem).read_text())
    for said, labels, expected in (
        (["Qwen3MoeForCausalLM"], None, ["Qwen3MoeForCausalLM"]),
        (["ANameOfAnotherLibrary"], None, ["ANameOfAnotherLibrary"]),
        (["Qwen3MoeForCausalLM"], 1, ["Qwen3MoeForSequenceClassification"]),
    ):
        (tmp_path / "config.json").write_text(json.dumps(content | {"architectures": said}))
        config, _ = read_model_config(str(tmp_path), weights=False)
        model = build_meta_model(config, torch.float32, directory=tmp_path, num_labels=labels)
        assert json.loads(config_files(ModelView(model), None)["config.json"])["architectures"] == expected


@pytest.fixture
def base(tmp_path: Path) -> Path:
    directory = tmp_path / "base"
    tokenizer = bpe_tokenizer(CHATML)
    model: Any = tiny_model("qwen3_moe", vocab_size=len(tokenizer))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return as_published(directory, eos_token_id=1)


def _saved(base: Path, target: Path, change: Callable[[Any], None] = lambda tokenizer: None) -> list[str]:
    """Which files of the base are not the same bytes after saving what transformers itself has loaded of it."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    change(tokenizer)
    save_model(AutoModelForCausalLM.from_pretrained(base), target, tokenizer=tokenizer)
    files = {path: target / path.name for path in base.iterdir() if path.name in KEPT}
    return sorted(path.name for path, new in files.items() if not new.exists() or new.read_bytes() != path.read_bytes())


def test_files_of_a_model_that_transformers_loaded_are_the_bases_bytes(base: Path, tmp_path: Path) -> None:
    assert _saved(base, tmp_path / "out") == []
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.safetensors", *KEPT}


def test_another_setting_of_the_tokenizer_changes_its_key_alone(base: Path, tmp_path: Path) -> None:
    def change(tokenizer: Any) -> None:
        tokenizer.pad_token, tokenizer.model_max_length = "<|im_start|>", 64
        tokenizer(["a", "a b c"], padding=True, truncation=True, max_length=2)  # which its Rust part remembers

    assert _saved(base, tmp_path / "out", change) == ["tokenizer_config.json"]
    before, after = (json.loads((path / "tokenizer_config.json").read_text()) for path in (base, tmp_path / "out"))
    assert after == before | {"pad_token": "<|im_start|>", "model_max_length": 64}


@pytest.mark.parametrize("places", [("key",), ("file",), ("key", "file", "more"), ("file", "more"), ()], ids=str)
def test_another_chat_template_changes_its_key_or_file_alone(
    places: tuple[str, ...], base: Path, tmp_path: Path
) -> None:
    settings = json.loads((base / "tokenizer_config.json").read_text())
    own = settings.pop("chat_template")
    if "key" in places:
        settings["chat_template"] = own
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    if "file" in places:
        (base / "chat_template.jinja").write_text(own)
    if "more" in places:
        (base / "additional_chat_templates").mkdir()
        (base / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")

    def change(tokenizer: Any) -> None:
        tokenizer.chat_template = "{{ messages }}"

    changed = _saved(base, tmp_path / "out", change)
    assert changed == ([] if places and "key" not in places else ["tokenizer_config.json"])
    said = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert said == settings | ({} if changed == [] else {"chat_template": "{{ messages }}"})
    file = tmp_path / "out" / "chat_template.jinja"
    assert file.exists() == ("file" in places)
    assert not file.exists() or file.read_text() == "{{ messages }}"
    assert not (tmp_path / "out" / "additional_chat_templates").exists()
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == "{{ messages }}"


def test_a_tokenizer_with_other_tokens_is_written_by_transformers(base: Path, tmp_path: Path) -> None:
    changed = _saved(base, tmp_path / "out", lambda tokenizer: tokenizer.add_tokens(["<new>"]))
    assert "tokenizer.json" in changed
    assert "<new>" in AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab()


def test_a_generation_config_is_the_bases_but_for_what_is_set(base: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [4, 1]
    save_model(model, tmp_path / "out")
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == {"top_p": 0.8, "eos_token_id": [4, 1]}


def test_a_base_without_a_generation_config_gets_one_only_for_what_is_set(base: Path, tmp_path: Path) -> None:
    (base / "generation_config.json").unlink()
    model = AutoModelForCausalLM.from_pretrained(base)
    save_model(model, tmp_path / "same")
    assert not (tmp_path / "same" / "generation_config.json").exists()
    model.generation_config.eos_token_id = 4
    save_model(model, tmp_path / "out")
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 4
