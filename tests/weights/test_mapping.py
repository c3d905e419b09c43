"""Plans fill every tensor of the model exactly once from tensors that fit, or say by name what does not."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel

from expertmesh.config.errors import IntegrityError
from expertmesh.io.boxes import full_box
from expertmesh.io.safetensors_reader import open_weight_files
from expertmesh.state.model_view import ModelView
from expertmesh.weights.lazy import LazyTensor, bytes_needed
from expertmesh.weights.load import fill
from expertmesh.weights.mapping import LoadPlan, plan_load, plan_save
from expertmesh.weights.meta_model import build_meta_model, materialize
from tests.support.errors import refused
from tests.support.ranks import shared_ranks
from tests.weights.tiny import FAMILIES, deepseek_v3, mixtral, qwen3_moe, random_model, write_fused

Files = dict[str, torch.Tensor]
EXPERTS = "model.layers.1.mlp.experts"


def _plan(model: PreTrainedModel, directory: Path) -> LoadPlan:
    with open_weight_files(directory) as files:
        return plan_load(ModelView(model), files)


def _edited(model: PreTrainedModel, directory: Path, edit: Callable[[Files], None]) -> PreTrainedModel:
    """Save `model`, change its files, and return an empty model for them."""
    model.save_pretrained(directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    return build_meta_model(model.config, torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_filled_once_and_every_byte_of_the_files_is_used(family: str, tmp_path: Path) -> None:
    reference = random_model(FAMILIES[family]())
    reference.save_pretrained(tmp_path)
    model = build_meta_model(reference.config, torch.float32)
    with open_weight_files(tmp_path) as files:
        plan = plan_load(ModelView(model), files)
        needed = sum(bytes_needed(lazy, full_box(lazy.shape)) for lazy in plan.tensors.values())
        assert needed == files.total_bytes
    assert list(plan.tensors) == list(reference.state_dict())
    assert (plan.copies, plan.ignored) == ((), ())


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_names_and_shapes_are_those_of_save_pretrained(family: str, tmp_path: Path) -> None:
    reference = random_model(FAMILIES[family]())
    reference.save_pretrained(tmp_path)
    theirs = {name: tensor.shape for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert {name: lazy.shape for name, lazy in plan_save(ModelView(reference)).items()} == theirs
    assert any(".experts.0." in name for name in theirs)


def _saved_names_when_sharded(family: str) -> list[str]:
    model = build_meta_model(FAMILIES[family](), torch.float32)
    # Both transformers models, the base and the one with the head, get FSDP2's classes.
    fully_shard(model.model)
    fully_shard(model)
    assert type(model.model).__name__.startswith("FSDP")
    assert not ModelView(model.model).family.__name__.startswith("FSDP")
    return list(plan_save(ModelView(model)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sharded_model_keeps_its_familys_layout(family: str) -> None:
    expected = list(plan_save(ModelView(random_model(FAMILIES[family]()))))
    assert shared_ranks(_saved_names_when_sharded, 2, family) == [expected, expected]


def test_what_was_read_fused_is_saved_fused(tmp_path: Path) -> None:
    reference = random_model(qwen3_moe())
    write_fused(reference, tmp_path / "fused")
    model = build_meta_model(reference.config, torch.float32)
    materialize(model, "cpu")
    fill(model, tmp_path / "fused")
    assert plan_save(ModelView(model)).keys() == reference.state_dict().keys()


def test_renames_of_the_family_are_applied_and_undone(tmp_path: Path) -> None:
    reference = random_model(mixtral())
    reference.save_pretrained(tmp_path)
    names = list(load_file(tmp_path / "model.safetensors"))
    assert f"{EXPERTS.replace('mlp', 'block_sparse_moe')}.3.w2.weight" in names
    model = build_meta_model(reference.config, torch.float32)
    plan = _plan(model, tmp_path)
    model._weight_conversions = list(plan.conversions)
    assert sorted(plan_save(ModelView(model))) == sorted(names)


def test_files_of_the_base_model_load_into_the_model_with_a_head(tmp_path: Path) -> None:
    reference = random_model(qwen3_moe(tie_word_embeddings=True))
    reference.model.save_pretrained(tmp_path)
    assert not any(name.startswith("model.") for name in load_file(tmp_path / "model.safetensors"))
    plan = _plan(build_meta_model(reference.config, torch.float32), tmp_path)
    assert set(plan.tensors) == set(reference.state_dict()) - {"lm_head.weight"}


def test_tied_tensors_are_filled_from_whichever_name_the_files_hold(tmp_path: Path) -> None:
    def rename(files: Files) -> None:
        files["lm_head.weight"] = files.pop("model.embed_tokens.weight")

    model = _edited(random_model(qwen3_moe(tie_word_embeddings=True)), tmp_path, rename)
    plan = _plan(model, tmp_path)
    assert "lm_head.weight" not in plan.tensors
    assert plan.tensors["model.embed_tokens.weight"].leaves()[0].name == "lm_head.weight"
    assert "lm_head.weight" not in plan_save(ModelView(model))


def test_both_copies_of_a_tied_tensor_are_accepted_if_equal_and_refused_if_not(tmp_path: Path) -> None:
    def copy(files: Files) -> None:
        files["lm_head.weight"] = files["model.embed_tokens.weight"].clone()

    reference = random_model(qwen3_moe(tie_word_embeddings=True))
    model = _edited(reference, tmp_path / "equal", copy)
    materialize(model, "cpu")
    fill(model, tmp_path / "equal")
    assert torch.equal(model.get_parameter("lm_head.weight"), reference.get_parameter("lm_head.weight"))

    def differ(files: Files) -> None:
        copy(files)
        files["lm_head.weight"][-1, -1] += 1

    _edited(reference, tmp_path / "different", differ)
    with refused("weights.tied-copies-differ", IntegrityError, naming="lm_head.weight"):
        fill(model, tmp_path / "different")


def test_what_the_family_declares_unused_is_reported_by_name(tmp_path: Path) -> None:
    def add(files: Files) -> None:
        files["model.layers.61.embed_tokens.weight"] = torch.ones(3)
        files["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)

    model = _edited(random_model(deepseek_v3()), tmp_path, add)
    assert set(_plan(model, tmp_path).ignored) == {
        "model.layers.61.embed_tokens.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
    }


def _drop(*names: str) -> Callable[[Files], None]:
    return lambda files: [files.pop(name) for name in names] and None


def _put(name: str, tensor: torch.Tensor) -> Callable[[Files], None]:
    return lambda files: files.update({name: tensor})


BAD: dict[str, tuple[Callable[[Files], None], str]] = {
    "missing": (_drop("model.norm.weight"), "1 missing (model.norm.weight)"),
    "superfluous": (_put("model.what.weight", torch.ones(2)), "1 unexpected (model.what.weight)"),
    "misshaped": (_put("model.norm.weight", torch.ones(31)), "norm.weight: files (31,), model (32,)"),
    "mistyped": (
        _put("model.norm.weight", torch.ones(32).int()),
        "norm.weight is torch.int32, the model torch.float32",
    ),
    "misshaped expert": (
        _put(f"{EXPERTS}.3.up_proj.weight", torch.ones(24, 31)),
        f"1 misshaped ({EXPERTS}.3.up_proj.weight: (24, 31))",
    ),
    "one matrix of an expert missing": (_drop(f"{EXPERTS}.7.up_proj.weight"), "cannot join"),
    "an expert missing in the middle": (
        _drop(*(f"{EXPERTS}.3.{part}_proj.weight" for part in ("gate", "up", "down"))),
        "7 of 8 experts, model.layers.1.mlp.experts.3.gate_proj.weight is not there",
    ),
    "the last expert missing": (
        _drop(*(f"{EXPERTS}.7.{part}_proj.weight" for part in ("gate", "up", "down"))),
        "files (7, 48, 32), model (8, 48, 32)",
    ),
    "an expert too many": (
        _put(f"{EXPERTS}.8.down_proj.weight", torch.ones(32, 24)),
        f"1 unexpected ({EXPERTS}.8.down_proj.weight)",
    ),
    "an expert renumbered": (
        lambda files: files.update({f"{EXPERTS}.8.down_proj.weight": files.pop(f"{EXPERTS}.2.down_proj.weight")}),
        "8 of 9 experts, model.layers.1.mlp.experts.2.down_proj.weight is not there",
    ),
    "fused beside single experts": (
        _put(f"{EXPERTS}.down_proj", torch.ones(8, 32, 24)),
        "duplicated (model.layers.1.mlp.experts.down_proj from",
    ),
    "with and without prefix": (_put("norm.weight", torch.ones(32)), "1 duplicated (model.norm.weight from"),
}


@pytest.mark.parametrize("name", BAD)
def test_files_that_do_not_fit_are_refused_naming_what_and_how(name: str, tmp_path: Path) -> None:
    edit, words = BAD[name]
    model = _edited(random_model(qwen3_moe()), tmp_path, edit)
    with refused("weights.does-not-fit", IntegrityError, naming=words):
        _plan(model, tmp_path)


def test_long_lists_of_problems_are_cut_and_counted(tmp_path: Path) -> None:
    many = [f"extra.{number}" for number in range(14)]
    edit: Callable[[Files], None] = lambda files: files.update({name: torch.ones(1) for name in many})  # noqa: E731
    model = _edited(random_model(qwen3_moe()), tmp_path, edit)
    with refused("weights.does-not-fit", IntegrityError, naming="extra.9, and 4 more"):
        _plan(model, tmp_path)


def test_methods_of_quantisation_that_are_not_read_are_refused_by_name(tmp_path: Path) -> None:
    reference = random_model(qwen3_moe())
    reference.save_pretrained(tmp_path)
    model = build_meta_model(reference.config, torch.float32)
    model.config.quantization_config = {"quant_method": "gptq"}
    with refused("model.quantised", naming="gptq"):
        _plan(model, tmp_path)


def test_the_layout_of_a_model_loaded_by_transformers_is_its_files(tmp_path: Path) -> None:
    random_model(mixtral()).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    saved = plan_save(ModelView(model))
    assert saved.keys() == load_file(tmp_path / "model.safetensors").keys()
    assert all(isinstance(lazy, LazyTensor) for lazy in saved.values())
