"""What is saved: stock PEFT reads it and gives the trainer's logits, whatever the layout was, and files are the same.

The planted bugs are those of public trainers: B of the ranks concatenated, and one rank's rows with zeros for the rest.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import expertmesh as em
from expertmesh.adapters import save, targets
from expertmesh.adapters.peft_format import file_keys, file_tensors
from expertmesh.adapters.targets import Replaced, Target
from expertmesh.distributed.mesh import Mesh
from expertmesh.io.boxes import slices
from expertmesh.state.model_view import sharded
from expertmesh.state.shards import local_tensor, stored_box
from expertmesh.training.reporting.weights import adapter_lines
from expertmesh.weights import write
from expertmesh.weights.lazy import LazyTensor
from expertmesh.weights.mapping import StateTensor
from tests.adapters.reference import PeftRun, take_steps, tiny_peft_run, train_adapters, worst
from tests.families.tiny import random_model
from tests.parallel.test_uneven_routing import route_by_half
from tests.support.errors import refused, refused_on_ranks
from tests.support.models import tiny_model
from tests.support.ranks import shared_ranks
from tests.support.reference import rows_of_step

IDS = torch.randint(96, (2, 24), generator=torch.Generator().manual_seed(7))
LAYOUTS = [(2, 1, 1), (2, 2, 1), (4, 4, 1), (4, 2, 2)]  # world, ep, replicate


def logits_of(model: Any) -> Tensor:
    model.eval()
    with torch.no_grad():
        logits: Tensor = model(input_ids=IDS, use_cache=False).logits
    return logits


def _train_and_save(
    run: PeftRun, layout: tuple[int, int, int], directory: Path, tamper: Callable[[nn.Module, Mesh], None] | None = None
) -> Tensor:
    """The trainer's logits on ranks, after saving the adapter to `directory`."""

    def after(model: Any, mesh: Mesh) -> Tensor:
        em.save_adapter(model, directory)
        return logits_of(model)

    world, ep, replicate = layout
    parallel = em.ParallelConfig(ep=ep, replicate=replicate)
    distances = shared_ranks(lambda: train_adapters(run, parallel, after=after, tamper=tamper), world)
    logits: Tensor = distances[0].after
    return logits


def peft_error(run: PeftRun, directory: Path, trained: Tensor) -> float:
    """How far the logits of stock PEFT with the saved adapter are from the trainer's."""
    initial: Any = tiny_copy(run)
    logits = logits_of(peft.PeftModel.from_pretrained(initial, str(directory)))
    return float((logits - trained).norm() / trained.norm())


def tiny_copy(run: PeftRun) -> nn.Module:
    copy: nn.Module = type(run.initial)(run.initial.config)  # type: ignore[call-arg]
    copy.load_state_dict(run.initial.state_dict())
    return copy


@pytest.mark.slow_cases(r"qwen3_moe-.*", why="gpt_oss has biases and transposed experts as well")
@pytest.mark.parametrize(("family", "layouts"), [("qwen3_moe", LAYOUTS), ("gpt_oss", LAYOUTS[1:3])])
def test_stock_peft_gives_the_trainers_logits_and_every_layout_writes_the_same_file(
    family: str, layouts: list[tuple[int, int, int]], tmp_path: Path
) -> None:
    run = tiny_peft_run(family, tmp_path / "start")
    files = []
    for number, layout in enumerate(layouts):
        directory = tmp_path / str(number)
        trained = _train_and_save(run, layout, directory)
        assert peft_error(run, directory, trained) <= 1e-5
        files.append(load_file(directory / "adapter_model.safetensors"))
        assert (directory / "adapter_config.json").read_bytes() == (tmp_path / "0/adapter_config.json").read_bytes()
    # PEFT's own steps end there too.
    assert worst(files[0], run.final)[0] <= 1e-5
    for other in files[1:]:
        assert worst(other, files[0])[0] <= 1e-5


def test_a_file_that_is_only_read_and_written_is_the_same_file(tmp_path: Path) -> None:
    run = tiny_peft_run("gpt_oss", tmp_path / "start")
    shared_ranks(_read_and_write, 4, run, tmp_path / "again")
    first, second = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("start", "again"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


def _read_and_write(run: PeftRun, directory: Path) -> None:
    model: Any = run.initial
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=2)), lora=em.LoraConfig(from_adapter=str(run.start)))
    em.save_adapter(model, directory)


def _concatenate_blocks_of_ranks(model: nn.Module, mesh: Mesh) -> None:
    """modelscope/twinkle: `lora_B` of the ranks' experts, one after the other on dim 1."""

    def scrambled(
        state: Mapping[str, Tensor], targets: Sequence[Target], replaced: Mapping[str, Replaced]
    ) -> dict[str, LazyTensor]:
        files = file_tensors(state, targets, replaced)
        for target in targets:
            if target.experts is not None:
                name = f"{target.module}.{target.leaves[1]}"
                b: Any = LazyTensor.of(StateTensor(name, state[name]))
                files[file_keys(target, targets)[1]] = b.unflatten(0, (2, -1)).permute(2, 0, 3, 1).flatten(1, 3)
        return files

    mock.patch.object(save, "file_tensors", scrambled).start()


def _zeros_for_other_ranks(model: nn.Module, mesh: Mesh) -> None:
    """axolotl 3772: the file holds the first rank's share of each B, the rest is zeros."""

    def only_own(lazy: LazyTensor) -> dict[str, Tensor]:
        gathered = {}
        for leaf in lazy.leaves():
            assert isinstance(leaf, StateTensor)
            gathered[leaf.name] = torch.zeros(leaf.shape)
            gathered[leaf.name][slices(stored_box(leaf.tensor))] = local_tensor(leaf.tensor)
        return gathered

    mock.patch.object(write, "gather", only_own).start()


@pytest.mark.parametrize("bug", [_concatenate_blocks_of_ranks, _zeros_for_other_ranks])
def test_a_file_with_scrambled_or_missing_experts_is_seen(
    bug: Callable[[nn.Module, Mesh], None], tmp_path: Path
) -> None:
    run = tiny_peft_run("qwen3_moe", tmp_path / "start")
    trained = _train_and_save(run, (2, 2, 1), tmp_path / "saved", bug)
    assert peft_error(run, tmp_path / "saved", trained) > 1e-2


def _of_expert_r(directory: Path) -> tuple[dict[str, tuple[int, float]], Tensor]:
    """Rank and scaling of each target, and the logits after some steps; the adapter goes to `directory`."""
    model: Any = tiny_model("qwen3_moe")
    mesh = em.init_mesh(em.ParallelConfig(ep=2))
    patterns = {"rank_pattern": {r"layers\.1\.mlp\.experts\.down_proj": 3}}
    lora = em.LoraConfig(r=4, alpha=8, expert_r=2, targets=("attention", "experts", "router"), **patterns)
    em.parallelize(model, mesh, lora=lora)
    take_steps(model, mesh, [rows_of_step(step, ()) for step in range(3)])
    em.save_adapter(model, directory)
    plan = sharded(model).lora_plan
    assert plan is not None
    return {target.weight: (target.r, target.scaling) for target in plan.targets}, logits_of(model)


def test_experts_have_the_rank_of_expert_r_unless_a_pattern_says_another(tmp_path: Path) -> None:
    (ranks, trained), *_ = shared_ranks(_of_expert_r, 2, tmp_path / "saved")
    layers = [f"model.layers.{number}" for number in (0, 1)]
    others = [rank for name, rank in ranks.items() if ".experts." not in name]
    assert (len(others), set(others)) == (10, {(4, 2.0)})
    assert [ranks[f"{layer}.mlp.experts.gate_up_proj"] for layer in layers] == [(2, 4.0), (2, 4.0)]
    assert [ranks[f"{layer}.mlp.experts.down_proj"] for layer in layers] == [(2, 4.0), (3, 8 / 3)]
    base: Any = tiny_model("qwen3_moe")
    assert float((logits_of(base) - trained).norm() / trained.norm()) > 1e-3
    logits = logits_of(peft.PeftModel.from_pretrained(base, str(tmp_path / "saved")))
    assert float((logits - trained).norm() / trained.norm()) <= 1e-5


def _filled(directory: Path) -> dict[str, tuple[float, ...]]:
    model: Any = tiny_model("qwen3_moe")
    route_by_half(model)
    mesh = em.init_mesh(em.ParallelConfig(ep=2))
    em.parallelize(model, mesh, lora=em.LoraConfig(r=4, targets=("experts",)))
    take_steps(model, mesh, [rows_of_step(0, (0, 1, 2, 3))])
    return em.save_adapter(model, directory).filled


def test_experts_that_saw_tokens_are_filled_and_the_others_are_still_zero(tmp_path: Path) -> None:
    for filled in shared_ranks(_filled, 4, tmp_path / "saved"):
        assert len(filled) == 4  # two layers of two parameters
        for shares in filled.values():
            assert all(share > 0.9 for share in shares[:2])
            assert shares[2:] == (0.0,) * 6


def _untrained(directory: Path) -> tuple[str, ...]:
    model: Any = random_model("DeepseekV32ForCausalLM", "deepseek_v32")
    mesh = em.init_mesh(em.ParallelConfig(ep=2))
    with mock.patch.object(targets, "without_gradient", return_value=frozenset()):
        em.parallelize(model, mesh, lora=em.LoraConfig(r=4, targets=("attention", "experts")))
    ids = torch.arange(3, 20)[None]
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    em.causal_lm_loss(model, {"input_ids": ids, "labels": ids}, target_tokens=32).backward()
    optimizer.step()
    saved = em.save_adapter(model, directory)
    said = list(adapter_lines(saved))
    assert len([line for line in said if line.endswith("no gradient has moved it")]) == len(saved.untrained)
    return saved.untrained


def test_what_no_gradient_has_moved_is_said(tmp_path: Path) -> None:
    leaves = ("wq_b", "wk", "weights_proj")
    indexers = [f"model.layers.{n}.self_attn.indexer.{leaf}" for n in range(2) for leaf in leaves]
    for untrained in shared_ranks(_untrained, 2, tmp_path / "idle"):
        assert list(untrained) == indexers


def _save_as_a_whole_model(directory: Path) -> None:
    model: Any = tiny_model("qwen3_moe")
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=2)), lora=em.LoraConfig(r=2))
    with refused("model.has-adapters", naming="em.save_adapter"):
        em.save_model(model, directory / "model")


def test_adapters_are_not_lost_by_saving_the_frozen_model(tmp_path: Path) -> None:
    shared_ranks(_save_as_a_whole_model, 2, tmp_path)
    assert not any(tmp_path.iterdir())


def _save_without_adapters(directory: Path) -> None:
    model: Any = tiny_model("qwen3_moe")
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=1)))
    em.save_adapter(model, directory)


def test_a_model_without_adapters_is_refused(tmp_path: Path) -> None:
    with refused_on_ranks("model.no-adapters"):
        shared_ranks(_save_without_adapters, 1, tmp_path / "saved")
