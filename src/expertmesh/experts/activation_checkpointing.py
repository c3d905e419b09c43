"""Share between the two runs of a checkpointed block its routing, and under selective checkpointing what is expensive.

Routing is decided once per token. The second run of a router might choose other experts (a tie, a non-deterministic
kernel); counts would then differ from the forward: a shape error at best, silent wrong gradients at worst. So the first
run records what every `topk` chose, and the second run gathers at the recorded places: values, and so the gradient,
come from the recomputed scores, the choice does not. A router that decides by other means is held to its first choice.
The number of tokens that ranks exchange is then known as well: it is neither exchanged again nor waited for.

A second run ends with the last tensor that backward needs. Backward reads no expert's output, so the expert layer
computes in two parts (`in_two_parts`), the first with all that is saved. In a block that saves nothing behind its
experts the second part, the down projection and the return of the rows, is not run again. Every rank has the same
graph, so all ranks end at the same place.

Under selective checkpointing the second run computes neither experts nor fused attention again. The expert layer keeps
its result and what autograd saves inside of it (rows received, grouped products, routing weights, indices), so no token
is sent twice. Attention keeps its result and normaliser, by torch's own selective policy. Everything else in a block is
recomputed. parallel/checkpointing.py applies this to a model.

    T tokens here, K top-k, H hidden
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from expertmesh.compat import FUSED_ATTENTION, assert_async, varlen_operation
from expertmesh.experts.lora_state import AdapterState
from expertmesh.experts.routes import Routing, routing
from expertmesh.experts.token_counts import PackedSamples, packed_samples

Exchanged = TypeVar("Exchanged")


@dataclass(slots=True)
class _Record:
    """What the first run leaves for the second; each list is in the order of the calls."""

    topk: list[torch.Tensor] = field(default_factory=list)
    """The choices of each `topk`."""
    experts: list[torch.Tensor] = field(default_factory=list)
    """The experts of each expert layer."""
    exchanges: list[Any] = field(default_factory=list)
    """The counts that ranks exchanged."""
    results: list[torch.Tensor] = field(default_factory=list)
    """The expert layers' results."""
    attention: list[AbstractContextManager[Any]] = field(default_factory=list)
    """The contexts in which attention runs again."""


class _BlockRun(TorchFunctionMode):
    """One of the two runs of a checkpointed block: the first fills `record`, the second consumes it from the front.

    Records `topk` and, where selective, fused attention in the first run; answers from the record in the second.
    """

    def __init__(self, record: _Record, *, recomputes: bool, selective: bool) -> None:
        super().__init__()
        self.record, self.recomputes, self.selective = record, recomputes, selective

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.topk or func is torch.Tensor.topk:
            return self._topk(func, args, kwargs)
        is_attention = func is F.scaled_dot_product_attention or func is varlen_operation
        if is_attention and self.selective and not torch.compiler.is_compiling():
            return self._attention(func, args, kwargs)
        return func(*args, **kwargs)

    def _topk(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Choose without gradient, and gather with it, so that both runs build the same graph."""
        scores = args[0] if args else kwargs["input"]
        dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        if self.recomputes:
            index = self.record.topk.pop(0)
        else:
            with torch.no_grad():
                index = func(*args, **kwargs).indices
            self.record.topk.append(index)
        # Record a copy: several families change the tensor in place.
        return torch.return_types.topk((torch.gather(scores, dim, index), index.clone()))

    def _attention(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run attention under torch's selective policy, unless it has dropout: its random numbers would be others in a
        second run.
        """
        dropout: float = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        if func is F.scaled_dot_product_attention and dropout > 0.0:
            return func(*args, **kwargs)
        if self.recomputes:
            context = self.record.attention.pop(0)
        else:
            context, again = create_selective_checkpoint_contexts(FUSED_ATTENTION)
            self.record.attention.append(again)
        with context:
            return func(*args, **kwargs)


_block_run: ContextVar[_BlockRun | None] = ContextVar("expertmesh_block_run", default=None)


def block_contexts(
    selective: bool = False, adapters: AdapterState | None = None
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Make the `context_fn` of `torch.utils.checkpoint.checkpoint`: one context for each run of a block.

    `adapters`: those whose dropout needs in the second run the tokens of the first, because other micro-batches may
    have run in between. The second run has the packed samples and the routes of the first as well.
    """
    record = _Record()
    number_T, micro_batch = None if adapters is None else adapters.number_T, (packed_samples.get(), routing.get())
    first, second = (_BlockRun(record, recomputes=again, selective=selective) for again in (False, True))
    return _during(first, None, None, micro_batch), _during(second, adapters, number_T, micro_batch)


def is_recomputing() -> bool:
    """Return whether this forward is the second run of a checkpointed block (inside backward)."""
    run = _block_run.get()
    return run is not None and run.recomputes


def confirm_choice(index_TK: torch.Tensor) -> None:
    """Check that the experts chosen for each token in a second run are those of the first.

    Raises if they differ (on an accelerator asynchronously, without waiting for it).
    """
    run = _block_run.get()
    if run is None:
        return
    if not run.recomputes:
        run.record.experts.append(index_TK.detach().to(torch.int32))
        return
    same = (run.record.experts.pop(0) == index_TK).all()
    assert_async(same, "activation checkpointing: the router chose other experts when it was run again")


def exchanged_once(exchange: Callable[[], Exchanged]) -> Exchanged:
    """Return `exchange()`, or in a second run the result of the first: splits follow from the choice of experts
    alone.
    """
    run = _block_run.get()
    if run is None:
        return exchange()
    if run.recomputes:
        known: Exchanged = run.record.exchanges.pop(0)
        return known
    run.record.exchanges.append(exchange())
    return run.record.exchanges[-1]  # type: ignore[no-any-return]


def computed_once(compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return `compute()`, `[T, H]`; under selective checkpointing a second run gets the result of the first.

    Backward takes the graph of the first run, so what is saved in it is kept there, past the checkpoint's own hooks.
    `compute` must draw no random numbers: the second run would not draw them.
    """
    run = _block_run.get()
    if run is None or not run.selective:
        return compute()
    if run.recomputes:
        # Return a copy: a model may change it in place, which autograd forbids for leaves.
        return run.record.results.pop(0).requires_grad_().clone()
    with saved_tensors_hooks(_pack, _unpack):
        result = compute()
    run.record.results.append(result.detach().clone())
    return result


@dataclass(slots=True, eq=False)
class Rest:
    """The part of a computation that an autograd function leaves for later.

    In forward it has the input of `compute`, which runs behind the function and whose result is the function's; in
    backward that result's gradient. The function returns `edge`, and nothing else.
    """

    compute: Callable[[], torch.Tensor] | None = None
    """The function that runs in forward after the autograd function, and returns its result."""
    _gradient: torch.Tensor | None = None

    def edge(self, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor without values that autograd follows from the result to the function."""
        return like.new_empty(0)

    def gradient(self) -> torch.Tensor:
        """Return the gradient of the result, once."""
        gradient, self._gradient = self._gradient, None
        assert gradient is not None
        return gradient


def in_two_parts(function: type[torch.autograd.Function], *args: Any) -> torch.Tensor:
    """Run `function` with `args` and a `Rest`, which saves all that is saved; then run that rest."""
    rest = Rest()
    try:
        result: torch.Tensor = _SecondPart.apply(function.apply(*args, rest), rest)
        return result
    finally:  # also where torch ends a second run by an exception
        rest.compute = None


class _SecondPart(torch.autograd.Function):
    """Run the rest. It saves nothing: its backward is that of the first part."""

    @staticmethod
    def forward(ctx: Any, edge: torch.Tensor, rest: Rest) -> torch.Tensor:
        ctx.rest = rest
        assert rest.compute is not None
        return rest.compute()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.rest._gradient = gradient
        return gradient.new_empty(0), None


def _pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    # Keep it without its history: a node that holds its own output would never be freed.
    return tensor.detach(), tensor._version


def _unpack(packed: tuple[torch.Tensor, int]) -> torch.Tensor:
    """Return a saved tensor as autograd does without hooks: raise if it was changed since."""
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(
            "activation checkpointing: a tensor that the expert layer kept for backward has been changed in place, by "
            "the model or by a first backward through the same graph"
        )
    return tensor


@contextmanager
def _during(
    run: _BlockRun,
    adapters: AdapterState | None,
    number_T: torch.Tensor | None,
    micro_batch: tuple[PackedSamples | None, Routing | None],
) -> Iterator[None]:
    token, outer, routes = _block_run.set(run), packed_samples.set(micro_batch[0]), routing.set(micro_batch[1])
    current = None if adapters is None else adapters.number_T
    if adapters is not None:
        adapters.number_T = number_T
    try:
        with run:
            yield
    finally:
        _block_run.reset(token)
        packed_samples.reset(outer)
        routing.reset(routes)
        if adapters is not None:
            adapters.number_T = current
        if run.recomputes:
            # Free now: torch ends a second run early by an exception, whose reference cycle Python finds much later.
            for each in fields(run.record):
                getattr(run.record, each.name).clear()
