"""What all adapters of one model share: their scaling, and which token each row is, for dropout that layouts agree on.

Lives below the layers that use it: the expert layer and the linear layers of adapters/attach.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from expertmesh.anatomy import is_adapter
from expertmesh.config.errors import InputError
from expertmesh.experts.dropout import Dropout, keep_mask, salt_of


@dataclass(slots=True)
class AdapterState:
    """One per model, held by every adapted module as `_expertmesh_adapter`.

    `number_T` int64 numbers the tokens of the micro-batch that is being computed: no two tokens of a run have the same
    number, and a token has the same one in every layout.
    """

    scaling: float
    dropout: float = 0.0
    seed: int = 0
    number_T: torch.Tensor | None = None

    def dropout_of(self, module: str, tokens: int) -> Dropout | None:
        """The dropout of one adapted module's input, or None when there is none. `tokens` rows come in."""
        if self.dropout == 0.0:
            return None
        if self.number_T is None or self.number_T.numel() != tokens:
            seen = "none" if self.number_T is None else str(self.number_T.numel())
            raise InputError(
                f"lora.dropout: {module} gets {tokens} rows, but {seen} are numbered; give the batch row_numbers (one "
                "per sequence, never twice in a run), or set lora.dropout to 0"
            )
        return Dropout(self.dropout, salt_of(self.seed, module), self.number_T)

    def dropped(self, x: torch.Tensor, module: str, first_column: int = 0) -> torch.Tensor:
        """`x` `[..., in]` with its dropout. Where tp splits `in`, this rank's part starts at `first_column`."""
        dropout = self.dropout_of(module, x.numel() // x.shape[-1])
        return x if dropout is None else x * keep_mask(dropout, x.shape[-1], x.dtype, first_column).view(x.shape)


def adapter_state_of(module: nn.Module) -> AdapterState | None:
    """What the adapters of this very module share with all others, or None if it has none."""
    state = getattr(module, "_expertmesh_adapter", None)
    return state if isinstance(state, AdapterState) else None


def adapter_state(model: nn.Module) -> AdapterState | None:
    """The state that the model's adapters share, or None for a model without adapters."""
    return next((state for module in model.modules() if (state := adapter_state_of(module))), None)


def drop_adapters(module: nn.Module) -> None:
    """Make this very module what it was before it got adapters."""
    for name in [name for name in module._parameters if is_adapter(name)]:
        delattr(module, name)
    if adapter_state_of(module) is not None:
        del module._expertmesh_adapter


def number_rows(
    model: nn.Module, row_numbers_B: torch.Tensor | None, length: int, own: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Tell the model's adapters which rows of `length` positions come next; nothing without dropout.

    A token's number is its row's and its position, whatever the padding. `own` cuts `[B, S]` to what this rank holds.
    """
    state = adapter_state(model)
    if state is None or state.dropout == 0.0:
        return
    state.number_T = None
    if row_numbers_B is not None:
        positions = torch.arange(length, device=row_numbers_B.device)
        state.number_T = own((row_numbers_B[:, None] << 24) + positions).reshape(-1)
