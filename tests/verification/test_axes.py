"""What of a job on tp, cp or pp can be verified is, and the rest is refused by name before weights are read."""

from pathlib import Path

import pytest

from expertmesh.config.errors import InputError
from expertmesh.training.control import Control
from expertmesh.verification.options import VerifyOptions
from expertmesh.verification.result import Report
from expertmesh.verification.run import verify
from expertmesh.verification.setup import set_up
from tests.support.ranks import run_ranks
from tests.training.tiny_run import run_config, write_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def test_what_a_job_on_stages_computes_is_refused_by_name(inputs: Path) -> None:
    config = run_config(inputs, inputs / "out", "parallel.pp=2", "parallel.ep=1")
    for options in (VerifyOptions(), VerifyOptions(only=("bytes",), self_test=True)):
        with pytest.raises(InputError, match=r"parallel\.pp is 2.*parallel\.pp=1.*--only bytes"):
            set_up(config, options, 2)


@pytest.mark.parametrize("axes", ["tp", "cp"])
def test_a_job_on_shared_rows_is_verified_and_its_bugs_are_caught(inputs: Path, axes: str) -> None:
    config = run_config(inputs, inputs / "out", f"parallel.{axes}=2", "parallel.ep=2")
    options = VerifyOptions(tokens=256, self_test=True, report=str(inputs / f"{axes}-all.json"))
    reports: list[Report] = run_ranks(verify, 2, config, Control(arguments=options.dump()), timeout=110)
    assert [report.status for report in reports] == ["pass", "pass"], reports[0].failures


@pytest.mark.parametrize("axis", ["tp", "cp", "pp"])
def test_bytes_are_verified_on_every_axis(inputs: Path, axis: str) -> None:
    config = run_config(inputs, inputs / "out", f"parallel.{axis}=2", "parallel.ep=1")
    options = VerifyOptions(tokens=256, only=("bytes",), report=str(inputs / f"{axis}.json"))
    reports: list[Report] = run_ranks(verify, 2, config, Control(arguments=options.dump()))
    assert [report.status for report in reports] == ["pass", "pass"], reports[0].failures
