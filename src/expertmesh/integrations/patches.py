"""Give Trainers' code what it expects of a model: attributes that transformers, TRL and accelerate ask for, a sharded
reference, and weights for vLLM, where TRL would load or read full models.

A comment at each line names the code that needs it. Patches instances of models, never a class or a module of a
library, except for three names while a trainer is made (`handed_over`). Only `Lockstep` and hashes communicate.
"""

import functools
import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Trainer

import expertmesh as em
from expertmesh.compat import forget_unfinished_step, generate_in_lockstep, present_as_fsdp, trains_a_tower

_BITS_OF_ROWS = 20  # a step has fewer rows
_DPO, _GRPO, _VLLM = "trl.trainer.dpo_trainer", "trl.trainer.grpo_trainer", "VLLMGeneration"


def prepare(model: Any) -> None:
    """Give a sharded model the attributes and methods that the code of Trainers expects."""
    # accelerate asks for it around all micro-batches but the last.
    model.no_sync = lambda: _no_sync(model)
    # FSDP2 renames classes.
    own = (
        each for each in type(model).__mro__ if issubclass(each, PreTrainedModel) and not issubclass(each, FSDPModule)
    )
    present_as_fsdp(model, next(own).__name__)
    # Activation checkpointing was applied while sharding. `Trainer.train` would put transformers' own around it, and
    # TRL takes it off and puts transformers' own on again around generation and references.
    paused: list[Any] = []  # modules; the attribute that is set is declared by some of them
    for which in ("activation_checkpointing", "gradient_checkpointing"):
        setattr(model, f"{which}_enable", lambda *args, **kwargs: _go_on(paused))
        setattr(model, f"{which}_disable", lambda: _pause(model, paused))


class RowNumbers:
    """A forward hook that numbers the rows of each training forward, from which adapters' dropout derives its masks.

    The numbers are equal in each run whose steps have the same micro-batches, whichever ranks compute them.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.step, self.rows = -1, 0  # rows of all ranks so far, in this step

    def __call__(self, model: PreTrainedModel, args: Any, kwargs: dict[str, Any]) -> Any:
        """Add `row_numbers` `[B]` to the arguments of a training forward."""
        if not model.training:
            return None
        step, ranks = self.trainer.state.global_step, dist.get_world_size()
        if step != self.step:
            self.step, self.rows = step, 0
        ids_BS = args[0] if args else kwargs.get("input_ids")
        ids_BS = kwargs["inputs_embeds"] if ids_BS is None else ids_BS
        rows = len(ids_BS)
        first = (step << _BITS_OF_ROWS) + self.rows + dist.get_rank() * rows
        if torch.is_grad_enabled():  # generation runs without gradients, and differs between ranks in its forwards
            self.rows += ranks * rows
        return args, {**kwargs, "row_numbers": torch.arange(first, first + rows, device=ids_BS.device)}


class Lockstep:
    """A wrapper of functions in which ranks call the model different numbers of times.

    GRPO's loop of tool calls is one: only completions that call a tool continue. While a wrapped function runs, each
    forward waits for one of every other rank; a rank that has finished joins the others' forwards with a dummy row
    until all have finished.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model
        self.inside = False
        model.register_forward_pre_hook(self._before_forward, prepend=True)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `function`.

        Collectives: every rank calls the wrapped function; one all-reduce of an integer on the default group for each
        round of forwards, and one more at the end.
        """

        @functools.wraps(function)
        def in_lockstep(*args: Any, **kwargs: Any) -> Any:
            self._enter(True)
            try:
                result = function(*args, **kwargs)
            finally:
                self._enter(False)
            # A forward has collectives of FSDP and of the experts: to skip one would hang the others.
            while self._anyone(False):
                with torch.no_grad():
                    self.model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=self.model.device), use_cache=False)
            return result

        return in_lockstep

    def _before_forward(self, *args: Any) -> None:
        if self.inside:
            self._anyone(True)

    def _enter(self, inside: bool) -> None:
        self.inside = inside
        # Or transformers would let each call of `generate` wait for one of every other rank.
        generate_in_lockstep(self.model, not inside)

    def _anyone(self, calls: bool) -> bool:
        """Return whether any rank calls the model now.

        Collectives: one all-reduce on the default group. A rank calls it before each of its forwards, with `calls`, and
        after it has finished, without, until no rank calls the model.
        """
        number = torch.tensor(int(calls), device=self.model.device)
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return bool(number)


def _pause(model: PreTrainedModel, paused: list[Any]) -> None:
    """Turn activation checkpointing off for a while: checkpointed blocks would keep no cache for generation."""
    paused += [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    for module in paused:
        module.gradient_checkpointing = False


def _go_on(paused: list[Any]) -> None:
    """Turn activation checkpointing on again in the blocks in which `_pause` turned it off."""
    while paused:
        paused.pop().gradient_checkpointing = True


@contextmanager
def _no_sync(model: Any) -> Iterator[None]:
    """Defer the all-reduce over replicas. Shards are reduced each time, as unreduced gradients would be full ones.

    It is not deferred for a tower that trains: FSDP2 would not catch up in a micro-batch of text, which has none of its
    gradients.
    """
    model.set_requires_all_reduce(trains_a_tower(model))
    try:
        yield
    except BaseException:
        forget_unfinished_step(model)
        raise
    finally:
        model.set_requires_all_reduce(True)


class AdaptersOff:
    """The base of a policy with adapters; TRL calls and prepares it as if it were a separate model."""

    _is_accelerate_prepared = True

    def __init__(self, policy: PreTrainedModel) -> None:
        self.policy = policy
        self.config = policy.config

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the policy, which has TRL's fused head already, with its adapters off."""
        with em.adapters_off(self.policy):
            return self.policy(*args, **kwargs)

    forward = __call__

    def modules(self) -> Iterator[Any]:
        """Return no modules: TRL turns dropout off in them, and has already done so in the policy."""
        return iter(())

    # accelerate first iterates over the parameters.
    parameters = modules


def freeze(model: PreTrainedModel) -> PreTrainedModel:
    """Make a sharded model a reference: frozen, in evaluation mode. Returns the model."""
    model.requires_grad_(False)
    model.eval()
    return model


@contextmanager
def handed_over(reference: Any) -> Iterator[None]:
    """Exchange three names in TRL's modules while the block runs, in which a trainer is made.

    - GRPO gets `reference` where it would load a full model on every rank.
    - GRPO gets the class of `streaming` for the one that sends weights to vLLM.
    - DPO names a file of precomputed log-probabilities by a hash of all ranks' shards, where it would read full
      weights.

    Collectives: every rank enters it; one all-gather of a digest on the default group when DPO hashes a model.
    """
    ours: dict[tuple[str, str], Any] = {
        (_GRPO, "create_model_from_path"): lambda *args, **kwargs: reference,
        (_DPO, "hash_module"): _hash,
    }
    if _GRPO in sys.modules:
        ours[_GRPO, _VLLM] = streaming(getattr(sys.modules[_GRPO], _VLLM))
    here = {(sys.modules[module], name): function for (module, name), function in ours.items() if module in sys.modules}
    before = {(module, name): getattr(module, name) for module, name in here}
    for (module, name), function in here.items():
        setattr(module, name, function)
    try:
        yield
    finally:
        for (module, name), function in before.items():
            setattr(module, name, function)


def streaming(generation: type) -> type:
    """Derive from TRL's class that sends weights to vLLM and generates there one that works for a sharded model.

    Names and values are those of the model's files, one full tensor after the other, adapters merged.

    Collectives: every rank iterates; those of `em.iter_hf_weights`.
    """

    def named_weights(self: Any) -> Iterator[tuple[str, Any]]:
        return em.iter_hf_weights(self.model)

    return type(generation.__name__, (generation,), {"_iter_named_params": named_weights})


def _hash(model: Any) -> str:
    """Return a hash of all ranks' shards; of a policy with adapters, of its base.

    Collectives: every rank calls it; one all-gather of a digest on the default group.
    """
    policy = model.policy if isinstance(model, AdaptersOff) else model
    digest = hashlib.sha256()
    for name, tensor in sorted([*policy.named_parameters(), *policy.named_buffers()]):
        if isinstance(model, AdaptersOff) and tensor.requires_grad:
            continue
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        # Bytes: weights that stay packed (precision.frozen) cannot be cast, and numpy has no bfloat16.
        local = getattr(local, "packed_LB", local).detach().cpu().contiguous()
        digest.update(local.reshape(-1).view(torch.uint8).numpy().data)
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    return hashlib.sha256("".join(digests).encode()).hexdigest()
