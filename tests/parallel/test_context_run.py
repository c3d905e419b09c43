"""cp in a whole run: the same losses and weights, checkpoints across it, what it prints, and the bytes it costs."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import expertmesh as em
from benchmarks.probes import count_collectives
from expertmesh.export.checkpoint import export
from expertmesh.training.run import train
from tests.checkpoint.tiny import Job, load, save
from tests.support.models import tiny_model
from tests.support.ranks import run_ranks, shared_ranks
from tests.training.tiny_run import loads_of_experts, metrics, run_config, train_steps, weights, write_inputs

SPLIT, DATA = em.ParallelConfig(cp=2, ep=4), em.ParallelConfig(ep=1)
OPTIONS = ["train.max_steps=4", "train.num_epochs=2"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.slow(why="test_context.py has every gradient, packed and not")
@pytest.mark.parametrize("packing", ["false", "true"])
def test_a_run_has_the_losses_and_weights_of_one_without_cp(
    inputs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], packing: str
) -> None:
    options = [f"data.packing={packing}", f"data.eval=[{{path: {inputs / 'train.jsonl'}}}]", "moe.aux_loss_coef=0.1"]
    run_ranks(train, 1, run_config(inputs, tmp_path / "alone", *options))
    run_ranks(train, 4, run_config(inputs, tmp_path / "split", *options, "parallel.cp=2", "parallel.ep=4"))
    for one, other in zip(metrics(tmp_path / "alone"), metrics(tmp_path / "split"), strict=True):
        for key in ("loss", "eval_loss", "grad_norm", "aux_loss", "target_tokens"):
            if key in one:
                assert other[key] == pytest.approx(one[key], rel=1e-5), key
        assert loads_of_experts(other) == loads_of_experts(one)
    alone, split = weights(tmp_path / "alone"), weights(tmp_path / "split")
    assert all((split[name] - alone[name]).norm() <= 1e-5 * alone[name].norm() for name in alone)
    said = capfd.readouterr().out
    line = "cp         2 ranks share rows: each has 1/2 of the positions, and for attention (sdpa) whole rows of 1/2"
    assert said.count(f"{line} of the heads\n") == 1


@pytest.mark.slow(why="checkpoint/ tests it without the trainer")
def test_a_run_goes_on_with_another_cp(inputs: Path, tmp_path: Path) -> None:
    shared_ranks(train, 2, run_config(inputs, tmp_path / "whole", *OPTIONS))
    shared_ranks(train_steps, 2, run_config(inputs, tmp_path / "broken", *OPTIONS, "parallel.cp=2"), 2)
    shared_ranks(train, 2, run_config(inputs, tmp_path / "broken", *OPTIONS, "parallel.ep=2"))
    whole, broken = weights(tmp_path / "whole"), weights(tmp_path / "broken")
    assert all((broken[name] - whole[name]).norm() <= 1e-5 * whole[name].norm() for name in whole)


@pytest.mark.slow(why="checkpoint/test_layouts.py and the tp one stay")
def test_checkpoints_cross_cp_both_ways(tmp_path: Path) -> None:
    after = {}
    for name, writer, reader in (("split", SPLIT, DATA), ("data", DATA, SPLIT)):
        directory = tmp_path / name
        state = shared_ranks(save, 4, "deepseek_v3", writer, 2, directory)[0]
        loaded, later = shared_ranks(load, 4, "deepseek_v3", reader, directory / "step-00000002", [2])[0]
        assert all(torch.equal(state[key], loaded[key]) for key in state)
        after[name] = later
    for key, tensor in after["data"].items():
        assert (after["split"][key] - tensor).norm() <= 1e-5 * tensor.norm(), key


def _write(root: Path) -> None:
    job = Job(tiny_model("qwen3_moe"), em.ParallelConfig(cp=2, ep=2))
    job.train(range(2))
    em.save_checkpoint(job.model, job.optimizer, root / "checkpoints", step=2)
    em.save_model(job.model, root / "live")


def test_an_export_is_what_saving_the_model_writes_and_names_nothing_of_ours(tmp_path: Path) -> None:
    shared_ranks(_write, 2, tmp_path)
    export(tmp_path / "checkpoints" / "step-00000002", tmp_path / "exported")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "live" / name).read_bytes() == (tmp_path / "exported" / name).read_bytes()
    assert "expertmesh" not in (tmp_path / "live" / "config.json").read_text()


def _exchanged(family: str, cp: int, checkpointing: bool, changes: dict[str, Any]) -> tuple[int, int]:
    """Calls and bytes of all-to-all in one forward and backward of two rows of 16 positions; cp is alone."""
    model = copy.deepcopy(tiny_model(family, **changes))
    em.parallelize(model, em.init_mesh(em.ParallelConfig(cp=cp, ep=1)), activation_checkpointing=checkpointing)
    ids = torch.arange(32).view(2, 16)
    batch = {"input_ids": ids, "labels": ids}
    counted = count_collectives(lambda: em.causal_lm_loss(model, batch, target_tokens=30).backward())["all_to_all"]
    return counted.calls, counted.bytes


@pytest.mark.slow_cases(r"qwen3_moe-2-.*", why="four ranks stay, and latent attention")
@pytest.mark.parametrize(
    ("family", "cp", "checkpointing", "sizes"),
    [
        # sizes: N query heads, G key and value heads as sent, size of a head in q and k, in v
        ("qwen3_moe", 2, False, (4, 2, 8, 8)),
        ("qwen3_moe", 4, False, (4, 4, 8, 8)),  # each of the two key heads goes to two ranks
        ("deepseek_v3", 2, True, (4, 4, 16, 8)),
    ],
)
def test_the_bytes_of_a_step_are_those_of_the_formula(
    family: str, cp: int, checkpointing: bool, sizes: tuple[int, int, int, int]
) -> None:
    heads, key_heads, of_key, of_value = sizes
    layers, tokens, fp32 = 2, 2 * 16, 4
    per_token = heads * of_key + key_heads * (of_key + of_value) + heads * of_value
    passes = 3 if checkpointing else 2
    expected = passes * layers * (tokens // cp) * per_token * fp32
    assert shared_ranks(_exchanged, cp, family, cp, checkpointing, {}) == [(passes * layers * 2, expected)] * cp
