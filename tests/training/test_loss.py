"""The chunked loss equals the plain one in value and gradient, and never holds tokens times vocabulary."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from expertmesh.step.loss import causal_lm_loss, count_targets, head_logits
from tests.support.errors import refused
from tests.support.models import tiny_model

BATCH, LENGTH, VOCABULARY = 2, 24, 96


def _batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    labels = ids.masked_fill(torch.rand(BATCH, LENGTH, generator=generator) < 0.3, -100)
    return {"input_ids": ids, "labels": labels}


def _plain(model: nn.Module, batch: dict[str, torch.Tensor], targets: int) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction="sum") / targets


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 1024])
def test_value_and_every_gradient_equal_the_plain_loss(chunk: int, tied: bool) -> None:
    model, batch = tiny_model("qwen3_moe", dtype=torch.float64, tie_word_embeddings=tied), _batch()
    targets = count_targets(batch["labels"]) + 5  # other ranks have targets too
    expected = _plain(model, batch, targets)
    wanted = torch.autograd.grad(expected * 3, list(model.parameters()), allow_unused=True)
    loss = causal_lm_loss(model, batch, target_tokens=targets, chunk_tokens=chunk)
    got = torch.autograd.grad(loss * 3, list(model.parameters()), allow_unused=True)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    for want, have in zip(wanted, got, strict=True):
        assert (want is None) == (have is None)
        if want is not None:
            assert torch.allclose(have, want, rtol=1e-10, atol=1e-14)


class _Largest(TorchDispatchMode):
    """The most vocabulary-wide elements in fp32 that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.shape[-1] == VOCABULARY:
                self.rows = max(self.rows, tensor.numel() // VOCABULARY)
        return out


def test_no_tensor_of_all_tokens_times_the_vocabulary() -> None:
    model, batch = tiny_model("qwen3_moe"), _batch()
    with _Largest() as plain:
        _plain(model, batch, 1).backward()
    with _Largest() as chunked:
        causal_lm_loss(model, batch, target_tokens=1, chunk_tokens=8).backward()
    assert plain.rows >= BATCH * (LENGTH - 1)
    assert chunked.rows <= model.config.hidden_size  # the head's own gradient, transposed; never the tokens


def test_a_batch_without_targets_gives_zero_and_zero_gradients() -> None:
    model, batch = tiny_model("qwen3_moe"), _batch()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    loss = causal_lm_loss(model, batch, target_tokens=10)
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_the_head_is_the_models_own_code() -> None:
    """A model that scales its logits after the head (Granite) is exact without code for it."""
    from transformers import AutoModelForCausalLM, GraniteConfig

    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        logits_scaling=7.0,
        initializer_range=0.2,
    )
    model = AutoModelForCausalLM.from_config(config)
    hidden = model.model(input_ids=_batch()["input_ids"]).last_hidden_state[0]
    assert torch.allclose(head_logits(model, hidden), model(input_ids=_batch()["input_ids"]).logits[0], atol=1e-6)
    assert not torch.allclose(head_logits(model, hidden), model.lm_head(hidden))


def test_a_step_without_any_target_is_refused() -> None:
    with refused("data.step-without-targets"):
        causal_lm_loss(tiny_model("qwen3_moe"), _batch(), target_tokens=0)


@pytest.mark.parametrize("chunk", [0, -8])
def test_chunks_of_no_target_are_refused(chunk: int) -> None:
    with refused("config.wrong-value"):
        causal_lm_loss(tiny_model("qwen3_moe"), _batch(), target_tokens=9, chunk_tokens=chunk)


@pytest.mark.parametrize("key", ["labels", "real_tokens"])
def test_a_batch_whose_parts_are_of_other_positions_is_refused(key: str) -> None:
    """Labels of shorter rows would be taken for targets of other positions."""
    batch = _batch()
    with refused("data.batch-shape", naming=f"{key} "):
        causal_lm_loss(tiny_model("qwen3_moe"), {**batch, key: batch["labels"][:, :-2]}, target_tokens=9)


def test_without_gradients_only_the_value_is_computed() -> None:
    model, batch = tiny_model("qwen3_moe"), _batch()
    with torch.no_grad(), mock.patch("torch.autograd.grad", side_effect=AssertionError("a gradient was computed")):
        loss = causal_lm_loss(model, batch, target_tokens=count_targets(batch["labels"]), chunk_tokens=8)
    expected = _plain(model, batch, count_targets(batch["labels"]))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert not loss.requires_grad
