"""Which shared experts a model's own code runs behind the routed ones, on the same tokens: these can compute while rows
of the others travel. Found by running each Mixture-of-Experts module on meta, once, with calls recorded.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from expertmesh.anatomy import Anatomy
from expertmesh.state.patching import forwards_replaced

_LENGTH = 4


def shared_behind_routed(model: nn.Module, anatomy: Anatomy) -> dict[str, str]:
    """For each experts module of `model`, on meta, the shared expert that runs behind it, where there is one such."""
    found: dict[str, str] = {}
    for spec in anatomy.experts:
        parent = spec.name.rpartition(".")[0]
        shared = [name for name in anatomy.shared_experts if name.rpartition(".")[0] == parent]
        behind = [name for name in shared if _runs_behind(model, parent, spec.name, name, spec.hidden_size)]
        if len(behind) == 1:
            found[spec.name] = behind[0]
    return found


def _runs_behind(model: nn.Module, parent: str, experts: str, shared: str, hidden_size: int) -> bool:
    """Whether it is called once, behind the routed experts, with what they got, and returns as much."""
    calls: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def recorded(name: str, own: Callable[..., torch.Tensor], hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        calls.append((name, hidden, out := own(hidden, *rest)))
        return out

    modules = {name: model.get_submodule(name) for name in (experts, shared)}
    own = {experts: lambda hidden, *_: torch.zeros_like(hidden), shared: modules[shared].forward}
    forwards = {module: partial(recorded, name, own[name]) for name, module in modules.items()}
    dtype = next(modules[shared].parameters()).dtype
    try:
        with forwards_replaced(forwards), torch.no_grad():
            model.get_submodule(parent)(torch.empty(1, _LENGTH, hidden_size, dtype=dtype, device="meta"))
    except Exception:  # of all kinds: code that needs more than hidden states, or values; its order stays as it is
        return False
    if [name for name, *_ in calls] != [experts, shared]:
        return False
    (_, routed, _), (_, given, out) = calls
    same = routed.untyped_storage()._cdata == given.untyped_storage()._cdata and routed.numel() == given.numel()
    return same and out.shape == given.shape
