"""Replace the modules that are on other pipeline stages by placeholders: no parameters, the same places and names.

The placeholder of a block returns its input, or a hidden state that was set on it. That of the embedding returns zeros
that no block uses; that of any other module returns its first argument. pipeline.py decides which parts get one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from expertmesh.compat import parameter_slots


@contextmanager
def placeholders_for(bare: nn.Module, names: Iterable[str], blocks: Sequence[str], items: int) -> Iterator[None]:
    """Put placeholders for `names` into a model on meta while the context is open."""
    dtype = next(iter(bare.parameters())).dtype
    replaced = put_placeholders(bare, names, blocks, items, lambda name: dtype, torch.device("meta"))
    try:
        yield
    finally:
        for name, part in replaced.items():
            _put(bare, name, part)


def put_placeholders(
    model: nn.Module,
    names: Iterable[str],
    blocks: Sequence[str],
    items: int,
    dtype_of: Callable[[str], torch.dtype],
    device: torch.device,
) -> dict[str, nn.Module | nn.Parameter]:
    """Replace the parts `names` by placeholders, in place.

    Args:
        names: modules, or parameters that text does not use; these become None.
        blocks: names of all decoder blocks.
        items: how many values a block returns; 0 if it returns the hidden state without a tuple.
        dtype_of: returns the dtype in which a parameter is used, by name.

    Returns:
        The replaced parts by name, the last replaced first.
    """
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    replaced: dict[str, nn.Module | nn.Parameter] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        if leaf in (parameters := parameter_slots(model.get_submodule(parent))):
            parameter = parameters[leaf]
            assert parameter is not None
            replaced = {name: parameter, **replaced}
            _put(model, name, None)
            continue
        module = model.get_submodule(name)
        stand_in = Placeholder(module, items) if name in blocks else _around(module, embedding, name, dtype_of, device)
        replaced = {name: module, **replaced}
        _put(model, name, stand_in)
    return replaced


def idle_around(
    model: nn.Module, names: Iterable[str], dtype_of: Callable[[str], torch.dtype], device: torch.device
) -> dict[str, nn.Module]:
    """Return placeholders by name for modules around the blocks that stay on this rank; each holds its module as child.

    Args:
        names: modules, or parameters that text does not use, which get no placeholder.
        dtype_of: returns the dtype in which a parameter is used, by name.
    """
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    modules = {name: module for name, module in model.named_modules() if name in set(names)}
    placeholders = {name: _around(module, embedding, name, dtype_of, device) for name, module in modules.items()}
    for name, placeholder in placeholders.items():
        placeholder.module = modules[name]
    return placeholders


def _around(
    module: nn.Module, embedding: nn.Module, name: str, dtype_of: Callable[[str], torch.dtype], device: torch.device
) -> nn.Module:
    kind = _NoEmbedding if any(part is embedding for part in module.modules()) else _PassThrough
    return kind(embedding if kind is _NoEmbedding else module, dtype_of(f"{name}.weight"), device)


def _put(model: nn.Module, name: str, part: nn.Module | nn.Parameter | None) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, part)


@dataclass(slots=True)
class Leaving:
    """The output of a stage."""

    hidden: torch.Tensor | None = None
    """The hidden state after the stage's last block, once it has run; None on the last stage: its model returns it."""


@dataclass(frozen=True, slots=True)
class BlockCall:
    """The inputs of a block beside the hidden state (masks, rotary tables), as the model's forward gives them."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    context: Context
    """The context variables of the forward: which samples are packed, which tokens are real."""


class Placeholder(nn.Module):
    """Placeholder of a block that does not compute here: returns its input and has the block's plain attributes.

    If the block returns `items` values, the hidden state first, the others are None. It hands what it is called with to
    `records`, if that is set.
    """

    def __init__(self, block: nn.Module, items: int) -> None:
        super().__init__()
        for name, value in vars(block).items():
            if not name.startswith("_") and not isinstance(value, torch.Tensor | nn.Module) and name != "training":
                setattr(self, name, value)
        if isinstance(getattr(block, "gradient_checkpointing", None), bool):
            # A class attribute in some families; transformers requires the switch on every block.
            self.gradient_checkpointing = False
        self.gives: torch.Tensor | None = None
        self.catches: Leaving | None = None
        self.records: Callable[[BlockCall], None] | None = None
        self.others = None if items == 0 else (None,) * (items - 1)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.catches is not None:
            self.catches.hidden = hidden_states
        if self.records is not None:
            self.records(BlockCall(args, kwargs, copy_context()))
        given = hidden_states if self.gives is None else self.gives
        return given if self.others is None else (given, *self.others)


def idle(block: nn.Module, items: int) -> Placeholder:
    """Return a placeholder for a block of this rank while another of its stages runs; it holds the block as a child."""
    placeholder = Placeholder(block, items)
    # A child, so that code that walks the model while another stage runs (FSDP2, transformers) finds the block.
    placeholder.block = block
    return placeholder


class _PassThrough(nn.Module):
    """Placeholder of a module around the blocks that is on another stage: returns its first argument.

    A family may read the dtype of its weight, which takes no memory; stage_probe.py ensures that no code uses the
    values.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.stands_for = type(module).__name__
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor):
            self.weight = torch.empty((), dtype=dtype, device=device).expand(weight.shape)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else next(iter(kwargs.values()))
        # FSDP2 accepts no view as output of the root, and the head gets no token here, so its output is empty.
        return given.clone() if isinstance(given, torch.Tensor) and given.numel() == 0 else given


class _NoEmbedding(nn.Module):
    """Placeholder of the embedding: returns zeros of its shape and dtype, which take no memory and no block uses."""

    def __init__(self, embedding: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        weight = embedding.weight
        assert isinstance(weight, torch.Tensor)
        self.num_embeddings, self.embedding_dim = weight.shape[0], weight.shape[-1]
        self.padding_idx = getattr(embedding, "padding_idx", None)
        # An empty tensor, not a parameter, for families that read its dtype or device.
        self.weight = torch.empty(0, dtype=dtype, device=device)

    def forward(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        zero = torch.zeros((), dtype=self.weight.dtype, device=input_ids.device)
        return zero.expand(*input_ids.shape, self.embedding_dim)
