"""The sharded job under proof: the steps of training, one call each, and the tensors that a rank holds.

With pipeline stages a rank has the tensors of its stages, by their names in the full model. A method that communicates
has a line `Collectives:` in its docstring; every rank of the job has to call it.
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

from expertmesh.config import PrecisionConfig
from expertmesh.data import Step
from expertmesh.distributed.mesh import Mesh
from expertmesh.experts.balance import attached_balance, update_router_bias
from expertmesh.io.boxes import Box, slices
from expertmesh.parallel.sequence import Batch
from expertmesh.state.model_view import ModelView
from expertmesh.state.shards import held_boxes, held_parts, local_tensor, owns_copy
from expertmesh.step.forward_backward import Order, minimise
from expertmesh.step.grad_norm import clip_grad_norm_
from expertmesh.step.objectives.distill import Distill
from expertmesh.training.objective import RunObjective
from expertmesh.training.teacher import Teacher
from expertmesh.verification.samples import StepData
from expertmesh.verification.setup import Setup

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
            data: The samples of the step.
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
            step: The micro-batches of this rank.
            order: Their order instead of the run's.

        Collectives: every rank calls it; those of a step, and one all-reduce of the losses on the default group.
        """
        objective = self.setup.steps[0].objective(step)
        batches: Sequence[Batch] = step.micro_batches
        run = RunObjective(self.setup.steps[0].minimised)
        objective = run.measured(self.model, objective, [step.mismatched], step.desirable, self.mesh)
        if self.teacher is not None:
            assert isinstance(objective, Distill)
            objective, batches = objective.beside(self.teacher.model, batches)
        losses = minimise(self.model, batches, objective, order=order or self.setup.order)
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
                whole = self.whole(view.state[name], values.get(name))
                if name in boxes:
                    first, *others = (whole[slices(box)] for box in boxes[name])
                    found[name] = (torch.cat([first, *others]) if others else first).cpu()
        return found

    def whole(self, tensor: Tensor, local: Tensor | None) -> Tensor:
        """Return the full tensor of a sharded one, on every rank, from the `local` part of each rank.

        Collectives: every rank calls it; one all-reduce of the full tensor's bytes on the default group.
        """
        whole = torch.zeros(tensor.shape, dtype=tensor.dtype, device=self.mesh.device)
        if local is not None and owns_copy(tensor):
            for box, part in held_parts(tensor, local):
                whole[slices(box)] = part
        # Summing bytes is exact for every dtype: each element is nonzero on one rank at most.
        dist.all_reduce(whole.reshape(-1).view(torch.uint8))
        return whole

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
