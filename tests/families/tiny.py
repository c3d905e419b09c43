"""A tiny random model of any Mixture-of-Experts family, from its configuration class alone.

`tiny_config` shrinks whatever sizes the class knows by one table for all families; `CHANGES` holds what a family's own
consistency rules demand beyond it, with the reason. `random_model` makes every value random, also those that start as
zeros or ones and the routers' correction biases, so that nothing can be lost without being seen.
"""

import importlib
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from expertmesh.introspection import proofs
from tests.support.models import widened

VOCABULARY, EXPERTS, TOP_K = 96, 8, 2

# By the names that configuration classes use. A family takes those it knows.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "init_std": 0.2,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "num_experts_per_token": TOP_K,
    "moe_topk": TOP_K,
    "moe_k": TOP_K,
    "top_k_experts": TOP_K,
    "n_group": 4,
    "topk_group": 2,
    "num_expert_group": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "shared_experts_intermediate_size": 16,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    # Of vision and audio towers.
    "depth": 2,
    "num_heads": 4,
    "image_size": 16,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "projection_intermediate_size": 16,
    "sliding_window": 8,
    "sliding_window_size": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "rel_extent": 16,
    "router_hidden_size": 16,
    "index_topk": 4,
    "index_n_heads": 32,  # few heads tie at a score of exactly 0, and ties fall as the length has it
    "index_head_dim": 16,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "mamba_chunk_size": 8,
    "chunk_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "output_router_logits": False,
    "tie_word_embeddings": False,
}
_OPTIONAL = ("q_lora_rank", "sliding_window")
PADDED_HEAD = {"vocab_size": VOCABULARY + 8, "unpadded_vocab_size": VOCABULARY}
# What a family's own rules demand beyond the table.
CHANGES: dict[str, dict[str, Any]] = {
    # Low-rank output projection in groups of heads; the coarser compression has to fit the rows of the proof.
    "deepseek_v4": {
        "o_groups": 2,
        "o_lora_rank": 16,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    },
    # Sizes by layer.
    "dots3_note": {
        "num_hidden_layers": 3,
        "head_dim": 16,
        "per_layer_config": {"02": {"num_attention_heads": 2, "num_key_value_heads": 2}},
    },
    # As the published model with experts is: layers without embeddings of their own, keys that are values as well.
    "gemma4": {
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "final_logit_softcapping": 30.0,
        "use_bidirectional_attention": "vision",
        "per_layer_config": {"01": {"head_dim": 16, "num_key_value_heads": 2}},
        "tie_word_embeddings": True,
    },
    # Partial rotation keeps a third of the head.
    "mimo_v2_flash": {"head_dim": 24, "v_head_dim": 16, "num_key_value_heads": 2},
    "lfm2_moe": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "tie_word_embeddings": True,
    },
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    # The published configurations set what the class leaves open.
    "qwen4_exp": {
        "hc_lowrank": 8,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ngram_vocab_size_base": 64,
        "split_ngram_parts": 1,
        "ple_layer_ids": [2],
        "heads_per_ngram": 2,
    },
    # Heads with rows that are no token, as published.
    "inkling": PADDED_HEAD | {"num_key_value_heads": 2},
    "inkling2": PADDED_HEAD | {"num_key_value_heads": 2, "n_layers_per_attn_res_block": 2},
    # Refuses any other.
    "zaya": {"initializer_range": 0.6, "num_experts_per_tok": 1, "num_key_value_heads": 2, "tie_word_embeddings": True},
    # Half-width experts, the norm behind them, and towers of several stages.
    "muse_spark": {
        "projector_hidden_size": 16,
        "text_config": {"moe_hidden_size": 16},
        "audio_config": {"num_hidden_layers": 4, "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]},
    },
    # Rotary sections of time, height and width add up to half a head.
    "ernie4_5_vl_moe": {
        "text_config": {
            "moe_intermediate_size": [16, 16],
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        }
    },
    "glm4v_moe": {
        "text_config": {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [1, 1, 0],
                "partial_rotary_factor": 0.5,
            }
        }
    },
    # With biases in attention, which neither has as published.
    "axk2": {"attention_bias": True},
    "deepseek_v32": {"attention_bias": True},
    # Some layers attend to the tokens that a layer before them has chosen, as published.
    "glm_moe_dsa": {"num_hidden_layers": 4, "indexer_types": ["full", "shared"] * 2},
    "hy_v4": {"num_hidden_layers": 4, "indexer_types": ["full", "shared"] * 2},
    "glm5_next": {
        "text_config": {
            "index_kpool": 2,
            "qk_rope_head_dim": 0,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", *["indexed_attention"] * 3],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "indexer_types": ["full", "full", "shared", "full"],
        }
    },
    "deepseek_ocr2": {"text_config": {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]}},
    "mistral4": {"head_dim": 16},
    # And here to its keys and values as well.
    "mistral_large4": {
        "text_config": {
            "num_hidden_layers": 4,
            "indexer_types": ["full", "shared", "full", "full"],
            "kv_source_layers": [0, 0, 0, 3],
        },
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 4,
        },
    },
    # Sizes under other names, and a clip that its code cannot do without.
    "dbrx": {
        "n_layers": 2,
        "d_model": 32,
        "n_heads": 4,
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_top_k": TOP_K},
    },
    # One layer without rotary positions; the experts of a layer share the width of a dense one.
    "llama4": {"num_hidden_layers": 4, "intermediate_size_mlp": 48},
    "llama4_published": {
        "text_config": {"num_hidden_layers": 4, "intermediate_size_mlp": 48},
        "vision_config": {
            "num_hidden_layers": 1,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
            "vision_output_dim": 32,
        },
    },
    # Experts whose activations are clamped, as in the last layers of the published model.
    "step3p7": {
        "text_config": {"num_hidden_layers": 5, "swiglu_limits": [0.0, 0.0, 0.0, 0.0, 0.5]},
    },
    "longcat_flash": {"num_layers": 2, "zero_expert_num": 4, "ffn_hidden_size": 32, "expert_ffn_hidden_size": 16},
}


def tiny_config(model_class: str, family: str, **changes: Any) -> PreTrainedConfig:
    """The configuration of a model of a few thousand parameters, with as few layers as show every kind it has; with
    `changes`, if given, beyond those of the family.
    """
    return _shrunk(model_class_of(model_class, family).config_class, CHANGES.get(family, {}) | changes)


def turned_switches(text: PreTrainedConfig) -> dict[str, Any]:
    """The settings of a text model's configuration that change its code, each as it is not: flags turned, what may be
    left out None.
    """
    settings = {name: value for name, value in text.to_dict().items() if proofs.matters(name)}
    turned: dict[str, Any] = {name: not value for name, value in settings.items() if isinstance(value, bool)}
    return turned | {name: None for name in _OPTIONAL if settings.get(name) is not None}


def _shrunk(config_class: type[PreTrainedConfig], changes: dict[str, Any]) -> PreTrainedConfig:
    default = config_class()
    known = set(default.to_dict())
    sizes = {key: value for key, value in SIZES.items() if key in known}
    sizes |= {key: 0.0 for key in known if "dropout" in key or "jitter" in key}
    parts: dict[str, Any] = {
        key: _shrunk(kind, changes.get(key, {}))
        for key, kind in (config_class.sub_configs or {}).items()
        if issubclass(kind, PreTrainedConfig) and changes.get(key, {}) is not None
    }
    sizes |= {**changes, **parts}
    if "num_hidden_layers" in sizes or "num_hidden_layers" not in known:
        return config_class(**sizes)
    kinds = _kinds(default)
    tried = [config_class(num_hidden_layers=layers, **sizes) for layers in (2, 3, 4, 5, 6, 8)]
    return next((config for config in tried if _kinds(config) >= kinds), tried[0])


def _kinds(config: PreTrainedConfig) -> set[str]:
    """Kinds of layers, as far as the configuration lists them: attention, recurrence, dense and sparse MLPs."""
    lists = [getattr(config, key, None) or () for key in ("layer_types", "mlp_layer_types", "layers_block_type")]
    return {str(kind) for kinds in lists for kind in kinds}


def random_model(
    model_class: str,
    family: str,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    *,
    buffers: bool = True,
    **changes: Any,
) -> PreTrainedModel:
    """A model of `tiny_config`, with `changes`, in which every value is random, with `buffers` those of buffers too."""
    torch.manual_seed(seed)
    config = tiny_config(model_class, family, **changes)
    model = widened(model_class_of(model_class, family)._from_config(config, dtype=dtype), dtype)
    for parameter in dict.fromkeys(model.parameters()):
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    persistent = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if buffers and name in persistent:
            _randomise(buffer)
    return model


def _randomise(buffer: torch.Tensor) -> None:
    if buffer.is_floating_point():
        buffer.add_(torch.empty_like(buffer).uniform_(-0.2, 0.2))
    elif buffer.dtype != torch.bool and buffer.dim() > 1:
        buffer.random_(EXPERTS)  # an expert for each token id, in models that route by it; sizes and offsets stay


def model_class_of(name: str, family: str) -> type[PreTrainedModel]:
    found = getattr(transformers, name, None)
    if found is None:
        found = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)
    return found
