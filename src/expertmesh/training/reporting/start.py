"""Write `output_dir/run.json` (record.py) when a run starts or goes on."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from expertmesh.distributed.all_ranks import collective_device, raise_on_all_ranks
from expertmesh.distributed.collectives import all_gather
from expertmesh.distributed.layout import DENSE_AXES, EXPERT_AXES
from expertmesh.io.boxes import volume
from expertmesh.state.shards import owns_copy, stored_box
from expertmesh.training.reporting.machine import device_name, versions
from expertmesh.training.reporting.plan_lines import local_parameters, plan_lines
from expertmesh.training.reporting.record import (
    DataCounts,
    Forecast,
    MoeLayer,
    Prediction,
    RunRecord,
    Share,
    Start,
    write_record,
)
from expertmesh.training.startup.prepare import Prepared

if TYPE_CHECKING:
    from expertmesh.data import DataReport
    from expertmesh.training.resume import Counters

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of a start."""

    startup: float
    """`Start.startup_seconds`."""
    lost: float
    """`Start.lost_seconds`."""


def record_start(run: Prepared, forecast: Forecast | None, counters: "Counters", spent: Spent) -> None:
    """Add this start to the run's run.json.

    Raises `InputError` on all ranks if rank 0 cannot write. Collectives: every rank calls it; one all-gather of five
    integers and one small all-reduce.
    """
    config, checked, mesh = run.config, run.checked, run.mesh
    shares, parameters = _shares(run)
    prediction = None if forecast is None else forecast.prediction
    if checked.expected_load is not None:
        prediction = (prediction or Prediction()).model_copy(update={"ranks_max_over_mean": checked.expected_load})
    with raise_on_all_ranks("writing run.json"):
        if mesh.rank == 0:
            start = Start(
                started=datetime.now(UTC).isoformat(timespec="seconds"),
                after_step=counters.step,
                total_steps=run.total_steps,
                world_size=mesh.layout.world_size,
                layout={axis: mesh.layout.size(axis) for axis in dict.fromkeys((*DENSE_AXES, *EXPERT_AXES))},
                device=mesh.device.type,
                device_name=device_name(mesh.device),
                versions=versions(),
                shares=shares,
                micro_batch_size=config.train.micro_batch_size,
                data_ranks=mesh.layout.data_ranks,
                accumulation=run.batches.accumulation,
                dispatch=checked.plan.resolved["dispatch"],
                compute=checked.plan.resolved["compute"],
                activation_checkpointing=checked.plan.options.activation_checkpointing,
                accumulate="by_layer" if checked.order.by_layer else "by_micro_batch",
                printed=list(plan_lines(run, forecast)),
                plan=prediction,
                startup_seconds=spent.startup,
                elapsed_seconds=counters.elapsed_seconds,
                lost_seconds=spent.lost,
            )
            anatomy, reports = checked.anatomy, run.data.reports
            layers = [MoeLayer(name=s.name, experts=s.num_experts, top_k=s.top_k) for s in anatomy.experts]
            record = RunRecord(
                model_type=checked.model_config.model_type,
                parameters=parameters,
                blocks=len(anatomy.blocks),
                moe_layers=layers,
                train_data=_counts(reports[:1]),
                eval_data=_counts(reports[1:]) if len(reports) > 1 else None,
                starts=[start],
            )
            write_record(record, Path(config.output_dir))


def _counts(reports: Sequence["DataReport"]) -> DataCounts:
    return DataCounts(
        rows=sum(each.rows for each in reports),
        samples=sum(each.samples for each in reports),
        tokens=sum(each.tokens for each in reports),
        target_tokens=sum(each.target_tokens for each in reports),
    )


def _shares(run: Prepared) -> tuple[list[Share], int]:
    """Return how much each rank holds, with equal ranks together, and the elements of the full model."""
    dense, expert, adapter = local_parameters(run.model, run.checked.anatomy)
    owned = sum(volume(stored_box(parameter)) for parameter in run.model.parameters() if owns_copy(parameter))
    mine = torch.tensor([[dense, expert, adapter, run.bytes_to_load, owned]], device=collective_device())
    assert dist.group.WORLD is not None
    ranks = [tuple(int(number) for number in row) for row in all_gather(mine, dist.group.WORLD).tolist()]
    shares = [
        Share(ranks=count, dense=dense, expert=expert, adapter=adapter, bytes_to_load=size)
        for (dense, expert, adapter, size), count in Counter(row[:4] for row in ranks).items()
    ]
    return shares, sum(row[4] for row in ranks)
