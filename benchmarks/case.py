"""What is measured: shapes of models and layers, numbers of tokens, precisions.

A `Case` travels as JSON from the launcher to the ranks, so that all of them build the same model from the same
checkpoint and read the same tokens.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Case:
    """A Qwen3-MoE on local ranks. `tokens` counts those of a rank and micro-batch, cut into sequences of `sequence`.

    `compute` is what forward and backward run in, `params` what parameters are stored in, in memory and in the
    checkpoint; reduced gradients are always float32.
    """

    tokens: int
    compute: str
    params: str = "float32"
    sequence: int = 512
    ranks: int = 4
    layers: int = 8
    hidden: int = 512
    experts: int = 64
    top_k: int = 8
    expert_width: int = 256
    vocabulary: int = 4096
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    checkpoint: str = ""
    micro_batches: int = 1

    def __post_init__(self) -> None:
        if self.tokens % self.sequence and self.tokens > self.sequence:
            raise ValueError(f"tokens={self.tokens} is not a multiple of sequence={self.sequence}")

    def tiny(self) -> "Case":
        """Return the same case in miniature: it pays for lazy imports before memory is measured."""
        return dataclasses.replace(
            self, tokens=16, sequence=16, layers=1, hidden=64, experts=8, top_k=2, expert_width=32,
            vocabulary=64, heads=2, kv_heads=2, head_dim=32,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one MoE layer: H hidden, I expert width, E experts, K experts per token. Default: Qwen3-30B-A3B's."""

    hidden: int = 2048
    width: int = 768
    experts: int = 128
    top_k: int = 8

    def flops(self, tokens: int) -> int:
        """Operations of forward and backward: three products of 2·H·I per pair, each with two gradients."""
        return 18 * tokens * self.top_k * self.hidden * self.width


@dataclass(frozen=True, slots=True)
class LayerCase:
    """One layer, and how many tokens of which dtype go through it."""

    tokens: int
    shape: Shape
    dtype: str


TINY_LAYER = Shape(hidden=256, width=128, experts=16, top_k=4)
_LARGE, _SMALL = Shape(hidden=1024, width=512, experts=64), Shape(hidden=512, width=256, experts=64)
LORA = (LayerCase(512, _LARGE, "float32"), LayerCase(512, _LARGE, "bfloat16"), LayerCase(4096, _SMALL, "float32"))
STEP = Case(tokens=512, compute="float32")
LOAD = Case(
    tokens=512, compute="bfloat16", params="bfloat16", layers=10, hidden=1024, expert_width=512, vocabulary=32768,
    heads=16,
)  # fmt: skip


def write_checkpoint(case: Case, directory: Path, max_shard_size: str = "50GB") -> Case:
    """Write a random checkpoint of `case` in the published layout; returns the case with its path.

    Every system loads this one directory, so equal losses and gradient norms show that they compute the same thing.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = random_model(case, torch.device("cpu"))
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return dataclasses.replace(case, checkpoint=str(directory))


def random_model(case: Case, device: torch.device) -> Any:
    """transformers' model of `case`, the same at every call; made on `device`, where that is faster than on a host."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    with device:
        return auto.from_config(qwen3_moe_config(case), dtype=getattr(torch, case.params)).train()


def qwen3_moe_config(case: Case) -> Any:
    """Return the Qwen3-MoE configuration of `case`; the default shape has 212 million parameters."""
    from transformers import Qwen3MoeConfig

    sizes: dict[str, Any] = dict(
        vocab_size=case.vocabulary, hidden_size=case.hidden, intermediate_size=2 * case.hidden,
        moe_intermediate_size=case.expert_width, num_hidden_layers=case.layers, num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads, head_dim=case.head_dim, num_experts=case.experts,
        num_experts_per_tok=case.top_k, norm_topk_prob=True, max_position_embeddings=max(2048, case.sequence),
        tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return Qwen3MoeConfig(**sizes)


def input_ids(case: Case, data_rank: int, micro_batch: int = 0) -> torch.Tensor:
    """Return the tokens [B, S] int64 of one data rank: different on every rank, the same for every system."""
    generator = torch.Generator().manual_seed(1234 + data_rank + 1000 * micro_batch)
    sequence = min(case.sequence, case.tokens)
    return torch.randint(0, case.vocabulary, (case.tokens // sequence, sequence), generator=generator)


def micro_batches(case: Case, data_rank: int, device: torch.device) -> list[torch.Tensor]:
    """Return the tokens [B, S] of one data rank, by micro-batch of a step."""
    return [input_ids(case, data_rank, number).to(device) for number in range(case.micro_batches)]
