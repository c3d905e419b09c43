"""Share between the two runs of a checkpointed block its routing, and under selective checkpointing what is expensive.

Routing is decided once per token. A second run of a router might choose other experts (a tie, a non-deterministic
kernel), and with other counts give silent wrong gradients. So the first run records what every `topk` chose, and the
second gathers at the recorded places: values, and so the gradient, come from the recomputed scores. The numbers of
tokens that ranks exchange are then known as well: they are neither exchanged again nor waited for.

A second run ends with the last tensor that backward needs. The expert layer computes in two parts (expert_mlp.py), and
saves all in the first: in a block that saves nothing after its experts, the down projection and the return of the rows
do not run again. Every rank has the same graph, so all ranks end at the same place.

Under selective checkpointing the second run computes neither experts nor fused attention again: their results are kept,
and what autograd saves inside of them. parallel/checkpointing.py applies this to a model.

    T tokens here, K top-k, H hidden
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from expertmesh.compat import FUSED_ATTENTION, assert_async, change_count, varlen_operation
from expertmesh.experts.lora_state import AdapterState
from expertmesh.experts.micro_batch import packed_samples, routing
from expertmesh.state.patching import replaced

Exchanged = TypeVar("Exchanged")


@dataclass(slots=True)
class _Record:
    """The results of the first run that the second takes; each list is in the order of the calls."""

    topk: list[torch.Tensor] = field(default_factory=list)
    """The choices of each `topk`."""
    experts: list[torch.Tensor] = field(default_factory=list)
    """The experts of each expert layer."""
    exchanges: list[Any] = field(default_factory=list)
    """The counts that ranks exchanged, of each dispatcher's own type."""
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
    token_number_T = None if adapters is None else adapters.token_number_T
    # By the second run they are those of another micro-batch.
    micro_batch = [(variable, variable.get()) for variable in (packed_samples, routing)]
    first, second = (_BlockRun(record, recomputes=again, selective=selective) for again in (False, True))
    return _during(first, micro_batch), _during(second, micro_batch, adapters, token_number_T)


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
        return run.record.results.pop(0).clone()
    with saved_tensors_hooks(_pack, _unpack):
        result = compute()
    # Without a gradient in the first run, as without trained parameters so far, the second must save as little.
    run.record.results.append(result.detach().clone().requires_grad_(result.requires_grad))
    return result


def _pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    # Keep it without its history: a node that holds its own output would never be freed.
    return tensor.detach(), change_count(tensor)


def _unpack(packed: tuple[torch.Tensor, int]) -> torch.Tensor:
    """Return a saved tensor as autograd does without hooks: raise if it was changed since."""
    tensor, version = packed
    if change_count(tensor) != version:
        raise RuntimeError(
            "activation checkpointing: a tensor that the expert layer kept for backward has been changed in place, by "
            "the model or by a first backward through the same graph"
        )
    return tensor


@contextmanager
def _during(
    run: _BlockRun,
    micro_batch: Sequence[tuple[ContextVar[Any], Any]],  # each variable has a type of its own
    adapters: AdapterState | None = None,
    token_number_T: torch.Tensor | None = None,
) -> Iterator[None]:
    """Let `run` answer the calls inside the block, with the context variables and token numbers of `micro_batch`."""
    tokens = [(variable, variable.set(value)) for variable, value in [(_block_run, run), *micro_batch]]
    try:
        with nullcontext() if adapters is None else replaced(adapters, token_number_T=token_number_T), run:
            yield
    finally:
        for variable, token in tokens:
            variable.reset(token)
        if run.recomputes:
            # Free now: torch ends a second run early by an exception, whose reference cycle Python finds much later.
            for each in fields(run.record):
                getattr(run.record, each.name).clear()
