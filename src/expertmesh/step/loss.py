"""Compute this rank's share of a step's loss for one micro-batch, by the objective.

An objective is a sum over all ranks and micro-batches that is divided by a count of the whole optimizer step
(objectives.py has those of responses and of a teacher). So shares add up to the step's value, and gradients are right
for every layout, accumulation and uneven batches. The full logits never exist: the model's own head runs on chunks of
target tokens, whose gradients are computed at once. Under tp each rank has the logits of its rows of the output
embedding (vocabulary.py); losses are equal on all of them, and what one rank reports is its share. Gradients of the
logits are each rank's own part, those of hidden states and of unsplit parameters are partial sums
(parallel/sequence.py).

    B rows, S positions, N target tokens here, C tokens of a chunk, H hidden, V vocabulary, W rows of it on this rank;
    F figures
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.utils.generic import ModelOutput

from expertmesh.anatomy import head_of, is_classifier
from expertmesh.compat import add_to_all_, child_slots, parameter_slots
from expertmesh.config.errors import InputError
from expertmesh.distributed.sequence_collectives import gather
from expertmesh.experts.micro_batch import real_tokens_of
from expertmesh.parallel.pipeline import not_callable
from expertmesh.parallel.sequence import SequenceShare, padded, sequence_share
from expertmesh.state.model_view import mesh_of, sharded
from expertmesh.state.other_code import refuse_media_on_some_ranks
from expertmesh.state.patching import exchanged
from expertmesh.step.base_model import base_name, model_inputs, padding_of, run_base
from expertmesh.step.router_losses import active_router_losses
from expertmesh.step.vocabulary import SplitHead, divergence, vocabulary_share

IGNORED = -100
BaseOutput = Callable[..., ModelOutput]


@dataclass(frozen=True, slots=True)
class Distilling:
    """The comparison of a model's next-token probabilities with a teacher's."""

    temperature: float = 1.0
    """Divisor of both models' logits."""
    reverse: bool = False
    """Take KL(model || teacher), not KL(teacher || model)."""
    sft_weight: float = 0.0
    """Factor of the cross-entropy that is added."""


@dataclass(frozen=True, slots=True)
class Term:
    """This rank's share of a micro-batch; the shares are summed over the whole step."""

    loss: torch.Tensor
    """0-dim."""
    figures_F: torch.Tensor
    """float64 without graph, in the order of the objective's `figures`."""


@dataclass(frozen=True, slots=True)
class Objective(ABC):
    """A sum over all ranks and micro-batches of a step."""

    count: int | torch.Tensor = 1
    """Number of what `over` names in the whole step, by which the loss is divided."""
    figures: ClassVar[tuple[str, ...]] = ()
    """Names of the values that it reports beside the loss."""
    over: ClassVar[str] = "target tokens"
    """Name of what `count` counts."""

    @abstractmethod
    def term(self, losses: "TokenLosses", batch: dict[str, torch.Tensor]) -> Term:
        """Return this rank's share of a micro-batch. Collectives: those of what it asks of `losses`."""


def causal_lm_loss(
    model: nn.Module, batch: Mapping[str, torch.Tensor], *, target_tokens: int | torch.Tensor, chunk_tokens: int = 1024
) -> torch.Tensor:
    """Return this rank's share of the step's loss; the step's loss is the sum of all shares.

    Args:
        batch: `input_ids` and `labels`, `[B, S]` int64, and what else the model's forward takes (`attention_mask` or
            `position_ids`). Labels are aligned with the inputs, with -100 where there is no target; they are shifted
            here; a classifier has one for each row, `[B]`. `row_numbers`, `[B]` int64, are for the dropout of adapters:
            no two rows of a run share one.
            `real_tokens`, `[B, S]` bool, marks what is not padding, for counts of routing (default: `attention_mask`).
            `routes`, `[B, S, MoE layers, top-k]` int32, are the experts that compute, by the model's numbers, -1 where
            a token chooses itself; scores stay live. All ranks give them, or none.
        target_tokens: The targets of the whole optimizer step, over all data ranks and micro-batches.
        chunk_tokens: How many target tokens get logits at a time.

    Returns:
        A 0-dim fp32 tensor (fp64 in fp64). The host waits for the device once, for the number of targets.

    Raises:
        InputError: Labels do not fit the model; of a model with a vision tower, only some ranks give images
            (`pixel_values` and the like); routes have a wrong shape or expert, or the family cannot replay them.

    Collectives: every rank calls it as often as the others, with or without targets: the model's forward and backward
    are collective. A model with a vision tower issues one small all-reduce first, and so do routes.
    """
    refuse_counts(target_tokens, chunk_tokens)
    if sharded(model).pipeline is not None:
        raise not_callable("causal_lm_loss computes the loss of a whole model")
    refuse_media_on_some_ranks(model, [model_inputs(batch)])
    refuse_labels(model, [batch])
    return loss_of_batch(model, batch, CrossEntropy(target_tokens), chunk_tokens).loss


def refuse_counts(target_tokens: int | torch.Tensor, chunk_tokens: int) -> None:
    """Raise `InputError` for a step without targets, or chunks of none.

    A count of targets on the device is not read, which would wait for it.
    """
    if chunk_tokens < 1:
        raise InputError(
            f"chunk_tokens is {chunk_tokens}: no target would get logits; give at least 1", key="config.wrong-value"
        )
    if isinstance(target_tokens, int) and target_tokens <= 0:
        raise InputError(
            f"target_tokens is {target_tokens}: a step without any target has no loss; check the labels",
            key="data.step-without-targets",
        )


def refuse_labels(model: nn.Module, batches: Sequence[Mapping[str, torch.Tensor]]) -> None:
    """Raise `InputError` for labels, or a mark of real tokens, of other tokens or rows than `input_ids` has."""
    if is_reward_model(model):
        raise InputError(
            f"{type(model).__name__} has one label, a reward, of which labels give no cross-entropy; train it by "
            "`expertmesh train` with objective.name reward, or by em.trainer(RewardTrainer)",
            key="model.one-label",
        )
    for batch in batches:
        shape = list(batch["input_ids"].shape)
        labels = (shape[:1], "[B] int64") if is_classifier(model) else (shape, "[B, S] int64")
        for key, (its_shape, wanted) in {"labels": labels, "real_tokens": (shape, "[B, S] bool")}.items():
            given = batch.get(key)
            if given is not None and (list(given.shape) != its_shape or given.is_floating_point()):
                raise InputError(
                    f"{key} {list(given.shape)} of {given.dtype} do not fit input_ids {shape} of "
                    f"{type(model).__name__}; give {wanted}",
                    key="data.batch-shape",
                )


def loss_of_batch(
    model: nn.Module, batch: Mapping[str, torch.Tensor], objective: Objective, chunk_tokens: int = 1024
) -> Term:
    """Do what `causal_lm_loss` does, for any objective; the model has no pipeline stages."""
    router_losses = active_router_losses(model)
    batch = padded(batch, sequence_share(model))
    base, empty_logits, router_logits = run_base(model, batch, router_logits=router_losses is not None)
    if router_losses is not None:
        router_losses.add(router_logits, batch)
    return loss_of_base(model, base, empty_logits, batch, objective, chunk_tokens)


def loss_of_base(
    model: nn.Module,
    base: ModelOutput,
    empty_logits: torch.Tensor,
    batch: Mapping[str, torch.Tensor],
    objective: Objective,
    chunk_tokens: int = 1024,
) -> Term:
    """Return the term that `loss_of_batch` returns, from the results of `run_base`; `batch` is full and padded."""
    share, vocabulary = sequence_share(model), vocabulary_share(model, empty_logits)
    hidden_BSH = base["last_hidden_state"]
    if vocabulary is not None:
        # Each rank of the tp group has a part of the vocabulary for all positions, instead of all of it for its own.
        hidden_BSH = gather(hidden_BSH, 1, vocabulary.group)
    batch = {key: tensor.to(hidden_BSH.device) for key, tensor in batch.items()}
    if is_classifier(model):
        label_BS = _labels_of_last_tokens(model, batch, share)
    else:
        label_BS = _next_labels(batch["labels"], share.local if vocabulary is None else share.of_context)
    target_N, place_N = _targets(label_BS)
    others = {key: value for key, value in base.items() if key != "last_hidden_state"}
    training = torch.is_grad_enabled()
    if not training and isinstance(model, FSDPModule):
        model.unshard()  # the root was resharded after its forward; the head runs after it
    split = None if vocabulary is None else vocabulary.split(head_of(model))
    head = _Head(model, partial(type(base), **others), split, chunk_tokens)
    # Only positions with a target get logits: prompts and padding cost no product with the vocabulary.
    hidden_NH = hidden_BSH.reshape(-1, hidden_BSH.shape[-1]).index_select(0, place_N)
    losses = TokenLosses(head, hidden_NH, target_N, place_N // hidden_BSH.shape[1], len(hidden_BSH), share)
    term = objective.term(losses, batch)
    if not training and isinstance(model, FSDPModule):
        model.reshard()
    # Add the root's empty output, which is zero, so that it is in the graph and FSDP2's root hook runs in backward.
    return replace(term, loss=term.loss + empty_logits.sum().to(term.loss.dtype))


def count_targets(labels: torch.Tensor) -> int:
    """Count the targets in `labels` `[B, S]` after the shift: the first position of a row predicts nothing."""
    return int((labels[:, 1:] != IGNORED).sum())


def _targets(label_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the labels that are targets, and their flat positions."""
    place_N = (label_BS.reshape(-1) != IGNORED).nonzero().squeeze(1)
    return label_BS.reshape(-1).index_select(0, place_N), place_N


def _next_labels(labels_BS: torch.Tensor, cut: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
    """Return the label that each of this rank's positions predicts; `cut` takes this rank's positions."""
    # Shift before cutting: the last position of this rank predicts the first token of the next rank.
    return cut(F.pad(labels_BS[:, 1:], (0, 1), value=IGNORED), 1)


def _labels_of_last_tokens(model: nn.Module, batch: Mapping[str, torch.Tensor], share: SequenceShare) -> torch.Tensor:
    """Return each row's label at its last token, by the rule of transformers' class, among this rank's positions.

    Other positions are `IGNORED`. Labels of tokens, as those of pairs are, count as 0.
    """
    ids_BS, labels, pad = batch["input_ids"], batch["labels"], padding_of(model)
    real_BS = torch.ones_like(ids_BS, dtype=torch.bool) if pad is None else ids_BS != pad
    marked_BS = real_tokens_of(batch)
    if marked_BS is not None:
        real_BS = real_BS & marked_BS
    label_B = labels if labels.dim() == 1 else torch.zeros_like(ids_BS[:, 0])
    last_B1 = (torch.arange(1, ids_BS.shape[1] + 1, device=ids_BS.device) * real_BS).argmax(-1, keepdim=True)
    return share.local(torch.full_like(ids_BS, IGNORED).scatter(1, last_B1, label_B.unsqueeze(1)), 1)


class CrossEntropy(Objective):
    """The sum of the losses of target tokens, over the targets of the whole step."""

    def term(self, losses: "TokenLosses", batch: dict[str, torch.Tensor]) -> Term:
        total = losses.total() / self.count
        return Term(total, total.new_zeros(0, dtype=torch.float64))


class EvaluatedCrossEntropy(Objective):
    """`CrossEntropy` without gradients, and the share of targets with the largest logit."""

    figures = ("token_accuracy",)

    def term(self, losses: "TokenLosses", batch: dict[str, torch.Tensor]) -> Term:
        total, hits = losses.total_and_hits()
        return Term(total / self.count, hits.double().view(1) / self.count)


class LogProbabilities(Objective):
    """No objective: `figures_F` is the log-probability of each row's targets, `[B]`, on every rank that shares
    the row.
    """

    def term(self, losses: "TokenLosses", batch: dict[str, torch.Tensor]) -> Term:
        by_row_B = -losses.by_row()
        return Term(by_row_B.new_zeros(()), by_row_B)


class NextWords(Objective):
    """No objective: `figures_F` is the token that the model would choose at each row's only target, `[B]`, on every
    rank that shares the row.
    """

    def term(self, losses: "TokenLosses", batch: dict[str, torch.Tensor]) -> Term:
        word_B = losses.largest_by_row()
        return Term(word_B.new_zeros(()), word_B)


@dataclass(frozen=True, slots=True)
class _Head:
    """The modules behind the base model."""

    model: nn.Module
    """The model, whose own code computes the logits."""
    output: BaseOutput
    """Makes the base model's output from hidden states."""
    split: SplitHead | None
    """This rank's rows of the head under tp; None without."""
    chunk: int
    """Targets whose logits are computed together."""

    def parameters(self) -> list[torch.Tensor]:
        """Return everything beside the base model, and the output embedding even if it is tied into the base."""
        base = base_name(self.model)
        parent = base.rpartition(".")[0]
        within, prefix = f"{parent}." if parent else "", f"{base}."
        named = self.model.named_parameters()
        outside = [p for name, p in named if name.startswith(within) and not name.startswith(prefix)]
        head = head_of(self.model)
        found = dict.fromkeys([*outside, *(head.parameters() if head is not None else [])])
        return [p if self.split is None else self.split.of(p) for p in found]

    def losses(self, hidden_CH: torch.Tensor, target_C: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropies of one chunk, `[C]`; minus the rewards of a reward model.

        Collectives: two small all-reduces over the tp group.
        """
        if is_reward_model(self.model):
            return -self.logits(hidden_CH).squeeze(-1).to(_wide(hidden_CH))
        return self.cross_entropy(self.logits(hidden_CH), target_C)

    def logits(self, hidden_CH: torch.Tensor) -> torch.Tensor:
        """Return the logits of this rank's rows of the head, `[C, V]` or `[C, W]`. Collectives: none."""
        # The head computes with this rank's rows; its code and name stay.
        with nullcontext() if self.split is None else exchanged(parameter_slots(self.split.head), self.split.rows):
            return head_logits(self.model, hidden_CH, self.output)

    def distilled(
        self, hidden_CH: torch.Tensor, target_C: torch.Tensor, teacher_CW: torch.Tensor, options: Distilling
    ) -> torch.Tensor:
        """Return `TokenLosses.distilled` of each target, `[C]`. Collectives: as there, over the tp group."""
        logits_CW = self.logits(hidden_CH).to(_wide(hidden_CH))
        if self.split is not None:
            self.split.share.refuse_other_rows(teacher_CW)
            self.split.share.refuse_other_rows(logits_CW)
        loss_C = divergence(
            logits_CW,
            teacher_CW,
            temperature=options.temperature,
            reverse=options.reverse,
            group=None if self.split is None else self.split.share.group,
        )
        if not options.sft_weight:
            return loss_C
        return loss_C + options.sft_weight * self.cross_entropy(logits_CW, target_C)

    @contextmanager
    def gathered(self) -> Iterator["_Head"]:
        """Yield the head of a model that is not in a step, with its parameters gathered inside the block.

        Collectives: every rank that shares the root calls it; at most one all-gather.
        """
        root = self.model if isinstance(self.model, FSDPModule) else None
        if root is not None:
            root.unshard()
        try:
            # Views of the rows as they are now: gathering may have made other tensors.
            yield self if self.split is None else replace(self, split=self.split.share.split(head_of(self.model)))
        finally:
            if root is not None:
                root.reshard()

    def largest(self, logits_CV: torch.Tensor) -> torch.Tensor:
        """Return the first token with the largest logit, `[C]`. Collectives: two small all-reduces over the tp
        group.
        """
        return logits_CV.argmax(-1) if self.split is None else self.split.share.argmax(logits_CV)

    def cross_entropy(self, logits_CV: torch.Tensor, target_C: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropies of logits in any dtype, `[C]`. Collectives: as `losses`."""
        # The wide copy is not named, so that it is freed before backward: cross-entropy keeps its own.
        if self.split is None:
            return F.cross_entropy(logits_CV.to(_wide(logits_CV)), target_C, reduction="none")
        return self.split.share.cross_entropy(logits_CV.to(_wide(logits_CV)), target_C)


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """The cross-entropies of one micro-batch's target tokens on this rank, computed on request.

    Of a classifier the targets are the rows' labels. A reward model has in their place minus the reward of each row.
    Ranks that share rows (cp × tp) have some of the positions each. `total` and `distilled` have gradients where they
    are enabled; the others have none.
    """

    head: _Head
    """The modules that compute logits."""
    hidden_NH: torch.Tensor
    """Hidden states that predict the targets."""
    target_N: torch.Tensor
    """Token ids of the targets."""
    row_N: torch.Tensor
    """The row of each target in the micro-batch."""
    rows: int
    """Rows of the micro-batch."""
    share: SequenceShare
    """This rank's part of the positions."""

    @property
    def ranks(self) -> int:
        """The number of ranks that share a row."""
        return self.share.parts

    def total(self, weight_B: torch.Tensor | None = None) -> torch.Tensor:
        """Return this rank's share of their sum, each times the weight of its row: 0-dim; weights are constants.

        Collectives: every rank of a tp group calls it; two small all-reduces per chunk.
        """
        weight_N = None if weight_B is None else weight_B.index_select(0, self.row_N)
        return self._sum(lambda hidden_CH, part: self.head.losses(hidden_CH, self.target_N[part]), weight_N)

    def distilled(self, teacher: "TokenLosses", options: Distilling) -> torch.Tensor:
        """Return this rank's share of the sum of temperature² · KL over targets, with the cross-entropies that
        `options` add: 0-dim.

        Args:
            teacher: Another model's for the same targets, on the same ranks.

        Collectives: every rank that shares the rows calls it; one all-gather of the teacher's root at most, and
            seven small all-reduces per chunk over the tp group.
        """
        assert len(teacher.hidden_NH) == len(self.hidden_NH), "the teacher has run on other rows"
        with teacher.head.gathered() as teacher_head:

            def losses(hidden_CH: torch.Tensor, part: slice) -> torch.Tensor:
                with torch.no_grad():
                    teacher_CW = teacher_head.logits(teacher.hidden_NH[part])
                return self.head.distilled(hidden_CH, self.target_N[part], teacher_CW, options)

            return self._sum(losses)

    def _sum(self, losses: "_LossesOfChunk", weight_N: torch.Tensor | None = None) -> torch.Tensor:
        total: torch.Tensor = _HeadLoss.apply(
            self.hidden_NH, losses, weight_N, self.head, torch.is_grad_enabled(), *self.head.parameters()
        )
        return total

    @torch.no_grad()
    def total_and_hits(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `total`, and this rank's share of how many targets have the largest logit.

        Collectives: as `total`, and two more all-reduces per chunk.
        """
        total = torch.zeros((), dtype=_wide(self.hidden_NH), device=self.hidden_NH.device)
        hits = torch.zeros((), dtype=torch.float64, device=self.hidden_NH.device)
        for part in _chunks(self.hidden_NH, self.head.chunk):
            logits_CV, target_C = self.head.logits(self.hidden_NH[part]), self.target_N[part]
            total += self.head.cross_entropy(logits_CV, target_C).sum()
            hits += (self.head.largest(logits_CV) == target_C).sum()
        # Every rank of a tp group has those of the group's positions.
        ranks = 1 if self.head.split is None else self.head.split.share.ranks
        return total / ranks, hits / ranks

    @torch.no_grad()
    def by_row(self) -> torch.Tensor:
        """Return the sum over each row, of all ranks that share it: `[B]` float64.

        Collectives: every rank that shares the row calls it; one all-reduce over cp, and those of `total`.
        """
        return self._sums_by_row(lambda part: self.head.losses(self.hidden_NH[part], self.target_N[part]))

    @torch.no_grad()
    def largest_by_row(self) -> torch.Tensor:
        """Return the token with the largest logit at the target of each row, `[B]`; each row has one target.

        Collectives: as `by_row`.
        """
        return self._sums_by_row(lambda part: self.head.largest(self.head.logits(self.hidden_NH[part])))

    def _sums_by_row(self, values: Callable[[slice], torch.Tensor]) -> torch.Tensor:
        sums_B = torch.zeros(self.rows, dtype=torch.float64, device=self.hidden_NH.device)
        for part in _chunks(self.hidden_NH, self.head.chunk):
            sums_B.index_add_(0, self.row_N[part], values(part).double())
        # A row is cut over cp, and over tp unless every rank has had the logits of all its positions.
        for axis, size in (("cp", self.share.cp), ("tp", self.share.tp if self.head.split is None else 1)):
            if size > 1:
                dist.all_reduce(sums_B, group=mesh_of(self.head.model).dense.get_group(axis))
        return sums_B


def _chunks(hidden_NH: torch.Tensor, chunk: int) -> Iterator[slice]:
    """Yield the slices of at most `chunk` targets; none without targets."""
    return (slice(start, start + chunk) for start in range(0, len(hidden_NH), chunk))


# Returns the losses `[C]` of the targets in a slice of all, by their hidden states `[C, H]`.
_LossesOfChunk = Callable[[torch.Tensor, slice], torch.Tensor]


class _HeadLoss(torch.autograd.Function):
    """Sum the losses of target tokens, weighted or not. Forward computes the gradients chunk by chunk and keeps
    them for backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        losses: _LossesOfChunk,
        weight_N: torch.Tensor | None,
        head: _Head,
        training: bool,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        wanted = [parameter for parameter in parameters if parameter.requires_grad]
        wide = _wide(hidden_NH)
        total = torch.zeros((), dtype=wide, device=hidden_NH.device)
        grad_hidden_NH = torch.zeros_like(hidden_NH) if training else None
        # Chunks are summed in fp32: in bf16 each addition would round the head's gradient again.
        sums = [torch.zeros_like(parameter, dtype=wide) for parameter in wanted] if training else []
        for part in _chunks(hidden_NH, head.chunk):
            with torch.set_grad_enabled(training):
                hidden_CH = hidden_NH[part].detach().requires_grad_(training)
                losses_C = losses(hidden_CH, part)
                loss = losses_C.sum() if weight_N is None else losses_C @ weight_N[part].to(wide)
                total += loss.detach()
            if grad_hidden_NH is not None:
                grad_hidden_NH[part], *grads = torch.autograd.grad(loss, [hidden_CH, *wanted])
                if sums:  # a frozen head has none
                    add_to_all_(sums, grads)
        if training:
            ctx.save_for_backward(grad_hidden_NH, *(s.to(p.dtype) for s, p in zip(sums, wanted, strict=True)))
            ctx.wanted = [parameter.requires_grad for parameter in parameters]
        # Every rank of a tp group has the full loss of the group's positions; shares have to add up to it.
        return total if head.split is None else total / head.split.share.ranks

    @staticmethod
    def backward(ctx: Any, grad_total: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden_NH, *sums = ctx.saved_tensors
        scaled = iter([s * grad_total.to(s.dtype) for s in sums])
        of_parameters = [next(scaled) if wanted else None for wanted in ctx.wanted]
        return grad_hidden_NH * grad_total.to(grad_hidden_NH.dtype), *[None] * 4, *of_parameters


def _wide(values: torch.Tensor) -> torch.dtype:
    """Return the dtype of losses and their sums: in bf16 a sum over a vocabulary has two digits."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def head_logits(model: nn.Module, hidden_CH: torch.Tensor, output: BaseOutput = MoeModelOutputWithPast) -> torch.Tensor:
    """Compute logits `[C, V]` by the model's own code behind its base model, so scales, caps and biases are exact.

    `output` makes the base model's output from hidden states `[1, C, H]`; families have output classes of their own.
    A classifier's class has nothing behind its head but the choice of a position.
    """
    if is_classifier(model):
        of_classes: torch.Tensor = head_of(model).forward(hidden_CH)
        return of_classes
    parent, _, name = base_name(model).rpartition(".")
    base = _Returns(output(last_hidden_state=hidden_CH.unsqueeze(0)))
    with exchanged(child_slots(model.get_submodule(parent)), {name: base}):
        logits: torch.Tensor = model.forward(inputs_embeds=hidden_CH.unsqueeze(0), use_cache=False).logits
    return logits.squeeze(0)


def is_reward_model(model: nn.Module) -> bool:
    """Return whether the model gives each row one number."""
    config: Any = model.config
    return is_classifier(model) and int(config.num_labels) == 1


class _Returns(nn.Module):
    """A replacement for the base model that returns a known output."""

    def __init__(self, output: ModelOutput) -> None:
        super().__init__()
        self.output = output

    def forward(self, *args: Any, **kwargs: Any) -> ModelOutput:
        return self.output
