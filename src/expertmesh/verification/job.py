"""The sharded job under proof: built with the calls that training makes, or a variant that must give the same result.

`ProvenJob` takes the steps of training, one call each, and returns the tensors that a rank holds; with pipeline stages
those of its stages, by their names in the full model. A method that communicates has a line `Collectives:` in its
docstring; every rank of the job has to call it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from expertmesh.adapters.start import start_adapters
from expertmesh.config import ParallelConfig, PrecisionConfig
from expertmesh.data import Step
from expertmesh.distributed.mesh import Mesh, init_mesh, set_timeout
from expertmesh.experts.balance import attached_balance, update_router_bias
from expertmesh.experts.placement import balanced
from expertmesh.io.boxes import Box, slices
from expertmesh.model import ModelOptions, prepare_model
from expertmesh.parallel.checkpointing import checkpointing_mode
from expertmesh.parallel.sequence import Batch
from expertmesh.state.model_view import ModelView
from expertmesh.state.shards import held_boxes, held_parts, local_tensor, owns_copy
from expertmesh.step.forward_backward import Order, run_step
from expertmesh.step.grad_norm import clip_grad_norm_
from expertmesh.step.objectives import Distill
from expertmesh.training.objective import RunObjective, Teacher
from expertmesh.training.optimizers.build import build_optimizer
from expertmesh.training.startup.model_check import shard_options
from expertmesh.verification.reference.streaming import set_adapters
from expertmesh.verification.setup import Setup, StepData
from expertmesh.weights.first_values import start_head
from expertmesh.weights.load import fill

Boxes = dict[str, list[Box]]  # the boxes of a rank's parts of tensors, by name


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of a step, over all ranks."""

    loss: float
    """The loss of the objective."""
    aux_loss: float | None
    """The routers' load-balancing loss without its coefficient; None if it is off."""
    z_loss: float | None
    """The routers' z-loss without its coefficient; None if it is off."""


@dataclass(slots=True)
class ProvenJob:
    """One sharded model with its optimizer. Every rank calls the methods that communicate, in the same order."""

    setup: Setup
    """The configuration, the layout and the data under verification."""
    mesh: Mesh
    """The mesh of the job's layout, which may be a variant of the layout in `setup`."""
    model: PreTrainedModel
    """The sharded model, loaded."""
    optimizer: torch.optim.Optimizer
    """The optimizer of the configuration, on the trained parameters of `model`."""
    precision: PrecisionConfig
    """The precision of this job, which may differ from the one in `setup`."""
    teacher: Teacher | None = None
    """The model that it learns from, loaded; None if the objective has none."""

    @property
    def of_teacher(self) -> "ProvenJob | None":
        """The teacher as a job of its own, which is never trained; None without one."""
        if self.teacher is None or self.setup.teacher is None:
            return None
        return replace(self, setup=self.setup.teacher, model=self.teacher.model, teacher=None)

    @property
    def answers_for_rows(self) -> bool:
        """True on one of the ranks that share the rows of a data rank: only its results for these rows are counted."""
        layout, rank = self.mesh.layout, self.mesh.rank
        return rank % (layout.cp * layout.tp) == 0 and rank < layout.world_size // layout.pp

    def batches(self, data: StepData, **changes: Any) -> Step:
        """Return the micro-batches of this data rank, on this rank's device.

        Args:
            changes: Fields of `data.form` to replace, such as `packing` or `micro_batch_size`.
        """
        step = data.batches(self.mesh.layout, self.mesh.rank, **changes)
        moved, mismatched = (
            tuple({key: value.to(self.mesh.device) for key, value in batch.items()} for batch in batches)
            for batches in (step.micro_batches, step.mismatched)
        )
        return replace(step, micro_batches=moved, mismatched=mismatched)

    def backward(self, step: Step, order: Order | None = None) -> Losses:
        """Run forward and backward of all micro-batches, as the training loop does; gradients are complete afterwards.

        Args:
            order: Their order instead of the run's.

        Collectives: every rank calls it; those of a step, and one all-reduce of the losses on the default group.
        """
        objective = self.setup.steps[0].objective(step)
        batches: Sequence[Batch] = step.micro_batches
        run = RunObjective(self.setup.steps[0].minimised)
        objective = run.with_kl_of_step(self.model, objective, [step.mismatched], step.desirable, self.mesh)
        if self.teacher is not None:
            assert isinstance(objective, Distill)
            objective, batches = objective.beside(self.teacher.model, batches)
        losses = run_step(self.model, batches, objective, order=order or self.setup.order)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        values = (losses.loss, losses.aux_loss, losses.z_loss)
        sums = torch.stack([value.to(self.mesh.device, torch.float64) for value in values])
        dist.all_reduce(sums)
        balance = attached_balance(self.model)
        total, aux, z = sums.tolist()
        return Losses(total, aux if balance.aux_loss_coef else None, z if balance.z_loss_coef else None)

    def reference_table(self, data: StepData, objective: RunObjective) -> npt.NDArray[np.float64]:
        """Return the log-probability of each sample under the reference of `objective`, by the model as it is now.

        Returns:
            `[samples]` float64, by the number of the sample; the same on every rank.

        Collectives: every rank calls it; forwards over the samples, and one all-reduce.
        """
        layout = self.mesh.layout
        form = replace(data.form, data_rank=layout.data_rank(self.mesh.rank), data_ranks=layout.data_ranks)
        return objective.table(self.model, self.mesh, data.dataset, form)

    def clip(self, max_norm: float | None) -> float:
        """Clip the gradients with the training loop's function and return their global norm.

        Collectives: every rank calls it; those of `clip_grad_norm_`.
        """
        return float(clip_grad_norm_(self.model, max_norm))

    def update(self) -> None:
        """Take one optimizer step on the present gradients, update the routers' biases and drop the gradients."""
        self.optimizer.step()
        update_router_bias(self.model)
        self.optimizer.zero_grad(set_to_none=True)

    def train_step(self, data: StepData) -> None:
        """Run one training step: forward, backward, clipping and the optimizer step. Collectives: those of a step."""
        self.backward(self.batches(data))
        self.clip(self.setup.config.optim.max_grad_norm)
        self.update()

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters of which this rank holds a part, by their names in the full model."""
        return {name: p for name, p in ModelView(self.model).parameters.items() if p.requires_grad}

    def gradients(self) -> dict[str, Tensor]:
        """Return copies of this rank's shards of all gradients; zeros for a parameter without a gradient."""
        found = {}
        for name, parameter in self.parameters().items():
            held, grad = local_tensor(parameter), parameter.grad
            found[name] = torch.zeros_like(held) if grad is None else local_tensor(grad).clone()
        return found

    def boxes(self) -> Boxes:
        """Return the boxes of trained tensors that this rank reports: every element is in the boxes of one rank."""
        return {name: held_boxes(parameter) for name, parameter in self.parameters().items() if owns_copy(parameter)}

    def parts(self, values: Mapping[str, Tensor], boxes: Boxes) -> dict[str, Tensor]:
        """Return the `boxes` of trained tensors on the host, collected from all ranks.

        Args:
            values: This rank's shards in the layout of this job, by name.
            boxes: The boxes to return, which may be those of another layout.

        Collectives: every rank calls it, on every stage; one all-reduce per trained tensor on the default group.
        """
        view, found = ModelView(self.model), {}
        for name, parameter in view.full.named_parameters():
            if parameter.requires_grad:
                full = self.full(view.state[name], values.get(name))
                if name in boxes:
                    first, *others = (full[slices(box)] for box in boxes[name])
                    found[name] = (torch.cat([first, *others]) if others else first).cpu()
        return found

    def full(self, tensor: Tensor, local: Tensor | None) -> Tensor:
        """Return the full tensor of a sharded one, on every rank, from the `local` part of each rank.

        Collectives: every rank calls it; one all-reduce of the full tensor's bytes on the default group.
        """
        full = torch.zeros(tensor.shape, dtype=tensor.dtype, device=self.mesh.device)
        if local is not None and owns_copy(tensor):
            for box, part in held_parts(tensor, local):
                full[slices(box)] = part
        # Summing bytes is exact for every dtype: each element is nonzero on one rank at most.
        dist.all_reduce(full.reshape(-1).view(torch.uint8))
        return full

    def counted(self) -> dict[str, bool]:
        """Return for each trained tensor whether this rank's part counts, so that each replicated part counts once."""
        return {name: owns_copy(parameter) for name, parameter in self.parameters().items()}

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's parameters (trained or not) and persistent buffers, by name."""
        return {**ModelView(self.model).tensors, **dict(self.model.named_parameters())}

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Return the optimizer's state tensors of each trained parameter, under names such as `exp_avg of NAME`."""
        return {
            f"{slot} of {name}": value
            for name, parameter in self.parameters().items()
            for slot, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }


def build(
    setup: Setup,
    *,
    precision: PrecisionConfig | None = None,
    parallel: ParallelConfig | None = None,
    checkpointing: bool | None = None,
) -> ProvenJob:
    """Build and load the job of the configuration, or a variant of it.

    Adapters get values that follow from their names instead of zeros (see `adapter_value`). FlashAttention 2 and DeepEP
    work in bf16 alone: in other precisions sdpa and `dispatch: auto` replace them. DeepEP is also replaced in a variant
    with another layout.

    Args:
        checkpointing: Activation checkpointing of all blocks on or off; None: as configured.

    Collectives: every rank calls it; those of loading, and of `reference_table` with an objective that has a reference.
    """
    config = setup.config
    precision = precision or config.precision
    mesh = init_mesh(parallel or config.parallel, num_experts=setup.anatomy.num_experts)
    set_timeout(mesh, config.distributed.first_step_timeout_seconds)
    if config.model.attention == "flash_attention_2" and precision.compute != "bfloat16":
        config = config.model_copy(update={"model": config.model.model_copy(update={"attention": "sdpa"})})
    config = config.model_copy(update={"precision": precision})
    options, shards = ModelOptions.of(config), shard_options(config)
    if config.moe.dispatch == "deepep" and (precision.compute != "bfloat16" or parallel is not None):
        shards = replace(shards, moe=config.moe.model_copy(update={"dispatch": "auto"}))
    if config.moe.placement != "contiguous" and (config.moe.placement == "balanced" or parallel is not None):
        # Any placement gives the same results: one that the data decide, or one for another ep, is drawn.
        replicas = config.moe.replicas if parallel is None else 0
        random, experts = np.random.default_rng(0), setup.anatomy.experts if mesh.layout.ep > 1 else ()
        loads = {spec.name: random.zipf(2.0, spec.num_experts).clip(max=1 << 20).tolist() for spec in experts}
        shards = replace(shards, placement=balanced(loads, mesh.layout.ep, replicas))
    if checkpointing is not None:
        shards = replace(shards, activation_checkpointing=checkpointing_mode(checkpointing), checkpoint_layers="all")
    model, _ = prepare_model(setup.model_config, setup.directory, mesh, options, shards)
    setup.forget_layers(model)
    loaded = fill(model, setup.directory, allocate_on=mesh.device, seed=setup.weights_seed)
    start_head(model, loaded.new, config.train.seed)
    start_adapters(model, config.train.seed)
    set_adapters(model)
    optimizer = build_optimizer(model, config.optim, config.train.seed, getattr(torch, precision.compute))
    teacher = None
    if setup.teacher is not None:
        teacher = Teacher.planned(config, setup.teacher.model_config, setup.teacher.directory, mesh.layout)
        teacher.shard(mesh)
        fill(teacher.model, teacher.directory, allocate_on=mesh.device)
    job = ProvenJob(setup, mesh, model, optimizer, precision, teacher)
    if setup.steps[0].minimised.reference and setup.steps[0].dataset.reference is None:
        _make_up_reference(job)
    return job


def _make_up_reference(job: ProvenJob) -> None:
    """Set made-up reference log-probabilities for the steps: the model's, up to 1 / beta more or less.

    Before its first update a model equals its reference, so every pair would have the same weight and a bug in these
    weights would not show. Mismatched rows are up to 1 / beta likelier than under the reference: their mean, 0 if it is
    less, has to matter.

    Collectives: every rank calls it; `reference_table` for each step, for kto twice.
    """
    for number, data in enumerate(job.setup.steps):
        objective, random = RunObjective(data.minimised), np.random.default_rng(number)
        away = random.uniform(-1, 1, len(data.dataset)) / data.minimised.beta
        data.dataset.reference = job.reference_table(data, objective) + away
        if (mismatched := data.mismatched) is not None:
            away = random.uniform(-1, 0, len(data.dataset)) / data.minimised.beta
            data.dataset.mismatched_reference = job.reference_table(mismatched, objective) + away
