"""Experts on any rank: a job with `moe.placement` equals the unsharded model, and nothing it writes has its order."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import expertmesh as em
from expertmesh.adapters.start import content_hash
from expertmesh.anatomy import describe
from expertmesh.config import OptimConfig
from expertmesh.distributed.mesh import Mesh
from expertmesh.experts.layer import Copies, layer_of
from expertmesh.experts.placement import balanced, copied_loads, slots_from, write_placement
from expertmesh.weights.audit import audit_weights
from tests.adapters.reference import tiny_peft_run, train_adapters
from tests.checkpoint.tiny import load, save
from tests.support.collectives import Collectives
from tests.support.errors import refused
from tests.support.models import tiny_model
from tests.support.placements import drawn
from tests.support.ranks import shared_ranks
from tests.support.reference import Distance, reference, train_sharded
from tests.training.given_gradients import Case, sharded_steps, whole_steps

# Copies are then exchanged once a step, by `em.forward_backward`; without it in each forward.
IN_A_STEP = {"accumulate": "by_micro_batch"}
FAMILY = "deepseek_v3"  # shared experts, dense layers, a correction bias in the router


def _train(
    family: str, axes: dict[str, int], world: int, path: Path, dtype: torch.dtype = torch.float32, **options: Any
) -> list[Distance]:
    expected, parallel = reference(family, dtype), em.ParallelConfig(**axes)
    moe = drawn(path / "placement.json", expected.model, axes["ep"])
    return shared_ranks(lambda: train_sharded(expected, parallel, moe=moe, **options), world)


@pytest.mark.parametrize(
    ("family", "world", "axes", "dtype"),
    [
        pytest.param("qwen3_moe", 2, {"ep": 2}, torch.float32, marks=pytest.mark.slow(why="in fp64 it stays")),
        ("qwen3_moe", 4, {"ep": 2}, torch.float64),
        ("deepseek_v3", 4, {"ep": 4, "tp": 2}, torch.float32),
        ("mixtral", 4, {"ep": 2, "pp": 2}, torch.float32),
        pytest.param(
            "gpt_oss", 4, {"ep": 2, "replicate": 2}, torch.float32, marks=pytest.mark.slow(why="three layouts stay")
        ),
        pytest.param("qwen3_moe", 8, {"ep": 4, "cp": 2}, torch.float32, marks=pytest.mark.slow(why="eight ranks")),
    ],
)
def test_experts_on_any_rank_equal_the_unsharded_model(
    family: str, world: int, axes: dict[str, int], dtype: torch.dtype, tmp_path: Path
) -> None:
    for distance in _train(family, axes, world, tmp_path, dtype):
        distance.check(1e-5 if dtype == torch.float32 else 1e-10)


def test_two_experts_exchanged_in_the_placement_turn_it_red(tmp_path: Path) -> None:
    def exchange(model: nn.Module, mesh: Mesh) -> None:
        slot_E = layer_of(model.get_submodule("model.layers.0.mlp.experts")).slot_E
        assert slot_E is not None
        slot_E[:2] = slot_E[:2].flip(0)

    for distance in _train("qwen3_moe", {"ep": 2}, 2, tmp_path, tamper=exchange):
        assert distance.gradient[0] > 1e-3


def test_adapters_of_experts_on_any_rank_equal_stock_peft(tmp_path: Path) -> None:
    run = tiny_peft_run("qwen3_moe", tmp_path / "adapter")
    moe = drawn(tmp_path / "placement.json", run.initial, 2)
    for distance in shared_ranks(lambda: train_adapters(run, em.ParallelConfig(ep=2), moe=moe), 4):
        distance.check(1e-5)


def _copied(path: Path, model: nn.Module, ep: int, replicas: int) -> em.MoeConfig:
    """Write a placement with copies by loads that differ widely, and return the section that names it."""
    random, loads = torch.Generator().manual_seed(0), {}
    for spec in describe(model).experts:
        loads[spec.name] = (torch.randint(1, 99, (spec.num_experts,), generator=random) ** 3).tolist()
    write_placement(balanced(loads, ep, replicas), path)
    return em.MoeConfig(placement=str(path), replicas=replicas)


@pytest.mark.slow_cases(r"full-(qwen3_moe|gpt_oss)-.*|none-deepseek_v3-.*", why="pairwise with recomputation")
@pytest.mark.parametrize(
    ("family", "world", "axes", "replicas", "dtype"),
    [
        ("qwen3_moe", 2, {"ep": 2}, 3, torch.float64),
        ("deepseek_v3", 4, {"ep": 4}, 2, torch.float32),
        ("gpt_oss", 4, {"ep": 2, "pp": 2}, 1, torch.float32),
        pytest.param(
            "olmoe", 4, {"ep": 4, "tp": 2}, 2, torch.float32, marks=pytest.mark.slow(why="three layouts stay")
        ),
    ],
)
@pytest.mark.parametrize("mode", ["none", "full"])
def test_adapters_of_copied_experts_equal_stock_peft(
    family: str, world: int, axes: dict[str, int], replicas: int, dtype: torch.dtype, mode: str, tmp_path: Path
) -> None:
    run = tiny_peft_run(family, tmp_path / "adapter", dtype=dtype)
    moe = _copied(tmp_path / "placement.json", run.initial, axes["ep"], replicas)
    options: dict[str, Any] = {"moe": moe, "activation_checkpointing": mode, "order": IN_A_STEP}
    for distance in shared_ranks(lambda: train_adapters(run, em.ParallelConfig(**axes), **options), world):
        distance.check(1e-5 if dtype == torch.float32 else 1e-10)


def test_adapters_that_come_in_a_peft_model_may_be_on_copied_experts(tmp_path: Path) -> None:
    run = tiny_peft_run("qwen3_moe", tmp_path / "adapter")
    moe = _copied(tmp_path / "placement.json", run.initial, 2, 3)
    for distance in shared_ranks(lambda: train_adapters(run, em.ParallelConfig(ep=2), moe=moe, as_peft_model=True), 2):
        distance.check(1e-5)


@pytest.mark.parametrize("replicas", [0, 1])
def test_rows_travel_node_by_node_to_placed_experts(
    replicas: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    run = tiny_peft_run("qwen3_moe", tmp_path / "adapter")
    moe = _copied(tmp_path / "placement.json", run.initial, 4, replicas).model_copy(update={"dispatch": "hierarchical"})
    for distance in shared_ranks(lambda: train_adapters(run, em.ParallelConfig(ep=4), moe=moe), 4):
        distance.check(1e-5)


def _without_gradients(copies: Copies) -> None:
    copies.exchanged = torch.no_grad()(copies.exchanged)  # type: ignore[method-assign]


def _stale(copies: Copies) -> None:
    exchange, kept = copies.exchanged, list[torch.Tensor]()

    def first(own: Any) -> Any:
        fresh = exchange(own)
        kept.extend([] if kept else [tensor.detach().clone() for tensor in fresh])
        return [tensor + (old - tensor).detach() for tensor, old in zip(fresh, kept, strict=True)]

    copies.exchanged = first  # type: ignore[method-assign]


def _other_experts(copies: Copies) -> None:
    for storage in copies.storages.values():
        storage[-2:] = storage[-2:].flip(0)


@pytest.mark.parametrize("order", [IN_A_STEP, None], ids=["in a step", "by forwards"])
@pytest.mark.parametrize("bug", [_without_gradients, _stale, _other_experts])
def test_copies_that_are_not_their_experts_turn_it_red(
    bug: Callable[[Copies], None], order: dict[str, Any] | None, tmp_path: Path
) -> None:
    run = tiny_peft_run("qwen3_moe", tmp_path / "adapter")
    moe = _copied(tmp_path / "placement.json", run.initial, 2, 3)

    def tamper(model: nn.Module, mesh: Mesh) -> None:
        copies = layer_of(model.get_submodule("model.layers.0.mlp.experts")).copies
        assert copies is not None
        bug(copies)

    train = partial(train_adapters, run, em.ParallelConfig(ep=2), moe=moe, tamper=tamper, order=order)
    for distance in shared_ranks(train, 2):
        assert max(distance.gradient[0], distance.weight[0]) > 1e-4


@pytest.mark.parametrize("order", ["by_micro_batch", "by_layer"])
def test_adapters_of_copies_travel_once_a_step(order: Any, tmp_path: Path) -> None:
    model: Any = tiny_model(FAMILY)
    model.save_pretrained(tmp_path / "model")
    copied = _copied(tmp_path / "placement.json", model, 2, 3)

    def all_to_alls(moe: em.MoeConfig, micro_batches: int) -> int:
        mesh = em.init_mesh(em.ParallelConfig(ep=2))
        lora = em.LoraConfig(r=2, targets=("experts",))
        sharded = em.load_model(tmp_path / "model", mesh, moe=moe, lora=lora, activation_checkpointing="full")
        ids_BS = torch.arange(12).view(2, 6) + mesh.data_rank
        batches = [{"input_ids": ids_BS, "labels": ids_BS}] * micro_batches
        with Collectives() as found:
            em.forward_backward(sharded, batches, target_tokens=40, accumulate=order)
        return found.counts["alltoall"]

    layers = len(describe(model).experts)
    for micro_batches in (1, 3):
        counts = (shared_ranks(partial(all_to_alls, moe, micro_batches), 2) for moe in (copied, em.MoeConfig()))
        with_copies, without = counts
        assert [more - fewer for more, fewer in zip(with_copies, without, strict=True)] == [2 * layers] * 2


def test_tokens_of_a_copied_expert_go_to_all_that_hold_it_by_turns() -> None:
    order, copies = (0, 1, 2, 3, 4, 5, 6, 7), ((6,), (0,), (0,), (0,))
    assert [slots_from(rank, order, copies)[0] for rank in range(4)] == [[0], [5], [8], [11]]
    assert [slots_from(rank, order, copies)[6] for rank in range(4)] == [[2], [2, 9], [2, 9], [9]]
    assert copied_loads([4, 0, 0, 0, 0, 0, 2, 0], order, copies) == [2, 1, 1, 2]


def test_what_is_loaded_and_written_has_the_models_numbers(tmp_path: Path) -> None:
    model: Any = tiny_model(FAMILY)
    model.save_pretrained(tmp_path / "model")
    lora = em.LoraConfig(r=2, targets=("experts",), dropout=0.5)

    def loaded_and_saved(name: str, moe: em.MoeConfig | None) -> tuple[str, list[str], float]:
        mesh = em.init_mesh(em.ParallelConfig(ep=2))
        whole = em.load_model(tmp_path / "model", mesh, moe=moe)
        audited = audit_weights(whole, tmp_path / "model", "full")
        em.save_model(whole, tmp_path / f"{name}-model")
        adapted = em.load_model(tmp_path / "model", mesh, moe=moe, lora=lora)
        ids_BS = torch.arange(12).view(2, 6)
        batch = {"input_ids": ids_BS, "labels": ids_BS, "row_numbers": torch.arange(2) + 2 * mesh.data_rank}
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter += parameter.abs() + 0.01
        loss = em.causal_lm_loss(adapted, batch, target_tokens=40)
        em.save_adapter(adapted, tmp_path / f"{name}-adapter")
        names = [digest for experts in audited.experts for digest in experts.sha256]
        return content_hash(adapted), names, float(loss)

    results = []
    for name in ("plain", "placed"):
        moe = None if name == "plain" else drawn(tmp_path / "placement.json", model, 2)
        results.append(shared_ranks(lambda name=name, moe=moe: loaded_and_saved(name, moe), 4))
    plain, placed = results
    for one, other in zip(plain, placed, strict=True):
        assert one[:2] == other[:2]
        assert other[2] == pytest.approx(one[2], rel=1e-6)  # dropout masks follow experts
    for kind, file in (("model", "model.safetensors"), ("adapter", "adapter_model.safetensors")):
        contents = [(tmp_path / f"{name}-{kind}" / file).read_bytes() for name in ("plain", "placed")]
        assert contents[0] == contents[1], kind


@pytest.mark.parametrize(
    "optim",
    [OptimConfig(name="adamw", learning_rate=1e-2), OptimConfig(name="adamw_8bit", learning_rate=1e-2)],
    ids=lambda optim: optim.name,
)
def test_optimizers_round_an_expert_alike_wherever_it_is(optim: OptimConfig, tmp_path: Path) -> None:
    params = "bfloat16" if optim.name == "adamw" else "float32"
    changes = {} if optim.name == "adamw" else {"hidden_size": 64, "moe_intermediate_size": 320}
    case = Case(optim, params, changes=changes)
    placed = Case(optim, params, changes=changes, moe=drawn(tmp_path / "placement.json", case.model(), 2))
    expected = whole_steps(case, 3)
    for state in shared_ranks(sharded_steps, 4, placed, em.ParallelConfig(ep=2), range(3)):
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_a_checkpoint_is_the_same_state_under_any_placement(tmp_path: Path) -> None:
    one, other = (drawn(tmp_path / f"{seed}.json", tiny_model(FAMILY), 2, seed) for seed in (1, 2))
    parallel, path = em.ParallelConfig(ep=2), tmp_path / "checkpoints" / "step-00000002"
    state = shared_ranks(save, 4, FAMILY, parallel, 2, path.parent, one)[0]
    onward = shared_ranks(load, 1, FAMILY, em.ParallelConfig(ep=1), path, [2])[0][1]
    for moe in (one, other, None):
        for loaded, later in shared_ranks(load, 4, FAMILY, parallel, path, [2], moe):
            assert all(torch.equal(state[name], loaded[name]) for name in state)
            assert max(float((later[n] - t).norm() / t.norm().clamp_min(1e-12)) for n, t in onward.items()) <= 1e-5


def test_a_manifest_that_names_other_experts_than_its_files_is_refused(tmp_path: Path) -> None:
    moe = drawn(tmp_path / "placement.json", tiny_model(FAMILY), 2)
    shared_ranks(save, 2, FAMILY, em.ParallelConfig(ep=2), 1, tmp_path / "checkpoints", moe)
    manifest = tmp_path / "checkpoints" / "step-00000001" / "manifest.json"
    text = manifest.read_text()
    first = text.index('"experts":[') + len('"experts":[')
    one, two = text[first : text.index("]", first)].split(",")[:2]
    manifest.write_text(f"{text[:first]}{text[first:].replace(f'{one},{two}', f'{two},{one}', 1)}")
    with pytest.raises(AssertionError, match="other experts"):
        shared_ranks(load, 1, FAMILY, em.ParallelConfig(ep=1), manifest.parent)


def test_what_cannot_be_placed_is_refused(tmp_path: Path) -> None:
    moe = drawn(tmp_path / "placement.json", tiny_model("qwen3_moe"), 2)
    others = drawn(tmp_path / "other.json", tiny_model(FAMILY), 2)

    def parallelized(ep: int, moe: em.MoeConfig) -> None:
        em.parallelize(tiny_model("qwen3_moe"), em.init_mesh(em.ParallelConfig(ep=ep)), moe=moe)

    def refusals() -> None:
        with refused("moe.placement-unsupported", naming="ep 1"):
            parallelized(1, moe)
        with refused("moe.balanced-placement-of-a-run", naming="balanced"):
            parallelized(2, em.MoeConfig(placement="balanced"))
        with refused("moe.replicas-unsupported", naming="add lora"):
            parallelized(2, moe.model_copy(update={"replicas": 1}))
        placed = em.parallelize(tiny_model("qwen3_moe"), em.init_mesh(em.ParallelConfig(ep=2)), moe=moe)
        with refused("model.placed-state-dict"):
            placed.state_dict()
        with refused("file.unreadable"):
            parallelized(2, em.MoeConfig(placement=str(tmp_path / "none.json")))
        with refused("placement.other-model"):
            parallelized(2, others)

    shared_ranks(refusals, 2)
    with pytest.raises(AssertionError, match="for ep 2"):
        shared_ranks(parallelized, 4, 4, moe)
