"""The plan that `train` prints before it reads weights: every derived value, so that nobody has to guess one."""

from collections.abc import Iterator, Sequence

from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from expertmesh.adapters.plan import plan_lines as adapter_plan_lines
from expertmesh.adapters.plan import plan_of
from expertmesh.anatomy import Anatomy, is_adapter
from expertmesh.config import Config
from expertmesh.data import DataReport, TrainingBatches
from expertmesh.experts.balance import Balance, attached_balance
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
    if checked.layout_reason is not None:
        yield f"layout     {checked.layout_reason}"
    dense, expert, adapters = local_parameters(model, anatomy)
    counts = f"{dense:,} dense + {expert:,} expert{f' + {adapters:,} adapter' if adapters else ''} parameters"
    yield f"per rank   {counts}, {gib(bytes_to_load)} to load"
    precision, lora = config.precision, plan_of(model)
    what, base = ("parameters", "") if lora is None else ("adapters", "base and ")
    yield f"precision  {precision.params} {what}, {precision.compute} {base}compute, {precision.reduce} reduce"
    router: str = config.moe.router
    if lora is not None:
        router = "adapted" if any(target.group == "router" for target in lora.targets) else "frozen"
    yield f"experts    dispatch {resolved['dispatch']}, compute {resolved['compute']}, router {router}"
    yield from (f"balance    {line}" for line in _balance_lines(attached_balance(model), batches.accumulation))
    if lora is not None:
        yield from (f"lora       {line}" for line in adapter_plan_lines(lora, anatomy))
    yield f"memory     activation checkpointing {'full' if checkpointing else 'none'}"
    for report in reports:
        yield from (f"data       {line}" for line in report.lines())
    train, ranks = config.train, layout.data_ranks
    yield (
        f"batch      {train.global_batch_size} sequences = {train.micro_batch_size} micro-batch × {ranks} data ranks "
        f"× {batches.accumulation} accumulation"
    )
    yield f"steps      {total_steps} optimizer steps, {config.optim.name}, {config.schedule.name} schedule"


def local_parameters(model: nn.Module, anatomy: Anatomy) -> tuple[int, int, int]:
    """Parameters that this rank holds: (dense, expert, of adapters)."""
    dense = expert = adapters = 0
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if is_adapter(name):
            adapters += local.numel()
        elif anatomy.is_expert_parameter(name):
            expert += local.numel()
        else:
            dense += local.numel()
    return dense, expert, adapters


def _balance_lines(balance: Balance, accumulation: int) -> Iterator[str]:
    if balance.aux_loss_coef:
        cost = f"{accumulation} counting forwards" if accumulation > 1 else "no counting forward"
        yield f"auxiliary loss times {balance.aux_loss_coef:g} over the global batch, {cost} a step"
    if balance.z_loss_coef:
        yield f"z-loss times {balance.z_loss_coef:g}"
    if balance.biases:
        yield f"{len(balance.biases)} correction biases move by {balance.bias_update_rate:g} a step"


def _experts_line(anatomy: Anatomy) -> str:
    spec = anatomy.experts[0]
    layers, blocks = len(anatomy.experts), len(anatomy.blocks)
    return f"{layers} MoE layers of {spec.num_experts} experts, top-{spec.top_k}, {blocks} blocks"


def gib(size: int) -> str:
    """Bytes as text."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.1f} MiB"
