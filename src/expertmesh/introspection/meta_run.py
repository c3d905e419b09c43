"""Run a model on meta: a few rows of text go through the family's code, and a mode watches every operation.

For the proofs of this package and for the planner's probe. Tensors on meta have no values: experts are replaced (their
tokens cannot be sorted), routers get even counts, and the few operations that read a value are answered by a mode.
Nothing here reads weights or communicates.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from expertmesh.anatomy import ExpertsSpec
from expertmesh.compat import READS_A_VALUE, TorchDispatchMode, frames_in_one_chunk
from expertmesh.experts.layer import sorted_forward
from expertmesh.state.patching import forwards_replaced, replaced

ROWS, LENGTH = 2, 8  # of a forward of text


class WithoutValues(TorchDispatchMode):
    """Mode that answers the few operations on meta that read values: those for masks, and for indexing by a mask."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is READS_A_VALUE:
            return args[0].dtype == torch.bool or 1  # such as "all rows are one sample"
        if func is torch.ops.aten.nonzero.default:
            return _all_places(args[0])
        if func is torch.ops.aten.index.Tensor:
            # A mask becomes the indices of all its places, as its values are unknown.
            masks = [index is not None and index.dtype == torch.bool for index in args[1]]
            places = [_all_places(i).unbind(1) if mask else [i] for i, mask in zip(args[1], masks, strict=True)]
            args = (args[0], [place for each in places for place in each])
        return func(*args, **(kwargs or {}))


def _all_places(mask: torch.Tensor) -> torch.Tensor:
    return mask.new_empty((mask.numel(), mask.dim()), dtype=torch.int64)


@frames_in_one_chunk
def run_text(
    meta_model: nn.Module,
    experts: Sequence[ExpertsSpec],
    watch: TorchDispatchMode | None = None,
    *,
    blocks: Sequence[str] = (),
    repeated: Collection[str] = (),
    backward: bool = False,
) -> None:
    """Run a few rows of text through a model on meta, in evaluation mode; its state is restored.

    Args:
        experts: all of its experts modules that are not inside placeholders.
        watch: the mode that sees every operation; None: `WithoutValues`.
        blocks: names of decoder blocks.
        repeated: those of `blocks` that return their hidden state unchanged, unless a block before them returned more
            than a hidden state.
        backward: run a backward from the logits as well, with gradients on the parameters afterwards.

    Raises:
        Exception: whatever the family's code raises on tensors without values.
    """
    returns_more = False

    def run_block(forward: Callable[..., Any], is_repeated: bool, *args: Any, **kwargs: Any) -> Any:
        nonlocal returns_more
        if is_repeated and not returns_more:
            return args[0] if args else kwargs["hidden_states"]
        output = forward(*args, **kwargs)
        returns_more = not isinstance(output, torch.Tensor)
        return output

    # The result of experts does not matter on meta, but their inputs must count as read.
    def weighted(hidden_states: torch.Tensor, index_TK: torch.Tensor, weight_TK: torch.Tensor) -> torch.Tensor:
        return hidden_states * (index_TK * weight_TK).sum().to(hidden_states.dtype)

    forwards = forwards_of_experts(
        meta_model, experts, lambda module: weighted, lambda hidden_states: hidden_states * 1
    )
    for name in blocks:
        block = meta_model.get_submodule(name)
        forwards[block] = partial(run_block, block.forward, name in repeated)
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64, device="meta")
    config: Any = meta_model.config.get_text_config()  # type: ignore[operator, union-attr]
    training = meta_model.training
    meta_model.eval()  # adapters' dropout needs the numbers of the tokens, which are unknown here
    try:
        with forwards_replaced(forwards), torch.set_grad_enabled(backward), EvenCounts(), watch or WithoutValues():
            with replaced(config, pad_token_id=config.pad_token_id or 0):  # without it a classifier takes no rows
                output = meta_model(input_ids=ids, use_cache=False)
            if backward:
                output.logits.backward(torch.empty_like(output.logits))
    finally:
        meta_model.train(training)


def forwards_of_experts(
    model: nn.Module,
    experts: Sequence[ExpertsSpec],
    pairs: Callable[[nn.Module], Callable[..., Any]],
    dense: Callable[..., Any] | None = None,
) -> dict[nn.Module, Callable[..., Any]]:
    """Return a replacement forward by experts module.

    Args:
        pairs: returns the forward of a module, which is called with tokens, expert ids and weights. For a mixture that
            contains its router, the router still runs.
        dense: the forward of modules that are called with one row per (expert, token); None uses `pairs` for them.
    """
    found: dict[nn.Module, Callable[..., Any]] = {}
    for spec in experts:
        module = model.get_submodule(spec.name)
        forward = pairs(module) if dense is None or spec.call != "dense" else dense
        found[module] = partial(sorted_forward, module, spec, forward) if spec.call == "sorted" else forward
    return found


class EvenCounts(TorchFunctionMode):
    """Mode that gives a router on meta the number of pairs of its last `topk` for each expert, as even as possible."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.pairs = 0, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.tolist and args[0].is_meta and self.pairs and args[0].shape == (self.experts,):
            each, left = divmod(self.pairs, self.experts)
            return [each + (expert < left) for expert in range(self.experts)]
        result = func(*args, **kwargs)
        if func in (torch.topk, torch.Tensor.topk):
            scores, dim = args[0] if args else kwargs["input"], kwargs.get("dim", args[2] if len(args) > 2 else -1)
            self.experts, self.pairs = scores.shape[dim], result.indices.numel()
        return result
