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
from expertmesh.state.patching import exchanged, mix_in
from expertmesh.state.sharded_model import attach_to_module, module_state


def attach_adapters(model: nn.Module, targets: Sequence[Target], lora: LoraConfig, dtype: torch.dtype) -> None:
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
        attach_to_module(module, lora_state=state, lora_name=target.name)
        if target.experts is None:
            mix_in(module, _LinearForward if target.parameter is None else _ParameterForward)


class _LinearForward(nn.Module):
    """In front of `nn.Linear`: adds the adapter's two products."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(x)
        state, module = adapter_state_of(self), module_state(self)
        assert state is not None
        assert module is not None
        # Where tp splits the layer these are this rank's parts, and plain tensors for the time of the call.
        a_rK, b_Nr = (self._parameters[leaf].to(x.dtype) for leaf in ("lora_A", "lora_B"))  # type: ignore[union-attr]
        kept = state.dropped(x, module.lora_name, module.first_column) if self.training else x
        return torch.add(out, F.linear(F.linear(kept, a_rK), b_Nr), alpha=state.scaling)


class _ParameterForward(nn.Module):
    """In front of a module with a small 2-D weight (a router): its own forward, with the adapted weight."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state, weight_NK = adapter_state_of(self), self._parameters["weight"]
        assert state is not None
        assert weight_NK is not None
        a_rK, b_Nr = (self.get_parameter(f"weight_lora_{which}").to(weight_NK.dtype) for which in "AB")
        adapted: Any = torch.add(weight_NK, b_Nr @ a_rK, alpha=state.scaling)
        with exchanged(self._parameters, {"weight": adapted}):
            return super().forward(*args, **kwargs)
