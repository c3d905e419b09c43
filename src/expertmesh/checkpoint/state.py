"""What a checkpoint holds of a model and its optimizer: tensors by name, whatever the layout or the group order.

Model tensors keep their state-dict names; an optimizer's are `optimizer.PARAMETER.SLOT` (`exp_avg`, `step`, ...).
Tensors are DTensors or plain ones that every rank holds. Nothing here communicates.
"""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from expertmesh.config.errors import InputError, IntegrityError
from expertmesh.io.boxes import Box, volume
from expertmesh.io.safetensors_reader import as_bytes
from expertmesh.state.model_view import ModelView
from expertmesh.state.packed import stored
from expertmesh.state.shards import is_on_other_stage, local_box, local_tensor, placed_like, placement_of

OPTIMIZER = "optimizer."
_WORDS_PER_BLOCK = 1 << 22


@runtime_checkable
class HasEmptyState(Protocol):
    """An optimizer that says itself what it keeps of a parameter: of any dtype and shape, DTensors of a DTensor."""

    def empty_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """What its first step starts from, by slot."""


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers; tied ones once, under the first of their names.

    Of a model with adapters these alone: its base is frozen, and has files of its own.
    """
    view = ModelView(model)
    return view.adapters or view.unique


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every slot of every parameter that has state. Raises `InputError` for state that is not tensors."""
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
    """Give `optimizer` empty slots for everything in `saved` (dtype and shape by name), and return them by name.

    Not for parameters that another pipeline stage holds.

    Raises `IntegrityError` for a slot that belongs to no trained parameter or does not fit it, with nothing changed.
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
        slots[key] = value
        places.append((updated[name], slot, key))
    optimizer.state.clear()
    for parameter, slot, key in places:
        optimizer.state[parameter][slot] = slots[key]
    return slots


def _empty_slot(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, slot: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor | None:
    """Room for what was saved, or None if the optimizer keeps no such thing."""
    if isinstance(optimizer, HasEmptyState):
        value = optimizer.empty_state(parameter).get(slot)
        return value if value is not None and (value.dtype, value.shape) == (dtype, shape) else None
    if not shape:
        return torch.empty((), dtype=dtype, device=_scalar_device(optimizer, parameter))
    return torch.empty_like(parameter, dtype=dtype).detach() if shape == parameter.shape else None


def fingerprint(tensor: Tensor) -> int:
    """A 64-bit sum over the bytes of a contiguous tensor that sees every changed bit and most changes of order.

    Computed where the tensor is, in blocks; one wait for the device. To compare copies, not against an adversary.
    """
    return int(fingerprint_share(as_bytes(stored(tensor).detach().contiguous()), 0))


def fingerprint_share(data: Tensor, at: int) -> Tensor:
    """What bytes `data`, `at` bytes into a tensor, add to its fingerprint: an int64, summed modulo 2**64.

    `at` and, but for the last bytes, the size of `data` are multiples of 4.
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
    """Whether several ranks hold the same part of `tensor`."""
    if (place := placement_of(tensor)) is not None and place.has_tied_replica:
        return True
    if not isinstance(tensor, DTensor):
        return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    mesh = tensor.device_mesh
    return any(kind.is_replicate() and mesh.size(axis) > 1 for axis, kind in enumerate(tensor.placements))


def sharding_of(tensor: Tensor, stage: int) -> str:
    """How a tensor of pipeline stage `stage` is cut, as text: the same on all ranks that hold parts of it."""
    place = placement_of(tensor)
    where = "tied stages" if place is not None and place.has_tied_replica else f"stage {stage}"
    if not isinstance(tensor, DTensor):
        return f"{list(tensor.shape)} whole, {where}"
    mesh = tensor.device_mesh
    return f"{list(tensor.shape)} {tensor.placements} on {mesh.mesh_dim_names} {list(mesh.shape)}, {where}"


def held_part(tensor: Tensor) -> tuple[Box, Tensor]:
    """The box that this rank holds and its values; the box of an empty shard has no volume."""
    box, local = local_box(tensor), local_tensor(tensor)
    assert local.numel() == volume(box)
    return box, local


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """The parameters that `optimizer` updates on this rank, by their names in the whole model. `InputError` if it has
    others than the model.
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
    """Step counts live on the CPU unless the optimizer is fused or capturable, as torch's optimizers make them."""
    group = next(g for g in optimizer.param_groups if any(parameter is other for other in g["params"]))
    return parameter.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
