"""Triton's kernels of `moe.kernels`, as operators of torch that torch.compile, fake tensors and checkpointing know.

They do the memory-bound work around the experts' products. triton_kernels.py has the kernels; install.py decides
whether this device runs them. The torch code beside their callers (pairs.py, mlp_spec.py) defines what they compute,
and runs wherever they do not. They are called inside of autograd functions, so none has a derivative.

    P pairs, I intermediate, N items, R rows, H hidden
"""

import torch

# Elements of a program: each of its 128 threads has 16 bytes of bf16 in every load.
_BLOCK = 1024
# Items whose loads are under way together in a sum; the pairs of a token's row are seldom more than two on a rank.
_AT_ONCE = 4
# Items whose places a program finds by comparing each with each.
_SORT_BLOCK = 64


@torch.library.custom_op("expertmesh::swiglu", mutates_args=())
def swiglu(
    pre_P2I: torch.Tensor, weight_P: torch.Tensor, interleaved: bool, alpha: float, limit: float | None, offset: float
) -> torch.Tensor:
    """Return `weight * gate * sigmoid(alpha * gate) * (up + offset)`, `[P, I]`, gate and up clamped to `limit`."""
    from expertmesh.experts import triton_kernels

    act_PI = pre_P2I.new_empty(pre_P2I.shape[0], pre_P2I.shape[1] // 2)
    pairs, width = act_PI.shape
    if pairs:
        form = (width, _block(width), interleaved, alpha, limit, offset)
        triton_kernels.swiglu[pairs,](pre_P2I, weight_P.contiguous(), act_PI, _row_stride(pre_P2I), *form)
    return act_PI


@swiglu.register_fake
def _(pre_P2I: torch.Tensor, weight_P: torch.Tensor, *form: object) -> torch.Tensor:
    return pre_P2I.new_empty(pre_P2I.shape[0], pre_P2I.shape[1] // 2)


@torch.library.custom_op("expertmesh::swiglu_backward_", mutates_args=("pre_P2I", "grad_act_PI"))
def swiglu_backward_(
    pre_P2I: torch.Tensor,
    grad_act_PI: torch.Tensor,
    weight_P: torch.Tensor,
    interleaved: bool,
    alpha: float,
    limit: float | None,
    offset: float,
) -> torch.Tensor:
    """Return d(routing weight) `[P]`.

    In place, `grad_act_PI`, the gradient of the weighted activation, becomes that activation, and `pre_P2I` its
    gradient.
    """
    from expertmesh.experts import triton_kernels

    grad_weight_P = torch.empty_like(weight_P, memory_format=torch.contiguous_format)
    pairs, width = grad_act_PI.shape
    if pairs:
        tensors = (pre_P2I, grad_act_PI, weight_P.contiguous(), grad_weight_P)
        form = (width, _block(width), interleaved, alpha, limit, offset)
        triton_kernels.swiglu_backward[pairs,](*tensors, _row_stride(pre_P2I), _row_stride(grad_act_PI), *form)
    return grad_weight_P


@swiglu_backward_.register_fake
def _(pre_P2I: torch.Tensor, grad_act_PI: torch.Tensor, weight_P: torch.Tensor, *form: object) -> torch.Tensor:
    return torch.empty_like(weight_P, memory_format=torch.contiguous_format)


@torch.library.custom_op("expertmesh::segment_sum", mutates_args=())
def segment_sum(values_NH: torch.Tensor, item_N: torch.Tensor, start_R1: torch.Tensor) -> torch.Tensor:
    """Sum `values_NH[item]` over `item_N[start_R1[r]:start_R1[r + 1]]`, in that order: `out_RH[r]`."""
    from expertmesh.experts import triton_kernels

    rows, hidden = start_R1.shape[0] - 1, values_NH.shape[1]
    out_RH = values_NH.new_empty(rows, hidden)
    if rows and hidden:
        block = _block(hidden)
        grid = (rows, -(-hidden // block))
        triton_kernels.segment_sum[grid](
            values_NH, item_N, start_R1, out_RH, _row_stride(values_NH), hidden, block, _AT_ONCE
        )
    return out_RH


@segment_sum.register_fake
def _(values_NH: torch.Tensor, item_N: torch.Tensor, start_R1: torch.Tensor) -> torch.Tensor:
    return values_NH.new_empty(start_R1.shape[0] - 1, values_NH.shape[1])


@torch.library.custom_op("expertmesh::counting_sort", mutates_args=())
def counting_sort(key_N: torch.Tensor, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (`order_N`, `place_N`): the stable order of items by `key_N` (int64, in `range(keys)`), and its
    inverse.
    """
    from expertmesh.experts import triton_kernels

    key_N = key_N.contiguous()  # a column, where each token has one expert
    order_N, place_N = torch.empty_like(key_N), torch.empty_like(key_N)
    items = len(key_N)
    if items:
        bins, blocks = _power_of_two(keys), -(-items // _SORT_BLOCK)
        count = torch.empty(bins, blocks, dtype=torch.int32, device=key_N.device)
        triton_kernels.count_keys[blocks,](key_N, count, items, _SORT_BLOCK, bins)
        end = count.view(-1).cumsum(0, dtype=torch.int32)
        triton_kernels.place_by_key[blocks,](key_N, end, count, order_N, place_N, items, _SORT_BLOCK)
    return order_N, place_N


@counting_sort.register_fake
def _(key_N: torch.Tensor, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(key_N), torch.empty_like(key_N)


def _row_stride(tensor: torch.Tensor) -> int:
    assert tensor.stride(1) == 1 or tensor.shape[1] == 1, f"columns of {tuple(tensor.shape)} are not neighbours"
    return tensor.stride(0)


def _block(width: int) -> int:
    """Return a block with a column for each thread of four warps: no thread reads what another writes in place."""
    return max(128, min(_BLOCK, _power_of_two(width)))


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
