"""What TRL gets in place of a model that is whole: the frozen one to compare with, and weights for vLLM.

The reference is a second sharded model, or the policy without its adapters.
"""

import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

import expertmesh as em

_DPO, _GRPO, _VLLM = "trl.trainer.dpo_trainer", "trl.trainer.grpo_trainer", "VLLMGeneration"


class AdaptersOff:
    """The base of a policy with adapters, which TRL calls and prepares as if it were a model of its own."""

    _is_accelerate_prepared = True

    def __init__(self, policy: PreTrainedModel) -> None:
        self.policy = policy
        self.config = policy.config

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The policy has TRL's fused head already."""
        with em.adapters_off(self.policy):
            return self.policy(*args, **kwargs)

    forward = __call__

    def modules(self) -> Iterator[Any]:
        """Whose dropout TRL turns off: it has done so in the policy."""
        return iter(())

    # accelerate looks at them before all else.
    parameters = modules


def freeze(model: PreTrainedModel) -> PreTrainedModel:
    """A sharded model as a reference."""
    model.requires_grad_(False)
    model.eval()
    return model


@contextmanager
def handed_over(reference: Any) -> Iterator[None]:
    """While the block runs, in which a trainer is made, TRL gets `reference` where GRPO would load one, whole, on every
    rank, and `streaming` in place of what sends weights to vLLM; and it names a file of precomputed log-probabilities
    by a hash of all ranks' shards, where DPO would read whole weights. That hash is collective: one all-gather of a
    digest.
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
    """TRL's class that sends weights to vLLM and generates there, for a sharded model: names and values are those of
    the model's files, one whole tensor after the other, adapters merged. Every rank iterates (`em.iter_hf_weights`).
    """

    def named_weights(self: Any) -> Iterator[tuple[str, Any]]:
        return em.iter_hf_weights(self.model)

    return type(generation.__name__, (generation,), {"_iter_named_params": named_weights})


def _hash(model: Any) -> str:
    policy = model.policy if isinstance(model, AdaptersOff) else model
    digest = hashlib.sha256()
    for name, tensor in sorted([*policy.named_parameters(), *policy.named_buffers()]):
        if isinstance(model, AdaptersOff) and tensor.requires_grad:
            continue
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(local.detach().float().cpu().numpy().tobytes())
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    return hashlib.sha256("".join(digests).encode()).hexdigest()
