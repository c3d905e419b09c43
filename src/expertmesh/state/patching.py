"""The one place where code or parts of somebody else's module are replaced: forwards, classes, registries.

A model keeps its own classes, names and structure; what is replaced says so by calling a function of this file.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import nn


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Let this very module run `forward`, which is called with the module's arguments alone. Hooks stay."""
    module.forward = forward


@contextmanager
def forwards_replaced(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """While the block runs, these modules run other forwards."""
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


def mix_in(instance: Any, kind: type) -> None:
    """Put `kind` in front of the class of this very module or parameter: what it defines runs first and calls the
    class's own as `super()`.
    """
    instance.__class__ = _mixed(kind, type(instance))  # type: ignore[arg-type]


@cache
def _mixed(kind: type, own: type) -> type:
    """One class for all alike: torch.compile compiles for each class anew."""
    return type(own.__name__, (kind, own), {})


def register_function(registry: Any, name: str, function: Callable[..., Any]) -> None:
    """Enter `function` into a public registry of transformers, under a name of ours."""
    registry.register(name, function)


@contextmanager
def exchanged(slots: MutableMapping[str, Any], values: Mapping[str, Any]) -> Iterator[None]:
    """While the block runs, a module's `_parameters` or `_modules` hold `values` under these names.

    Written past `__setattr__`, as torch.func.functional_call does: for that time they need not be parameters.
    """
    before = {name: slots[name] for name in values}
    slots.update(values)
    try:
        yield
    finally:
        slots.update(before)
