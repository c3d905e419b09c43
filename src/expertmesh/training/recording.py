"""Writes `output_dir/run.json` when a run starts or goes on; record.py says what is in it.

Every rank calls `record_start`, since each tells how much of the model it holds; rank 0 writes.
"""

import os
import platform
from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch import nn

from expertmesh.config import Config, dump_config
from expertmesh.config.errors import ExpertmeshError
from expertmesh.data import DataReport
from expertmesh.distributed.all_ranks import collective_device, raise_on_all_ranks
from expertmesh.distributed.collectives import all_gather
from expertmesh.distributed.layout import DENSE_AXES, EXPERT_AXES
from expertmesh.distributed.mesh import Mesh
from expertmesh.io.boxes import volume
from expertmesh.io.directory import io_errors
from expertmesh.io.safetensors_writer import replace_synced
from expertmesh.state.shards import local_box, owns_copy
from expertmesh.training.plan import Prepared, local_parameters, plan_lines
from expertmesh.training.preflight import Checked
from expertmesh.training.record import (
    RECORD_FILE,
    DataCounts,
    MoeLayer,
    RunRecord,
    Share,
    Start,
    read_record,
)


def write_config(config: Config, path: Path) -> None:
    """Whole or not at all: a run that is killed here must find a configuration it can read."""
    content = dump_config(config).encode()
    with io_errors(path, len(content)):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_synced(path, content)


def record_start(run: Prepared, *, after_step: int) -> None:
    """Add this start to the run's run.json.

    Every rank calls it. Issues one all-gather of five integers and one small all-reduce. Raises
    `InputError` on all ranks if rank 0 cannot write.
    """
    config, checked, mesh = run.config, run.checked, run.mesh
    shares, parameters = _shares(mesh, run.model, checked, run.bytes_to_load)
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
                printed=list(plan_lines(run)),
                plan=None if run.forecast is None else run.forecast.prediction,
            )
            anatomy, counts = checked.anatomy, [_counts(report) for report in run.data.reports]
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
            _write(record, Path(config.output_dir))


def _write(record: RunRecord, directory: Path) -> None:
    try:
        earlier = read_record(directory)
    except ExpertmeshError as error:
        # Nothing that training needs is in it; a run must not end over it.
        print(f"{error}; the run's earlier starts are left out of it from here on", flush=True)
        earlier = None
    content = record.after(earlier).model_dump_json(indent=1).encode() + b"\n"
    with io_errors(directory / RECORD_FILE, len(content)):
        replace_synced(directory / RECORD_FILE, content)


def _shares(mesh: Mesh, model: nn.Module, checked: Checked, bytes_to_load: int) -> tuple[list[Share], int]:
    """How much each rank holds, ranks that hold the same together, and the elements of the whole model."""
    dense, expert, adapter = local_parameters(model, checked.anatomy)
    owned = sum(volume(local_box(parameter)) for parameter in model.parameters() if owns_copy(parameter))
    mine = torch.tensor([[dense, expert, adapter, bytes_to_load, owned]], device=collective_device())
    assert dist.group.WORLD is not None
    ranks = [tuple(int(number) for number in row) for row in all_gather(mine, dist.group.WORLD).tolist()]
    shares = [
        Share(ranks=count, dense=dense, expert=expert, adapter=adapter, bytes_to_load=size)
        for (dense, expert, adapter, size), count in Counter(row[:4] for row in ranks).items()
    ]
    return shares, sum(row[4] for row in ranks)


def _counts(report: DataReport) -> DataCounts:
    return DataCounts(
        rows=report.rows, samples=report.samples, tokens=report.tokens, target_tokens=report.target_tokens
    )


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
