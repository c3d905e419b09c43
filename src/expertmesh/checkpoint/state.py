"""Collect the tensors of a model and its optimizer by names that depend neither on the layout nor on the group order.

Model tensors keep their state-dict names; an optimizer's are `optimizer.PARAMETER.SLOT` (`exp_avg`, `step`, ...).
Tensors are DTensors or plain ones that every rank holds. Nothing here communicates.
"""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from expertmesh.config.errors import InputError, IntegrityError
from expertmesh.io.safetensors_reader import as_bytes
from expertmesh.state.model_view import ModelView
from expertmesh.state.packed import stored
from expertmesh.state.shards import expert_order, is_on_other_stage, placed_like, placement_of

OPTIMIZER = "optimizer."
_WORDS_PER_BLOCK = 1 << 22


@runtime_checkable
class HasEmptyState(Protocol):
    """An optimizer that makes the initial state of a parameter itself, with tensors of any dtype and shape.

    For a DTensor they are DTensors.
    """

    def empty_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the state before the first step, by slot."""


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name; tied ones once, under the first of their names.

    For a model with adapters return the adapters alone: the base is frozen, and has other files.
    """
    view = ModelView(model)
    return view.adapters or view.unique


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return every slot of every parameter that has state, by saved name.

    Raises:
        InputError: A slot is no tensor, or (unless the optimizer has `empty_state`) its shape is not the parameter's.
    """
    slots, any_shape = {}, isinstance(optimizer, HasEmptyState)
    for name, parameter in trained(model, optimizer).items():
        for slot, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor) or (value.dim() and value.shape != parameter.shape and not any_shape):
                raise InputError(
                    f"{type(optimizer).__name__}: state {slot} of {name} is neither a scalar tensor nor shaped like "
                    "the parameter; checkpoints cannot hold it",
                    key="optimizer.unsupported-state",
                )
            slots[f"{OPTIMIZER}{name}.{slot}"] = placed_like(value, parameter)
    return slots


def allocate_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
) -> dict[str, Tensor]:
    """Replace the state of `optimizer` by empty slots for all saved ones, and return them by saved name.

    Skips parameters that only other pipeline stages hold.

    Args:
        saved: dtype and global shape by saved name.

    Raises:
        IntegrityError: A slot belongs to no trained parameter or does not fit it; nothing is changed.
    """
    updated = trained(model, optimizer)
    elsewhere = {
        name for name, tensor in ModelView(model).state.items() if is_on_other_stage(tensor) and tensor.requires_grad
    }
    slots, places = dict[str, Tensor](), list[tuple[nn.Parameter, str, str]]()
    for key, (dtype, shape) in saved.items():
        name, _, slot = key.removeprefix(OPTIMIZER).rpartition(".")
        if name in elsewhere:
            continue
        if name not in updated:
            raise IntegrityError(
                f"the checkpoint has optimizer state {slot} of {name}, which this job does not train",
                key="checkpoint.does-not-fit",
            )
        value = _empty_slot(optimizer, updated[name], slot, dtype, shape)
        if value is None:
            raise IntegrityError(
                f"optimizer state {slot} of {name} is {dtype} {list(shape)}, which {type(optimizer).__name__} does not "
                f"keep of a parameter of {list(updated[name].shape)}",
                key="checkpoint.does-not-fit",
            )
        slots[key] = placed_like(value, updated[name])
        places.append((updated[name], slot, key))
    optimizer.state.clear()
    for parameter, slot, key in places:
        optimizer.state[parameter][slot] = slots[key]
    return slots


def _empty_slot(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, slot: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor | None:
    """Return an empty slot of the saved dtype and shape, or None if the optimizer has no such slot."""
    if isinstance(optimizer, HasEmptyState):
        value = optimizer.empty_state(parameter).get(slot)
        return value if value is not None and (value.dtype, value.shape) == (dtype, shape) else None
    if not shape:
        return torch.empty((), dtype=dtype, device=_scalar_device(optimizer, parameter))
    return torch.empty_like(parameter, dtype=dtype).detach() if shape == parameter.shape else None


def fingerprint(tensor: Tensor) -> int:
    """Return a 64-bit sum over the bytes of a tensor, to compare copies; it is not safe against an adversary.

    Any one changed bit changes it, and most changes of order do. Computed in blocks on the tensor's device; waits for
    the device once.
    """
    return int(fingerprint_share(as_bytes(stored(tensor).detach().contiguous()), 0))


def fingerprint_share(data: Tensor, at: int) -> Tensor:
    """Return the part of a tensor's fingerprint that some of its bytes make; the parts add up modulo 2**64.

    Args:
        data: uint8; its size is a multiple of 4 unless it holds the last bytes of the tensor.
        at: The offset of `data` in the tensor in bytes, a multiple of 4.

    Returns:
        An int64 scalar on the device of `data`.
    """
    even = data.numel() // 4 * 4
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for words, first in ((data[:even].view(torch.int32), at // 4), (data[even:], at + even)):
        for start in range(0, words.numel(), _WORDS_PER_BLOCK):
            block = words[start : start + _WORDS_PER_BLOCK].to(torch.int64)
            # Odd factors: a changed word always changes the sum modulo 2**64.
            place = torch.arange(first + start, first + start + block.numel(), device=data.device)
            total += (block * (2 * place + 1)).sum()
    return total


def is_replicated(tensor: Tensor) -> bool:
    """Return whether several ranks hold the same part of `tensor`."""
    if (place := placement_of(tensor)) is not None and place.has_tied_replica:
        return True
    if not isinstance(tensor, DTensor):
        return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    mesh = tensor.device_mesh
    return any(kind.is_replicate() and mesh.size(axis) > 1 for axis, kind in enumerate(tensor.placements))


def sharding_of(tensor: Tensor, stage: int) -> str:
    """Describe as text how a tensor of pipeline stage `stage` is cut: equal on all ranks that hold parts of it."""
    place = placement_of(tensor)
    where = "tied stages" if place is not None and place.has_tied_replica else f"stage {stage}"
    if not isinstance(tensor, DTensor):
        return f"{list(tensor.shape)} whole, {where}"
    mesh, order = tensor.device_mesh, expert_order(tensor)
    slots = "" if order is None else f", experts {list(order)}"
    return f"{list(tensor.shape)} {tensor.placements} on {mesh.mesh_dim_names} {list(mesh.shape)}, {where}{slots}"


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Return the parameters that `optimizer` updates on this rank, by their names in the full model.

    Raises:
        InputError: The optimizer has parameters that the model does not have.
    """
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found = {name: parameter for name, parameter in ModelView(model).parameters.items() if id(parameter) in owned}
    if len(found) != len(owned):
        raise InputError(
            "the optimizer updates parameters that the model does not have; build it after sharding",
            key="optimizer.other-parameters",
        )
    return found


def _scalar_device(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> torch.device:
    """Return the device of a step count, as torch's optimizers choose it: the CPU unless fused or capturable."""
    group = next(g for g in optimizer.param_groups if any(parameter is other for other in g["params"]))
    return parameter.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
