"""A packed row computes what its documents compute alone, with the batch exactly as the loader gives it."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from expertmesh.data import BatchLayout, TokenizedDataset, TrainingBatches

VOCABULARY = 96


@pytest.fixture
def dataset() -> TokenizedDataset:
    generator = np.random.default_rng(0)
    ids = [generator.integers(1, VOCABULARY, size=size).astype(np.int32) for size in (5, 9, 1, 7, 12, 3, 8, 4, 2)]
    return TokenizedDataset.of_samples([*ids], [np.ones(len(row), dtype=np.bool_) for row in ids])


def tiny_model(attention: str) -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        attn_implementation=attention,
    )
    model = Qwen3MoeForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)  # large enough that a leak across documents shows in the logits
    return model


@torch.no_grad()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_packed_documents_have_the_logits_of_separate_rows(
    dataset: TokenizedDataset, attention: str, micro_batch_size: int
) -> None:
    model = tiny_model(attention)
    loader = TrainingBatches(
        dataset,
        BatchLayout(micro_batch_size, data_rank=0, data_ranks=1, packing=True, pad_token_id=0, max_length=16),
        global_batch_size=3,
        shuffle=True,
        seed=1,
    )
    documents = {tuple(dataset.sample(i).input_ids.tolist()) for i in range(len(dataset))}
    checked, padded, shared = 0, 0, 0
    for step in loader.epoch(0):
        for batch in step.micro_batches:
            logits = model(**{k: v for k, v in batch.items() if k != "labels"}, use_cache=False).logits
            for row in range(len(logits)):
                starts = [*torch.nonzero(batch["position_ids"][row] == 0).flatten().tolist(), logits.shape[1]]
                shared += len(starts) > 2
                for start, end in pairwise(starts):
                    ids = batch["input_ids"][row, start:end]
                    if tuple(ids.tolist()) not in documents:
                        assert not ids.any(), "neither a document nor padding"
                        padded += 1
                        continue
                    alone = model(input_ids=ids[None], use_cache=False).logits[0]
                    torch.testing.assert_close(logits[row, start:end], alone, rtol=1e-5, atol=1e-5)
                    checked += 1
    assert checked == len(dataset)
    assert shared > 0
    assert padded > 0 or micro_batch_size == 1


@torch.no_grad()
def test_unpacked_rows_have_the_logits_of_separate_rows(dataset: TokenizedDataset) -> None:
    model = tiny_model("sdpa")
    loader = TrainingBatches(
        dataset,
        BatchLayout(3, data_rank=0, data_ranks=1, packing=False, pad_token_id=0, max_length=16),
        global_batch_size=3,
        shuffle=False,
        seed=1,
    )
    for step in loader.epoch(0):
        (batch,) = step.micro_batches
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
        for row, length in enumerate(batch["attention_mask"].sum(1).tolist()):
            alone = model(input_ids=batch["input_ids"][row : row + 1, :length], use_cache=False).logits[0]
            torch.testing.assert_close(logits[row, :length], alone, rtol=1e-5, atol=1e-5)
