"""Embedding, head and rows of an embedding that train beside adapters, and biases of B, as PEFT's modules_to_save,
trainable_token_indices and lora_bias: every gradient and four AdamW steps are those of stock PEFT on the unsharded
model.

All start from values far from the base's, read from the files that PEFT wrote.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import expertmesh as em
from expertmesh.adapters.peft_model import peft_adapters
from expertmesh.adapters.plan import plan_adapters
from expertmesh.cli.main import main
from expertmesh.distributed.mesh import Mesh
from expertmesh.export.checkpoint import export
from expertmesh.state.model_view import module_state
from tests.adapters.reference import EXPERTS, PeftRun, tiny_peft_run, train_adapters, trainables
from tests.adapters.stock import IDS, base_model, logits
from tests.support.errors import refused
from tests.support.models import tiny_model
from tests.support.one_launch import Launched, one_launch
from tests.support.ranks import shared_ranks

SAVED = (("modules_to_save", ("embed_tokens", "lm_head")),)
TOKENS = (("trainable_token_indices", (9, 5, 40, 95)),)
BIAS = (("lora_bias", True), ("use_rslora", True))
Expected = Callable[..., PeftRun]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    @functools.cache
    def run(lora: Any) -> PeftRun:
        named: dict[str, Any] = {"modules": ("q_proj", "o_proj")}
        # PEFT has no lora_bias on parameters, and needs a bias to merge it.
        named |= {"attention_bias": True} if lora == BIAS else {"parameters": (*EXPERTS, "mlp.gate.weight")}
        return tiny_peft_run("qwen3_moe", tmp_path_factory.mktemp("peft"), lora=lora, **named)

    return run


CASES: list[tuple[Any, int, dict[str, int], dict[str, Any]]] = [
    (SAVED, 2, {"ep": 2}, {"activation_checkpointing": "full"}),
    (TOKENS, 2, {"ep": 2}, {}),
    (SAVED, 4, {"ep": 2, "replicate": 2}, {}),
    (SAVED, 2, {"tp": 2, "ep": 2}, {}),
    (TOKENS, 2, {"tp": 2, "ep": 1}, {}),
    (SAVED, 2, {"cp": 2, "ep": 2}, {}),
    (SAVED, 2, {"pp": 2}, {}),
    (TOKENS, 4, {"pp": 2, "ep": 2}, {}),
    (SAVED, 2, {"ep": 2}, {"order": {"accumulate": "by_layer"}}),
    (BIAS, 2, {"ep": 2}, {"activation_checkpointing": "full"}),
    (BIAS, 2, {"tp": 2, "ep": 1}, {}),
    (BIAS, 2, {"cp": 2, "ep": 2}, {}),
    (BIAS, 2, {"pp": 2}, {}),
    (BIAS, 4, {"tp": 2, "cp": 2, "ep": 2}, {}),
    (BIAS, 2, {"ep": 2}, {"order": {"accumulate": "by_layer"}}),
    (BIAS, 2, {"ep": 2}, {"as_peft_model": True}),
    (SAVED, 2, {"ep": 2}, {"as_peft_model": True}),
]


@pytest.mark.parametrize(("lora", "world", "axes", "options"), CASES)
@one_launch(
    lambda expected, lora, world, axes, options: (
        world,
        functools.partial(train_adapters, expected(lora), em.ParallelConfig(**axes), **options),
    )
)
def test_gradients_and_steps_are_stock_pefts(
    launched: Launched, expected: Expected, lora: Any, world: int, axes: dict[str, int], options: dict[str, Any]
) -> None:
    for distance in launched():
        distance.check(1e-5)


def _order_rows_otherwise(model: nn.Module, mesh: Mesh) -> None:
    state = module_state(model.get_submodule("model.embed_tokens"))
    state.lora_rows = state.lora_rows.roll(1)


@torch.no_grad()
def _shift_words_by_one(model: nn.Module, mesh: Mesh) -> None:
    new: Any = model.get_parameter("lm_head.weight_lora_W")
    new.to_local().copy_(new.to_local().roll(1, 0))


@pytest.mark.parametrize(("lora", "bug"), [(TOKENS, _order_rows_otherwise), (SAVED, _shift_words_by_one)])
def test_a_planted_bug_turns_the_comparison_red(expected: Expected, lora: Any, bug: Any) -> None:
    run = functools.partial(train_adapters, expected(lora), em.ParallelConfig(ep=2), tamper=bug)
    for distance in shared_ranks(run, 2):
        assert distance.loss > 1e-3


LORA = em.LoraConfig(r=4, modules_to_save=["lm_head"], trainable_token_indices=[95, 3, 40])
BIASED = em.LoraConfig(r=4, targets=("attention",), lora_bias=True)
FP32 = em.PrecisionConfig(params="float32", compute="float32", reduce="float32")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def _loaded(directory: Path, lora: em.LoraConfig, **axes: int) -> tuple[Any, torch.optim.Optimizer]:
    mesh = em.init_mesh(em.ParallelConfig(**axes))  # type: ignore[arg-type]
    model: Any = em.load_model(directory / "base", mesh, lora=lora, precision=FP32)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def _trained(directory: Path, lora: em.LoraConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Starts at the base, trains, saves, and restores in another layout; the logits, and the streamed weights."""
    base: Any = AutoModelForCausalLM.from_pretrained(directory / "base").eval()
    model, optimizer = _loaded(directory, lora, ep=2)
    first = {name: value for name, value in trainables(model).items() if name.endswith("_lora_W")}
    if lora == LORA:
        assert torch.equal(first[f"{HEAD}_lora_W"], base.lm_head.weight)
        assert torch.equal(first[f"{EMBEDDING}_lora_W"], base.model.embed_tokens.weight[[95, 3, 40]])
    else:
        assert len(first) == 8
        assert not any(map(torch.any, first.values()))
    ids = IDS.clone()
    ids[:, ::3] = 95
    for _ in range(3):
        em.causal_lm_loss(model, {"input_ids": ids, "labels": ids}, target_tokens=76).backward()
        optimizer.step()
        optimizer.zero_grad()
    em.save_adapter(model, directory / "adapter")
    em.save_checkpoint(model, optimizer, directory / "checkpoints", step=3)
    other, again = _loaded(directory, lora, ep=1, tp=2)
    em.load_checkpoint(other, again, directory / "checkpoints")
    trained, restored = trainables(model), trainables(other)
    assert not any(torch.equal(trained[name], value) for name, value in first.items())
    assert all(torch.equal(restored[name], value) for name, value in trained.items())
    streamed = {name: tensor.clone() for name, tensor in em.iter_hf_weights(other)}
    kept = {name: tensor.clone() for name, tensor in em.iter_hf_weights(other, merge=False)}
    assert all(torch.equal(kept[name], p) for name, p in base.named_parameters() if ".experts." not in name)
    with torch.no_grad(), em.adapters_off(model.eval()):
        assert torch.allclose(model(input_ids=IDS, use_cache=False).logits, logits(base), atol=1e-6)
    return logits(model), streamed


def _first_logits() -> tuple[torch.Tensor, torch.Tensor]:
    """Of a model in fp64, without and with rows that train and have not trained yet."""
    model = tiny_model("qwen3_moe").double().eval()
    before = logits(model)
    lora = em.LoraConfig(targets=("q_proj",), trainable_token_indices=(9, 5), r=2)
    return before, logits(em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=1)), lora=lora).eval())


def test_rows_start_at_the_bases_values_in_fp64_too() -> None:
    before, after = shared_ranks(_first_logits, 1)[0]
    assert torch.equal(before, after)


@pytest.mark.parametrize("lora", [LORA, BIASED], ids=["a head and rows", "biases"])
def test_what_trained_is_saved_as_peft_reads_it_merged_streamed_and_restored(
    lora: em.LoraConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = base_model("qwen3_moe", attention_bias=lora == BIASED)
    for name, parameter in base.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    base.save_pretrained(tmp_path / "base")
    found, streamed = shared_ranks(_trained, 2, tmp_path, lora)[0]
    before: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(before, str(tmp_path / "adapter"))
    assert torch.allclose(logits(theirs), found, atol=1e-5)
    places = [str(tmp_path / name) for name in ("adapter", "base", "merged")]
    assert main(["merge", places[0], "--base", places[1], "--output", places[2]]) == 0
    assert ("added       8 biases of adapters" in capsys.readouterr().out) == (lora == BIASED)
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(logits(merged), found, atol=1e-5)
    for name, parameter in merged.named_parameters():
        assert ".experts." in name or torch.equal(streamed[name], parameter), name
    plain: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    moved = (merged.model.embed_tokens.weight != plain.model.embed_tokens.weight).any(1).nonzero().flatten().tolist()
    assert set(moved) <= {3, 40, 95}
    assert (95 in moved) == (lora == LORA)
    q_bias = "model.layers.1.self_attn.q_proj.bias"
    assert lora == LORA or not torch.equal(merged.get_parameter(q_bias), plain.get_parameter(q_bias))
    export(tmp_path / "checkpoints" / "step-00000003", tmp_path / "exported")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "exported" / name).read_bytes() == (tmp_path / "adapter" / name).read_bytes()


@pytest.mark.parametrize(
    ("changes", "lora", "key", "naming"),
    [
        ({}, {"modules_to_save": ["norm"]}, "adapter.unsupported-option", "only the input embedding"),
        ({}, {"lora_bias": True}, "adapter.unsupported-option", "model.layers.0.self_attn.q_proj has no bias"),
        (
            {"attention_bias": True},
            {"lora_bias": True},
            "adapter.unsupported-option",
            "on linear layers alone, not on model.layers.0.mlp.experts.gate_up_proj",
        ),
        ({}, {"modules_to_save": ["nowhere"]}, "adapter.unsupported-option", "without a module of this name"),
        ({}, {"trainable_token_indices": [96]}, "adapter.unsupported-option", "has 96 rows"),
        (
            {},
            {"modules_to_save": ["embed_tokens"], "trainable_token_indices": [9]},
            "adapter.unsupported-option",
            "modules_to_save trains all of it",
        ),
        (
            {},
            {"targets": ["lm_head"], "modules_to_save": ["lm_head"]},
            "adapter.unsupported-option",
            "it has an adapter too",
        ),
        (
            {"tie_word_embeddings": True},
            {"modules_to_save": ["embed_tokens"]},
            "adapter.unsupported-option",
            "are one weight",
        ),
        (
            {"tie_word_embeddings": True},
            {"trainable_token_indices": [1]},
            "adapter.unsupported-option",
            "only untied ones train",
        ),
    ],
)
def test_what_does_not_train_beside_adapters_is_refused_by_name(
    changes: dict[str, Any], lora: dict[str, Any], key: str, naming: str
) -> None:
    with refused(key, naming=naming):
        plan_adapters(tiny_model("qwen3_moe", **changes), em.LoraConfig(**lora), None)


def test_a_config_of_peft_says_the_same() -> None:
    said = peft.LoraConfig(
        target_modules=["q_proj"], modules_to_save=["lm_head"], trainable_token_indices=[4, 2], task_type="CAUSAL_LM"
    )
    lora = em.lora_from_peft(said)
    assert (lora.modules_to_save, lora.trainable_token_indices) == (("lm_head",), (4, 2))
    said.trainable_token_indices = {"lm_head": [4]}
    with refused("adapter.unsupported-option", naming="only a list"):
        em.lora_from_peft(said)


def test_a_classifiers_head_trains_whole_as_in_the_directory_that_peft_writes(tmp_path: Path) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path / "base")
    auto: Any = AutoModelForSequenceClassification

    def adapted(task: str | None) -> Any:
        said = peft.LoraConfig(target_modules=["q_proj"], task_type=task)
        return peft.get_peft_model(auto.from_pretrained(tmp_path / "base", num_labels=3), said)

    adapted("SEQ_CLS").save_pretrained(str(tmp_path / "adapter"))  # its modules_to_save: classifier, score
    content = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    model = auto.from_pretrained(tmp_path / "base", num_labels=3)
    theirs = em.LoraConfig(from_adapter=str(tmp_path / "adapter"))
    for lora in (theirs, em.LoraConfig(), em.LoraConfig(modules_to_save=("score",))):
        (each,) = plan_adapters(model, lora, None).replaced.values()
        assert (each.key, each.rows) == ("base_model.model.score.weight", None)
        assert each.shape == tuple(model.score.weight.shape)
    with refused("adapter.unsupported-option", naming="the model is no sequence classifier"):
        plan_adapters(tiny_model("qwen3_moe"), theirs, None)
    with refused("adapter.unsupported-option", naming="the model is no sequence classifier"):
        plan_adapters(tiny_model("qwen3_moe"), em.LoraConfig(modules_to_save=("lm_head", "score")), None)
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({**content, "modules_to_save": None}))
    with refused("lora.on-classifier", naming="without score, the head of this classifier"):
        plan_adapters(model, theirs, None)
    with refused("lora.on-classifier", naming="without score, the head of this classifier"):
        peft_adapters(adapted(None), None)
    assert em.lora_from_peft(peft.LoraConfig(target_modules=["q_proj"], task_type="SEQ_CLS")).modules_to_save == (
        "score",
        "classifier",
    )
