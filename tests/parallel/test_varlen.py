"""Packed rows on accelerators: which families get variable-length attention, and what it is told.

No GPU: a reference of the kernel's signature, sample by sample in plain torch, stands in for it, and the tests say that
the device is one. What torch's own kernel makes of the same arguments is not tested here.
"""

import copy
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import expertmesh as em
from expertmesh.anatomy import describe
from expertmesh.experts.micro_batch import PackedSamples
from expertmesh.introspection.attention import Separation
from expertmesh.parallel import compiling, packing
from expertmesh.weights.meta_model import build_meta_model
from tests.families.tiny import tiny_config as family_config
from tests.support.models import tiny_config, tiny_model
from tests.support.ranks import run_ranks, shared_ranks

CUDA = torch.device("cuda", 0)
CALLS: list[dict[str, Any]] = []


def _reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """`varlen_attn` by its documentation: `[T, heads, D]`, samples between the borders, a window to the left."""
    if not torch.compiler.is_compiling():
        assert (cu_seq_q.dtype, max_q, window_size[1]) == (torch.int32, max_k, 0)
        assert torch.equal(cu_seq_q, cu_seq_k)
        lengths = cu_seq_q.diff().tolist()
        assert max(lengths) == max_q
        CALLS.append({"lengths": lengths, "window": window_size[0], "scale": scale})
    place_T = torch.arange(len(query))
    sample_T = torch.bucketize(place_T, cu_seq_q, right=True)
    distance = place_T[:, None] - place_T
    seen = (sample_T[:, None] == sample_T) & (distance >= 0) & ((window_size[0] < 0) | (distance <= window_size[0]))
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa).transpose(0, 1)


def _gradients(family: str, axes: dict[str, int], by_samples: bool, mode: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Loss and gradients of packed rows and of a padded batch; whether the kernel's reference was called."""
    CALLS.clear()
    model: Any = tiny_model(family, **({"sliding_window": 4} if family == "mixtral" else {}))
    given = packing.varlen_refusal
    accelerated = mock.patch.object(
        packing, "varlen_refusal", lambda m, a, d, t: given(m, a, "cuda", torch.bfloat16) if by_samples else "told so"
    )
    with accelerated, mock.patch.object(packing, "varlen_attn", _reference):
        em.parallelize(model, em.init_mesh(em.ParallelConfig(**axes)), activation_checkpointing=mode)
        ids = torch.arange(48).view(2, 24) * 7 % 89
        lengths = ((11, 1, 12), (5, 19))
        positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
        packed = {"input_ids": ids, "labels": ids.masked_fill(positions == 0, -100), "position_ids": positions}
        loss = em.causal_lm_loss(model, packed, target_tokens=43)
        loss.backward()
        asked = list(CALLS)
        padding = (torch.arange(24) < torch.tensor([[24], [9]])).long()
        em.causal_lm_loss(model, {"input_ids": ids, "labels": ids, "attention_mask": padding}, target_tokens=31)
        assert len(CALLS) == len(asked)  # rows that are padded, not packed, take the way they took before
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    return (float(loss), asked), found


@pytest.mark.slow_cases(r"qwen3_moe-axes0-none", why="latent attention stays, windows, and recomputed blocks")
@pytest.mark.parametrize(
    ("family", "axes", "mode"),
    [
        ("qwen3_moe", {"ep": 1}, "none"),
        ("mixtral", {"ep": 1}, "full"),  # windows
        ("deepseek_v3", {"ep": 1}, "none"),  # heads of two sizes
        ("qwen3_moe", {"cp": 2, "ep": 2}, "full"),
    ],
)
def test_packed_rows_have_the_gradients_of_a_dense_mask(family: str, axes: dict[str, int], mode: Any) -> None:
    world = axes.get("cp", 1)
    (loss, asked), found = shared_ranks(_gradients, world, family, axes, True, mode)[0]
    (dense_loss, unasked), dense = shared_ranks(_gradients, world, family, axes, False, mode)[0]
    assert not unasked
    assert asked
    assert all(call["lengths"] == [11, 1, 12, 5, 19] for call in asked)
    assert {call["window"] for call in asked} == {3 if family == "mixtral" else -1}
    assert loss == pytest.approx(dense_loss, rel=1e-6)
    for name, gradient in dense.items():
        assert (found[name] - gradient).norm() <= 1e-5 * max(float(gradient.norm()), 1e-4), name


def _loss_of_positions(rows: int) -> float:
    """The loss of two rows that are packed equally, with position ids of one row or of both."""
    given = packing.varlen_refusal
    by_samples = mock.patch.object(packing, "varlen_refusal", lambda m, a, *_: given(m, a, "cuda", torch.bfloat16))
    with by_samples, mock.patch.object(packing, "varlen_attn", _reference):
        model = em.parallelize(tiny_model("qwen3_moe"), em.init_mesh(em.ParallelConfig(ep=1)))
        ids = torch.arange(48).view(2, 24) * 7 % 89
        positions = torch.cat([torch.arange(n) for n in (11, 1, 12)]).expand(rows, -1)
        batch = {"input_ids": ids, "labels": ids, "position_ids": positions}
        return float(em.causal_lm_loss(model, batch, target_tokens=46).detach())


def test_position_ids_of_one_row_are_for_all_rows() -> None:
    assert shared_ranks(_loss_of_positions, 1, 1) == shared_ranks(_loss_of_positions, 1, 2)


def _compiled_and_dense(planted: bool) -> tuple[float, list[int]]:
    """The distance of compiled code's gradients from those of a dense mask, and the graphs after each packing."""
    distances, graphs, initial = [0.0], [], tiny_model("qwen3_moe", num_hidden_layers=1)
    mesh = em.init_mesh(em.ParallelConfig(ep=1))
    dense = em.parallelize(copy.deepcopy(initial), mesh)
    given, varlen_samples = packing.varlen_refusal, packing.running_samples
    accelerated = mock.patch.object(packing, "varlen_refusal", lambda m, a, *_: given(m, a, "cuda", torch.bfloat16))
    traced = mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager"))
    with accelerated, traced, mock.patch.object(compiling, "_probe"):
        compiled = em.parallelize(copy.deepcopy(initial), mesh, compile=True)
    if planted:  # compiled code keeps the boundaries of its first rows
        packing.running_samples = cache(varlen_samples)
        mock.patch.object(compiling, "running_samples", packing.running_samples).start()
    mock.patch.object(packing, "varlen_attn", _reference).start()
    for lengths in ((24,), (11, 1, 12), (5, 19), (2, 3, 4, 5, 10), (23, 1)):
        ids = torch.arange(24)[None] * 7 % 89
        packed = {"input_ids": ids, "labels": ids, "position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}
        gradients = []
        for model in (dense, compiled):
            model.zero_grad()
            em.causal_lm_loss(model, packed, target_tokens=23).backward()
            gradients.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})  # type: ignore[union-attr]
        distances += [float((gradients[1][n] - g).norm() / g.norm().clamp_min(1e-4)) for n, g in gradients[0].items()]
        graphs.append(int(torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    return max(distances), graphs


@pytest.mark.slow(why="compiles for seconds; uncompiled attention stays")
def test_compiled_attention_takes_each_batchs_boundaries() -> None:
    ((distance, graphs),) = run_ranks(lambda: _compiled_and_dense(False), 1)
    assert distance <= 1e-5
    assert graphs[2] == graphs[-1], "a packing has compiled again"
    ((distance, _),) = run_ranks(lambda: _compiled_and_dense(True), 1)
    assert distance > 1e-3


def test_a_border_that_is_lost_is_seen() -> None:
    def planted(position_BS: Any) -> Any:
        borders = own(position_BS)
        return None if borders is None else [*borders[:-2], (borders[-2][0], borders[-1][1])]

    own = packing._borders
    _, dense = run_ranks(_gradients, 1, "qwen3_moe", {"ep": 1}, False, "none")[0]
    with mock.patch.object(packing, "_borders", planted):
        _, found = run_ranks(_gradients, 1, "qwen3_moe", {"ep": 1}, True, "none")[0]
    assert max(float((found[name] - g).norm() / g.norm().clamp(min=1e-4)) for name, g in dense.items()) > 1e-3


REFUSED = [
    ("gpt_oss", "GptOssForCausalLM", "model.attention is eager"),
    ("deepseek_v32", "DeepseekV32ForCausalLM", "transformers does not run deepseek_v32 with flash attention"),
    ("llama4", "Llama4ForCausalLM", "transformers does not run llama4_text with flash attention"),
]


@pytest.mark.parametrize(("family", "model_class", "why"), REFUSED)
def test_what_the_kernel_cannot_do_keeps_the_dense_mask(family: str, model_class: str, why: str) -> None:
    model = build_meta_model(family_config(model_class, family), torch.bfloat16)
    assert packing.varlen_refusal(model, Separation.of(model, describe(model)), "cuda", torch.bfloat16) == why


BY_MASKS = "masks alone say what its sliding_attention sees"
WINDOWS: list[tuple[str, str, dict[str, Any], str | None]] = [
    ("qwen2_moe", "Qwen2MoeForCausalLM", {"use_sliding_window": True, "max_window_layers": 0}, BY_MASKS),
    ("qwen2_moe", "Qwen2MoeForCausalLM", {"use_sliding_window": False}, None),
    ("phimoe", "PhimoeForCausalLM", {"sliding_window": 8}, BY_MASKS),
    ("phimoe", "PhimoeForCausalLM", {"sliding_window": None}, None),
    ("mixtral", "MixtralForCausalLM", {"sliding_window": 8}, None),
    ("cohere2_moe", "Cohere2MoeForCausalLM", {}, None),  # windows in some of its layers, which it passes on
]


@pytest.mark.parametrize(("family", "model_class", "changes", "why"), WINDOWS)
def test_windows_that_masks_alone_have_keep_the_dense_mask(
    family: str, model_class: str, changes: dict[str, Any], why: str | None
) -> None:
    model = build_meta_model(family_config(model_class, family, **changes), torch.bfloat16)
    assert packing.varlen_refusal(model, Separation.of(model, describe(model)), "cuda", torch.bfloat16) == why


def test_other_devices_and_dtypes_keep_the_dense_mask() -> None:
    model = build_meta_model(tiny_config("qwen3_moe"), torch.bfloat16)
    anatomy = describe(model)
    found = Separation.of(model, anatomy)
    assert packing.varlen_refusal(model, found, "cuda", torch.bfloat16) is None
    assert packing.packed_attention_line(model, anatomy, CUDA, torch.bfloat16) == "by samples, without masks"
    wide = packing.varlen_refusal(model, found, "cuda", torch.float32)
    assert wide == "flash attention does not compute in float32"
    cpu = packing.varlen_refusal(model, found, "cpu", torch.bfloat16)
    assert cpu == "on cpu torch has no variable-length attention"
    with mock.patch.object(packing, "varlen_attn", None):
        assert "before 2.11" in str(packing.varlen_refusal(model, found, "cuda", torch.bfloat16))


def test_torchs_operation_takes_what_it_is_given() -> None:
    with FakeTensorMode():
        query = torch.empty(2, 4, 24, 16, dtype=torch.bfloat16, requires_grad=True)
        key = torch.empty(2, 2, 24, 16, dtype=torch.bfloat16)
        token = packing.packed_samples.set(PackedSamples([(0, 11), (11, 24), (24, 48)]))
        try:
            out, _ = packing.attention(torch.nn.Module(), query, key, key, None, scaling=0.25, sliding_window=8)
        finally:
            packing.packed_samples.reset(token)
        assert out.shape == (2, 24, 4, 16)
        out.sum().backward()
        assert query.grad is not None
        assert query.grad.shape == query.shape
