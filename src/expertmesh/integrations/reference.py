"""Give TRL a sharded reference model, and weights for vLLM, where it would load or read full models.

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
        digest.update(local.detach().float().cpu().numpy().tobytes())
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    return hashlib.sha256("".join(digests).encode()).hexdigest()
