"""What stands in a pipeline stage's model for what is on other stages: no parameters, the same places and names.

A block's placeholder gives the hidden state on, or the one that it is told to give; the embedding's gives zeros that
nobody sees; any other module's gives its argument back. pipeline.py says which part of a model gets one.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@contextmanager
def placeholders_for(bare: nn.Module, names: Iterable[str], blocks: Sequence[str], items: int) -> Iterator[None]:
    """While in it, a model on meta has placeholders for `names`."""
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
    """Replace the parts `names`, in place; returns what was there, the last replaced first. A parameter, which no text
    uses, becomes None. `dtype_of` says in which dtype a parameter is used.
    """
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    replaced: dict[str, nn.Module | nn.Parameter] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        if leaf in (parameters := model.get_submodule(parent)._parameters):
            parameter = parameters[leaf]
            assert parameter is not None
            replaced = {name: parameter, **replaced}
            _put(model, name, None)
            continue
        module = model.get_submodule(name)
        stand_in: nn.Module
        if name in blocks:
            stand_in = Placeholder(module, items)
        elif any(part is embedding for part in module.modules()):
            stand_in = _NoEmbedding(embedding, dtype_of(f"{name}.weight"), device)
        else:
            stand_in = _PassThrough(module, dtype_of(f"{name}.weight"), device)
        replaced = {name: module, **replaced}
        _put(model, name, stand_in)
    return replaced


def _put(model: nn.Module, name: str, part: nn.Module | nn.Parameter | None) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, part)


@dataclass(slots=True)
class Leaving:
    """The hidden state behind a stage's last block, once it has run; None on the last stage, whose base gives it."""

    hidden: torch.Tensor | None = None


class Placeholder(nn.Module):
    """In the place of a block that does not compute here: gives its input on, and has the block's plain attributes. A
    block that returns `items` things, the hidden state first, has None for the others.
    """

    def __init__(self, block: nn.Module, items: int) -> None:
        super().__init__()
        for name, value in vars(block).items():
            if not name.startswith("_") and not isinstance(value, torch.Tensor | nn.Module) and name != "training":
                setattr(self, name, value)
        if isinstance(getattr(block, "gradient_checkpointing", None), bool):
            self.gradient_checkpointing = False  # of the class in some families; every block has to have the switch
        self.gives: torch.Tensor | None = None
        self.catches: Leaving | None = None
        self.others = None if items == 0 else (None,) * (items - 1)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.catches is not None:
            self.catches.hidden = hidden_states
        given = hidden_states if self.gives is None else self.gives
        return given if self.others is None else (given, *self.others)


def idle(block: nn.Module, items: int) -> Placeholder:
    placeholder = Placeholder(block, items)
    # A child, so that whoever walks through the model while another stage runs (FSDP2, transformers) finds it.
    placeholder.block = block
    return placeholder


class _PassThrough(nn.Module):
    """In the place of a module around the blocks that is on another stage: gives its first argument back. A family may
    ask it for the dtype of its weight, which takes no memory; nobody may use the values (stage_probe.py sees to that).
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.stands_for = type(module).__name__
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor):
            self.weight = torch.empty((), dtype=dtype, device=device).expand(weight.shape)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else next(iter(kwargs.values()))
        # FSDP2 wants no view from the root, and a head is asked about no token.
        return given.clone() if isinstance(given, torch.Tensor) and given.numel() == 0 else given


class _NoEmbedding(nn.Module):
    """In the place of the embedding: zeros of its shape and dtype, which take no memory and which no block sees."""

    def __init__(self, embedding: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        weight = embedding.weight
        assert isinstance(weight, torch.Tensor)
        self.num_embeddings, self.embedding_dim = weight.shape[0], weight.shape[-1]
        self.padding_idx = getattr(embedding, "padding_idx", None)
        # No parameter: for families that ask it for dtype or device.
        self.weight = torch.empty(0, dtype=dtype, device=device)

    def forward(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        zero = torch.zeros((), dtype=self.weight.dtype, device=input_ids.device)
        return zero.expand(*input_ids.shape, self.embedding_dim)
