"""Saving: plain transformers reads equal tensors from the family's own layout, and failures leave nothing behind."""

import errno
import json
import os
import re
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from expertmesh.config.errors import DistributedFailure, ExpertmeshError, InputError, IntegrityError
from expertmesh.io import directory as directory_module
from expertmesh.io import safetensors_writer
from expertmesh.weights import write
from expertmesh.weights.load import fill
from expertmesh.weights.meta_model import build_meta_model, materialize
from expertmesh.weights.save import SaveReport, save_model
from tests.support.errors import refused
from tests.support.ranks import run_ranks, shared_ranks
from tests.weights.tiny import FAMILIES, deepseek_v3, qwen3_moe, random_model, shard_for_test, write_fused

LAYOUTS = ((1, 1, 0), (2, 2, 0), (4, 2, 0), (4, 2, 1), (4, 2, 2))


def _loaded(config: PreTrainedConfig, source: Path, world: int, ep: int, efsdp_dim: int = 0) -> PreTrainedModel:
    model = build_meta_model(config, torch.float32, directory=source)
    if world > 1:
        shard_for_test(model, world, ep, efsdp_dim)
    materialize(model, "cpu")
    fill(model, source)
    return model


def _load_and_save(
    config: PreTrainedConfig, source: Path, target: Path, layout: tuple[int, int, int], options: dict[str, Any]
) -> SaveReport:
    return save_model(_loaded(config, source, *layout), target, **options)


def _run(
    config: PreTrainedConfig, source: Path, target: Path, layout: tuple[int, int, int], **options: Any
) -> list[SaveReport]:
    job = (config, source, target, layout, options)
    return shared_ranks(_load_and_save, layout[0], *job) if layout[0] > 1 else [_load_and_save(*job)]


def _specs(directory: Path) -> dict[str, tuple[str, list[int]]]:
    """Dtype code and shape of all tensors in a directory, by the library's own reader."""
    found = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118 - not a dict
                part = file.get_slice(name)
                found[name] = (part.get_dtype(), part.get_shape())
    return found


def _reloaded(directory: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """By plain transformers, which must have nothing to say about it."""
    model, notes = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, output_loading_info=True)
    assert not any(notes.values()), notes
    return model


def _assert_equal(model: PreTrainedModel, expected: PreTrainedModel) -> None:
    state, reference = model.state_dict(), expected.state_dict()
    assert state.keys() == reference.keys()
    for name, tensor in reference.items():
        assert torch.equal(state[name], tensor), name
        assert state[name].dtype == tensor.dtype


@pytest.mark.slow_cases(r"\((2, 2, 0|4, 2, 1)\)-deepseek_v3", why="two dims of four ranks stay")
@pytest.mark.slow_cases(r".*(mixtral|qwen3_moe)", why="deepseek_v3 stays, which has dense blocks and buffers as well")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_transformers_reads_back_equal_tensors_from_the_same_file_layout(
    family: str, layout: tuple[int, int, int], tmp_path: Path
) -> None:
    reference = random_model(FAMILIES[family]())
    reference.save_pretrained(tmp_path / "theirs")
    reports = _run(reference.config, tmp_path / "theirs", tmp_path / "ours", layout, max_shard_bytes=30_000)
    assert _specs(tmp_path / "ours") == _specs(tmp_path / "theirs")
    _assert_equal(_reloaded(tmp_path / "ours"), reference)
    assert sum(report.bytes_written for report in reports) == sum(t.nbytes for t in reference.state_dict().values())
    assert {report.files for report in reports} == {reports[0].files}
    assert len(reports[0].files) > 4
    assert list(tmp_path.glob("ours.tmp*")) == []


@pytest.mark.slow_cases(r"(qwen3_moe|mixtral)", why="deepseek_v3 stays, which has dense blocks as well")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_checkpoint_stays_fused(family: str, tmp_path: Path) -> None:
    reference = random_model(FAMILIES[family]())
    write_fused(reference, tmp_path / "fused")
    _run(reference.config, tmp_path / "fused", tmp_path / "ours", (2, 2, 0))
    assert _specs(tmp_path / "ours") == _specs(tmp_path / "fused")
    _assert_equal(_reloaded(tmp_path / "ours"), reference)


def _save_from_memory(reference: PreTrainedModel, target: Path) -> None:
    """A model that was never loaded: made in memory, then sharded."""
    model = build_meta_model(reference.config, torch.float32)
    model.load_state_dict(reference.state_dict(), assign=True)
    model.tie_weights()
    shard_for_test(model, 2, 2)
    save_model(model, target)


def test_a_model_made_in_memory_and_then_sharded_is_saved_in_its_familys_layout(tmp_path: Path) -> None:
    reference = random_model(qwen3_moe())
    reference.save_pretrained(tmp_path / "theirs")
    shared_ranks(_save_from_memory, 2, reference, tmp_path / "ours")
    assert _specs(tmp_path / "ours") == _specs(tmp_path / "theirs")
    _assert_equal(_reloaded(tmp_path / "ours"), reference)


def test_one_file_or_several_are_named_and_indexed_as_transformers_does(tmp_path: Path) -> None:
    reference = random_model(qwen3_moe())
    reference.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    save_model(reference, tmp_path / "several", max_shard_bytes=40_000)
    save_model(reference, tmp_path / "one")
    index, theirs = (
        json.loads((tmp_path / name / "model.safetensors.index.json").read_text()) for name in ("several", "theirs")
    )
    assert index["metadata"] == theirs["metadata"]
    assert index["weight_map"].keys() == theirs["weight_map"].keys()
    assert {path.name for path in (tmp_path / "one").iterdir()} == {
        "model.safetensors",
        "config.json",
        "generation_config.json",
    }
    for path in (tmp_path / "several").glob("*.safetensors"):
        assert sum(tensor.nbytes for tensor in load_file(path).values()) <= 40_000
        assert path.name in index["weight_map"].values()


def test_a_tensor_larger_than_the_limit_gets_a_file_of_its_own(tmp_path: Path) -> None:
    report = save_model(random_model(qwen3_moe()), tmp_path / "out", max_shard_bytes=5_000)
    assert len(report.files) > 10
    _assert_equal(_reloaded(tmp_path / "out"), random_model(qwen3_moe()))


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_are_written_once(tied: bool, tmp_path: Path) -> None:
    reference = random_model(qwen3_moe(tie_word_embeddings=tied))
    reference.save_pretrained(tmp_path / "theirs")
    assert ("lm_head.weight" in _specs(tmp_path / "theirs")) is not tied
    _run(reference.config, tmp_path / "theirs", tmp_path / "ours", (2, 2, 0))
    assert _specs(tmp_path / "ours") == _specs(tmp_path / "theirs")
    _assert_equal(_reloaded(tmp_path / "ours"), reference)


def test_a_given_dtype_casts_all_but_what_the_family_keeps_in_fp32(tmp_path: Path) -> None:
    reference = random_model(deepseek_v3())
    reference.save_pretrained(tmp_path / "theirs")
    target = tmp_path / "ours"
    _run(reference.config, tmp_path / "theirs", target, (2, 2, 0), dtype=torch.bfloat16)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    model = _reloaded(target, torch.bfloat16)
    in_fp32 = {name for name, tensor in model.state_dict().items() if tensor.dtype == torch.float32}
    assert bias in in_fp32  # transformers 5.24 keeps the router's weight as well
    assert {name for name, (dtype, _) in _specs(target).items() if dtype != "BF16"} == in_fp32
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    assert torch.equal(model.get_buffer(bias), reference.get_buffer(bias))
    weight = "model.layers.1.mlp.experts.gate_up_proj"
    assert torch.equal(model.get_parameter(weight), reference.get_parameter(weight).bfloat16())


def _in_several_dtypes(directory: Path) -> PreTrainedConfig:
    """Norms in fp32, one projection in fp16, all else in bf16, the tied head among it."""
    reference = random_model(qwen3_moe(tie_word_embeddings=True))
    reference.save_pretrained(directory)
    path = directory / "model.safetensors"
    cast = {
        name: tensor if "norm" in name else tensor.half() if "0.self_attn.q_proj" in name else tensor.bfloat16()
        for name, tensor in load_file(path).items()
    }
    save_file(cast, path, metadata={"format": "pt"})
    return reference.config


@pytest.mark.parametrize("layout", [(1, 1, 0), (4, 2, 1)], ids=str)
def test_by_default_every_tensor_has_the_dtype_of_the_files_it_came_from(
    layout: tuple[int, int, int], tmp_path: Path
) -> None:
    config = _in_several_dtypes(tmp_path / "source")
    reports = _run(config, tmp_path / "source", tmp_path / "out", layout)
    assert _specs(tmp_path / "out") == _specs(tmp_path / "source")
    assert {report.dtype for report in reports} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    _run(config, tmp_path / "source", tmp_path / "as trained", layout, dtype=None)
    assert {dtype for dtype, _ in _specs(tmp_path / "as trained").values()} == {"F32"}


def test_a_dtype_may_be_given_by_its_name_and_no_other_word(tmp_path: Path) -> None:
    config = _in_several_dtypes(tmp_path / "source")
    _run(config, tmp_path / "source", tmp_path / "out", (1, 1, 0), dtype="float16")
    assert {dtype for dtype, _ in _specs(tmp_path / "out").values()} == {"F16"}
    with refused("config.wrong-value", naming="'bf16'"):
        _run(config, tmp_path / "source", tmp_path / "other", (1, 1, 0), dtype="bf16")


def test_values_that_the_dtype_cannot_hold_are_refused_by_name(tmp_path: Path) -> None:
    model = random_model(qwen3_moe())
    torch.nn.init.constant_(model.model.layers[1].mlp.experts.down_proj, 1e6)
    with refused("weights.dtype-too-narrow", IntegrityError, naming="experts.0.down_proj.weight"):
        save_model(model, tmp_path / "out", dtype=torch.float16)
    assert list(tmp_path.iterdir()) == []


class _Tokenizer:
    def save_pretrained(self, save_directory: str) -> None:
        Path(save_directory, "tokenizer.json").write_text("{}")
        Path(save_directory, "chat_template.jinja").write_text("{{ messages }}")


def test_config_generation_config_and_tokenizer_are_saved_beside_the_weights(tmp_path: Path) -> None:
    reference = random_model(qwen3_moe())
    # transformers refuses to save this one (temperature without sampling); losing a trained model to it is
    # worse.
    reference.generation_config = GenerationConfig(temperature=0.6, do_sample=False)
    save_model(reference, tmp_path / "out", tokenizer=_Tokenizer())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["Qwen3MoeForCausalLM"], "qwen3_moe")
    assert config["dtype"] == "float32"
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["temperature"] == 0.6
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    reference.generation_config = GenerationConfig()
    reference.save_pretrained(tmp_path / "theirs")
    assert config == json.loads((tmp_path / "theirs" / "config.json").read_text())


def _computed_rules(model: PreTrainedModel) -> None:
    """A conversion that moves values across experts' rows in a way that is no box of the parameter."""
    from transformers.core_model_loading import Interleave, WeightConverter

    rule = WeightConverter("experts.mixed", "experts.gate_up_proj", operations=[Interleave(dim=1)])
    model._weight_conversions = [rule]  # type: ignore[assignment]


def _save_computed(config: PreTrainedConfig, source: Path, target: Path) -> None:
    model = _loaded(config, source, 2, 2)
    _computed_rules(model)
    save_model(model, target, max_shard_bytes=20_000)


def test_conversions_that_compute_across_shards_are_gathered_and_exact(tmp_path: Path) -> None:
    reference = random_model(qwen3_moe())
    reference.save_pretrained(tmp_path / "theirs")
    shared_ranks(_save_computed, 2, reference.config, tmp_path / "theirs", tmp_path / "ours")
    _computed_rules(reference)
    reference.save_pretrained(tmp_path / "expected")
    ours: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "ours").glob("*.safetensors"):
        ours |= load_file(path)
    expected = load_file(tmp_path / "expected" / "model.safetensors")
    assert any("mixed" in name for name in expected)
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in expected.items())


def test_more_files_are_written_than_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_writer, "MAX_OPEN_FILES", 4)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    reference = random_model(qwen3_moe())
    free = [os.open(os.devnull, os.O_RDONLY) for _ in range(12)]  # others may be in use between them
    for descriptor in free:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(free) + 1, limits[1]))
    try:
        report = save_model(reference, tmp_path / "out", max_shard_bytes=1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(report.files) > 50
    _assert_equal(_reloaded(tmp_path / "out"), reference)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, "int32", "bool", "complex64", "Tensor"])
def test_a_dtype_that_holds_no_weights_by_itself_is_refused(dtype: Any, tmp_path: Path) -> None:
    with refused("config.wrong-value", naming=str(dtype)):
        save_model(random_model(qwen3_moe()), tmp_path / "out", dtype=dtype)
    assert not (tmp_path / "out").exists()


def test_a_target_that_holds_anything_is_refused_and_an_empty_one_used(tmp_path: Path) -> None:
    model = random_model(qwen3_moe())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "keep.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("full", "file"):
        with refused("output.not-empty", naming=name):
            save_model(model, tmp_path / name)
    assert (tmp_path / "full" / "keep.txt").read_text() == "mine"
    save_model(model, tmp_path / "empty")
    save_model(model, tmp_path / "deep" / "er")
    save_model(model, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    for name in ("deep/er", "elsewhere"):
        _assert_equal(_reloaded(tmp_path / name), _reloaded(tmp_path / "empty"))


def _full_disk_on_rank_1() -> None:
    def no_space(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    if dist.get_rank() == 1:
        os.pwrite = no_space


def _no_room_at_all() -> None:
    directory_module.shutil.disk_usage = lambda _: SimpleNamespace(free=17)


def _unseen_on_rank_1() -> None:
    directory_module.VISIBLE_WITHIN_SECONDS = 0.2
    if dist.get_rank() == 1:
        Path.exists = lambda self: False


def _broken_tokenizer() -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no vocabulary")

    _Tokenizer.save_pretrained = fail  # type: ignore[method-assign, assignment]


def _bug_on_rank_1() -> None:
    if dist.get_rank() == 1:
        safetensors_writer.write_box = lambda *_: 1 // 0


def _lost_experts() -> None:
    real = write.owns_copy
    write.owns_copy = lambda tensor: real(tensor) and (tensor.dim() != 3 or dist.get_rank() == 0)


def _save_failing(
    config: PreTrainedConfig, source: Path, target: Path, sabotage: Callable[[], None]
) -> tuple[str, str]:
    model = _loaded(config, source, 2, 2)
    sabotage()
    with pytest.raises((ExpertmeshError, ZeroDivisionError, RuntimeError)) as caught:
        save_model(model, target, tokenizer=_Tokenizer())
    dist.barrier()  # The group still works: nobody was left inside a collective.
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize(
    ("sabotage", "error", "words"),
    [
        (_full_disk_on_rank_1, InputError, "the disk is full: it has .* bytes free, 195,000 are needed"),
        (_no_room_at_all, InputError, "17 bytes free, 195,000 are needed"),
        (_unseen_on_rank_1, InputError, "save to a file system that all ranks share"),
        (_lost_experts, IntegrityError, "own .* of its"),
    ],
)
def test_failures_are_the_same_on_all_ranks_and_leave_nothing_behind(
    sabotage: Callable[[], None], error: type[ExpertmeshError], words: str, tmp_path: Path
) -> None:
    reference = random_model(qwen3_moe())
    reference.save_pretrained(tmp_path / "theirs")
    job = (reference.config, tmp_path / "theirs", tmp_path / "ours", sabotage)
    first, second = run_ranks(_save_failing, 2, *job)
    assert first == second
    assert first[0] == error.__name__
    assert re.search(words, first[1]), first[1]
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


@pytest.mark.parametrize(("sabotage", "rank"), [(_broken_tokenizer, 0), (_bug_on_rank_1, 1)])
def test_any_other_exception_stays_itself_and_ends_the_other_ranks(
    sabotage: Callable[[], None], rank: int, tmp_path: Path
) -> None:
    reference = random_model(qwen3_moe())
    reference.save_pretrained(tmp_path / "theirs")
    job = (reference.config, tmp_path / "theirs", tmp_path / "ours", sabotage)
    results = run_ranks(_save_failing, 2, *job)
    assert results[rank][0] in ("RuntimeError", "ZeroDivisionError")
    assert results[1 - rank][0] == DistributedFailure.__name__
    assert f"rank {rank} failed while writing" in results[1 - rank][1]
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_names_that_are_not_the_class_s_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    lora = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    wrapped: Any = peft.get_peft_model(random_model(qwen3_moe()), lora)
    injected: Any = peft.inject_adapter_in_model(lora, random_model(qwen3_moe()))
    cut: Any = random_model(qwen3_moe())
    del cut.model.layers[-1]
    longer: Any = random_model(qwen3_moe())
    longer.extra = torch.nn.Linear(2, 2)
    for model, naming in (
        (wrapped, "PeftModelForCausalLM"),
        (injected, "q_proj.base_layer.weight"),
        (cut, "lacks model.layers."),
        (longer, "has extra.bias"),
    ):
        with refused("model.names-differ-from-class", naming=naming):
            save_model(model, tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []
