"""Writes tiny models that bring their own code: with experts in an `nn.ModuleList` (list_moe/), or like Qwen3's."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.support.models import tiny_config

_CODE = Path(__file__).parent / "list_moe"


def write_list_model(directory: Path, **changes: Any) -> PreTrainedModel:
    """Save a random model with its code to `directory`, as its own class writes it; also returned. `changes` go into
    its config.
    """
    code = directory.with_name(f"{directory.name}-code")
    shutil.copytree(_CODE, code)
    auto_map = {
        "AutoConfig": "configuration_list_moe.ListMoeConfig",
        "AutoModelForCausalLM": "modeling_list_moe.ListMoeForCausalLM",
    }
    (code / "config.json").write_text(json.dumps({"model_type": "list_moe", "auto_map": auto_map}))
    config = AutoConfig.from_pretrained(code, trust_remote_code=True, **changes)
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    return model


def write_own_qwen(directory: Path, **changes: Any) -> None:
    """Write the config and the code of a model without weights, whose classes are derived from Qwen3's."""
    code = """
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

class OwnConfig(Qwen3MoeConfig):
    model_type = "own_moe"

class OwnForCausalLM(Qwen3MoeForCausalLM):
    config_class = OwnConfig
"""
    auto_map = {"AutoConfig": "own_moe.OwnConfig", "AutoModelForCausalLM": "own_moe.OwnForCausalLM"}
    content = tiny_config("qwen3_moe", **changes).to_dict() | {"model_type": "own_moe", "auto_map": auto_map}
    directory.mkdir()
    (directory / "own_moe.py").write_text(code)
    (directory / "config.json").write_text(json.dumps(content))
