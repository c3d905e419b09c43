"""A job on pipeline stages is verified in all layers, alone and beside other axes; its bugs turn the right one red."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from expertmesh.config import Config
from expertmesh.state.shards import local_tensor
from expertmesh.training.control import Control
from expertmesh.verification.job import ProvenJob as ShardedJob
from expertmesh.verification.layers.step import check_backward, check_bytes, check_forward
from expertmesh.verification.options import LAYERS, VerifyOptions
from expertmesh.verification.proof import Hooks, Proof
from expertmesh.verification.result import Check, Report
from expertmesh.verification.run import bugs, verify
from expertmesh.verification.setup import set_up
from tests.families.tiny import model_class_of, tiny_config
from tests.support.ranks import shared_ranks
from tests.training.tiny_run import run_config, write_inputs

BLOCKS = 4


class ProvenJob(NamedTuple):
    ranks: int
    schedule: str
    overrides: tuple[str, ...]
    not_run: set[str]
    self_test: bool = False
    only: tuple[str, ...] = LAYERS
    blocks: int = BLOCKS


ADAPTERS = {"adapter in stock PEFT", "merged adapter in plain transformers"}
SMALL = {"ep 1 = ep 2", "ep 1 = ep 4"}
JOBS = {
    "with ep, router losses, tied weights": ProvenJob(
        4,
        "1F1B over 2",
        ("parallel.ep=2", "moe.aux_loss_coef=0.01", "moe.z_loss_coef=0.1"),
        {"ep 2 = ep 4", *ADAPTERS},
        True,
        blocks=2,
    ),
    "interleaved, adapters, recomputed": ProvenJob(
        2,
        "Interleaved1F1B over 4",
        (
            "parallel.ep=1",
            "parallel.pp_virtual_stages=2",
            "train.activation_checkpointing=full",
            "lora={r: 4, targets: [attention, experts, router]}",
        ),
        {"saved model in plain transformers", *SMALL},
    ),
    "with tp, two rows": ProvenJob(
        4,
        "GPipe over 2",
        ("parallel.tp=2", "parallel.ep=2", "parallel.pp_schedule=gpipe", "train.micro_batch_size=2"),
        set(),
        only=("forward", "backward"),
    ),
    "with cp": ProvenJob(4, "1F1B over 4", ("parallel.cp=2", "parallel.ep=2"), set(), only=("forward", "backward")),
    "with replicas": ProvenJob(
        4, "1F1B over 2", ("parallel.replicate=2", "parallel.ep=1"), set(), only=("bytes", "forward", "backward")
    ),
    "three stages of uneven blocks, packed, bfloat16": ProvenJob(
        3,
        "1F1B over 6",
        (
            "parallel.pp=3",
            "parallel.ep=1",
            "data.packing=true",
            "precision.compute=bfloat16",
            "train.global_batch_size=6",
        ),
        set(),
        only=("forward", "backward"),
    ),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("inputs")
    for blocks in (2, BLOCKS):
        write_inputs(root / str(blocks), num_hidden_layers=blocks, tie_word_embeddings=True)
    return root


@pytest.mark.slow_cases(
    r"with ep, router losses, tied weights",
    r"interleaved, adapters, recomputed",
    r"three stages of uneven blocks, packed, bfloat16",
    r"with tp, two rows",
    r"with replicas",
    why="cp stays",
)
@pytest.mark.parametrize("kind", JOBS)
def test_a_sound_job_passes_and_its_bugs_are_caught(inputs: Path, kind: str, tmp_path: Path) -> None:
    job = JOBS[kind]
    config = run_config(inputs / str(job.blocks), tmp_path / "out", "parallel.pp=2", *job.overrides)
    options = VerifyOptions(tokens=256, only=job.only, self_test=job.self_test, report=str(tmp_path / "report.json"))
    reports: list[Report] = shared_ranks(verify, job.ranks, config, Control(arguments=options.dump()))
    for report in reports:
        assert report.status == "pass", report.failures
    report = reports[0]
    assert report.facts["schedule"].startswith(job.schedule)
    assert [layer.name for layer in report.layers] == list(job.only)
    checks = [check for layer in report.layers for check in layer.checks]
    by_layer = {"by layer = by micro-batch"} if "metamorphic" in job.only else set()
    assert {check.name for check in checks if check.status == "not run"} == job.not_run | by_layer
    compared = {check.name: check.compared for check in checks}
    assert compared["float32: experts chosen"] == job.blocks * report.facts["tokens_of_a_step"]
    assert compared["float32: outputs of blocks"] == job.blocks
    assert [mutation.status for mutation in report.mutations] == ["pass"] * (9 if job.self_test else 0)


GRADIENT, WEIGHT = "model.layers.3.mlp.gate.weight", "model.layers.3.self_attn.v_proj.weight"


def _planted(config: Config, options: VerifyOptions) -> tuple[list[Check], list[Check]]:
    """Gradients of a job with one that is a thousandth too large, outputs of one with such a weight; of stage 1."""
    setup = set_up(config, options, 2)

    def wrong_gradient(job: ShardedJob) -> None:
        if job.mesh.coordinate("pp") == 1:
            gradient = job.parameters()[GRADIENT].grad
            assert gradient is not None
            local_tensor(gradient).mul_(1.001)

    def wrong_weight(job: ShardedJob) -> None:
        if job.mesh.coordinate("pp") == 1:
            local_tensor(job.parameters()[WEIGHT]).mul_(1.001)

    return (
        check_backward(Proof(setup, Path(), hooks=Hooks(backward=wrong_gradient))),
        check_forward(Proof(setup, Path(), hooks=Hooks(loaded=wrong_weight), uses_float64=False)),
    )


def test_a_bug_of_the_last_stage_is_red_on_every_rank_with_its_name(inputs: Path, tmp_path: Path) -> None:
    config = run_config(inputs / str(BLOCKS), tmp_path / "out", "parallel.pp=2", "parallel.ep=1")
    for gradients, outputs in shared_ranks(_planted, 2, config, VerifyOptions(tokens=256)):
        worst = {check.name: check.worst for check in gradients if check.status == "fail"}["float32: gradients"]
        assert worst is not None
        assert worst.tensor == GRADIENT
        assert worst.error == pytest.approx(1e-3, rel=0.01)
        by_name = {check.name: check for check in outputs}
        found = by_name["float32: outputs of blocks"]
        assert found.status == by_name["float32: logits"].status == "fail"
        assert found.worst is not None
        assert (found.worst.tensor, found.compared) == ("model.layers.3", BLOCKS)


def _exchanged(config: Config, options: VerifyOptions) -> list[Check]:
    setup = set_up(config, options, 4)
    proof = Proof(setup, Path(), uses_float64=False)
    bug = bugs(proof)[0]
    assert bug.name == "two experts exchanged"
    return check_bytes(proof.planted(bug.hooks))


@pytest.mark.slow(why="a job with cp stays")
def test_experts_are_exchanged_also_where_each_rank_has_one(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path / "inputs", num_experts=2, num_experts_per_tok=1)
    config = run_config(inputs, tmp_path / "out", "parallel.pp=2", "parallel.ep=2")
    for checks in shared_ranks(_exchanged, 4, config, VerifyOptions(tokens=64)):
        assert checks[0].status == "fail"
        assert "model.layers.1.mlp.experts" in checks[0].note


@pytest.mark.slow(why="a job with cp stays")
def test_a_job_is_verified_whose_tower_is_on_the_first_stage_alone(tmp_path: Path) -> None:
    """Blocks of the tower can be recomputed like all others; the second stage has none of them."""
    inputs, kind = write_inputs(tmp_path / "inputs"), "Qwen3VLMoeForConditionalGeneration"
    config = tiny_config(kind, "qwen3_vl_moe")
    config.text_config.vocab_size = json.loads((inputs / "model" / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    model_class_of(kind, "qwen3_vl_moe")._from_config(config).save_pretrained(inputs / "model")
    recomputed = ("train.activation_checkpointing=full", "train.checkpoint_layers=2")
    run = run_config(inputs, tmp_path / "run", "parallel={pp: 2, ep: 1}", *recomputed)
    options = VerifyOptions(tokens=64, only=("backward", "metamorphic"), report=str(tmp_path / "report.json"))
    for report in shared_ranks(verify, 2, run, Control(arguments=options.dump())):
        assert report.status == "pass", report.failures
