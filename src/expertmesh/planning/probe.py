"""What a block's own code keeps and computes, found by running it on meta: no weights, no formulas per family.

The blocks run forward and backward on meta tensors, their experts replaced by nothing (our own expert layer has exact
formulas, memory.py) and attention by what a fused kernel saves. So a norm that works in fp32, a latent attention or a
shared expert costs what its code costs. One block of each kind is run; figures are linear in the micro-batch.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from expertmesh.anatomy import Anatomy
from expertmesh.config.errors import InputError
from expertmesh.planning.trackers import Census


@dataclass(frozen=True, slots=True)
class BlockFigures:
    """Of one block without its routed experts, for one sequence on one rank (no tp, no cp); bytes and FLOPs.

    `saved` stays from forward to backward, `forward` and `backward` come on top while it runs; `gradients` is the part
    of `backward` that is parameters' gradients and does not grow with the micro-batch. `choices` is what checkpointing
    keeps of the router's choice, `attended` what attention gives and `normalisers` its number per row, `mask` the part
    of `saved` that is masks, for all pairs of positions on every rank, `latents` the part that tp does not split.
    `queries` are bytes of all queries and of what attention gives for them, `keys` of a key and value head, `heads` how
    many queries have.
    `products` are FLOPs of matrix products in forward, `attention` those of attention.
    `moved`: bytes that other operations read and write in forward and in backward; `operations`: how many all are.
    """

    saved: int
    forward: int
    backward: int
    gradients: int
    choices: int
    attended: int
    normalisers: int
    mask: int
    latents: int
    queries: int
    keys: int
    heads: int
    products: int
    attention: int
    moved: tuple[int, int]
    operations: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Probed:
    """Figures of each kind of block, and `outside`: bytes that stay of what is around the blocks, the base model's
    output left out; `tables` is the part of it that was there before the first block (rotary tables), for whole rows.

    `first_saves_less`: how much less the first block saves when nothing before it trains (adapters).
    """

    blocks: Mapping[int, BlockFigures]
    outside: int
    tables: int
    first_saves_less: int


def probe(
    model: nn.Module,
    anatomy: Anatomy,
    kinds: Mapping[int, int],
    length: int,
    packed: bool,
    latents: Collection[str] = (),
) -> Probed:
    """Run `model` (on meta, in the compute dtype, not sharded) on one and two sequences of `length` tokens.

    `kinds` maps the index of a block to its kind; one block of each kind is run. `packed` gives attention the explicit
    mask that keeps samples apart; `latents` names modules of which tp leaves every rank the whole. Raises `NotProbed`
    where the family's code needs values.
    """
    try:
        return _probe(model, anatomy, kinds, length, packed, latents)
    except Exception as error:
        # Another package's code on tensors without values: whatever it raises, its figures cannot be had.
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise NotProbed(f"{model.config.model_type}: its code does not run without values ({cause})") from error  # type: ignore[union-attr]


class NotProbed(InputError):
    """A family whose blocks cannot be run on meta; there is no plan for it."""


def _probe(
    model: nn.Module, anatomy: Anatomy, kinds: Mapping[int, int], length: int, packed: bool, latents: Collection[str]
) -> Probed:
    firsts = {kind: index for index, kind in sorted(kinds.items(), reverse=True)}
    measured = [anatomy.blocks[index] for index in sorted(firsts.values())]
    with _without_experts(model, anatomy):
        one, two = (_run(model, anatomy, measured, rows, length, packed, latents) for rows in (1, 2))
        frozen = not next(model.get_input_embeddings().parameters()).requires_grad  # type: ignore[operator]
        first = _run(model, anatomy, measured, 1, length, packed, latents, embeds=True) if frozen else one
    figures = {}
    in_order = sorted(firsts, key=firsts.__getitem__)
    unreached = [_Seen()] * (len(in_order) - len(one.blocks))  # of towers that text does not come to
    for kind, single, double in zip(in_order, one.blocks + unreached, two.blocks + unreached, strict=True):
        backward = max(0, double.backward - single.backward)
        figures[kind] = BlockFigures(
            saved=single.saved,
            forward=single.forward,
            backward=backward,
            gradients=max(0, single.backward - backward),
            choices=single.choices,
            attended=single.attended,
            normalisers=single.normalisers,
            mask=single.mask,
            latents=single.latents,
            queries=single.queries,
            keys=single.keys,
            heads=single.heads,
            products=single.products,
            attention=single.attention,
            moved=(single.moved[0], single.moved[1]),
            operations=(single.operations[0], single.operations[1]),
        )
    return Probed(figures, one.outside, one.tables, one.first - first.first)


@dataclass(slots=True)
class _Seen:
    """One block in one run; what `BlockFigures` says."""

    saved: int = 0
    forward: int = 0
    backward: int = 0
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

    def work(self, direction: int, census: Census, sign: int) -> None:
        """Start (-1) or stop (+1) counting what one direction does."""
        self.moved[direction] += sign * census.moved
        self.operations[direction] += sign * census.operations


@dataclass(slots=True)
class _Result:
    blocks: list[_Seen]
    outside: int
    tables: int
    first: int


class _Attention(TorchFunctionMode):
    """Stands in for fused attention and counts router choices; both go to the block that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.current = _Seen()

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


class _NoExperts(torch.autograd.Function):
    """An output like the tokens, and nothing kept."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, *others: Any) -> Any:
        ctx.like = [(t.shape, t.dtype) if isinstance(t, torch.Tensor) else None for t in (hidden, *others)]
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return tuple(
            grad.new_empty(like[0], dtype=like[1]) if needed and like else None
            for like, needed in zip(ctx.like, ctx.needs_input_grad, strict=True)
        )


@contextmanager
def _replaced(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Modules with another forward, for the time of the block."""
    before = {module: vars(module).get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module, own in before.items():
            if own is None:
                del module.forward
            else:
                module.forward = own


def _without_experts(model: nn.Module, anatomy: Anatomy) -> AbstractContextManager[None]:
    return _replaced({model.get_submodule(spec.name): _NoExperts.apply for spec in anatomy.experts})


def _run(
    model: nn.Module,
    anatomy: Anatomy,
    measured: Sequence[str],
    rows: int,
    length: int,
    packed: bool,
    latents: Collection[str],
    embeds: bool = False,
) -> _Result:
    """One forward and backward of the base model under the census. `embeds`: as the embedding is, frozen.

    Every block that is not `measured` hands on what it gets, so that those that are get the arguments of their place.
    """
    census, attention, counter = Census(), _Attention(), FlopCounterMode(display=False)
    watch = _Watch(census, attention, counter)
    blocks = {name: model.get_submodule(name) for name in anatomy.blocks}
    forwards = {
        block: watch.twice(block.forward) if name in measured else watch.hand_on for name, block in blocks.items()
    }
    base: Any = model.base_model
    inputs: dict[str, Any] = {"input_ids": torch.zeros(rows, length, dtype=torch.int64, device="meta")}
    if packed:
        inputs["attention_mask"] = torch.zeros(rows, 1, length, length, dtype=torch.bool, device="meta")
    handles = []
    for name in latents:
        if any(name.startswith(f"{block}.") for block in measured):
            module = model.get_submodule(name)
            handles += [
                module.register_forward_pre_hook(watch.latent(-1)),
                module.register_forward_hook(watch.latent(1)),
            ]
    if not embeds:
        handles.append(model.get_input_embeddings().register_forward_hook(_start_graph))  # type: ignore[operator]
    try:
        census.know(model.parameters())
        census.know(model.buffers())
        known = census.live
        with torch.enable_grad(), _replaced(forwards), attention, counter, census:
            hidden = base(**inputs, use_cache=False)[0]
            end = census.live
            hidden.backward(torch.empty_like(hidden))
    finally:
        for handle in handles:
            handle.remove()
        for parameter in model.parameters():
            parameter.grad = None
    outside = end - known - hidden.nbytes - 2 * sum(seen.saved for seen in watch.seen)
    return _Result(watch.seen, outside, watch.begin - known - hidden.nbytes, watch.first)


def _start_graph(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    """Under adapters the first block's input has no gradient; every other block's has. Not as a leaf, which stays."""
    return output if output.requires_grad else output + torch.zeros_like(output[0, 0, 0], requires_grad=True)


class _Watch:
    """Runs each measured block twice in a row and reads the census around the second run: what a block keeps shows
    when its successor's input is its output and nobody holds its own input any more.
    """

    def __init__(self, census: Census, attention: _Attention, counter: FlopCounterMode) -> None:
        self.census, self.attention, self.counter = census, attention, counter
        self.seen: list[_Seen] = []
        self.first = 0
        self.begin = 0
        self._tuples = False

    def twice(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = self.census.live
            self.attention.current = _Seen()  # the first run counts for nothing
            if not self.seen:
                self.begin = start
            hidden = self._only(forward(*args, **kwargs))
            args, kwargs = _with_hidden(args, kwargs, None)
            if not self.seen:
                self.first = self.census.live - start
            seen = self.attention.current = _Seen()
            self.seen.append(seen)
            before = self.census.live
            self.census.reset_peak()
            seen.work(0, self.census, -1)
            seen.products = -self.counter.get_total_flops()
            hidden.register_hook(lambda _: self._backward_ends(seen))
            held = [hidden]
            del hidden
            args, kwargs = _with_hidden(args, kwargs, held.pop())
            out = forward(*args, **kwargs)
            args, kwargs = _with_hidden(args, kwargs, None)
            seen.work(0, self.census, +1)
            seen.products += self.counter.get_total_flops()
            seen.saved = self.census.live - before
            seen.forward = self.census.peak - self.census.live
            self._only(out).register_hook(lambda _: self._backward_begins(seen))
            return out

        return run

    def latent(self, sign: int) -> Callable[..., None]:
        """A hook before (-1) or behind (+1) a module whose results count as latents."""

        def hook(*_: Any) -> None:
            self.attention.current.latents += sign * self.census.live

        return hook

    def hand_on(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden, None) if self._tuples else hidden

    def _only(self, output: Any) -> torch.Tensor:
        self._tuples = isinstance(output, tuple)
        hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return hidden

    def _backward_begins(self, seen: _Seen) -> None:
        self.census.reset_peak()
        seen.work(1, self.census, -1)
        seen.backward = -self.census.live

    def _backward_ends(self, seen: _Seen) -> None:
        seen.work(1, self.census, +1)
        seen.backward += self.census.peak


def _with_hidden(args: Any, kwargs: Any, hidden: Any) -> tuple[Any, Any]:
    """The arguments of a block with other hidden states."""
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})
