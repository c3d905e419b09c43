"""Make small random copies of a model's modules, to run their own code in the proofs before any weight is read.

A module on meta has no values, and one of a real model is too large to run for a test. Its copy has the same code and
the same numbers, except for the named sizes: those are small, in parameters and in what modules store.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import TypeVar

import torch
from torch import nn
from transformers import PreTrainedConfig

_Module = TypeVar("_Module", bound=nn.Module)


def small_copy(module: _Module, sizes: Mapping[int, int], generator: torch.Generator) -> _Module:
    """Return a copy in fp64 on the CPU with random values.

    Each dim and each number that is a key of `sizes` becomes its value. Weights are small enough for activations to
    stay near one.
    """
    memo: dict[int, object] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        # `deepcopy` takes what it is told has been copied already, so that nothing large ever is.
        shape = [sizes.get(size, size) for size in tensor.shape]
        if not tensor.is_floating_point():
            memo[id(tensor)] = torch.zeros(shape, dtype=tensor.dtype)
            continue
        value = torch.randn(shape, dtype=torch.float64, generator=generator) * 0.5
        memo[id(tensor)] = nn.Parameter(value) if isinstance(tensor, nn.Parameter) else value
    copy = deepcopy(module, memo)
    configs = {id(c): c for part in copy.modules() for c in vars(part).values() if isinstance(c, PreTrainedConfig)}
    for part in [*copy.modules(), *configs.values()]:
        for name, value in vars(part).items():
            if type(value) is int and value in sizes:
                setattr(part, name, sizes[value])
    return copy


def relative_error(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    """Return the worst relative difference of two lists of tensors, NaN if any is NaN."""
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(first, second, strict=True)]
    return float(torch.stack([(a - b).norm() / a.norm().clamp_min(1e-30) for a, b in pairs]).max())
