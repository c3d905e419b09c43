"""The plan that `train` prints before it reads weights: every derived value, so that nobody has to guess one."""

from collections.abc import Iterator, Sequence

from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from expertmesh.anatomy import Anatomy
from expertmesh.config import Config
from expertmesh.data import DataReport, TrainingBatches
from expertmesh.mesh import Mesh
from expertmesh.training.preflight import Checked


def plan_lines(
    config: Config,
    checked: Checked,
    mesh: Mesh,
    model: PreTrainedModel,
    resolved: dict[str, str],
    reports: Sequence[DataReport],
    batches: TrainingBatches,
    *,
    total_steps: int,
    bytes_to_load: int,
    checkpointing: bool,
) -> Iterator[str]:
    """The plan of this rank, line by line. `model` is sharded and may still be on meta. No communication."""
    layout, anatomy = mesh.layout, checked.anatomy
    yield f"model      {config.model.name_or_path}: {checked.model_config.model_type}, " + _experts_line(anatomy)
    yield from (f"           {line}" for line in layout.table().splitlines())
    dense, expert = local_parameters(model, anatomy)
    yield f"per rank   {dense:,} dense + {expert:,} expert parameters, {_gib(bytes_to_load)} to load"
    precision = config.precision
    yield f"precision  {precision.params} parameters, {precision.compute} compute, {precision.reduce} reduce"
    yield f"experts    dispatch {resolved['dispatch']}, compute {resolved['compute']}, router {config.moe.router}"
    yield f"memory     activation checkpointing {'full' if checkpointing else 'none'}"
    for report in reports:
        yield from (f"data       {line}" for line in report.lines())
    train, ranks = config.train, layout.data_ranks
    yield (
        f"batch      {train.global_batch_size} sequences = {train.micro_batch_size} micro-batch × {ranks} data ranks "
        f"× {batches.accumulation} accumulation"
    )
    yield f"steps      {total_steps} optimizer steps, {config.optim.name}, {config.schedule.name} schedule"


def local_parameters(model: nn.Module, anatomy: Anatomy) -> tuple[int, int]:
    """Parameters that this rank holds: (dense, expert)."""
    dense = expert = 0
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if anatomy.is_expert_parameter(name):
            expert += local.numel()
        else:
            dense += local.numel()
    return dense, expert


def _experts_line(anatomy: Anatomy) -> str:
    spec = anatomy.experts[0]
    layers, blocks = len(anatomy.experts), len(anatomy.blocks)
    return f"{layers} MoE layers of {spec.num_experts} experts, top-{spec.top_k}, {blocks} blocks"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.1f} MiB"
