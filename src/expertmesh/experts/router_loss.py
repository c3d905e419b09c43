"""Compute the terms of the two router losses from one layer's logits, and find out whose loss they equal.

    load balancing   E * sum_e F_e * P_e     F_e chosen pairs, P_e summed softmax of the logits, per token and layer
    z-loss           mean over tokens and layers of logsumexp(logits)^2 (arXiv 2202.08906)

The first is transformers' `load_balancing_loss_func`, term by term and in its dtypes: tokens of all layers count
equally, choices are the top k of the softmax (whatever the router chose), and padding is left out. Families with
another function are recognised by its values, not by name. No communication.

    T tokens, E experts, L layers
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from expertmesh.compat import declared
from expertmesh.experts.pairs import count_pairs


def chosen_pairs(logits_TE: torch.Tensor, top_k: int, real_T: torch.Tensor) -> torch.Tensor:
    """Count the real tokens whose softmax has expert e among its `top_k`, int64 `[E]`."""
    index_TK = torch.softmax(logits_TE.detach(), dim=-1).topk(top_k, dim=-1).indices
    return count_pairs(index_TK, logits_TE.shape[-1], real_T)


def probability_sums(logits_TE: torch.Tensor, real_T: torch.Tensor) -> torch.Tensor:
    """Sum the softmax of the logits over real tokens, `[E]`, in fp32 (fp64 for fp64 logits)."""
    probability_TE = _wide(torch.softmax(logits_TE, dim=-1))
    return real_T.to(probability_TE.dtype) @ probability_TE


def squared_logsumexp(logits_TE: torch.Tensor, real_T: torch.Tensor) -> torch.Tensor:
    """Return the z-loss's sum over real tokens, 0-dim."""
    size_T = torch.logsumexp(_wide(logits_TE), dim=-1)
    return (size_T.square() * real_T.to(size_T.dtype)).sum()


def load_balancing_loss(
    logits: Sequence[torch.Tensor], num_experts: int, top_k: int, real_T: torch.Tensor
) -> torch.Tensor:
    """Return the loss of one batch in one process: the sum of the shares of all ranks and micro-batches."""
    pairs_E = sum(chosen_pairs(logits_TE, top_k, real_T) for logits_TE in logits)
    probability_E = sum(probability_sums(logits_TE, real_T) for logits_TE in logits)
    rows = len(logits) * real_T.sum()
    return num_experts * ((pairs_E / rows) * (probability_E / rows)).sum()


def aux_loss_refusal(model: nn.Module) -> str | None:
    """Return why the load-balancing loss would differ from the one that transformers gives `model`; None if it does
    not.
    """
    own = _own_function(model)
    if own is None:
        return "has no load-balancing loss in transformers"
    if not _is_standard(own):
        return "has a load-balancing loss of another form in transformers"
    return router_logits_refusal(model)


def router_logits_refusal(model: nn.Module) -> str | None:
    """Return why transformers cannot return the router logits of `model`, or None if it can."""
    parts = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    if any("router_logits" in declared(part, "_can_record_outputs") for part in parts):
        return None
    return "does not hand out router logits"


def _own_function(model: nn.Module) -> Callable[..., Any] | None:
    """Return `load_balancing_loss_func` of the file of the model's class; FSDP2 puts a class of its own in front."""
    modules = (sys.modules.get(kind.__module__) for kind in type(model).__mro__)
    return next((own for module in modules if (own := getattr(module, "load_balancing_loss_func", None))), None)


def _is_standard(own: Callable[..., Any]) -> bool:
    """Return whether the function gives our values on logits of two layers, with padding and without."""
    generator = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(6, 5, generator=generator) for _ in range(2))
    mask_BS = torch.tensor([[1, 1, 1], [1, 0, 0]])
    for mask, real_T in ((mask_BS, mask_BS.flatten().bool()), (None, torch.ones(6, dtype=torch.bool))):
        try:
            value = own(logits, 5, 2, mask)
        except (TypeError, ValueError, RuntimeError):  # it takes something else
            return False
        if not torch.allclose(torch.as_tensor(value), load_balancing_loss(logits, 5, 2, real_T)):
            return False
    return True


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values if values.dtype == torch.float64 else values.float()
