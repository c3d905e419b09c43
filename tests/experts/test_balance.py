"""Correction biases move as DeepSeek-V3's rule says, once per step, by the counts of the whole global batch.

The reference is the rule in plain torch on the unsharded model: count what each router chose for real tokens of all
rows, step AdamW, add the rate where an expert got less than the mean and subtract it where it got more.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM

import expertmesh as em
from expertmesh.anatomy import describe
from expertmesh.experts import layer as layer_module
from expertmesh.experts.balance import aux_loss_refusal, balance_of
from expertmesh.experts.layer import layer_of
from expertmesh.training.reporting.metrics import expert_load
from expertmesh.training.run import train
from tests.support.errors import refused, refused_on_ranks
from tests.support.models import tiny_config, tiny_model
from tests.support.one_launch import Launched, one_launch
from tests.support.ranks import shared_ranks
from tests.support.reference import OPTIM, Row, padded
from tests.training.tiny_run import loads_of_experts, metrics, run_config, train_steps, weights, write_inputs

RATE, STEPS = 0.02, 4
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def _rows(step: int) -> list[Row]:
    generator = torch.Generator().manual_seed(step)
    ids = [torch.randint(96, (6 + row,), generator=generator) for row in range(8)]
    return [(each, each) for each in ids]


@dataclass(frozen=True, slots=True)
class Expected:
    model: nn.Module
    counts: list[torch.Tensor]
    biases: list[torch.Tensor]
    weights: dict[str, torch.Tensor]


@functools.cache
def expected(family: str = "deepseek_v3", last: str = BIAS) -> Expected:
    """`counts` and `biases` are those of the layer that the bias `last` belongs to; all layers' biases move."""
    initial = tiny_model(family)
    model = copy.deepcopy(initial)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **OPTIM)
    tensors = model.state_dict(keep_vars=True)
    chosen: dict[str, list[torch.Tensor]] = {name: [] for name in tensors if name.endswith("correction_bias")}
    for name in chosen:
        model.get_submodule(name.partition(".gate")[0] + ".gate").register_forward_hook(_keeper(chosen[name]))
    counts, biases = [], []
    for step in range(STEPS):
        rows = _rows(step)
        for ids, _ in rows:
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
            total = sum(len(ids) - 1 for ids, _ in rows)
            (F.cross_entropy(logits[:-1], ids[1:], reduction="sum") / total).backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, indices in chosen.items():
            count_E = torch.bincount(torch.cat(indices).flatten(), minlength=8)
            with torch.no_grad():
                tensors[name] += RATE * torch.sign(count_E.double().mean() - count_E.double()).float()
            indices.clear()
        counts.append(count_E)
        biases.append(tensors[last].detach().clone())
    assert name == last  # both families have the bias last in the last layer
    return Expected(initial, counts, biases, {n: p.detach().clone() for n, p in model.named_parameters()})


def _keeper(indices: list[torch.Tensor]) -> Callable[..., None]:
    return lambda module, args, output: indices.append(output[2])


@dataclass(frozen=True, slots=True)
class Found:
    loads: list[torch.Tensor]
    biases: list[torch.Tensor]
    weight: float


def train_balanced(
    want: Expected, parallel: em.ParallelConfig, micro_batch: int, name: str = BIAS, bug: str = "", **options: Any
) -> Found:
    model = copy.deepcopy(want.model)
    mesh = em.init_mesh(parallel)
    em.parallelize(model, mesh, moe=em.MoeConfig(bias_update_rate=RATE), **options)
    experts = model.get_submodule(describe(model).experts[-1].name)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **OPTIM)
    loads, biases = [], []
    if bug == "recomputed":
        mock.patch.object(layer_module, "is_recomputing", return_value=False).start()
    if bug == "local":
        mock.patch.object(dist, "all_reduce", return_value=None).start()
    for step in range(STEPS):
        rows = _rows(step)
        mine = rows[mesh.data_rank :: mesh.layout.data_ranks]
        total = sum(len(ids) - 1 for ids, _ in rows)
        for start in range(0, len(mine), micro_batch):
            em.causal_lm_loss(model, padded(mine[start : start + micro_batch]), target_tokens=total).backward()
            if bug == "micro-batch":
                em.update_router_bias(model)
        optimizer.step()
        optimizer.zero_grad()
        if bug != "micro-batch":
            em.update_router_bias(model)
        load_E = layer_of(experts).tokens_per_expert.pop()
        assert load_E is not None
        torch.distributed.all_reduce(load_E)
        loads.append(load_E)
        biases.append(_whole(model.state_dict(keep_vars=True)[name]))
    got = {n: _whole(p) for n, p in model.named_parameters()}
    errors = {n: float((got[n] - w).norm() / w.norm().clamp_min(1e-12)) for n, w in want.weights.items()}
    return Found(loads, biases, max(errors.values()))


def _whole(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


def _four_steps(layout: tuple[int, int, int, int], mode: str) -> tuple[int, Callable[[], Found]]:
    world, ep, replicate, micro_batch = layout
    parallel, want = em.ParallelConfig(ep=ep, replicate=replicate), expected()
    return world, lambda: train_balanced(want, parallel, micro_batch, activation_checkpointing=mode)


# (world size, ep, replicate, rows of a micro-batch)
@pytest.mark.slow_cases(r"layout2-selective", why="replicas of recomputed blocks stay")
@pytest.mark.slow_cases(r"layout[01]-none", why="recomputed blocks stay, in two groups and with replicas")
@pytest.mark.slow_cases(r"layout3-.*", why="four ranks with replicas stay")
@pytest.mark.parametrize(
    ("layout", "mode"),
    [
        ((1, 1, 1, 2), "none"),
        ((2, 2, 1, 4), "none"),
        ((2, 2, 1, 2), "selective"),
        ((4, 2, 1, 1), "none"),
        ((4, 2, 2, 2), "full"),
    ],
)
@one_launch(_four_steps)
def test_four_steps_move_the_bias_as_the_rule_does_and_alike_on_every_rank(
    launched: Launched, layout: tuple[int, int, int, int], mode: str
) -> None:
    want = expected()
    for found in launched():
        assert all(torch.equal(got, count) for got, count in zip(found.loads, want.counts, strict=True))
        assert all(torch.equal(got, bias) for got, bias in zip(found.biases, want.biases, strict=True))
        assert found.weight <= 1e-5


def test_a_bias_that_is_a_sharded_parameter_moves_alike() -> None:
    name = "model.layers.1.mlp.gate.moe_statics.e_score_correction_bias"
    want = expected("ernie4_5_moe", name)
    for found in shared_ranks(lambda: train_balanced(want, em.ParallelConfig(ep=2), 4, name), 2):
        assert all(torch.equal(got, bias) for got, bias in zip(found.biases, want.biases, strict=True))
        assert found.weight <= 1e-5


@pytest.mark.parametrize("bug", ["micro-batch", "local", "recomputed"])
def test_a_planted_bug_turns_the_comparison_red(bug: str) -> None:
    want = expected()
    options = {"activation_checkpointing": bug == "recomputed"}
    for found in shared_ranks(lambda: train_balanced(want, em.ParallelConfig(ep=2), 2, bug=bug, **options), 2):
        if bug == "recomputed":
            assert (found.loads[0] > want.counts[0]).all()
        else:
            assert any(not torch.equal(got, bias) for got, bias in zip(found.biases, want.biases, strict=True))


def _skip() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    model = copy.deepcopy(expected().model)
    em.parallelize(model, em.init_mesh(em.ParallelConfig(ep=1)), moe=em.MoeConfig(bias_update_rate=RATE))
    bias, biases = model.state_dict()[BIAS], []
    for step, skipped in ((1, True), (0, False)):
        biases.append(bias.clone())
        for row in _rows(step):
            em.causal_lm_loss(model, padded([row]), target_tokens=60)
        em.update_router_bias(model, skipped=skipped)
    return biases[0], biases[1], bias


def test_a_skipped_step_moves_nothing_and_its_counts_are_forgotten() -> None:
    before, after, moved = shared_ranks(_skip, 1)[0]
    assert torch.equal(before, after)
    assert torch.equal(moved, expected().biases[0])


@pytest.mark.slow(why="training/test_resume.py stays")
def test_a_resumed_run_has_the_biases_of_the_uninterrupted_one_and_exports_them(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path / "inputs", "deepseek_v3")
    options = [f"moe.bias_update_rate={RATE}", "train.max_steps=4", "train.num_epochs=2", "parallel.ep=2"]
    whole, broken = (run_config(inputs, tmp_path / name, *options) for name in ("whole", "broken"))
    shared_ranks(train, 2, whole)
    shared_ranks(train_steps, 2, broken, 2)
    shared_ranks(train, 2, broken)
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "broken")
    assert all(torch.equal(first[name], second[name]) for name in first)
    published: Any = AutoModelForCausalLM.from_pretrained(inputs / "model")
    exported: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "model")
    moved = (exported.get_buffer(BIAS) - published.get_buffer(BIAS)) / RATE
    assert torch.allclose(moved, moved.round(), atol=1e-4)
    assert 0 < moved.abs().max() <= 4


@pytest.mark.slow(why="four steps on every rank stay")
def test_the_trainer_reports_router_losses_apart_from_the_token_loss(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path / "inputs")
    options = ["moe.aux_loss_coef=0.5", "moe.z_loss_coef=0.01", "data.packing=true", "data.max_length=64"]
    options += ["train.global_batch_size=4", "train.max_steps=null"]  # one epoch; ranks without rows in its last step
    for name, world in (("one", 1), ("four", 4)):
        shared_ranks(train, world, run_config(inputs, tmp_path / name, *options))
    shared_ranks(train, 1, run_config(inputs, tmp_path / "off", *options[2:]))
    one, four, off = (metrics(tmp_path / name) for name in ("one", "four", "off"))
    keys = ("loss", "aux_loss", "z_loss", "grad_norm")
    assert [[row[key] for key in keys] for row in four] == [pytest.approx([r[k] for k in keys], rel=1e-5) for r in one]
    assert [loads_of_experts(row) for row in four] == [loads_of_experts(row) for row in one]
    assert one[0]["loss"] == pytest.approx(off[0]["loss"], rel=1e-6)
    assert one[0]["grad_norm"] != pytest.approx(off[0]["grad_norm"], rel=1e-2)
    assert 1.9 < one[0]["aux_loss"] < 8  # top-2 of 8: 2 when balanced, 8 at the worst
    assert one[0]["z_loss"] > 0
    assert not {"aux_loss", "z_loss"} & set(off[0])


@pytest.mark.parametrize(
    ("family", "moe", "changes", "key"),
    [
        ("deepseek_v3", {"aux_loss_coef": 0.1}, {}, "moe.aux-loss-unsupported"),
        ("qwen3_moe", {"bias_update_rate": 0.1}, {}, "moe.no-router-bias"),
        (
            "mixtral",
            {"router": "frozen"},
            {"output_router_logits": True, "router_aux_loss_coef": 0.5},
            "moe.aux-loss-of-frozen-router",
        ),
    ],
)
def test_what_a_family_has_not_is_refused_by_name(
    family: str, moe: dict[str, Any], changes: dict[str, Any], key: str
) -> None:
    model = tiny_model(family, **changes)
    with refused(key):
        balance_of(model, describe(model), em.MoeConfig(**moe))
    assert not balance_of(model, describe(model), em.MoeConfig(aux_loss_coef=0.0)).has_losses


def test_a_bias_in_bfloat16_is_refused_because_small_steps_would_be_lost() -> None:
    model = tiny_model("deepseek_v3", dtype=torch.bfloat16)
    model.get_submodule("model.layers.1.mlp.gate").bfloat16()
    with refused("moe.router-bias-dtype", naming="e_score_correction_bias is torch.bfloat16"):
        balance_of(model, describe(model), em.MoeConfig(bias_update_rate=0.1))


def _lora_with_a_bias_update() -> None:
    model = copy.deepcopy(expected().model)
    mesh = em.init_mesh(em.ParallelConfig(ep=1))
    em.parallelize(model, mesh, moe=em.MoeConfig(bias_update_rate=RATE), lora=em.LoraConfig())


def test_adapters_do_not_hold_a_bias() -> None:
    with refused_on_ranks("moe.router-bias-with-lora"):
        shared_ranks(_lora_with_a_bias_update, 1)


def test_another_form_of_the_loss_is_told_by_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = AutoModelForCausalLM.from_config(tiny_config("mixtral"))
    own = __import__(type(model).__module__, fromlist=["_"])
    standard: Callable[..., Any] = own.load_balancing_loss_func
    assert aux_loss_refusal(model) is None
    for other in (lambda *args: 2 * standard(*args), lambda *args: standard(*args[:3]), lambda logits: 0.0):
        monkeypatch.setattr(own, "load_balancing_loss_func", other)
        assert aux_loss_refusal(model) == "has a load-balancing loss of another form in transformers"


def test_entropy_is_one_for_equal_experts_and_nothing_for_one() -> None:
    equal, one = expert_load(torch.tensor([[3, 3, 3, 3], [12, 0, 0, 0]]))
    assert equal == {"max_over_mean": 1.0, "entropy": pytest.approx(1.0), "dead": 0}
    assert one == {"max_over_mean": 4.0, "entropy": 0.0, "dead": 3}
