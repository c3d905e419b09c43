"""What files hold beside the model (MTP layers) is named at load, and saved byte for byte or reported as dropped."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig

from expertmesh.io.safetensors_reader import FileTensor, open_weight_files
from expertmesh.weights.load import LoadReport, UnmappedTensors, fill, summarize_unmapped
from expertmesh.weights.meta_model import build_meta_model, materialize, read_model_config
from expertmesh.weights.save import SaveReport, save_model
from tests.support.ranks import shared_ranks
from tests.weights.published import FORMATS, is_linear, quantise
from tests.weights.tiny import deepseek_v3, random_model, shard_for_test

State = dict[str, torch.Tensor]
MTP = UnmappedTensors("model.layers.61.*", 4, (50 * 32 + 24 * 32) * 2 + 32 * 4 + 5 * 8)
BUFFER = UnmappedTensors("model.layers.0.self_attn.rotary_emb.*", 1, 4 * 4)


def _mtp_layer() -> State:
    """Of several dtypes, none of them that of the model."""
    generator = torch.Generator().manual_seed(1)
    return {
        "model.layers.61.embed_tokens.weight": torch.randn(50, 32, generator=generator).bfloat16(),
        "model.layers.61.mlp.experts.0.up_proj.weight": torch.randn(24, 32, generator=generator).bfloat16(),
        "model.layers.61.enorm.weight": torch.randn(32, generator=generator),
        "model.layers.61.numbers": torch.arange(5),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.randn(4, generator=generator),
    }


def source_with_mtp(directory: Path) -> PreTrainedConfig:
    """A DeepSeek-V3 directory with an MTP layer, as it is published, and an old buffer."""
    reference = random_model(deepseek_v3(num_nextn_predict_layers=1))
    reference.save_pretrained(directory)
    path = directory / "model.safetensors"
    save_file({**load_file(path), **_mtp_layer()}, path, metadata={"format": "pt"})
    return reference.config


def _saved(directory: Path) -> State:
    with open_weight_files(directory) as files:
        paths = {tensor.path for tensor in files.tensors.values()}
    return {name: tensor for path in paths for name, tensor in load_file(path).items()}


def _load_change_save(
    config: PreTrainedConfig, source: Path, target: Path, ep: int, lost_on: int | None, options: dict[str, Any]
) -> tuple[LoadReport, SaveReport]:
    model = build_meta_model(config, torch.float32, directory=source)
    if ep > 1:
        shard_for_test(model, ep, ep)
    materialize(model, "cpu")
    loaded = fill(model, source)
    for parameter in model.parameters():
        parameter.data.mul_(2)
    if lost_on == (dist.get_rank() if ep > 1 else 0):
        from expertmesh.weights import save

        save.still_readable = lambda tensors: False
    return loaded, save_model(model, target, **options)


def _run(config: PreTrainedConfig, source: Path, target: Path, ep: int, **options: Any) -> list[Any]:
    lost_on = options.pop("lost_on", None)
    job = (config, source, target, ep, lost_on, options)
    return shared_ranks(_load_change_save, ep, *job) if ep > 1 else [_load_change_save(*job)]


@pytest.mark.slow_cases(r"[14]-.*", why="two ranks and files in parts stay")
@pytest.mark.parametrize(("ep", "limit"), [(1, 10**9), (2, 30_000), (4, 10**9)])
def test_an_mtp_layer_is_saved_byte_for_byte_and_transformers_loads_the_model(
    ep: int, limit: int, tmp_path: Path
) -> None:
    config = source_with_mtp(tmp_path / "source")
    ranks = _run(config, tmp_path / "source", tmp_path / "out", ep, max_shard_bytes=limit)
    saved, source, kept = _saved(tmp_path / "out"), _saved(tmp_path / "source"), _mtp_layer()
    assert saved.keys() == source.keys()
    for name, tensor in kept.items():
        assert saved[name].dtype == tensor.dtype
        assert torch.equal(saved[name], tensor)
    trained = [name for name in source if name not in kept and not name.endswith("e_score_correction_bias")]
    assert all(torch.equal(saved[name], 2 * source[name]) for name in trained)
    for loaded, report in ranks:
        assert set(loaded.unmapped) == {MTP, BUFFER}
        assert set(report.kept) == {MTP, BUFFER}
        assert report.dropped == ()
    assert sum(report.bytes_written for _, report in ranks) == sum(tensor.nbytes for tensor in source.values())

    model, notes = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(notes.values()), notes
    assert model.config.num_nextn_predict_layers == 1
    assert torch.equal(model.lm_head.weight, saved["lm_head.weight"])


def test_a_saved_model_keeps_its_mtp_layer_when_it_is_trained_again(tmp_path: Path) -> None:
    config = source_with_mtp(tmp_path / "0")
    for number in (1, 2):
        _run(config, tmp_path / str(number - 1), tmp_path / str(number), 1)
    assert all(torch.equal(_saved(tmp_path / "2")[name], tensor) for name, tensor in _mtp_layer().items())


def test_a_dtype_that_is_asked_for_holds_for_them_too(tmp_path: Path) -> None:
    config = source_with_mtp(tmp_path / "source")
    _run(config, tmp_path / "source", tmp_path / "out", 2, dtype=torch.bfloat16)
    saved = _saved(tmp_path / "out")
    for name, tensor in _mtp_layer().items():
        expected = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert saved[name].dtype == expected.dtype
        assert torch.equal(saved[name], expected)


def _quantised_source(tmp_path: Path) -> tuple[PreTrainedConfig, Path]:
    """Blocks of fp8 in the model and in the MTP layer; `values` beside it holds what the codes stand for."""
    source_with_mtp(tmp_path / "source")
    target = quantise(tmp_path / "source", tmp_path, FORMATS["fp8 partial blocks"](), is_linear)
    return read_model_config(str(target / "quantised"))[0], target / "quantised"


@pytest.mark.parametrize(("ep", "dtype"), [(1, "auto"), (2, "auto"), (1, "float32"), (1, "fp8")])
def test_codes_of_an_mtp_layer_become_values_where_the_format_is_another(ep: int, dtype: str, tmp_path: Path) -> None:
    config, source = _quantised_source(tmp_path)
    ranks = _run(config, source, tmp_path / "out", ep, dtype=dtype)
    saved, values = _saved(tmp_path / "out"), _saved(tmp_path / "values")
    own = {name: tensor for name, tensor in saved.items() if ".61." in name}
    assert own.keys() == {name for name in _mtp_layer() if ".61." in name}
    codes = "model.layers.61.mlp.experts.0.up_proj.weight"
    wide = dtype == "float32"
    assert own[codes].dtype == (torch.float32 if wide else torch.bfloat16)
    assert torch.equal(own[codes], values[codes].to(own[codes].dtype))
    for name in own.keys() - {codes}:
        plain = _mtp_layer()[name]
        assert torch.equal(own[name], plain.float() if wide and plain.is_floating_point() else plain)
    settings = json.loads((tmp_path / "out/config.json").read_text()).get("quantization_config")
    if dtype == "fp8":
        assert codes.removesuffix(".weight") in settings["modules_to_not_convert"]
    else:
        assert settings is None
        assert not any(name.endswith("_scale_inv") for name in saved)
    for _, report in ranks:
        assert sum(each.tensors for each in report.kept) == len(_mtp_layer()) + 1  # the scale
        assert report.dropped == ()


@pytest.mark.parametrize("ep", [1, 2])
def test_codes_of_an_mtp_layer_are_saved_byte_for_byte_as_loaded(ep: int, tmp_path: Path) -> None:
    config, source = _quantised_source(tmp_path)
    _run(config, source, tmp_path / "out", ep, dtype="as_loaded")
    saved, before = _saved(tmp_path / "out"), _saved(source)
    assert saved.keys() == before.keys()
    for name in (name for name in before if ".61." in name):
        assert saved[name].dtype == before[name].dtype
        assert torch.equal(saved[name].reshape(-1).view(torch.uint8), before[name].reshape(-1).view(torch.uint8))
    configs = [json.loads((path / "config.json").read_text()) for path in (source, tmp_path / "out")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]


def test_files_lost_since_loading_are_reported_as_dropped_by_every_rank_and_the_model_is_saved(tmp_path: Path) -> None:
    config = source_with_mtp(tmp_path / "source")
    ranks = _run(config, tmp_path / "source", tmp_path / "out", 2, lost_on=1)
    assert _saved(tmp_path / "out").keys() == _saved(tmp_path / "source").keys() - _mtp_layer().keys()
    for _, report in ranks:
        assert report.kept == ()
        assert set(report.dropped) == {MTP, BUFFER}


@pytest.mark.parametrize("how", ["removed", "rewritten"])
def test_files_that_are_gone_or_changed_are_not_read(how: str, tmp_path: Path) -> None:
    config = source_with_mtp(tmp_path / "source")
    model = build_meta_model(config, torch.float32)
    materialize(model, "cpu")
    fill(model, tmp_path / "source")
    path = tmp_path / "source" / "model.safetensors"
    if how == "removed":
        path.unlink()
    else:
        save_file({**load_file(path), "model.layers.61.another": torch.ones(3)}, path)
    assert set(save_model(model, tmp_path / "out").dropped) == {MTP, BUFFER}


def test_files_of_a_relative_path_are_found_after_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, source = _quantised_source(tmp_path)
    monkeypatch.chdir(tmp_path)
    model = build_meta_model(config, torch.float32)
    fill(model, source.name, "cpu")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    report = save_model(model, tmp_path / "out", dtype="as_loaded")
    assert report.dropped == ()
    assert [rounded.kept for rounded in report.rounded] == [1.0] * len(report.rounded)


def test_names_are_shortened_to_what_no_other_tensor_shares() -> None:
    def tensor(name: str) -> FileTensor:
        return FileTensor(name, torch.bfloat16, (2, 3), Path("x"), 0)

    used = ["model.layers.0.mlp.weight", "model.layers.6.mlp.weight", "model.embed.weight"]
    names = ["mtp.fc.weight", "mtp.layers.0.w", "model.layers.61.a", "model.layers.0.mlp.bias", "head"]
    assert summarize_unmapped([tensor(name) for name in names], used) == (
        UnmappedTensors("mtp.*", 2, 24),
        UnmappedTensors("model.layers.61.*", 1, 12),
        UnmappedTensors("model.layers.0.mlp.bias", 1, 12),
        UnmappedTensors("head", 1, 12),
    )
