"""run.json: what a run says about itself when it starts, over all the times that it starts."""

import json
from pathlib import Path

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

from expertmesh.config import Config
from expertmesh.config.errors import InputError, IntegrityError
from expertmesh.planning.forecast import train_with_forecast
from expertmesh.step.forward_backward import Order
from expertmesh.training.reporting.record import DataRecord, Forecast, Share, Start, read_record
from expertmesh.training.run import train
from tests.report.made_up import record, start
from tests.support.errors import refused
from tests.support.ranks import run_ranks, shared_ranks
from tests.training.test_trackers import stand_in
from tests.training.tiny_run import ROWS, STEPS, run_config, train_steps, write_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def _config(inputs: Path, output: Path, *overrides: str) -> Config:
    return run_config(inputs, output, "checkpoint.every_steps=1", *overrides)


@pytest.mark.slow_cases(r"1", why="two ranks stay")
@pytest.mark.parametrize("replicate", [1, 2])
def test_a_run_leaves_its_layout_and_what_every_rank_holds(inputs: Path, tmp_path: Path, replicate: int) -> None:
    overrides = ["parallel.ep=2", f"parallel.replicate={replicate}", "train.max_steps=1"]
    shared_ranks(train_with_forecast, 2 * replicate, _config(inputs, tmp_path / "run", *overrides))
    found = read_record(tmp_path / "run")
    assert found is not None
    model = load_file(inputs / "model" / "model.safetensors")
    # Each element once, whatever the number of copies.
    assert found.parameters == sum(tensor.numel() for tensor in model.values())
    assert found.train_data.samples == len(ROWS)
    assert [layer.name for layer in found.moe_layers] == [f"model.layers.{n}.mlp.experts" for n in (0, 1)]
    (only,) = found.starts
    assert (only.after_step, only.total_steps, only.world_size) == (0, 1, 2 * replicate)
    assert (only.layout["ep"], only.layout["efsdp"], only.layout["replicate"]) == (2, 1, replicate)
    assert sum(share.ranks for share in only.shares) == 2 * replicate
    held = sum(share.ranks * (share.dense + share.expert + share.adapter) for share in only.shares)
    assert held == replicate * found.parameters
    experts = sum(tensor.numel() for name, tensor in model.items() if "experts" in name)
    assert {share.expert for share in only.shares} == {experts // 2}
    assert only.printed[0].startswith("model      ")
    assert only.printed[-2].startswith("steps      1 optimizer steps")
    assert only.printed[-1].startswith("predicted  ")
    data = DataRecord.model_validate_json((tmp_path / "run" / "data.json").read_bytes())
    assert sum(each.samples for each in data.lengths) == len(ROWS)
    first = data.samples[0]
    assert first.source.endswith("train.jsonl:1")
    assert not first.pieces[0].is_target
    assert "It is 0." in "".join(each.text for each in first.pieces if each.is_target)
    assert "What is 0 plus 0?" in "".join(each.text for each in first.pieces if not each.is_target)
    predicted = only.plan
    assert predicted is not None
    assert min(predicted.step_seconds or 0, predicted.tokens_per_second or 0, predicted.peak_memory_bytes or 0) > 0


@pytest.mark.slow_cases(r"order0-.*", why="a round of two stays")
@pytest.mark.parametrize(
    ("order", "accumulate", "line"),
    [
        (Order(), "by_micro_batch", "by micro-batch: as predicted"),
        (Order(True, 2, True), "by_layer", "by layer, 2 rounds of up to 2, inputs in host memory: as predicted"),
    ],
)
def test_every_rank_takes_the_order_that_rank_0_predicts(
    inputs: Path, tmp_path: Path, order: Order, accumulate: str, line: str
) -> None:
    overrides = ["train.activation_checkpointing=full", "train.global_batch_size=8", "train.max_steps=1"]
    shared_ranks(_train_in_rounds, 2, _config(inputs, tmp_path / "run", "parallel.ep=2", *overrides), order)
    found = read_record(tmp_path / "run")
    assert found is not None
    assert found.starts[0].accumulate == accumulate
    assert any(line in each for each in found.starts[0].printed)


def _train_in_rounds(config: Config, order: Order) -> None:
    predicted = (order if dist.get_rank() == 0 else Order(by_layer=True, round=7)), "as predicted"
    train(config, predict=lambda *_: Forecast("", order=predicted))


def test_a_resumed_run_adds_a_start_and_one_that_begins_anew_has_no_other(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, "wandb")
    tracked = "log.report_to=[wandb]"
    run_ranks(train_steps, 2, _config(inputs, tmp_path / "run", "parallel.ep=2", tracked), 1)
    known_as = (tmp_path / "run" / "trackers.json").read_text()
    run_ranks(train_steps, 1, _config(inputs, tmp_path / "run"), 1)
    run_ranks(train, 1, _config(inputs, tmp_path / "run", tracked))
    assert (tmp_path / "run" / "trackers.json").read_text() == known_as
    found = read_record(tmp_path / "run")
    assert found is not None
    assert [(each.after_step, each.world_size) for each in found.starts] == [(0, 2), (1, 1), (2, 1)]
    assert found.starts[-1].total_steps == STEPS


def test_starts_of_which_no_row_is_left_are_left_out() -> None:
    def starts(*after: int) -> list[Start]:
        return [start(step) for step in after]

    earlier = record(starts(0, 10, 20))
    for after, kept in ((0, []), (10, [0]), (15, [0, 10]), (20, [0, 10]), (30, [0, 10, 20])):
        joined = record(starts(after)).after(earlier)
        assert [each.after_step for each in joined.starts] == [*kept, after]
    assert len(record(starts(7)).after(None).starts) == 1


def test_a_record_that_is_damaged_does_not_keep_a_run_from_training(inputs: Path, tmp_path: Path) -> None:
    config = _config(inputs, tmp_path / "run")
    shared_ranks(train_steps, 1, config, 1)
    (tmp_path / "run" / "run.json").write_text("{")
    with refused("run.damaged-record", IntegrityError, naming="run.json"):
        read_record(tmp_path / "run")
    shared_ranks(train, 1, config)
    found = read_record(tmp_path / "run")
    assert found is not None
    assert [each.after_step for each in found.starts] == [1]


def _refused(config: Config) -> str:
    with pytest.raises(InputError) as caught:
        train(config)
    return str(caught.value)


@pytest.mark.slow(why="errors on all ranks are tested where they are raised")
def test_a_record_that_cannot_be_written_ends_all_ranks_alike(inputs: Path, tmp_path: Path) -> None:
    config = _config(inputs, tmp_path / "run", "parallel.ep=2")
    shared_ranks(train_steps, 2, config, 1)
    (tmp_path / "run" / "run.json").unlink()
    (tmp_path / "run" / "run.json").mkdir()
    first, second = shared_ranks(_refused, 2, config)
    assert first == second
    assert "run.json" in first


def test_reading_refuses_what_a_newer_version_wrote_and_names_what_is_wrong(tmp_path: Path) -> None:
    assert read_record(tmp_path) is None
    whole = record([start()]).model_dump(mode="json")
    for changed, kind, key in (
        ({"schema_version": 2}, InputError, "install.too-old"),
        ({"parameters": "many"}, IntegrityError, "run.damaged-record"),
        ({"unknown": 1}, IntegrityError, "run.damaged-record"),
        ({"starts": []}, IntegrityError, "run.damaged-record"),
    ):
        (tmp_path / "run.json").write_text(json.dumps(whole | changed))
        with refused(key, kind, naming=next(iter(changed)).replace("_", " ")):
            read_record(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps(whole))
    found = read_record(tmp_path)
    assert found is not None
    assert found.starts[0].shares == [Share(ranks=4, dense=10, expert=20, adapter=0, bytes_to_load=60)]
