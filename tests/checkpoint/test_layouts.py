"""A checkpoint of one layout is the same training state in every other: tensors, moments, generators, next steps."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import expertmesh as em
from expertmesh.checkpoint.manifest import read_manifest
from expertmesh.checkpoint.read import fingerprints_in
from expertmesh.config.errors import IntegrityError
from tests.checkpoint.tiny import Job, load, save
from tests.support.errors import refused
from tests.support.models import tiny_model
from tests.support.ranks import shared_ranks

FAMILY = "deepseek_v3"  # shared experts, dense layers, a persistent buffer in the router
# (world, ep, replicate)
LAYOUTS = [(4, 4, 1), (4, 2, 1), (4, 2, 2), (2, 2, 1), (2, 1, 2), (1, 1, 1), (8, 4, 2)]
State = dict[str, torch.Tensor]
Saved = Callable[[tuple[int, int, int]], tuple[Path, State]]


def _parallel(layout: tuple[int, int, int]) -> em.ParallelConfig:
    return em.ParallelConfig(ep=layout[1], replicate=layout[2])


@pytest.fixture(scope="module")
def saved(
    tmp_path_factory: pytest.TempPathFactory,
) -> Saved:
    """Write it with a layout: the checkpoint after two steps, and the whole state then."""

    @functools.cache
    def written(layout: tuple[int, int, int]) -> tuple[Path, State]:
        directory = tmp_path_factory.mktemp("checkpoints")
        states = shared_ranks(save, layout[0], FAMILY, _parallel(layout), 2, directory)
        return directory / "step-00000002", states[0]

    return written


def _worst(one: State, other: State) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).norm() / one[name].norm().clamp_min(1e-12)) for name in one)


@pytest.fixture(scope="module")
def onward(saved: Saved) -> State:
    """The state two steps later, on the layout that wrote it."""
    return shared_ranks(load, 4, FAMILY, _parallel(LAYOUTS[1]), saved(LAYOUTS[1])[0], [2, 3])[0][1]


@pytest.mark.slow_cases(r"target[01246]", why="two ranks and one stay")
@pytest.mark.parametrize("target", LAYOUTS)
def test_every_layout_reads_the_same_state_and_goes_on_alike(
    saved: Saved,
    onward: State,
    target: tuple[int, int, int],
) -> None:
    path, state = saved(LAYOUTS[1])
    for loaded, later in shared_ranks(load, target[0], FAMILY, _parallel(target), path, [2, 3]):
        assert all(torch.equal(state[name], loaded[name]) for name in state)
        assert _worst(onward, later) <= 1e-5
    assert _worst(state, onward) > 1e-3


@pytest.mark.slow_cases(r"source[023]", why="four ranks in two groups stay")
@pytest.mark.parametrize("source", LAYOUTS[:4])
def test_what_every_layout_wrote_is_read_alike(saved: Saved, source: tuple[int, int, int]) -> None:
    path, state = saved(source)
    loaded, _ = shared_ranks(load, 1, FAMILY, _parallel((1, 1, 1)), path)[0]
    assert all(torch.equal(state[name], loaded[name]) for name in state)


def _swap_two_experts_moments(path: Path) -> State:
    job = Job(tiny_model(FAMILY, seed=9), em.ParallelConfig(ep=2))
    em.load_checkpoint(job.model, job.optimizer, path)
    moments = job.optimizer.state[job.model.get_parameter("model.layers.1.mlp.experts.down_proj")]["exp_avg"]
    assert isinstance(moments, DTensor)
    local = moments.to_local()
    local[[0, 1]] = local[[1, 0]].clone()
    job.train([2, 3])
    return job.state()


def test_experts_whose_moments_are_swapped_do_not_go_on_alike(saved: Saved, onward: State) -> None:
    path, _ = saved(LAYOUTS[1])
    assert _worst(onward, shared_ranks(_swap_two_experts_moments, 4, path)[0]) > 1e-4


def test_replicas_write_once_and_every_rank_only_its_own_part(
    saved: Saved,
) -> None:
    one, replicated = (read_manifest(saved(layout)[0]) for layout in (LAYOUTS[1], LAYOUTS[2]))
    sizes = [sum(f.bytes for f in m.files if f.name.endswith(".safetensors")) for m in (one, replicated)]
    assert abs(sizes[0] - sizes[1]) < 0.1 * sizes[0]  # headers differ
    writers = {manifest_file.name[:11] for manifest_file in replicated.files if manifest_file.name.startswith("model-")}
    assert writers == {"model-00000", "model-00001"}
    experts = replicated.model["model.layers.1.mlp.experts.down_proj"]
    assert (replicated.tilings[experts.tiling].copies, len(replicated.tilings[experts.tiling].ranks)) == (2, 2)
    for writer in writers:
        (path,) = saved(LAYOUTS[2])[0].glob(f"{writer}*")
        assert "model.layers.1.mlp.experts.down_proj" in fingerprints_in(path)
    largest = max(f.bytes for f in one.files)
    assert largest < 0.4 * sizes[0]


def _generators(path: Path | None, directory: Path) -> list[float]:
    """Draws after saving at step 1, or after loading what was saved."""
    job = Job(tiny_model("qwen3_moe"), em.ParallelConfig(ep=1))
    if path is None:
        torch.manual_seed(100 + dist.get_rank())
        torch.rand(3)
        em.save_checkpoint(job.model, None, directory, step=1)
    else:
        em.load_checkpoint(job.model, None, path)
    return torch.rand(3).tolist()


def test_random_generators_return_on_every_rank_that_the_saved_job_had(tmp_path: Path) -> None:
    drawn = shared_ranks(_generators, 2, None, tmp_path)
    assert drawn[0] != drawn[1]
    assert shared_ranks(_generators, 2, tmp_path, tmp_path) == drawn
    assert shared_ranks(_generators, 4, tmp_path, tmp_path)[:2] == drawn


def _let_replicas_drift(directory: Path) -> None:
    job = Job(tiny_model("qwen3_moe"), em.ParallelConfig(ep=1, replicate=2))
    with torch.no_grad():
        local = job.model.get_parameter("model.norm.weight").to_local()
        local[3] += 1e-3 * dist.get_rank()
    with refused("model.replicas-differ", IntegrityError, naming="model.norm.weight"):
        em.save_checkpoint(job.model, job.optimizer, directory, step=1)


def test_replicas_that_differ_are_never_saved(tmp_path: Path) -> None:
    shared_ranks(_let_replicas_drift, 2, tmp_path)
    assert list(tmp_path.iterdir()) == []


def _save_thrice(directory: Path) -> None:
    job = Job(tiny_model("qwen3_moe"), em.ParallelConfig(ep=2))
    for step in (1, 2, 3):
        em.save_checkpoint(job.model, job.optimizer, directory, step=step, keep_last=2)
    with refused("checkpoint.exists"):
        em.save_checkpoint(job.model, job.optimizer, directory, step=3)


def test_old_checkpoints_go_and_none_is_written_over(tmp_path: Path) -> None:
    shared_ranks(_save_thrice, 2, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def _load_another_model(path: Path) -> None:
    job = Job(tiny_model("qwen3_moe", intermediate_size=24, moe_intermediate_size=24), em.ParallelConfig(ep=2))
    before = job.state()
    with refused("checkpoint.does-not-fit", IntegrityError, naming="model.layers.0.mlp.experts"):
        em.load_checkpoint(job.model, job.optimizer, path)
    assert all(torch.equal(before[name], tensor) for name, tensor in job.state().items())


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    shared_ranks(save, 2, "qwen3_moe", em.ParallelConfig(ep=2), 1, tmp_path)
    shared_ranks(_load_another_model, 2, tmp_path)


def test_nothing_on_disk_is_a_pickle(saved: Saved) -> None:
    path, _ = saved(LAYOUTS[1])
    for file in path.rglob("*.*"):
        if file.suffix == ".json":
            json.loads(file.read_bytes())
        else:
            assert file.suffix == ".safetensors", file
