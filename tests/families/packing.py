"""Whether samples packed into one row stay apart in a family: `packing_refusal`, held against a measurement."""

import torch
from transformers import PreTrainedModel

from expertmesh.introspection.attention import packing_refusal
from tests.families.tiny import VOCABULARY

_LENGTHS = (11, 14)


def packing_of(model: PreTrainedModel) -> str | None:
    """The reason why packing is refused, or None; raises when it is not refused and samples see each other.

    A refusal that would not have been necessary is not an error: it reads the model's code, not its numbers.
    """
    reason = packing_refusal(model)
    if reason is None:
        error = _leak(model.eval())
        assert error <= 1e-5, f"packed samples see each other ({error:.1e} in the logits), and packing is not refused"
    return reason


@torch.no_grad()
def _leak(model: PreTrainedModel) -> float:
    """Relative difference between the logits of two samples in one row and in a row each."""
    model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randint(3, VOCABULARY, (1, length), generator=generator) for length in _LENGTHS]
    apart = torch.cat([model(input_ids=sample, use_cache=False).logits for sample in samples], dim=1)
    positions = torch.cat([torch.arange(length) for length in _LENGTHS])[None]
    packed = model(input_ids=torch.cat(samples, dim=1), position_ids=positions, use_cache=False).logits
    return float((packed - apart).norm() / apart.norm())
