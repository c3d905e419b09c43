"""The places where a step needs values, which fake tensors do not have, and what stands in for them.

Routing counts come from the planner's expectation (balanced routing), every position but the last is a target, and
attention is what a fused kernel reads and saves. All that the simulation replaces is replaced in this file.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from transformers import masking_utils

from expertmesh.compat import without_shape_messages
from expertmesh.distributed.expert_traffic import TopKRouter, rows_per_token
from expertmesh.distributed.layout import Layout
from expertmesh.experts import dispatch
from expertmesh.planning.probe import FusedAttention
from expertmesh.state.patching import replaced
from expertmesh.step import loss, pipeline_schedule


@contextmanager
def stand_ins(router: TopKRouter, tokens: int, layout: Layout) -> Iterator[None]:
    """Replace inside the block what needs values: routing counts, targets, masks and attention.

    Each rank of every exchange gets an equal share, the mean that `router` predicts.

    Args:
        tokens: Tokens of a micro-batch's full rows, which cp and tp ranks share.
    """
    own, ranks = tokens // (layout.cp * layout.tp), layout.ep
    rows, pairs = round(own * rows_per_token(router, ranks) / ranks), own * router.top_k // ranks

    def counts(_: torch.Tensor) -> list[Any]:
        return [[rows] * ranks, [rows] * ranks, [pairs] * ranks, [pairs] * ranks]

    def targets(
        labels: torch.Tensor, cut: Callable[[torch.Tensor, int], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        batch, length = cut(labels, 1).shape
        place_N = torch.zeros(batch * (length - 1), dtype=torch.int64, device=labels.device)
        return torch.zeros_like(place_N), place_N

    owner, methods = without_shape_messages()
    with (
        replaced(dispatch, to_host=counts),
        replaced(loss, _targets=targets),
        replaced(pipeline_schedule._Stage, forward=_counted),
        replaced(owner, **methods),
        replaced(masking_utils, is_tracing=lambda *_: False, find_packed_sequence_indices=lambda *_: None),
        replaced(F, scaled_dot_product_attention=_fused),
    ):
        yield


def _counted(stage: Any, received: torch.Tensor, number: torch.Tensor) -> Any:
    """Give a stage the number of its micro-batch, which a fake tensor does not hold; they come in order."""
    stage.seen = getattr(stage, "seen", -1) + 1
    return stage.run_stage.forward(stage.stage, stage.seen, received)


def _fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return FusedAttention.apply(query, key, value, args[0] if args else kwargs.get("attn_mask"))
