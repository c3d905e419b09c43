"""Group the blocks of a decoder by kind, so that what holds for one block holds for its group and one of each can be
run.

Reads only the structure of a model, which may be on meta: classes, what tells layers apart, names and shapes of
tensors.
"""

from collections.abc import Callable, Hashable, Sequence

from torch import nn

_TELLS_APART = ("layer_type", "attention_type", "sliding_window")
_NUMBERS = ("layer", "idx", "index")
_PLAIN = (bool, int, float, str, type(None))


def alike(
    model: nn.Module, blocks: Sequence[str], kind: Callable[[str], Hashable] = lambda name: ()
) -> list[list[str]]:
    """Group the names `blocks` by kind, as `kind` tells it beside `block_kind`; groups are in the order of their first
    block.
    """
    groups: dict[Hashable, list[str]] = {}
    for name in blocks:
        groups.setdefault((block_kind(model.get_submodule(name)), kind(name)), []).append(name)
    return list(groups.values())


def block_kind(block: nn.Module) -> Hashable:
    """Return a value that is equal for blocks of equal cost."""
    told = [str(getattr(part, what, "")) for part in (block, *block.children()) for what in _TELLS_APART]
    shapes = [(name, parameter.shape, parameter.requires_grad) for name, parameter in block.named_parameters()]
    return type(block).__name__, tuple(told), tuple(shapes)


def settings(block: nn.Module) -> Hashable:
    """Return all plain settings of a block's modules except the layer number: equal for blocks whose code does the
    same.
    """
    return tuple(
        (name, type(part).__name__, key, value)
        for name, part in block.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, _PLAIN) and not (type(value) is int and any(word in key for word in _NUMBERS))
    )
