"""Put adapters on a frozen model: parameters A and B beside each target, and a forward that uses them.

Works on meta, before sharding, so that FSDP2 and expert parallelism treat adapters like every other parameter: one
global tensor, sharded like the weight that it adapts. Never changes the base: its names, its values, and the forward of
its classes stay as they are. `adapters_off` lets the base compute alone.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from expertmesh.adapters.targets import Target
from expertmesh.compat import parameter_slots
from expertmesh.config import LoraConfig
from expertmesh.config.errors import InputError
from expertmesh.experts.lora_state import AdapterState, adapter_state, number_rows, running_adapters_of
from expertmesh.state.model_view import attach_to_module, module_state
from expertmesh.state.patching import exchanged, mix_in


def attach_adapters(model: nn.Module, targets: Sequence[Target], lora: LoraConfig, dtype: torch.dtype) -> None:
    """Freeze `model` and give every target an adapter, all zeros, in `dtype` (that of masters). No communication."""
    model.requires_grad_(False)
    state = AdapterState(dropout=lora.dropout)
    for target in targets:
        module = model.get_submodule(target.module)
        device = next(module.parameters()).device
        for leaf, shape in zip(target.leaves, target.shapes, strict=True):
            module.register_parameter(leaf, nn.Parameter(torch.zeros(shape, dtype=dtype, device=device)))
        scaling = {**(module_state(module).lora_scaling or {}), target.parameter or "weight": target.scaling}
        attach_to_module(module, lora_state=state, lora_name=target.name, lora_scaling=scaling)
        if target.experts is None:
            mix_in(module, _LinearForward if target.parameter is None else _ParameterForward)
    model.register_forward_pre_hook(_take_row_numbers, with_kwargs=True)
    model.register_forward_hook(_forget_row_numbers)


def _take_row_numbers(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Take `row_numbers` `[B]` out of the arguments of the model's forward, and number its rows by them.

    For a user who calls the model without the training loop, which calls `number_rows` itself.
    """
    if "row_numbers" not in kwargs:
        return None
    row_numbers_B = kwargs.pop("row_numbers")
    ids_BS = args[0] if args else kwargs.get("input_ids")
    length = (kwargs["inputs_embeds"] if ids_BS is None else ids_BS).shape[1]
    number_rows(model, row_numbers_B, length, lambda number_BS: number_BS)
    return args, kwargs


def _forget_row_numbers(model: nn.Module, args: Any, output: Any) -> None:
    """Forget the numbers after a forward, so that the next one without numbers raises instead of using equal masks."""
    if (state := adapter_state(model)) is not None:
        state.number_T = None


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Let `model` compute bit for bit as its frozen base does while the block runs: the reference of DPO, for example.

        with em.adapters_off(model), torch.no_grad():
            reference = model(**batch).logits

    Every rank enters and leaves it around the same forwards; a backward of one of them belongs inside as well. Values
    and gradients of the adapters stay as they are. No communication.

    Raises:
        InputError: The model has no adapters.
    """
    state = adapter_state(model)
    if state is None:
        raise InputError(
            f"{type(model).__name__} has no adapters to turn off; load it with lora, or take a second model",
            key="model.no-adapters",
        )
    before = state.is_off
    state.is_off = True
    try:
        yield
    finally:
        state.is_off = before


class _LinearForward(nn.Module):
    """A forward that is mixed in before `nn.Linear`: adds the adapter's two products."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(x)
        state, module = running_adapters_of(self), module_state(self)
        if state is None:
            return out
        assert module is not None
        # Where tp splits the layer these are this rank's parts, and plain tensors for the time of the call.
        a_rK, b_Nr = (parameter_slots(self)[leaf].to(x.dtype) for leaf in ("lora_A", "lora_B"))
        kept = state.dropped(x, module.lora_name, module.first_column) if self.training else x
        return torch.add(out, F.linear(F.linear(kept, a_rK), b_Nr), alpha=module.lora_scaling["weight"])


class _ParameterForward(nn.Module):
    """A forward that is mixed in before a module with a small 2-D weight (a router): uses the adapted weight."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state, weight_NK = running_adapters_of(self), parameter_slots(self)["weight"]
        if state is None:
            return super().forward(*args, **kwargs)
        assert weight_NK is not None
        a_rK, b_Nr = (self.get_parameter(f"weight_lora_{which}").to(weight_NK.dtype) for which in "AB")
        adapted: Any = torch.add(weight_NK, b_Nr @ a_rK, alpha=module_state(self).lora_scaling["weight"])
        with exchanged(parameter_slots(self), {"weight": adapted}):
            return super().forward(*args, **kwargs)
