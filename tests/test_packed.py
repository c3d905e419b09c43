"""Packed weights: what codes stand for, that the nearest ones are taken, and that a packed tensor is cut by experts."""

import itertools
from collections.abc import Callable

import pytest
import torch

from expertmesh.io.boxes import full_box, slices
from expertmesh.state.codes import (
    PackedFormat,
    codes_of,
    factor_rows,
    quantise,
    quantised_format,
    rounded,
    scale_rows,
    values_of,
)
from expertmesh.state.packed import PackedTensor
from expertmesh.weights.quantised.encode import Rounding, encode, stored_matrix

NAMES = ("nf4", "mxfp4", "nvfp4", "float8")
BITS = {"nf4": 4 + 32 / 64, "mxfp4": 4 + 8 / 32, "nvfp4": 4 + 8 / 16, "float8": 8 + 32 / 128**2}
# bitsandbytes' create_normal_map / dDequantizeNF4, as its documentation lists them.
NF4 = (-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0)
NF4 += (0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)


def _packed(
    name: str, rows: int = 96, columns: int = 128, *, transposed: bool = False, experts: int = 2
) -> PackedTensor:
    kind = quantised_format(name, rows, columns, transposed=transposed)
    values = torch.randn(experts, *kind.shape, generator=torch.Generator().manual_seed(3)) * 0.02
    return PackedTensor.of(values, kind, torch.float32)


def test_nf4_has_the_table_of_bitsandbytes_and_takes_the_nearest_of_it() -> None:
    kind = quantised_format("nf4", 1, 64, transposed=False)
    values = torch.linspace(-3, 3, 64)
    kept = PackedTensor.of(values.view(1, 1, 64), kind, torch.float32).experts(0, 1).flatten()
    table = torch.tensor(NF4)
    nearest = table[(values[:, None] / 3 - table).abs().argmin(1)] * 3
    torch.testing.assert_close(kept, nearest, rtol=1e-6, atol=1e-7)


def test_e2m1_takes_the_nearest_value_and_the_even_code_on_a_tie() -> None:
    kind = quantised_format("mxfp4", 1, 32, transposed=False)
    values = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.26, 0.74, -5.01, 1.2]).repeat(3)[:32]
    kept = PackedTensor.of(values.view(1, 1, 32), kind, torch.float32).experts(0, 1).flatten()
    assert kept[:12].tolist() == [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -0.5, 0.5, -6.0, 1.0]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(96, 128), (130, 144), (7, 20)], ids=str)
def test_a_value_is_within_half_a_step_of_what_is_kept(name: str, transposed: bool, shape: tuple[int, int]) -> None:
    kind = quantised_format(name, *shape, transposed=transposed)
    values = torch.randn(3, *kind.shape, generator=torch.Generator().manual_seed(1))
    packed = PackedTensor.of(values, kind, torch.float32)
    assert packed.shape == values.shape
    kept = packed.experts(0, 3)
    widest = {"nf4": 0.16, "mxfp4": 0.26, "nvfp4": 0.19, "float8": 0.04}[name]  # of the largest of a block
    assert float((kept - values).abs().max()) <= widest * float(values.abs().max())
    assert float((kept - values).norm() / values.norm()) <= {"float8": 0.03}.get(name, 0.13)
    zeros = PackedTensor.of(torch.zeros_like(values), kind, torch.float32)
    assert not zeros.experts(0, 3).any()


@pytest.mark.parametrize(("name", "form"), [("mxfp4", "mxfp4"), ("nvfp4", "nvfp4"), ("float8", "fp8")])
def test_what_is_quantised_in_memory_has_the_values_of_what_is_written_to_files(name: str, form: str) -> None:
    kind = quantised_format(name, 96, 128, transposed=False)
    values = torch.randn(96, 128, generator=torch.Generator().manual_seed(2)) * 0.02
    values[3, :64] = 0.0
    leaf = stored_matrix(form, "x.weight", (96, 128))
    parts = {}
    for part, box, stored in encode(leaf, values, Rounding()):
        parts[part.name] = parts.get(part.name, torch.empty(part.shape, dtype=part.dtype))
        parts[part.name][slices(box)] = stored
    written = leaf.read(full_box(leaf.shape), lambda part, box, out: out.copy_(parts[part.name][slices(box)]))
    assert torch.equal(PackedTensor.of(values.unsqueeze(0), kind, torch.float32).experts(0, 1)[0], written)


def _with_exponents(values: torch.Tensor, up: float) -> float:
    """The error of mxfp4 if a block's exponent goes up from that mantissa, `frexp`'s, of its largest value."""
    blocks = values.view(-1, 32)
    mantissa, exponent = torch.frexp(blocks.abs().amax(1))
    scale = torch.ldexp(torch.ones(len(blocks)), exponent - 3 + (mantissa >= up).int()).unsqueeze(1)
    return float((values_of(codes_of(blocks / scale, "e2m1"), "e2m1") * scale - blocks).norm() / values.norm())


@pytest.mark.parametrize("draw", [torch.randn, lambda *size, generator: torch.randn(*size, generator=generator) ** 3])
def test_exponents_are_rounded_as_errs_least_of_the_published_rules(draw: Callable[..., torch.Tensor]) -> None:
    values = draw(256, 4096, generator=torch.Generator().manual_seed(7))
    kind = quantised_format("mxfp4", *values.shape, transposed=False)
    ours = float((rounded(values.unsqueeze(0), kind)[0] - values).norm() / values.norm())
    assert ours == pytest.approx(_with_exponents(values, 0.875))
    never_cut, floor = _with_exponents(values, 0.75 + 1e-6), _with_exponents(values, 1.1)
    assert ours < floor
    assert ours < never_cut


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_of_codes_and_scales(name: str) -> None:
    packed = _packed(name, 256, 512)
    assert packed.numel() * BITS[name] / 8 <= packed.nbytes <= packed.numel() * BITS[name] / 8 + 2 * 32


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_part_is_what_the_whole_has_there(name: str, transposed: bool) -> None:
    kind = quantised_format(name, 200, 160, transposed=transposed)
    values = torch.randn(3, *kind.shape, generator=torch.Generator().manual_seed(5))
    packed = PackedTensor.of(values, kind, torch.float32)
    whole = packed.experts(0, 3)
    for first, second in itertools.product((slice(0, 3), slice(127, 131), slice(150, 160)), repeat=2):
        index = (slice(1, 3), first, second)
        assert torch.equal(packed.values_at(index), whole[index])
        box = packed.kind.whole_blocks(((first.start, first.stop), (second.start, second.stop)))
        blocks = slices(((1, 2), *box))
        if kind.factor == "none":
            assert torch.equal(rounded(values[blocks], kind), whole[blocks])
    assert torch.equal(rounded(values, kind), whole)


def test_parts_of_a_fused_matrix_have_blocks_and_factors_of_their_own() -> None:
    kind = PackedFormat("as_published", "e4m3", (128, 128), torch.float32, (130, 60), 130, "divides")
    assert kind.grid == (3, 2)
    assert scale_rows(kind, torch.device("cpu")).tolist() == [0] * 128 + [1] * 2 + [2] * 60
    assert factor_rows(kind, torch.device("cpu")).tolist() == [0, 0, 1]


def _rows(name: str, rows: int = 96, columns: int = 128) -> tuple[torch.Tensor, PackedTensor]:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(4)) * 0.02
    return values, PackedTensor.of(values, quantised_format(name, rows, columns, by_rows=True), torch.float32)


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_a_linear_layer_are_units_that_any_layout_cuts_alike(name: str) -> None:
    values, packed = _rows(name)
    whole = packed.values()
    assert packed.shape == values.shape
    assert torch.equal(rounded(values, packed.kind), whole)
    assert float((whole - values).norm() / values.norm()) <= {"float8": 0.03}.get(name, 0.13)
    assert torch.equal(packed.values_at((slice(5, 9), slice(3, 40))), whole[5:9, 3:40])
    for dim, size in ((0, 24), (1, 64)):
        parts = [part.values() for part in packed.split(size, dim)] if columns_fit(name, dim) else [whole]
        assert torch.equal(torch.cat(parts, dim), whole)


def columns_fit(name: str, dim: int) -> bool:
    return dim == 0 or name != "float8"  # a block of 128 columns is not cut


def test_an_only_block_may_be_cut() -> None:
    _, packed = _rows("nf4", columns=32)
    assert torch.equal(torch.cat([part.values() for part in packed.split(16, 1)], 1), packed.values())


def test_a_product_with_a_packed_weight_is_the_one_with_its_values() -> None:
    _, packed = _rows("nvfp4")
    x, bias = torch.randn(3, 5, 128, requires_grad=True), torch.randn(96, requires_grad=True)
    expected = torch.nn.functional.linear(x, packed.values(), bias)
    wanted = torch.autograd.grad(expected.square().sum(), (x, bias))
    got = torch.nn.functional.linear(x, packed, bias)
    assert torch.equal(got, expected)
    assert all(map(torch.equal, torch.autograd.grad(got.square().sum(), (x, bias)), wanted))


def test_nothing_widens_a_packed_tensor_by_accident() -> None:
    packed = _packed("nf4")
    for use in (lambda: packed + 1, lambda: packed.double(), lambda: packed[:, :5], lambda: packed.sum()):
        with pytest.raises((NotImplementedError, AssertionError), match=r"packed weights|experts alone"):
            use()
    with pytest.raises(AssertionError, match="packed ones alone"):
        packed.copy_(torch.zeros(packed.shape))


def test_quantising_is_per_expert() -> None:
    packed = _packed("nvfp4", experts=3)
    alone = quantise(packed.experts(1, 2) * 1000, packed.kind)[0]
    assert packed.packed_LB.shape == (3, len(alone))
