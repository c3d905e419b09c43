"""Configurations with the shapes of published models, for simulations and examples; nothing is downloaded."""

from typing import Any

from transformers import DeepseekV3Config, PreTrainedConfig, Qwen3MoeConfig


def qwen3_30b_a3b() -> PreTrainedConfig:
    """48 layers of 128 experts, top-8; 30.5 B parameters."""
    sizes: dict[str, Any] = {"head_dim": 128}  # taken from the keyword arguments
    return Qwen3MoeConfig(
        **sizes,
        vocab_size=151936,
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        max_position_embeddings=40960,
    )


def deepseek_v3() -> PreTrainedConfig:
    """61 layers, 58 of them with 256 routed experts in 8 groups and a shared one; 671 B parameters."""
    return DeepseekV3Config(
        vocab_size=129280,
        hidden_size=7168,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        num_hidden_layers=61,
        num_attention_heads=128,
        num_key_value_heads=128,
        n_shared_experts=1,
        n_routed_experts=256,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        first_k_dense_replace=3,
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        max_position_embeddings=4096,
    )
