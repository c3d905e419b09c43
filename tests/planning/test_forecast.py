"""What a run is told about a step before it reads weights."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.shapes import deepseek_v3, qwen3_30b_a3b
from expertmesh.anatomy import structure
from expertmesh.config import Config, load_config
from expertmesh.distributed.layout import Layout, explicit
from expertmesh.planning import forecast as planner
from expertmesh.planning.forecast import devices_here, forecast
from expertmesh.planning.hardware import Devices, hardware_table, parse_devices
from expertmesh.planning.read_model import figures_of_plan
from expertmesh.planning.search import Job, plan
from expertmesh.step.forward_backward import Order
from expertmesh.training.reporting.record import Forecast
from expertmesh.training.startup.model_check import Checked, check_model
from tests.families.tiny import random_model
from tests.support.models import tiny_config


def _config(tmp_path: Path, *overrides: str) -> Config:
    file = tmp_path / "run.yaml"
    file.write_text("model: {name_or_path: m}\ndata: {train: [{path: t.jsonl}], max_length: 64}\noutput_dir: o\n")
    return load_config(file, overrides)


def _checked(config: Config, model_config: Any, world: int) -> Checked:
    return check_model(config, model_config, Path(), world)


def test_checkpoint_layers_count_in_what_is_predicted(tmp_path: Path) -> None:
    sized = ("data.max_length=128", "train.activation_checkpointing=full", "parallel.ep=2")
    sized += ("train.accumulate=by_micro_batch",)  # auto would take another order for each of the two
    configs = _config(tmp_path, *sized), _config(tmp_path, *sized, "train.checkpoint_layers=[0]")
    every, one = (forecast(each, _checked(each, tiny_config("qwen3_moe"), 4)).prediction for each in configs)
    assert every is not None
    assert one is not None
    assert one.peak_memory_bytes > every.peak_memory_bytes  # type: ignore[operator]
    assert one.step_seconds < every.step_seconds  # type: ignore[operator]


def test_a_pair_is_two_sequences_and_a_reference_beside_the_step_has_no_time(tmp_path: Path) -> None:
    dpo = ("objective={name: dpo}", "data.packing=false", "parallel.ep=2")
    configs = [
        _config(tmp_path, "data.packing=false", "parallel.ep=2", "train.micro_batch_size=2"),
        _config(tmp_path, *dpo, "train.global_batch_size=32"),
        _config(tmp_path, *dpo, "lora={r: 4}"),
    ]
    two, pair, adapted = (forecast(each, _checked(each, tiny_config("qwen3_moe"), 2)) for each in configs)
    assert pair.prediction == two.prediction
    assert adapted.prediction is not None
    assert adapted.prediction.step_seconds is None
    assert re.fullmatch(r"\S+ [GMK]iB of tensors a rank, with full rows and even routing", adapted.line)


@pytest.mark.slow_cases(r"Qwen3_5.*", why="another family stays")
@pytest.mark.parametrize("kind", ["Qwen3_5MoeForConditionalGeneration", "Llama4ForConditionalGeneration"])
def test_a_vision_tower_before_the_language_model_is_not_measured_in_its_place(kind: str, tmp_path: Path) -> None:
    family = "qwen3_5_moe" if kind.startswith("Qwen") else "llama4"
    model_config = random_model(kind, family).config
    model_config.architectures = [kind]
    checked = _checked(_config(tmp_path, "data.packing=false"), model_config, 2)
    figures = figures_of_plan(checked.plan, length=64, lora=None, packed=False, device="cpu")
    blocks = dict(zip(checked.anatomy.blocks, figures.blocks, strict=True))
    for name, block in blocks.items():
        assert (block.figures.products > 0) is ("vis" not in name), name
    assert 0 < sum("vis" in name for name in blocks) < len(blocks)
    assert figures.tables >= 0


def test_dropout_of_adapters_takes_memory_and_is_no_reason_for_no_plan(tmp_path: Path) -> None:
    configs = [_config(tmp_path, "parallel.ep=2", f"lora={{r: 4, dropout: {rate}}}") for rate in (0.0, 0.1)]
    without, dropped = (forecast(each, _checked(each, tiny_config("qwen3_moe"), 2)).prediction for each in configs)
    assert without is not None
    assert dropped is not None
    assert dropped.peak_memory_bytes > without.peak_memory_bytes  # type: ignore[operator]


def test_the_table_knows_this_machine() -> None:
    if not torch.accelerator.is_available():
        devices: Any = devices_here(2)
        assert (devices.name, devices.count) == ("cpu", 2)


SIZED = ("train.global_batch_size=8", "data.max_length=4096", "parallel.ep=8")


@pytest.mark.slow(why="a run of each kind; what the forecast counts stays")
def test_every_run_is_told_what_a_step_will_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config(tmp_path, *SIZED)
    tiny = _checked(config, tiny_config("qwen3_moe", max_position_embeddings=4096), 8)
    here = forecast(config, tiny)
    assert here.prediction is not None
    assert re.fullmatch(r"\S+ [GMK]iB of tensors a rank, \S+ s a step, with full rows and even routing", here.line)
    hardware = hardware_table()["a100"]
    monkeypatch.setattr(planner, "devices_here", lambda world: Devices("a100", 1, 8, hardware))
    assert "may run out of memory" in forecast(config, _checked(config, deepseek_v3(), 8)).line
    monkeypatch.setattr(planner, "devices_here", lambda world: None)
    unknown = forecast(config, tiny)
    assert unknown.prediction is None
    assert unknown.line == "nothing: the planner does not know this device"


def test_a_model_whose_top_k_is_unknown_is_trained_without_a_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structure, "_top_k", lambda module: None)
    monkeypatch.setattr(structure, "_top_k_of_block", lambda model, spec: None)
    config = _config(tmp_path)
    found = forecast(config, _checked(config, tiny_config("qwen3_moe"), 1))
    assert found.prediction is None
    assert found.line.startswith("nothing: there is no plan for qwen3_moe: ")


def test_memory_of_the_machine_is_shared_by_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator, and the test is about one without")
    monkeypatch.setattr(planner, "host_memory", lambda: 2.0**30)
    config = _config(tmp_path, *SIZED)
    said = forecast(config, _checked(config, qwen3_30b_a3b(), 8)).line
    assert said.endswith("; this machine has 0.1 GiB for each of its 8 ranks, so this may run out of memory")


def test_an_ep_that_would_fit_is_named_where_auto_does_not(tmp_path: Path) -> None:
    config = _config(tmp_path, "train.global_batch_size=64", "data.max_length=4096", "train.micro_batch_size=8")
    checked, roomy = _checked(config, qwen3_30b_a3b(), 8), hardware_table()["h200"]
    assert checked.layout.ep > 1
    needed = []
    for ep in (1, checked.layout.ep):
        other = replace(checked, plan=replace(checked.plan, layout=Layout(fsdp=8, ep=ep)))
        found = forecast(config, other, Devices("h200", 1, 8, roomy)).prediction
        assert found is not None
        needed.append(found.peak_memory_bytes or 0)
    between = roomy.model_copy(update={"memory": sum(needed) / 2, "headroom": 0.0})
    here = Devices("h200", 1, 8, between)
    said = forecast(config, checked, here).line
    assert re.search(r"may run out of memory; parallel.ep=1 would fit \(.* GiB\)$", said), said
    fixed = config.model_copy(update={"parallel": config.parallel.model_copy(update={"ep": checked.layout.ep})})
    assert "would fit" not in forecast(fixed, checked, here).line


def test_inputs_go_to_the_host_or_rounds_get_smaller_until_a_step_fits(tmp_path: Path) -> None:
    options = ("train.global_batch_size=64", "data.max_length=4096", "train.activation_checkpointing=full")
    config, kind = _config(tmp_path, *options, "parallel.ep=8", "lora={r: 8}"), hardware_table()["h200"]
    checked = _checked(config, qwen3_30b_a3b(), 8)
    assert checked.order_line(8).startswith("by layer, 1 round of up to 8: a block is gathered twice a round, not 16")

    figures = figures_of_plan(checked.plan, length=4096, lora=config.lora, packed=config.data.packing, device="cuda")

    def predicted(memory: float, host_memory: float = 1e9, **train: Any) -> Forecast:
        update = {"memory": memory, "headroom": 0.0, "host_memory": host_memory}
        here = Devices("h200", 1, 8, kind.model_copy(update=update))
        with mock.patch.object(planner, "figures_of_plan", return_value=figures):  # the same each time, two seconds
            return forecast(config.model_copy(update={"train": config.train.model_copy(update=train)}), checked, here)

    def needed(**train: Any) -> float:
        found = predicted(1e12, 1e12, **train).prediction
        assert found is not None
        return found.peak_memory_bytes or 0.0

    by_micro_batch = needed(accumulate="by_micro_batch")
    two, four, eight = (needed(accumulate="by_layer", round=size) for size in (2, 4, 8))
    assert by_micro_batch < two < four < eight
    all_on_host = needed(accumulate="by_layer", keep_inputs="host")
    assert all_on_host < four
    on_host, room = Order(by_layer=True, inputs_on_host=True), 64e9
    of_four = replace(on_host, round=4)
    for memory, host, order, said in (
        (eight, room, Order(by_layer=True), "by layer, 1 round of up to 8: a block"),
        (all_on_host, room, on_host, "by layer, 1 round of up to 8, inputs in host memory: a block is gathered twice"),
        ((four + eight) / 2, 1e9, Order(by_layer=True, round=4), "by layer, 2 rounds of up to 4: a block is gathered"),
        (two, 1e10, of_four, "by layer, 2 rounds of up to 4, inputs in host memory: a block is gathered twice a"),
        ((by_micro_batch + two) / 2, 1e9, Order(), "by micro-batch: by layer, two micro-batches of a round are"),
    ):
        found = predicted(memory, host)
        assert found.order is not None
        assert found.order[0] == order
        assert checked.in_order(found.order).order_line(8).startswith(said)
        assert "may run out" not in found.line
    for train, kept in (
        ({"accumulate": "by_layer", "round": 8}, Order(by_layer=True, round=8)),
        ({"accumulate": "by_layer", "keep_inputs": "device"}, Order(by_layer=True, round=1)),
        ({"accumulate": "by_layer", "keep_inputs": "host"}, of_four),
    ):
        found = predicted(by_micro_batch if train.get("keep_inputs") == "device" else two, 1e10, **train)
        assert found.order is not None
        assert found.order[0] == kept


@pytest.mark.slow_cases(r"4 cpu", why="two nodes stay")
@pytest.mark.parametrize("devices", ["2x8 h100", "4 cpu"])
def test_auto_is_one_rule_for_train_and_plan(devices: str, tmp_path: Path) -> None:
    """`train` comes by itself to the ep of each layout that `plan` proposes, with the same micro-batch and mode."""
    here, found = parse_devices(devices, hardware_table()), {}
    model_config = tiny_config("qwen3_moe", moe_intermediate_size=1024, hidden_size=1024, num_hidden_layers=1)
    config = _config(tmp_path, "data.max_length=64", "data.packing=false")
    plain = _checked(config, model_config, 1).plan
    figures = figures_of_plan(plain, length=64, lora=None, packed=False, device=here.hardware.torch_device)
    for candidate in plan(Job(figures, here, 1024)).candidates:
        found.setdefault((candidate.layout.ep, candidate.layout.cp), candidate)
    assert len({ep for ep, _ in found}) > 2
    for candidate in found.values():
        axes = explicit(candidate.layout).model_copy(update={"ep": "auto", "ep_across_nodes": False})
        batch, mode = candidate.workload.batch, candidate.workload.mode
        train = {"micro_batch_size": batch.rows, "activation_checkpointing": mode, "global_batch_size": 1024}
        update = {"parallel": axes, "train": config.train.model_copy(update=train)}
        checked = check_model(config.model_copy(update=update), model_config, Path(), here.count, here.per_node)
        assert checked.layout == candidate.layout
        found_there = forecast(config.model_copy(update=update), checked, here)
        assert checked.in_order(found_there.order).order == batch.order
