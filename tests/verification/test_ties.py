"""A router's tie is counted and followed: the job may take the other expert and be as right; anything else is wrong."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from expertmesh.state.shards import local_tensor, stored_box
from expertmesh.verification.job import ProvenJob
from expertmesh.verification.layers.step import check_backward, check_forward
from expertmesh.verification.options import VerifyOptions
from expertmesh.verification.proof import Hooks, Proof
from expertmesh.verification.result import Check
from expertmesh.verification.setup import Setup, set_up
from tests.support.ranks import shared_ranks
from tests.training.tiny_run import run_config, write_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose routers cannot tell expert 0 from expert 1."""
    root = write_inputs(tmp_path_factory.mktemp("inputs"))
    path = root / "model" / "model.safetensors"
    tensors = load_file(path)
    for name, value in tensors.items():
        if name.endswith("mlp.gate.weight"):
            value[1] = value[0]
    save_file(tensors, path, {"format": "pt"})
    return root


def _checks(setup: Setup, factor: float) -> list[Check]:
    def prefer_expert_1(job: ProvenJob) -> None:
        """In the job, its score is another by this factor."""
        for name in job.setup.anatomy.routers:
            weight = job.model.get_submodule(name).weight
            (start, stop), *_ = stored_box(weight)
            if start <= 1 < stop:
                local_tensor(weight)[1 - start] *= factor

    proof = Proof(setup, Path(), hooks=Hooks(loaded=prefer_expert_1), uses_float64=False)
    return [*check_forward(proof), *check_backward(proof)]


def _setup(inputs: Path) -> Setup:
    return set_up(run_config(inputs, inputs / "out"), VerifyOptions(tokens=256), 2)


def test_ties_are_followed_and_everything_after_them_is_compared(inputs: Path) -> None:
    checks = shared_ranks(_checks, 2, _setup(inputs), 1 + 2.0**-22)[0]
    assert checks[0].note != "no ties"
    assert checks[0].note.endswith("followed")
    assert [check.name for check in checks if check.status != "pass"] == []


def test_a_router_that_scores_otherwise_is_wrong(inputs: Path) -> None:
    checks = {check.name: check for check in shared_ranks(_checks, 2, _setup(inputs), 1.5)[0]}
    assert checks["float32: experts chosen"].status == "fail"
    assert "differ without a tie, first in model.layers.0.mlp.experts" in checks["float32: experts chosen"].note
    assert checks["float32: logits"].status == checks["float32: gradients"].status == "fail"


def test_margins_are_of_the_last_expert_chosen() -> None:
    from expertmesh.verification.reference.model import Choices, _TopKRecorder

    class Spec:
        name, num_experts = "experts", 4

    recorder = Choices([], {}, 2)
    with _TopKRecorder(recorder, Spec):  # type: ignore[arg-type]
        torch.topk(torch.tensor([[4.0, 3.0, 2.0, 1.0], [4.0, 4.0, 1.0, 4.0]]), 2)
    assert recorder.margins["experts"].tolist() == pytest.approx([1 / 3, 0.0])
