"""The sharded job under proof: built, filled, run and stepped by the calls that training makes.

Beyond that it only looks: gradients are read where they are; what a forward shows is in seen.py. Of a job with pipeline
stages a rank has what its stages have, by the names of the whole model. All functions are collective: every rank calls
them alike.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

import expertmesh.parallel.grad_norm as gradients_module
from expertmesh.adapters.plan import plan_of
from expertmesh.adapters.start import start as start_adapters
from expertmesh.config import ParallelConfig, PrecisionConfig
from expertmesh.data import Step
from expertmesh.distributed.mesh import Mesh, init_mesh, set_timeout
from expertmesh.experts.balance import attached_balance, update_router_bias
from expertmesh.io.boxes import Box, slices
from expertmesh.model import prepare_model
from expertmesh.state.shards import local_box, local_tensor, owns_copy
from expertmesh.state.stage_view import stage_parameters
from expertmesh.step.forward_backward import forward_backward
from expertmesh.training.optimizer import build_optimizer
from expertmesh.training.run import checkpointing_mode
from expertmesh.verification.reference.weights import adapter_shapes, adapter_value
from expertmesh.verification.samples import StepData
from expertmesh.verification.setup import Setup
from expertmesh.weights.load import fill
from expertmesh.weights.mapping import model_tensors


@dataclass(slots=True)
class Subject:
    """One sharded model with its optimizer."""

    setup: Setup
    mesh: Mesh
    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    precision: PrecisionConfig

    def batches(self, data: StepData, *, micro: int | None = None, packing: bool | None = None) -> Step:
        """The step's micro-batches of this data rank, on its device."""
        step = data.batches(self.mesh.layout, self.mesh.rank, micro=micro, packing=packing)
        moved = tuple({key: value.to(self.mesh.device) for key, value in batch.items()} for batch in step.micro_batches)
        return replace(step, micro_batches=moved)

    @property
    def speaks(self) -> bool:
        """Whether this rank answers for its data rank's rows: one of those that share them."""
        layout, rank = self.mesh.layout, self.mesh.rank
        return rank % (layout.cp * layout.tp) == 0 and rank < layout.world_size // layout.pp

    def parameters(self) -> dict[str, nn.Parameter]:
        """What this rank trains a part of, by the names of the whole model."""
        return {name: p for name, p in stage_parameters(self.model).items() if p.requires_grad}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step gave, over all ranks. Router losses are without their factors, None where they are off."""

    loss: float
    aux_loss: float | None
    z_loss: float | None


def build(
    setup: Setup,
    *,
    precision: PrecisionConfig | None = None,
    parallel: ParallelConfig | None = None,
    checkpointing: bool | None = None,
    loaded: bool = True,
) -> Subject:
    """The job of the configuration, or a variant of it. Adapters get values by their names instead of zeros.

    With `loaded=False` the shards are allocated and hold nothing yet.
    """
    config = setup.config
    precision = precision or config.precision
    mesh = init_mesh(parallel or config.parallel, num_experts=setup.anatomy.num_experts)
    set_timeout(mesh, config.distributed.first_step_timeout_seconds)
    attention = config.model.attention
    if attention == "flash_attention_2" and precision.compute != "bfloat16":
        attention = "sdpa"
    model, _ = prepare_model(
        setup.model_config,
        setup.directory,
        mesh,
        precision=precision,
        moe=config.moe,
        attention=attention,
        trust_remote_code=config.model.trust_remote_code,
        activation_checkpointing=checkpointing_mode(config, mesh) if checkpointing is None else checkpointing,
        lora=config.lora,
        name=config.model.name_or_path,
        revision=config.model.revision,
    )
    setup.forget_layers(model)
    fill(model, setup.directory, allocate_on=mesh.device)
    start_adapters(model, config.train.seed)
    fill_adapters(model)
    return Subject(setup, mesh, model, build_optimizer(model, config.optim), precision)


@torch.no_grad()
def fill_adapters(model: PreTrainedModel) -> None:
    """Values that depend on names alone, as the reference has them. No communication."""
    if (plan := plan_of(model)) is None:
        return
    state = dict(model.named_parameters())
    for target in plan.targets:
        for name, shape in adapter_shapes(target, plan.lora.r).items():
            if name in state:
                local_tensor(state[name]).copy_(adapter_value(name, shape)[slices(local_box(state[name]))])


def backward(subject: Subject, step: Step) -> Outcome:
    """All micro-batches of one optimizer step, as the training loop runs them; gradients are complete afterwards."""
    model = subject.model
    losses = forward_backward(model, step.micro_batches, target_tokens=step.target_tokens)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    values = (losses.loss, losses.aux_loss, losses.z_loss)
    sums = torch.stack([value.to(subject.mesh.device, torch.float64) for value in values])
    dist.all_reduce(sums)
    balance = attached_balance(model)
    total, aux, z = sums.tolist()
    return Outcome(total, aux if balance.aux_loss_coef else None, z if balance.z_loss_coef else None)


def clip(subject: Subject, max_norm: float | None) -> float:
    """The product's own norm and clipping."""
    return float(gradients_module.clip_grad_norm_(subject.model, max_norm))


def update(subject: Subject) -> None:
    """One optimizer step on the gradients that are there, and what the trainer does after it."""
    subject.optimizer.step()
    update_router_bias(subject.model)
    subject.optimizer.zero_grad(set_to_none=True)


def gradients(subject: Subject) -> dict[str, Tensor]:
    """This rank's shards of all gradients, as they are now; zeros where there is none."""
    found = {}
    for name, parameter in subject.parameters().items():
        held = local_tensor(parameter)
        grad = parameter.grad
        found[name] = torch.zeros_like(held) if grad is None else local_tensor(grad).clone()
    return found


def boxes(subject: Subject) -> dict[str, Box]:
    """What this rank holds of each trained tensor."""
    return {name: local_box(parameter) for name, parameter in subject.parameters().items()}


def owned(subject: Subject) -> dict[str, bool]:
    """Of which tensors this rank's part counts, where several ranks hold the same."""
    return {name: owns_copy(parameter) for name, parameter in subject.parameters().items()}


def all_tensors(subject: Subject) -> dict[str, Tensor]:
    """Parameters (trained or not) and persistent buffers of this rank, by name."""
    return {**model_tensors(subject.model), **dict(subject.model.named_parameters())}
