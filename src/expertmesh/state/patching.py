"""Replace code or parts of another library's module: forwards, classes, registries.

A model keeps its own classes, names and structure. All replacements call a function of this file, so that they are easy
to find.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Make this module instance run `forward`, which is called with the module's arguments only. Hooks stay."""
    module.forward = forward


@contextmanager
def forwards_replaced(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Make these modules run other forwards inside the block."""
    before = {module: vars(module).get("forward") for module in forwards}
    for module, forward in forwards.items():
        replace_forward(module, forward)
    try:
        yield
    finally:
        for module, own in before.items():
            if own is None:
                del module.forward
            else:
                module.forward = own


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Give these attributes of a module, a class or an object other values inside the block."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def mix_in(instance: Any, kind: type) -> None:
    """Put `kind` in front of the class of this module or parameter instance.

    Methods of `kind` run first and call those of the original class with `super()`.
    """
    instance.__class__ = _mixed(kind, type(instance))  # type: ignore[arg-type]


@cache
def _mixed(kind: type, own: type) -> type:
    """Return one class for all instances of equal classes, because torch.compile compiles again for each class."""
    return type(own.__name__, (kind, own), {})


def set_at(model: nn.Module, name: str, part: nn.Module | torch.Tensor | None) -> None:
    """Put a module or parameter in the place that has this name in the model."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, part)


@contextmanager
def exchanged(slots: MutableMapping[str, Any], values: Mapping[str, Any]) -> Iterator[None]:
    """Put `values` under these names into the parameter or child slots of a module (compat.py) inside the block.

    The write bypasses `__setattr__`, as in torch.func.functional_call: the values need not be parameters.
    """
    before = {name: slots[name] for name in values}
    slots.update(values)
    try:
        yield
    finally:
        slots.update(before)
