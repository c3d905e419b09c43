"""Lazy tensors give, box by box, what the same functions give on values, and read no more than they need."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from expertmesh.io.boxes import Box, Leaf, extents, full_box, slices, volume
from expertmesh.weights.lazy import LazyTensor, bytes_needed, read_box


@dataclass(frozen=True)
class _Values:
    """A leaf that has its values at hand."""

    name: str
    values: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype


class _Source:
    """Fetches from `_Values` and counts bytes."""

    def __init__(self) -> None:
        self.bytes = 0

    def __call__(self, leaf: Leaf, box: Box, out: Tensor) -> None:
        assert isinstance(leaf, _Values)
        self.bytes += out.nbytes
        out.copy_(leaf.values[slices(box)])


def _leaf(*shape: int, dtype: torch.dtype = torch.float32) -> _Values:
    return _Values("x".join(map(str, shape)), torch.randn(*shape).to(dtype))


def _read(lazy: LazyTensor, box: Box, dtype: torch.dtype) -> tuple[Tensor, int]:
    source = _Source()
    out = torch.full(extents(box), 77, dtype=dtype)
    read_box(lazy, box, out, source)
    return out, source.bytes


A, B, C = _leaf(4, 6), _leaf(4, 6), _leaf(4, 6)
HALF = _leaf(4, 6, dtype=torch.bfloat16)
CUBE = _leaf(5, 6, 4)

MOVES: dict[str, tuple[Callable[..., Any], tuple[_Values, ...]]] = {
    "stack": (lambda a, b, c: torch.stack([a, b, c], dim=0), (A, B, C)),
    "stack last": (lambda a, b: torch.stack([a, b], dim=-1), (A, B)),
    "experts": (lambda a, b, c: torch.cat([torch.stack([a, b]), torch.stack([b, c])], dim=1), (A, B, C)),
    "cat of two dtypes": (lambda a, h: torch.cat([a, h], dim=1), (A, HALF)),
    "chunk": (lambda e: torch.chunk(e, 3, dim=1), (CUBE,)),
    "chunk unevenly": (lambda e: torch.chunk(e, 4, dim=1), (CUBE,)),
    "split into experts": (lambda e: [x.squeeze(0) for x in torch.chunk(e, 5, dim=0)], (CUBE,)),
    "split by sizes": (lambda e: torch.split(e, [1, 2, 3], dim=1), (CUBE,)),
    "unbind": (lambda e: torch.unbind(e, 1), (CUBE,)),
    "transpose": (lambda e: e.transpose(1, 2).contiguous(), (CUBE,)),
    "permute and index": (lambda e: e.permute(2, 0, 1)[1:, ..., 2], (CUBE,)),
    "narrow": (lambda e: e.narrow(2, 1, 2).unsqueeze(1).mT, (CUBE,)),
    "negative index": (lambda e: e[-1, 1:-1], (CUBE,)),
    "t": (lambda a: a.t(), (A,)),
    "squeeze all": (lambda e: e[:1, :, 1:2].squeeze(), (CUBE,)),
    "unit dims": (lambda e: e.view(5, 1, 6, 1, 4).reshape(5, 6, 4), (CUBE,)),
    "widening cast": (lambda h: h.to(torch.float32), (HALF,)),
    "clone": (lambda e: e.clone().detach(), (CUBE,)),
    "unit dims moved": (lambda e: e.view(5, 1, 6, 4).movedim(0, 1).squeeze(0)[None], (CUBE,)),
    "a step that leaves one": (lambda e: e[1::5, :, ::4], (CUBE,)),
}
COMPUTED: dict[str, tuple[Callable[..., Any], tuple[_Values, ...]]] = {
    "flatten": (lambda e: e.reshape(5, 24), (CUBE,)),
    "interleave": (lambda e: e.reshape(5, 3, 2, 4).transpose(1, 2).reshape(e.shape).contiguous(), (CUBE,)),
    "rope": (lambda a: a.view(2, 1, 2, 6).transpose(1, 2).reshape(4, 6), (A,)),
    "every second": (lambda e: e[1:3, ::2], (CUBE,)),
    "every third of a pair": (lambda e: e[:, :2, :].view(5, 2, 4)[::3], (CUBE,)),
    "diagonal": (lambda e: e.diagonal(dim1=0, dim2=1), (CUBE,)),
    "windows": (lambda e: e.unfold(1, 2, 1), (CUBE,)),
    "windows in steps": (lambda e: e.unfold(1, 3, 3), (CUBE,)),
    "expand": (lambda a: a[:, :1].expand(4, 3), (A,)),
    "by strides": (lambda a: a.as_strided((2,), (1,), 13), (A,)),
    "bits": (lambda h: h.view(torch.int16), (HALF,)),
    "joined dims": (lambda a: a.unsqueeze(0).flatten(0, 1).flatten(), (A,)),
    "square joined and split": (lambda e: e[:, :4].reshape(5, 16).reshape(5, 2, 8), (CUBE,)),
    "arithmetic": (lambda e: e * 2 + 1, (CUBE,)),
    "split of arithmetic": (lambda e: torch.split(e * 2, 2, dim=1), (CUBE,)),
    "narrowing cast": (lambda a: a.to(torch.bfloat16).float(), (A,)),
    "cat with values": (lambda a: torch.cat([a, torch.ones(4, 2)], dim=1), (A,)),
}


@pytest.mark.parametrize("name", [*MOVES, *COMPUTED])
def test_every_box_equals_the_same_function_on_values(name: str) -> None:
    function, leaves = (MOVES | COMPUTED)[name]
    expected = function(*(leaf.values for leaf in leaves))
    made = function(*(LazyTensor.of(leaf) for leaf in leaves))
    choose = random.Random(0)
    pairs = zip(expected, made, strict=True) if isinstance(expected, (list, tuple)) else [(expected, made)]
    for whole, lazy in pairs:
        assert isinstance(lazy, LazyTensor)
        assert (lazy.shape, lazy.dtype) == (whole.shape, whole.dtype)
        for _ in range(10):
            ends = [sorted((choose.randint(0, size), choose.randint(0, size))) for size in whole.shape]
            box = tuple((start, stop) for start, stop in ends)
            out, fetched = _read(lazy, box, whole.dtype)
            assert torch.equal(out, whole[slices(box)])
            assert fetched == bytes_needed(lazy, box) or name in COMPUTED
            if name in MOVES and "cat" not in name and "cast" not in name:
                assert fetched == volume(box) * whole.element_size()


def test_values_are_cast_once_to_the_targets_dtype() -> None:
    lazy = LazyTensor.of(A)
    out, _ = _read(lazy, full_box(A.shape), torch.bfloat16)
    assert torch.equal(out, A.values.to(torch.bfloat16))


def test_targets_may_have_any_strides() -> None:
    out = torch.empty(6, 4).t()
    read_box(LazyTensor.of(A), full_box(A.shape), out, _Source())
    assert torch.equal(out, A.values)


def test_a_reshape_reads_only_the_experts_asked_for() -> None:
    interleave, _ = COMPUTED["interleave"]
    lazy = interleave(LazyTensor.of(CUBE))
    box = ((1, 3), (0, 6), (0, 4))
    out, fetched = _read(lazy, box, torch.float32)
    assert torch.equal(out, interleave(CUBE.values)[1:3])
    assert fetched == bytes_needed(lazy, box) == 2 * 24 * 4


def test_a_call_is_evaluated_once_for_one_target() -> None:
    calls = LazyTensor.of(CUBE) * 2
    lazy = torch.cat([calls[3:], calls[:2]])
    _, fetched = _read(lazy, full_box(lazy.shape), torch.float32)
    assert fetched == CUBE.values.nbytes


def test_functions_that_write_are_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="mul_"):
        LazyTensor.of(A).mul_(2)
    target = torch.zeros(2, 4, 6)
    with pytest.raises(NotImplementedError, match="copy_"):
        target[0] = LazyTensor.of(A)


def test_joining_tensors_that_do_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot join"):
        torch.cat([LazyTensor.of(CUBE), LazyTensor.of(_leaf(4, 6, 4))], dim=1)
    with pytest.raises((ValueError, RuntimeError)):
        torch.split(LazyTensor.of(A), [1, 2], dim=0)


def test_tensors_without_elements_and_scalars_pass_through() -> None:
    scalar = _Values("scalar", torch.tensor(3.5))
    assert _read(LazyTensor.of(scalar), (), torch.float32)[0].item() == 3.5
    assert _read(LazyTensor.of(_leaf(0, 3)), ((0, 0), (0, 3)), torch.float32)[0].shape == (0, 3)


def test_leaves_are_found_behind_everything() -> None:
    lazy = torch.cat([LazyTensor.of(A).reshape(24), (LazyTensor.of(B) * 2).reshape(24)])
    assert lazy.leaves() == [A, B]
