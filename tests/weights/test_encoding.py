"""Values written as codes and scales: the codes of public tools, and of an untouched tensor its own."""

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config, Mxfp4Config
from transformers.integrations.finegrained_fp8 import Fp8Quantize

import expertmesh as em
from expertmesh.cli.options import MergedDtype, WrittenDtype
from expertmesh.export.checkpoint import export
from expertmesh.export.merge import convert, merge
from expertmesh.io.boxes import full_box, slices
from expertmesh.io.safetensors_reader import FileTensor, open_weight_files
from expertmesh.state.codes import codes_of
from expertmesh.state.model_view import ModelView
from expertmesh.state.shards import local_tensor, stored_box
from expertmesh.weights import write
from expertmesh.weights.load import fill
from expertmesh.weights.mapping import plan_save
from expertmesh.weights.meta_model import build_meta_model, materialize, read_model_config
from expertmesh.weights.quantised import encode as encoding
from expertmesh.weights.quantised.encode import PACKED, Rounding, encode, plan_packing, settings_of, stored_matrix
from expertmesh.weights.quantised.published import published_tensors, quantisation
from expertmesh.weights.quantised.tensor import QuantisedTensor
from expertmesh.weights.save import save_model
from tests.adapters.reference import random_adapter
from tests.support.errors import refused
from tests.support.ranks import shared_ranks
from tests.weights.published import FORMATS as PUBLISHED
from tests.weights.published import (
    SIZES,
    gpt_oss,
    gpt_oss_config,
    is_deepseek_v4_matrix,
    is_expert_matrix,
    is_linear,
    quantise,
    write_deepseek_v4,
)
from tests.weights.test_quantised import differing
from tests.weights.tiny import qwen3_moe, random_model, shard_for_test


def _written(leaf: QuantisedTensor, values: Tensor, before: Any = None) -> tuple[dict[str, Tensor], Rounding]:
    """Every part, whole, as files would hold it."""
    found = {part.name: torch.empty(part.shape, dtype=part.dtype) for part in leaf.parts}
    rounding = Rounding()
    for part, box, stored in encode(leaf, values, rounding, before):
        assert stored.dtype == part.dtype
        found[part.name][slices(box)] = stored
    return found, rounding


def _reader(parts: dict[str, Tensor]) -> Callable[[FileTensor, Any, Tensor], None]:
    def fetch(part: FileTensor, box: Any, out: Tensor) -> None:
        out.copy_(parts[part.name][slices(box)])

    return fetch


def _values(leaf: QuantisedTensor, parts: dict[str, Tensor]) -> Tensor:
    return leaf.read(full_box(leaf.shape), _reader(parts))


def _by_compressed_tensors(form: str, weight: Tensor) -> dict[str, Tensor]:
    """What compressed-tensors makes of `weight`, scales included."""
    group = settings_of(form, [], stacks=False)["config_groups"]["group_0"]
    arguments = QuantizationArgs(**group["weights"])
    runs = weight.unflatten(-1, (-1, arguments.group_size))
    low, high = runs.amin(-1), runs.amax(-1)
    total = generate_gparam(weight.amin(), weight.amax()) if form == "nvfp4" else None
    scale, _ = calculate_qparams(low, high, arguments, total)
    state = {"weight": weight, "weight_scale": scale.to(torch.bfloat16) if form == "int4" else scale}
    if total is not None:
        state["weight_global_scale"] = total
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments, format=group["format"])
    return BaseCompressor.get_value_from_registry(group["format"]).compress(state, scheme)


@pytest.mark.parametrize("form", ["int4", "mxfp4", "nvfp4"])
def test_codes_and_scales_are_those_of_compressed_tensors(form: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(48, 96) * torch.logspace(-2, 1, 48).unsqueeze(1)
    written, _ = _written(stored_matrix(form, "x.weight", (48, 96)), weight)
    theirs = _by_compressed_tensors(form, weight)
    for key, tensor in theirs.items():
        assert torch.equal(written[f"x.{key}"].float(), tensor.float().reshape(written[f"x.{key}"].shape)), key


@pytest.mark.parametrize("stored", [None, torch.float8_e8m0fnu, torch.float32], ids=["any", "e8m0", "ue8m0 in fp32"])
def test_fp8_codes_and_scales_are_those_of_transformers(stored: torch.dtype | None) -> None:
    torch.manual_seed(0)
    weight, exponents = torch.randn(256, 384), stored is not None
    leaf = stored_matrix("fp8", "x.weight", (256, 384))
    if stored is not None:
        scale = FileTensor(leaf.scale.name, stored, leaf.scale.shape, Path(), 0)
        leaf = replace(leaf, scale=scale, powers_of_two=stored == torch.float32)
    written, _ = _written(leaf, weight)
    settings = mock.Mock(weight_block_size=(128, 128), scale_fmt="ue8m0" if exponents else "float")
    theirs = Fp8Quantize(mock.Mock(quantization_config=settings))._quantize_one("x.weight", weight)
    assert torch.allclose(written["x.weight_scale_inv"].float(), theirs["x.weight_scale_inv"].float(), rtol=3e-7)
    differing = (written["x.weight"].float() != theirs["x.weight"].float()).sum()
    # They multiply by a rounded reciprocal, so that a value in the middle of two codes can fall to the other side.
    assert differing <= (0 if exponents else weight.numel() // 10_000)


def _factors_of_experts(directory: Path, world: int) -> None:
    model = random_model(qwen3_moe(**SIZES), torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate_up_proj"):
                parameter[:, : parameter.shape[1] // 2].mul_(3)  # gates
    if world > 1:
        shard_for_test(model, world, world)
    save_model(model, directory, dtype="nvfp4")


@pytest.mark.parametrize("world", [1, 2])
def test_gate_and_up_of_an_expert_share_the_factor_that_engines_take_from_the_gate(world: int, tmp_path: Path) -> None:
    shared_ranks(_factors_of_experts, world, tmp_path / "out", world)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    factors = {name: tensor for name, tensor in tensors.items() if name.endswith("_global_scale")}
    gates = [name for name in factors if ".gate_proj." in name]
    assert len(gates) > 1
    for name in gates:
        assert torch.equal(factors[name], factors[name.replace("gate_proj", "up_proj")]), name


def _saved_again(target: Path, dtype: torch.dtype, world: int, ep: int, change: str = "") -> tuple[Any, ...]:
    """Load the quantised files, multiply one row of the parameter `change`, and save as loaded; what was reported."""
    config, directory = read_model_config(str(target / "quantised"))
    model = build_meta_model(config, dtype)
    if world > 1:
        shard_for_test(model, world, ep)
    materialize(model, "cpu")
    fill(model, directory)
    if change:
        tensor = ModelView(model).tensors[change]
        box, local = stored_box(tensor), local_tensor(tensor)
        if box[0][0] == 0 and local.numel():
            local.data[0, 0].mul_(1.5)
    report = save_model(model, target / "again", dtype="as_loaded")
    return report.rounded


def _bytes_of(directory: Path) -> dict[str, Tensor]:
    tensors = load_file(directory / "model.safetensors")
    return {name: tensor.reshape(-1).view(torch.uint8) for name, tensor in tensors.items()}


def _assert_as_before(target: Path, but: tuple[str, ...] = ()) -> None:
    before, after = _bytes_of(target / "quantised"), _bytes_of(target / "again")
    differing = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert before.keys() == after.keys()
    assert differing <= set(but)
    configs = [json.loads((target / name / "config.json").read_text()) for name in ("quantised", "again")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]


def _source(directory: Path, config: Any) -> Path:
    random_model(config, torch.bfloat16).save_pretrained(directory)
    return directory


ON_RANKS = ("fp8 partial blocks", "int4 with zero points", "nvfp4")


@pytest.mark.slow_cases(
    r"(fp8 partial blocks|int4 with zero points)-4-2-.*",
    why="nvfp4, whose scales are of two kinds, stays on four ranks, and every format on one",
)
@pytest.mark.parametrize(
    ("name", "world", "ep", "dtype"),
    [(name, 1, 1, torch.float32) for name in PUBLISHED] + [(name, 4, 2, torch.bfloat16) for name in ON_RANKS],
)
def test_what_training_has_not_changed_is_written_byte_for_byte(
    name: str, world: int, ep: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    form = PUBLISHED[name]()
    target = quantise(_source(tmp_path / "source", qwen3_moe(**SIZES)), tmp_path, form, is_linear)
    reports = shared_ranks(_saved_again, world, target, dtype, world, ep)
    _assert_as_before(target)
    assert len(set(reports)) == 1
    for rounded in reports[0]:
        assert (rounded.error, rounded.kept) == (0.0, 1.0)


def test_plain_files_with_a_quantised_config_keep_their_dtypes_as_loaded(tmp_path: Path) -> None:
    form = PUBLISHED["fp8 blocks"]()
    target = quantise(_source(tmp_path / "source", qwen3_moe(**SIZES)), tmp_path, form, lambda _: False)
    _saved_again(target, torch.float32, 1, 1)
    before, after = (load_file(target / name / "model.safetensors") for name in ("quantised", "again"))
    assert {name: tensor.dtype for name, tensor in after.items()} == dict.fromkeys(before, torch.bfloat16)


def _load_and_save(target: Path, parallel: em.ParallelConfig) -> None:
    precision = em.PrecisionConfig(compute="float32")
    model = em.load_model(target / "quantised", em.init_mesh(parallel), precision=precision)
    em.save_model(model, target / "again", dtype="as_loaded")


def _load_and_save_computed(target: Path, parallel: em.ParallelConfig) -> None:
    """As for a family whose files hold values computed from those in memory."""
    with mock.patch.object(write, "is_computed", return_value=True):
        _load_and_save(target, parallel)


def test_what_is_computed_is_gathered_by_the_rank_that_encodes_it(tmp_path: Path) -> None:
    target = quantise(_source(tmp_path / "source", qwen3_moe(**SIZES)), tmp_path, PUBLISHED["int4"](), is_linear)
    shared_ranks(_load_and_save_computed, 2, target, em.ParallelConfig(ep=2))
    _assert_as_before(target)


@pytest.mark.slow_cases(r"pp", why="tp stays, which cuts matrices")
@pytest.mark.parametrize("axis", ["pp", "tp"])
def test_stages_and_split_matrices_are_put_together_again(axis: str, tmp_path: Path) -> None:
    target = quantise(_source(tmp_path / "source", qwen3_moe(**SIZES)), tmp_path, PUBLISHED["nvfp4"](), is_linear)
    shared_ranks(_load_and_save, 4, target, em.ParallelConfig(ep=2, **{axis: 2}))
    _assert_as_before(target)


def test_ranks_plan_the_codes_in_the_order_of_the_headers(tmp_path: Path) -> None:
    """Each tensor is one reduction, so that ranks in another order would mix the bytes of two."""
    target = quantise(_source(tmp_path / "source", qwen3_moe(**SIZES)), tmp_path, PUBLISHED["int4"](), is_linear)
    config, directory = read_model_config(str(target / "quantised"))
    with open_weight_files(directory) as files:
        published = published_tensors(quantisation(config), files)
        headers = [name.removesuffix("_packed") for name in files.tensors if name.endswith("_packed")]
    assert len(headers) > 8
    assert list(published.quantised) == headers
    model = build_meta_model(config, torch.float32)
    fill(model, directory, "cpu")
    view = ModelView(model)
    assert list(plan_packing(view, plan_save(view), "as_loaded").packed) == headers


def test_gpt_oss_is_written_in_its_own_order(tmp_path: Path) -> None:
    target = quantise(_source(tmp_path / "source", gpt_oss_config()), tmp_path, gpt_oss(), is_expert_matrix)
    change = "model.layers.1.mlp.experts.down_proj"
    shared_ranks(_saved_again, 2, target, torch.float32, 2, 2, change)
    _assert_as_before(target, (f"{change}_blocks", f"{change}_scales"))
    values = load_file(target / "values/model.safetensors")[change].clone()
    values[0, 0] *= 1.5
    differs = _reread(target / "again", change) != values
    assert differs.sum() > 0
    assert not differs[1:].any()


@pytest.mark.slow_cases(r"(1-1|4-4)", why="ep 2 stays")
@pytest.mark.parametrize(("world", "ep"), [(1, 1), (2, 2), (4, 4)])
def test_deepseek_v4_is_read_and_written_under_its_published_names(world: int, ep: int, tmp_path: Path) -> None:
    source = write_deepseek_v4(tmp_path / "source")
    target = quantise(source, tmp_path, PUBLISHED["fp4 experts"](), is_deepseek_v4_matrix)
    assert shared_ranks(differing, world, target, torch.float32, world, ep) == [[]] * world
    shared_ranks(_saved_again, world, target, torch.float32, world, ep)
    _assert_as_before(target)
    if world == 1:
        convert(str(target / "quantised"), tmp_path / "plain", dtype="float32")
        plain, values = (load_file(path / "model.safetensors") for path in (tmp_path / "plain", target / "values"))
        assert plain.keys() == values.keys()
        assert all(torch.equal(plain[name], tensor) for name, tensor in values.items())


def _reread(directory: Path, name: str) -> Tensor:
    config, directory = read_model_config(str(directory))
    model = build_meta_model(config, torch.float32)
    fill(model, directory, "cpu")
    return ModelView(model).tensors[name].detach()


@pytest.mark.slow_cases(
    r"fp8 (blocks|blocks, e8m0|blocks, e8m0 named scale|of compressed-tensors, a scale a row)",
    r"(fp8, one scale|int4|nvfp4)",
    why="a harder one of each kind stays; the bytes of what has not changed stay for every format",
)
@pytest.mark.parametrize("name", PUBLISHED)
def test_only_blocks_that_have_changed_are_rounded_anew_and_the_error_is_told(name: str, tmp_path: Path) -> None:
    form = PUBLISHED[name]()
    target = quantise(_source(tmp_path / "source", qwen3_moe(**SIZES)), tmp_path, form, is_linear)
    change = "model.layers.1.mlp.experts.down_proj"
    before = _reread(target / "quantised", change)
    (rounded,) = (each for each in _saved_again(target, torch.float32, 1, 1, change) if "down_proj" in each.pattern)
    wanted, after = before.clone(), _reread(target / "again", change)
    wanted[0, 0] *= 1.5
    file_name = "model.layers.1.mlp.experts.0.down_proj"
    _assert_as_before(target, tuple(key for key in _bytes_of(target / "quantised") if key.startswith(file_name)))
    assert torch.equal(after[1:], before[1:])
    assert rounded.pattern == "model.layers.*.mlp.experts.*.down_proj.weight"
    assert 0 < rounded.kept < 1
    error = (after - wanted).norm() / _norm_of(target / "again", "down_proj", wanted)
    assert rounded.error == pytest.approx(float(error), rel=1e-3)
    # Half the distance of codes at the top of a block, over the largest value.
    step = 1 / 28 if "fp8" in name else 1 / 6
    assert (after - wanted).abs().max() <= step * wanted[0].abs().max()


def _norm_of(directory: Path, kind: str, wanted: Tensor) -> Tensor:
    """Of all values of one kind, one of whose tensors is `wanted`."""
    other = _reread(directory, f"model.layers.0.mlp.experts.{kind}")
    return torch.cat([other.reshape(-1), wanted.reshape(-1)]).norm()


CONVERTED: dict[str, Callable[[], Any]] = {
    "fp8": lambda: qwen3_moe(hidden_size=128, moe_intermediate_size=128, head_dim=32),
    "int4": lambda: qwen3_moe(**SIZES),
    "mxfp4": lambda: qwen3_moe(**SIZES),
    "nvfp4": lambda: qwen3_moe(**SIZES),
    "mxfp4 of GPT-OSS": gpt_oss_config,
}


@pytest.mark.parametrize("name", CONVERTED)
def test_a_model_converted_to_a_format_is_read_alike_by_transformers_and_here(name: str, tmp_path: Path) -> None:
    source, target, form = _source(tmp_path / "source", CONVERTED[name]()), tmp_path / "target", name.partition(" ")[0]
    report = convert(str(source), target, dtype=form)
    assert report.saved.total_bytes < (0.75 if form == "fp8" else 0.6) * report.source_bytes
    ours = build_meta_model(read_model_config(str(target))[0], torch.bfloat16)
    fill(ours, target, "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs, notes = AutoModelForCausalLM.from_pretrained(
            target, dtype=torch.bfloat16, output_loading_info=True, quantization_config=_as_values(target)
        )
    assert not any(notes.values()), notes
    state = theirs.state_dict()
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).state_dict()
    quantised = set()
    for key, tensor in ModelView(ours).tensors.items():
        # transformers leaves NVFP4's global scale out for experts (docs/quantised.md).
        assert torch.equal(state[key], tensor) is not (form == "nvfp4" and ".experts." in key), key
        error = (tensor.float() - plain[key].float()).norm() / plain[key].float().norm()
        assert error < (0.04 if form == "fp8" else 0.15)
        quantised |= {key} if error > 0 else set()
    assert all(".experts." in key or (form == "fp8" and "_proj" in key) for key in quantised)
    assert len(quantised) == 2 * (2 if form != "fp8" else 2 + 4)


def _as_values(directory: Path) -> Any:
    """The settings of a quantised directory, for values instead of codes."""
    settings = json.loads((directory / "config.json").read_text())["quantization_config"]
    kind = {"fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config}.get(
        settings.pop("quant_method"), CompressedTensorsConfig
    )
    return kind(**settings, dequantize=True)


def test_nvfp4_that_is_converted_is_what_compressed_tensors_decompresses(tmp_path: Path) -> None:
    convert(str(_source(tmp_path / "source", qwen3_moe(**SIZES))), tmp_path / "target", dtype="nvfp4")
    group = json.loads((tmp_path / "target/config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    stored, stem = load_file(tmp_path / "target/model.safetensors"), "model.layers.1.mlp.experts.3.down_proj."
    state = {key.removeprefix(stem): tensor for key, tensor in stored.items() if key.startswith(stem)}
    compressor = BaseCompressor.get_value_from_registry(group["format"])
    values = compressor.decompress(state, QuantizationScheme(**group))["weight"]
    ours = _reread(tmp_path / "target", "model.layers.1.mlp.experts.down_proj")[3]
    assert torch.equal(ours.to(values.dtype), values)


@pytest.mark.parametrize(
    ("dtype", "config", "key", "naming"),
    [
        ("as_loaded", qwen3_moe, "weights.not-quantised", "not loaded from quantised files"),
        ("int4", qwen3_moe, "weights.format-unsuited", "has 24 columns"),
        ("fp8", gpt_oss_config, "weights.format-unsuited", "all experts in one tensor"),
    ],
)
def test_what_a_format_has_no_place_for_is_refused_before_anything_is_written(
    dtype: str, config: Any, key: str, naming: str, tmp_path: Path
) -> None:
    source = _source(tmp_path / "source", config())
    with refused(key, naming=naming):
        convert(str(source), tmp_path / "target", dtype=dtype)
    assert not (tmp_path / "target").exists()


def test_a_run_is_exported_as_loaded_like_its_live_model(tmp_path: Path) -> None:
    """Also when the files that it was loaded from are gone: then everything is rounded anew."""
    target = quantise(_source(tmp_path / "source", qwen3_moe(**SIZES)), tmp_path, PUBLISHED["nvfp4"](), is_linear)
    shared_ranks(_train_and_save, 2, target)
    checkpoint = target / "checkpoints/step-00000001"
    export(checkpoint, tmp_path / "exported", dtype="as_loaded")
    live = _bytes_of(target / "live")
    assert all(torch.equal(tensor, live[name]) for name, tensor in _bytes_of(tmp_path / "exported").items())
    (target / "quantised/model.safetensors").unlink()
    _, report = export(checkpoint, tmp_path / "anew", dtype="as_loaded")
    assert {rounded.kept for rounded in report.rounded} == {0.0}
    assert _bytes_of(tmp_path / "anew").keys() == live.keys()
    name = "model.layers.1.mlp.experts.down_proj"
    one, other = (_reread(directory, name) for directory in (target / "live", tmp_path / "anew"))
    assert (one - other).norm() < 0.05 * one.norm()


def _train_and_save(target: Path) -> None:
    precision = em.PrecisionConfig(params="float32", compute="float32", reduce="float32")
    mesh = em.init_mesh(em.ParallelConfig(ep=2), num_experts=8)
    model = em.load_model(target / "quantised", mesh, precision=precision)
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.experts.down_proj").mul_(1.1)
    em.save_checkpoint(model, None, target / "checkpoints", step=1)
    em.save_model(model, target / "live", dtype="as_loaded")


def _everything_anew(leaf: Any, box: Any, part: Any, same: Any, old: Tensor, new: Tensor) -> Tensor:
    return new


def test_codes_that_are_not_kept_turn_the_comparison_red(tmp_path: Path) -> None:
    target = quantise(_source(tmp_path / "source", qwen3_moe(**SIZES)), tmp_path, PUBLISHED["int4"](), is_linear)
    with mock.patch.object(encoding, "_mixed", _everything_anew):
        _saved_again(target, torch.float32, 1, 1)
    with pytest.raises(AssertionError):
        _assert_as_before(target)


def _other_nibble_first(values: Tensor, code: Any) -> Tensor:
    packed = codes_of(values, code)
    return packed >> 4 | packed << 4


def test_nibbles_in_the_other_order_turn_the_comparison_red() -> None:
    with mock.patch.object(encoding, "codes_of", _other_nibble_first), pytest.raises(AssertionError, match="packed"):
        test_codes_and_scales_are_those_of_compressed_tensors("nvfp4")


def test_the_command_line_has_the_names_that_saving_takes() -> None:
    assert set(get_args(WrittenDtype)) == {*get_args(MergedDtype), *PACKED}


@pytest.mark.parametrize("name", ["fp8 partial blocks", "mxfp4"])
def test_an_adapter_is_merged_into_the_codes_of_its_base_and_what_rounding_has_left_is_told(
    name: str, tmp_path: Path
) -> None:
    target = quantise(_source(tmp_path / "source", qwen3_moe(**SIZES)), tmp_path, PUBLISHED[name](), is_linear)
    model = AutoModelForCausalLM.from_pretrained(target / "values", dtype=torch.float32)
    random_adapter(model, tmp_path / "adapter", ["q_proj"], ["mlp.experts.down_proj"])
    merge(tmp_path / "adapter", tmp_path / "plain", base=str(target / "quantised"), dtype="float32")
    report = merge(tmp_path / "adapter", target / "again", base=str(target / "quantised"), dtype="as_loaded")
    adapted = [key for key in _bytes_of(target / "quantised") if "q_proj" in key or "down_proj" in key]
    _assert_as_before(target, tuple(adapted))
    parameter = "model.layers.1.mlp.experts.down_proj"
    base, merged = (_reread(directory, parameter) for directory in (target / "quantised", tmp_path / "plain"))
    rounded = _reread(target / "again", parameter)
    assert (rounded - merged).norm() < (0.03 if "fp8" in name else 0.15) * merged.norm()
    left = float(((rounded - base) * (merged - base)).sum() / (merged - base).square().sum())
    assert report.compared.left == pytest.approx(left, abs=0.1)
    assert report.compared.left > 0.95 if "fp8" in name else 0.5 < report.compared.left < 0.9
    with refused("config.wrong-value", naming="convert a plain result"):
        merge(tmp_path / "adapter", tmp_path / "other", base=str(target / "quantised"), dtype="mxfp4")
