"""Find the shared experts that a model's code runs after the routed ones, on the same tokens.

They can compute while the rows of the routed experts are sent. Each Mixture-of-Experts module runs once on meta, with
its calls recorded; nothing here reads weights or communicates.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from expertmesh.anatomy import Anatomy
from expertmesh.compat import storage_key
from expertmesh.state.patching import forwards_replaced

_LENGTH = 4


def shared_behind_routed(model: nn.Module, anatomy: Anatomy) -> dict[str, str]:
    """Return the shared expert that runs after the routed ones, by experts module of a `model` on meta.

    Experts modules with none or several such shared experts are left out.
    """
    found: dict[str, str] = {}
    for spec in anatomy.experts:
        parent = spec.name.rpartition(".")[0]
        shared = [name for name in anatomy.shared_experts if name.rpartition(".")[0] == parent]
        behind = [name for name in shared if _runs_behind(model, parent, spec.name, name, spec.hidden_size)]
        if len(behind) == 1:
            found[spec.name] = behind[0]
    return found


def _runs_behind(model: nn.Module, parent: str, experts: str, shared: str, hidden_size: int) -> bool:
    """Return whether a shared expert is called once, after the routed experts, on their input, and keeps its shape."""
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
    except Exception:  # code that needs other arguments, or values; its order is then not changed
        return False
    if [name for name, *_ in calls] != [experts, shared]:
        return False
    (_, routed, _), (_, given, out) = calls
    same = (
        storage_key(routed.untyped_storage()) == storage_key(given.untyped_storage())
        and routed.numel() == given.numel()
    )
    return same and out.shape == given.shape
