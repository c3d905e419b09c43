"""The sharded job under proof: what training does with a model, one call at a time; and what a rank holds of it.

Of a job with pipeline stages a rank has what its stages have, by the names of the whole model. Methods that communicate
say so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

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
from expertmesh.state.model_view import ModelView
from expertmesh.state.shards import local_box, local_tensor, owns_copy
from expertmesh.step.forward_backward import minimise
from expertmesh.step.grad_norm import clip_grad_norm_
from expertmesh.verification.samples import StepData
from expertmesh.verification.setup import Setup

if TYPE_CHECKING:
    from expertmesh.training.objective import RunObjective

Boxes = dict[str, Box]  # of tensors, by name


@dataclass(frozen=True, slots=True)
class Losses:
    """Of a step, over all ranks. `aux_loss` and `z_loss` (the routers') are without their factors, None where off."""

    loss: float
    aux_loss: float | None
    z_loss: float | None


@dataclass(slots=True)
class Job:
    """One sharded model with its optimizer. Every rank calls the methods that communicate, in the same order."""

    setup: Setup
    mesh: Mesh
    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    precision: PrecisionConfig

    @property
    def answers_for_rows(self) -> bool:
        """Whether this rank answers for the rows of its data rank: one of the ranks that share them."""
        layout, rank = self.mesh.layout, self.mesh.rank
        return rank % (layout.cp * layout.tp) == 0 and rank < layout.world_size // layout.pp

    def batches(self, data: StepData, **changes: Any) -> Step:
        """The step's micro-batches of this data rank, on its device; `changes` are to the form of its rows."""
        step = data.batches(self.mesh.layout, self.mesh.rank, **changes)
        moved = tuple({key: value.to(self.mesh.device) for key, value in batch.items()} for batch in step.micro_batches)
        return replace(step, micro_batches=moved)

    def backward(self, step: Step) -> Losses:
        """All micro-batches of one step, as the training loop runs them; gradients are complete afterwards.

        Issues the collectives of a step, and one all-reduce of the losses.
        """
        losses = minimise(self.model, step.micro_batches, self.setup.steps[0].objective(step))
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        values = (losses.loss, losses.aux_loss, losses.z_loss)
        sums = torch.stack([value.to(self.mesh.device, torch.float64) for value in values])
        dist.all_reduce(sums)
        balance = attached_balance(self.model)
        total, aux, z = sums.tolist()
        return Losses(total, aux if balance.aux_loss_coef else None, z if balance.z_loss_coef else None)

    def reference_table(self, data: StepData, objective: "RunObjective") -> npt.NDArray[np.float64]:
        """The log-probability of each sample under the reference of `objective`, by the model as it is now. Collective:
        a forward over the samples, and one all-reduce.
        """
        layout = self.mesh.layout
        form = replace(data.form, data_rank=layout.data_rank(self.mesh.rank), data_ranks=layout.data_ranks)
        return objective.table(self.model, self.mesh, data.dataset, form)

    def clip(self, max_norm: float | None) -> float:
        """The training loop's own norm and clipping. Issues its collectives."""
        return float(clip_grad_norm_(self.model, max_norm))

    def update(self) -> None:
        """One optimizer step on the gradients that are there, and what the training loop does after it."""
        self.optimizer.step()
        update_router_bias(self.model)
        self.optimizer.zero_grad(set_to_none=True)

    def train_step(self, data: StepData) -> None:
        """A whole step of the run."""
        self.backward(self.batches(data))
        self.clip(self.setup.config.optim.max_grad_norm)
        self.update()

    def parameters(self) -> dict[str, nn.Parameter]:
        """What this rank trains a part of, by the names of the whole model."""
        return {name: p for name, p in ModelView(self.model).parameters.items() if p.requires_grad}

    def gradients(self) -> dict[str, Tensor]:
        """This rank's shards of all gradients, as they are now; zeros where there is none."""
        found = {}
        for name, parameter in self.parameters().items():
            held, grad = local_tensor(parameter), parameter.grad
            found[name] = torch.zeros_like(held) if grad is None else local_tensor(grad).clone()
        return found

    def boxes(self) -> Boxes:
        """The parts of trained tensors that this rank answers for: each element is in one rank's."""
        return {name: local_box(parameter) for name, parameter in self.parameters().items() if owns_copy(parameter)}

    def parts(self, values: Mapping[str, Tensor], boxes: Boxes) -> dict[str, Tensor]:
        """`boxes` of trained tensors, on the host, where each rank has `values` of its own parts in this job.

        Every rank calls it, of other stages too. One all-reduce for each tensor.
        """
        view, found = ModelView(self.model), {}
        for name, parameter in view.full.named_parameters():
            if parameter.requires_grad:
                whole = self.whole(view.state[name], values.get(name))
                if name in boxes:
                    found[name] = whole[slices(boxes[name])].cpu()
        return found

    def whole(self, tensor: Tensor, local: Tensor | None) -> Tensor:
        """All of a sharded tensor, on every rank, from the `local` part of each. One all-reduce."""
        whole = torch.zeros(tensor.shape, dtype=tensor.dtype, device=self.mesh.device)
        if local is not None and owns_copy(tensor):
            whole[slices(local_box(tensor))] = local
        dist.all_reduce(whole.reshape(-1).view(torch.uint8))  # of any dtype: to all but one rank's elements it adds 0
        return whole

    def counted(self) -> dict[str, bool]:
        """Of which trained tensors this rank's part counts, where several ranks hold the same."""
        return {name: owns_copy(parameter) for name, parameter in self.parameters().items()}

    def tensors(self) -> dict[str, Tensor]:
        """Parameters (trained or not) and persistent buffers of this rank, by name."""
        return {**ModelView(self.model).tensors, **dict(self.model.named_parameters())}

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """The optimizer's state of each trained tensor, such as `exp_avg of NAME`."""
        return {
            f"{slot} of {name}": value
            for name, parameter in self.parameters().items()
            for slot, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }
