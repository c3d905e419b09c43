"""Run layers that compute with more positions than the rank holds: parts split by tp, and parts of full rows under cp.

Class mixins on the modules, and hooks around a part, carry out a `TensorPlan` and a `ContextPlan`; activations are
plain tensors. A part gathers the positions of its group, over tp and then over cp. Its code runs with fewer heads or
features. Its output is reduce-scattered over the group, after the last layer if tp splits that, after the full part if
cp alone splits it. apply.py has split the parameters of tp before; cp cuts full ones while the part runs. Each rank
computes an unsplit part in full and keeps its local positions.

The output is a sum over the group, so every gradient in the part is a partial sum too. FSDP2 completes those of
unsplit parameters over fsdp·cp·tp and those of parameters that tp splits over fsdp·cp.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from expertmesh.compat import buffer_slots, parameter_slots
from expertmesh.distributed.mesh import Mesh
from expertmesh.distributed.sequence_collectives import gather, own_part, reduce_scatter
from expertmesh.experts.lora_state import adapter_state, bias_of
from expertmesh.introspection.small_copies import TensorCut
from expertmesh.parallel.packing import BySamples
from expertmesh.parallel.tensor_plan import TensorPart
from expertmesh.state.model_view import attach_to_module, module_state
from expertmesh.state.packed import PackedTensor
from expertmesh.state.patching import exchanged, mix_in, replaced


@dataclass(frozen=True, slots=True)
class _Axis:
    """One mesh axis over which a part gathers."""

    part: TensorPart
    """The plan of the part on this axis."""
    group: dist.ProcessGroup
    """The ranks of the axis."""


@dataclass(frozen=True, slots=True)
class RunningPart:
    """The data that a mixin needs about its module."""

    axes: tuple[_Axis, ...]
    """The axes over which the part gathers, tp before cp."""
    leaf: str = ""
    """Name of the module in the part; "" is the part."""
    shares: Mapping[str, TensorCut] = field(default_factory=dict)
    """The tensors that cp cuts while the module runs, by name.

    Those of a convolution belong to the module around it, as its weights are read without calling its forward.
    """
    counts: tuple[str, ...] = ()
    """Attributes with a number of heads, which cp divides while the module runs."""
    by_samples: bool = False
    """True if rows inside of the part are packed samples, so that the part cannot scatter positions inside."""

    @property
    def sums_inside(self) -> bool:
        """True if the last layer of the part reduce-scatters over the group: tp splits it and rows are not packed."""
        return not self.by_samples and any(axis.part.is_split and not axis.part.shares for axis in self.axes)


def split_parts(model: nn.Module, tensor: Sequence[TensorPart], context: Sequence[TensorPart], mesh: Mesh) -> None:
    """Install the mixins and hooks of the parts that tp splits and of those that need full rows under cp.

    Args:
        tensor: the parts of tp in this rank's blocks.
        context: the parts of cp in this rank's blocks.

    Collectives: every rank calls it, from `shard_model`, and it issues none. Each forward of a part gathers and
    reduce-scatters over the tp and cp groups, and backward does the reverse.
    """
    axes: dict[str, list[_Axis]] = {}
    for name, parts in (("tp", tensor), ("cp", context)):
        for part in parts:
            axes.setdefault(part.name, []).append(_Axis(part, mesh.dense.get_group(name)))
    for name, part_axes in axes.items():
        module = model.get_submodule(name)
        weights = {leaf: each for leaf, each in module.named_parameters() if isinstance(each, PackedTensor)}
        for number, axis in enumerate(part_axes):
            # A packed tensor cannot be cut by heads while it is used.
            if not weights.keys().isdisjoint(axis.part.shares):
                unsplit = TensorPart(axis.part.name, True, why_unsplit="its weights stay packed")
                part_axes[number] = replace(axis, part=unsplit)
        _split_part(module, tuple(part_axes))


def _split_part(module: nn.Module, axes: tuple[_Axis, ...]) -> None:
    """Put the mixins in front of the classes of a part's modules, and add the hooks around the part."""
    owned: dict[str, dict[str, TensorCut]] = {"": {}}
    for name, share in (each for axis in axes for each in axis.part.shares.items()):
        owner, _, leaf = name.rpartition(".")
        # Kernels read the weights of a convolution without calling it, so its mixin would never run.
        is_called = bool(owner) and not isinstance(module.get_submodule(owner), nn.Conv1d)
        owned.setdefault(owner if is_called else "", {})[leaf if is_called else name] = share
    counted = [(name, *name.rpartition(".")) for axis in axes for name in axis.part.counts]
    split = [axis.part for axis in axes if axis.part.is_split]
    kinds: list[tuple[str, type[nn.Module]]] = [
        (leaf, _Columns) for leaf in dict.fromkeys(leaf for part in split for leaf in part.columns)
    ]
    kinds = [(leaf, kind) for leaf, kind in kinds if not isinstance(module.get_submodule(leaf), nn.Conv1d)]
    kinds += [(leaf, _AllHeads) for leaf in dict.fromkeys(leaf for part in split for leaf in part.norms)]
    kinds += [(leaf, _Rows) for leaf in sorted({str(part.rows) for part in split})]
    # The mixins of linear layers cut their tensors themselves.
    kinds += [(owner, _Cut) for owner in owned if owner and owner not in dict(kinds)]
    kinds.append(("", _Gathering))
    for name, kind in kinds:
        counts = tuple(leaf for _, owner, _, leaf in counted if owner == name)
        running = RunningPart(axes, name, owned.get(name, {}), counts, isinstance(module, BySamples))
        attach_to_module(module.get_submodule(name), tensor_part=running)
        mix_in(module.get_submodule(name), kind)
    # Hooks around the part, because torch.compile traces the code inside.
    placed = ExitStack()
    module.register_forward_pre_hook(partial(_place, placed), with_kwargs=True)
    module.register_forward_hook(lambda *_: placed.close(), always_call=True)


def _running(module: nn.Module) -> RunningPart:
    """Return the data of a module that has a mixin."""
    running = module_state(module).tensor_part
    assert isinstance(running, RunningPart)
    return running


class _Gathering(nn.Module):
    """Mixin for an attention or MLP: gathers the positions of the group, and returns the local ones of the output."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        running = _running(self)
        axes = running.axes
        hidden, others = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), ())
        gathered = _all_positions(hidden, hidden.shape, axes)
        others = tuple(_all_positions(other, hidden.shape, axes) for other in others)
        kwargs = {key: _all_positions(value, hidden.shape, axes) for key, value in kwargs.items()}
        output = super().forward(gathered, *others, **kwargs)
        return output if running.sums_inside else _local_positions(output, gathered.shape[:2], axes)


class _Columns(nn.Module):
    """Mixin for a linear layer whose outputs are split, with adapters or without."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        running = _running(self)
        with _cut(self):
            out: torch.Tensor = super().forward(x)
        for axis in running.axes:
            out = gather(out, out.dim() - 1, axis.group) if running.leaf in axis.part.gathered else out
        return out


class _Cut(nn.Module):
    """Mixin for a module, other than a linear layer, of which cp cuts parameters."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _cut(self):
            return super().forward(*args, **kwargs)


class _AllHeads(nn.Module):
    """Mixin for a norm over all heads, of which the rank has some: gathers them and computes the full norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        axes = [axis for axis in _running(self).axes if axis.part.is_split]
        # Features are cut by tp and then by cp, so cp is gathered first.
        for axis in reversed(axes):
            x = gather(x, x.dim() - 1, axis.group)
        normed: torch.Tensor = super().forward(x)
        for axis in axes:
            normed = own_part(normed, x.dim() - 1, axis.group)
        return normed


class _Rows(nn.Module):
    """Mixin for a linear layer whose inputs are split, with adapters or without; its bias is added to the sum once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        running = _running(self)
        axes = running.axes
        split = [axis for axis in axes if axis.part.is_split]
        for axis in split:
            x = own_part(x, x.dim() - 1, axis.group) if axis.part.cuts_input else x
        number = 0
        for axis in split:
            number = number * axis.group.size() + axis.group.rank()
        adapters = module_state(self).lora_state
        if adapters is not None and adapters.dropout > 0.0:
            # The dropout mask depends on the column number in the unsplit layer.
            attach_to_module(self, first_column=number * x.shape[-1])
        out: torch.Tensor
        bias = module_state(self).row_bias
        if not running.sums_inside:
            bias = bias_of(self) if bias is None else bias
            # Other ranks add 0 * bias: FSDP2 reduces parameters that have a gradient, and all ranks must reduce it.
            once = bias if number == 0 or bias is None else 0 * bias
            with _biased(self, once), _cut(self):
                out = super().forward(x)
            return out
        with _cut(self):
            out = super().forward(x)
        # In the reverse order of the gathers: cp first, then tp.
        for axis in reversed(axes):
            out = (reduce_scatter if axis.part.is_split else own_part)(out, out.dim() - 2, axis.group)
        return out if bias is None else out + bias


def _place(placed: ExitStack, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Put this rank's plain tensors in place of the split parameters while a part computes; a pre-hook of the part.

    Gradients flow to the DTensors. A last layer that sums inside has no bias meanwhile, and the tensors that the part
    itself holds are cut.
    """
    axes = _running(module).axes
    hidden = args[0] if args else kwargs["hidden_states"]
    placed.enter_context(_numbered(module, hidden.shape[:-1], axes))
    for part in (axis.part for axis in axes if axis.part.is_split and not axis.part.shares):
        for name in part.parameter_dims(module):
            owner, _, leaf = name.rpartition(".")
            slots: Any = parameter_slots(module.get_submodule(owner))
            placed.enter_context(exchanged(slots, {leaf: slots[leaf].to_local()}))
        last = module.get_submodule(str(part.rows))
        attach_to_module(last, row_bias=bias_of(last))
        placed.callback(attach_to_module, last, row_bias=None)
        # Each rank would add the bias to its partial sum; _Rows adds it once, after the reduce-scatter.
        placed.enter_context(_biased(last, None))
    placed.enter_context(_cut(module))


def _biased(layer: nn.Module, bias: torch.Tensor | None) -> AbstractContextManager[None]:
    """Give a linear layer this bias, instead of its own and of what its adapter adds, while the context is open."""
    slots = parameter_slots(layer)
    return exchanged(slots, {"bias": bias, **dict.fromkeys({"bias_lora_W"} & slots.keys())})


def _cut(module: nn.Module) -> AbstractContextManager[None]:
    """Cut the tensors and head counts of a module to this rank's share of cp while the context is open."""
    running = _running(module)
    return _with_shares(module, running) if running.shares or running.counts else nullcontext()


@contextmanager
def _with_shares(module: nn.Module, running: RunningPart) -> Iterator[None]:
    """Put this rank's share of parameters, buffers and head counts in place of the full ones inside the block."""
    group = running.axes[-1].group  # only cp cuts tensors in forward, and it is the last axis
    with ExitStack() as stack:
        for name, share in running.shares.items():
            owner, _, leaf = name.rpartition(".")
            holder = module.get_submodule(owner)
            slots: Any = parameter_slots(holder) if leaf in parameter_slots(holder) else buffer_slots(holder)
            if slots[leaf] is not None:
                stack.enter_context(exchanged(slots, {leaf: share.of(slots[leaf], group.rank(), group.size())}))
        counts = {name: vars(module)[name] // group.size() for name in running.counts}
        stack.enter_context(exchanged(vars(module), counts))
        yield


@contextmanager
def _numbered(module: nn.Module, shape: torch.Size, axes: Sequence[_Axis]) -> Iterator[None]:
    """Give adapters the numbers of all gathered positions, for their dropout, while the context is open.

    Collectives: with dropout, one gather over each axis; every rank of the group calls it.
    """
    state = adapter_state(module)
    number = None if state is None or state.dropout == 0.0 else state.token_number_T
    if state is None or number is None or number.numel() != shape.numel():
        yield
        return
    number = number.view(shape)
    for axis in axes:
        number = gather(number, len(shape) - 1, axis.group)
    with replaced(state, token_number_T=number.reshape(-1)):
        yield


def _all_positions(value: Any, local: torch.Size, axes: Sequence[_Axis]) -> Any:
    """Gather hidden states over `axes`; return any other value unchanged.

    Args:
        value: a tensor is gathered if it is floating point and its shape equals `local` but for the features.
        local: shape `[B, positions, H]` of the local hidden states.
    """
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape[:-1] == local[:-1]:
        for axis in axes:
            value = gather(value, value.dim() - 2, axis.group)
    return value


def _local_positions(output: Any, gathered: torch.Size, axes: Sequence[_Axis]) -> Any:
    """Return the local positions of the output of a part, summed over the axes that split it.

    Args:
        output: one tensor `[B, positions, X]` or a tuple. Integer tensors are indices for the attention of the next
            block, which computes the same positions, so they are not cut.
        gathered: (B, positions) of the gathered rows; tensors of another shape are returned unchanged.
    """
    if isinstance(output, tuple):
        return tuple(_local_positions(value, gathered, axes) for value in output)
    if isinstance(output, torch.Tensor) and output.is_floating_point() and output.dim() == 3:
        for axis in reversed(axes) if output.shape[:2] == gathered else ():
            output = (reduce_scatter if axis.part.is_split else own_part)(output, 1, axis.group)
    return output
