"""Run the unsharded model: each data rank runs its samples through it, and gradients are summed over ranks.

The model is the family's code from transformers with eager experts and one block in memory at a time (streaming.py).
Weights are read through the safetensors library, and the loss is that of unsharded.py. Each sample is a row of one
padded batch: there is no packing and there are no micro-batches.

`LocalParts` maps names and boxes of the reference, whose experts may be a list of MLPs, to the job's fused parameters.
`Choices` records the margin of each token's choice of experts, the smallest relative gap between the last chosen score
and the first one that is not: a tie differs by rounding alone, and the job's experts can be forced.

    T tokens of this rank's samples, E experts, K top-k
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from expertmesh.anatomy import ExpertsSpec, is_inside
from expertmesh.data import IGNORE
from expertmesh.distributed.all_ranks import gather_objects
from expertmesh.experts.balance import attached_balance
from expertmesh.experts.module_list import FusedExperts
from expertmesh.io.boxes import Box, extents, full_box, intersect, slices
from expertmesh.state.shards import held_parts, local_tensor
from expertmesh.verification.forward_record import MISMATCHED, TEACHER, ForwardRecord, kept_tokens, recording
from expertmesh.verification.job import Losses, ProvenJob
from expertmesh.verification.reference import unsharded
from expertmesh.verification.reference.streaming import StreamedModel, Weights
from expertmesh.verification.setup import PlacedSample, Setup, StepData


@dataclass(slots=True)
class Choices:
    """The chosen experts of a forward, and of the recomputation in its backward.

    A key `module` is the name of an experts module, or of one of `routers`.
    """

    experts: Sequence[ExpertsSpec]
    routers: Mapping[str, nn.Module]
    """The routers that sort rows by expert themselves, by name; a block may have several."""
    tokens: int
    """The number of tokens of the batch, T."""
    forced: Mapping[str, Tensor] = field(default_factory=dict)
    """The experts to take, `[T, K]` by module; negative for tokens that choose themselves."""
    own: dict[str, Tensor] = field(default_factory=dict)
    """The experts that the tokens would have chosen, `[T, K]` by module, for modules with forced experts."""
    margins: dict[str, Tensor] = field(default_factory=dict)
    """The margin of each token, `[T]` by module."""

    @contextmanager
    def during(self, unit: str) -> Iterator[None]:
        """Record and force the experts of one run of `unit` inside the block."""
        spec = next((spec for spec in self.experts if spec.name.startswith(f"{unit}.")), None)
        with ExitStack() as stack:
            if spec is not None:
                recorder = _TopKRecorder(self, spec)
                for name, router in self.routers.items():
                    if is_inside(name, unit):
                        stack.enter_context(router.register_forward_pre_hook(partial(recorder.enter, name)))
                stack.enter_context(recorder)
            yield


class _TopKRecorder(TorchFunctionMode):
    """Records the margin of every `topk`, and makes tokens take their forced experts."""

    def __init__(self, recorder: Choices, spec: ExpertsSpec) -> None:
        super().__init__()
        self.recorder, self.name, self.num_experts = recorder, spec.name, spec.num_experts

    def enter(self, name: str, *_: Any) -> None:
        """Assign the following `topk` to the router `name`; a forward pre-hook of it."""
        self.name = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is not torch.topk and func is not torch.Tensor.topk:
            return result
        scores, tokens = args[0] if args else kwargs["input"], self.recorder.tokens
        last = kwargs.get("dim", args[2] if len(args) > 2 else -1) in (-1, scores.dim() - 1)
        if not last or scores.numel() == 0:
            return result
        self._record_margin(scores.detach(), result.values.shape[-1])
        forced = self.recorder.forced.get(self.name)
        is_final = scores.shape[-1] == self.num_experts and scores.numel() == tokens * scores.shape[-1]
        if forced is None or not is_final or result.indices.shape[-1] != forced.shape[-1]:
            return result
        own = self.recorder.own[self.name] = result.indices.reshape(tokens, -1)
        forced = forced.to(own)
        index = torch.where(forced < 0, own, forced).view(result.indices.shape)
        return torch.return_types.topk((torch.gather(scores, -1, index), index.clone()))

    def _record_margin(self, scores: Tensor, k: int) -> None:
        tokens, margins = self.recorder.tokens, self.recorder.margins
        rows = scores.reshape(-1, scores.shape[-1]).float()
        if k >= rows.shape[-1] or rows.shape[0] % tokens:
            return
        top = rows.topk(k + 1, dim=-1).values
        gap = (top[:, k - 1] - top[:, k]) / top[:, k - 1].abs().clamp_min(torch.finfo(torch.float32).tiny)
        gap_T = gap.nan_to_num(0.0).view(tokens, -1).min(dim=1).values
        margins[self.name] = torch.minimum(margins.get(self.name, gap_T), gap_T)


# The place of a tensor of the unsharded model in a fused parameter of the job: the parameter's name, and the box.
FusedPlaces = dict[str, tuple[str, Box]]


class LocalParts:
    """Collects this rank's parts of the reference's full tensors in `parts`, by the job's names."""

    def __init__(self, job: ProvenJob, places: FusedPlaces) -> None:
        self._places = places
        self._held = job.parameters()
        self.parts: dict[str, Tensor] = {}

    def take(self, name: str, whole: Tensor) -> None:
        """Store this rank's part of the full tensor `whole`; ignore a tensor of which this rank has no part."""
        into, box = self._places.get(name, (name, full_box(whole.shape)))
        if into not in self._held:
            return
        parameter = self._held[into]
        if into not in self.parts:
            shape = local_tensor(parameter).shape
            self.parts[into] = torch.zeros(shape, dtype=whole.dtype, device=whole.device)
        for held, part in held_parts(parameter, self.parts[into]):
            common = intersect(box, held)
            if common is not None:
                part[slices(common, held)] = whole.view(extents(box))[slices(common, box)]


def places_of_list_members(setup: Setup) -> FusedPlaces:
    """Return the places of the linears of experts that are a list, in the job's fused parameters.

    Returns:
        The fused parameter and the box, by the name of the linear's weight or bias; empty for other models.
    """
    places: FusedPlaces = {}
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


@dataclass(frozen=True, slots=True)
class Expected:
    """The results of the unsharded model for a step."""

    forward: ForwardRecord
    """The forward on this rank's samples; `choices` are those of the unsharded model, even if others were forced."""
    margins: dict[str, Tensor]
    """The margin of each token's choice of experts on this rank, `[T]` by module."""
    token_losses: Tensor
    """The loss of each target of this rank's samples in fp64; empty on ranks without `ProvenJob.answers_for_rows`."""
    token_weights: Tensor
    """The derivative of the step's loss by each of `token_losses`."""
    losses: Losses
    gradients: dict[str, Tensor]
    """This rank's parts, as in the job, of the gradients of all trained tensors, by name."""
    squares: dict[str, float]
    """The squared norm of each full gradient, before clipping, by name."""

    @property
    def norm(self) -> float:
        """The global norm of the gradients."""
        return math.sqrt(sum(self.squares.values()))


# Gets the name and the full gradient of a tensor.
TakeWhole = Callable[[str, Tensor], None]


@dataclass(slots=True)
class Reference:
    """The unsharded model of a job in one dtype, for comparison with the job's tensors.

    Collectives: every rank makes one; one all-gather of objects, the names of trained tensors.
    """

    job: ProvenJob
    dtype: torch.dtype
    """The dtype of weights and arithmetic."""
    weights: Weights = field(init=False)
    """The weights, read from the files."""
    streamed: StreamedModel = field(init=False)
    places: FusedPlaces = field(init=False)
    """The places of the linears of list experts in the job's fused parameters."""
    trained: frozenset[str] = field(init=False)
    """The names of trained tensors, those of the job and those of the reference."""
    router_logits: Sequence[Tensor] = ()
    """The routers' logits of the last forward, if a router loss is on."""
    teacher: "Reference | None" = field(init=False)
    """The unsharded teacher of the objective; None without one."""

    def __post_init__(self) -> None:
        job, setup, device = self.job, self.job.setup, self.job.mesh.device
        model = setup.meta_model(self.dtype, fuse=False)
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")
        # transformers records the logits; the router loss that it computes from them is not used.
        model.config.get_text_config().output_router_logits = attached_balance(job.model).has_losses
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                module.register_forward_hook(self._keep_router_logits)
        self.weights = Weights(model, setup, job.model, device)
        self.places = places_of_list_members(setup)
        wanted = set().union(*gather_objects(set(job.parameters())))
        model.train(bool(wanted))  # a teacher trains nothing
        self.trained = frozenset({*wanted, *(name for name, (into, _) in self.places.items() if into in wanted)})
        self.streamed = StreamedModel(model, device, setup.anatomy.blocks, self.trained)
        self.teacher = None if (of_teacher := job.of_teacher) is None else Reference(of_teacher, self.dtype)

    def run(
        self,
        data: StepData,
        *,
        weights: Weights | None = None,
        forced: Mapping[str, Tensor] | None = None,
        whole: TakeWhole | None = None,
    ) -> Expected:
        """Run forward and backward of a step.

        Args:
            weights: Weights to use instead of those of the files.
            forced: The experts that this rank's tokens must take, `[T, K]` by module.
            whole: Gets each full gradient, summed over ranks.

        Collectives: every rank calls it; one all-reduce per trained tensor, and a few small ones, on the default group.
        """
        job, streamed, balance = self.job, self.streamed, attached_balance(self.job.model)
        mismatched = None if data.mismatched is None else self._measured(data.mismatched, forced or {}, weights)
        kl = torch.zeros((), requires_grad=True) if mismatched is None else mismatched.kl
        samples, batch, forced = self._inputs(data, forced or {})
        recorder, sums = _Recorder(self, batch, samples, forced), _GradientSums(self, whole)
        teacher = None if self.teacher is None else self.teacher._forward_alone(batch, samples, forced, TEACHER)[0]
        with recorder.recording(), streamed.fed_by(weights or self.weights, recorder.choices.during):
            logits, token_losses = unsharded.forward(streamed.model, batch)
            if teacher is not None:
                theirs = teacher.outputs["logits"]
                token_losses = unsharded.distillation_losses(logits, token_losses, theirs, batch, data.minimised)
            loss = self._loss(data, samples, batch, token_losses, kl)
            token_weights, by_kl = torch.autograd.grad(
                loss, [token_losses, kl], retain_graph=True, materialize_grads=True
            )
            aux = z = torch.zeros((), device=loss.device)
            if balance.has_losses:
                aux, z = self._router_losses([recorder.own(each) for each in self.router_logits])
                self.router_logits = ()
            streamed.backward(loss + balance.aux_loss_coef * aux + balance.z_loss_coef * z, sums.add)
        sums.finish()
        recorder.outputs["logits"] = logits.detach()
        forward, margins = recorder.record(), recorder.margins()
        if teacher is not None:
            forward = forward.beside(teacher.record(), TEACHER)
            margins |= {f"{TEACHER}{name}": margin for name, margin in teacher.margins().items()}
        expected = Expected(
            forward=forward,
            margins=margins,
            token_losses=token_losses.detach().double().cpu() if job.answers_for_rows else torch.zeros(0),
            token_weights=token_weights.double().cpu() if job.answers_for_rows else torch.zeros(0),
            losses=Losses(
                self._summed(loss),
                float(aux.detach()) if balance.aux_loss_coef else None,
                self._summed(z) if balance.z_loss_coef else None,
            ),
            gradients=sums.local.parts,
            squares=sums.squares,
        )
        return expected if mismatched is None else mismatched.beside(expected, self._summed(by_kl))

    @torch.no_grad()
    def _forward_alone(
        self,
        batch: unsharded.PaddedSamples,
        samples: Sequence[PlacedSample],
        forced: Mapping[str, Tensor],
        prefix: str,
        weights: Weights | None = None,
    ) -> "tuple[_Recorder, Tensor]":
        """Run a forward without a backward and record it; also return the cross entropies.

        Args:
            forced: The experts that tokens must take, by names that begin with `prefix`.
            weights: Weights to use instead of those of the files.
        """
        own = {name.removeprefix(prefix): index for name, index in forced.items() if name.startswith(prefix)}
        recorder = _Recorder(self, batch, samples, own)
        with recorder.recording(), self.streamed.fed_by(weights or self.weights, recorder.choices.during):
            recorder.outputs["logits"], token_losses = unsharded.forward(self.streamed.model, batch)
        return recorder, token_losses

    def _measured(self, data: StepData, forced: Mapping[str, Tensor], weights: Weights | None) -> "_Measured":
        """Return what kto estimates by the mismatched rows `data`. Collectives: every rank calls it; one all-reduce."""
        samples, batch, forced = self._inputs(data, forced, mismatched=True)
        recorder, token_losses = self._forward_alone(batch, samples, forced, MISMATCHED, weights)
        rows = unsharded.row_log_probabilities(token_losses, batch)[: len(samples)]
        kl = self._summed((rows - _of_rows(data.dataset.reference, samples, rows.device)).sum()) / len(data.dataset)
        kl_tensor = torch.tensor(max(0.0, kl), dtype=torch.float64, device=rows.device, requires_grad=True)
        return _Measured(recorder, token_losses, kl_tensor, len(data.dataset))

    def row_log_probabilities(
        self, data: StepData, forced: Mapping[str, Tensor], *, adapters: bool
    ) -> dict[int, float]:
        """Return the log-probability of each of this rank's samples, by the sample's number. Collectives: none.

        Args:
            adapters: Add the adapters to the weights.
        """
        job = self.job
        samples, batch, forced = self._inputs(data, forced)
        base = Weights(self.streamed.model, job.setup, job.model, job.mesh.device, adapted=False)
        _, token_losses = self._forward_alone(batch, samples, forced, "", self.weights if adapters else base)
        rows = unsharded.row_log_probabilities(token_losses, batch).tolist()
        return {sample.index: row for sample, row in zip(samples, rows, strict=False)}

    def _inputs(
        self, data: StepData, forced: Mapping[str, Tensor], *, mismatched: bool = False
    ) -> tuple[list[PlacedSample], unsharded.PaddedSamples, dict[str, Tensor]]:
        """Return this rank's samples of `data`, their batch, and the experts that its tokens must take, by name.

        The batch has one sample without targets if there are none: a rank without samples has to run the model as well,
        because skipping an all-reduce would hang the others.

        Args:
            mismatched: Take the experts of mismatched rows.
        """
        samples = data.placed(self.job.mesh.layout, self.job.mesh.rank)
        own = [(placed.input_ids, placed.labels) for placed in samples]
        without_targets = torch.zeros(2, dtype=torch.int64), torch.full((2,), IGNORE)
        batch = unsharded.PaddedSamples.of(own or [without_targets], self.job.mesh.device).with_images(data, samples)
        named = {name: index for name, index in forced.items() if name.startswith(MISMATCHED) is mismatched}
        return samples, batch, {name: batch.spread(index) for name, index in named.items()} if samples else {}

    def _loss(
        self,
        data: StepData,
        samples: Sequence[PlacedSample],
        batch: unsharded.PaddedSamples,
        token_losses: Tensor,
        kl: Tensor,
    ) -> Tensor:
        """Return this rank's share of the loss of the step; `kl` is that of its mismatched rows, for kto."""
        if not data.minimised.of_responses or not samples:
            return token_losses.sum() / data.targets
        reference, device = None, batch.ids_BS.device
        if data.dataset.reference is not None:
            reference = _of_rows(data.dataset.reference, samples, device)
        if data.dataset.desirable is not None:
            assert reference is not None
            desirable = _of_rows(data.dataset.desirable, samples, device)
            loss = unsharded.judged_loss(token_losses, batch, data.minimised, reference, desirable, kl)
            return loss / len(data.rows)
        return unsharded.preference_loss(token_losses, batch, data.minimised, reference) / len(data.rows)

    def _keep_router_logits(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, ModelOutput):
            self.router_logits = output.get("router_logits") or self.router_logits

    def local_parts(self) -> LocalParts:
        return LocalParts(self.job, self.places)

    def _router_losses(self, own: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return transformers' load-balancing loss on the logits of all ranks, and this rank's share of the z-loss.

        Gradients flow through this rank's logits alone; each rank computes the gradients of its logits.

        Collectives: every rank calls it; one all-gather of objects, the logits.
        """
        balance, answers = attached_balance(self.job.model), self.job.answers_for_rows
        stacked = torch.stack(own).detach().cpu()
        everyone = gather_objects(stacked if answers else stacked[:, :0])
        aux = own[0].sum() * 0
        if balance.aux_loss_coef:
            function = sys.modules[type(self.streamed.model).__module__].load_balancing_loss_func
            device, layers = own[0].device, []
            for number, mine in enumerate(own):
                others = [each[number].to(device) for rank, each in enumerate(everyone) if rank != dist.get_rank()]
                layers.append(torch.cat([mine if answers else mine[:0], *others]))
            aux = aux + function(tuple(layers), balance.num_experts, balance.top_k)
        rows = sum(each.shape[1] for each in everyone)
        wide = (each.to(torch.promote_types(each.dtype, torch.float32)) for each in own)
        squares = [torch.logsumexp(each, -1).square().sum() for each in wide]
        return aux, torch.stack(squares).sum() / (rows * len(own))

    def _summed(self, share: Tensor) -> float:
        """Return the sum over the ranks with `answers_for_rows`. Collectives: every rank calls it; one all-reduce."""
        value = share.detach().to(self.job.mesh.device, torch.float64) * self.job.answers_for_rows
        dist.all_reduce(value)
        return float(value)


@dataclass(frozen=True, slots=True)
class _Measured:
    """A forward of mismatched rows."""

    recorder: "_Recorder"
    token_losses: Tensor
    """The cross entropies of this rank's rows."""
    kl: Tensor
    """The mean log-ratio over all ranks, 0 if it is less: 0-dim, requires grad."""
    rows: int
    """Rows of all ranks."""

    def beside(self, expected: Expected, by_kl: float) -> Expected:
        """Return the results of a step with this forward. `by_kl` is the derivative of the step's loss by `kl`."""
        margins = {f"{MISMATCHED}{name}": margin for name, margin in self.recorder.margins().items()}
        # The loss depends on these by their mean alone, on all of them equally.
        losses = self.token_losses.double().cpu()[: None if len(expected.token_losses) else 0]
        by_each = -by_kl / self.rows * bool(self.kl > 0)
        return replace(
            expected,
            forward=expected.forward.beside(self.recorder.record(), MISMATCHED),
            margins=expected.margins | margins,
            token_losses=torch.cat([expected.token_losses, losses]),
            token_weights=torch.cat([expected.token_weights, torch.full_like(losses, by_each)]),
        )


@dataclass(slots=True)
class _Recorder:
    """Records a forward of the unsharded model on this rank's samples, which may be none."""

    reference: Reference
    batch: unsharded.PaddedSamples
    samples: Sequence[PlacedSample]
    forced: Mapping[str, Tensor]
    """The experts that tokens must take, at all positions of the batch, by module."""
    choices: Choices = field(init=False)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    """The outputs of blocks and the logits, by name."""
    index: dict[str, Tensor] = field(default_factory=dict)
    """The experts that tokens took, by module."""

    def __post_init__(self) -> None:
        model, anatomy = self.reference.streamed.model, self.reference.job.setup.anatomy
        routers = {name: model.get_submodule(name) for name in anatomy.sorting_routers}
        self.choices = Choices(anatomy.experts, routers, self.batch.ids_BS.numel(), self.forced)

    def recording(self) -> AbstractContextManager[None]:
        modules, anatomy = dict(self.reference.streamed.model.named_modules()), self.reference.job.setup.anatomy
        return recording(modules, anatomy, self.outputs, self.index)

    def own(self, value: Tensor) -> Tensor:
        """Return the values of this rank's real tokens, `[T, X]`."""
        return self.batch.real_tokens(value)[: None if self.samples else 0]

    def record(self) -> ForwardRecord:
        return ForwardRecord(
            {name: kept_tokens(self.own(value)) for name, value in self.outputs.items()},
            {name: self.own(self.choices.own.get(name, chosen)).cpu() for name, chosen in self.index.items()},
        )

    def margins(self) -> dict[str, Tensor]:
        return {name: self.own(margin).squeeze(-1).cpu() for name, margin in self.choices.margins.items()}


class _GradientSums:
    """Sums gradients over ranks and stores the parts that this rank of the job holds."""

    def __init__(self, reference: Reference, whole: TakeWhole | None) -> None:
        self._answers, self._whole = reference.job.answers_for_rows, whole
        self._tied = {name for name, count in Counter(reference.streamed.names.values()).items() if count > 1}
        self._pending: dict[str, Tensor] = {}
        self.local = reference.local_parts()
        self.squares: dict[str, float] = {}

    def add(self, name: str, gradient: Tensor) -> None:
        """Sum the gradient of this rank's samples over all ranks. Collectives: every rank calls it; one all-reduce."""
        total = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        if not self._answers:
            total = torch.zeros_like(total)
        dist.all_reduce(total)
        if name in self._tied:  # a tied tensor gets one gradient from each unit that holds it
            self._pending[name] = self._pending[name] + total if name in self._pending else total
        else:
            self._done(name, total)

    def finish(self) -> None:
        """Store the gradients of tied tensors, which are complete after backward."""
        for name in list(self._pending):
            self._done(name, self._pending.pop(name))

    def _done(self, name: str, total: Tensor) -> None:
        self.squares[name] = float(total.double().square().sum())
        if self._whole is not None:
            self._whole(name, total)
        self.local.take(name, total)


def _of_rows(table: npt.NDArray[Any] | None, samples: Sequence[PlacedSample], device: torch.device) -> Tensor:
    """Return the entries of a data set's `table` for `samples`."""
    assert table is not None
    return torch.from_numpy(table[[sample.index for sample in samples]]).to(device)
