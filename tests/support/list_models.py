"""Writes tiny models that bring their own code, with experts in an `nn.ModuleList` (list_moe/)."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

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
