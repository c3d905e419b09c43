"""The unsharded model: every data rank runs its own samples through it, and the gradients are summed over ranks.

The model is the family's own, from transformers, with transformers' eager experts, one block in memory at a time
(streaming.py), weights read through the safetensors library. Samples are padded into one batch, each by itself: no
packing, no micro-batches, no product code for dispatch, experts, loss, router losses, norm or optimizer.

    T tokens of this rank's samples, V vocabulary, E experts
"""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from expertmesh.adapters.plan import plan_of
from expertmesh.data import IGNORE
from expertmesh.experts.balance import attached_balance
from expertmesh.experts.module_list import FusedExperts
from expertmesh.io.boxes import Box, extents, full_box, intersect, slices
from expertmesh.verification.reference.streaming import Streamed, Weights
from expertmesh.verification.reference.watch import ReferenceWatch
from expertmesh.verification.reference.weights import Adapted, FileWeights
from expertmesh.verification.samples import Placed, StepData
from expertmesh.verification.seen import Places, Seen
from expertmesh.verification.setup import Setup
from expertmesh.verification.subject import Subject, boxes


@dataclass(frozen=True, slots=True)
class Expected:
    """What the unsharded model gives for a step. `seen`, `token_losses` and `margins` are of this rank's samples.

    `gradients`: of every trained tensor, the part that this rank of the job holds; `norm`: of all of them, before
    clipping. `margins[module]` `[T]`: see watch.py.
    """

    seen: Seen
    margins: dict[str, Tensor]
    token_losses: Tensor
    targets: int
    loss: float
    aux_loss: float | None
    z_loss: float | None
    gradients: dict[str, Tensor]
    squares: dict[str, float]

    @property
    def norm(self) -> float:
        return math.sqrt(sum(self.squares.values()))


Whole = Callable[[str, Tensor], None]


@dataclass(slots=True)
class Reference:
    """The unsharded model of a setup in one dtype, for comparison with `subject`'s layout. Every rank makes one."""

    setup: Setup
    subject: Subject
    dtype: torch.dtype
    weights: Weights = field(init=False)
    streamed: Streamed = field(init=False)
    places: dict[str, tuple[str, Box]] = field(init=False)
    trained: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        device, model = self.subject.mesh.device, self.setup.meta_model(self.dtype, fuse=False)
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")
        model.config.get_text_config().output_router_logits = False  # router losses are added below
        model.train()
        self.weights = FileWeights(model, self.setup.directory, device)
        if (plan := plan_of(self.subject.model)) is not None:
            wide = torch.promote_types(self.dtype, torch.float32)
            self.weights = Adapted(self.weights, plan, self.setup.anatomy, wide, device)
        self.places = places_of_list_members(self.setup)
        mine = set(self.subject.parameters())
        gathered: list[set[str]] = [set()] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        wanted = set().union(*gathered)
        self.trained = frozenset({*wanted, *(name for name, (into, _) in self.places.items() if into in wanted)})
        watch = ReferenceWatch(model, self.setup.anatomy, 0)
        self.streamed = Streamed(model, self.weights, device, watch, self.trained)

    def run(
        self,
        data: StepData,
        *,
        weights: Weights | None = None,
        forced: Mapping[str, tuple[Tensor, Tensor]] | None = None,
        whole: Whole | None = None,
    ) -> Expected:
        """Forward and backward of a step. Collective: one all-reduce per trained tensor, and a few small ones.

        `weights` instead of the files'; `forced` by module: which of this rank's tokens have to choose which experts;
        `whole` gets every gradient whole, summed over ranks.
        """
        mesh = self.subject.mesh
        placed = data.placed(mesh.layout, mesh.rank) or [_nothing()]
        real = bool(data.placed(mesh.layout, mesh.rank))
        batch = Batch.of(placed, mesh.device)
        balance = attached_balance(self.subject.model)
        watch = ReferenceWatch(
            self.streamed.model,
            self.setup.anatomy,
            batch.ids.numel(),
            wants_router_logits=balance.has_losses,
            forced={name: batch.spread(*value) for name, value in (forced or {}).items()},
        )
        self.streamed.watch, self.streamed.weights = watch, weights or self.weights
        sums = _Sums(self, whole)
        targets = data.targets
        with self.streamed.installed(self.setup.anatomy):
            output = self.streamed.model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False)
            logits = output.logits
            wide = torch.promote_types(logits.dtype, torch.float32)
            predicting = batch.labels[:, 1:] != IGNORE
            token_losses = F.cross_entropy(
                logits[:, :-1][predicting].to(wide), batch.labels[:, 1:][predicting], reduction="none"
            )
            loss = token_losses.sum() / targets
            total, aux, z = loss, None, None
            if balance.has_losses:
                own = [each.reshape(batch.ids.numel(), -1)[batch.real.flatten()] for each in watch.router_logits]
                own = own if real else [each[:0] for each in own]
                aux, z = self._router_losses(own)
                total = total + balance.aux_loss_coef * aux + balance.z_loss_coef * z
            self.streamed.backward(total, sums.add)
        sums.finish()
        value = loss.detach().double() if self.subject.speaks else torch.zeros((), dtype=torch.float64)
        value = value.to(mesh.device)
        dist.all_reduce(value)
        keep = Places(sum(len(sample) for sample in placed))
        tensors = {**watch.outputs, "logits": logits.detach()}
        return Expected(
            seen=Seen(
                {name: keep.pick(name, batch.own(tensor)[: None if real else 0]) for name, tensor in tensors.items()},
                {
                    name: batch.own(_per_row(index, batch))[: None if real else 0].cpu()
                    for name, index in watch.choices.items()
                },
            ),
            margins={name: batch.own(_per_row(m, batch)).squeeze(-1).cpu() for name, m in watch.margins.items()},
            token_losses=token_losses.detach().double().cpu() if self.subject.speaks else torch.zeros(0),
            targets=targets,
            loss=float(value),
            aux_loss=None if aux is None or not balance.aux_loss_coef else float(aux.detach()),
            z_loss=None if z is None or not balance.z_loss_coef else self._summed(z),
            gradients=sums.kept.parts,
            squares=sums.squares,
        )

    def _router_losses(self, own: list[Tensor]) -> tuple[Tensor, Tensor]:
        """transformers' own load-balancing loss on the logits of the whole step, and this rank's share of the z-loss.

        Gradients flow through this rank's logits alone; the other ranks have theirs.
        """
        balance = attached_balance(self.subject.model)
        stacked = torch.stack(own).detach().cpu()
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, stacked if self.subject.speaks else stacked[:, :0])
        rows = sum(each.shape[1] for each in gathered)
        zero = own[0].sum() * 0
        aux: Tensor = zero
        if balance.aux_loss_coef:
            function = sys.modules[type(self.streamed.model).__module__].load_balancing_loss_func
            device, layers = own[0].device, []
            for number, mine in enumerate(own):
                others = [each[number].to(device) for rank, each in enumerate(gathered) if rank != dist.get_rank()]
                layers.append(torch.cat([mine if self.subject.speaks else mine[:0], *others]))
            aux = function(tuple(layers), balance.num_experts, balance.top_k) + zero
        squares = [
            torch.logsumexp(each.to(torch.promote_types(each.dtype, torch.float32)), -1).square().sum() for each in own
        ]
        z = torch.stack(squares).sum() / (rows * len(own))
        return aux, z

    def _summed(self, share: Tensor) -> float:
        value = share.detach().double() if self.subject.speaks else torch.zeros((), dtype=torch.float64)
        value = value.to(self.subject.mesh.device)
        dist.all_reduce(value)
        return float(value)


class Parts:
    """What this rank of the job holds of whole tensors of the reference, in the job's names: `parts`."""

    def __init__(self, reference: Reference) -> None:
        self._places = reference.places
        self._boxes = boxes(reference.subject)
        self.parts: dict[str, Tensor] = {}

    def take(self, name: str, whole: Tensor) -> None:
        """Keep the part of a whole tensor; nothing of one that the job has not here."""
        into, box = self._places.get(name, (name, full_box(whole.shape)))
        if into not in self._boxes:
            return
        held = self._boxes[into]
        if into not in self.parts:
            self.parts[into] = torch.zeros(extents(held), dtype=whole.dtype, device=whole.device)
        common = intersect(box, held)
        if common is not None:
            self.parts[into][slices(common, held)] = whole.view(extents(box))[slices(common, box)]


class _Sums:
    """Gradients summed over ranks, of which this rank keeps what it holds of the job."""

    def __init__(self, reference: Reference, whole: Whole | None) -> None:
        self._speaks, self._whole = reference.subject.speaks, whole
        names = list(reference.streamed.names.values())
        self._tied = {name for name in names if names.count(name) > 1}
        self._pending: dict[str, Tensor] = {}
        self.kept = Parts(reference)
        self.squares: dict[str, float] = {}

    def add(self, name: str, gradient: Tensor) -> None:
        """The share of this rank's samples. One all-reduce."""
        total = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        if not self._speaks:
            total = torch.zeros_like(total)
        dist.all_reduce(total)
        if name in self._tied:  # comes once for each unit that holds it
            total = self._pending.pop(name, torch.zeros_like(total)) + total
            self._pending[name] = total
        else:
            self._done(name, total)

    def finish(self) -> None:
        for name in list(self._pending):
            self._done(name, self._pending.pop(name))

    def _done(self, name: str, total: Tensor) -> None:
        self.squares[name] = float(total.double().square().sum())
        if self._whole is not None:
            self._whole(name, total)
        self.kept.take(name, total)


@dataclass(frozen=True, slots=True)
class Batch:
    """All samples of a rank as one right-padded batch."""

    placed: list[Placed]
    ids: Tensor
    labels: Tensor
    mask: Tensor

    @classmethod
    def of(cls, placed: list[Placed], device: torch.device) -> "Batch":
        ids = pad_sequence([sample.input_ids for sample in placed], batch_first=True)
        labels = pad_sequence([sample.labels for sample in placed], batch_first=True, padding_value=IGNORE)
        mask = pad_sequence([torch.ones_like(sample.input_ids) for sample in placed], batch_first=True)
        return cls(placed, ids.to(device), labels.to(device), mask.to(device))

    @property
    def real(self) -> Tensor:
        return self.mask.bool()

    def own(self, value_BSX: Tensor) -> Tensor:
        """The real tokens `[T, X]`, sample after sample."""
        return value_BSX[self.real]

    def spread(self, flags_T: Tensor, choices_TK: Tensor) -> tuple[Tensor, Tensor]:
        """From this rank's tokens to the places of the batch; padding is not flagged."""
        real = self.real.flatten().cpu()
        flags = torch.zeros(real.numel(), dtype=torch.bool)
        choices = torch.zeros(real.numel(), choices_TK.shape[-1], dtype=choices_TK.dtype)
        flags[real], choices[real] = flags_T, choices_TK
        return flags, choices


def _per_row(value_TX: Tensor, batch: Batch) -> Tensor:
    return value_TX.reshape(*batch.ids.shape, -1)


def _nothing() -> Placed:
    """For a rank without samples, which still takes part in every all-reduce."""
    return Placed(torch.zeros(2, dtype=torch.int64), torch.full((2,), IGNORE), 0, 0, 0)


def places_of_list_members(setup: Setup) -> dict[str, tuple[str, Box]]:
    """Where the linears of experts that are a list lie in the product's fused parameters; empty for other models."""
    places: dict[str, tuple[str, Box]] = {}
    for name, module in setup.meta_model(torch.float32).named_modules():
        if not isinstance(module, FusedExperts):
            continue
        up = "gate_up_proj" if module.has_gate else "up_proj"
        for leaf, end in (("weight", ""), ("bias", "_bias"))[: 1 + module.has_bias]:
            for linears, target in ((module.ups, up), ((module.down,), "down_proj")):
                whole = tuple(module.get_parameter(f"{target}{end}").shape)
                rows = whole[1] // len(linears)
                for expert in range(whole[0]):
                    for part, linear in enumerate(linears):
                        box = ((expert, expert + 1), (part * rows, (part + 1) * rows), *full_box(whole[2:]))
                        places[f"{name}.{expert}.{linear}.{leaf}"] = f"{name}.{target}{end}", box
    return places
