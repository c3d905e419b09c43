"""Every planted bug is caught by its layer, and a check that is red ends the verification on every rank."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from expertmesh.config import Config
from expertmesh.config.errors import IntegrityError
from expertmesh.step.objectives import Dpo, Kto
from expertmesh.training import objective as training
from expertmesh.training.control import Control
from expertmesh.verification import run as runner
from expertmesh.verification.options import VerifyOptions
from expertmesh.verification.proof import Proof
from expertmesh.verification.result import Check, Figure, Mutation, Report
from tests.support.ranks import shared_ranks
from tests.training.dpo_by_trl import preference_config
from tests.training.kto_by_trl import kl_of_own_rows, kto_config
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
    report: Report = shared_ranks(runner.verify, world, config, Control(arguments=options.dump()))[0]
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


@pytest.mark.slow_cases(r"(muon|adamw_8bit).*", why="one optimizer stays")
@pytest.mark.parametrize(
    ("optimizer", "stale", "lost"),
    [
        ("sgd", "sgd keeps no moments", "sgd keeps no moments"),
        ("muon", "matrices are orthogonalised, of which a sample of elements has none whole", None),
        ("adamw_8bit", "moments are in blocks, of which a sample of elements has none whole", None),
    ],
)
def test_a_bug_that_the_job_leaves_no_room_for_is_named(
    inputs: Path, optimizer: str, stale: str, lost: str | None
) -> None:
    report = _self_test(inputs, 1, "parallel.ep=1", f"optim={{name: {optimizer}}}")
    left = {mutation.bug: mutation.why_not for mutation in report.mutations if mutation.status == "not run"}
    assert left == {
        "the router's gradient of other ranks dropped": "needs two data ranks",
        "clipped by each rank's own norm": "needs two ranks that share a model",
        "moments of the step before": stale,
        **({} if lost is None else {"moments lost when resuming": lost}),
    }
    assert all(mutation.status == "pass" for mutation in report.mutations if mutation.bug not in left)


def _layers_that_fail(config: Config, plant: Callable[[], Any]) -> set[str]:
    options = VerifyOptions(tokens=256, only=("forward", "backward"), report=str(Path(config.output_dir) / "red.json"))

    def job() -> None:
        plant()
        with pytest.raises(IntegrityError):
            runner.verify(config, Control(arguments=options.dump()))

    Path(config.output_dir).mkdir(exist_ok=True)
    shared_ranks(job, 2)
    report = json.loads((Path(config.output_dir) / "red.json").read_text())
    checks = [(layer["name"], check) for layer in report["layers"] for check in layer["checks"]]
    return {f"{layer}: {check['name']}" for layer, check in checks if check["status"] == "fail"}


def test_pairs_of_one_weight_are_seen(inputs: Path, tmp_path: Path) -> None:
    """As before the first update, whatever their margins are by then."""
    config = preference_config(inputs, tmp_path / "run")
    pair_losses = Dpo.pair_losses

    def of_one_weight(dpo: Dpo, chosen_P: torch.Tensor, rejected_P: torch.Tensor) -> torch.Tensor:
        linear_P = -0.5 * dpo.beta * (chosen_P - rejected_P)
        return pair_losses(dpo, chosen_P, rejected_P).detach() + linear_P - linear_P.detach()

    failing = _layers_that_fail(config, lambda: mock.patch.object(Dpo, "pair_losses", of_one_weight).start())
    assert failing == {"backward: float32: gradients", "backward: float32: global norm"}


def test_a_reference_with_its_adapters_on_is_seen(inputs: Path, tmp_path: Path) -> None:
    config = preference_config(inputs, tmp_path / "run", "lora={r: 4}")
    off = mock.patch.object(training, "adapters_off", return_value=contextlib.nullcontext())
    assert _layers_that_fail(config, off.start) == {"forward: float32: log-probabilities of the reference"}


@pytest.mark.slow(why="dpo's stay; training/test_kto.py plants it in a run")
def test_a_kl_of_each_ranks_own_rows_is_seen(inputs: Path, tmp_path: Path) -> None:
    config = kto_config(inputs, tmp_path / "run", "parallel.ep=2")
    own = mock.patch.object(Kto, "measured", kl_of_own_rows)
    assert "forward: float32: losses" in _layers_that_fail(config, own.start)


def _fails(config: object, control: Control) -> str:
    def wrong(proof: Proof) -> list[Check]:
        return [Check.of("a check", [Figure("a tensor", 0.5, 1e-5)])]

    mock.patch.dict(runner.CHECKS, bytes=wrong).start()
    with pytest.raises(IntegrityError) as caught:
        runner.verify(config, control)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_red_check_ends_the_job_on_every_rank_with_its_figure(inputs: Path) -> None:
    options = VerifyOptions(tokens=64, only=("bytes",), report=str(inputs / "red.json"))
    config = run_config(inputs, inputs / "out")
    said = shared_ranks(_fails, 2, config, Control(arguments=options.dump()))
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
    said = shared_ranks(
        _misses, 1, run_config(inputs, inputs / "out", "parallel.ep=1"), Control(arguments=options.dump())
    )
    assert "self-test: a bug: not caught by backward" in said[0]


def test_by_layer_each_bug_is_caught_and_two_more(inputs: Path) -> None:
    report = _self_test(inputs, 2, "train.accumulate=by_layer", "train.activation_checkpointing=full")
    more = {
        "a micro-batch's gradient before the last block exchanged": "backward",
        "the last block reduced before its last micro-batch": "backward",
    }
    assert {mutation.bug: mutation.expected for mutation in report.mutations} == EXPECTED | more
    for mutation in report.mutations:
        assert mutation.status == "pass", mutation
    by_bug = {mutation.bug: {layer for layer, _ in mutation.caught} for mutation in report.mutations}
    assert all(by_bug[bug] == {"backward"} for bug in more)  # each forward is right
