"""Runs a Hugging Face model with the weights of one block in memory at a time, forward and backward.

The model has no weights of its own and runs its own code from its root; each *unit* (a decoder block, the embedding,
the norm, the head) gets its weights when it is called and loses them when it returns. torch's activation checkpointing
keeps nothing of a unit but its inputs and runs it again in backward; the gradients of its weights go to a sink. So a
model larger than any device, or than a machine, can be a reference.

Plain autograd and `torch.func.functional_call`: nothing of expertmesh's own layers is in here.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from expertmesh.state.model_view import ModelView
from expertmesh.verification.reference.weights import Weights

# Receives the gradient of one whole tensor, by its name. Called once for each unit that holds it.
Sink = Callable[[str, Tensor], None]


@dataclass(slots=True)
class StreamedModel:
    """A model, given on meta, whose units are fed by `weights`; each run of a unit is `within` a context of its own.

    `trained`: the leaves of the weights whose gradients are wanted. `names`: of tied tensors the first.
    """

    model: PreTrainedModel
    device: torch.device
    blocks: Sequence[str]
    trained: frozenset[str]
    weights: Weights = field(init=False)
    within: Callable[[str], AbstractContextManager[Any]] = field(init=False)
    sink: Sink | None = None
    names: dict[str, str] = field(init=False)
    loose: dict[str, nn.Parameter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = {name: names[0] for names in ModelView(self.model).ties for name in names}
        self.model._apply(self._placeholder)

    @contextmanager
    def fed_by(self, weights: Weights, within: Callable[[str], AbstractContextManager[Any]]) -> Iterator[None]:
        """While the model may be called."""
        self.weights, self.within = weights, within
        units, loose = units_of(self.model, self.blocks)
        meta = {name: self.model.get_parameter(name) for name in loose}
        try:
            for name in units:
                module = self.model.get_submodule(name)
                module.forward = partial(_call_unit, self, name, module, module.forward)
            for name in loose:
                (value,) = self.weights.leaves(self.names[name]).values()
                self.loose[name] = nn.Parameter(value, requires_grad=name in self.trained)
                self._set(name, self.loose[name])
            yield
        finally:
            for name in units:
                del self.model.get_submodule(name).forward
            for name in loose:
                self._set(name, meta[name])
            self.loose.clear()
            del self.weights, self.within  # they hold what the run has recorded

    def backward(self, loss: Tensor, sink: Sink) -> None:
        """Hand the gradient of every trained tensor to `sink`, unit by unit from the last to the first."""
        self.sink = sink
        try:
            loss.backward()
            for name, parameter in self.loose.items():
                if parameter.requires_grad:
                    sink(name, torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        finally:
            self.sink = None

    def _placeholder(self, tensor: Tensor) -> Tensor:
        """A single zero with the shape and the device of the tensor: some models' code asks where a weight is."""
        if not tensor.is_meta:
            return tensor.to(self.device)
        return torch.zeros((), dtype=tensor.dtype, device=self.device).expand(tensor.shape)

    def _set(self, name: str, parameter: nn.Parameter) -> None:
        parent, _, leaf = name.rpartition(".")
        setattr(self.model.get_submodule(parent), leaf, parameter)


def units_of(model: nn.Module, blocks: Sequence[str]) -> tuple[list[str], list[str]]:
    """Units: the blocks, and the largest modules with parameters that hold no block, in module order. And loose
    parameters: those that a module which holds blocks has of its own, few and small; they stay in memory.
    """
    units: list[str] = []
    loose: list[str] = []

    def visit(name: str, module: nn.Module) -> None:
        if name in blocks:
            units.append(name)
        elif any(block.startswith(f"{name}.") or not name for block in blocks):
            loose.extend(leaf for leaf, _ in module.named_parameters(prefix=name, recurse=False))
            for leaf, child in module.named_children():
                visit(f"{name}.{leaf}" if name else leaf, child)
        elif any(True for _ in module.state_dict()):
            units.append(name)

    visit("", model)
    return units, loose


def _call_unit(
    streamed: StreamedModel, name: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """In place of a unit's own `forward`, which runs in here."""
    firsts = {leaf: streamed.names[f"{name}.{leaf}"] for leaf in module.state_dict(keep_vars=True)}

    def run(*args: Any, **kwargs: Any) -> Any:
        leaves = _fresh_leaves(streamed, list(dict.fromkeys(firsts.values())))
        state = {leaf: streamed.weights.value(first, leaves) for leaf, first in firsts.items()}
        wrapped, module.forward = module.forward, forward
        try:
            with streamed.within(name):
                return functional_call(module, state, args, kwargs, tie_weights=False)
        finally:
            module.forward = wrapped

    return checkpoint(run, *args, use_reentrant=False, **kwargs)


def _fresh_leaves(streamed: StreamedModel, firsts: list[str]) -> dict[str, Tensor]:
    """All leaves of the tensors `firsts`, read now; the gradients of those that are trained go to the sink."""
    leaves = {leaf: value for first in firsts for leaf, value in streamed.weights.leaves(first).items()}
    trained = [leaf for leaf in leaves if leaf in streamed.trained]
    if trained:
        # The anchor wants a gradient, so that autograd calls backward.
        anchor = torch.zeros((), device=streamed.device, requires_grad=torch.is_grad_enabled())
        values = _Leaves.apply(anchor, streamed, trained, *(leaves[leaf] for leaf in trained))
        leaves.update(zip(trained, values, strict=True))
    return leaves


class _Leaves(torch.autograd.Function):
    """The trained weights of a unit, as results that the graph need not keep: torch holds on to leaves of its own."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, streamed: StreamedModel, names: list[str], *values: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.streamed = streamed
        ctx.described = [(name, value.shape, value.dtype) for name, value in zip(names, values, strict=True)]
        ctx.set_materialize_grads(False)
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        streamed: StreamedModel = ctx.streamed
        assert streamed.sink is not None, "backward of a streamed model belongs into StreamedModel.backward"
        for (name, shape, dtype), gradient in zip(ctx.described, grads, strict=True):
            # Every rank calls the sink for every tensor: an expert without tokens on this rank has some elsewhere.
            if gradient is None:
                gradient = torch.zeros(shape, dtype=dtype, device=streamed.device)
            streamed.sink(name, gradient)
        return (None,) * (3 + len(grads))
