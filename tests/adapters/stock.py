"""Adapters that stock PEFT makes and saves, with random A and B, and the logits of its models."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.adapters.reference import random_adapter
from tests.families import tiny
from tests.support.models import tiny_model

IDS = torch.arange(5, 45).reshape(2, 20)
CLASSES = {"gpt_oss": "GptOssForCausalLM", "llama4": "Llama4ForCausalLM"}
# Attention, router, and whatever else the family has, beside its routed experts.
MODULES = {"deepseek_v3": ("q_a_proj", "kv_b_proj", "o_proj")}
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
MORE = {
    "deepseek_v3": ("mlp.gate.weight", "shared_experts.up_proj.weight", "0.mlp.down_proj.weight"),
    "gpt_oss": (),
    "llama4": (),
}


def base_model(family: str, **changes: Any) -> Any:
    """GPT-OSS has experts transposed, gate and up interleaved, with biases; Llama 4 transposed, and does not say so."""
    if family in CLASSES:
        return tiny.random_model(CLASSES[family], family).eval()
    return tiny_model(family, **changes).eval()


def adapted(
    base: nn.Module, modules: Sequence[str], parameters: Sequence[str], directory: Path, **config: Any
) -> torch.Tensor:
    """Save an adapter of stock PEFT to `directory`; the logits of its model."""
    return logits(random_adapter(copy.deepcopy(base), directory, modules, parameters, **config))


def write_family(family: str, root: Path, **config: Any) -> torch.Tensor:
    """A base in `root/base`, an adapter of everything in `root/adapter` that names it; the logits of both."""
    base = base_model(family)
    base.save_pretrained(root / "base")
    base.name_or_path = base.config._name_or_path = str(root / "base")
    modules, more = MODULES.get(family, ("q_proj", "v_proj")), MORE.get(family, ("mlp.gate.weight",))
    return adapted(base, modules, [*EXPERTS, *more], root / "adapter", **config)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    result: torch.Tensor = model.eval()(input_ids=IDS, use_cache=False).logits
    return result
