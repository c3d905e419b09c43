"""What a block's own code saves and computes, found by running it on meta: no weights, no formulas per family.

The blocks run forward and backward on meta tensors, their experts replaced by nothing (our own expert layer has exact
formulas, blocks.py) and attention by what a fused kernel saves. So a norm that works in fp32, a latent attention or a
shared expert costs what its code costs. One block of each kind is run; figures are linear in the micro-batch.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from expertmesh.anatomy import Anatomy
from expertmesh.config.errors import InputError
from expertmesh.experts.lora_state import number_rows
from expertmesh.planning.trackers import UsageTracker
from expertmesh.state.patching import forwards_replaced
from expertmesh.step.base_model import base_name


class NotProbed(InputError):
    """A family whose blocks cannot be run on meta, or of which too little is known; there is no plan for it."""


@dataclass(slots=True)
class BlockFigures:
    """Of one block without its routed experts, for one sequence on one rank (no tp, no cp); bytes and FLOPs.

    `saved` stays from forward to backward, `backward` comes on top while that runs; `gradients` is the part of it that
    is parameters' gradients and does not grow with the micro-batch. `choices` is what checkpointing keeps of the
    router's choice, `attended` what attention gives and `normalisers` its number per row, `mask` the part of `saved`
    that is masks, for all pairs of positions on every rank, `latents` the part that tp does not split. `queries` are
    bytes of all queries and of what attention gives for them, `keys` of a key and value head, `heads` how many queries
    have. `products` are FLOPs of matrix products in forward, `attention` those of attention. `moved`: bytes that other
    operations read and write in forward and in backward; `operations`: how many all are.
    """

    saved: int = 0
    backward: int = 0
    gradients: int = 0
    choices: int = 0
    attended: int = 0
    normalisers: int = 0
    mask: int = 0
    latents: int = 0
    queries: int = 0
    keys: int = 0
    heads: int = 0
    products: int = 0
    attention: int = 0
    moved: list[int] = field(default_factory=lambda: [0, 0])
    operations: list[int] = field(default_factory=lambda: [0, 0])


@dataclass(frozen=True, slots=True)
class Probed:
    """Figures of each probed block, and `outside`: bytes that stay of what is around the blocks, the base model's
    output left out; `tables` is the part of it that was there before the first block (rotary tables), for whole rows.
    `first_saves_less`: how much less the first block saves when nothing before it trains (adapters).
    """

    blocks: list[BlockFigures]
    outside: int
    tables: int
    first_saves_less: int


def probe(
    model: nn.Module,
    anatomy: Anatomy,
    measured: Sequence[str],
    length: int,
    *,
    packed: bool,
    latents: Collection[str] = (),
) -> Probed:
    """Run `model` (on meta, in the compute dtype, not sharded) on one and two sequences of `length` tokens.

    `measured` names the first block of each kind, in the model's order. `packed` gives attention the explicit mask that
    keeps samples apart; `latents` names modules of which tp leaves every rank the whole. Raises `NotProbed` where the
    family's code needs values.
    """
    skipped = {module: _stand_in(module) for module in (model.get_submodule(spec.name) for spec in anatomy.experts)}
    embedding = next(model.get_input_embeddings().parameters())  # type: ignore[operator]
    try:
        with forwards_replaced(skipped):
            one, two = (_run(model, anatomy, measured, (rows, length), packed, latents) for rows in (1, 2))
            first = one
            if not embedding.requires_grad:
                first = _run(model, anatomy, measured, (1, length), packed, latents, embeds=True)
    except Exception as error:
        # Another package's code on tensors without values may raise anything; there is no plan for it then.
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise NotProbed(
            f"{model.config.model_type}: its code does not run without values ({cause})",  # type: ignore[union-attr]
            key="plan.model-not-probed",
        ) from error
    figures = []
    for name in measured:
        if (single := one.seen.get(name)) is None:
            figures.append(BlockFigures())  # of a tower that text does not come to
            continue
        grows = max(0, two.seen[name].backward - single.backward)
        figures.append(replace(single, backward=grows, gradients=max(0, single.backward - grows)))
    return Probed(figures, one.outside, one.tables, one.first - first.first)


class _Attention(TorchFunctionMode):
    """Stands in for fused attention and counts router choices; both go to the block that runs, `current`."""

    def __init__(self) -> None:
        super().__init__()
        self.current = BlockFigures()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.__bool__:
            return True  # what mask functions ask about positions: whether they are those of one sample, unpadded
        if func is F.scaled_dot_product_attention:
            query, key, value, *rest = args
            mask = rest[0] if rest else kwargs.get("attn_mask")
            batch, heads, length, width = query.shape
            pairs = batch * heads * length * key.shape[2]
            self.current.attention += 2 * pairs * (width + value.shape[-1])
            out = FusedAttention.apply(query, key, value, mask)
            self.current.attended += out.nbytes
            self.current.queries += query.nbytes + out.nbytes
            self.current.keys += (key.nbytes + value.nbytes) // key.shape[1]
            self.current.heads = heads
            self.current.normalisers += batch * heads * length * 4
            if mask is not None:
                self.current.mask += mask.numel() * (query.element_size() if mask.dtype == torch.bool else 0)
            return out
        result = func(*args, **kwargs)
        if func in (torch.topk, torch.Tensor.topk):
            self.current.choices += result.indices.nbytes
        return result


class FusedAttention(torch.autograd.Function):
    """Saves what fused kernels save: query, key, value, output, one number per row, and a mask as they convert it."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any) -> Any:
        # Laid out as [B, S, h, d], like the kernels', so that what follows need not copy it.
        batch, heads, length, _ = query.shape
        out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        rows = query.new_empty(batch, heads, length, dtype=torch.float32)
        bias = mask.to(query.dtype) if mask is not None and mask.dtype == torch.bool else mask
        ctx.save_for_backward(query, key, value, out, rows, bias)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Any) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def _stand_in(experts: nn.Module) -> Callable[..., Any]:
    """For the forward of routed experts; what comes out has a gradient if they train."""
    trained = [parameter for parameter in experts.parameters() if parameter.requires_grad]
    return partial(_NoExperts.apply, trained[0] if trained else None)


class _NoExperts(torch.autograd.Function):
    """An output like the tokens, and nothing saved; `trained` gets no gradient."""

    @staticmethod
    def forward(ctx: Any, trained: Any, hidden: Any, *others: Any) -> Any:
        tensors = [(t.shape, t.dtype) if isinstance(t, torch.Tensor) else None for t in (hidden, *others)]
        ctx.like = [None, *tensors]
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return tuple(
            grad.new_empty(like[0], dtype=like[1]) if needed and like else None
            for like, needed in zip(ctx.like, ctx.needs_input_grad, strict=True)
        )


def _run(
    model: nn.Module,
    anatomy: Anatomy,
    measured: Sequence[str],
    shape: tuple[int, int],
    packed: bool,
    latents: Collection[str],
    embeds: bool = False,
) -> "_BlockWatch":
    """One forward and backward of the base model under the tracker. `embeds`: as the embedding is, frozen.

    Every block that is not `measured` hands on what it gets, so that those that are get the arguments of their place.
    """
    tracker = UsageTracker()
    watch = _BlockWatch(tracker)
    blocks = {name: model.get_submodule(name) for name in anatomy.blocks}
    forwards = {
        block: partial(watch.twice, name, block.forward) if name in measured else watch.pass_through
        for name, block in blocks.items()
    }
    base: Any = model.get_submodule(base_name(model))
    inputs: dict[str, Any] = {"input_ids": torch.zeros(shape, dtype=torch.int64, device="meta")}
    if packed:
        inputs["attention_mask"] = torch.zeros(shape[0], 1, shape[1], shape[1], dtype=torch.bool, device="meta")
    number_rows(model, torch.zeros(shape[0], dtype=torch.int64, device="meta"), shape[1], lambda number_BS: number_BS)
    with ExitStack() as hooks:
        for name in latents:
            if any(name.startswith(f"{block}.") for block in measured):
                module = model.get_submodule(name)
                hooks.enter_context(module.register_forward_pre_hook(partial(watch.latent, -1)))
                hooks.enter_context(module.register_forward_hook(partial(watch.latent, 1)))
        if not embeds:
            embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
            hooks.enter_context(embedding.register_forward_hook(_start_graph))
        try:
            tracker.include((*model.parameters(), *model.buffers()))
            known = tracker.live
            with torch.enable_grad(), forwards_replaced(forwards), watch.attention, tracker:
                hidden = base(**inputs, use_cache=False)[0]
                end = tracker.live
                if hidden.requires_grad:
                    hidden.backward(torch.empty_like(hidden))
        finally:
            for parameter in model.parameters():
                parameter.grad = None
    watch.outside = end - known - hidden.nbytes - 2 * sum(seen.saved for seen in watch.seen.values())
    watch.tables = watch.begin - known - hidden.nbytes
    return watch


def _start_graph(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    """Under adapters the first block's input has no gradient; every other block's has. Not as a leaf, which stays."""
    return output if output.requires_grad else output + torch.zeros_like(output[0, 0, 0], requires_grad=True)


class _BlockWatch:
    """Runs each measured block twice in a row and reads the tracker around the second run: what a block saves shows
    once its output is its successor's input and its own input is free. `first` is what the first run of the first block
    saves, `begin` what is live before it.
    """

    def __init__(self, tracker: UsageTracker) -> None:
        self.tracker, self.attention = tracker, _Attention()
        self.seen: dict[str, BlockFigures] = {}
        self.first = self.begin = self.outside = self.tables = 0
        self._tuples = False

    def twice(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What stands for the `forward` of a block of this name."""
        start = self.tracker.live
        self.attention.current = BlockFigures()  # the first run is not counted
        if not self.seen:
            self.begin = start
        hidden = self._hidden_of(forward(*args, **kwargs))
        args, kwargs = _with_hidden(args, kwargs, None)
        if not self.seen:
            self.first = self.tracker.live - start
        seen = self.attention.current = BlockFigures()
        self.seen[name] = seen
        before = self.tracker.live
        self._work(seen, 0, -1)
        seen.products = -self.tracker.products
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self._backward_ends(seen))
        held = [hidden]
        del hidden
        args, kwargs = _with_hidden(args, kwargs, held.pop())
        out = forward(*args, **kwargs)
        args, kwargs = _with_hidden(args, kwargs, None)
        self._work(seen, 0, +1)
        seen.products += self.tracker.products
        seen.saved = self.tracker.live - before
        if (hidden := self._hidden_of(out)).requires_grad:
            hidden.register_hook(lambda _: self._backward_begins(seen))
        return out

    def latent(self, sign: int, *_: Any) -> None:
        """A hook before (-1) or behind (+1) a module whose results count as latents."""
        self.attention.current.latents += sign * self.tracker.live

    def pass_through(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden, None) if self._tuples else hidden

    def _hidden_of(self, output: Any) -> torch.Tensor:
        self._tuples = isinstance(output, tuple)
        hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return hidden

    def _work(self, seen: BlockFigures, direction: int, sign: int) -> None:
        """Start (-1) or stop (+1) counting what one direction does."""
        seen.moved[direction] += sign * self.tracker.moved
        seen.operations[direction] += sign * self.tracker.operations

    def _backward_begins(self, seen: BlockFigures) -> None:
        self.tracker.reset_peak()
        self._work(seen, 1, -1)
        seen.backward = -self.tracker.live

    def _backward_ends(self, seen: BlockFigures) -> None:
        self._work(seen, 1, +1)
        seen.backward += self.tracker.peak


def _with_hidden(args: Any, kwargs: Any, hidden: Any) -> tuple[Any, Any]:
    """The arguments of a block with other hidden states."""
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})
