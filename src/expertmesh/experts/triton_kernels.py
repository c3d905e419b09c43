"""Define the Triton kernels. Sums and activations are in fp32 for any dtype, none has atomics on floats (so results
repeat bit for bit), and each element is read and written once. tests/experts/test_kernels.py runs them in Triton's
interpreter and compiles them for sm_80, sm_90 and sm_100, all without a GPU.

    P pairs, I intermediate, N items, R rows, H hidden, B blocks of items
"""

import triton
import triton.language as tl


@triton.jit
def swiglu(
    pre_ptr,
    weight_ptr,
    act_ptr,
    pre_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Compute act_PI = weight_P * gate * sigmoid(ALPHA * gate) * (up + OFFSET), clamped to LIMIT before. A program a
    pair.
    """
    pair = tl.program_id(0).to(tl.int64)
    weight = tl.load(weight_ptr + pair).to(tl.float32)
    for start in range(0, WIDTH, BLOCK):
        gate, up = _gate_and_up(pre_ptr + pair * pre_stride, start, WIDTH, BLOCK, INTERLEAVED)
        gate, up = _clamped(gate, up, LIMIT)
        i = start + tl.arange(0, BLOCK)
        act = gate * tl.sigmoid(ALPHA * gate) * (up + OFFSET) * weight
        tl.store(act_ptr + pair * WIDTH + i, act.to(act_ptr.dtype.element_ty), mask=i < WIDTH)


@triton.jit
def swiglu_backward(
    pre_ptr,
    grad_ptr,
    weight_ptr,
    grad_weight_ptr,
    pre_stride,
    grad_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Turn in place grad_PI, the gradient of the weighted activation, into that activation, and pre_P2I into its
    gradient.

    A program a pair, so that the sum for grad_weight_P stays in registers.
    """
    pair = tl.program_id(0).to(tl.int64)
    pre_ptr += pair * pre_stride
    grad_ptr += pair * grad_stride
    weight = tl.load(weight_ptr + pair).to(tl.float32)
    grad_weight = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        i = start + tl.arange(0, BLOCK)
        grad = tl.load(grad_ptr + i, mask=i < WIDTH, other=0.0).to(tl.float32)
        raw_gate, raw_up = _gate_and_up(pre_ptr, start, WIDTH, BLOCK, INTERLEAVED)
        gate, up = _clamped(raw_gate, raw_up, LIMIT)
        sigmoid = tl.sigmoid(ALPHA * gate)
        # d silu(g)/dg = s + ALPHA * g * s * (1 - s), s = sigmoid(ALPHA * g); ALPHA is 1 but in GPT-OSS.
        silu = gate * sigmoid
        act = silu * (up + OFFSET)
        grad_weight += grad * act
        weighted = grad * weight
        grad_gate = weighted * (up + OFFSET) * (sigmoid + ALPHA * silu * (1 - sigmoid))
        grad_up = weighted * silu
        # A clamped value has no gradient; at the limit itself it has, as in torch's clamp.
        if LIMIT is not None:
            grad_gate = tl.where(raw_gate <= LIMIT, grad_gate, 0.0)
            grad_up = tl.where((raw_up <= LIMIT) & (raw_up >= -LIMIT), grad_up, 0.0)
        tl.store(grad_ptr + i, (act * weight).to(grad_ptr.dtype.element_ty), mask=i < WIDTH)
        _store_gate_and_up(pre_ptr, start, grad_gate, grad_up, WIDTH, BLOCK, INTERLEAVED)
    tl.store(grad_weight_ptr + pair, tl.sum(grad_weight, axis=0).to(grad_weight_ptr.dtype.element_ty))


@triton.jit
def segment_sum(
    values_ptr, item_ptr, start_ptr, out_ptr, values_stride, H: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Sum values_NH[item] over the items of row r, in their order: out_RH[r]. A program a row and block of H.

    The loads of AT_ONCE items are in flight together.
    """
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(start_ptr + row)
    end = tl.load(start_ptr + row + 1)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(start, end, AT_ONCE):
        for k in tl.static_range(AT_ONCE):
            item = tl.load(item_ptr + first + k, mask=first + k < end, other=0)
            # The loads of a step do not depend on each other, so that they overlap; items past the end add zeros.
            inside = h < tl.where(first + k < end, H, 0)
            total += tl.load(values_ptr + item * values_stride + h, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * H + h, total.to(out_ptr.dtype.element_ty), mask=h < H)


@triton.jit
def count_keys(key_ptr, count_ptr, N, BLOCK: tl.constexpr, KEYS: tl.constexpr):
    """Count the items of block b with each key: count_(KEYS, B)[key, b]. A program a block."""
    block = tl.program_id(0)
    item = block * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(key_ptr + item, mask=item < N, other=0).to(tl.int32)
    count = tl.histogram(key, KEYS, mask=item < N)
    tl.store(count_ptr + tl.arange(0, KEYS).to(tl.int64) * tl.num_programs(0) + block, count)


@triton.jit
def place_by_key(key_ptr, end_ptr, count_ptr, order_ptr, place_ptr, N, BLOCK: tl.constexpr):
    """Write place_N[i], the place of item i when all are in the order of their keys (stable), and order_N, its inverse.

    `end_ptr`: running sums of `count_ptr`.
    """
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    item = block * BLOCK + lane
    key = tl.load(key_ptr + item, mask=item < N, other=-1)
    cell = tl.where(item < N, key, 0) * tl.num_programs(0) + block
    start = tl.load(end_ptr + cell) - tl.load(count_ptr + cell)
    # Within a block by comparing all pairs: no atomics, so that places repeat from run to run.
    before = (key[:, None] == key[None, :]) & (lane[None, :] < lane[:, None])
    place = start + tl.sum(before.to(tl.int32), axis=1)
    tl.store(place_ptr + item, place.to(tl.int64), mask=item < N)
    tl.store(order_ptr + place, item.to(tl.int64), mask=item < N)


@triton.jit
def _gate_and_up(pre_ptr, start, WIDTH: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Load one block of a pair's pre-activation, in fp32: [gate; up], or alternating, which is loaded as it is
    stored.
    """
    if INTERLEAVED:
        both = 2 * start + tl.arange(0, 2 * BLOCK)
        gate, up = tl.split(tl.reshape(tl.load(pre_ptr + both, mask=both < 2 * WIDTH, other=0.0), (BLOCK, 2)))
    else:
        i = start + tl.arange(0, BLOCK)
        gate = tl.load(pre_ptr + i, mask=i < WIDTH, other=0.0)
        up = tl.load(pre_ptr + WIDTH + i, mask=i < WIDTH, other=0.0)
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def _store_gate_and_up(pre_ptr, start, gate, up, WIDTH: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    gate = gate.to(pre_ptr.dtype.element_ty)
    up = up.to(pre_ptr.dtype.element_ty)
    if INTERLEAVED:
        both = 2 * start + tl.arange(0, 2 * BLOCK)
        tl.store(pre_ptr + both, tl.interleave(gate, up), mask=both < 2 * WIDTH)
    else:
        i = start + tl.arange(0, BLOCK)
        tl.store(pre_ptr + i, gate, mask=i < WIDTH)
        tl.store(pre_ptr + WIDTH + i, up, mask=i < WIDTH)


@triton.jit
def _clamped(gate, up, LIMIT: tl.constexpr):
    """Clamp by comparisons, which leave NaN as it is, like torch."""
    if LIMIT is not None:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return gate, up
