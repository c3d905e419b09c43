"""Tensor parallelism computes what the unsharded model computes: loss, norm, every gradient, weights, in every layout.

As test_parity.py: real gloo ranks, different rows on every data rank, odd lengths that have to be padded, uneven target
counts, accumulation, clipping, AdamW. The planted bugs show that each comparison can fail.
"""

import copy
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import expertmesh as em
from expertmesh.distributed import collectives, sequence_collectives
from expertmesh.distributed.mesh import Mesh
from expertmesh.experts.layer import ExpertLayer
from expertmesh.io.boxes import slices
from expertmesh.parallel import tensor
from expertmesh.state.model_view import module_state
from expertmesh.state.patching import exchanged
from expertmesh.state.shards import stored_box
from expertmesh.step import vocabulary
from tests.families.tiny import random_model
from tests.parallel.test_router_loss import MOE
from tests.parallel.test_router_loss import expected as expected_with_router_losses
from tests.parallel.test_router_loss import with_losses as train_with_router_losses
from tests.support.models import tiny_model
from tests.support.one_launch import Launched, one_launch
from tests.support.ranks import shared_ranks
from tests.support.reference import Distance, Reference, padded, reference, rows_of_step, train_sharded

TOLERANCE = 1e-5
Parallel = dict[str, Any]
TIED = (("tie_word_embeddings", True),)
Changes = tuple[tuple[str, Any], ...]


def _random_biases(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.bias"):
            parameter.data.uniform_(-0.5, 0.5, generator=generator)


def _reference(family: str, changes: Changes = ()) -> Reference:
    prepare = _random_biases if dict(changes).get("attention_bias") else None
    return reference(family, torch.float32, prepare, **dict(changes))


# World size, family, what its config changes, layout, rows of a micro-batch, options of parallelize
CASES: dict[str, tuple[int, str, Changes, Parallel, int, dict[str, Any]]] = {
    "plain": (2, "qwen3_moe", (), {"tp": 2}, 2, {}),
    "tied": (2, "qwen3_moe", TIED, {"tp": 2, "ep": 2}, 1, {}),
    "mixtral": (2, "mixtral", (), {"tp": 2, "ep": 2}, 1, {"activation_checkpointing": True}),
    "latent": (2, "deepseek_v3", (), {"tp": 2, "ep": 2}, 1, {"activation_checkpointing": True}),
    "latent, queries whole": (2, "deepseek_v3", (("q_lora_rank", None),), {"tp": 2}, 4, {}),
    "olmoe": (2, "olmoe", (), {"tp": 2}, 1, {}),
    "biases": (2, "olmoe", (("attention_bias", True),), {"tp": 2, "ep": 2}, 2, {}),
    "odd vocabulary": (2, "qwen3_moe", (("attention_bias", True), ("vocab_size", 97)), {"tp": 2}, 2, {}),
    "ep over tp": (4, "qwen3_moe", (), {"tp": 2, "ep": 4}, 1, {}),
    "replicas": (4, "deepseek_v3", (), {"tp": 2, "ep": 1, "replicate": 2}, 1, {}),
    "tied, replicas": (4, "mixtral", TIED, {"tp": 2, "ep": 2, "replicate": 2}, 1, {}),
    "tp 4": (4, "deepseek_v3", (), {"tp": 4, "ep": 2}, 4, {}),
    "fsdp 4 x tp 2": (8, "deepseek_v3", (), {"tp": 2, "ep": 4}, 1, {}),
}


def _case(case: str) -> tuple[int, Callable[[], Distance]]:
    world, family, changes, parallel, micro_batch, options = CASES[case]
    expected, layout = _reference(family, changes), em.ParallelConfig(**{"ep": 1, **parallel})
    return world, lambda: train_sharded(expected, layout, micro_batch, **options)


@pytest.mark.slow_cases(
    r"(plain|tied|mixtral|latent|olmoe|odd vocabulary|ep over tp|all-gather|replicas|tp 4|fsdp 4 x tp 2)",
    why="pairwise; latent heads, biases, and tied replicas on four ranks stay",
)
@pytest.mark.parametrize("case", CASES)
@one_launch(_case)
def test_every_gradient_and_the_weights_after_two_steps_equal_the_unsharded_model(
    launched: Launched, case: str
) -> None:
    for distance in launched():
        distance.check(TOLERANCE)


def _placements(replicate: int) -> dict[str, tuple[Placement, ...]]:
    initial = tiny_model("deepseek_v3")
    whole = {name: parameter.detach().clone() for name, parameter in initial.named_parameters()}
    em.parallelize(initial, em.init_mesh(em.ParallelConfig(tp=2, ep=4, replicate=replicate)))
    found = {}
    for name, parameter in initial.named_parameters():
        assert isinstance(parameter, DTensor), name
        assert torch.equal(parameter.full_tensor(), whole[name]), name
        assert torch.equal(parameter.to_local(), whole[name][slices(stored_box(parameter))]), name
        found[name] = tuple(parameter.placements)
    return found


@pytest.mark.slow(why="eight ranks on two cores; four stay")
def test_eight_ranks_hold_what_they_should() -> None:
    """FSDP 4 x TP 2 and HSDP 2x2 x TP 2."""
    for placements in shared_ranks(lambda: [_placements(1), _placements(2)], 8):
        for found, lead in zip(placements, ([], [Replicate()]), strict=True):
            block = "model.layers.1"
            columns, rows = (*lead, _StridedShard(0, split_factor=2), Shard(0)), (*lead, Shard(0), Shard(1))
            for name in ("self_attn.q_b_proj", "self_attn.kv_b_proj", "mlp.shared_experts.up_proj"):
                assert found[f"{block}.{name}.weight"] == columns, name
            for name in ("self_attn.o_proj", "mlp.shared_experts.down_proj"):
                assert found[f"{block}.{name}.weight"] == rows, name
            for name in (f"{block}.self_attn.q_a_layernorm", f"{block}.mlp.gate", "model.embed_tokens", "lm_head"):
                assert found[f"{name}.weight"] == (*lead, Shard(0)), name


def _twelve_steps(model: nn.Module, parallel: em.ParallelConfig | None) -> dict[str, torch.Tensor]:
    """AdamW without clipping; on one process in plain torch without `parallel`."""
    model = copy.deepcopy(model)
    data_rank, data_ranks = 0, 1
    if parallel is not None:
        mesh = em.init_mesh(parallel)
        em.parallelize(model, mesh)
        data_rank, data_ranks = mesh.data_rank, mesh.layout.data_ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    for step in range(12):
        rows = rows_of_step(step, ())[:2]
        total = sum(int((labels[1:] != -100).sum()) for _, labels in rows)
        batch = padded(rows[data_rank::data_ranks])
        if parallel is not None:
            loss = em.causal_lm_loss(model, batch, target_tokens=total)
        else:
            logits = model(**batch, use_cache=False).logits[:, :-1].flatten(0, 1)
            targets = batch["labels"][:, 1:].flatten()
            loss = nn.functional.cross_entropy(logits.double(), targets, reduction="sum") / total
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


@pytest.mark.slow(why="four steps stay")
def test_twelve_adamw_steps_in_double_precision_equal_the_unsharded_model() -> None:
    model = tiny_model("qwen3_moe", dtype=torch.float64)
    before, expected = dict(model.named_parameters()), _twelve_steps(model, None)
    found = shared_ranks(lambda: _twelve_steps(model, em.ParallelConfig(tp=2, ep=2)), 4)[0]
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert float((weight - before[name].detach()).norm() / weight.norm()) > 1e-3, name
        assert float((found[name] - weight).norm() / weight.norm()) <= 1e-9, name


def test_router_losses_count_every_token_once() -> None:
    want = expected_with_router_losses("qwen3_moe", 8)

    def both() -> list[Any]:
        parallels = (em.ParallelConfig(tp=2, ep=2), em.ParallelConfig(tp=2, ep=4))
        return [train_with_router_losses(want, parallel, 2, moe=MOE) for parallel in parallels]

    for found in shared_ranks(both, 4)[0]:
        assert max(found.loss, found.aux_loss, found.z_loss, found.gradient[0]) <= TOLERANCE, found
        assert found.load == 2 * 2 * sum(len(ids) for ids, _ in want.rows)


def _losses_with_and_without_gradients() -> tuple[float, float, float]:
    model = tiny_model("deepseek_v3")
    em.parallelize(model, em.init_mesh(em.ParallelConfig(tp=2, ep=2)))
    ids_BS = torch.randint(96, (2, 15), generator=torch.Generator().manual_seed(0))
    losses = []
    for training in (False, True, False):
        with torch.set_grad_enabled(training):
            share = em.causal_lm_loss(model, {"input_ids": ids_BS, "labels": ids_BS}, target_tokens=28)
        if training:
            share.backward()
        total = share.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total))
    return losses[0], losses[1], losses[2]


def test_evaluation_gives_the_same_loss_and_leaves_training_alone() -> None:
    for before, training, after in shared_ranks(_losses_with_and_without_gradients, 2):
        assert before == training == after


def _packed(parallel: em.ParallelConfig) -> tuple[float, dict[str, torch.Tensor]]:
    """Three samples in one row of odd length, kept apart by their position ids alone."""
    model = tiny_model("qwen3_moe")
    em.parallelize(model, em.init_mesh(parallel))
    ids_S = torch.randint(96, (21,), generator=torch.Generator().manual_seed(0))
    starts = (0, 6, 13, 21)
    positions_S = torch.cat([torch.arange(stop - start) for start, stop in itertools.pairwise(starts)])
    labels_S = torch.where(positions_S == 0, -100, ids_S)
    batch = {"input_ids": ids_S[None], "labels": labels_S[None], "position_ids": positions_S[None]}
    share = em.causal_lm_loss(model, batch, target_tokens=18)
    share.backward()
    total = share.detach().clone()
    dist.all_reduce(total)
    return float(total), {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def test_packed_samples_stay_apart() -> None:
    ((loss, gradients),) = shared_ranks(_packed, 1, em.ParallelConfig(ep=1))
    for found, split in shared_ranks(_packed, 2, em.ParallelConfig(tp=2, ep=2)):
        assert found == pytest.approx(loss, rel=1e-6)
        for name, gradient in gradients.items():
            assert float((split[name] - gradient).norm() / gradient.norm()) <= TOLERANCE, name


def _sent(parallel: em.ParallelConfig, tamper: Callable[[Mesh], None] | None = None) -> int:
    """Bytes that this rank hands to all-to-alls in one forward and backward."""
    model = tiny_model("qwen3_moe")
    mesh = em.init_mesh(parallel)
    em.parallelize(model, mesh)
    if tamper is not None:
        tamper(mesh)
    sent = 0
    original = dist.all_to_all_single

    def counting(received: torch.Tensor, rows: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        if rows.is_floating_point():  # without the counts, which are as many for few tokens as for many
            sent += rows.nbytes
        return original(received, rows, *args, **kwargs)

    ids_BS = torch.randint(96, (2, 32), generator=torch.Generator().manual_seed(mesh.data_rank))
    with mock.patch.object(collectives.dist, "all_to_all_single", counting):
        em.causal_lm_loss(model, {"input_ids": ids_BS, "labels": ids_BS}, target_tokens=124).backward()
    return sent


def _dispatch_all_positions(mesh: Mesh) -> None:
    """What tensor parallelism without sequence parallelism does: every rank of a tp group sends the same tokens."""
    group, forward = mesh.dense.get_group("tp"), ExpertLayer.forward

    def duplicated(layer: Any, experts: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
        out_TH = forward(layer, experts, *(sequence_collectives.gather(each, 0, group) for each in inputs))
        return sequence_collectives.own_part(out_TH, 0, group)

    mock.patch.object(ExpertLayer, "forward", duplicated).start()


@pytest.mark.slow(why="that bytes are those of the formula stays")
def test_a_tp_group_of_two_sends_half_of_what_each_rank_sends_without_it() -> None:
    without = shared_ranks(lambda: _sent(em.ParallelConfig(ep=2)), 2)
    shared = shared_ranks(lambda: _sent(em.ParallelConfig(tp=2, ep=2)), 4)
    # Twice as many ranks for the same tokens, each of which is sent once.
    assert sum(shared) == sum(without)
    assert max(shared) < 0.6 * min(without)


def test_a_dispatch_of_all_positions_is_seen_in_what_is_sent() -> None:
    without = shared_ranks(lambda: _sent(em.ParallelConfig(ep=2)), 2)
    duplicated = shared_ranks(lambda: _sent(em.ParallelConfig(tp=2, ep=2), _dispatch_all_positions), 4)
    assert sum(duplicated) >= 1.9 * sum(without)


def _exchanged(family: str, changes: dict[str, Any], checkpointed: bool) -> list[int]:
    """Bytes of the whole tensor of each gather and reduce-scatter over tp in one forward and backward."""
    model = tiny_model(family, **changes)
    em.parallelize(model, em.init_mesh(em.ParallelConfig(tp=2, ep=1)), activation_checkpointing=checkpointed)
    counted: list[int] = []
    original = sequence_collectives._exchange

    def counting(collective: Any, x: torch.Tensor, *args: Any) -> torch.Tensor:
        result = original(collective, x, *args)
        counted.append(max(x.nbytes, result.nbytes))
        return result

    ids_BS = torch.randint(96, (2, 15), generator=torch.Generator().manual_seed(0))
    with mock.patch.object(sequence_collectives, "_exchange", counting):
        em.causal_lm_loss(model, {"input_ids": ids_BS, "labels": ids_BS}, target_tokens=28).backward()
    return counted


@pytest.mark.slow_cases(r"False", why="True stays")
@pytest.mark.parametrize("checkpointed", [False, True])
def test_bytes_over_tp_are_those_of_the_formula(checkpointed: bool) -> None:
    """docs/parallelism.md: four times the hidden states of the group's positions for each part, twice for the head."""
    states = 2 * 16 * 32 * 4  # rows, padded positions, hidden size, fp32
    passes = 6 if checkpointed else 4
    for family, changes, parts, features in [
        ("qwen3_moe", {"mlp_only_layers": [0]}, 3, 0),
        ("deepseek_v3", {}, 4, 0),
        ("olmoe", {}, 2, 2 * 16 * (32 + 16) * 4),  # and queries and keys of all heads, for their norms
    ]:
        expected = (parts * passes + 2) * states + parts * (passes // 2) * features
        counted = shared_ranks(_exchanged, 2, family, changes, checkpointed)
        # A recomputed block stops when nothing more is needed, which may be before its last reduce-scatter.
        left_out = 2 * states if checkpointed else 0
        assert all(expected - left_out <= sum(each) <= expected for each in counted), (family, counted)


def _refusal_of_a_label(label: int) -> str:
    model = em.parallelize(tiny_model("qwen3_moe"), em.init_mesh(em.ParallelConfig(tp=2, ep=1)))
    batch = padded(rows_of_step(0, ())[:2])
    batch["labels"][0, 3] = label
    with pytest.raises(RuntimeError) as caught:
        em.causal_lm_loss(model, batch, target_tokens=64)
    return str(caught.value)


@pytest.mark.parametrize("label", [-1, 96])
def test_a_label_that_is_no_token_is_refused_where_ranks_share_the_vocabulary(label: int) -> None:
    assert all("neither a token of the vocabulary" in each for each in shared_ranks(_refusal_of_a_label, 2, label))


def _of_padded_vocabulary(family: str, model_class: str, tp: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the gradients of a model that makes logits of 96 of its head's 104 rows."""
    model = random_model(model_class, family)
    assert model.get_output_embeddings().out_features == 104
    em.parallelize(model, em.init_mesh(em.ParallelConfig(tp=tp, ep=1)))
    batch = padded(rows_of_step(0, ())[:2])
    loss = em.causal_lm_loss(model, batch, target_tokens=64)
    loss.backward()
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters() if isinstance(p.grad, DTensor)}
    return float(loss.detach()) * tp, gradients


@pytest.mark.slow_cases(r"inkling-.*", why="the other family, whose cut is the same, stays")
@pytest.mark.parametrize(
    ("family", "model_class"), [("inkling", "InklingForCausalLM"), ("inkling2", "Inkling2ForCausalLM")]
)
def test_rows_of_the_head_that_are_no_token_have_no_part_in_the_loss(family: str, model_class: str) -> None:
    (expected, gradients), *_ = shared_ranks(_of_padded_vocabulary, 1, family, model_class, 1)
    for loss, found in shared_ranks(_of_padded_vocabulary, 2, family, model_class, 2):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert found["lm_head.weight"][96:].count_nonzero() == 0
        for name, gradient in gradients.items():
            assert (found[name] - gradient).norm() <= TOLERANCE * max(float(gradient.norm()), 1e-3), name


def _multiply_gradients(model: nn.Module, mesh: Mesh) -> None:
    """As when each rank of a group reports the group's loss for its own."""
    backward = vocabulary._CrossEntropy.backward
    mock.patch.object(
        vocabulary._CrossEntropy, "backward", staticmethod(lambda ctx, grad: backward(ctx, grad * mesh.layout.tp))
    ).start()


def _count_losses_twice(model: nn.Module, mesh: Mesh) -> None:
    mock.patch.object(vocabulary.VocabularyShare, "ranks", 1).start()


def _add_biases_on_every_rank(model: nn.Module, mesh: Mesh) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        axis = tensor._running(self).axes[0]
        x = sequence_collectives.own_part(x, x.dim() - 1, axis.group) if axis.part.cuts_input else x
        with exchanged(self._parameters, {"bias": module_state(self).row_bias}):
            partial = super(tensor._Rows, self).forward(x)
        return sequence_collectives.reduce_scatter(partial, partial.dim() - 2, axis.group)

    mock.patch.object(tensor._Rows, "forward", forward).start()


def _keep_the_heads_gradient_to_oneself(model: nn.Module, mesh: Mesh) -> None:
    """Each rank takes its own vocabulary's part of the hidden states' gradient for all of it."""

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
            ctx.dim, ctx.group = dim, group
            return sequence_collectives._gather(x, dim, group)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
            return sequence_collectives.own_part(grad, ctx.dim, ctx.group), None, None

    mock.patch("expertmesh.step.loss.gather", Kept.apply).start()


@pytest.mark.parametrize(
    ("bug", "shows_in"),
    [
        (_multiply_gradients, "norm"),
        (_count_losses_twice, "loss"),
        (_add_biases_on_every_rank, "loss"),
        (_keep_the_heads_gradient_to_oneself, "gradient"),
    ],
)
def test_a_planted_bug_turns_the_comparison_red(bug: Callable[[nn.Module, Mesh], None], shows_in: str) -> None:
    expected = _reference("olmoe", (("attention_bias", True),))
    distance = shared_ranks(lambda: train_sharded(expected, em.ParallelConfig(tp=2, ep=2), tamper=bug), 2)[0]
    found = getattr(distance, shows_in)
    assert (found[0] if isinstance(found, tuple) else found) > 1e-3
