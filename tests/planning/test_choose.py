"""What `parallel.ep: auto` becomes: the same for the launcher and every rank, with a reason, never against the user."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.shapes import deepseek_v3, qwen3_30b_a3b
from expertmesh.config import Config, load_config
from expertmesh.distributed.layout import Layout
from expertmesh.planning import choose
from expertmesh.planning.choose import choose_layout, devices_here, forecast
from expertmesh.planning.hardware import Devices, hardware_table
from tests.support.models import tiny_config


def _config(tmp_path: Path, *overrides: str) -> Config:
    file = tmp_path / "run.yaml"
    file.write_text("model: {name_or_path: m}\ndata: {train: [{path: t.jsonl}], max_length: 64}\noutput_dir: o\n")
    return load_config(file, overrides)


def test_launcher_and_ranks_choose_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, model = _config(tmp_path), tiny_config("qwen3_moe")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    by_launcher = choose_layout(config, model, 4, 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert choose_layout(config, model, 4, 8) == by_launcher
    assert by_launcher.reason is not None
    assert f"ep {by_launcher.layout.ep} of 1, 2, 4" in by_launcher.reason


def test_explicit_values_are_not_argued_with(tmp_path: Path) -> None:
    chosen = choose_layout(_config(tmp_path, "parallel.ep=2"), tiny_config("qwen3_moe"), 4, 8)
    assert chosen.layout == Layout(fsdp=4, ep=2)
    assert chosen.reason is None
    two = choose_layout(_config(tmp_path, "parallel.replicate=2"), tiny_config("qwen3_moe"), 4, 8)
    assert (two.layout.replicate, two.layout.fsdp) == (2, 2)


def test_stages_and_their_schedule_stay_as_the_user_set_them(tmp_path: Path) -> None:
    config = _config(tmp_path, "parallel.pp=2", "parallel.pp_virtual_stages=2", "train.global_batch_size=8")
    chosen = choose_layout(config, tiny_config("qwen3_moe", num_hidden_layers=4), 4, 8)
    assert chosen.reason is not None
    assert (chosen.layout.pp_schedule, chosen.layout.pp_virtual_stages) == ("interleaved_1f1b", 2)
    config = _config(tmp_path, "parallel.pp=2", "parallel.pp_schedule=gpipe", "train.global_batch_size=8")
    assert choose_layout(config, tiny_config("qwen3_moe"), 4, 8).layout.pp_schedule == "gpipe"


def test_checkpoint_layers_count_in_what_is_predicted(tmp_path: Path) -> None:
    sized = ("data.max_length=512", "train.activation_checkpointing=full")
    layout, model = Layout(fsdp=4, ep=2), tiny_config("qwen3_moe")
    every = forecast(_config(tmp_path, *sized), model, layout).candidate
    one = forecast(_config(tmp_path, *sized, "train.checkpoint_layers=[0]"), model, layout).candidate
    assert every is not None
    assert one is not None
    assert one.memory.total > every.memory.total
    assert one.speed.seconds < every.speed.seconds


def test_on_gpus_the_fastest_that_fits_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hardware = hardware_table()["h200"]
    monkeypatch.setattr(choose, "devices_here", lambda world: Devices("h200", world // 8, 8, hardware))
    config = _config(tmp_path, "train.global_batch_size=64", "data.max_length=4096")
    chosen = choose_layout(config, qwen3_30b_a3b(), 8, 128)
    assert chosen.reason is not None
    assert "the fastest that fits" in chosen.reason


def test_a_device_that_nobody_knows_takes_the_largest_ep_of_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "devices_here", lambda world: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    chosen = choose_layout(_config(tmp_path), tiny_config("qwen3_moe"), 4, 8)
    assert chosen.layout.ep == 2
    assert chosen.reason is not None
    assert "does not know this device" in chosen.reason


def test_the_table_knows_this_machine() -> None:
    if not torch.accelerator.is_available():
        devices: Any = devices_here(2)
        assert (devices.name, devices.count) == ("cpu", 2)


def test_every_run_is_told_what_a_step_will_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config(tmp_path, "train.global_batch_size=8", "data.max_length=4096", "parallel.ep=8")
    here = forecast(config, tiny_config("qwen3_moe"), Layout(fsdp=8, ep=8))
    assert here.candidate is not None
    assert here.note == ""
    hardware = hardware_table()["a100"]
    monkeypatch.setattr(choose, "devices_here", lambda world: Devices("a100", 1, 8, hardware))
    assert "may run out of memory" in forecast(config, deepseek_v3(), Layout(fsdp=8, ep=8)).note
    monkeypatch.setattr(choose, "devices_here", lambda world: None)
    unknown = forecast(config, tiny_config("qwen3_moe"), Layout(fsdp=8, ep=8))
    assert unknown.candidate is None
    assert "does not know this device" in unknown.note
