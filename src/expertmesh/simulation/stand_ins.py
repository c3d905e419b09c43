"""The places where a step needs values, which fake tensors do not have, and what stands in for them.

Routing counts come from the planner's expectation (balanced routing), every position but the last is a target, and
attention is what a fused kernel reads and saves. All patches of the simulation are in this file.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from expertmesh.planning.probe import FusedAttention
from expertmesh.planning.routing import Choice, rows_per_token


@contextmanager
def stand_ins(choice: Choice, tokens: int, ranks: int) -> Iterator[None]:
    """`tokens` on each of `ranks` EP ranks choose as `choice` says; one rank's share of every exchange is the mean."""
    rows, pairs = round(tokens * rows_per_token(choice, ranks) / ranks), tokens * choice.top_k // ranks

    def counts(_: torch.Tensor) -> list[Any]:
        return [[rows] * ranks, [rows] * ranks, [pairs] * ranks, [pairs] * ranks]

    def targets(labels: torch.Tensor, _: object) -> tuple[torch.Tensor, torch.Tensor]:
        batch, length = labels.shape
        place_N = torch.zeros(batch * (length - 1), dtype=torch.int64, device=labels.device)
        return torch.zeros_like(place_N), place_N

    with (
        patch("expertmesh.experts.dispatch.to_host", counts),
        patch("expertmesh.training.loss._targets", targets),
        patch("transformers.masking_utils.is_tracing", lambda *_: False),
        patch("transformers.masking_utils.find_packed_sequence_indices", lambda *_: None),
        patch("torch.nn.functional.scaled_dot_product_attention", _fused),
    ):
        yield


def _fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return FusedAttention.apply(query, key, value, args[0] if args else kwargs.get("attn_mask"))
