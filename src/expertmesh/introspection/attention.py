"""What mixes the positions of a row inside a decoder block, read off the model's code and configuration on meta.

Attention that goes through transformers' registry (`ALL_ATTENTION_FUNCTIONS`) is known: context.py stands in for the
function. Whatever else looks along the sequence (state spaces, linear attention, convolutions, attention in code of its
own, positions numbered by the module itself) is found here, so that cp and packing can refuse it by name.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from expertmesh.anatomy import Anatomy, is_inside
from expertmesh.introspection.source_code import along_the_sequence, mask_refusal, registry_call

# Kinds of layers (config.layer_types) that mix positions by something other than attention over all of them.
_RECURRENT_LAYERS = ("linear_attention", "mamba", "recurrent", "conv", "short_conv", "compressed")


def carried_state(model: nn.Module, within: Sequence[str] = ("",)) -> str | None:
    """What carries state along the sequence in the modules under the names `within`, other than attention; or None."""
    config: Any = model.config
    kinds: set[str] = set(getattr(config.get_text_config(), "layer_types", None) or ())
    recurrent = sorted(kind for kind in kinds if any(name in kind for name in _RECURRENT_LAYERS))
    if recurrent:
        return f"{recurrent[0]} layers"
    for parent in within:
        for name, module in model.get_submodule(parent).named_modules(prefix=parent):
            parameters = {leaf for leaf, _ in module.named_parameters(recurse=False)}
            if isinstance(module, nn.Conv1d) or {"A_log", "dt_bias"} & parameters:
                return str(name)
    return None


def attentions(model: nn.Module, block: str) -> dict[str, Any]:
    """The modules of a block whose code calls transformers' attention registry, by name."""
    named = model.get_submodule(block).named_modules(prefix=block)
    return {name: module for name, module in named if registry_call(module) is not None}


def own_code_along_the_sequence(model: nn.Module, anatomy: Anatomy, block: str) -> tuple[str, str] | None:
    """The first module of a block whose code may look along the sequence by itself, and what it uses; or None.

    Experts are left out: they are called with tokens, not with rows. The attention function is no part of its class.
    """
    experts = [spec.name for spec in anatomy.experts]
    for name, module in model.get_submodule(block).named_modules(prefix=block):
        inside = any(name == each or is_inside(name, each) for each in experts)
        if not inside and (found := along_the_sequence(module)) is not None:
            return name, found
    return None


def packing_refusal(model: nn.Module) -> str | None:
    """Why attention cannot be kept inside each packed sample, or None if it can.

    transformers' mask functions keep it inside when position ids restart; layers that carry a state along the
    sequence do not know about samples, and neither does a model with mask code of its own.
    """
    config: Any = model.config
    if what := carried_state(model):
        return f"{config.model_type} carries state along the sequence ({what}), so samples packed together would mix"
    if any(hasattr(module, "get_rope_index") for module in model.modules()):
        return f"{config.model_type} numbers positions along several axes, so samples do not start again at position 0"
    refusal = mask_refusal(model)
    return None if refusal is None else f"{config.model_type} {refusal}"
