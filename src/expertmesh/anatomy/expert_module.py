"""Find out what one expert of an `nn.ModuleList` computes: which linears go up, which goes down, and what is between.

Nothing is read from names. The activation is the member's own forward without its linears: the ups return their share
of the pre-activation, the down projection returns its input. The roles of the linears are tried, and the member's own
forward on random tokens decides.

The proofs here and in introspection run a `small_copy` of a module: one on meta has no values, and one of a real model
is too large to run for a test. The copy has the same code and numbers, except for the named sizes, which are small.

    H hidden, I intermediate, P pairs; the pre-activations of all ups lie side by side, `[P, 2I]` or `[P, I]`
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import permutations
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig

from expertmesh.config.errors import InputError

_Module = TypeVar("_Module", bound=nn.Module)
TOLERANCE = 1e-9
_HIDDEN, _INTERMEDIATE, _TOKENS = 16, 12, 5


def small_copy(module: _Module, sizes: Mapping[int, int], generator: torch.Generator) -> _Module:
    """Return a copy in fp64 on the CPU with random values.

    Each dim and each number that is a key of `sizes` becomes its value. Weights are small enough for activations to
    stay near one.
    """
    memo: dict[int, object] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        # `deepcopy` takes the entries of its memo for copies already made, so that nothing large is ever copied.
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


@dataclass(frozen=True, slots=True)
class ExpertModuleSpec:
    """One expert that is a module of its own, and how its code computes."""

    ups: tuple[str, ...]
    """Names of the up projections in the module."""
    down: str
    """Name of the down projection in the module."""
    biased: bool
    """True if its linears have biases."""
    hidden_size: int
    """H."""
    intermediate_size: int
    """I."""
    between: nn.Module
    """Maps pre-activations to activations by the module's own code."""
    silu_gated: bool
    """True if that is `silu(gate) * up`."""


def expert_module_spec(name: str, members: nn.ModuleList) -> ExpertModuleSpec:
    """Return how the members of a list compute; all do so in the same way.

    Raises:
        InputError: It is not known; names the list.
    """
    first = members[0]
    kind = type(first).__name__
    odd = [index for index, member in enumerate(members) if _facts(member) != _facts(first)]
    if odd:
        raise _unsupported(
            f"{name}.{odd[0]}: differs in structure from {name}.0 ({kind}); such lists are not supported"
        )
    linears = {child: module for child, module in first.named_children() if type(module) is nn.Linear}
    held = {f"{child}.{leaf}" for child, module in linears.items() for leaf, _ in module.named_parameters()}
    biases = {module.bias is not None for module in linears.values()}
    if held != set(first.state_dict()) or len(linears) not in (2, 3) or len(biases) != 1:
        raise _unsupported(
            f"{name} is a list of {kind} modules, which are not MLPs of two or three linear layers alike; "
            "it is not supported"
        )
    specs = [
        ExpertModuleSpec(
            ups=ups,
            down=down,
            biased=biases == {True},
            hidden_size=linears[down].out_features,
            intermediate_size=linears[down].in_features,
            between=(between := _between(first, ups, down)),
            silu_gated=_is_silu_gated(between, len(ups)),
        )
        for ups, down in _roles(linears)
        if _agrees(first, ups, down)
    ]
    if specs:
        # Gate and up can stand in either order; in this one the derivative is known.
        return next((spec for spec in specs if spec.silu_gated), specs[0])
    raise _unsupported(
        f"{name} is a list of {kind} modules, whose forward is not down(activation(ups)); it is not supported"
    )


def _unsupported(problem: str) -> InputError:
    return InputError(problem, key="model.unsupported-expert-list")


def _facts(member: nn.Module) -> list[object]:
    """Return the classes, tensors and simple settings of a member and its parts."""
    simple = (bool, int, float, str)
    settings = [
        (name, type(part), {key: value for key, value in vars(part).items() if isinstance(value, simple)})
        for name, part in member.named_modules()
    ]
    return [settings, [(name, tensor.shape, tensor.dtype) for name, tensor in member.state_dict().items()]]


def _roles(linears: dict[str, nn.Linear]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the assignments of linears to roles that fit the shapes."""
    for *ups, down in permutations(linears):
        transposed = (linears[down].out_features, linears[down].in_features)
        if all((linears[up].in_features, linears[up].out_features) == transposed for up in ups):
            yield tuple(ups), down


class _Share(nn.Module):
    """A replacement for an up projection that returns its columns of the pre-activation."""

    def __init__(self, number: int, count: int) -> None:
        super().__init__()
        self.number, self.count = number, count

    def forward(self, pre: torch.Tensor) -> torch.Tensor:
        return pre.chunk(self.count, dim=-1)[self.number]


def _between(member: nn.Module, ups: tuple[str, ...], down: str) -> nn.Module:
    """Return the member without its linears: a function from pre-activations to activations."""
    stubs = {id(member.get_submodule(up)): _Share(number, len(ups)) for number, up in enumerate(ups)}
    return deepcopy(member, {**stubs, id(member.get_submodule(down)): nn.Identity()})


def small_sizes(hidden: int, width: int) -> dict[int, int]:
    """Return small sizes in place of the members' real ones."""
    sizes = {hidden: min(hidden, _HIDDEN)}
    sizes.setdefault(width, min(width, _INTERMEDIATE))
    return sizes


def _agrees(member: nn.Module, ups: tuple[str, ...], down: str) -> bool:
    """Return whether down(between(ups)) equals the member's own forward, in training and in evaluation."""
    generator = torch.Generator().manual_seed(0)
    linear: Any = member.get_submodule(down)
    between = _between(member, ups, down)
    small = small_copy(member, small_sizes(linear.out_features, linear.in_features), generator)
    small_down: Any = small.get_submodule(down)
    errors = []
    for training in (True, False):
        small.train(training)
        between.train(training)
        x_TH = torch.randn(_TOKENS, small_down.out_features, dtype=torch.float64, generator=generator)
        try:
            pre = torch.cat([small.get_submodule(up)(x_TH) for up in ups], dim=-1)
            errors.append(relative_error([small(x_TH)], [small_down(between(pre))]))
        except Exception:
            # The member's own code on what it was not written for: this assignment is not it.
            return False
    return max(errors) <= TOLERANCE


def _is_silu_gated(between: nn.Module, ups: int) -> bool:
    """Return whether `between` is `silu(gate) * up`, by its values."""
    pre_P2I = torch.randn(_TOKENS, 2 * _INTERMEDIATE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gate_PI, up_PI = pre_P2I.chunk(2, dim=-1)
    return ups == 2 and torch.allclose(between(pre_P2I), F.silu(gate_PI) * up_PI, rtol=TOLERANCE, atol=TOLERANCE)
