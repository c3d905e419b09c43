"""Turn a LoraConfig of PEFT into ours; refuse every field that would compute something else here, by its name.

PEFT is never imported; its config only needs `to_dict`, the content that it would write to adapter_config.json.
"""

import glob
from typing import Any

from expertmesh.adapters.peft_config import (
    lora_of,
    plain_content,
    refuse_content,
    refuse_field,
    refuse_names,
    refuse_start,
)
from expertmesh.adapters.targets import GROUPS
from expertmesh.config import LoraConfig
from expertmesh.config.errors import InputError


def lora_from_peft(peft_config: Any) -> LoraConfig:
    """Return the `em.LoraConfig` that trains the same adapters as a `peft.LoraConfig`. No communication.

    `target_modules` has to be a list of names; `target_parameters` may name routed experts. r, lora_alpha,
    rank_pattern, alpha_pattern, lora_dropout, exclude_modules, use_rslora and init_lora_weights (True, "gaussian")
    are taken over.

    Raises:
        InputError: Another field is set (use_dora, modules_to_save, bias, ...); names the field.
    """
    if not hasattr(peft_config, "to_dict"):
        raise InputError(
            f"lora_from_peft takes a peft.LoraConfig, not a {type(peft_config).__name__}", key="adapter.not-lora"
        )
    content, where = plain_content(peft_config), "peft_config"
    refuse_content(content, where)
    refuse_names(content, where)
    refuse_start(content, where)
    init = content.get("init_lora_weights", True)
    if init is not True and init != "gaussian":
        refuse_field(where, "init_lora_weights", init, 'only True and "gaussian" can be started here')
    modules, parameters = content.get("target_modules") or [], content.get("target_parameters") or []
    exclude = content.get("exclude_modules") or []
    if isinstance(exclude, str):
        refuse_field(where, "exclude_modules", exclude, "it is a pattern; list the modules' names")
    if named := [name for name in exclude if any(each.endswith(f"{name}.weight") for each in parameters)]:
        refuse_field(where, "exclude_modules", named, "target_parameters names its weight, which PEFT does not exclude")
    if not modules and not parameters:
        refuse_field(
            where, "target_modules", content.get("target_modules"), "PEFT chooses by family then; list the modules"
        )
    return lora_of(
        content,
        dropout=float(content.get("lora_dropout") or 0.0),
        # Modules are named by their weight, so that the name does not match a parameter of the same name.
        targets=(*(f"{_text(name)}.weight" for name in modules), *(_text(name) for name in parameters)),
        exclude=tuple(f"{_text(name)}.weight" for name in exclude),
    )


def _text(name: str) -> str:
    """Return a selector for a name in PEFT's config that never means one of our groups."""
    return f"*.{name}" if name in GROUPS else glob.escape(name)
