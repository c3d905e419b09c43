"""What a step returns can be reduced over all ranks together, whatever each of them adds to it."""

from typing import Any
from unittest import mock

import torch
from torch import nn

import expertmesh as em
from expertmesh.step import forward_backward


def test_losses_of_a_stage_that_has_none_are_on_its_device() -> None:
    # On an accelerator the last stage's loss is on it, and an all-reduce of one here and one on the CPU never ends.
    ids = torch.zeros(1, 4, dtype=torch.int64, device="meta")
    batch, model, pipeline = {"input_ids": ids, "labels": ids}, nn.Module(), mock.Mock()
    with mock.patch.object(forward_backward, "run_pipeline"):
        losses: Any = forward_backward._through_stages(model, pipeline, [batch], 1, 1)
    assert {losses.loss.device.type, losses.aux_loss.device.type, losses.z_loss.device.type} == {"meta"}
    with (
        mock.patch.object(forward_backward, "pipeline_of", return_value=pipeline),
        mock.patch.object(forward_backward, "run_pipeline"),
    ):
        assert forward_backward.forward_loss(model, [batch], target_tokens=1).device.type == "meta"


def test_router_losses_that_are_off_are_on_the_device_of_the_batches() -> None:
    ids = torch.zeros(1, 4, dtype=torch.int64, device="meta")
    with em.router_losses(nn.Module(), [{"input_ids": ids}]) as router_loss:
        pass
    assert {router_loss.aux_loss.device.type, router_loss.z_loss.device.type} == {"meta"}
