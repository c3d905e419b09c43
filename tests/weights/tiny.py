"""Tiny random models of three families, their files, and a sharding of their own for the tests.

The sharding is written with plain FSDP2 here, independently of `expertmesh.parallel`, so that a mistake in
one does not hide a mistake in the other.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from tests.support.models import widened

_COMMON: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


def qwen3_moe(**changes: Any) -> PreTrainedConfig:
    own = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
    return Qwen3MoeConfig(**{**_COMMON, **own, **changes})


def mixtral(**changes: Any) -> PreTrainedConfig:
    return MixtralConfig(**{**_COMMON, "num_local_experts": 4, **changes})


def deepseek_v3(**changes: Any) -> PreTrainedConfig:
    own = {
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    }
    return DeepseekV3Config(**{**_COMMON, **own, **changes})


FAMILIES = {"qwen3_moe": qwen3_moe, "mixtral": mixtral, "deepseek_v3": deepseek_v3}


def random_model(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model in memory with every parameter and persistent buffer random, also those that start constant."""
    torch.manual_seed(0)
    model = widened(AutoModelForCausalLM.from_config(config, dtype=dtype), dtype)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape) * 0.3)
    return model.eval()


def write_fused(model: PreTrainedModel, directory: Path) -> None:
    """A checkpoint whose tensors are the module's own: experts fused, no renames."""
    directory.mkdir()
    model.config.save_pretrained(directory)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def shard_for_test(model: PreTrainedModel, world: int, ep: int, efsdp_dim: int = 0) -> None:
    """Experts: Shard(0) over ep, then FSDP2 over efsdp on `efsdp_dim`. The rest: FSDP2 over all ranks."""
    mesh = init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("efsdp", "ep"))
    dense = init_device_mesh("cpu", (world,))
    for name, module in list(model.named_modules()):
        if name.endswith(".experts"):
            _shard_experts(module, mesh, efsdp_dim)
    experts = {p for n, p in model.named_parameters() if ".experts." in n}
    for block in model.model.layers:
        fully_shard(block, mesh=dense, ignored_params=experts)
    fully_shard(model, mesh=dense, ignored_params=experts)


def _shard_experts(experts: nn.Module, mesh: Any, efsdp_dim: int) -> None:
    ep = mesh["ep"]
    for name, whole in list(experts.named_parameters(recurse=False)):
        size = whole.shape[0] // ep.size()
        local = whole.detach()[ep.get_local_rank() * size :][:size]
        setattr(experts, name, nn.Parameter(DTensor.from_local(local, ep, [Shard(0)], run_check=False)))
    fully_shard(experts, mesh=mesh["efsdp"], shard_placement_fn=lambda _: Shard(efsdp_dim))


def full_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """All parameters and persistent buffers, gathered. Every rank calls it."""
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in model.state_dict(keep_vars=True).items()
    }
