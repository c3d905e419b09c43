"""What files hold beside the model (MTP layers) is named at load, and saved byte for byte or reported as dropped."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig

from expertmesh.io.safetensors_reader import FileTensor, open_weight_files
from expertmesh.weights.load import LoadReport, UnmappedTensors, fill, summarize_unmapped
from expertmesh.weights.meta_model import build_meta_model, materialize
from expertmesh.weights.save import SaveReport, save_model
from tests.support.ranks import shared_ranks
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
