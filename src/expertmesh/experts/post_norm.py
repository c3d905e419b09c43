"""Experts whose outputs pass a norm, one for all experts, before the routing weight.

The weight cannot go before the down projection then, and pairs cannot be summed before the norm: each pair is computed
as a row of its own, normed by the model's own code, weighted, and only then summed into its token. All of it runs
again in backward, so that nothing but the rows received is kept. Maths only, like compute.py.

    R rows, P pairs, H hidden
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from expertmesh.experts.compute import expert_mlp
from expertmesh.experts.dispatch import LocalPairs
from expertmesh.experts.mlp_spec import ExpertMlpSpec, ExpertWeights
from expertmesh.experts.segments import segments_of


def normed_expert_mlp(
    rows_RH: torch.Tensor,
    weight_P: torch.Tensor,
    pairs: LocalPairs,
    weights: ExpertWeights,
    form: ExpertMlpSpec,
    norm: nn.Module,
) -> torch.Tensor:
    """As `expert_mlp`, with `norm` behind each expert; differentiable in the norm's parameters too.

    `norm` is called as a module, once in forward and once in backward, with or without pairs: it may be an FSDP2 unit,
    whose collectives every rank has to join.
    """
    out_RH: torch.Tensor = checkpoint(
        _normed,
        *(rows_RH, weight_P, pairs, weights, form, norm),
        use_reentrant=False,
        preserve_rng_state=False,
    )
    return out_RH


def _normed(
    rows_RH: torch.Tensor,
    weight_P: torch.Tensor,
    pairs: LocalPairs,
    weights: ExpertWeights,
    form: ExpertMlpSpec,
    norm: nn.Module,
) -> torch.Tensor:
    place_P = torch.arange(pairs.row_P.shape[0], device=rows_RH.device)
    alone = LocalPairs(place_P, pairs.expert_end_L, segments_of(place_P, len(place_P)))
    rows_PH = rows_RH.index_select(0, pairs.row_P)
    out_PH = expert_mlp(rows_PH, torch.ones_like(weight_P), alone, weights, form)
    weighted_PH = norm(out_PH) * weight_P.unsqueeze(1)
    # In the wider dtype of the two, as the weights may be fp32, and back.
    return torch.zeros_like(rows_RH, dtype=weighted_PH.dtype).index_add(0, pairs.row_P, weighted_PH).to(rows_RH.dtype)
