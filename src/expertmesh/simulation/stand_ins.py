"""The places where a step needs values, which fake tensors do not have, and what stands in for them.

Routing counts come from the planner's expectation (balanced routing), every position but the last is a target, and
attention is what a fused kernel reads and saves. All patches of the simulation are in this file. Some are of private
names of torch's pipelining, because there is no public way to leave out the numbers that stages exchange before the
first message: in torch 2.13 votes on whether shapes are known (`_PipelineSchedule._warmup_p2p`, which ends with an
`InferenceMode`), in 2.11 one in each direction (`PipelineStage._get_init_p2p_neighbors_ops`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.pipelining import PipelineStage, _utils, schedules

from expertmesh.distributed.expert_traffic import TopKRouter, rows_per_token
from expertmesh.distributed.layout import Layout
from expertmesh.planning.probe import FusedAttention


@contextmanager
def stand_ins(router: TopKRouter, tokens: int, layout: Layout) -> Iterator[None]:
    """`tokens` of whole rows, over cp and tp, are routed as `router` says on every rank; one rank's share of every
    exchange is the mean.
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

    with (
        patch("expertmesh.experts.dispatch.to_host", counts),
        patch("expertmesh.step.loss._targets", targets),
        patch("expertmesh.step.pipeline_schedule._Stage.forward", _counted),
        _without_first_messages(),
        patch("transformers.masking_utils.is_tracing", lambda *_: False),
        patch("transformers.masking_utils.find_packed_sequence_indices", lambda *_: None),
        patch("torch.nn.functional.scaled_dot_product_attention", _fused),
    ):
        yield


def _without_first_messages() -> AbstractContextManager[Any]:
    if hasattr(schedules._PipelineSchedule, "_warmup_p2p"):
        return patch.object(schedules._PipelineSchedule, "_warmup_p2p", _agreed)
    return patch.object(PipelineStage, "_get_init_p2p_neighbors_ops", lambda stage: [])


def _agreed(schedule: Any, stages: Sequence[Any], *_: Any) -> None:
    """Stages have told each other, in numbers, that the shapes of their messages are given."""
    for stage in stages:
        stage._inference_mode = _utils.InferenceMode.STATIC


def _counted(stage: Any, received: torch.Tensor, number: torch.Tensor) -> Any:
    """A stage is told the number of its micro-batch in a tensor; they come in order."""
    stage.seen = getattr(stage, "seen", -1) + 1
    return stage.run_stage.forward(stage.stage, stage.seen, received)


def _fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return FusedAttention.apply(query, key, value, args[0] if args else kwargs.get("attn_mask"))
