"""Share among all LoRA adapters of one model a dropout whose mask depends on the token alone.

The mask does not depend on the rank, the order, or how often it is computed: a counter-based generator (splitmix64, doi
10.1145/2660193.2660195) maps (salt, token number, column) to a uniform number. So every layout, micro-batch size and
recomputation drops the same elements, and no mask is kept. The salt stands for seed and layer; tokens of other steps
have other numbers.

    P pairs or tokens
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from expertmesh.compat import parameter_slots
from expertmesh.config.errors import InputError
from expertmesh.state.model_view import attach_to_module, is_adapter, module_state, sharded

_BLOCK_ELEMENTS = 1 << 20
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True, slots=True)
class Dropout:
    """The dropout of one adapter's input rows."""

    probability: float
    """The probability that an element is dropped."""
    salt: int
    """A number for the seed and the adapted module."""
    token_numbers: torch.Tensor
    """The token of the optimizer step of each row, int64, equal in every layout."""


@dataclass(slots=True)
class AdapterState:
    """The state of a model's adapters, held by the model and by every adapted module."""

    dropout: float = 0.0
    """The probability of `lora.dropout`."""
    seed: int = 0
    """The seed of the masks."""
    token_number_T: torch.Tensor | None = None
    """Numbers of the tokens of the current micro-batch, int64: unique in a run, equal in every layout."""
    is_off: bool = False
    """True if the base computes alone."""

    def dropout_of(self, module: str, tokens: int) -> Dropout | None:
        """Return the dropout of one adapted module's input of `tokens` rows, or None if there is none."""
        if self.dropout == 0.0:
            return None
        if self.token_number_T is None or self.token_number_T.numel() != tokens:
            seen = "none" if self.token_number_T is None else str(self.token_number_T.numel())
            raise InputError(
                f"lora.dropout: {module} gets {tokens} rows, but {seen} are numbered; give the batch row_numbers (one "
                "per sequence, never twice in a run), or set lora.dropout to 0",
                key="data.row-numbers-mismatch",
            )
        return Dropout(self.dropout, salt_of(self.seed, module), self.token_number_T)

    def dropped(self, x: torch.Tensor, module: str, first_column: int = 0) -> torch.Tensor:
        """Return `x` `[..., in]` with its dropout. Where tp splits `in`, this rank's part starts at `first_column`."""
        dropout = self.dropout_of(module, x.numel() // x.shape[-1])
        return x if dropout is None else x * keep_mask(dropout, x.shape[-1], x.dtype, first_column).view(x.shape)


def running_adapters_of(module: nn.Module) -> AdapterState | None:
    """Return what the adapters of this very module share with all others; None without any, or while they are off."""
    state = module_state(module).lora_state
    return None if state is None or state.is_off else state


def adapter_state(model: nn.Module) -> AdapterState | None:
    """Return the state that the model's adapters share, or None for a model without adapters."""
    attached = sharded(model).lora_state
    states = (module_state(module).lora_state for module in model.modules())
    return attached or next((state for state in states if state is not None), None)


def bias_of(layer: nn.Module) -> torch.Tensor | None:
    """Return the bias of a linear layer with what its adapter adds to it, or None without any."""
    bias_N, added_N = (parameter_slots(layer).get(leaf) for leaf in ("bias", "bias_lora_W"))
    if bias_N is None or added_N is None or running_adapters_of(layer) is None:
        return bias_N
    return torch.add(bias_N, added_N.to(bias_N.dtype), alpha=module_state(layer).lora_scaling["weight"])


def drop_adapters(module: nn.Module) -> None:
    """Restore this very module as it was before it got adapters."""
    for name in [name for name in parameter_slots(module) if is_adapter(name)]:
        delattr(module, name)
    if module_state(module).lora_state is not None:
        attach_to_module(module, lora_state=None, lora_scaling={}, lora_rows=None)


def number_rows(
    model: nn.Module, row_numbers_B: torch.Tensor | None, length: int, cut: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Give the model's adapters the numbers of the next rows of `length` positions; does nothing without dropout.

    A token's number follows from its row and position, for any padding. `cut` takes this rank's part of `[B, S]`.
    """
    state = adapter_state(model)
    if state is None or state.dropout == 0.0:
        return
    state.token_number_T = None
    if row_numbers_B is not None:
        positions = torch.arange(length, device=row_numbers_B.device)
        # 24 bits for positions: no two tokens of a run share a number, whatever the length of their rows.
        state.token_number_T = cut((row_numbers_B[:, None] << 24) + positions).reshape(-1)


def keep_mask(dropout: Dropout, width: int, dtype: torch.dtype, first_column: int = 0) -> torch.Tensor:
    """Return `[P, width]`: 0 with the dropout's probability, else 1 / (1 - probability). No host synchronisation.

    The columns are those from `first_column` on.
    """
    token_number_P = dropout.token_numbers
    column_W = torch.arange(first_column, first_column + width, device=token_number_P.device)
    keep_PW = torch.empty(token_number_P.shape[0], width, dtype=dtype, device=token_number_P.device)
    # Of the 2**53 values that the upper bits take, as many are dropped as the probability says.
    threshold = int(dropout.probability * 2**53)
    scale = 1.0 / (1.0 - dropout.probability)
    # Some rows at a time: the int64 numbers are four times as large as the mask in bfloat16.
    rows = max(1, _BLOCK_ELEMENTS // max(1, width))
    start_P = mixed(token_number_P * _signed(_GOLDEN) + _signed(dropout.salt))
    for first in range(0, token_number_P.shape[0], rows):
        bits = mixed(start_P[first : first + rows, None] + column_W * _signed(_GOLDEN))
        keep_PW[first : first + rows] = (_shifted(bits, 11) >= threshold).to(dtype).mul_(scale)
    return keep_PW


def salt_of(*parts: object) -> int:
    """Return a 64-bit number for what a mask depends on beside the token."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def mixed(z: torch.Tensor) -> torch.Tensor:
    """Apply splitmix64's finalizer; int64 arithmetic wraps as the unsigned kind does."""
    z = (z ^ _shifted(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shifted(z, 27)) * _signed(_MIX_2)
    return z ^ _shifted(z, 31)


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int64 right, logically."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number
