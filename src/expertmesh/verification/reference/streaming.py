"""Runs a Hugging Face model with the weights of one block in memory at a time, forward and backward.

The model has no weights of its own and runs its own code from its root; each *unit* (a decoder block, the embedding,
the norm, the head) gets its weights when it is called and loses them when it returns. Backward goes through the units
in reverse: each runs again from its saved inputs, with weights that want gradients, and hands these to a sink. So a
model larger than any device, or than a machine, can be a reference.

Plain autograd and `torch.func.functional_call`: nothing of expertmesh's own layers is in here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from expertmesh.anatomy import Anatomy
from expertmesh.verification.reference.recorder import ReferenceRecorder
from expertmesh.verification.reference.weights import Weights
from expertmesh.weights.mapping import model_tensors, tied_names

# Receives the gradient of one whole tensor, by its name. Called once for each unit that holds it.
Sink = Callable[[str, Tensor], None]


@dataclass(slots=True)
class StreamedModel:
    """A model, given on meta, whose units are fed by `weights`; `recorder` looks into each of their runs.

    `trained`: the leaves of the weights whose gradients are wanted. `names`: of tied tensors the first.
    """

    model: PreTrainedModel
    device: torch.device
    trained: frozenset[str]
    weights: Weights = field(init=False)
    recorder: ReferenceRecorder = field(init=False)
    sink: Sink | None = None
    names: dict[str, str] = field(init=False)
    loose: dict[str, nn.Parameter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        state = model_tensors(self.model)
        self.names = {name: names[0] for names in tied_names(state) for name in names}
        self.model._apply(self._placeholder)

    @contextmanager
    def fed_by(self, weights: Weights, recorder: ReferenceRecorder) -> Iterator[None]:
        """While the model may be called."""
        self.weights, self.recorder = weights, recorder
        units, loose = units_of(self.model, recorder.anatomy)
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
            del self.weights, self.recorder  # they hold what the run has recorded

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


def units_of(model: nn.Module, anatomy: Anatomy) -> tuple[list[str], list[str]]:
    """Units: the blocks, and the largest modules with parameters that hold no block, in module order. And loose
    parameters: those that a module which holds blocks has of its own, few and small; they stay in memory.
    """
    units: list[str] = []
    loose: list[str] = []

    def visit(name: str, module: nn.Module) -> None:
        if name in anatomy.blocks:
            units.append(name)
        elif any(block.startswith(f"{name}.") or not name for block in anatomy.blocks):
            loose.extend(leaf for leaf, _ in module.named_parameters(prefix=name, recurse=False))
            for leaf, child in module.named_children():
                visit(f"{name}.{leaf}" if name else leaf, child)
        elif any(True for _ in module.state_dict()):
            units.append(name)

    visit("", model)
    return units, loose


@dataclass(frozen=True, slots=True)
class _Structure:
    """A nested value without its tensors, whose places are marked."""

    values: list[Any]
    spec: Any

    @classmethod
    def split(cls, value: Any) -> tuple["_Structure", list[Tensor]]:
        flat, spec = pytree.tree_flatten(value)
        kept = [_TENSOR if isinstance(each, Tensor) else each for each in flat]
        return cls(kept, spec), [each for each in flat if isinstance(each, Tensor)]

    def filled(self, tensors: list[Tensor]) -> Any:
        rest = iter(tensors)
        return pytree.tree_unflatten([next(rest) if each is _TENSOR else each for each in self.values], self.spec)


_TENSOR = object()  # where a tensor was; None is a value of its own


@dataclass(slots=True)
class _UnitCall:
    """One call of a unit: everything about it but the tensors."""

    streamed: StreamedModel
    name: str
    module: nn.Module
    forward: Callable[..., Any]
    arguments: _Structure
    outputs: _Structure | None = None
    results: int = 0

    def run(self, tensors: list[Tensor], leaves: dict[str, Tensor], again: bool) -> list[Tensor]:
        """The unit's own forward: its output's tensors, then its router logits."""
        streamed = self.streamed
        firsts = {name: streamed.names[f"{self.name}.{name}"] for name in self.module.state_dict(keep_vars=True)}
        state = {name: streamed.weights.value(first, leaves) for name, first in firsts.items()}
        args, kwargs = self.arguments.filled(tensors)
        wrapped = self.module.forward
        self.module.forward = self.forward
        try:
            with streamed.recorder.during(self.name, again):
                output = functional_call(self.module, state, args, kwargs, tie_weights=False)
        finally:
            self.module.forward = wrapped
        self.outputs, results = _Structure.split(output)
        self.results = len(results)
        return [*results, *streamed.recorder.take_router_logits()]

    def leaves(self) -> dict[str, Tensor]:
        """Fresh leaves of all tensors of the unit, each once."""
        firsts = dict.fromkeys(self.streamed.names[f"{self.name}.{name}"] for name in self.module.state_dict())
        return {leaf: value for first in firsts for leaf, value in self.streamed.weights.leaves(first).items()}


def _call_unit(
    streamed: StreamedModel, name: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    arguments, tensors = _Structure.split((args, kwargs))
    call = _UnitCall(streamed, name, module, forward, arguments)
    # The anchor makes autograd call backward also for units whose inputs want no gradient, such as the embedding.
    anchor = torch.zeros((), device=streamed.device, requires_grad=torch.is_grad_enabled())
    results = list(_Unit.apply(call, anchor, *tensors))
    streamed.recorder.keep(name, results[: call.results], results[call.results :])
    assert call.outputs is not None
    return call.outputs.filled(results[: call.results])


class _Unit(torch.autograd.Function):
    """A unit as one step of the graph, of which nothing inside is kept."""

    @staticmethod
    def forward(ctx: Any, call: _UnitCall, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        results = call.run(list(tensors), call.leaves(), again=False)
        ctx.call = call
        ctx.save_for_backward(*tensors)
        # An output that is an input would make autograd lose track of which is which.
        results = [result.clone() if any(result is tensor for tensor in tensors) else result for result in results]
        ctx.mark_non_differentiable(*(result for result in results if not result.is_floating_point()))
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _UnitCall = ctx.call
        streamed, wanted = call.streamed, ctx.needs_input_grad[2:]
        inputs = [
            tensor.detach().requires_grad_() if want else tensor
            for tensor, want in zip(ctx.saved_tensors, wanted, strict=True)
        ]
        leaves = call.leaves()
        trained = {name: leaf.requires_grad_() for name, leaf in leaves.items() if name in streamed.trained}
        with torch.enable_grad():
            results = call.run(inputs, leaves, again=True)
        used = [(r, g) for r, g in zip(results, grads, strict=True) if g is not None and r.requires_grad]
        sources = [*(value for value in inputs if value.requires_grad), *trained.values()]
        found: tuple[Tensor | None, ...] = (None,) * len(sources)
        if sources and used:  # frozen weights below the first adapter have neither
            found = torch.autograd.grad([r for r, _ in used], sources, [g for _, g in used], allow_unused=True)
        of_inputs, of_leaves = iter(found[: sum(wanted)]), found[sum(wanted) :]
        shapes = {name: leaf.detach() for name, leaf in trained.items()}
        del results, used, inputs, leaves, trained, sources, found
        assert streamed.sink is not None, "backward of a streamed model belongs into StreamedModel.backward"
        for (name, leaf), gradient in zip(shapes.items(), of_leaves, strict=True):
            # Every rank calls the sink for every tensor: an expert without tokens on this rank has some elsewhere.
            streamed.sink(name, torch.zeros_like(leaf) if gradient is None else gradient)
        return None, None, *(next(of_inputs) if want else None for want in wanted)
