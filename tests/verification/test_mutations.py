"""Every planted bug is caught by its layer, and a check that is red ends the verification on every rank."""

from pathlib import Path

import pytest

from expertmesh.config.errors import IntegrityError
from expertmesh.training.control import Control
from expertmesh.verification import run as runner
from expertmesh.verification.options import VerifyOptions
from expertmesh.verification.proof import Proof
from expertmesh.verification.result import Check, Figure, Mutation, Report
from tests.support.ranks import run_ranks
from tests.training.tiny_run import run_config, write_inputs

EXPECTED = {
    "two experts exchanged": "bytes",
    "the first token of a rank gets no expert": "forward",
    "the router's gradient of other ranks dropped": "backward",
    "expert gradients twice as large": "backward",
    "clipped by each rank's own norm": "backward",
    "moments of the step before": "update",
    "moments lost when resuming": "metamorphic",
    "half of each adapter's rows zeroed": "artifacts",
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def _self_test(inputs: Path, world: int, *overrides: str) -> Report:
    config = run_config(inputs, inputs / "out", *overrides)
    options = VerifyOptions(tokens=256, self_test=True, only=("bytes",), report=str(inputs / "report.json"))
    report: Report = run_ranks(runner.verify, world, config, Control(arguments=options.dump()), timeout=100)[0]
    return report


def test_each_bug_is_caught_by_the_layer_that_should(inputs: Path) -> None:
    report = _self_test(inputs, 2, "precision.compute=bfloat16")
    assert {mutation.bug: mutation.expected for mutation in report.mutations} == EXPECTED
    for mutation in report.mutations:
        assert mutation.status == "pass", mutation
    by_bug = {mutation.bug: {layer for layer, _ in mutation.caught} for mutation in report.mutations}
    assert by_bug["expert gradients twice as large"] == {"backward"}  # the forward and the bytes are right
    assert by_bug["clipped by each rank's own norm"] == {"backward"}
    assert by_bug["two experts exchanged"] >= {"bytes", "forward"}


def test_a_bug_that_the_job_leaves_no_room_for_is_named(inputs: Path) -> None:
    report = _self_test(inputs, 1, "parallel.ep=1", "optim={name: sgd}")
    left = {mutation.bug: mutation.why_not for mutation in report.mutations if mutation.status == "not run"}
    assert left == {
        "the router's gradient of other ranks dropped": "needs two data ranks",
        "clipped by each rank's own norm": "needs two ranks that share a model",
        "moments of the step before": "sgd keeps no moments",
        "moments lost when resuming": "sgd keeps no moments",
    }
    assert all(mutation.status == "pass" for mutation in report.mutations if mutation.bug not in left)


def _fails(config: object, control: Control) -> str:
    def wrong(proof: Proof) -> list[Check]:
        return [Check.of("a check", [Figure("a tensor", 0.5, 1e-5)])]

    runner.CHECKS["bytes"] = wrong  # in a forked rank, which ends after this
    with pytest.raises(IntegrityError) as caught:
        runner.verify(config, control)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_red_check_ends_the_job_on_every_rank_with_its_figure(inputs: Path) -> None:
    options = VerifyOptions(tokens=64, only=("bytes",), report=str(inputs / "red.json"))
    config = run_config(inputs, inputs / "out")
    said = run_ranks(_fails, 2, config, Control(arguments=options.dump()))
    assert said[0] == said[1]
    assert "1 check failed" in said[0]
    assert "bytes: a check: 5.0e-01 of 1.0e-05 allowed (a tensor; 1 compared)" in said[0]
    assert '"status": "fail"' in (inputs / "red.json").read_text()


def _misses(config: object, control: Control) -> str:
    missed = Mutation("a bug", "backward", (("forward", "logits"),))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(runner, "self_test", lambda *args: [missed])
        with pytest.raises(IntegrityError) as caught:
            runner.verify(config, control)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_bug_that_the_right_layer_misses_fails_the_verification(inputs: Path) -> None:
    options = VerifyOptions(tokens=64, only=(), self_test=True, report=str(inputs / "red.json"))
    said = run_ranks(_misses, 1, run_config(inputs, inputs / "out", "parallel.ep=1"), Control(arguments=options.dump()))
    assert "self-test: a bug: not caught by backward" in said[0]
