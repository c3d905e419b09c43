"""All layers of the proof pass on sound jobs of several kinds, and leave nothing behind."""

from pathlib import Path

import pytest

from expertmesh.training.control import Control
from expertmesh.verification.options import VerifyOptions
from expertmesh.verification.result import Report
from expertmesh.verification.run import verify
from tests.support.ranks import run_ranks
from tests.training.tiny_run import run_config, write_inputs

JOBS = {
    "packed": ("qwen3_moe", 2, ["parallel.ep=2", "data.packing=true", "moe.aux_loss_coef=0.01", "moe.z_loss_coef=0.1"]),
    "bfloat16, biases": (
        "deepseek_v3",
        4,
        ["precision.compute=bfloat16", "parallel.ep=2", "moe.bias_update_rate=0.001"],
    ),
    "hybrid, recomputed": (
        "mixtral",
        4,
        ["parallel.replicate=2", "parallel.ep=2", "train.activation_checkpointing=full"],
    ),
    "float64": ("qwen3_moe", 1, ["precision.params=float64", "precision.compute=float64", "precision.reduce=float64"]),
    "adapters": ("qwen3_moe", 2, ["lora={r: 4, dropout: 0.1, targets: [attention, experts, router]}"]),
}
NOT_RUN = {
    "packed": {"ep 2 = ep 4", "adapter in stock PEFT", "merged adapter in plain transformers"},
    "bfloat16, biases": {"adapter in stock PEFT", "merged adapter in plain transformers"},
    "hybrid, recomputed": {"ep 2 = ep 4", "adapter in stock PEFT", "merged adapter in plain transformers"},
    "float64": {"ep 1 = ep 2", "ep 1 = ep 4", "adapter in stock PEFT", "merged adapter in plain transformers"},
    "adapters": {"ep 2 = ep 4", "saved model in plain transformers"},
}


@pytest.mark.parametrize("kind", JOBS)
def test_a_sound_job_passes_every_layer(kind: str, tmp_path: Path) -> None:
    family, world, overrides = JOBS[kind]
    inputs = write_inputs(tmp_path / "inputs", family)
    (tmp_path / "runs").mkdir()
    config = run_config(inputs, tmp_path / "runs" / "run", *overrides)
    before = set(tmp_path.rglob("*"))
    options = VerifyOptions(tokens=256, report=str(tmp_path / "report.json"))
    reports: list[Report] = run_ranks(verify, world, config, Control(arguments=options.dump()), timeout=100)
    for report in reports:
        assert report.status == "pass", report.failures
        assert [layer.name for layer in report.layers] == list(options.only)
    checks = [check for layer in reports[0].layers for check in layer.checks]
    assert {check.name for check in checks if check.status == "not run"} == NOT_RUN[kind]
    assert set(tmp_path.rglob("*")) - before == {tmp_path / "report.json"}
    if kind == "adapters":
        assert "lora.dropout 0.1 is off" in reports[0].facts["notes"]
