"""How adapters start: the same in every layout, by PEFT's own distributions, each expert with values of its own."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import expertmesh as em
from expertmesh.config.errors import IntegrityError
from tests.adapters.reference import EXPERTS, random_adapter, trainables
from tests.support.errors import refused_on_ranks
from tests.support.models import tiny_model
from tests.support.ranks import shared_ranks

TARGETS = ("attention", "experts", "router")


def _started(ep: int, replicate: int, seed: int = 3, **lora: Any) -> dict[str, torch.Tensor]:
    model: Any = tiny_model("qwen3_moe")
    config = em.LoraConfig(**{"r": 4, "targets": TARGETS, **lora})
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=ep, replicate=replicate)), lora=config, seed=seed)
    return trainables(model)


def test_every_layout_starts_from_the_same_adapter() -> None:
    (first,) = shared_ranks(_started, 1, 1, 1)
    for world, ep, replicate in [(2, 2, 1), (4, 1, 1), (4, 4, 1), (4, 2, 2)]:
        for started in shared_ranks(_started, world, ep, replicate):
            assert started.keys() == first.keys()
            assert all(torch.equal(started[name], tensor) for name, tensor in first.items())


def test_seeds_layers_and_experts_have_values_of_their_own_and_b_is_zero() -> None:
    (one,), (other,) = shared_ranks(_started, 1, 1, 1, 3), shared_ranks(_started, 1, 1, 1, 4)
    seen = []
    for tensors in (one, other):
        for name, tensor in tensors.items():
            if name.endswith("_B"):
                assert not tensor.any()
            else:
                seen += list(tensor) if tensor.dim() == 3 else [tensor]
    values = [float(tensor.flatten()[0]) for tensor in seen]
    assert len(set(values)) == len(values)


@pytest.mark.parametrize("init", ["default", "gaussian"])
def test_a_is_distributed_as_pefts(init: str) -> None:
    (started,) = shared_ranks(_attention_and_experts, 1, init)
    names = {"modules": ["q_proj"], "parameters": EXPERTS}
    said: Any = {"init_lora_weights": True if init == "default" else init}
    config = peft.LoraConfig(r=64, target_modules=names["modules"], target_parameters=names["parameters"], **said)
    torch.manual_seed(0)
    adapted: Any = peft.get_peft_model(tiny_model("qwen3_moe"), config)  # type: ignore[arg-type]
    theirs = {name: p for name, p in adapted.named_parameters() if "lora_A" in name}
    pairs = {
        "self_attn.q_proj.lora_A": "self_attn.q_proj.lora_A",
        "experts.gate_up_proj_lora_A": "experts.base_layer.lora_A",
        "experts.down_proj_lora_A": "experts.lora_A",
    }
    for ours, key in pairs.items():
        mine = started[f"model.layers.0.{'mlp.' if 'experts' in ours else ''}{ours}"]
        (other,) = [p for name, p in theirs.items() if f"layers.0.{'mlp.' if 'experts' in key else ''}{key}" in name]
        assert float(mine.std()) == pytest.approx(float(other.std()), rel=0.03)
        assert float(mine.mean()) == pytest.approx(0, abs=0.05 * float(other.std()))
        if init == "default":
            assert mine.abs().max() <= mine.shape[-1] ** -0.5
            assert mine.abs().max() > 0.95 * mine.shape[-1] ** -0.5


def _attention_and_experts(init: str) -> dict[str, torch.Tensor]:
    return _started(1, 1, r=64, init=init, targets=("attention", "experts"))


def _from_adapter(directory: Path, targets_base: float) -> dict[str, torch.Tensor]:
    model: Any = tiny_model("qwen3_moe")
    with torch.no_grad():
        model.lm_head.weight += targets_base
    mesh = em.init_mesh(em.ParallelConfig(ep=1))
    em.parallelize(model, mesh, lora=em.LoraConfig(from_adapter=str(directory)))
    return trainables(model)


def test_a_peft_directory_with_weights_is_continued_and_without_them_started_anew(tmp_path: Path) -> None:
    random_adapter(tiny_model("qwen3_moe"), tmp_path / "adapter", ["q_proj"], EXPERTS)
    (continued,) = shared_ranks(_from_adapter, 1, tmp_path / "adapter", 0.0)
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    key = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    assert torch.equal(continued["model.layers.1.self_attn.q_proj.lora_B"], stored[key])
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    (anew,) = shared_ranks(_from_adapter, 1, tmp_path / "adapter", 0.0)
    assert anew.keys() == continued.keys()
    assert not anew["model.layers.1.self_attn.q_proj.lora_B"].any()


def test_a_heads_weight_beside_its_adapter_has_to_be_the_bases(tmp_path: Path) -> None:
    """PEFT writes it there and reads it back, so another one would change the base in silence."""
    random_adapter(tiny_model("qwen3_moe"), tmp_path / "adapter", ["lm_head"], EXPERTS)
    shared_ranks(_from_adapter, 2, tmp_path / "adapter", 0.0)
    with refused_on_ranks("adapter.other-base", IntegrityError, naming="lm_head.base_layer.weight"):
        shared_ranks(_from_adapter, 2, tmp_path / "adapter", 1e-3)


def _continued(start: Path, target: Path, changed: float) -> None:
    """Save an adapter of a base that is off by `changed`, started from `start` if that is there."""
    model: Any = tiny_model("qwen3_moe")
    with torch.no_grad():
        model.lm_head.weight[0, 0] += changed
    lora = em.LoraConfig(from_adapter=str(start)) if start.exists() else em.LoraConfig(r=4)
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=1)), lora=lora)
    em.save_adapter(model, target)


def test_an_adapter_of_another_base_is_not_continued_unless_its_note_is_removed(tmp_path: Path) -> None:
    first, note = tmp_path / "first", tmp_path / "first" / "expertmesh.json"
    shared_ranks(_continued, 1, first, first, 0.0)
    shared_ranks(_continued, 1, first, tmp_path / "same", 0.0)
    with refused_on_ranks("adapter.other-base", IntegrityError, naming="expertmesh.json"):
        shared_ranks(_continued, 2, first, tmp_path / "other", 1e-3)
    note.unlink()
    shared_ranks(_continued, 1, first, tmp_path / "other", 1e-3)


@pytest.mark.parametrize(
    ("damage", "cause", "naming"),
    [
        ("missing", "adapter.differs-from-its-config", "q_proj.lora_A"),
        ("shape", "adapter.differs-from-its-config", "is [4, 31], not [4, 32]"),
        ("more", "adapter.differs-from-its-config", "k_proj.lora_A"),
        ("bias", "adapter.differs-from-its-config", "q_proj.base_layer.bias"),
        ("nan", "weights.not-finite", "q_proj.lora_A.weight"),
    ],
)
def test_a_file_that_does_not_fit_its_config_is_refused(damage: str, cause: str, naming: str, tmp_path: Path) -> None:
    random_adapter(tiny_model("qwen3_moe"), tmp_path / "adapter", ["q_proj"], EXPERTS)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    if damage == "missing":
        del tensors[key]
    elif damage == "shape":
        tensors[key] = tensors[key][:, :-1].contiguous()
    elif damage == "bias":
        tensors[key.replace("lora_A.weight", "base_layer.bias")] = torch.zeros(32)
    elif damage == "nan":
        tensors[key][1, 2] = float("nan")
    else:
        tensors["base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight"] = tensors[key].clone()
    save_file(tensors, path)
    with refused_on_ranks(cause, IntegrityError, naming=naming):
        shared_ranks(_from_adapter, 1, tmp_path / "adapter", 0.0)
