"""A checkpoint, or a directory of weights, of a model cut into pipeline stages is that of the whole model."""

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

import expertmesh as em
from expertmesh.checkpoint.manifest import read_manifest
from expertmesh.config.errors import IntegrityError
from expertmesh.export.checkpoint import export
from expertmesh.weights import write
from tests.checkpoint.tiny import Job, load, save
from tests.support.errors import refused
from tests.support.models import tiny_model
from tests.support.ranks import shared_ranks

FAMILY = "deepseek_v3"  # a dense block first, a persistent buffer in the router of the other
State = dict[str, torch.Tensor]
STAGES = {
    "pp 2": (2, em.ParallelConfig(ep=1, pp=2)),
    "pp 2, ep 2": (4, em.ParallelConfig(ep=2, pp=2)),
    "pp 2, replicate 2": (4, em.ParallelConfig(ep=1, pp=2, replicate=2)),
}
WHOLE = (4, em.ParallelConfig(ep=2))


def _worst(one: State, other: State) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).norm() / one[name].norm().clamp_min(1e-12)) for name in one)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State, State]:
    """A checkpoint of a model without stages, its state, and the state two steps later."""
    directory = tmp_path_factory.mktemp("whole")
    world, parallel = WHOLE
    state = shared_ranks(save, world, FAMILY, parallel, 2, directory)[0]
    path = directory / "step-00000002"
    return path, state, shared_ranks(load, world, FAMILY, parallel, path, [2, 3])[0][1]


@pytest.mark.slow_cases(r"pp 2(, replicate 2)?", why="pp 2 with ep 2 stays")
@pytest.mark.parametrize("stages", STAGES)
def test_stages_read_what_a_whole_model_wrote_and_go_on_alike(
    whole: tuple[Path, State, State], tmp_path: Path, stages: str
) -> None:
    path, state, onward = whole
    world, parallel = STAGES[stages]
    for loaded, later in shared_ranks(load, world, FAMILY, parallel, path, [2, 3]):
        assert loaded.keys() == state.keys()
        assert all(torch.equal(state[name], loaded[name]) for name in state)
        assert _worst(onward, later) <= 1e-5


@pytest.mark.slow(why="the other direction stays")
@pytest.mark.parametrize("stages", STAGES)
def test_a_whole_model_reads_what_stages_wrote_and_the_export_is_the_same(tmp_path: Path, stages: str) -> None:
    world, parallel = STAGES[stages]
    state = shared_ranks(save, world, FAMILY, parallel, 2, tmp_path)[0]
    path = tmp_path / "step-00000002"
    loaded, _ = shared_ranks(load, WHOLE[0], FAMILY, WHOLE[1], path)[0]
    assert loaded.keys() == state.keys()
    assert all(torch.equal(state[name], loaded[name]) for name in state)
    manifest = read_manifest(path)
    assert set(manifest.trained) == {n.removeprefix("optimizer.").rpartition(".")[0] for n in manifest.optimizer}
    export(path, tmp_path / "exported")
    files = load_file(tmp_path / "exported" / "model.safetensors")
    assert torch.equal(
        files["model.layers.1.mlp.gate.e_score_correction_bias"],
        state["model.layers.1.mlp.gate.e_score_correction_bias"],
    )


def _tied(directory: Path) -> tuple[State, State]:
    job = Job(tiny_model("qwen3_moe", tie_word_embeddings=True), em.ParallelConfig(ep=1, pp=2))
    job.train([0, 1])
    em.save_checkpoint(job.model, job.optimizer, directory, step=2)
    state = job.state()
    other = Job(tiny_model("qwen3_moe", seed=9, tie_word_embeddings=True), em.ParallelConfig(ep=1, pp=2))
    em.load_checkpoint(other.model, other.optimizer, directory)
    em.save_model(other.model, directory / "model")
    return state, other.state()


def test_a_weight_on_two_stages_is_written_once_and_read_by_both(tmp_path: Path) -> None:
    for state, loaded in shared_ranks(_tied, 2, tmp_path):
        assert state.keys() == loaded.keys()
        assert all(torch.equal(state[name], loaded[name]) for name in state)
    manifest = read_manifest(tmp_path / "step-00000002")
    assert "lm_head.weight" not in manifest.model
    assert manifest.tiling_of("model.embed_tokens.weight").copies == 2
    files = load_file(tmp_path / "model" / "model.safetensors")
    assert "lm_head.weight" not in files
    assert torch.equal(files["model.embed_tokens.weight"], state["model.embed_tokens.weight"])


def _let_stages_drift(directory: Path) -> None:
    job = Job(tiny_model("qwen3_moe", tie_word_embeddings=True), em.ParallelConfig(ep=1, pp=2))
    if job.mesh.rank == 1:
        with torch.no_grad():
            job.model.lm_head.weight.to_local()[3] += 1e-3
    with refused("model.replicas-differ", IntegrityError, naming="embed_tokens.weight"):
        em.save_checkpoint(job.model, job.optimizer, directory, step=1)


def test_a_weight_that_differs_between_two_stages_is_never_saved(tmp_path: Path) -> None:
    shared_ranks(_let_stages_drift, 2, tmp_path)


def _round(source: Path, target: Path, parallel: em.ParallelConfig, **options: Any) -> int:
    mesh = em.init_mesh(parallel)
    model = em.load_model(source, mesh, precision=em.PrecisionConfig(compute="float32"), audit="full", **options)
    report = em.save_model(model, target)
    return report.bytes_written


def _gather_everything(source: Path, target: Path) -> None:
    """As for a family whose files hold values computed from those in memory."""
    with mock.patch.object(write, "is_computed", return_value=True):
        _round(source, target, em.ParallelConfig(ep=2, pp=2))


def test_tensors_that_are_computed_from_another_stage_are_written_right(tmp_path: Path) -> None:
    model: Any = tiny_model("qwen3_moe", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "source")
    shared_ranks(_gather_everything, 4, tmp_path / "source", tmp_path / "target")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "target"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow_cases(r"pp 2(, replicate 2)?", why="ep inside stages stays")
@pytest.mark.parametrize("stages", STAGES)
def test_each_stage_reads_and_writes_its_own_share_of_the_files(tmp_path: Path, stages: str) -> None:
    model: Any = copy.deepcopy(tiny_model(FAMILY))
    model.save_pretrained(tmp_path / "source")
    world, parallel = STAGES[stages]
    written = shared_ranks(_round, world, tmp_path / "source", tmp_path / "target", parallel)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "target"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert sum(written) == sum(tensor.nbytes for tensor in before.values())
    assert min(written[:: world // 2]) > 0
