"""The proof passes on sound jobs of several kinds and axes (stages: test_stages.py), and leaves nothing behind."""

import json
import re
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from expertmesh.training.control import Control
from expertmesh.verification import compare, proof
from expertmesh.verification.job import Losses
from expertmesh.verification.job import ProvenJob as VerifiedJob
from expertmesh.verification.options import LAYERS, VerifyOptions
from expertmesh.verification.result import Report
from expertmesh.verification.run import verify
from tests.support.ranks import RankFailed, run_ranks, shared_ranks
from tests.training.dpo_by_trl import preference_config
from tests.training.kto_by_trl import kto_config
from tests.training.tiny_run import run_config, write_inputs
from tests.weights.published import FORMATS, is_linear, quantise

BLOCKS = 2
ADAPTERS = {"adapter in stock PEFT", "merged adapter in plain transformers"}


class ProvenJob(NamedTuple):
    family: str
    ranks: int
    overrides: tuple[str, ...]
    not_run: set[str]
    self_test: bool = False
    only: tuple[str, ...] = LAYERS


# Of responses, with adapters, on stages.
ON_STAGES = {
    *("ep 1 = ep 2", "ep 1 = ep 4", "by layer = by micro-batch", "packed = separate samples"),
    "saved model in plain transformers",
}
JOBS = {
    "packed": ProvenJob(
        "qwen3_moe",
        2,
        ("parallel.ep=2", "data.packing=true", "moe.aux_loss_coef=0.01", "moe.z_loss_coef=0.1"),
        {"ep 2 = ep 4", *ADAPTERS},
    ),
    "bfloat16, biases": ProvenJob(
        "deepseek_v3", 4, ("precision.compute=bfloat16", "parallel.ep=2", "moe.bias_update_rate=0.001"), ADAPTERS
    ),
    "hybrid, recomputed": ProvenJob(
        "mixtral",
        4,
        ("parallel.replicate=2", "parallel.ep=2", "train.activation_checkpointing=full", "train.checkpoint_layers=2"),
        {"ep 2 = ep 4", *ADAPTERS},
    ),
    "float64": ProvenJob(
        "qwen3_moe",
        1,
        ("precision.params=float64", "precision.compute=float64", "precision.reduce=float64"),
        {"ep 1 = ep 2", "ep 1 = ep 4", *ADAPTERS},
    ),
    "adapters": ProvenJob(
        "qwen3_moe",
        2,
        ("parallel.ep=2", "lora={r: 4, dropout: 0.1, targets: [attention, experts, router]}"),
        {"ep 2 = ep 4", "saved model in plain transformers"},
    ),
    "adapters with biases": ProvenJob(
        "qwen3_moe",
        2,
        ("parallel.tp=2", "parallel.ep=1", "lora={r: 4, lora_bias: true, targets: [attention]}"),
        {"ep 1 = ep 4", "saved model in plain transformers"},
    ),
    "adapters on placed and copied experts": ProvenJob(
        "qwen3_moe",
        2,
        (
            "parallel.ep=2",
            "lora={r: 4, dropout: 0.1, targets: [attention, experts]}",
            "moe={placement: balanced, replicas: 2}",
        ),
        {"ep 2 = ep 4", "saved model in plain transformers"},
        self_test=True,
    ),
    "adapters on experts in 4 bits": ProvenJob(
        "qwen3_moe",
        2,
        (
            "parallel.ep=2",
            "lora={r: 4, targets: [attention, experts]}",
            "precision.frozen=nvfp4",
            "precision.compute=bfloat16",
        ),
        {"ep 2 = ep 4", "saved model in plain transformers"},
        self_test=True,
    ),
    "tp": ProvenJob("qwen3_moe", 2, ("parallel.tp=2", "parallel.ep=2"), {"ep 2 = ep 4", *ADAPTERS}, self_test=True),
    "cp": ProvenJob("qwen3_moe", 2, ("parallel.cp=2", "parallel.ep=2"), {"ep 2 = ep 4", *ADAPTERS}, self_test=True),
    "dpo": ProvenJob(
        "qwen3_moe",
        4,
        ("parallel.ep=2", "parallel.tp=2", "objective.beta=2.0"),
        {"packed = separate samples", *ADAPTERS},
        self_test=True,
    ),
    "dpo, adapters": ProvenJob(
        "qwen3_moe",
        2,
        ("parallel.pp=2", "lora={r: 4, targets: [attention, experts]}"),
        ON_STAGES,
    ),
    "kto": ProvenJob(
        "qwen3_moe",
        4,
        ("parallel.ep=2", "parallel.tp=2", "precision.compute=bfloat16"),
        {"packed = separate samples", *ADAPTERS},
        self_test=True,
    ),
    "kto, adapters": ProvenJob(
        "qwen3_moe",
        2,
        ("parallel.pp=2", "lora={r: 4, targets: [attention, experts]}"),
        ON_STAGES,
    ),
    "simpo": ProvenJob(
        "qwen3_moe",
        2,
        ("parallel.cp=2", "parallel.ep=2", "objective={name: simpo, beta: 2.0}"),
        {"ep 2 = ep 4", "packed = separate samples", *ADAPTERS},
        self_test=True,
    ),
    "distill": ProvenJob(
        "qwen3_moe",
        2,
        (
            "parallel.cp=2",
            "parallel.ep=2",
            "precision.frozen=float8",
            "objective={name: distill, teacher: TEACHER, temperature: 2.0}",
        ),
        {"ep 2 = ep 4", *ADAPTERS},
        self_test=True,
    ),
    "distill, adapters": ProvenJob(
        "qwen3_moe",
        4,
        (
            "parallel.tp=2",
            "parallel.ep=2",
            "precision={params: float32, compute: bfloat16, frozen: nf4}",
            "objective={name: distill, teacher: TEACHER, kl: reverse, sft_weight: 0.5}",
            "lora={r: 4, dropout: 0.1, targets: [attention, experts]}",
        ),
        {"saved model in plain transformers"},
    ),
    "orpo, adapters": ProvenJob(
        "qwen3_moe",
        4,
        (
            "parallel.tp=2",
            "parallel.ep=2",
            "precision.compute=bfloat16",
            "objective={name: orpo}",
            "lora={r: 4, dropout: 0.1, targets: [attention, experts]}",
        ),
        {"packed = separate samples", "saved model in plain transformers"},
    ),
    "bytes of tp": ProvenJob("qwen3_moe", 2, ("parallel.tp=2", "parallel.ep=1"), set(), only=("bytes",)),
    "bytes of cp": ProvenJob("qwen3_moe", 2, ("parallel.cp=2", "parallel.ep=1"), set(), only=("bytes",)),
    "bytes of pp": ProvenJob("qwen3_moe", 2, ("parallel.pp=2", "parallel.ep=1"), set(), only=("bytes",)),
}


IN_MAKE_TEST = ("bytes of pp",)
SLOW = pytest.mark.slow(why="pp stays, and every planted bug of test_mutations.py")


@pytest.mark.parametrize(
    "kind",
    [
        *IN_MAKE_TEST,
        *(pytest.param(kind, marks=SLOW) for kind in JOBS if kind not in IN_MAKE_TEST),
    ],
)
def test_a_sound_job_passes_every_layer(kind: str, tmp_path: Path) -> None:
    job = JOBS[kind]
    inputs = write_inputs(tmp_path / "inputs", job.family, attention_bias=kind == "adapters with biases")
    (tmp_path / "runs").mkdir()
    configured = preference_config if re.match(r"dpo|simpo|orpo", kind) else run_config
    configured = kto_config if kind.startswith("kto") else configured
    teacher = write_inputs(tmp_path / "teacher", job.family, num_experts=16) if kind.startswith("distill") else inputs
    overrides = [each.replace("TEACHER", str(teacher / "model")) for each in job.overrides]
    config = configured(inputs, tmp_path / "runs" / "run", *overrides)
    before = set(tmp_path.rglob("*"))
    options = VerifyOptions(tokens=256, only=job.only, self_test=job.self_test, report=str(tmp_path / "report.json"))
    reports: list[Report] = shared_ranks(verify, job.ranks, config, Control(arguments=options.dump()))
    for report in reports:
        assert report.status == "pass", report.failures
        assert [layer.name for layer in report.layers] == list(job.only)
    checks = [check for layer in reports[0].layers for check in layer.checks]
    assert {check.name for check in checks if check.status == "not run"} == job.not_run
    assert set(tmp_path.rglob("*")) - before == {tmp_path / "report.json"}
    if kind in ("tp", "cp"):
        chosen = next(check for check in checks if "experts chosen" in check.name)
        # By one of the ranks that share rows.
        assert chosen.compared == BLOCKS * reports[0].facts["tokens_of_a_step"]
    if kind == "adapters on experts in 4 bits":
        found = {mutation.bug: mutation.status for mutation in reports[0].mutations}
        assert found["codes of a frozen matrix with their halves exchanged"] == "pass"
    if kind == "adapters":
        assert "lora.dropout 0.1 is off" in reports[0].facts["notes"]


@pytest.mark.slow_cases(r"1\.0-pass", why="that it fails stays")
@pytest.mark.parametrize(("factor", "status"), [(1.0, "pass"), (1.001, "fail")])
def test_fp64_decides_on_a_loss_of_differences_that_fp32_cannot_tell(
    factor: float, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A margin of a pair is the small difference of sums: here no fp32 loss is near enough by itself."""
    backward = VerifiedJob.backward

    def wrong(job: VerifiedJob, step: Any) -> Losses:
        losses = backward(job, step)
        return replace(losses, loss=losses.loss * factor)

    monkeypatch.setattr(VerifiedJob, "backward", wrong)
    monkeypatch.setitem(compare.TOLERANCE, torch.float32, 1e-12)
    config = preference_config(write_inputs(tmp_path / "inputs"), tmp_path / "run", "objective.beta=2.0")
    options = VerifyOptions(tokens=64, only=("forward",), report=str(tmp_path / "report.json"))
    with suppress(RankFailed):
        run_ranks(verify, 2, config, Control(arguments=options.dump()))
    (layer,) = json.loads((tmp_path / "report.json").read_text())["layers"]
    (check,) = [check for check in layer["checks"] if check["name"] == "float32: losses"]
    assert check["status"] == status, check


def test_a_model_too_large_for_one_process_is_read_back_block_by_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "_SHARE_OF_MEMORY", 0.0)
    config = run_config(write_inputs(tmp_path / "inputs"), tmp_path / "run", "parallel.ep=2")
    options = VerifyOptions(tokens=64, only=("update", "artifacts"), report=str(tmp_path / "report.json"))
    report: Report = run_ranks(verify, 2, config, Control(arguments=options.dump()))[0]
    checks = {check.name: check for layer in report.layers for check in layer.checks}
    saved = checks["saved model in plain transformers"]
    assert (saved.status, saved.note) == ("pass", "read one block at a time: too large for one process")
    assert "are free" in checks["float32: trajectory of the unsharded model"].note


@pytest.mark.slow(why="weights/test_resident.py has the codes, adapters/test_frozen.py the gradients")
@pytest.mark.parametrize("placed", [(), ("moe={placement: balanced, replicas: 1}",)], ids=["as in the model", "copied"])
def test_a_job_whose_experts_stay_as_published_passes(placed: tuple[str, ...], tmp_path: Path) -> None:
    """NVFP4, which transformers reads wrongly for experts: stock PEFT is on what the codes stand for."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 96, "head_dim": 16}
    inputs = write_inputs(tmp_path / "inputs", **sizes)
    quantise(inputs / "model", tmp_path / "published", FORMATS["nvfp4"](), is_linear)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tmp_path / "published/quantised" / name, inputs / "model" / name)
    overrides = ("lora={r: 4, targets: [attention, experts]}", "precision.frozen=as_published", "parallel.ep=2")
    config = run_config(inputs, tmp_path / "run", *overrides, *placed)
    options = VerifyOptions(tokens=64, only=("bytes", "forward", "artifacts"), report=str(tmp_path / "report.json"))
    report: Report = shared_ranks(verify, 2, config, Control(arguments=options.dump()))[0]
    assert report.status == "pass", report.failures
    passed = {check.name for layer in report.layers for check in layer.checks if check.status == "pass"}
    assert passed >= ADAPTERS
