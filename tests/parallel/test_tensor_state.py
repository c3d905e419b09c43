"""Under tensor parallelism files, checkpoints and adapters are what they are without: nothing outside knows of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import expertmesh as em
from expertmesh.training.run import train
from tests.adapters.reference import TARGETS, random_adapter, tiny_peft_run, train_adapters, trainables, worst
from tests.adapters.test_dropout import ROWS, take_steps
from tests.checkpoint.tiny import Job, load, save
from tests.parallel.test_precision import BF16, IDS, gradients_of, joint_error
from tests.parallel.test_precision import TARGETS as TOKENS
from tests.support.models import tiny_model
from tests.support.ranks import run_ranks, shared_ranks
from tests.training.tiny_run import (
    loads_of_experts,
    metrics,
    rows_without_times,
    run_config,
    train_steps,
    weights,
    write_inputs,
)

FAMILY = "deepseek_v3"
# (world size, layout)
TP = (4, em.ParallelConfig(tp=2, ep=2))
LAYOUTS = {
    "fsdp4": (4, em.ParallelConfig(ep=4)),
    "tp2-replicate2": (4, em.ParallelConfig(tp=2, ep=1, replicate=2)),
    "tp4": (4, em.ParallelConfig(tp=4, ep=4)),
    "one": (1, em.ParallelConfig(ep=1)),
}
State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State, State]:
    """A checkpoint after two steps, its state, and that after two more from it."""
    directory = tmp_path_factory.mktemp("checkpoints")
    path = directory / "step-00000002"

    def both() -> tuple[State, State]:
        return save(FAMILY, TP[1], 2, directory), load(FAMILY, TP[1], path, [2, 3])[1]

    return (path, *shared_ranks(both, TP[0])[0])


@pytest.mark.slow(why="checkpoint/test_layouts.py has other layouts; reading and writing under tp stays")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_go_on_from_a_checkpoint_of_tp(
    saved: tuple[Path, State, State], tmp_path: Path, layout: str
) -> None:
    path, state, onward = saved
    world, parallel = LAYOUTS[layout]

    def there() -> tuple[State, State]:
        job = Job(tiny_model(FAMILY, seed=9), parallel)
        em.load_checkpoint(job.model, job.optimizer, path)
        loaded = job.state()
        em.save_checkpoint(job.model, job.optimizer, tmp_path, step=2, state={"seen": 2})
        job.train([2, 3])
        return loaded, job.state()

    def and_back() -> State:
        return load(FAMILY, TP[1], tmp_path / "step-00000002")[0]

    if world == TP[0]:
        (loaded, later), back = shared_ranks(lambda: (there(), and_back()), world)[0]
    else:
        loaded, later = shared_ranks(there, world)[0]
        back = shared_ranks(and_back, TP[0])[0]
    assert all(torch.equal(state[name], loaded[name]) for name in state)
    assert worst(later, onward)[0] <= 1e-5
    assert all(torch.equal(state[name], back[name]) for name in state)


def _load_and_save(source: Path, target: Path) -> None:
    mesh = em.init_mesh(TP[1])
    model = em.load_model(source, mesh, audit="full")
    em.save_model(model, target)


def test_weights_are_read_and_written_as_they_are_in_the_files(tmp_path: Path) -> None:
    model: Any = tiny_model(FAMILY, tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "source")
    shared_ranks(_load_and_save, TP[0], tmp_path / "source", tmp_path / "target")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


@pytest.mark.slow_cases(r"(deepseek_v3-2|gpt_oss-2|olmoe-1)", why="one family stays")
@pytest.mark.parametrize(("family", "ep"), [("deepseek_v3", 2), ("qwen3_moe", 4), ("olmoe", 1), ("gpt_oss", 2)])
def test_adapters_on_attention_and_experts_equal_stock_peft(family: str, ep: int, tmp_path: Path) -> None:
    run = tiny_peft_run(family, tmp_path)
    for distance in shared_ranks(lambda: train_adapters(run, em.ParallelConfig(tp=2, ep=ep), 2), 4):
        distance.check(1e-5)


@pytest.mark.slow(why="adapters on attention and experts stay")
def test_adapters_on_a_split_vocabulary_equal_stock_peft(tmp_path: Path) -> None:
    run = tiny_peft_run("qwen3_moe", tmp_path, ["lm_head", "k_proj"], ["mlp.experts.down_proj"])
    for distance in shared_ranks(lambda: train_adapters(run, em.ParallelConfig(tp=2, ep=2), 2), 2):
        distance.check(1e-5)


@pytest.mark.slow(why="adapters/test_dropout.py compares layouts")
def test_dropout_drops_the_same_as_without_tp(tmp_path: Path) -> None:
    random_adapter(tiny_model(FAMILY), tmp_path, *TARGETS[FAMILY])

    def trained(parallel: em.ParallelConfig, **options: Any) -> State:
        model: Any = tiny_model(FAMILY)
        mesh = em.init_mesh(parallel)
        em.parallelize(model, mesh, lora=em.LoraConfig(from_adapter=str(tmp_path), dropout=0.3), **options)
        take_steps(model, mesh, ROWS, 2)
        return trainables(model)

    def both() -> list[State]:
        parallel = em.ParallelConfig(tp=2, ep=2)
        return [trained(parallel, activation_checkpointing=checkpointed) for checkpointed in (False, True)]

    alone = shared_ranks(lambda: trained(em.ParallelConfig(ep=1)), 1)[0]
    for split in shared_ranks(both, 2)[0]:
        assert worst(split, alone)[0] <= 1e-5


def _sharded_in_bf16(model: Any) -> State:
    mesh = em.init_mesh(em.ParallelConfig(tp=2, ep=2), num_experts=8)
    em.parallelize(model, mesh, precision=BF16)
    for ids in IDS[mesh.data_rank :: mesh.layout.data_ranks]:
        em.causal_lm_loss(model, {"input_ids": ids, "labels": ids}, target_tokens=TOKENS).backward()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    return {
        name: parameter.grad.full_tensor() for name, parameter in model.named_parameters() if parameter.requires_grad
    }


@pytest.mark.slow_cases(r"(deepseek_v3|ernie4_5_moe)", why="one family stays")
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "ernie4_5_moe"])
def test_bf16_compute_is_no_further_off_than_the_unsharded_bf16_model(family: str) -> None:
    """ERNIE keeps its router in fp32, inside blocks that tp splits."""
    model = tiny_model(family, initializer_range=0.1)
    exact = gradients_of(tiny_model(family, initializer_range=0.1))
    in_bf16 = tiny_model(family, initializer_range=0.1).to(torch.bfloat16)
    for name, parameter in in_bf16.named_parameters():
        if family == "ernie4_5_moe" and name.endswith("gate.weight"):
            parameter.data = model.get_parameter(name).data.clone()
    unsharded = gradients_of(in_bf16)
    got = shared_ranks(_sharded_in_bf16, 4, model)[0]
    assert 0 < joint_error(got, exact) <= 1.5 * joint_error(unsharded, exact)


@pytest.mark.slow(why="test_tensor.py and the checkpoint across tp stay")
def test_a_run_with_tp_equals_the_run_without_it_and_goes_on_without_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    inputs = write_inputs(tmp_path / "inputs")
    run_ranks(train, 1, run_config(inputs, tmp_path / "one", "parallel.ep=1"))
    run_ranks(train, 2, run_config(inputs, tmp_path / "tp", "parallel.tp=2", "parallel.ep=2"))
    plan = capfd.readouterr().out
    assert "tp         2 × self_attn by heads: columns of q_proj, k_proj, v_proj, rows of o_proj" in plan
    for row, want in zip(metrics(tmp_path / "tp"), metrics(tmp_path / "one"), strict=True):
        for key in ("loss", "grad_norm", "learning_rate", "target_tokens"):
            assert row[key] == pytest.approx(want[key], rel=1e-5), (key, row["step"])
        assert loads_of_experts(row) == loads_of_experts(want)
    assert worst(weights(tmp_path / "tp"), weights(tmp_path / "one"))[0] <= 1e-4
    config = run_config(inputs, tmp_path / "resumed", "parallel.tp=2", "parallel.ep=2", "checkpoint.every_steps=1")
    run_ranks(train_steps, 2, config, 2)
    run_ranks(train, 2, run_config(inputs, tmp_path / "resumed", "parallel.ep=2", "checkpoint.every_steps=1"))
    for row, want in zip(rows_without_times(tmp_path / "resumed"), metrics(tmp_path / "one"), strict=True):
        assert row["loss"] == pytest.approx(want["loss"], rel=1e-5)
