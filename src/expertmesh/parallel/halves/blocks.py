"""A decoder block with routed experts, run on two halves of its rows in one call of the block.

Each half runs the model's own forward of the block as a coroutine: it stops where it calls its experts, when its tokens
are under way, and goes on when their results are. So the second half's attention is computed while the first one's
tokens travel. FSDP2's hooks and the checkpoint are around the call of the block, and see it once. Coroutines are
greenlets: all of it happens on one thread, whose modes (gradients, saved tensors, torch functions) are those around.

Every call sends the tokens of each experts module twice, whatever its rows, so that ranks with other numbers of rows
can join: a single row (or one with a cache of keys and values, in generation) is followed by a half without tokens.

    B rows, S positions
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from expertmesh.compat import tree_map_only
from expertmesh.config.errors import InputError
from expertmesh.experts.activation_checkpointing import has_result
from expertmesh.experts.lora_state import AdapterState, adapter_state
from expertmesh.experts.token_counts import of_rows, real_tokens
from expertmesh.parallel.halves.travel import Call, Calls, compute, compute_both, result_of, send
from expertmesh.state.patching import mix_in, replace_forward
from expertmesh.state.sharded_model import attach_to_module, module_state

# Which dim of what a block gets are the rows, from the last for those that may have others before; with one row there
# they are for all.
_ROWS = {"position_ids": -2, "position_embeddings": -3}
_ROWS |= dict.fromkeys(("attention_mask", "attention_scaling", "per_layer_input", "input_ids"), 0)
_FOR_ALL_ROWS = ("cache_position",)


def interleave_blocks(model: nn.Module, blocks: Mapping[str, Sequence[str]]) -> None:
    """Let `blocks`, each with the names of its experts modules, run in halves. No communication."""
    for name, experts in blocks.items():
        block = model.get_submodule(name)
        arguments = tuple(inspect.signature(block.forward).parameters)
        attach_to_module(block, halves=_Block(name, arguments, adapter_state(model)))
        mix_in(block, _InHalves)
        for inner in experts:
            module = model.get_submodule(inner)
            replace_forward(module, partial(_experts_forward, module, module.forward))
            mix_in(module, _Stops)


@dataclass(slots=True)
class _Block:
    """Its name, what its arguments are called, and what the model's adapters share. `runs`: of its forward, in the call
    that is running or was the last.
    """

    name: str
    arguments: tuple[str, ...]
    adapters: AdapterState | None
    runs: int = 1


class _InHalves(nn.Module):
    """In front of a block: under the checkpoint, which wraps the forward of the class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        block: _Block = module_state(self).halves
        names = [*block.arguments[: len(args)], *kwargs]
        given = dict(zip(names, (*args, *kwargs.values()), strict=True))
        rows = given["hidden_states"].shape[0]
        generates = given.get("past_key_values") is not None and not torch.is_grad_enabled()
        is_whole = rows < 2 or generates
        sizes = [rows] if is_whole else [rows - rows // 2, rows // 2]
        parts = [given] if is_whole else _cut(block, given, sizes)
        block.runs = len(parts)
        forward, places = super().forward, [(0, sizes[0], rows), (sizes[0], rows - sizes[0], rows)]
        halves = []
        for part, place in zip(parts, places, strict=False):
            positional = [part.pop(name) for name in names[: len(args)]]
            halves.append(_Half(partial(forward, *positional, **part), place, block))
        outputs = _take_turns(halves)
        if is_whole:
            return outputs[0]
        if any(not isinstance(out, torch.Tensor) or len(out) != size for out, size in zip(outputs, sizes, strict=True)):
            raise InputError(
                f"moe.interleave: {block.name} does not return hidden states of the rows that it gets; set "
                "moe.interleave to false",
                key="moe.interleave-unsupported",
            )
        return torch.cat(outputs)


class _Stops(nn.Module):
    """In front of an experts module: a half that calls it stops, above FSDP2's hooks."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        half = _running.get()
        if half is not None and not has_result():
            return half.call(self, *args, **kwargs)
        if half is not None:
            half.stop(self, [])  # what autograd saves has to come in the order of the first run
        return super().__call__(*args, **kwargs)


def _experts_forward(experts: nn.Module, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if len(args) > 1 and isinstance(args[1], Calls):
        return compute(experts, *args[1:])
    return own(*args, **kwargs)


class _Half:
    """Some rows of a block's call: `place` is (the first, how many, of how many)."""

    def __init__(self, forward: Callable[[], Any], place: tuple[int, int, int], block: _Block) -> None:
        self.forward, self.place, self.block = forward, place, block
        self.stopped: tuple[nn.Module, list[Call]] | None = None
        self.output: Any = None
        self._greenlet: Any = None

    def start(self) -> None:
        """Run as far as the first call of experts."""
        from greenlet import greenlet

        self._greenlet = greenlet(self._run)
        self._greenlet.gr_context = copy_context()
        self.go_on()

    def go_on(self, rows: Sequence[torch.Tensor] = ()) -> None:
        """Run as far as the next call of experts or the end; `rows` are the results of the last call, under way."""
        self.stopped = None
        modes = _modes()
        with self._numbered():
            self._greenlet.switch(list(rows))
        if _modes() != modes:
            raise InputError(
                f"moe.interleave: {self.block.name} changes torch's modes (gradients, autocast) around its experts, "
                "which the other half would see; set moe.interleave to false",
                key="moe.interleave-unsupported",
            )

    def close(self) -> None:
        """End the coroutine, if it has not come to its end, and forget it: its context has this half in it."""
        coroutine, self._greenlet = self._greenlet, None
        if coroutine is not None and not coroutine.dead:
            coroutine.throw()

    def call(
        self, experts: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """What a half's call of its experts is: tokens are sent, others go on, the results are waited for."""
        module_state(experts).expert_layer.count(experts, top_k_index, real_tokens(len(top_k_index)))
        calls = [send(experts, hidden_states, top_k_index, top_k_weights)]
        if self.place[1] == self.place[2]:  # no other half
            with self._numbered(0):
                calls.append(send(experts, hidden_states[:0], top_k_index[:0], top_k_weights[:0]))
        return result_of(calls, self.stop(experts, calls), hidden_states.shape)

    def stop(self, experts: nn.Module, calls: list[Call]) -> list[torch.Tensor]:
        """Let others go on; returns the results of `calls`, under way."""
        self.stopped = experts, calls
        rows: list[torch.Tensor] = self._greenlet.parent.switch()
        return rows

    def _run(self, _: Any) -> None:
        _running.set(self)
        with of_rows(*self.place):
            self.output = self.forward()

    @contextmanager
    def _numbered(self, rows: int | None = None) -> Iterator[None]:
        """Meanwhile adapters' dropout has the numbers of these rows' tokens, or of the first `rows` of them."""
        adapters = self.block.adapters
        number_T = None if adapters is None else adapters.number_T
        if adapters is None or number_T is None:
            yield
            return
        first, size, of = self.place if rows is None else (0, rows, max(1, rows))
        length = number_T.numel() // of
        adapters.number_T = number_T[first * length : (first + size) * length]
        try:
            yield
        finally:
            adapters.number_T = number_T


_running: ContextVar[_Half | None] = ContextVar("expertmesh_half", default=None)


def _take_turns(halves: Sequence[_Half]) -> list[Any]:
    """Run the halves to their ends, one up to its experts, then the other, then the experts of both, and so on."""
    with ExitStack() as stack:
        for half in halves:
            stack.callback(half.close)
            half.start()
        while any(half.stopped is not None for half in halves):
            stops = [half.stopped for half in halves if half.stopped is not None]
            experts = stops[0][0]
            assert [module for module, _ in stops] == [experts] * len(halves)
            calls = [call for _, own in stops for call in own]
            rows = list(compute_both(experts, Calls(calls))) if calls else []
            for half, (_, own) in zip(halves, stops, strict=True):
                half.go_on([rows.pop(0) for _ in own])
    return [half.output for half in halves]


def _modes() -> tuple[bool, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
    )


def _cut(block: _Block, given: Mapping[str, Any], sizes: list[int]) -> list[dict[str, Any]]:
    """What each half gets of a block's arguments."""
    parts = [dict(given) for _ in sizes]
    # One cut for both, and copies: a model may change them in place.
    for part, rows in zip(parts, given["hidden_states"].split(sizes), strict=True):
        part["hidden_states"] = rows.clone()
    for key, value in given.items():
        if (
            key == "hidden_states"
            or value is None
            or isinstance(value, bool | int | float | str)
            or key in _FOR_ALL_ROWS
        ):
            continue
        if not isinstance(value, torch.Tensor) and key != "position_embeddings":
            raise _refused(block, key, type(value).__name__)
        for number, part in enumerate(parts):
            part[key] = tree_map_only(torch.Tensor, partial(_rows_of, block, key, number, sizes), value)
    return parts


def _rows_of(block: _Block, key: str, number: int, sizes: list[int], value: torch.Tensor) -> torch.Tensor:
    """One half's rows of a tensor."""
    if key == "position_embeddings" and value.dim() == 2:
        return value  # of positions alone
    dim, rows = _ROWS.get(key), sum(sizes)
    known = dim is not None and -value.dim() <= dim and value.shape[dim] in (1, rows)
    # Tables with one row, and several of something before it, may have their rows there.
    if (
        dim is None
        or not known
        or (key == "position_embeddings" and value.shape[dim] == 1 < max(value.shape[:dim], default=1))
    ):
        raise _refused(block, key, f"a tensor {tuple(value.shape)}")
    return value if value.shape[dim] == 1 else value.narrow(dim, sum(sizes[:number]), sizes[number])


def _refused(block: _Block, key: str, what: str) -> InputError:
    mend = "call the model with use_cache=False, or " if key == "past_key_values" else ""
    return InputError(
        f"moe.interleave: {block.name} gets {key}, {what}, of which it is not known what belongs to which row; {mend}"
        "set moe.interleave to false",
        key="moe.interleave-unsupported",
    )
