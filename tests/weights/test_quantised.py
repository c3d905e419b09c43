"""Published, quantised files: every rank's shards are the values that public tools decode, from its own bytes alone."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

import expertmesh as em
from expertmesh.config.errors import IntegrityError
from expertmesh.export.merge import convert
from expertmesh.io.boxes import extents, volume
from expertmesh.io.safetensors_reader import open_weight_files
from expertmesh.state.codes import scale_values, values_of
from expertmesh.state.model_view import ModelView
from expertmesh.state.shards import local_tensor, stored_box
from expertmesh.weights.audit import audit_weights
from expertmesh.weights.load import bytes_to_read, fill
from expertmesh.weights.meta_model import build_meta_model, materialize, read_model_config
from expertmesh.weights.quantised import tensor
from expertmesh.weights.quantised.published import published_tensors, quantisation
from expertmesh.weights.quantised.tensor import QuantisedTensor
from tests.support.errors import refused, refused_on_ranks
from tests.support.ranks import shared_ranks
from tests.weights.published import FORMATS, SIZES, gpt_oss, gpt_oss_config, is_expert_matrix, is_linear, quantise
from tests.weights.tiny import deepseek_v3, qwen3_moe, random_model, shard_for_test


def published_source(config: PreTrainedConfig, directory: Path) -> Path:
    random_model(config).save_pretrained(directory)
    return directory


def differing(target: Path, dtype: torch.dtype, world: int, ep: int, sound: bool = True) -> list[str]:
    """The tensors whose shards differ between the quantised files and the files with their values.

    Where all is `sound`, the audits and the number of bytes to read agree as well.
    """
    states = []
    for kind in ("quantised", "values"):
        config, directory = read_model_config(str(target / kind))
        model = build_meta_model(config, dtype)
        if world > 1:
            shard_for_test(model, world, ep)
        planned = bytes_to_read(model, directory)
        materialize(model, "cpu")
        report = fill(model, directory)
        if sound:
            assert report.bytes_read >= planned > 0
            audit_weights(model, directory, "full")
            audit_weights(model, directory)
        states.append({name: local_tensor(tensor) for name, tensor in ModelView(model).tensors.items()})
    return [name for name, tensor in states[0].items() if not torch.equal(tensor, states[1][name])]


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_those_of_public_tools(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]()
    target = quantise(published_source(qwen3_moe(**SIZES), tmp_path / "source"), tmp_path, form, is_linear)
    assert differing(target, form.dtype, 1, 1) == []


@pytest.mark.slow_cases(
    r"2-2-fp8 blocks",
    r"2-2-fp8 partial blocks",
    r"2-2-fp8 blocks, e8m0",
    r"2-2-fp8 blocks, e8m0 named scale",
    r"2-2-mxfp8",
    r"2-2-fp8, one scale",
    r"2-2-fp8, a scale a row",
    r"2-2-fp4 experts",
    r"2-2-int4",
    r"2-2-int4 with zero points",
    r"2-2-mxfp4",
    r"2-2-nvfp4",
    r"2-2-fp8 of compressed-tensors, a scale a row",
    r"2-2-nvfp4 of modelopt",
    r"4-2-fp8 blocks",
    r"4-2-fp8 blocks, e8m0",
    r"4-2-fp8 blocks, e8m0 named scale",
    r"4-2-mxfp8",
    r"4-2-fp8, one scale",
    r"4-2-fp8, a scale a row",
    r"4-2-fp4 experts",
    r"4-2-int4",
    r"4-2-mxfp4",
    r"4-2-nvfp4",
    r"4-2-fp8 of compressed-tensors, a scale a row",
    r"4-2-nvfp4 of modelopt",
    r"4-4-fp8 blocks",
    r"4-4-fp8 partial blocks",
    r"4-4-fp8 blocks, e8m0",
    r"4-4-fp8 blocks, e8m0 named scale",
    r"4-4-mxfp8",
    r"4-4-fp8, one scale",
    r"4-4-fp8, a scale a row",
    r"4-4-fp4 experts",
    r"4-4-int4",
    r"4-4-int4 with zero points",
    r"4-4-mxfp4",
    r"4-4-fp8 of compressed-tensors, a scale a row",
    r"4-4-nvfp4 of modelopt",
    r"4-2-int4 with zero points",
    why="pairwise over formats and layouts; every format stays on one rank",
)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("world", "ep"), [(2, 2), (4, 2), (4, 4)])
def test_every_rank_has_its_part_of_them(name: str, world: int, ep: int, tmp_path: Path) -> None:
    form = FORMATS[name]()
    target = quantise(published_source(qwen3_moe(**SIZES), tmp_path / "source"), tmp_path, form, is_linear)
    assert shared_ranks(differing, world, target, form.dtype, world, ep) == [[]] * world


@pytest.mark.slow_cases(r"(1-1|2-2|4-4)", why="the mixed layout stays")
@pytest.mark.parametrize(("world", "ep"), [(1, 1), (2, 2), (4, 2), (4, 4)])
def test_gpt_oss_experts_are_read_in_their_own_order(world: int, ep: int, tmp_path: Path) -> None:
    target = quantise(published_source(gpt_oss_config(), tmp_path / "source"), tmp_path, gpt_oss(), is_expert_matrix)
    assert shared_ranks(differing, world, target, torch.float32, world, ep) == [[]] * world


@pytest.mark.slow_cases(r"int4", why="partial blocks stay")
@pytest.mark.parametrize("name", ["fp8 partial blocks", "int4"])
def test_latent_attention_and_dense_layers_are_read_too(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]()
    sizes = {**SIZES, "q_lora_rank": 32, "kv_lora_rank": 24 if "fp8" in name else 32, "v_head_dim": 16}
    config = deepseek_v3(**{key: value for key, value in sizes.items() if key != "head_dim"})
    target = quantise(published_source(config, tmp_path / "source"), tmp_path, form, is_linear)
    assert shared_ranks(differing, 4, target, form.dtype, 4, 2) == [[]] * 4


def _bytes_beyond_the_own(target: Path, world: int, ep: int) -> float:
    """Bytes read by this rank, over its share of the packed codes and scales and of the plain tensors."""
    config, directory = read_model_config(str(target / "quantised"))
    with open_weight_files(directory) as files:
        sizes = {name: sum(part.nbytes for part in _parts(lazy)) for name, lazy in _published(config, files).items()}
        total = sum(sizes.values())
    model = build_meta_model(config, torch.bfloat16)
    if world > 1:
        shard_for_test(model, world, ep)
    materialize(model, "cpu")
    state = ModelView(model).tensors
    own = sum(volume(stored_box(each)) for each in state.values()) / sum(each.numel() for each in state.values())
    return fill(model, directory).bytes_read / (total * own)


def _published(config: PreTrainedConfig, files: Any) -> dict[str, Any]:
    return dict(published_tensors(quantisation(config), files).tensors)


def _parts(lazy: Any) -> list[Any]:
    (leaf,) = lazy.leaves()
    return leaf.parts if isinstance(leaf, QuantisedTensor) else [leaf]


@pytest.mark.slow_cases(r"(fp8 blocks|int4)", why="nvfp4 stays, whose scales are of two kinds")
@pytest.mark.parametrize("name", ["fp8 blocks", "int4", "nvfp4"])
def test_a_rank_reads_its_packed_share_and_its_scales(name: str, tmp_path: Path) -> None:
    """Every tensor but norms is quantised, so that shares of bytes and of elements are the same."""
    sizes = {**SIZES, "hidden_size": 128, "moe_intermediate_size": 128, "vocab_size": 32, "num_experts": 16}
    form = FORMATS[name]()
    target = quantise(published_source(qwen3_moe(**sizes), tmp_path / "source"), tmp_path, form, is_linear)
    for world, ep in ((1, 1), (4, 2)):
        assert max(shared_ranks(_bytes_beyond_the_own, world, target, world, ep)) <= 1.02


def _swapped_nibbles(packed: Tensor, code: Any) -> Tensor:
    stored = packed.view(torch.uint8)
    return values_of((stored >> 4) | (stored & 15) << 4, code)


def _halved(scales: Tensor) -> Tensor:
    return scale_values(scales) / 2


def _block_by_division(scales: Tensor, block: Any, box: Any) -> Tensor:
    rows, columns = extents(box)[-2:]
    index = [torch.arange(rows) * scales.shape[-2] // rows, torch.arange(columns) * scales.shape[-1] // columns]
    return scales.index_select(-2, index[0]).index_select(-1, index[1])


def _without_global_scale(self: QuantisedTensor, box: Any, fetch: Any) -> Tensor:
    return _READ(replace(self, global_scale=None), box, fetch)


def _multiplied(self: QuantisedTensor, box: Any, fetch: Any) -> Tensor:
    return _READ(replace(self, global_divides=False), box, fetch)


_READ = QuantisedTensor.read
BUGS: dict[str, tuple[str, Callable[[], Any]]] = {
    "nibbles in the other order": ("nvfp4", lambda: mock.patch.object(tensor, "values_of", _swapped_nibbles)),
    "int4 offset by 7": ("int4", lambda: mock.patch.object(tensor, "values_of", lambda *args: values_of(*args) + 1)),
    "exponents with bias 128": (
        "mxfp8",
        lambda: mock.patch.object(tensor, "scale_values", _halved),
    ),
    "blocks of equal size": ("fp8 partial blocks", lambda: mock.patch.object(tensor, "spread", _block_by_division)),
    "no global scale": ("nvfp4", lambda: mock.patch.object(QuantisedTensor, "read", _without_global_scale)),
    "global scale multiplied": ("nvfp4", lambda: mock.patch.object(QuantisedTensor, "read", _multiplied)),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_turns_the_comparison_red(bug: str, tmp_path: Path) -> None:
    name, plant = BUGS[bug]
    form = FORMATS[name]()
    target = quantise(published_source(qwen3_moe(**SIZES), tmp_path / "source"), tmp_path, form, is_linear)
    with plant():
        assert "model.layers.0.mlp.experts.gate_up_proj" in differing(target, form.dtype, 1, 1, sound=False)


Tensors = dict[str, Tensor]
_QUERY = "model.layers.1.self_attn.q_proj"
_DOWN = "model.layers.1.mlp.experts.5.down_proj"


def _cut_columns(tensors: Tensors) -> None:
    tensors[f"{_DOWN}.weight_scale_inv"] = tensors[f"{_DOWN}.weight_scale_inv"][:, :-1].contiguous()


DAMAGES: dict[str, tuple[str, str, Callable[[Tensors], Any], str]] = {
    "a weight without its scale": (
        "fp8 blocks", "weights.quantised-wrongly", lambda all: all.pop(f"{_DOWN}.weight_scale_inv"), f"{_DOWN}.weight",
    ),
    "a scale without its weight": (
        "fp8 blocks", "weights.quantised-wrongly", lambda all: all.pop(f"{_DOWN}.weight"), f"{_DOWN}.weight_scale_inv",
    ),
    "a grid that does not fit": (
        "fp8 blocks", "weights.quantised-wrongly", _cut_columns, f"{_DOWN}.weight_scale_inv",
    ),
    "a packed weight without its scale": (
        "int4", "weights.quantised-wrongly", lambda all: all.pop(f"{_DOWN}.weight_scale"), f"{_DOWN}.weight_packed",
    ),
    "no global scale": (
        "nvfp4", "weights.quantised-wrongly", lambda all: all.pop(f"{_DOWN}.weight_global_scale"), _DOWN,
    ),
    "no zero points": (
        "int4 with zero points", "weights.quantised-wrongly",
        lambda all: all.pop(f"{_DOWN}.weight_zero_point"), f"{_DOWN}.weight_packed has no {_DOWN}.weight_zero_point",
    ),
    "a scale that is not a number": (
        "fp8 blocks", "weights.damaged", lambda all: all[f"{_DOWN}.weight_scale_inv"].fill_(torch.nan), _DOWN,
    ),
    "an exponent that is not a number": (
        "mxfp8", "weights.damaged", lambda all: all[f"{_DOWN}.weight_scale_inv"].fill_(255), _DOWN,
    ),
    "another shape noted than stored": (
        "int4", "weights.damaged", lambda all: all[f"{_DOWN}.weight_shape"].fill_(8), f"{_DOWN}.weight_shape",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_does_not_belong_together_is_refused_with_file_and_tensor(damage: str, tmp_path: Path) -> None:
    name, key, break_it, naming = DAMAGES[damage]
    target = quantise(published_source(qwen3_moe(**SIZES), tmp_path / "source"), tmp_path, FORMATS[name](), is_linear)
    path = target / "quantised/model.safetensors"
    tensors = load_file(path)
    break_it(tensors)
    save_file(tensors, path, {"format": "pt"})
    config, directory = read_model_config(str(target / "quantised"))
    model = build_meta_model(config, torch.float32)
    with refused(key, IntegrityError, naming=f"model.safetensors: tensor {naming}"):
        fill(model, directory, "cpu")


_GROUP = "config_groups.group_0.weights"
_ROTATIONS = {"config_groups": {"R4": {"type": "hadamard", "apply": [{"targets": "down_proj", "location": "input"}]}}}


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("fp8 blocks", "weight_block_size", [0, 128]),
        ("fp8 blocks", "weight_block_size", "128"),
        ("int4", "config_groups", [1]),
        ("int4", _GROUP, None),
        ("int4", f"{_GROUP}.group_size", "32"),
        ("int4", "transform_config", _ROTATIONS),
    ],
)
def test_settings_that_are_not_understood_are_refused(name: str, place: str, value: Any, tmp_path: Path) -> None:
    target = quantise(published_source(qwen3_moe(**SIZES), tmp_path / "source"), tmp_path, FORMATS[name](), is_linear)
    path = target / "quantised/config.json"
    content = json.loads(path.read_text())
    *parts, last = ("quantization_config", *place.split("."))
    reduce(getitem, parts, content)[last] = value
    path.write_text(json.dumps(content))
    config, directory = read_model_config(str(target / "quantised"))
    with refused("model.quantised", naming=f"{directory}: "):
        fill(build_meta_model(config, torch.float32), directory, "cpu")


@pytest.mark.parametrize(
    ("frozen", "weight", "named"),
    [
        (None, _DOWN, f"tensor {_DOWN}.weight"),
        ("as_published", _DOWN, f"tensor {_DOWN}.weight: expert 5 of"),
        ("as_published", _QUERY, f"tensor {_QUERY}.weight: row 3 of"),
    ],
)
def test_a_code_that_is_no_number_is_found_in_values_and_in_codes(
    frozen: Any, weight: str, named: str, tmp_path: Path
) -> None:
    source = published_source(qwen3_moe(**SIZES), tmp_path / "source")
    target = quantise(source, tmp_path, FORMATS["fp8 blocks"](), is_linear) / "quantised"
    tensors = load_file(target / "model.safetensors")
    tensors[f"{weight}.weight"].view(torch.uint8)[3, 2] = 0xFF
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    precision = em.PrecisionConfig(params="float32", compute="float32", reduce="float32", frozen=frozen)

    def load() -> None:
        em.load_model(target, em.init_mesh(em.ParallelConfig(ep=2)), precision=precision, lora=em.LoraConfig(r=2))

    with refused_on_ranks("weights.not-finite", IntegrityError, naming=named):
        shared_ranks(load, 2)


@pytest.mark.parametrize("name", ["fp8 partial blocks", "int4"])
def test_what_is_converted_loads_in_plain_transformers_and_is_the_values(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]()
    target = quantise(published_source(qwen3_moe(**SIZES), tmp_path / "source"), tmp_path, form, is_linear)
    report = convert(str(target / "quantised"), tmp_path / "plain", dtype="bfloat16")
    assert report.method in ("fp8", "compressed-tensors")
    convert(str(target / "quantised"), tmp_path / "wide", dtype="float32")
    wide, exact = load_file(tmp_path / "wide/model.safetensors"), load_file(target / "values/model.safetensors")
    if form.dtype == torch.float32:
        assert all(torch.equal(tensor, exact[key]) for key, tensor in wide.items())
    converted, values = (
        load_file(directory / "model.safetensors") for directory in (tmp_path / "plain", target / "values")
    )
    assert converted.keys() == values.keys()
    assert all(torch.equal(tensor, values[key].to(torch.bfloat16)) for key, tensor in converted.items())
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", output_loading_info=True)
    assert not any(info.values())
