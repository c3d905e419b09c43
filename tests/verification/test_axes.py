"""A job on tp or cp is verified in all layers, and on any axis in its bytes alone; stages are in test_stages.py."""

from pathlib import Path

import pytest

from expertmesh.training.control import Control
from expertmesh.verification.options import VerifyOptions
from expertmesh.verification.result import Report
from expertmesh.verification.run import verify
from tests.support.ranks import run_ranks
from tests.training.tiny_run import run_config, write_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.parametrize("axes", ["tp", "cp"])
def test_a_job_on_shared_rows_is_verified_and_its_bugs_are_caught(inputs: Path, axes: str) -> None:
    config = run_config(inputs, inputs / "out", f"parallel.{axes}=2", "parallel.ep=2")
    options = VerifyOptions(tokens=256, self_test=True, report=str(inputs / f"{axes}-all.json"))
    reports: list[Report] = run_ranks(verify, 2, config, Control(arguments=options.dump()), timeout=110)
    assert [report.status for report in reports] == ["pass", "pass"], reports[0].failures
    chosen = next(check for layer in reports[0].layers for check in layer.checks if "experts chosen" in check.name)
    assert (
        chosen.compared == 2 * reports[0].facts["tokens_of_a_step"]
    )  # by one of the ranks that share rows, in 2 layers


@pytest.mark.parametrize("axis", ["tp", "cp", "pp"])
def test_bytes_are_verified_on_every_axis(inputs: Path, axis: str) -> None:
    config = run_config(inputs, inputs / "out", f"parallel.{axis}=2", "parallel.ep=1")
    options = VerifyOptions(tokens=256, only=("bytes",), report=str(inputs / f"{axis}.json"))
    reports: list[Report] = run_ranks(verify, 2, config, Control(arguments=options.dump()))
    assert [report.status for report in reports] == ["pass", "pass"], reports[0].failures
