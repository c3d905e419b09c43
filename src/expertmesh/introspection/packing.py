"""Whether attention of a family's own code keeps samples apart that are packed into one row: read from that code.

A wrong answer would let samples see each other and say nothing, so what is not understood counts as no.
"""

import ast
import inspect
import re
from typing import Any

from torch import nn

from expertmesh.introspection.attention import carried_state

_CAUSAL_MASK = re.compile(r"create_(\w+_)?causal_mask")


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
    source = inspect.getsource(inspect.getmodule(type(model)) or type(model))
    if "masking_utils" not in source:
        return f"{config.model_type} builds attention masks by code of its own, which may not separate packed samples"
    if not _masks_see_positions(source):
        return f"{config.model_type} builds attention masks without position ids, so samples packed together would mix"
    return None


def _masks_see_positions(source: str) -> bool:
    """Whether every call of a transformers mask function gets `position_ids`, itself or in the dict it unpacks.

    Some families' code forgets them; its masks are then causal over the whole row whatever the positions say.
    """
    tree = ast.parse(source)
    unpacked = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        if any(isinstance(key, ast.Constant) and key.value == "position_ids" for key in node.value.keys)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return all(
        any(
            keyword.arg == "position_ids"
            or (keyword.arg is None and isinstance(keyword.value, ast.Name) and keyword.value.id in unpacked)
            for keyword in call.keywords
        )
        for call in calls
        if isinstance(call.func, ast.Name) and _CAUSAL_MASK.fullmatch(call.func.id)
    )
