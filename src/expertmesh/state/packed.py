"""Frozen weights that stay packed: a tensor with the shape and the dtype of the values, which holds their codes.

It replaces a parameter, so that names, shapes, slices of ep and tp and FSDP2's shards are those of plain weights; FSDP2
gathers its bytes (`fsdp_pre_all_gather`). A unit is an expert's matrix or a row of a linear layer's weight. Beside
moving full units, two operations work: reading the values of some units (`experts`, `values_at`;
experts/expert_mlp.py), and `F.linear`, which dequantises one weight at a time, again in backward. Any other operation
raises an error.

With `host` (`parallel.offload: experts`) it stays in host memory, whatever device it is moved to, and FSDP2 gathers
from a copy. With several ranks in a group FSDP2 requests the tensors one layer ahead, on a stream of its own; with one
rank, when the layer runs. So `HostCopies` starts the copy for the next layer on a side stream: for the following layer
in forward, for the preceding one in backward. The first forward has no such copy. At most two layers' experts are on
the device. On a CPU the same copies are made, without streams.

    L units on this rank, B bytes of one
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from expertmesh.compat import NoTorchFunction, runs_in_backward, wrapper_tensor
from expertmesh.state.codes import PackedFormat, Scratch, Sections, cut_columns, dequantise, quantise, scales_of

aten = torch.ops.aten
_HANDLERS: dict[Any, Callable[..., Any]] = {}
_Handler = TypeVar("_Handler", bound=Callable[..., Any])
# This many elements of packed weights are dequantised together, but at least one expert: on a CPU as many as its caches
# hold; on a GPU enough for kernels to take longer than their launches (benchmarks/RESULTS.md, "On one GPU").
_ELEMENTS_ON_CPU, _ELEMENTS = 1 << 20, 1 << 26


@dataclass(slots=True, eq=False)
class HostCopies:
    """The device copy of one parameter that is in progress, and its neighbours in the adjacent layers."""

    following: "HostCopies | None" = field(default=None, repr=False)
    """The copies of the same parameter in the next layer."""
    preceding: "HostCopies | None" = field(default=None, repr=False)
    """The copies of the same parameter in the layer before."""
    _source: Tensor | None = None
    _ahead: Tensor | None = None
    _done: torch.cuda.Event | None = None

    def take(self, source: Tensor, device: torch.device) -> Tensor:
        """Return `source` on `device`, for the current stream, and start the copy for the next layer.

        The next layer is the following one in forward, the preceding one in backward.
        """
        if self._ahead is None or self._source is not source:
            self._source = source
            self._start(device)
        found, done = self._ahead, self._done
        assert found is not None
        self._ahead = self._done = None
        if done is not None:
            stream = torch.cuda.current_stream(device)
            stream.wait_event(done)
            # Allocated on the side stream: its memory must not be reused before this stream has read it.
            found.record_stream(stream)
        # A task id means that backward runs. Recomputation in backward reuses gathered tensors and never calls this.
        backward = runs_in_backward()
        coming = self.preceding if backward else self.following
        if coming is not None and coming._source is not None and coming._ahead is None:
            coming._start(device)
        return found

    def _start(self, device: torch.device) -> None:
        assert self._source is not None
        if device.type != "cuda":
            self._ahead = self._source.to(device, copy=True)
            return
        with torch.cuda.stream(side_stream(device, "experts")):
            self._ahead = self._source.to(device, non_blocking=True)
            self._done = torch.cuda.current_stream(device).record_event()


@cache
def side_stream(device: torch.device, copied: str) -> torch.cuda.Stream:
    """Return the stream for copies between device and host memory of what `copied` names, made once."""
    return torch.cuda.Stream(device)


def in_host_memory(packed: Tensor, device: torch.device) -> Tensor:
    """Return a copy of `packed` in host memory, pinned for an accelerator so that copies to it run asynchronously."""
    own = packed.cpu()
    return own.pin_memory() if device.type == "cuda" else own


class PackedTensor(torch.Tensor):
    """`[L, *kind.shape]` in `dtype` to the outside, `packed_LB` in memory."""

    packed_LB: Tensor
    kind: PackedFormat
    host: HostCopies | None
    _sections: Sections | None

    @staticmethod
    def __new__(
        cls,
        packed_LB: Tensor,
        kind: PackedFormat,
        dtype: torch.dtype,
        shape: Sequence[int] | None = None,
        host: HostCopies | None = None,
    ) -> "PackedTensor":
        shape = (packed_LB.shape[0], *kind.shape) if shape is None else shape
        tensor: PackedTensor = wrapper_tensor(cls, shape, dtype, packed_LB.device)
        tensor.packed_LB, tensor.kind, tensor.host, tensor._sections = packed_LB, kind, host, None
        return tensor

    @classmethod
    def of(
        cls, weight: Tensor, kind: PackedFormat, dtype: torch.dtype, host: HostCopies | None = None
    ) -> "PackedTensor":
        """Quantise `weight` `[L, ...]` unit by unit. A weight on meta yields as many bytes on meta."""
        packed_LB = torch.empty(weight.shape[0], kind.bytes, dtype=torch.uint8, device=weight.device)
        if not weight.is_meta:
            together = units_together(kind, weight.device)
            for packed_XB, units in zip(packed_LB.split(together), weight.split(together), strict=True):
                packed_XB.copy_(quantise(units, kind))
        if host is not None and not weight.is_meta:
            packed_LB = in_host_memory(packed_LB, weight.device)
        return cls(packed_LB, kind, dtype, host=host)

    @property
    def sections(self) -> Sections:
        """Views of the stored bytes, created once, because experts are dequantised a few at a time."""
        if self._sections is None:
            self._sections = Sections.of(self.packed_LB, self.kind)
        return self._sections

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The bytes in memory."""
        return self.packed_LB.nbytes

    def experts(self, first: int, last: int, scratch: Scratch | None = None) -> Tensor:
        """Return the values of some experts, or rows; with `scratch` they lie in it."""
        return dequantise(self.sections[first:last], self.kind, self.dtype, scratch=scratch)

    def values(self) -> Tensor:
        """Return all values."""
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        together, scratch = units_together(self.kind, self.device), Scratch()
        for first in range(0, len(out), together):
            out[first : first + together] = self.experts(first, first + together, scratch)
        return out

    def not_finite(self) -> int | None:
        """Return the first unit with a scale or a code that is not finite, or None.

        Quantising a value that is not finite yields such a scale. Of the codes only e4m3 has one, without its sign
        0x7F, which files may hold.
        """
        together = units_together(self.kind, self.packed_LB.device)
        for first in range(0, len(self.packed_LB), together):
            units = self.sections[first : first + together]
            finite_X = scales_of(units, self.kind).isfinite().flatten(1).all(1)
            if self.kind.code == "e4m3":
                finite_X &= ((units.codes_XRB & 0x7F) != 0x7F).flatten(1).all(1)
            if not bool(finite_X.all()):
                return first + int(finite_X.logical_not().nonzero()[0])
        return None

    def values_at(self, index: Sequence[slice]) -> Tensor:
        """Return the values at `index`, a slice for each dim; only the rows in it are dequantised."""
        experts, *rest = index
        if self.kind.by_rows:
            return dequantise(self.sections[experts], self.kind, self.dtype)[:, rest[0]]
        rows = rest[1 if self.kind.transposed else 0]
        start, stop, _ = rows.indices(self.kind.rows)
        values = dequantise(self.sections[experts], self.kind, self.dtype, slice(start, stop))
        return values[:, rest[0]] if self.kind.transposed else values[:, :, rest[1]]

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], None]:
        """Return the bytes of full units for FSDP2 to gather, on the stream on which it copies."""
        if self.host is None:
            return (self.packed_LB,), None
        return (self.host.take(self.packed_LB, torch.device(mesh.device_type)),), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple["PackedTensor", tuple[Tensor, ...]] | None:
        """Return the gathered bytes as a packed tensor, in the storage that FSDP2 frees and gathers again."""
        if out is not None:
            return None  # it holds a view of the same storage
        return PackedTensor(outputs[0], self.kind, dtype), ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            return _linear(*args, **(kwargs or {}))
        with NoTorchFunction():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _HANDLERS:
            raise NotImplementedError(f"{func} does not work on packed weights; ask for values of some")
        return _HANDLERS[func](*args, **(kwargs or {}))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PackedTensor({tuple(self.shape)}, {self.dtype}, {self.kind.name}, {self.nbytes} bytes)"


def _linear(input: Tensor, weight: PackedTensor, bias: Tensor | None = None) -> Tensor:
    out: Tensor = _Linear.apply(input, weight, bias)
    return out


class _Linear(torch.autograd.Function):
    """`F.linear` with a packed weight, whose values exist only during one product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: PackedTensor, bias: Tensor | None) -> Tensor:
        # Save the codes, not the values: backward dequantises again, so that values never stay in memory.
        ctx.save_for_backward(weight)
        return F.linear(x, weight.values(), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        (weight,) = ctx.saved_tensors
        needs_x, _, needs_bias = ctx.needs_input_grad
        grad_x = grad @ weight.values() if needs_x else None
        return grad_x, None, grad.flatten(0, -2).sum(0) if needs_bias else None


def units_together(kind: PackedFormat, device: torch.device) -> int:
    """Return the number of units that are dequantised together on `device`, at least one."""
    return max(1, elements_together(device.type) // math.prod(kind.shape))


def elements_together(device_type: str) -> int:
    """Return the number of elements that are dequantised together, where a unit has no more."""
    return _ELEMENTS_ON_CPU if device_type == "cpu" else _ELEMENTS


def values_at(local: Tensor, index: tuple[slice, ...]) -> Tensor:
    """Return the values at `index` of a rank's local tensor, packed or not."""
    return local.values_at(index) if isinstance(local, PackedTensor) else local[index]


def stored(local: Tensor) -> Tensor:
    """Return a local tensor as it is in memory: its bytes, if it is packed."""
    return local.packed_LB if isinstance(local, PackedTensor) else local


def handles(handlers: dict[Any, Callable[..., Any]], *functions: Any) -> Callable[[_Handler], _Handler]:
    """Register the decorated function in `handlers` as what a tensor subclass runs in place of `functions`."""

    def register(handler: _Handler) -> _Handler:
        handlers.update(dict.fromkeys(functions, handler))
        return handler

    return register


def _with(tensor: PackedTensor, packed_LB: Tensor) -> PackedTensor:
    return PackedTensor(packed_LB, tensor.kind, tensor.dtype, host=tensor.host)


@handles(_HANDLERS, aten.detach.default, aten.alias.default)
def _same(tensor: PackedTensor, *_: Any, **__: Any) -> PackedTensor:
    return PackedTensor(tensor.packed_LB, tensor.kind, tensor.dtype, tensor.shape, tensor.host)


@handles(_HANDLERS, aten.clone.default)
def _clone(tensor: PackedTensor, **_: Any) -> PackedTensor:
    return _with(tensor, tensor.packed_LB.clone())


@handles(_HANDLERS, aten.view.default)
def _view(tensor: PackedTensor, size: Sequence[int]) -> PackedTensor:
    # FSDP2 also stores a flat view of its shard, but never reads it for a tensor that defines `fsdp_pre_all_gather`.
    if tuple(size) not in ((-1,), tuple(tensor.shape)):
        raise NotImplementedError(f"packed weights {tuple(tensor.shape)} cannot be seen as {tuple(size)}")
    shape = (tensor.numel(),) if tuple(size) == (-1,) else tensor.shape
    return PackedTensor(tensor.packed_LB, tensor.kind, tensor.dtype, shape, tensor.host)


@handles(_HANDLERS, aten.as_strided.default)
def _as_strided(tensor: PackedTensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> PackedTensor:
    if tuple(size) != tuple(tensor.shape) or tuple(stride) != tensor.stride() or offset:
        raise NotImplementedError(f"packed weights {tuple(tensor.shape)} cannot be seen as {tuple(size)}")
    return _same(tensor)


@handles(_HANDLERS, aten._to_copy.default)
def _moved(tensor: PackedTensor, *, dtype: torch.dtype | None = None, **options: Any) -> PackedTensor:
    if dtype not in (None, tensor.dtype):
        raise NotImplementedError(f"packed weights of {tensor.dtype} cannot be cast to {dtype}")
    options.pop("layout", None), options.pop("memory_format", None)
    if tensor.host is not None and (device := options.pop("device", None)) is not None:
        return _with(tensor, in_host_memory(tensor.packed_LB, torch.device(device)))
    return _with(tensor, aten._to_copy(tensor.packed_LB, **options))


@handles(_HANDLERS, aten.empty_like.default)
def _empty_like(tensor: PackedTensor, *, device: Any = None, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    if dtype not in (None, tensor.dtype):
        return torch.empty(tensor.shape, dtype=dtype, device=device or tensor.device)
    if tensor.host is not None and device is not None:
        return _with(tensor, in_host_memory(torch.empty_like(tensor.packed_LB, device="cpu"), torch.device(device)))
    return _with(tensor, torch.empty_like(tensor.packed_LB, device=device))


@handles(_HANDLERS, aten.new_zeros.default)
def _new_zeros(tensor: PackedTensor, size: Sequence[int], **_: Any) -> PackedTensor:
    assert tuple(size[1:]) == tuple(tensor.shape[1:]), f"whole units only: {tuple(size)} of {tuple(tensor.shape)}"
    # FSDP2 keeps its shard in it: of host memory that is pinned, pinned too, or copies to the device would not be
    # asynchronous.
    packed_LB, pinned = tensor.packed_LB, tensor.packed_LB.is_pinned()
    return _with(tensor, packed_LB.new_zeros(size[0], packed_LB.shape[1], pin_memory=pinned))


@handles(_HANDLERS, aten.split.Tensor)
def _split(tensor: PackedTensor, size: int, dim: int = 0) -> list[PackedTensor]:
    if dim == 0:
        return [_with(tensor, part) for part in tensor.packed_LB.split(size)]
    assert tensor.kind.by_rows, "packed experts are cut between experts alone"
    columns = range(0, tensor.kind.columns, size)
    cut = (cut_columns(tensor.packed_LB, tensor.kind, at, min(at + size, tensor.kind.columns)) for at in columns)
    return [PackedTensor(packed_LB, kind, tensor.dtype) for packed_LB, kind in cut]


@handles(_HANDLERS, aten.slice.Tensor)
def _slice(tensor: PackedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    assert dim == 0, "packed weights are cut between units alone"
    return _with(tensor, tensor.packed_LB[start:end:step])


@handles(_HANDLERS, aten.copy_.default)
def _copy(tensor: PackedTensor, source: Tensor, non_blocking: bool = False) -> PackedTensor:
    assert isinstance(source, PackedTensor), "packed weights can be copied from packed ones alone"
    assert source.kind == tensor.kind, (source.kind, tensor.kind)
    tensor.packed_LB.copy_(source.packed_LB, non_blocking)
    return tensor
