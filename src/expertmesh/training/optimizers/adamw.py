"""Update parameters by AdamW, with parameters and moments stored in fewer bits than it computes with.

The arithmetic is that of torch's AdamW in float32, a few rows at a time; results are stored as they are, with
stochastic rounding, or in 8 bits by blocks with a scale for each. Every rank updates its own shards; only blocks of 8
bits that several ranks share need communication.

A block is 256 elements of the last dim of the full tensor, so that every layout stores the same codes: where the
last dim is cut, the ranks that share blocks take the largest magnitude of all of them. Codes are those of dynamic 8-bit
quantisation (arXiv 2110.02861): 7 decades below the block's largest magnitude, more of them the larger the values.

Rounded to nearest, an update smaller than half a unit in the last place of bfloat16 (1/512 of a weight) is lost, every
time; so it is rounded up or down with the probability that keeps the expectation. The direction of an element follows
from the run's seed, the step, the tensor's name and the element's place in the full tensor alone. So every layout
rounds equally, and a resumed run as one that was not interrupted; no generator's state is needed.

Shapes: R rows (all dims but the last) and C columns (the last dim) of a rank's part, B blocks of a full row.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from expertmesh.io.boxes import Box, extents
from expertmesh.state.shards import held_boxes, local_tensor, shard_dim, stored_box

_ELEMENTS_OF_A_PASS = {"cpu": 1 << 17}
_ELEMENTS_ON_ACCELERATORS = 1 << 22
_GOLDEN = -0x61C8864680B583EB  # splitmix64's constants as signed integers
_FIRST, _SECOND = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
# Of the words that an element's parameter and moments are rounded by: one mixed word, times odd numbers.
FACTORS = (0x7FEB352D, 0x2C1B3C6D, 0x297A2D39)
BLOCK = 256
LEAST_ELEMENTS = 4096
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class ShardRows:
    """R rows of C columns of a tensor. A vector is one row, and so is a scalar."""

    box: Box
    """The part of the tensor that this rank holds, as it is stored."""
    boxes: Sequence[Box]
    """The same in the full tensor: `held_boxes`."""
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> "ShardRows":
        boxes = [box or ((0, 1),) for box in held_boxes(tensor)]
        return cls(stored_box(tensor) or ((0, 1),), boxes, tuple(tensor.shape) or (1,), tensor.device)

    @property
    def rows(self) -> int:
        return torch.Size(extents(self.box)[:-1]).numel()

    @property
    def columns(self) -> int:
        return extents(self.box)[-1]

    def view(self, tensor: Tensor) -> Tensor:
        """Return this rank's storage of a tensor that is sharded like this one, `[R, C]`, for writing."""
        return local_tensor(tensor).view(self.rows, self.columns)

    def read(self, tensor: Tensor) -> Tensor:
        """Return the same for reading; a copy where the storage has gaps."""
        return local_tensor(tensor).reshape(self.rows, self.columns)

    def passes(self) -> Iterator[slice]:
        """Yield all rows, a few at a time: equally many for all ranks that hold columns of the same rows."""
        most = _ELEMENTS_OF_A_PASS.get(self.device.type, _ELEMENTS_ON_ACCELERATORS)
        count = max(1, most // max(1, self.shape[-1]))
        for start in range(0, self.rows, count):
            yield slice(start, min(start + count, self.rows))


class Noise:
    """Random bits of one parameter in one step: for each element those of its row and its column, mixed."""

    def __init__(self, key: str, boxes: Sequence[Box], shape: tuple[int, ...], device: torch.device) -> None:
        """Prepare the part `boxes`, which differ in dim 0 alone, of a tensor of `shape`.

        `key` has to differ for each tensor and step.
        """
        seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little", signed=True)
        first = torch.cat([torch.arange(*box[0], device=device) for box in boxes])
        *outer, columns = [first, *(torch.arange(*dim, device=device) for dim in boxes[0][1:])]
        rows = torch.zeros(1, dtype=torch.int64, device=device)
        for place, size in zip(outer, shape[:-1], strict=True):
            rows = (rows[:, None] * size + place).flatten()
        self.rows_R, self.columns_C = _hash(rows * _GOLDEN + seed), _hash(columns * _GOLDEN ^ ~seed)
        self._mixed: tuple[slice | None, Tensor] = (None, self.rows_R)

    def round(self, value_RC: Tensor, rows: slice, factor: int = FACTORS[0]) -> Tensor:
        """Round `rows` of the part, float32, to bfloat16. Values that are not finite become NaN."""
        bits_RC = self._of(rows) * factor
        # Magnitudes grow with their bits: what is added to those that go carries over as often as they are large.
        bits_RC = bits_RC.bitwise_right_shift_(16).bitwise_and_(0xFFFF).add_(value_RC.view(torch.int32))
        rounded_RC = bits_RC.bitwise_and_(-0x10000).view(torch.float32)
        return rounded_RC.add_(value_RC - value_RC).to(torch.bfloat16)  # 0, or NaN: its bits may have overflown

    def _of(self, rows: slice) -> Tensor:
        """Return a word for each element, cached until other rows are requested."""
        if self._mixed[0] != rows:
            word_RC = self.rows_R[rows, None] ^ self.columns_C
            self._mixed = rows, word_RC.bitwise_xor_((word_RC >> 16).bitwise_and_(0xFFFF))  # shifts are arithmetic
        return self._mixed[1]


def _hash(number: Tensor) -> Tensor:
    """Return the upper half of splitmix64 of 64-bit integers."""
    number = (number ^ _shifted(number, 30)) * _FIRST
    number = (number ^ _shifted(number, 27)) * _SECOND
    return ((number ^ _shifted(number, 31)) >> 32).to(torch.int32)


def _shifted(number: Tensor, by: int) -> Tensor:
    return (number >> by) & ((1 << (64 - by)) - 1)


@dataclass(frozen=True, slots=True)
class Plain:
    """A rank's part of a tensor in its own dtype, read and written a few rows at a time in one of at least 32 bits."""

    values_RC: Tensor
    wide: torch.dtype
    """The dtype that rows are read in; if it is the tensor's own, they may be the storage itself."""
    noise: Noise | None
    """The random bits of stochastic rounding; None rounds to nearest."""
    factor: int
    """The factor of `Noise.round`, one for each tensor of a parameter."""

    def read(self, rows: slice) -> Tensor:
        return self.values_RC[rows].to(self.wide)

    def write(self, rows: slice, value_RC: Tensor) -> None:
        self.values_RC[rows] = value_RC if self.noise is None else self.noise.round(value_RC, rows, self.factor)


@dataclass(frozen=True, slots=True, eq=False)
class Codebook:
    """The values of the 256 codes."""

    values: Tensor
    """Ascending, in units of a block's largest magnitude."""
    borders: Tensor
    """The middles between neighbours."""
    below: Tensor
    """Number of borders below all floats with the same first 16 bits; at most one border is among those."""

    @classmethod
    @cache
    def on(cls, device: torch.device, signed: bool) -> "Codebook":
        """Build the codebook on a device.

        Decade i of 7, from 1e-7 to 1, holds 2^i values with a sign and 2^(i+1) without one, in the middle of equal
        intervals of its upper nine tenths; zero and 1 are added. With a sign -1 takes the place of the negative value
        that is nearest to zero: blocks whose largest value is negative would shrink with every step.
        """
        values = [0.0, 1.0]
        for decade in range(7):
            count, size = 2 ** (decade + (not signed)), 10.0 ** (decade - 6)
            middles = [size * (0.1 + 0.9 * (place + 0.5) / count) for place in range(count)]
            values += [*middles, *(-middle for middle in middles)] if signed else middles
        if signed:
            values[values.index(max(value for value in values if value < 0))] = -1.0
        assert len(values) == 256
        table = torch.tensor(sorted(values))
        borders = torch.cat([(table[1:] + table[:-1]) / 2, torch.full((1,), torch.inf)])
        starts = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
        lowest = torch.where(starts < 0, starts | 0xFFFF, starts).view(torch.float32)
        below = torch.bucketize(lowest, borders[:-1]).to(torch.uint8)
        return cls(table.to(device), borders.to(device), below.to(device))

    def nearest(self, value: Tensor) -> Tensor:
        """Return the code of each float32, as `torch.bucketize` among the borders finds it, in a tenth of its time."""
        below = torch.take(self.below, (value.view(torch.int32) >> 16).long() + (1 << 15))
        return below + (value > torch.take(self.borders, below.long()))


class Blocks:
    """The same in 8 bits. `signed` values have codes on both sides of zero."""

    def __init__(self, shard: ShardRows, codes: Tensor, scale: Tensor, wide: torch.dtype, *, signed: bool) -> None:
        self.codes_RC, self.scale_RB = shard.view(codes), ShardRows.of(scale).view(scale)
        self.start, self.stop = shard.box[-1]
        self.block_C = torch.arange(self.start, self.stop, device=shard.device) // BLOCK
        self.codebook, self.wide, self.signed = Codebook.on(shard.device, signed), wide, signed
        self.groups = _groups_of_last_dim(codes)

    def read(self, rows: slice) -> Tensor:
        value_RC = torch.take(self.codebook.values, self.codes_RC[rows].long()).to(self.wide)
        return value_RC.mul_(self.scale_RB[rows].index_select(1, self.block_C))

    def write(self, rows: slice, value_RC: Tensor) -> None:
        """Write rows. Collectives: every rank that has a part of their last dim calls it; one all-reduce over these."""
        first, last = self.start // BLOCK, -(-self.stop // BLOCK)
        margins = (self.start - first * BLOCK, last * BLOCK - self.stop)
        largest = F.pad(value_RC.abs(), margins).view(len(value_RC), last - first, BLOCK).amax(-1)
        scale_RB = torch.zeros_like(self.scale_RB[rows])
        scale_RB[:, first:last] = largest
        for group in self.groups:
            dist.all_reduce(scale_RB, dist.ReduceOp.MAX, group=group)
        self.scale_RB[rows] = scale_RB
        divisor_RC = scale_RB.clamp_min(torch.finfo(scale_RB.dtype).tiny).index_select(1, self.block_C)
        codes = self.codebook.nearest((value_RC / divisor_RC).float())
        # A second moment that is stored as zero would be divided by: the least code is that of a positive value.
        self.codes_RC[rows] = codes if self.signed else torch.maximum(codes, value_RC > 0)


Stored = Plain | Blocks


def _groups_of_last_dim(tensor: Tensor) -> list[dist.ProcessGroup]:
    if not isinstance(tensor, DTensor):
        return []
    mesh, last = tensor.device_mesh, tensor.dim() - 1
    axes = [axis for axis, kind in enumerate(tensor.placements) if shard_dim(kind) == last and mesh.size(axis) > 1]
    return [mesh.get_group(axis) for axis in axes]


def is_quantised(shape: Sequence[int]) -> bool:
    """Return whether a tensor is stored in 8 bits: small ones save little, and norms (vectors) need precision."""
    return len(shape) > 1 and math.prod(shape) >= LEAST_ELEMENTS


def scale_shape(shape: Sequence[int]) -> list[int]:
    """Return the shape of the scales of a full tensor."""
    return [*shape[:-1], -(-shape[-1] // BLOCK)]


def empty_blocks(parameter: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scales of zeros, sharded as `parameter` is; ranks that share a block hold its scale."""
    codes, shape = torch.zeros_like(parameter, dtype=torch.uint8).detach(), scale_shape(parameter.shape)
    if not isinstance(parameter, DTensor):
        return codes, torch.zeros(shape, device=parameter.device)
    last = parameter.dim() - 1
    placements = [Replicate() if shard_dim(kind) == last else kind for kind in parameter.placements]
    local = torch.zeros(*extents(stored_box(parameter))[:-1], shape[-1], device=parameter.device)
    stride = torch.empty(shape, device="meta").stride()
    mesh = parameter.device_mesh
    scale = DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
    return codes, scale


class AdamW(torch.optim.Optimizer):
    """AdamW with `stochastic_rounding` of bfloat16 parameters and their moments. State is named and shaped as torch's.

    Parameters come with their names in the full model: with `seed` and the step count they decide the rounding.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        stochastic_rounding: bool,
        seed: int,
    ) -> None:
        self.stochastic_rounding, self.seed = stochastic_rounding, seed
        self._names = {parameter: name for name, parameter in parameters}
        super().__init__(self._names, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def empty_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the state from which the first step starts."""
        return {"step": torch.zeros(()), **{slot: torch.zeros_like(parameter).detach() for slot in MOMENTS}}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # torch's overloads
        """Update every parameter that has a gradient. Every rank calls it, for `Blocks` that several ranks share."""
        assert closure is None, "gradients come from a whole step; there is nothing to evaluate again"
        for group in self.param_groups:
            self._update_all(group)

    def _update_all(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            if parameter.grad is not None:
                self._update(self._names[parameter], parameter, parameter.grad, group)

    def _update(self, name: str, parameter: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(self.empty_state(parameter))
        state["step"] += 1
        shard, wide = ShardRows.of(parameter), torch.promote_types(parameter.dtype, torch.float32)
        stored = self._stored(name, parameter, shard, wide)
        gradient = shard.read(grad)
        for rows in shard.passes():
            values = {slot: tensor.read(rows) for slot, tensor in stored.items()}
            _adamw(values, gradient[rows].to(wide), int(state["step"]), group)
            for slot, tensor in stored.items():
                tensor.write(rows, values[slot])

    def _stored(self, name: str, parameter: nn.Parameter, shard: ShardRows, wide: torch.dtype) -> dict[str, Stored]:
        """Return the parameter, under the empty name, and its moments."""
        state, stored, noise = self.state[parameter], dict[str, Stored](), self._noise(name, parameter, shard)
        tensors = {"": parameter.detach(), **{slot: state[slot] for slot in MOMENTS}}
        for (slot, tensor), factor in zip(tensors.items(), FACTORS, strict=True):
            if (scale := state.get(f"{slot}_scale")) is not None:
                stored[slot] = Blocks(shard, tensor, scale, wide, signed=slot == "exp_avg")
            else:
                stored[slot] = Plain(shard.view(tensor), wide, noise, factor)
        return stored

    def _noise(self, name: str, parameter: nn.Parameter, shard: ShardRows) -> Noise | None:
        if not self.stochastic_rounding or parameter.dtype != torch.bfloat16:
            return None
        return Noise(f"{self.seed}/{int(self.state[parameter]['step'])}/{name}", shard.boxes, shard.shape, shard.device)


class AdamW8bit(AdamW):
    """AdamW with moments in 8 bits, except for vectors and small tensors; parameters are stored as they are."""

    def empty_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        if not is_quantised(parameter.shape):
            return super().empty_state(parameter)
        state = {"step": torch.zeros(())}
        for slot in MOMENTS:
            state[slot], state[f"{slot}_scale"] = empty_blocks(parameter)
        return state


def _adamw(values: dict[str, Tensor], gradient: Tensor, step: int, group: dict[str, Any]) -> None:
    """Take one step of torch's AdamW, in place, on parameters (under the empty name) and moments.

    One operation at a time, each of which is rounded correctly: kernels that fuse some differ in the last bit between
    the body of a vectorised loop and its end, and the place of that end depends on the layout.
    """
    parameter, average, square = values[""], values["exp_avg"], values["exp_avg_sq"]
    (beta1, beta2), rate = group["betas"], group["lr"]
    average.mul_(beta1).add_(gradient * (1 - beta1))
    square.mul_(beta2).add_((gradient * gradient).mul_(1 - beta2))
    size = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
    parameter.mul_(1 - rate * group["weight_decay"]).sub_((average / size).mul_(rate / (1 - beta1**step)))
