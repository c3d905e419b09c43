"""Opens what a run reports with when it starts or goes on: metrics and `output_dir/run.json` (record.py). Also what it
reports when memory runs out.
"""

import os
import platform
from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import transformers

from expertmesh.config.errors import InputError
from expertmesh.distributed.all_ranks import collective_device, raise_on_all_ranks
from expertmesh.distributed.collectives import all_gather
from expertmesh.distributed.layout import DENSE_AXES, EXPERT_AXES
from expertmesh.io.boxes import volume
from expertmesh.state.shards import local_box, owns_copy
from expertmesh.training.reporting.metrics import Collapse, ExpertLoad, Reporter, open_reporter
from expertmesh.training.reporting.plan_lines import local_parameters, plan_lines
from expertmesh.training.reporting.record import (
    DataCounts,
    Forecast,
    MoeLayer,
    RunRecord,
    Share,
    Start,
    write_record,
)
from expertmesh.training.startup.prepare import Prepared

if TYPE_CHECKING:
    from expertmesh.training.progress import RankStatus


def open_reports(run: Prepared, forecast: Forecast | None, *, after_step: int) -> tuple[Reporter, ExpertLoad]:
    """What the loop reports with, opened in `output_dir`; this start is added to the run's run.json.

    Every rank calls it. Issues one all-gather of five integers and two small all-reduces. Raises `InputError` on all
    ranks if rank 0 cannot write.
    """
    config, mesh, directory = run.config, run.mesh, Path(run.config.output_dir)
    with raise_on_all_ranks("opening the metrics"):
        experts = run.checked.anatomy.experts[0]
        vocabulary = run.checked.vocab_size if config.objective.name == "sft" else None
        collapse = Collapse(vocabulary, experts.num_experts, experts.top_k or 1)
        reporter = open_reporter(
            config.log, directory, run.total_steps, is_main=mesh.rank == 0, done=after_step, collapse=collapse
        )
    _record_start(run, forecast, after_step)
    return reporter, ExpertLoad(run.model, run.checked.anatomy, mesh)


def out_of_memory(error: torch.OutOfMemoryError, at: "RankStatus", forecast: Forecast | None) -> InputError:
    """What a rank that ran out of device memory reports. The same start would fail again, so it is no failure to retry.

    `at`: where the rank was.
    """
    sentence = f"rank {dist.get_rank()} ran out of memory {at}: {str(error).strip().split('. ')[0].rstrip('.')}"
    if torch.accelerator.is_available():
        sentence += f"; it held {torch.accelerator.max_memory_allocated() / 2**30:.2f} GiB at its peak"
    if forecast is not None:
        cures = "; or ".join(forecast.cures())
        sentence += f"; predicted {forecast.line}; "
        sentence += f"predicted to fit, the fastest first: {cures}" if cures else "nothing tried is predicted to fit"
    return InputError(f"{sentence}; change the configuration or use more devices", key="run.out-of-memory")


def _record_start(run: Prepared, forecast: Forecast | None, after_step: int) -> None:
    config, checked, mesh = run.config, run.checked, run.mesh
    shares, parameters = _shares(run)
    with raise_on_all_ranks("writing run.json"):
        if mesh.rank == 0:
            start = Start(
                started=datetime.now(UTC).isoformat(timespec="seconds"),
                after_step=after_step,
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
                printed=list(plan_lines(run, forecast)),
                plan=None if forecast is None else forecast.prediction,
            )
            anatomy, reports = checked.anatomy, run.data.reports
            counts = [
                DataCounts(rows=r.rows, samples=r.samples, tokens=r.tokens, target_tokens=r.target_tokens)
                for r in reports
            ]
            layers = [MoeLayer(name=s.name, experts=s.num_experts, top_k=s.top_k) for s in anatomy.experts]
            record = RunRecord(
                model_type=checked.model_config.model_type,
                parameters=parameters,
                blocks=len(anatomy.blocks),
                moe_layers=layers,
                train_data=counts[0],
                eval_data=counts[1] if len(counts) > 1 else None,
                starts=[start],
            )
            write_record(record, Path(config.output_dir))


def _shares(run: Prepared) -> tuple[list[Share], int]:
    """How much each rank holds, ranks that hold the same together, and the elements of the whole model."""
    dense, expert, adapter = local_parameters(run.model, run.checked.anatomy)
    owned = sum(volume(local_box(parameter)) for parameter in run.model.parameters() if owns_copy(parameter))
    mine = torch.tensor([[dense, expert, adapter, run.bytes_to_load, owned]], device=collective_device())
    assert dist.group.WORLD is not None
    ranks = [tuple(int(number) for number in row) for row in all_gather(mine, dist.group.WORLD).tolist()]
    shares = [
        Share(ranks=count, dense=dense, expert=expert, adapter=adapter, bytes_to_load=size)
        for (dense, expert, adapter, size), count in Counter(row[:4] for row in ranks).items()
    ]
    return shares, sum(row[4] for row in ranks)


def versions() -> dict[str, str]:
    """Of what decides what a run computes."""
    return {
        "expertmesh": version("expertmesh"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def device_name(device: torch.device) -> str:
    """What the ranks run on, by name: an accelerator, or the processor with the number of cores that may be used."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_processor()}, {cores} cores"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
