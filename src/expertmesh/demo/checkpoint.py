"""A small Qwen3-MoE checkpoint with random weights, in the layout that real ones of the family have on disk.

For the demo: per-expert safetensors (`...mlp.experts.3.gate_proj.weight`), config, generation config and
tokenizer in one directory, as the Hugging Face hub has them, so that loading it takes the same path as
loading a 30B model.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase, Qwen3MoeConfig, Qwen3MoeForCausalLM

SEED = 0


def write_checkpoint(directory: Path, tokenizer: PreTrainedTokenizerBase, max_length: int = 256) -> int:
    """Write model and tokenizer to `directory` and return the number of parameters.

    bfloat16 on disk, as published; the same weights on every machine with the same torch. Leaves torch's
    global random state as it was.
    """
    sizes: dict[str, Any] = dict(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        moe_intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=max_length,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config = Qwen3MoeConfig(**sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model: Any = Qwen3MoeForCausalLM(config)
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return int(model.num_parameters())
