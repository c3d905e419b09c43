"""What is verified: the run's own samples within the tokens allowed, the layers asked for, nothing random."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from expertmesh.config import ObjectiveConfig
from expertmesh.data import IGNORE, BatchLayout
from expertmesh.distributed.layout import Layout, explicit
from expertmesh.parallel import compiling
from expertmesh.training.startup.preflight import preflight
from expertmesh.verification.forward_record import record_forward
from expertmesh.verification.job import build
from expertmesh.verification.options import VerifyOptions
from expertmesh.verification.setup import Setup, StepData, random_dataset, set_up
from tests.support.errors import refused
from tests.support.ranks import shared_ranks
from tests.training.tiny_run import run_config, write_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("inputs")
    for family in ("qwen3_moe", "deepseek_v3"):
        write_inputs(root / family, family)
    return root


def _setup(inputs: Path, *overrides: str, family: str = "qwen3_moe", world: int = 2, **options: int) -> Setup:
    config = run_config(inputs / family, inputs / "out", *overrides)
    return set_up(config, VerifyOptions(**options), world)  # type: ignore[arg-type]


@pytest.mark.parametrize("packing", ["true", "false"])
@pytest.mark.parametrize("layout", [Layout(fsdp=2), Layout(fsdp=2, replicate=2), Layout(fsdp=1, tp=2)])
def test_each_sample_is_where_the_loader_puts_it(inputs: Path, packing: str, layout: Layout) -> None:
    data = _setup(inputs, f"data.packing={packing}", tokens=512).steps[0]
    seen = 0
    for rank in range(layout.world_size):
        batches = data.batches(layout, rank).micro_batches
        for sample in data.placed(layout, rank):
            row = batches[sample.micro]["input_ids"][sample.row]
            labels = batches[sample.micro]["labels"][sample.row]
            assert torch.equal(row[sample.start :][: len(sample)], sample.input_ids)
            assert torch.equal(labels[sample.start :][: len(sample)], sample.labels)
            seen += len(sample)
    assert seen == data.dataset.tokens * layout.world_size // layout.data_ranks


def test_a_step_has_about_the_tokens_asked_for_and_the_runs_first_samples(inputs: Path) -> None:
    setup = _setup(inputs, "data.packing=true", tokens=128)
    for data in setup.steps:
        assert data.dataset.tokens <= 128
        assert data.targets == sum(data.dataset.target_counts) > 0
    whole = _setup(inputs, tokens=1 << 20).steps[0]
    assert whole.dataset.tokens > 64
    assert whole.targets == whole.batches(Layout(fsdp=2), 0).target_tokens


def test_uneven_targets_differ_fourfold(inputs: Path) -> None:
    data = _setup(inputs, tokens=512).steps[0].repeated(8).uneven()
    assert len(data.rows) == 8
    counts = data.dataset.target_counts
    assert counts.min() >= 1
    assert counts.max() >= 2 * counts.min()
    assert data.targets == counts.sum() == sum(int((data.dataset.sample(i).labels != IGNORE).sum()) for i in range(8))


def test_long_samples_keep_the_part_that_ends_with_their_last_target(inputs: Path) -> None:
    from expertmesh.data import Sample
    from expertmesh.verification.setup import _cut

    ids = np.arange(20)
    labels = np.where((ids >= 9) & (ids < 12), ids, IGNORE)
    kept, targets = _cut(Sample(ids, labels), 5)
    assert kept.tolist() == [7, 8, 9, 10, 11]
    assert targets.tolist() == [False, False, True, True, True]
    assert _cut(Sample(ids, labels), 30)[0].tolist() == ids.tolist()


def test_random_ids_are_within_the_vocabulary() -> None:
    dataset = random_dataset(7, 16, 5, seed=1)
    assert max(dataset.sample(i).input_ids.max() for i in range(len(dataset))) < 7
    assert dataset.lengths.max() <= 16
    assert StepData(dataset, BatchLayout(1, 0, 1, False, 0, 16), ObjectiveConfig()).targets > 0


def test_the_first_layers_alone(inputs: Path) -> None:
    setup = _setup(inputs, layers=1)
    assert setup.anatomy.blocks == ("model.layers.0",)
    assert setup.layers == (1, 2)
    assert setup.dropped == r"(^|\.)layers\.(1)\."
    assert _setup(inputs, layers=2).dropped is None


def test_stages_get_two_micro_batches_each_as_far_as_the_run_has_them(inputs: Path) -> None:
    for rows, packing, micro_batches in ((2, "false", 2), (8, "false", 4), (8, "true", 4)):
        changes = (f"train.global_batch_size={rows}", f"data.packing={packing}")
        setup = _setup(inputs, "parallel.pp=2", "parallel.ep=1", *changes)
        assert [len(data.batches(setup.layout, 1).micro_batches) for data in setup.steps] == [micro_batches] * 3


def test_stages_that_cannot_run_are_refused(inputs: Path, tmp_path: Path) -> None:
    with refused("layout.pp-exceeds-blocks"):
        _setup(inputs, "parallel.pp=2", "parallel.ep=1", layers=1)
    deeper = write_inputs(tmp_path / "deeper", num_hidden_layers=4)
    config = run_config(
        deeper,
        tmp_path / "run",
        "parallel.pp=2",
        "parallel.ep=1",
        "parallel.pp_virtual_stages=2",
        "train.global_batch_size=5",
    )
    with refused("layout.pp-interleaving-rounds"):
        set_up(config, VerifyOptions(), 2)


def test_layers_without_experts_are_refused(inputs: Path) -> None:
    with refused("model.no-experts", naming="--layers 1: "):
        _setup(inputs, "parallel.ep=1", family="deepseek_v3", layers=1)


def test_dropout_is_off_and_said(inputs: Path) -> None:
    setup = _setup(inputs, "lora={r: 2, dropout: 0.5}")
    assert setup.config.lora is not None
    assert setup.config.lora.dropout == 0.0
    assert setup.notes == ("lora.dropout 0.5 is off",)


def _compiled(setup: Setup) -> tuple[set[str], set[str]]:
    """What the job compiles, and what of it runs in the forward whose choices of experts the reference follows."""
    found: set[str] = set()
    ran: set[str] = set()

    def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        found.add(function.__qualname__)

        def run(*args: Any, **kwargs: Any) -> Any:
            ran.add(function.__qualname__)
            return function(*args, **kwargs)

        return run

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compiling, "_probe", lambda device: None)
        patched.setattr(torch, "compile", compiled)
        record_forward(build(setup), setup.steps[0])
    return found, ran


def test_the_job_is_compiled_where_the_run_is(inputs: Path) -> None:
    assert shared_ranks(_compiled, 1, _setup(inputs, "parallel.ep=1", world=1)) == [(set(), set())]
    ((found, ran),) = shared_ranks(_compiled, 1, _setup(inputs, "parallel.ep=1", "train.compile=true", world=1))
    assert "Qwen3MoeAttention.forward" in found
    assert ran == found


@pytest.mark.parametrize("layers", [None, 1])
def test_the_layout_is_the_one_that_training_chooses(
    inputs: Path, monkeypatch: pytest.MonkeyPatch, layers: int | None
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    config = run_config(inputs / "qwen3_moe", inputs / "out", "parallel.ep=auto")
    setup = set_up(config, VerifyOptions(layers=layers), 4)
    assert setup.layout == Layout(fsdp=4, ep=1) == preflight(config, 4).layout
    assert setup.config.parallel == explicit(setup.layout)  # the job that is built
    assert setup.layers == (layers or 2, 2)
