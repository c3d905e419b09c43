"""Random weights of a model that has a config and no files: as transformers draws them, the same in every layout."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoePreTrainedModel

import expertmesh as em
from expertmesh.io.boxes import Box, full_box, slices
from expertmesh.state.model_view import ModelView
from expertmesh.state.shards import local_tensor, stored_box
from expertmesh.weights.first_values import FirstValues
from expertmesh.weights.lazy import read_box
from expertmesh.weights.load import fill
from expertmesh.weights.mapping import plan_load
from expertmesh.weights.meta_model import build_meta_model, read_model_config
from tests.support.errors import refused, refused_on_ranks
from tests.support.list_models import write_list_model
from tests.support.models import tiny_config
from tests.support.one_launch import Launched, one_launch
from tests.support.ranks import shared_ranks

FP32 = em.PrecisionConfig(params="float32", compute="float32", reduce="float32")
FAMILIES = ["qwen3_moe", "deepseek_v3", "gpt_oss", "olmoe", "mixtral"]
LAYOUTS: list[tuple[int, dict[str, int]]] = [
    (1, {"ep": 1}),
    (2, {"ep": 1}),
    (2, {"ep": 2}),
    (2, {"tp": 2, "ep": 1}),
    (2, {"pp": 2, "ep": 1}),
    (4, {"ep": 2}),
    (4, {"ep": 4, "tp": 2}),
    (4, {"pp": 2, "ep": 2}),
]
State = dict[str, torch.Tensor]


def config_of(family: str, **changes: Any) -> Any:
    return tiny_config(family, **{"hidden_size": 64, "pad_token_id": 1, **changes})


def drawn(config: Any, seed: int = 3, dtype: torch.dtype = torch.float32) -> State:
    """The whole model in one process, without ranks."""
    model = build_meta_model(config, dtype)
    fill(model, "no such directory", "cpu", seed=seed)
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def of_transformers(config: Any, seed: int) -> State:
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return dict(model.state_dict())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_distributed_as_transformers_draws_it(family: str) -> None:
    config = config_of(family)
    ours, theirs, others = drawn(config), of_transformers(config, 0), of_transformers(config, 1)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        reference, count = theirs[name], value.numel()
        if torch.equal(reference, others[name]):  # a constant: ones of norms, zeros of biases
            assert torch.equal(value, reference), name
            continue
        if "embed_tokens" in name:
            assert not value[config.pad_token_id].any(), name
        # Six standard errors of the sample, of which both are.
        assert abs(value.std() / reference.std() - 1) < 6 / math.sqrt(count), name
        assert abs(value.mean() - reference.mean()) < 6 * math.sqrt(2 / count) * reference.std(), name
        assert not torch.equal(value, reference), name


def test_no_two_tensors_experts_or_seeds_share_values() -> None:
    config = config_of("qwen3_moe")
    first, again, other = drawn(config, 3), drawn(config, 3), drawn(config, 4)
    shares = [each for name, value in first.items() for each in (value if ".experts." in name else [value])]
    starts = [tuple(each.flatten()[2 * 64 :][:8].tolist()) for each in shares if each.std() > 0]  # after padding's row
    assert len(set(starts)) == len(starts) == 2 * (2 * 8 + 5) + 2
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_values_of_a_narrower_dtype_are_those_of_float32_rounded() -> None:
    config = config_of("deepseek_v3")
    wide, narrow = drawn(config), drawn(config, dtype=torch.bfloat16)
    assert narrow["lm_head.weight"].dtype == torch.bfloat16
    assert all(torch.equal(narrow[name], wide[name].to(narrow[name].dtype)) for name in wide)


def test_tied_weights_are_drawn_once_and_the_callers_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    state = drawn(config_of("qwen3_moe", tie_word_embeddings=True))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"])


def local_parts(directory: Path, axes: dict[str, int], **options: Any) -> dict[str, tuple[Box, torch.Tensor]]:
    """What this rank holds of each tensor."""
    mesh = em.init_mesh(em.ParallelConfig(**axes))  # type: ignore[arg-type]
    model = em.load_model(directory, mesh, precision=FP32, from_config=True, seed=3, **options)
    tensors = ModelView(model).unique
    return {name: (stored_box(each), local_tensor(each).detach().clone()) for name, each in tensors.items()}


def check(parts: list[dict[str, tuple[Box, torch.Tensor]]], expected: State) -> None:
    """Every rank's part is that of the whole model, and together they are all of it."""
    found = {name: torch.zeros_like(value, dtype=torch.bool) for name, value in expected.items()}
    for part in parts:
        for name, (box, values) in part.items():
            if values.numel():
                assert torch.equal(values, expected[name][slices(box)]), name
                found[name][slices(box)] = True
    ties = {"lm_head.weight"} if "lm_head.weight" not in parts[0] else set()
    assert [name for name, mask in found.items() if not mask.all() and name not in ties] == []


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configs of models without weights."""
    root = tmp_path_factory.mktemp("models")
    for family in ("qwen3_moe", "deepseek_v3", "gpt_oss"):
        config_of(family).save_pretrained(root / family)
    return root


@pytest.mark.slow_cases(r"(deepseek_v3|gpt_oss)-layout[0-356]", why="one family stays in every layout")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
@one_launch(lambda family, layout, directory: (layout[0], lambda: local_parts(directory / family, layout[1])))
def test_every_layout_draws_the_same_values(
    launched: Launched, family: str, layout: tuple[int, dict[str, int]]
) -> None:
    check(launched(), drawn(config_of(family)))


def test_experts_that_are_a_list_are_drawn_one_by_one(tmp_path: Path) -> None:
    write_list_model(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    code = tmp_path / "model" / "modeling_list_moe.py"
    code.write_text(code.read_text().replace("nn.Linear | nn.Embedding)", "nn.Linear | nn.Embedding | Gate)"))
    config, _ = read_model_config(str(tmp_path / "model"), trust_remote_code=True, from_config=True)
    whole, listed = (
        build_meta_model(config, torch.float32, trust_remote_code=True, fuse=fuse) for fuse in (True, False)
    )
    fill(whole, tmp_path, "cpu", seed=3)
    fused, view = whole.state_dict(), ModelView(listed)
    plan = plan_load(view, source := FirstValues(view, tmp_path, 3))  # as verify's reference has them
    name, member = "model.layers.0.mlp.experts.down_proj", "model.layers.0.mlp.experts.1.down_proj.weight"
    value = torch.empty_like(fused[name][1])
    read_box(plan.tensors[member], full_box(value.shape), value, source)
    assert torch.equal(fused[name][1], value)
    check(shared_ranks(lambda: local_parts(tmp_path / "model", {"ep": 2}, trust_remote_code=True), 2), dict(fused))


def test_a_model_with_weights_or_codes_is_refused_and_one_without_names_the_key(tmp_path: Path) -> None:
    config = config_of("qwen3_moe")
    config.save_pretrained(tmp_path)
    with refused("weights.not-found", naming="model.from_config"):
        fill(build_meta_model(config, torch.float32), tmp_path, "cpu")
    for name in ("model.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(b"")
        with refused("model.has-weights", naming=name):
            read_model_config(str(tmp_path), from_config=True)
        (tmp_path / name).unlink()
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config.save_pretrained(tmp_path)
    with refused("model.quantised-without-weights", naming="quantization_config"):
        read_model_config(str(tmp_path), from_config=True)


def test_a_tensor_that_the_class_leaves_as_it_is_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_norms(model: Any, module: Any) -> None:
        if not type(module).__name__.endswith("RMSNorm"):
            initialise(model, module)

    config, initialise = config_of("qwen3_moe"), Qwen3MoePreTrainedModel._init_weights
    monkeypatch.setattr(Qwen3MoePreTrainedModel, "_init_weights", without_norms)
    with refused("model.no-first-values", naming="norm.weight"):
        drawn(config)


def test_ranks_that_draw_other_values_and_adapters_are_refused(directory: Path) -> None:
    def other_seeds() -> None:
        mesh = em.init_mesh(em.ParallelConfig(ep=1))
        em.load_model(directory / "qwen3_moe", mesh, precision=FP32, from_config=True, seed=dist.get_rank())

    with refused_on_ranks("model.first-values-differ", naming="rank 1"):
        shared_ranks(other_seeds, 2)
    with refused_on_ranks("config.combination", naming="lora"):
        shared_ranks(lambda: local_parts(directory / "qwen3_moe", {"ep": 1}, lora=em.LoraConfig()), 1)
