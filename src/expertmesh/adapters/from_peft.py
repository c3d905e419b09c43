"""A LoraConfig of PEFT as ours: every field that would compute something else here is refused by its name.

PEFT is never imported; its config only has to say what it would write to adapter_config.json.
"""

import glob
from typing import Any

from expertmesh.adapters.peft_format import refuse_content
from expertmesh.adapters.targets import GROUPS
from expertmesh.config import LoraConfig
from expertmesh.config.errors import InputError


def lora_from_peft(peft_config: Any) -> LoraConfig:
    """A `peft.LoraConfig` as an `em.LoraConfig` that trains the same adapters; no communication.

    `target_modules` has to be a list of names; `target_parameters` may name routed experts. r, lora_alpha,
    lora_dropout, use_rslora and init_lora_weights (True, "gaussian") carry over. Raises `InputError` naming the field
    for whatever else is set: use_dora, modules_to_save, bias, rank_pattern, layers_to_transform, other starts, ...
    """
    if not hasattr(peft_config, "to_dict"):
        raise InputError(
            f"lora_from_peft takes a peft.LoraConfig, not a {type(peft_config).__name__}", key="adapter.not-lora"
        )
    content = {key: _plain(value) for key, value in peft_config.to_dict().items()}
    return lora_of_content(content, "peft_config")


def lora_of_content(content: dict[str, Any], where: str) -> LoraConfig:
    """What adapter_config.json says, to be started anew; `where` is how the sentences call it."""
    refuse_content(content, where)
    init, task = content.get("init_lora_weights", True), content.get("task_type")
    if init is not True and init != "gaussian":
        _refuse(where, "init_lora_weights", init, 'only True and "gaussian" can be started here')
    if task not in (None, "CAUSAL_LM"):
        _refuse(where, "task_type", task, "only causal language models train here; set it to CAUSAL_LM")
    if content.get("inference_mode"):
        _refuse(where, "inference_mode", True, "its adapters would stay frozen; set it to False")
    modules, parameters = content.get("target_modules") or [], content.get("target_parameters") or []
    if not modules and not parameters:
        _refuse(where, "target_modules", content.get("target_modules"), "PEFT chooses by family then; list the modules")
    return LoraConfig(
        r=content["r"],
        alpha=float(content["lora_alpha"]),
        dropout=float(content.get("lora_dropout") or 0.0),
        use_rslora=bool(content.get("use_rslora")),
        init="gaussian" if init == "gaussian" else "default",
        # A module by its weight, so that a parameter of the same name is not meant.
        targets=(*(f"{_text(name)}.weight" for name in modules), *(_text(name) for name in parameters)),
    )


def _text(name: str) -> str:
    """A name of PEFT's as a selector that means no group of ours."""
    return f"*.{name}" if name in GROUPS else glob.escape(name)


def _plain(value: Any) -> Any:
    """Sets as the lists that JSON would have."""
    return sorted(value) if isinstance(value, set | frozenset | tuple) else value


def _refuse(where: str, field: str, value: Any, why: str) -> None:
    raise InputError(f"{where}: {field} is {value!r}: {why}", key="adapter.unsupported-option")
