"""What figures mean, and that nothing which is not a number passes for one."""

import json
import math
from pathlib import Path

import pytest
import torch

from expertmesh.state.shards import local_tensor
from expertmesh.verification.compare import Distance, distances, figures, without_numbers
from expertmesh.verification.job import build
from expertmesh.verification.layers.step import _chance
from expertmesh.verification.options import VerifyOptions
from expertmesh.verification.result import Check, Figure, Layer, Mutation, Report, layer_lines, write_proof
from expertmesh.verification.setup import Setup, set_up
from tests.support.ranks import shared_ranks
from tests.training.tiny_run import run_config, write_inputs

EXPERTS = "model.layers.1.mlp.experts.down_proj"


def test_the_worst_figure_is_that_nearest_to_its_limit_and_nan_is_the_worst() -> None:
    near, far = Figure("near", 2e-6, 1e-5), Figure("far", 1e-3, 1.0)
    assert Check.of("c", [far, near]).worst is near
    assert Check.of("c", [near, Figure("nan", math.nan, 1.0)]).status == "fail"
    assert Check.of("c", [Figure("exact", 0.0, 0.0)]).status == "pass"
    assert Check.of("c", [Figure("not exact", 1e-30, 0.0)]).status == "fail"
    assert Check.of("c", []).status == "not run"


def test_a_tensor_may_be_as_far_off_as_the_unsharded_models_worst_of_its_kind() -> None:
    found = {
        "layers.0.w": Distance(4e-4, 1.0, 100),
        "layers.1.w": Distance(1e-4, 1.0, 100),
        "head": Distance(1e-4, 1.0, 100),
    }
    own = {
        "layers.0.w": Distance(1e-6, 1.0, 100),
        "layers.1.w": Distance(4e-4, 1.0, 100),
        "head": Distance(1e-6, 1.0, 100),
    }
    shares = {figure.tensor: figure.share for figure in figures(found, 1e-5, own)}
    assert shares["layers.0.w"] == pytest.approx(2e-2 / (1.5 * 2e-2))
    assert shares["head"] > 1
    few = {"head": Distance(4e-4, 1.0, 16), "body": Distance(4e-4, 1.0, 100)}
    own = {"head": Distance(0.0, 1.0, 16), "body": Distance(1e-4, 1.0, 100)}
    limits = {figure.tensor: figure.limit for figure in figures(few, 1e-5, own)}
    assert limits["head"] == pytest.approx(2 * limits["body"])
    assert without_numbers("model.layers.12.mlp.experts.3.up") == "model.layers.*.mlp.experts.*.up"


def test_gradients_that_are_rounding_beside_all_others_are_not_told_from_zero() -> None:
    found = {"w": Distance(0.0, 1e6, 1000), "bias": Distance(1e-14, 1e-14, 10)}
    errors = {figure.tensor: figure.error for figure in figures(found, 1e-5, floor=True)}
    assert errors["bias"] < 1e-5
    assert {figure.tensor: figure.error for figure in figures(found, 1e-5)}["bias"] == 1.0


def _distance() -> dict[str, Distance]:
    rank = torch.distributed.get_rank()
    got = {"both": torch.full((2,), float(rank)), "mine": torch.ones(3)} if rank == 0 else {"both": torch.ones(2)}
    return distances(got, {"both": torch.zeros(2)}, True)


def test_distances_are_over_all_ranks_and_what_one_side_lacks_is_zero() -> None:
    for found in shared_ranks(_distance, 2):
        assert found == {"both": Distance(2.0, 0.0, 4), "mine": Distance(3.0, 0.0, 3)}


def test_chance_is_that_of_a_fair_coin() -> None:
    assert _chance(2, 2) == pytest.approx(0.25)
    assert _chance(0, 5) == pytest.approx(1.0)
    assert _chance(60, 60) < 1e-17


def _moved(setup: Setup) -> list[dict[str, Distance]]:
    """Between the weights of two layouts, as they are and with one element of an expert changed."""
    base, job = (build(setup, parallel=setup.config.parallel.model_copy(update={"ep": ep})) for ep in (1, 4))
    one, other = (
        {name: local_tensor(parameter) for name, parameter in each.parameters().items()} for each in (base, job)
    )
    expected = {name: one[name] for name in base.boxes()}
    found = [distances(expected, job.parts(other, base.boxes()), True)]
    if job.mesh.rank == 3:
        other[EXPERTS].view(-1)[-1] += 5.0
    return [*found, distances(expected, job.parts(other, base.boxes()), True)]


def test_gradients_of_other_layouts_are_compared_element_by_element(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path / "inputs")
    setup = set_up(run_config(inputs, tmp_path / "out"), VerifyOptions(tokens=64), 4)
    for same, changed in shared_ranks(_moved, 4, setup):
        assert {distance.difference for distance in same.values()} == {0.0}
        assert all(distance.expected for distance in same.values())
        differs = {name: distance.difference for name, distance in changed.items() if distance.difference}
        assert differs == {EXPERTS: pytest.approx(25.0)}


def test_the_report_is_json_with_its_version_even_when_figures_are_not_finite(tmp_path: Path) -> None:
    layer = Layer("forward", [Check.of("logits", [Figure("logits", math.inf, 1e-5)]), Check.not_run("x", "why")])
    report = Report({"model": "m"}, [layer], [Mutation("a bug", "bytes", (("forward", "logits"),))])
    write_proof(report, tmp_path / "new" / "report.json")
    content = json.loads((tmp_path / "new" / "report.json").read_text())
    assert (content["format"], content["version"], content["status"]) == ("expertmesh-proof", 1, "fail")
    assert content["layers"][0]["checks"][0]["worst"]["error"] == "inf"
    assert content["mutations"][0]["status"] == "fail"
    assert len(content["failures"]) == 2
    assert list(layer_lines(layer)) == [
        "forward     fail     logits: inf of 1.0e-05 allowed (logits; 1 compared)",
        "            not run  x: why",
    ]
