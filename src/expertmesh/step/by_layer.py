"""Run a round of micro-batches layer by layer: all of them through one layer before the next, and back in reverse.

FSDP2 gathers a layer twice for the round, once in forward and once in backward, and reduces its gradients once. Only
the layer that runs has unsharded parameters and gradients, and the next one is gathered meanwhile. What is kept is what
autograd keeps of every micro-batch: with full activation checkpointing the input of each block, which may wait in host
memory (`HostInput`); without any all activations.

The first layer runs in the model's own forward, with placeholders for everything else (parallel/stages.py). These
record what the model calls every other block with, so the other layers are calls of their blocks alone: masks and
rotary tables are computed once a micro-batch. What comes after the blocks is the model's forward again. The graph is
cut at each layer's input; its backward starts from the gradient of its output.

A loop with losses of its own (`em.accumulate_by_layer`) runs the last layer itself, by the model's forward, and its
loss and backward with it.

    M micro-batches of a round, L layers
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers.utils.generic import ModelOutput

from expertmesh.compat import forget_unfinished_step
from expertmesh.experts.lora_state import adapter_state
from expertmesh.parallel.pipeline import Layers, not_by_layer, running
from expertmesh.parallel.sequence import Batch, padded, sequence_share
from expertmesh.parallel.stages import BlockCall
from expertmesh.state.other_code import media_in
from expertmesh.state.packed import side_stream
from expertmesh.state.patching import replaced
from expertmesh.step.base_model import base_name, model_inputs, run_base
from expertmesh.step.pipeline_schedule import StageOutput, StageTerm


class HostInput:
    """The input of a layer in host memory, from its forward until its backward (train.keep_inputs: host).

    The storage is freed and allocated again; the tensor stays, and with it every reference of autograd's graph and of
    recomputation. On a GPU both copies run on a side stream, to and from pinned memory.
    """

    def __init__(self, received: torch.Tensor) -> None:
        """Start the copy of `received`, and of all else in its storage, to host memory."""
        self._storage, self._device = received.untyped_storage(), received.device
        self._copy = torch.empty(self._storage.nbytes(), dtype=torch.uint8, pin_memory=received.is_cuda)
        # Not that of frozen experts (parallel.offload), whose next layer must not wait for inputs.
        self._stream = side_stream(self._device, "inputs") if received.is_cuda else None
        self._is_back: torch.cuda.Event | None = None
        self._run(lambda: self._copy.copy_(self._bytes(), non_blocking=self._stream is not None))

    def free(self) -> None:
        """Free the storage, once the forward that reads it has been issued."""
        if self._stream is not None:
            # The allocator must not reuse it before the side stream has read it.
            self._bytes().record_stream(self._stream)
        self._storage.resize_(0)

    def fetch(self) -> None:
        """Allocate the storage again, and start the copy back; nothing if that has begun."""
        if self._storage.nbytes() == 0:
            self._storage.resize_(self._copy.numel())
            # Through a tensor of its own: autograd would refuse an input that changes after its forward.
            self._run(lambda: self._bytes().copy_(self._copy, non_blocking=self._stream is not None))
            if self._stream is not None:
                self._is_back = self._stream.record_event()

    def wait(self) -> None:
        """Make the current stream wait for the copy back, which starts here at the latest."""
        self.fetch()
        if self._is_back is not None:
            torch.cuda.current_stream(self._device).wait_event(self._is_back)

    def _bytes(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(self._storage)

    def _run(self, copy: Callable[[], object]) -> None:
        """Issue a copy behind all that the current stream has been given, without keeping that waiting."""
        if self._stream is None:
            copy()
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy()


@dataclass(slots=True)
class _Forward:
    """The forward of one micro-batch through one layer, as its backward needs it."""

    received: torch.Tensor | None
    """The input of the layer, a leaf of the graph; None of the first layer."""
    hidden: torch.Tensor | None
    """The output of the layer; None of the last layer."""
    output: StageOutput | None
    """The results of the model's forward; None where a block was called alone, and where the caller runs it."""
    on_host: HostInput | None = None
    """The place of `received` between forward and backward; None for the device."""


@dataclass(slots=True)
class _Calls:
    """The record of one micro-batch's forward through the first layer, for the layers after it."""

    calls: dict[int, BlockCall] = field(default_factory=dict)
    """Arguments with which the model calls its other blocks, by their number."""
    token_numbers: torch.Tensor | None = None
    """Numbers of the tokens, for the dropout of adapters."""


class Round:
    """Run the micro-batches of a round through the layers: `forward`, then `backward`, inside `layers_held`."""

    def __init__(
        self,
        model: nn.Module,
        layers: Layers,
        batches: Sequence[Batch],
        *,
        router_logits: bool,
        inputs_on_host: bool = False,
        last: Callable[[int], object] | None = None,
    ) -> None:
        """Take the M `batches` of this rank, as `causal_lm_loss` takes them; all ranks have equally many.

        Args:
            inputs_on_host: Keep the inputs of all layers but the first and the last in host memory until backward.
            last: Runs the last layer of a micro-batch, forward and backward, by one call of the model; None for a model
                whose head runs on no token, and a backward from `term`.

        Raises:
            InputError: a batch has images or other media.
        """
        self._model, self._layers, self._router_logits = model, layers, router_logits
        self._inputs_on_host, self._last = inputs_on_host, last
        self._root = cast(FSDPModule, model)  # every sharded model is one
        share = sequence_share(model)
        self.batches = [padded(batch, share) for batch in batches]
        for batch in batches:
            if media := media_in(model_inputs(batch)):
                raise not_by_layer(f"a batch has {', '.join(media)}, and layers hand on text alone")
        self._adapters = adapter_state(model)
        self._forwards: list[list[_Forward | None]] = []
        self._calls: list[_Calls] = []
        # By micro-batch, the router logits of all layers but the last as the caller's loss sees them: leaves.
        self._seen: dict[int, list[torch.Tensor]] = {}

    def forward(self) -> None:
        """Run all micro-batches forward, through the last layer if no caller runs that.

        Collectives: those of M forwards; each unit of FSDP2 is gathered once.
        """
        last = self._layers.count - 1
        received: list[torch.Tensor | None] = [None] * len(self.batches)
        for layer in range(self._layers.count):
            # Backward begins with the last layer, whose inputs would come back at once.
            run = self._forward_to_host if self._inputs_on_host and 0 < layer < last else self._forward_of
            forwards = [run(layer, number, x) for number, x in enumerate(received)]
            if layer < last:
                for unit in self._layers.units[layer]:
                    if unit is not self._root:  # the root holds the head
                        unit.reshard()
                received = []
                for forward in forwards:
                    assert forward.hidden is not None
                    # The graph is cut here: the next layer's input is a leaf, and its gradient starts this backward.
                    received.append(forward.hidden.detach().requires_grad_(forward.hidden.requires_grad))
            self._forwards.append([*forwards])
        self._calls.clear()

    def router_logits(self, number: int) -> list[torch.Tensor]:
        """Return the router logits `[T, E]` of all MoE layers for one micro-batch, after `forward`."""
        outputs = [forward.output for layer in self._forwards if (forward := layer[number]) is not None]
        return [logits for output in outputs if output is not None for logits in output.router_logits]

    def backward(self, term: StageTerm | None = None, *, all_reduce: bool = True) -> None:
        """Run all micro-batches backward.

        Args:
            term: Called for layers and micro-batches that ran in the model's forward, right before their backward. The
                sum of all that it returns, on all ranks, is differentiated. None if a caller runs the last layer.
            all_reduce: Sum gradients over replicas, too: in the last round of a step.

        Collectives: those of M backwards; the gradients of each unit of FSDP2 are reduced once.
        """
        last = self._layers.count - 1

        def is_trained(layer: int) -> bool:
            hidden = [forward.hidden for forward in self._forwards[layer] if forward is not None]
            return any(each is not None and each.requires_grad for each in hidden)

        # Frozen layers in front of all that trains have no backward, on any rank.
        first = next(filter(is_trained, range(last)), last)
        for layer in reversed(range(self._layers.count)):
            forwards = self._forwards[layer]
            for number, forward in enumerate(forwards):
                assert forward is not None
                if number == len(forwards) - 1 and layer >= first:
                    # A tied weight in front of all that trains belongs to a layer without backward.
                    for unit in itertools.chain(*self._layers.units[0 if layer == first else layer : layer + 1]):
                        unit.set_requires_gradient_sync(True, recurse=False)
                        unit.set_requires_all_reduce(all_reduce, recurse=False)
                        unit.set_reshard_after_backward(True, recurse=False)
                    self._root.set_is_last_backward(layer == first)
                following = self._forwards[layer + 1][number] if forward.hidden is not None else None
                if forward.on_host is not None:
                    forward.on_host.wait()
                # The input that backward needs after this one comes back while this one runs.
                next_layer, next_number = (layer, number + 1) if number + 1 < len(forwards) else (layer - 1, 0)
                upcoming = self._forwards[next_layer][next_number] if next_layer > 0 else None
                if upcoming is not None and upcoming.on_host is not None:
                    upcoming.on_host.fetch()
                if layer == last and self._last is not None:
                    self._run_last(self._last, number, forward.received)
                else:
                    self._backward_of(forward, following, term or self._of_routers)
                if following is not None:
                    self._forwards[layer + 1][number] = None

    def _forward_to_host(self, layer: int, number: int, received: torch.Tensor | None) -> _Forward:
        """Run `_forward_of`, with its input on the way to host memory meanwhile."""
        assert received is not None
        on_host = HostInput(received)
        forward = self._forward_of(layer, number, received)
        if forward.hidden is not None and forward.hidden.requires_grad:  # else it has no backward
            on_host.free()
            forward.on_host = on_host
        return forward

    def _forward_of(self, layer: int, number: int, received: torch.Tensor | None) -> _Forward:
        """Run one micro-batch through one layer: by calls of its blocks, or by the model's forward.

        Args:
            layer: number of the layer; the first one and what needs router logits run by the model's forward.
            number: number of the micro-batch.
            received: the hidden state `[B, S, ...]` of the layer before; None for the first layer.
        """
        pipeline = self._layers.pipeline
        is_last, blocks = pipeline.is_last(layer), pipeline.stages[layer]
        if is_last and self._last is not None:
            return _Forward(received, None, None)
        batch, entering = self.batches[number], received
        # Router logits are recorded by the model's forward.
        if alone := received is not None and len(blocks) == 1 and not self._router_logits:
            entering = self._call(blocks.start, number, received)
            if not is_last:
                return _Forward(received, entering, None)
            batch = {"input_ids": batch["input_ids"]}  # nothing behind the blocks looks at masks or positions
        if layer == 0:
            self._calls.append(_Calls())

        def record(block: int, call: BlockCall) -> None:
            self._calls[number].calls[block] = call
            # While the model's forward runs, which forgets the tokens' numbers at its end.
            self._calls[number].token_numbers = None if self._adapters is None else self._adapters.token_number_T

        with running(self._model, pipeline, layer, entering, behind_blocks=alone) as result, ExitStack() as stack:
            for block, placeholder in pipeline.idle.items():
                if layer == 0 and block not in blocks:
                    stack.enter_context(replaced(placeholder, records=partial(record, block)))
            base, empty_logits, logits = run_base(self._model, batch, router_logits=self._router_logits)
        return _Forward(
            received, None if is_last else result.hidden, StageOutput(number, is_last, base, empty_logits, logits)
        )

    def _call(self, number_of_block: int, number: int, received: torch.Tensor) -> torch.Tensor:
        """Run one block for one micro-batch as the model would, and return its hidden state."""
        block = self._model.get_submodule(self._layers.pipeline.blocks[number_of_block])
        recorded = self._calls[number]
        call = recorded.calls[number_of_block]
        if self._adapters is not None:
            self._adapters.token_number_T = recorded.token_numbers
        output: Any = call.context.run(block, received, *call.args, **call.kwargs)
        if self._adapters is not None:
            self._adapters.token_number_T = None
        hidden: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
        return hidden

    def _run_last(self, last: Callable[[int], object], number: int, received: torch.Tensor | None) -> None:
        """Let the caller run the last layer of one micro-batch, with the router logits of all layers if it has any."""
        seen = [logits.detach().requires_grad_(logits.requires_grad) for logits in self.router_logits(number)]
        self._seen[number] = seen

        def add_earlier(base: nn.Module, args: Any, output: ModelOutput) -> ModelOutput:
            return type(output)(**{**output, "router_logits": (*seen, *(output.get("router_logits") or ()))})

        with running(self._model, self._layers.pipeline, self._layers.count - 1, received), ExitStack() as stack:
            if seen:
                base = self._model.get_submodule(base_name(self._model))
                stack.callback(base.register_forward_hook(add_earlier).remove)
            last(number)

    def _of_routers(self, output: StageOutput) -> torch.Tensor | None:
        """Return a term that gives a layer's router logits the gradients of the loss that the caller computed."""
        leaves = [self._seen[output.number].pop() for _ in output.router_logits]
        pairs = zip(output.router_logits, reversed(leaves), strict=True)
        terms = [(logits * leaf.grad).sum() for logits, leaf in pairs if leaf.grad is not None]
        return torch.stack(terms).sum() if terms else None

    def _backward_of(self, forward: _Forward, following: _Forward | None, term: StageTerm) -> None:
        """Run the backward of the layer's term, and of its output by the gradient of the `following` layer's input."""
        roots: list[torch.Tensor] = []
        gradients: list[torch.Tensor | None] = []
        if following is not None and forward.hidden is not None and forward.hidden.requires_grad:
            assert following.received is not None
            gradient = following.received.grad
            roots.append(forward.hidden)
            gradients.append(torch.zeros_like(forward.hidden) if gradient is None else gradient)
        layer_term = None if forward.output is None else term(forward.output)
        if layer_term is not None and layer_term.requires_grad:
            roots.append(layer_term)
            gradients.append(None)
        if roots:
            torch.autograd.backward(roots, gradients)


@contextmanager
def layers_held(model: nn.Module, layers: Layers) -> Iterator[None]:
    """Keep FSDP2 from resharding and reducing after each micro-batch inside the block; a `Round` does it by layer."""
    root = cast(FSDPModule, model)
    units = [unit for of_layer in layers.units for unit in of_layer if unit is not root]
    root.set_requires_gradient_sync(False)
    root.set_reshard_after_backward(False)
    root.set_is_last_backward(False)
    for unit in units:  # FSDP2 never reshards the root after its forward
        unit.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        root.set_requires_gradient_sync(True)
        root.set_reshard_after_backward(True)
        root.set_is_last_backward(True)
        for unit in units:
            unit.set_reshard_after_forward(True, recurse=False)


@contextmanager
def reduced_in_full(model: nn.Module) -> Iterator[None]:
    """Let no micro-batch of the block, which is a step, leave anything to the next step, whatever stops it.

    FSDP2 keeps what it has not yet reduced, and would add it to the gradients of the next step.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    try:
        yield
    except BaseException:
        if units:
            forget_unfinished_step(model)
        raise
    finally:
        for unit in units:
            unit.set_requires_all_reduce(True, recurse=False)
