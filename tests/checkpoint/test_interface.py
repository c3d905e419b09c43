"""`save_checkpoint` and `load_checkpoint` in a loop of one's own: what is refused, on all ranks alike."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import expertmesh as em
from expertmesh.config.errors import DistributedFailure, IntegrityError
from tests.checkpoint.tiny import Job
from tests.support.errors import refused
from tests.support.models import tiny_model
from tests.support.ranks import shared_ranks


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def _save_an_earlier_step(directory: Path) -> None:
    job = Job(tiny_model("qwen3_moe"), em.ParallelConfig(ep=2))
    em.save_checkpoint(job.model, job.optimizer, directory, step=5)
    with refused("checkpoint.later-exists", naming="step-00000005"):
        em.save_checkpoint(job.model, job.optimizer, directory, step=4, keep_last=1)
    with refused("checkpoint.invalid-step", naming="-1"):
        em.save_checkpoint(job.model, job.optimizer, directory, step=-1)
    with refused("config.wrong-value", naming="keep_last 0"):
        em.save_checkpoint(job.model, job.optimizer, directory, step=6, keep_last=0)


def test_a_step_before_the_newest_is_refused_and_not_saved_to_be_removed_at_once(tmp_path: Path) -> None:
    shared_ranks(_save_an_earlier_step, 2, tmp_path)
    assert _names(tmp_path) == ["step-00000005"]


def _fail_on_rank_0(directory: Path) -> None:
    job = Job(tiny_model("qwen3_moe"), em.ParallelConfig(ep=2))
    state: dict[str, Any] = {"loss": torch.ones(1) if dist.get_rank() == 0 else 1.0}
    with refused("checkpoint.state-not-json", naming="Tensor"):
        em.save_checkpoint(job.model, job.optimizer, directory, step=1, state=state)
    if dist.get_rank() == 0:
        job.optimizer.state[next(job.model.parameters())]["slot"] = "no tensor"
    with refused("optimizer.unsupported-state", naming="slot"):
        em.save_checkpoint(job.model, job.optimizer, directory, step=1)
    job.optimizer.state.clear()
    full = mock.patch("expertmesh.checkpoint.small_files.config_files", side_effect=OSError(28, os.strerror(28)))
    with full, pytest.raises((OSError, DistributedFailure), match="No space left on device"):
        em.save_checkpoint(job.model, job.optimizer, directory, step=1)


def test_what_fails_on_one_rank_alone_leaves_no_other_waiting(tmp_path: Path) -> None:
    shared_ranks(_fail_on_rank_0, 2, tmp_path)
    assert _names(tmp_path) == []


def _save_where_one_was_killed(directory: Path) -> None:
    job = Job(tiny_model("qwen3_moe"), em.ParallelConfig(ep=2))
    em.save_checkpoint(job.model, job.optimizer, directory, step=1)


def test_what_an_interrupted_save_has_left_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "step-00000001.tmp-12ab").mkdir()
    (tmp_path / "mine").mkdir()
    shared_ranks(_save_where_one_was_killed, 2, tmp_path)
    assert _names(tmp_path) == ["mine", "step-00000001"]


def _load_from(root: Path) -> list[str]:
    job = Job(tiny_model("qwen3_moe"), em.ParallelConfig(ep=2))
    em.save_checkpoint(job.model, job.optimizer, root / "step-by-step" / "checkpoints", step=3)
    if dist.get_rank() == 0:
        (root / "latest").symlink_to(root / "step-by-step" / "checkpoints" / "step-00000003")
    dist.barrier()
    found = [
        em.load_checkpoint(job.model, job.optimizer, root / name).directory.name
        for name in ("step-by-step", "step-by-step/checkpoints", "step-by-step/checkpoints/step-00000003", "latest")
    ]
    with refused("checkpoint.not-found"):
        em.load_checkpoint(job.model, job.optimizer, root)
    return found


def test_a_checkpoint_is_found_by_its_path_its_directory_its_run_or_a_link(tmp_path: Path) -> None:
    assert shared_ranks(_load_from, 2, tmp_path)[1] == ["step-00000003"] * 3 + ["latest"]


def _load_into_another_optimizer(directory: Path) -> None:
    job = Job(tiny_model("qwen3_moe"), em.ParallelConfig(ep=2))
    job.train([1])
    em.save_checkpoint(job.model, job.optimizer, directory, step=1)
    other = torch.optim.SGD(job.model.parameters(), lr=0.1, momentum=0.9)
    with refused("checkpoint.other-optimizer", naming="AdamW"):
        em.load_checkpoint(job.model, other, directory)
    assert not other.state
    assert em.load_checkpoint(job.model, None, directory).step == 1


def test_moments_are_never_given_to_an_optimizer_of_another_kind(tmp_path: Path) -> None:
    shared_ranks(_load_into_another_optimizer, 2, tmp_path)


def _load_moments_that_are_not_there(directory: Path) -> None:
    job = Job(tiny_model("qwen3_moe"), em.ParallelConfig(ep=2))
    job.train([1])
    em.save_checkpoint(job.model, None, directory, step=1)
    with refused("checkpoint.other-optimizer", naming="no optimizer"):
        em.load_checkpoint(job.model, job.optimizer, directory)
    assert len(job.optimizer.state) == len(list(job.model.parameters()))


def test_moments_are_not_lost_to_a_checkpoint_without_any(tmp_path: Path) -> None:
    shared_ranks(_load_moments_that_are_not_there, 2, tmp_path)


def _save_a_nan(directory: Path) -> None:
    job = Job(tiny_model("qwen3_moe"), em.ParallelConfig(ep=2))
    em.save_checkpoint(job.model, job.optimizer, directory, step=1, keep_last=1)
    if dist.get_rank() == 1:
        job.model.get_parameter("model.layers.1.mlp.experts.down_proj").detach().to_local()[0, 0, 0] = torch.nan
    with refused("weights.not-finite", IntegrityError, naming="model.layers.1.mlp.experts.down_proj"):
        em.save_checkpoint(job.model, job.optimizer, directory, step=2, keep_last=1)


def test_a_state_from_which_nothing_goes_on_takes_no_checkpoints_place(tmp_path: Path) -> None:
    shared_ranks(_save_a_nan, 2, tmp_path)
    assert _names(tmp_path) == ["step-00000001"]


def _load_what_is_scaled_otherwise(directory: Path) -> None:
    def adapted(**lora: Any) -> Any:
        model: Any = tiny_model("qwen3_moe")
        config = em.LoraConfig(r=4, targets=("attention", "experts"), **lora)
        return em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=2)), lora=config)

    model = adapted(alpha=8, expert_r=2)
    em.save_adapter(model, directory / "adapter")
    em.save_checkpoint(model, None, directory, step=1)
    same = adapted(alpha=8, rank_pattern={"experts.gate_up_proj": 2, "experts.down_proj": 2})
    for load in (em.load_weights, lambda model, path: em.load_checkpoint(model, None, path)):
        path = directory / ("adapter" if load is em.load_weights else "step-00000001")
        load(same, path)
        for lora in ({"alpha": 16, "expert_r": 2}, {"alpha": 8, "expert_r": 2, "use_rslora": True}):
            with refused("adapter.differs-from-its-config", IntegrityError, naming="q_proj by 2, this model by 4"):
                load(adapted(**lora), path)


def test_adapters_are_never_loaded_into_a_model_that_scales_them_otherwise(tmp_path: Path) -> None:
    shared_ranks(_load_what_is_scaled_otherwise, 2, tmp_path)


def _save_weights_beside(directory: Path) -> dict[str, torch.Tensor]:
    job = Job(tiny_model("qwen3_moe"), em.ParallelConfig(ep=2))
    job.train(range(2))
    em.save_model(job.model, directory / "model")
    saved = em.save_checkpoint(job.model, job.optimizer, directory / "optimizer", step=2, weights=False)
    moments = 2 * sum(parameter.numel() * 4 for parameter in job.model.parameters())
    assert moments <= saved.total_bytes <= moments + 1000
    with refused("checkpoint.no-weights", naming="without weights"):
        em.load_checkpoint(job.model, job.optimizer, directory / "optimizer")
    return job.state()


def _load_weights_from_beside(directory: Path) -> dict[str, torch.Tensor]:
    job = Job(tiny_model("qwen3_moe", seed=9), em.ParallelConfig(ep=1))
    em.load_checkpoint(job.model, job.optimizer, directory / "optimizer", weights=False)
    em.load_weights(job.model, directory / "model")
    state = job.state()
    em.save_model(job.model, directory / "again")
    return state


def test_weights_that_lie_beside_a_checkpoint_come_back_in_another_layout(tmp_path: Path) -> None:
    saved, loaded = (
        shared_ranks(_save_weights_beside, 2, tmp_path)[0],
        shared_ranks(_load_weights_from_beside, 4, tmp_path)[0],
    )
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in loaded.items())
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("model", "again"))
    assert first == second
