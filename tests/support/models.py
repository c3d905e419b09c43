"""Tiny Mixture-of-Experts models with random weights, one per family, made from configs; never from a hub.

Weights are drawn large enough that routing is far from uniform and every gradient is well above rounding.
"""

from typing import Any, TypeVar

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    GptOssConfig,
    JetMoeConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from expertmesh.introspection.attention import packing_refusal

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "attention_dropout": 0.0,
    "initializer_range": 0.2,
}
Model = TypeVar("Model", bound=nn.Module)
_READ: set[type[nn.Module]] = set()


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """Return a config of `family` with 8 experts, top-2, hidden 32; `changes` override any field."""
    if family == "qwen3_moe":
        sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
        return Qwen3MoeConfig(**{**SIZES, **sizes, "norm_topk_prob": True, **changes})
    if family == "mixtral":
        sizes = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16}
        return MixtralConfig(**{**SIZES, **sizes, "router_jitter_noise": 0.0, **changes})
    if family == "olmoe":
        sizes = {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16}
        return OlmoeConfig(**{**SIZES, **sizes, **changes})
    if family == "ernie4_5_moe":
        sizes = {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 0}
        return Ernie4_5_MoeConfig(**{**SIZES, **sizes, "intermediate_size": 48, **changes})
    if family == "jetmoe":
        sizes = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16, "kv_channels": 8}
        return JetMoeConfig(**{**SIZES, **sizes, "tie_word_embeddings": False, **changes})
    if family == "gpt_oss":
        sizes = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16, "head_dim": 8}
        return GptOssConfig(**{**SIZES, **sizes, "sliding_window": 6, **changes})
    if family == "deepseek_v3":
        sizes = {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "intermediate_size": 48,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "routed_scaling_factor": 1.5,
        }
        return DeepseekV3Config(**{**SIZES, **sizes, **changes})
    raise ValueError(f"no tiny config for {family}")


def widened(model: Model, dtype: torch.dtype) -> Model:
    """Give all parameters a `dtype` wider than fp32, in which transformers 5.24 keeps routers. Returns the model."""
    if dtype.itemsize > 4:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    return model


def tiny_model(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """Return a model of `family` in `dtype` with eager reference experts; biases of routers and experts are random, not
    zero.
    """
    torch.manual_seed(seed)
    model = widened(AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=dtype), dtype)
    model.config._experts_implementation = "eager"
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.2, 0.2)
    for name, parameter in model.named_parameters():
        if name.endswith("proj_bias"):
            nn.init.uniform_(parameter, -0.2, 0.2)
        elif name.endswith("gate.weight") and not parameter.any():  # of ERNIE before transformers 5.23: all experts tie
            nn.init.normal_(parameter, 0, model.config.initializer_range)
    if type(model) not in _READ:  # source that is parsed here is not parsed again by each rank that is forked
        _READ.add(type(model))
        packing_refusal(model)
    return model.train()
