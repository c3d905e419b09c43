"""Puts adapters on a frozen model: parameters A and B beside each target, and the forward that uses them.

Works on meta, before sharding, so that FSDP2 and expert parallelism treat adapters like every other parameter: one
global identity, sharded like what they adapt. The base keeps its names, its classes' own forward and its values.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from expertmesh.adapters.targets import Target
from expertmesh.config import LoraConfig
from expertmesh.experts.lora_state import AdapterState, adapter_state_of


def attach(model: nn.Module, targets: Sequence[Target], lora: LoraConfig, dtype: torch.dtype) -> None:
    """Freeze `model` and give every target an adapter in `dtype` (that of masters), all zeros yet. No communication."""
    model.requires_grad_(False)
    state = AdapterState(scaling=lora.scaling, dropout=lora.dropout)
    for target in targets:
        module = model.get_submodule(target.module)
        device = next(module.parameters()).device
        lead = () if target.experts is None else (target.experts,)
        shapes = ((*lead, lora.r, target.in_features), (*lead, target.out_features, lora.r))
        for leaf, shape in zip(target.leaves, shapes, strict=True):
            module.register_parameter(leaf, nn.Parameter(torch.zeros(shape, dtype=dtype, device=device)))
        module._expertmesh_adapter = state  # type: ignore[assignment]
        module._expertmesh_name = target.name  # type: ignore[assignment]
        if target.experts is None:
            kind = _LinearForward if target.parameter is None else _ParameterForward
            module.__class__ = type(type(module).__name__, (kind, type(module)), {})


class _LinearForward(nn.Module):
    """In front of `nn.Linear`: adds the adapter's two products."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(x)
        state = adapter_state_of(self)
        assert state is not None
        # Where tp splits the layer these are this rank's parts, and plain tensors for the time of the call.
        a_rK, b_Nr = (self._parameters[leaf].to(x.dtype) for leaf in ("lora_A", "lora_B"))  # type: ignore[union-attr]
        first_column = int(getattr(self, "_expertmesh_first_column", 0))
        kept = state.dropped(x, str(self._expertmesh_name), first_column) if self.training else x
        return torch.add(out, F.linear(F.linear(kept, a_rK), b_Nr), alpha=state.scaling)


class _ParameterForward(nn.Module):
    """In front of a module with a small 2-D weight (a router): its own forward, with the adapted weight."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state, weight_NK = adapter_state_of(self), self._parameters["weight"]
        assert state is not None
        assert weight_NK is not None
        a_rK, b_Nr = (self.get_parameter(f"weight_lora_{which}").to(weight_NK.dtype) for which in "AB")
        adapted: Any = torch.add(weight_NK, b_Nr @ a_rK, alpha=state.scaling)
        # Written past `__setattr__`, as torch.func.functional_call does: for the time of the call it is no parameter.
        self._parameters["weight"] = adapted
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._parameters["weight"] = weight_NK
