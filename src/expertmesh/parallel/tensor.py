"""Tensor parallelism of a model's blocks: carries out a `TensorPlan` by class mixins in front of the modules whose
parameters are DTensors over tp (fsdp.py).

Activations are plain tensors. A split part gathers its tp group's positions, its own code runs with fewer heads or
features, its last layer sums over the group and hands each rank its own positions. The part's output is a sum over
the group of what each rank computes, so every gradient in it is a partial sum as well, whole or split, and FSDP2
completes those of whole parameters over fsdp·cp·tp and those of split ones over fsdp·cp.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from expertmesh.config.errors import InputError
from expertmesh.distributed.mesh import Mesh
from expertmesh.distributed.sequence_collectives import gather, own_part, reduce_scatter
from expertmesh.experts.lora_state import adapter_state
from expertmesh.parallel.tensor_plan import TensorPart, TensorPlan
from expertmesh.state.patching import exchanged, mix_in
from expertmesh.state.sharded_model import attach_to_module, module_state


@dataclass(frozen=True, slots=True)
class _Running:
    """What a mixin knows of its module."""

    part: TensorPart
    group: dist.ProcessGroup
    leaf: str = ""


def split_parts(model: nn.Module, plan: TensorPlan, mesh: Mesh) -> None:
    """Let the modules that tp splits run with their shares. Called by `shard`; no communication."""
    for part in plan.parts:
        module = model.get_submodule(part.name)
        group = mesh.dense.get_group("tp")
        if part.is_split:
            for kind, leaves in ((_Columns, part.columns), (_AllHeads, part.norms), (_Rows, (str(part.rows),))):
                for leaf in leaves:
                    _put_in_front(module.get_submodule(leaf), kind, _Running(part, group, leaf))
        _put_in_front(module, _Gathering, _Running(part, group))


def _put_in_front(module: nn.Module, kind: type[nn.Module], running: _Running) -> None:
    attach_to_module(module, tensor_part=running)
    mix_in(module, kind)


def _running(module: nn.Module) -> _Running:
    running = module_state(module).tensor_part
    assert isinstance(running, _Running)
    return running


class _Gathering(nn.Module):
    """In front of an attention or MLP: gives it all positions of the group, and its own positions back."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        running = _running(self)
        hidden, others = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), ())
        _refuse_other_positions(running.part, hidden, [*others, *kwargs.values()])
        whole = gather(hidden, hidden.dim() - 2, running.group)
        with _numbered(self, hidden.shape[:-1], running.group), _local(self, running.part.bare):
            output = super().forward(whole, *others, **kwargs)
        return output if running.part.is_split else _own_positions(output, whole.shape[:2], running.group)


class _Columns(nn.Module):
    """In front of a linear layer whose outputs are split, adapted or not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        running = _running(self)
        with _local(self, ("weight", "bias", "lora_B")):
            out: torch.Tensor = super().forward(x)
        return gather(out, out.dim() - 1, running.group) if running.leaf in running.part.gathered else out


class _AllHeads(nn.Module):
    """In front of a norm over all heads, of which the rank has some. It is computed by each rank of the group."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        running = _running(self)
        normed: torch.Tensor = super().forward(gather(x, x.dim() - 1, running.group))
        return own_part(normed, x.dim() - 1, running.group)


class _Rows(nn.Module):
    """In front of a linear layer whose inputs are split, adapted or not. Its bias is added to the sum, once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        running = _running(self)
        if running.part.cuts_input:
            x = own_part(x, x.dim() - 1, running.group)
        # Dropout of an adapter masks by column, so it has to know which ones these are.
        attach_to_module(self, first_column=running.group.rank() * x.shape[-1])
        bias = self._parameters["bias"]
        with exchanged(self._parameters, {"bias": None}), _local(self, ("weight", "lora_A")):
            partial: torch.Tensor = super().forward(x)
        out = reduce_scatter(partial, partial.dim() - 2, running.group)
        return out if bias is None else out + bias


def _local(module: nn.Module, leaves: tuple[str, ...]) -> AbstractContextManager[None]:
    """While it computes, a module's split parameters are this rank's plain tensors, with gradients to the DTensors."""
    parameters: dict[str, Any] = {leaf: module._parameters.get(leaf) for leaf in leaves}
    local = {leaf: p.to_local() for leaf, p in parameters.items() if isinstance(p, DTensor)}
    return exchanged(module._parameters, local)


@contextmanager
def _numbered(module: nn.Module, shape: torch.Size, group: dist.ProcessGroup) -> Iterator[None]:
    """While a part computes with all positions, adapters' dropout has their numbers: one more gather where there is
    any.
    """
    state = adapter_state(module)
    own = None if state is None else state.number_T
    if state is None or own is None or own.numel() != shape.numel():
        yield
        return
    state.number_T = gather(own.view(shape), len(shape) - 1, group).reshape(-1)
    try:
        yield
    finally:
        state.number_T = own


def _own_positions(output: Any, whole: torch.Size, group: dist.ProcessGroup) -> Any:
    """Of what a part that is not split returns: one tensor or several, each with positions on dim 1."""
    if isinstance(output, tuple):
        return tuple(_own_positions(value, whole, group) for value in output)
    if isinstance(output, torch.Tensor) and output.dim() == 3 and output.shape[:2] == whole:
        return own_part(output, 1, group)
    return output


def _refuse_other_positions(part: TensorPart, hidden: torch.Tensor, others: list[Any]) -> None:
    """What else a block may hand over for each position would have to be gathered too."""
    for other in others:
        if isinstance(other, torch.Tensor) and other.is_floating_point() and other.shape[:-1] == hidden.shape[:-1]:
            raise InputError(
                f"parallel.tp: {part.name} gets more than its hidden states for each position, which tp does not "
                "gather; set parallel.tp to 1",
                key="layout.input-per-position",
            )
