"""The causal language-model loss: a sum over targets divided by the targets of the whole optimizer step.

Dividing by the global count is what makes every gradient right for every layout, every accumulation count and
uneven batches: shares add up, and FSDP2 reduces by sums. The full logits never exist: the model's own head runs on
chunks of target tokens, gradients of a chunk are taken at once, and the chunk's logits are dropped.

    B rows, S positions, N target tokens here, C tokens of a chunk, H hidden, V vocabulary
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.utils.generic import ModelOutput

from expertmesh.config.errors import InputError
from expertmesh.distributed.sequence_collectives import gather
from expertmesh.parallel.pipeline import pipeline_of
from expertmesh.parallel.sequence import padded, sequence_share
from expertmesh.state.patching import exchanged
from expertmesh.step.base_model import base_name, head_of, run_base
from expertmesh.step.router_losses import active_router_losses
from expertmesh.step.vocabulary import SplitHead, vocabulary_share

IGNORED = -100
BaseOutput = Callable[..., ModelOutput]


def causal_lm_loss(
    model: nn.Module, batch: Mapping[str, torch.Tensor], *, target_tokens: int | torch.Tensor, chunk_tokens: int = 1024
) -> torch.Tensor:
    """This rank's share of the step's loss; the step's loss is the sum of all shares. 0-dim, fp32 (fp64 in fp64).

    `batch`: `input_ids` and `labels` `[B, S]` int64 (labels aligned with the inputs, -100 where there is no target;
    the shift happens here) and what else the model's forward takes (`attention_mask` or `position_ids`). `row_numbers`
    `[B]` int64 are for adapters' dropout: no two rows of a run have the same. `real_tokens` `[B, S]` bool says what
    is no padding, for counts of routing (default: `attention_mask`).
    `target_tokens`: targets of the whole optimizer step, over all data ranks and micro-batches. Every rank calls it
    as often as the others, with targets or without: the model's forward and backward are collective. Waits for the
    host once, to find the targets.
    """
    if isinstance(target_tokens, int) and target_tokens <= 0:
        raise InputError(
            f"target_tokens is {target_tokens}: a step without any target has no loss; check the labels",
            key="data.no-targets",
        )
    if pipeline_of(model) is not None:
        raise InputError(
            "causal_lm_loss computes the loss of one rank's whole model, and this one is cut into pipeline stages; use "
            "expertmesh.forward_backward(model, micro_batches, target_tokens=n), which works for every layout",
            key="layout.pp-needs-forward-backward",
        )
    router_losses = active_router_losses(model)
    batch = padded(batch, sequence_share(model))
    base, empty_logits, router_logits = run_base(model, batch, router_logits=router_losses is not None)
    if router_losses is not None:
        router_losses.add(router_logits, batch)
    return loss_of_base(model, base, empty_logits, batch["labels"], target_tokens, chunk_tokens)


def loss_of_base(
    model: nn.Module,
    base: ModelOutput,
    empty_logits: torch.Tensor,
    labels: torch.Tensor,
    target_tokens: int | torch.Tensor,
    chunk_tokens: int = 1024,
) -> torch.Tensor:
    """`causal_lm_loss` from what `run_base` returned; `labels` `[B, S]` are of whole, padded rows."""
    share, vocabulary = sequence_share(model), vocabulary_share(model)
    hidden_BSH = base["last_hidden_state"]
    if vocabulary is not None:
        # Each rank of the group has a part of the vocabulary for all positions, instead of all of it for its own.
        hidden_BSH = gather(hidden_BSH, 1, vocabulary.group)
    cut = share.own if vocabulary is None else share.of_context
    target_N, place_N = _targets(labels.to(hidden_BSH.device), cut)
    hidden_NH = hidden_BSH.reshape(-1, hidden_BSH.shape[-1]).index_select(0, place_N)
    others = {key: value for key, value in base.items() if key != "last_hidden_state"}
    output = partial(type(base), **others)
    training = torch.is_grad_enabled()
    if not training and isinstance(model, FSDPModule):
        model.unshard()  # the root was resharded after its forward; the head runs after it
    split = None if vocabulary is None else vocabulary.split(head_of(model))
    parameters = [p if split is None else split.of(p) for p in _head_parameters(model)]
    total = _HeadLoss.apply(hidden_NH, target_N, model, output, chunk_tokens, training, split, *parameters)
    # The root's output joins the graph (adding zero, from zero logits), so that FSDP2's root hook runs in backward.
    loss: torch.Tensor = (total + empty_logits.sum().to(total.dtype)) / target_tokens
    if not training and isinstance(model, FSDPModule):
        model.reshard()
    return loss


def count_targets(labels: torch.Tensor) -> int:
    """Targets in `labels` `[B, S]` after the shift: the first position of a row predicts nothing."""
    return int((labels[:, 1:] != IGNORED).sum())


def _targets(
    labels: torch.Tensor, cut: Callable[[torch.Tensor, int], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The target tokens of the positions that `cut` takes out of all, and the flat positions that predict them."""
    # Shifted before they are cut: the last position here predicts the first token of the next rank's.
    following = cut(F.pad(labels[:, 1:], (0, 1), value=IGNORED), 1).reshape(-1)
    place_N = (following != IGNORED).nonzero().squeeze(1)
    return following.index_select(0, place_N), place_N


def _head_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Everything beside the base model, and the output embedding even when it is tied into the base."""
    base = base_name(model)
    parent = base.rpartition(".")[0]
    within, prefix = f"{parent}." if parent else "", f"{base}."
    outside = [p for name, p in model.named_parameters() if name.startswith(within) and not name.startswith(prefix)]
    head = head_of(model)
    return list(dict.fromkeys([*outside, *(head.parameters() if head is not None else [])]))


class _HeadLoss(torch.autograd.Function):
    """Summed cross-entropy over target tokens; gradients are computed chunk by chunk in forward and kept."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        target_N: torch.Tensor,
        model: nn.Module,
        output: BaseOutput,
        chunk: int,
        training: bool,
        split: SplitHead | None,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        wanted = [parameter for parameter in parameters if parameter.requires_grad]
        wide = torch.float64 if hidden_NH.dtype == torch.float64 else torch.float32
        total = torch.zeros((), dtype=wide, device=hidden_NH.device)
        grad_hidden_NH = torch.zeros_like(hidden_NH) if training else None
        # Chunks are summed in fp32: in bf16 each addition would round the head's gradient again.
        sums = [torch.zeros_like(parameter, dtype=wide) for parameter in wanted] if training else []
        for start in range(0, hidden_NH.shape[0], chunk):
            part = slice(start, start + chunk)
            with torch.set_grad_enabled(training), nullcontext() if split is None else split.computing():
                hidden_CH = hidden_NH[part].detach().requires_grad_(training)
                logits_CV = head_logits(model, hidden_CH, output)
                # The wide copy has no name: it is gone before backward, as cross-entropy keeps its own.
                if split is None:
                    loss = F.cross_entropy(logits_CV.to(wide), target_N[part], reduction="sum")
                else:
                    loss = split.share.cross_entropy(logits_CV.to(wide), target_N[part])
                total += loss.detach()
            if grad_hidden_NH is not None:
                grad_hidden_NH[part], *grads = torch.autograd.grad(loss, [hidden_CH, *wanted])
                if sums:  # a frozen head has none
                    torch._foreach_add_(sums, grads)
        if training:
            ctx.save_for_backward(grad_hidden_NH, *(s.to(p.dtype) for s, p in zip(sums, wanted, strict=True)))
            ctx.wanted = [parameter.requires_grad for parameter in parameters]
        # Every rank of a tp group has the whole loss of the group's positions, and shares have to add up to it.
        return total if split is None else total / split.share.ranks

    @staticmethod
    def backward(ctx: Any, grad_total: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden_NH, *sums = ctx.saved_tensors
        scaled = iter([s * grad_total.to(s.dtype) for s in sums])
        of_parameters = [next(scaled) if wanted else None for wanted in ctx.wanted]
        return grad_hidden_NH * grad_total.to(grad_hidden_NH.dtype), *[None] * 6, *of_parameters


def head_logits(model: nn.Module, hidden_CH: torch.Tensor, output: BaseOutput = MoeModelOutputWithPast) -> torch.Tensor:
    """Logits `[C, V]` by the model's own forward code after its base model, so scales, caps and biases are exact.

    `output` makes the base model's output from hidden states `[1, C, H]`; families have output classes of their own.
    """
    with _base_returning(model, output(last_hidden_state=hidden_CH.unsqueeze(0))):
        logits: torch.Tensor = model.forward(inputs_embeds=hidden_CH.unsqueeze(0), use_cache=False).logits
    return logits.squeeze(0)


class _Returns(nn.Module):
    """Stands in for a base model whose output is known."""

    def __init__(self, output: ModelOutput) -> None:
        super().__init__()
        self.output = output

    def forward(self, *args: Any, **kwargs: Any) -> ModelOutput:
        return self.output


def _base_returning(model: nn.Module, output: ModelOutput) -> AbstractContextManager[None]:
    parent, _, name = base_name(model).rpartition(".")
    return exchanged(model.get_submodule(parent)._modules, {name: _Returns(output)})
