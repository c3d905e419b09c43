"""Experts that stay packed are loaded from files: published codes as they are, plain weights quantised per expert."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import GptOssConfig

import expertmesh as em
from expertmesh.config.errors import ExpertmeshError
from expertmesh.io.boxes import slices
from expertmesh.io.safetensors_reader import WeightFiles
from expertmesh.state.codes import quantise as quantised_bytes
from expertmesh.state.model_view import ModelView
from expertmesh.state.packed import PackedTensor
from expertmesh.state.shards import local_tensor, stored_box
from expertmesh.weights.audit import audit_weights
from expertmesh.weights.load import fill
from expertmesh.weights.meta_model import build_meta_model, materialize, read_model_config
from tests.support.ranks import shared_ranks
from tests.weights.published import FORMATS, SIZES, gpt_oss, is_expert_matrix, is_linear, quantise
from tests.weights.test_quantised import published_source
from tests.weights.tiny import qwen3_moe

LORA = em.LoraConfig(r=2, targets=("experts",))


def _precision(frozen: str, dtype: torch.dtype = torch.float32) -> em.PrecisionConfig:
    name: Any = str(dtype).removeprefix("torch.")
    return em.PrecisionConfig(params="float32", compute=name, reduce="float32", frozen=frozen)  # type: ignore[arg-type]


def _values(directory: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    config, _ = read_model_config(str(directory))
    model = build_meta_model(config, dtype)
    materialize(model, "cpu")
    fill(model, directory)
    return {name: local_tensor(tensor) for name, tensor in ModelView(model).tensors.items()}


def _load(target: Path, frozen: str, ep: int, dtype: torch.dtype) -> tuple[list[str], int, set[str]]:
    """Tensors that are not what the files with the values say, packed ones counted, and the kinds of their codes."""
    mesh = em.init_mesh(em.ParallelConfig(ep=ep))
    source = target / "quantised" if (target / "quantised").is_dir() else target
    model = em.load_model(source, mesh, precision=_precision(frozen, dtype), lora=LORA, audit="full")
    em.load_model(source, mesh, precision=_precision(frozen, dtype), lora=LORA)
    expected = _values(target / "values", dtype) if source != target else _values(target, torch.float32)
    wrong, packed, kinds = [], 0, set()
    for name, tensor in ModelView(model).tensors.items():
        local, box = local_tensor(tensor), stored_box(tensor)
        wanted = expected[name][slices(box)]
        if isinstance(local, PackedTensor):
            packed += 1
            kinds.add(local.kind.code)
            if not local.kind.published:
                wanted = PackedTensor.of(wanted, local.kind, dtype).values()
            local = local.values()
        if not torch.equal(local, wanted.to(dtype)):
            wrong.append(name)
    return wrong, packed, kinds


KEPT = [name for name in FORMATS if "zero" not in name and "asym" not in name]


@pytest.mark.slow_cases(r"fp8 blocks", why="scales of two kinds stay, and codes of experts alone")
@pytest.mark.slow_cases(r"int4", why="nvfp4, fp8 blocks and fp4 experts stay")
@pytest.mark.slow_cases(r"(mxfp4|fp8 blocks, e8m0)", why="nvfp4, fp4 experts and fp8 blocks stay")
@pytest.mark.slow_cases(
    r"fp8 blocks, e8m0 named scale",
    r"fp8 partial blocks",
    r"fp8, one scale",
    r"fp8, a scale a row",
    r"mxfp8",
    r"nvfp4 of modelopt",
    r"fp8 of compressed-tensors.*",
    why="one format of each kind stays; test_quantised.py reads every format",
)
@pytest.mark.parametrize("name", KEPT)
def test_published_codes_stay_and_stand_for_what_public_tools_say(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]()
    target = quantise(published_source(qwen3_moe(**SIZES), tmp_path / "source"), tmp_path, form, is_linear)
    for world, ep in ((2, 2), (2, 1)):
        for wrong, packed, _ in shared_ranks(_load, world, target, "as_published", ep, form.dtype):
            assert (wrong, packed > 0) == ([], True)


@pytest.mark.slow_cases(r"\(1, 1\)", why="four ranks stay")
@pytest.mark.slow_cases(r"\(4, 4\)", why="four ranks in two groups stay")
@pytest.mark.parametrize("layout", [(1, 1), (4, 4), (4, 2)], ids=str)
def test_gpt_oss_codes_stay_in_the_transposed_layout(layout: tuple[int, int], tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32, "head_dim": 16}
    common: dict[str, Any] = {"vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = GptOssConfig(**common, **sizes, num_key_value_heads=2, max_position_embeddings=64)
    target = quantise(published_source(config, tmp_path / "source"), tmp_path, gpt_oss(), is_expert_matrix)
    for found in shared_ranks(_load, layout[0], target, "as_published", layout[1], torch.bfloat16):
        assert found == ([], 4, {"e2m1"})  # attention is plain in the files


@pytest.mark.slow_cases(r"(mxfp4|float8)", why="nvfp4 stays, which has two scales, and nf4")
@pytest.mark.parametrize("frozen", ["nf4", "mxfp4", "nvfp4", "float8"])
def test_plain_weights_are_quantised_expert_by_expert(frozen: str, tmp_path: Path) -> None:
    directory = published_source(qwen3_moe(**SIZES), tmp_path / "source")
    for wrong, packed, _ in shared_ranks(_load, 2, directory, frozen, 1, torch.bfloat16):
        assert (wrong, packed > 0) == ([], True)


def test_the_bytes_in_memory_are_the_files_own(tmp_path: Path) -> None:
    """Byte by byte, without any decoding: codes of gate, then of up, of every expert."""
    form = FORMATS["nvfp4"]()
    target = quantise(published_source(qwen3_moe(**SIZES), tmp_path / "source"), tmp_path, form, is_linear)
    for expert, gate_up_B in enumerate(shared_ranks(_bytes_of_first_layer, 1, target / "quantised")[0]):
        stored = load_file(target / "quantised/model.safetensors")
        names = [f"model.layers.0.mlp.experts.{expert}.{kind}_proj.weight" for kind in ("gate", "up")]
        for part in ("_global_scale", "_scale", "_packed"):
            raw = b"".join(stored[f"{name}{part}"].view(torch.uint8).numpy().tobytes() for name in names)
            assert raw in gate_up_B, part


def _bytes_of_first_layer(directory: Path) -> list[bytes]:
    mesh = em.init_mesh(em.ParallelConfig(ep=1))
    model = em.load_model(directory, mesh, precision=_precision("as_published"), lora=LORA)
    local: Any = local_tensor(model.get_parameter("model.layers.0.mlp.experts.gate_up_proj"))
    return [each.numpy().tobytes() for each in local.packed_LB]


def _refusal(directory: Path, frozen: str, lora: em.LoraConfig | None = LORA) -> tuple[str, str]:
    mesh = em.init_mesh(em.ParallelConfig(ep=1))
    with mock.patch.object(WeightFiles, "read", side_effect=AssertionError("a weight was read")):
        try:
            em.load_model(directory, mesh, precision=_precision(frozen), lora=lora)
        except ExpertmeshError as error:
            return str(error.key), str(error)
    raise AssertionError("not refused")


def test_files_whose_codes_cannot_stay_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    plain = published_source(qwen3_moe(**SIZES), tmp_path / "source")
    key, problem = shared_ranks(_refusal, 1, plain, "as_published")[0]
    assert (key, "plain weights" in problem) == ("precision.frozen-unsupported", True)
    target = quantise(
        plain, tmp_path / "some", FORMATS["int4"](), lambda name: is_linear(name) and ".3.gate" not in name
    )
    key, problem = shared_ranks(_refusal, 1, target / "quantised", "as_published")[0]
    assert key == "precision.frozen-unsupported"
    assert "model.layers.0.mlp.experts.gate_up_proj cannot stay" in problem
    for frozen in ("as_published", "nf4"):
        key, problem = shared_ranks(_refusal, 1, target / "quantised", frozen, None)[0]
        assert (key, "without lora nothing is frozen" in problem) == ("config.combination", True)


def _all_but_one(name: str) -> bool:
    return is_linear(name) and ".experts.3.gate" not in name


def _tampered(directory: Path) -> str:
    """What the audit says after one code has changed."""
    mesh = em.init_mesh(em.ParallelConfig(ep=1))
    model = em.load_model(directory, mesh, precision=_precision("nf4"), lora=LORA)
    local: Any = local_tensor(model.get_parameter("model.layers.1.mlp.experts.down_proj"))
    local.packed_LB[2, -1] ^= 1
    with pytest.raises(ExpertmeshError) as caught:
        audit_weights(model, directory, "full")
    return str(caught.value)


def test_the_audit_finds_one_changed_code(tmp_path: Path) -> None:
    problem = shared_ranks(_tampered, 1, published_source(qwen3_moe(**SIZES), tmp_path / "source"))[0]
    assert "expert 2, parameter model.layers.1.mlp.experts.down_proj" in problem


def test_matrices_quantised_together_are_found(tmp_path: Path) -> None:
    """Planted: the factor of the very first matrix for all of them."""
    problem = shared_ranks(_load_with_one_factor, 1, published_source(qwen3_moe(**SIZES), tmp_path / "source"))[0]
    assert "expert 0, parameter model.layers.0.mlp.experts.gate_up_proj" in problem


def _load_with_one_factor(directory: Path) -> str:
    factors: list[Tensor] = []

    def first_factor(values: Tensor, kind: Any) -> Tensor:
        packed_XB = quantised_bytes(values, kind)
        if not kind.by_rows:
            factors.append(packed_XB[0, :4].clone())
            packed_XB[:, :4] = factors[0]
        return packed_XB

    with (
        mock.patch("expertmesh.weights.lazy.quantise", first_factor),
        pytest.raises(ExpertmeshError) as caught,
    ):
        _load(directory, "nvfp4", 1, torch.float32)
    return str(caught.value)
