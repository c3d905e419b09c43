"""Run a Hugging Face model with the weights of one block in memory at a time, forward and backward.

The model runs its family's code from the root, but holds no weights. Each *unit* (a decoder block, the embedding, the
norm, the head) gets its weights when it is called and drops them when it returns. torch's activation checkpointing
stores only the inputs of a unit and runs it again in backward; the gradients of its weights go to a sink. So a model
larger than any device, or than a machine, can be a reference. It uses plain autograd and `torch.func.functional_call`,
and never expertmesh's layers.

`Weights` are read (or drawn) each time a unit needs them, by transformers' conversion rules, with one tensor in memory
at a time. They are held in memory only for several steps of an unsharded model that fits into the machine. Nothing here
communicates.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from expertmesh.adapters.plan import AdapterPlan
from expertmesh.adapters.targets import Target, new_values_of
from expertmesh.compat import apply_to_tensors
from expertmesh.state.model_view import ModelView, sharded
from expertmesh.state.shards import cut_local, local_tensor
from expertmesh.verification.setup import Setup
from expertmesh.weights.audit import LibraryFiles
from expertmesh.weights.first_values import FirstValues, first_head, open_weights
from expertmesh.weights.lazy import read_values
from expertmesh.weights.mapping import LoadPlan, plan_load, rounded_plan

# Gets the name and the full gradient of a tensor. It is called once for each unit that holds the tensor.
Sink = Callable[[str, Tensor], None]


@dataclass
class Weights:
    """The full tensors of a model, by the first name of each tensor.

    A weight with an adapter has the value `W + scaling * B A`. Frozen weights that the job packs have the values that
    their codes stand for. Files are read through the safetensors library, as in the audit, so an error in expertmesh's
    reader becomes visible.
    """

    model: PreTrainedModel
    """The unsharded model, on meta."""
    setup: Setup
    """The verification; names the directory of the files."""
    job_model: PreTrainedModel
    """The sharded model, which has the adapters and the packed formats."""
    device: torch.device
    """The device for the values."""
    adapted: bool = True
    """Add the adapters to the weights."""
    held: dict[str, Tensor] | None = None
    """The leaves in host memory, by name; None: read from the files."""
    files: LibraryFiles | FirstValues = field(default_factory=LibraryFiles)
    """Reads the files, or draws the first values."""
    plan: LoadPlan = field(init=False)
    """The source of each tensor in the files."""
    adapters: AdapterPlan | None = field(init=False)
    """The adapters of the job, or None."""
    state: dict[str, Tensor] = field(init=False)
    """The tensors of `model`, on meta, by name."""
    targets: dict[str, Target] = field(init=False)
    """The adapter of each adapted weight, by the weight's name."""

    def __post_init__(self) -> None:
        view = ModelView(self.model)
        with open_weights(view, self.setup.directory, self.setup.weights_seed) as checkpoint:
            if isinstance(checkpoint, FirstValues):
                self.files = checkpoint
            self.plan = rounded_plan(self.job_model, plan_load(view, checkpoint))
        self.adapters = sharded(self.job_model).lora_plan if self.adapted else None
        self.state = view.tensors
        targets = self.adapters.targets if self.adapters is not None else ()
        self.targets = {target.weight: target for target in targets}

    def in_memory(self, names: Iterable[str]) -> tuple["Weights", dict[str, Tensor]]:
        """Return the same weights with all leaves of the tensors `names` held in memory, and these leaves.

        The leaves may be trained in place.
        """
        weights = copy(self)
        weights.held = {leaf: value.cpu() for name in names for leaf, value in self.leaves(name).items()}
        return weights, weights.held

    def leaves(self, name: str) -> dict[str, Tensor]:
        """Return the leaves of a tensor on the device, by name: the tensor without adapters, and its A and B."""
        shapes = _shapes(self.adapters, name)
        if self.held is not None:
            return {leaf: self.held[leaf].detach().to(self.device, copy=True) for leaf in (name, *shapes)}
        value = self._of_files(name)
        dtype = value.dtype
        wide = torch.promote_types(dtype, torch.float32)
        adapters = {leaf: adapter_value(leaf, shape).to(self.device, wide) for leaf, shape in shapes.items()}
        return {name: value.to(self.device), **adapters}

    def _of_files(self, name: str) -> Tensor:
        """Return the tensor as the files have it, or the first value of a new head, which no file has."""
        dtype = self.state[name].dtype
        if name not in self.plan.tensors:
            return first_head(self.model, [name], self.setup.config.train.seed)[name].to(dtype)
        return read_values(self.plan.tensors[name], self.files, dtype=dtype)

    def value(self, name: str, leaves: Mapping[str, Tensor]) -> Tensor:
        """Return the tensor, computed from its leaves under autograd."""
        value, target = leaves[name], self.targets.get(name)
        if self.adapters is not None and name in self.adapters.replaced:
            replaced = self.adapters.replaced[name]
            rows, new = replaced.rows, leaves[new_values_of(name)].to(value.dtype)
            if replaced.scaling is not None:
                return value + replaced.scaling * new
            return new if rows is None else value.index_copy(0, torch.tensor(rows, device=value.device), new)
        if target is None:
            return value
        a, b = (leaves[name] for name in target.factors)
        delta = b @ a
        if target.experts is not None and any(
            target.module in spec.holders and spec.transposed for spec in self.setup.anatomy.experts
        ):
            delta = delta.mT
        return value + (target.scaling * delta).to(value.dtype)


@dataclass(slots=True)
class StreamedModel:
    """A model on meta whose units get their weights when they are called."""

    model: PreTrainedModel
    """The model; its tensors on meta are replaced by placeholders on `device`."""
    device: torch.device
    blocks: Sequence[str]
    trained: frozenset[str]
    """The names of the leaves that need gradients."""
    weights: Weights = field(init=False)
    """The source of the weights; set inside `fed_by`."""
    within: Callable[[str], AbstractContextManager[None]] = field(init=False)
    """Returns the context for one run of a unit; set inside `fed_by`."""
    sink: Sink | None = None
    """Gets the gradients; set inside `backward`."""
    names: dict[str, str] = field(init=False)
    """The first name of each tensor, by each of its names; tied tensors have several."""
    loose: dict[str, nn.Parameter] = field(default_factory=dict)
    """The parameters outside of units, in memory inside `fed_by`."""

    def __post_init__(self) -> None:
        self.names = {name: names[0] for names in ModelView(self.model).ties for name in names}
        # One zero, expanded to the shape of a meta tensor: some models' code reads the device of a weight.
        zero = partial(torch.zeros, (), device=self.device)
        apply_to_tensors(self.model, lambda t: zero(dtype=t.dtype).expand(t.shape) if t.is_meta else t.to(self.device))

    @contextmanager
    def fed_by(self, weights: Weights, within: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
        """Allow calls of the model inside the block.

        Args:
            within: Returns the context for one run of a unit, by the unit's name.
        """
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
            del self.weights, self.within  # frees the records that they reference

    def backward(self, loss: Tensor, sink: Sink) -> None:
        """Run backward and pass the gradient of every trained tensor to `sink`, from the last unit to the first."""
        self.sink = sink
        try:
            loss.backward()
            for name, parameter in self.loose.items():
                if parameter.requires_grad:
                    sink(name, torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        finally:
            self.sink = None

    def _set(self, name: str, parameter: nn.Parameter) -> None:
        parent, _, leaf = name.rpartition(".")
        setattr(self.model.get_submodule(parent), leaf, parameter)


def units_of(model: nn.Module, blocks: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the names of the units, in module order, and of the loose parameters.

    Units are the blocks, and the largest modules with tensors that contain no block and are called: no lists. Loose
    parameters are direct parameters of a module that contains blocks; they are few and small, and stay in memory.
    """
    units: list[str] = []
    loose: list[str] = []

    def visit(name: str, module: nn.Module) -> None:
        if name in blocks:
            units.append(name)
        elif isinstance(module, nn.ModuleList) or any(block.startswith(f"{name}.") or not name for block in blocks):
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
    """Run a unit's `forward` with its weights, under activation checkpointing; it replaces the unit's `forward`."""
    firsts = {leaf: streamed.names[f"{name}.{leaf}"] for leaf in module.state_dict(keep_vars=True)}

    def run(*args: Any, **kwargs: Any) -> Any:
        read = map(streamed.weights.leaves, dict.fromkeys(firsts.values()))
        leaves = {leaf: value for each in read for leaf, value in each.items()}
        if trained := [leaf for leaf in leaves if leaf in streamed.trained]:
            # The leaves need no gradient; the anchor does, so that autograd calls `_Leaves.backward`.
            anchor = torch.zeros((), device=streamed.device, requires_grad=torch.is_grad_enabled())
            values = _Leaves.apply(anchor, streamed, trained, *(leaves[leaf] for leaf in trained))
            leaves.update(zip(trained, values, strict=True))
        state = {leaf: streamed.weights.value(first, leaves) for leaf, first in firsts.items()}
        wrapped, module.forward = module.forward, forward
        try:
            with streamed.within(name):
                return functional_call(module, state, args, kwargs, tie_weights=False)
        finally:
            module.forward = wrapped

    return checkpoint(run, *args, use_reentrant=False, **kwargs)


class _Leaves(torch.autograd.Function):
    """Returns the trained weights of a unit as non-leaf tensors: the autograd graph would keep leaves in memory."""

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
            # Call the sink for every tensor on every rank: an expert without tokens here has some on other ranks, and a
            # skipped all-reduce would hang them.
            if gradient is None:
                gradient = torch.zeros(shape, dtype=dtype, device=streamed.device)
            streamed.sink(name, gradient)
        return (None,) * (3 + len(grads))


@torch.no_grad()
def set_adapters(model: PreTrainedModel) -> None:
    """Set the adapters of a sharded model to the values that the reference has. Collectives: none."""
    if (plan := sharded(model).lora_plan) is None:
        return
    state = dict(model.named_parameters())
    for weight in (*(target.weight for target in plan.targets), *plan.replaced):
        for name, shape in _shapes(plan, weight).items():
            if name in state:
                local_tensor(state[name]).copy_(cut_local(state[name], adapter_value(name, shape)))


def adapter_value(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return the value of an adapter matrix during verification, in fp32; it depends on name and shape alone.

    If B were zero as usual, A would have no gradient, and an adapter that is never applied would not be noticed.
    """
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values * (0.5 / shape[-1] ** 0.5 if name.endswith("A") else 0.05)


def _shapes(plan: AdapterPlan | None, weight: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of A and B of a weight's adapter, or of what replaces it, by parameter name."""
    if plan is None:
        return {}
    if weight in plan.replaced:
        return {new_values_of(weight): plan.replaced[weight].shape}
    targets = (target for target in plan.targets if target.weight == weight)
    return {name: shape for target in targets for name, shape in zip(target.factors, target.shapes, strict=True)}
