"""Compute the router losses over the global batch of an optimizer step: load balancing and z-loss, exact in every
layout.

The load-balancing loss multiplies two means over the whole step: the fraction of tokens that chose each expert, and the
mean probability. Gradients flow through the second alone, which is a sum over tokens: given the fractions, each rank
and micro-batch has a share of its own. So the fractions must be known before the first backward. With one micro-batch
per step its own forward gives them; with more, all of them first run once without gradients (a third of a forward and
backward; nothing when the loss is off). One small all-reduce per step joins the ranks. With several rounds by layer
these forwards draw attention dropout and router jitter in another order than the rounds: fractions are of other draws.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from expertmesh.config.errors import InputError
from expertmesh.experts.balance import (
    attached_balance,
    chosen_pairs,
    no_router_logits,
    probability_sums,
    squared_logsumexp,
)
from expertmesh.parallel.sequence import Batch, padded, sequence_share
from expertmesh.state.model_view import attach, mesh_of, sharded
from expertmesh.state.other_code import outside_router_losses
from expertmesh.step.base_model import real_tokens_here, run_base
from expertmesh.step.pipeline_schedule import StageOutput, run_pipeline


@contextmanager
def router_losses(model: nn.Module, micro_batches: Sequence[Batch]) -> Iterator["RouterLosses"]:
    """Collect the router losses of the micro-batches of one optimizer step; free where `moe` asks for none.

        with em.router_losses(model, micro_batches) as router_loss:
            for batch in micro_batches:
                loss = em.causal_lm_loss(model, batch, target_tokens=n)
                (loss + router_loss()).backward()

    With the auxiliary loss on and several micro-batches (or pipeline stages, which learn of each other's layers too
    late), each micro-batch first runs once without gradients, with the random numbers that it will train with.

    Args:
        micro_batches: This rank's, on its device, in the order in which they are trained; all ranks have equally many.

    Collectives: every rank calls it; one all-reduce of E + 2 numbers over all ranks, and those of the extra forwards.
    """
    losses = RouterLosses(model, micro_batches)
    if losses.balance.aux_loss_coef and (len(micro_batches) > 1 or sharded(model).pipeline is not None):
        losses.run_ahead(micro_batches)
    elif losses.balance.has_losses and sharded(model).pipeline is not None:
        losses.run_ahead([] if sharded(model).router_logits is not None else micro_batches)
    with losses.collecting():
        yield losses


class RouterLosses:
    """The router losses of one step.

    `aux_loss` and `z_loss` (0-dim, without their factors, detached) grow with each micro-batch; summed over all ranks
    they are the unsharded model's on the global batch.
    """

    def __init__(self, model: nn.Module, micro_batches: Sequence[Batch], layers: int | None = None) -> None:
        """Take this rank's micro-batches.

        Args:
            layers: By layer, the number of parts in which the logits of each micro-batch are given.
        """
        self.model = model
        self.balance = attached_balance(model)
        # Ranks whose stages add nothing have zeros on the same kind of device, so that all ranks can reduce them.
        device = micro_batches[0]["input_ids"].device if micro_batches else None
        self.aux_loss = self.z_loss = torch.zeros((), dtype=torch.float64, device=device)
        self._pipeline = sharded(model).pipeline
        local_stages = 1 if self._pipeline is None else len(self._pipeline.local_stages)
        self._left = len(micro_batches) * (layers or local_stages)
        self._at_once = self._pipeline is None and layers is None
        self._share_of_rows = sequence_share(model)
        self._real = [self._real_here(batch) for batch in micro_batches] if self.balance.has_losses else []
        self._step: _Step | None = None
        self._share: torch.Tensor | None = None

    def __call__(self) -> torch.Tensor:
        """Return this rank's share for the micro-batch that `causal_lm_loss` ran last, times the factors; add it to
        that loss.

        0-dim; zero when router losses are off. No communication.
        """
        if not self.balance.has_losses:
            return torch.zeros((), device=self.aux_loss.device)
        if self._share is None:
            raise InputError(
                "router_loss() belongs after a causal_lm_loss, once; none ran since the last call",
                key="moe.router-loss-order",
            )
        share, self._share = self._share, None
        return share

    def run_ahead(self, micro_batches: Sequence[Batch]) -> None:
        """Run each micro-batch forward once without gradients, for the step's fractions of tokens per expert.

        Collectives: those of the forwards, and one all-reduce.
        """
        device = mesh_of(self.model).device
        pairs_E, recorded = torch.zeros(self.balance.num_experts, dtype=torch.int64, device=device), 0
        devices = [] if device.type == "cpu" else [device]
        # Dropout draws here too; the forwards with gradients must draw what they would have without this.
        with torch.no_grad(), torch.random.fork_rng(devices, device_type=device.type):
            if self._pipeline is None:
                for batch, real_T in zip(micro_batches, self._real, strict=True):
                    _, _, logits = run_base(self.model, padded(batch, self._share_of_rows), router_logits=True)
                    pairs_E += self._pairs(logits, real_T)
                    recorded = len(logits)
            elif micro_batches:

                def add(output: StageOutput) -> None:
                    nonlocal recorded
                    pairs_E.add_(self._pairs(output.router_logits, self._real[output.number]))
                    recorded += len(output.router_logits) if output.number == 0 else 0

                run_pipeline(self.model, self._pipeline, micro_batches, add, router_logits=True)
                attach(self.model, router_logits=recorded)
            else:
                recorded = sharded(self.model).router_logits or 0
        self._step = self._join(pairs_E, recorded)

    def set_fractions(self, logits: Sequence[Sequence[torch.Tensor]]) -> None:
        """Set the step's fractions of tokens per expert, unless they are known.

        Args:
            logits: Router logits `[T, E]` of all layers, for each micro-batch of the step; for some of them without the
                auxiliary loss.

        Collectives: one all-reduce, or none.
        """
        if self._step is not None:
            return
        pairs = [self._pairs(*each) for each in zip(logits, self._real, strict=self.balance.aux_loss_coef != 0)]
        self._step = self._join(torch.stack(pairs).sum(dim=0), len(logits[0]))

    def add(self, logits: Sequence[torch.Tensor], batch: Batch) -> None:
        """Take the router logits `[T, E]` of a micro-batch's layers; `causal_lm_loss` calls it.

        Collectives: one all-reduce, in the first call of a step that was not counted.
        """
        if self._share is not None or not self._left:
            raise InputError(
                "router_losses: causal_lm_loss ran more often than there are micro-batches, or without router_loss() "
                "after it; add each micro-batch's share to its loss, once",
                key="moe.router-loss-order",
            )
        if self._at_once and not logits:
            raise no_router_logits(self.model, "there is a router loss", "gave no router logits")
        self._left -= 1
        real_T = self._real_here(batch)
        if self._step is None:
            self._step = self._join(self._pairs(logits, real_T), len(logits))
        rows, share = self._step.rows, torch.zeros((), device=real_T.device)
        if not logits:  # a stage or layer without MoE layers
            self._share = share
            return
        if self.balance.aux_loss_coef:
            # F_e is a count of the whole step without gradient, so the loss is linear in each micro-batch's sums.
            weight_E = self.balance.num_experts * self._step.pairs_E / rows / rows
            sums_E = torch.stack([probability_sums(logits_TE, real_T) for logits_TE in logits]).sum(dim=0)
            aux_loss = sums_E @ weight_E.to(sums_E.dtype)
            self.aux_loss = self.aux_loss + aux_loss.detach()
            share = share + self.balance.aux_loss_coef * aux_loss
        if self.balance.z_loss_coef:
            squares = torch.stack([squared_logsumexp(logits_TE, real_T) for logits_TE in logits]).sum()
            z_loss = squares / rows.to(squares.dtype)
            self.z_loss = self.z_loss + z_loss.detach()
            share = share + self.balance.z_loss_coef * z_loss
        self._share = share

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Give forwards inside the block these router losses; raises `InputError` at its end if a share is missing."""
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)
        # A share was never taken, or a micro-batch that was counted never came.
        if self.balance.has_losses and (self._share is not None or self._left):
            raise InputError(
                "router_losses: the step ended without the share of every micro-batch; run causal_lm_loss and add "
                "router_loss() for each of them",
                key="moe.router-loss-incomplete",
            )

    def _real_here(self, batch: Batch) -> torch.Tensor:
        """Return which of this rank's tokens are not padding, bool `[T]`."""
        batch = padded(batch, self._share_of_rows)
        real_BS = real_tokens_here(batch, self._share_of_rows)
        if real_BS is None:
            real_BS = self._share_of_rows.local(torch.ones_like(batch["input_ids"], dtype=torch.bool), 1)
        return real_BS.reshape(-1)

    def _pairs(self, logits: Sequence[torch.Tensor], real_T: torch.Tensor) -> torch.Tensor:
        """Return the chosen pairs of all layers together, `[E]`; zeros without the auxiliary loss."""
        if not self.balance.aux_loss_coef or not logits:
            return torch.zeros(self.balance.num_experts, dtype=torch.int64, device=real_T.device)
        return torch.stack([chosen_pairs(logits_TE, self.balance.top_k, real_T) for logits_TE in logits]).sum(dim=0)

    def _join(self, pairs_E: torch.Tensor, recorded: int) -> "_Step":
        """Sum over all ranks. Collectives: one all-reduce of E + 2 integers.

        Args:
            recorded: Router logits that a forward of the layers here gives.
        """
        # Integers: the sum is the same in any order, so every rank divides by the same bits.
        tokens = torch.stack([real_T.sum() for real_T in self._real]).sum()
        sums_E2 = torch.cat([pairs_E, tokens.to(pairs_E)[None], torch.full_like(pairs_E[:1], recorded)])
        dist.all_reduce(sums_E2)
        # Each stage counted its own layers, and the same tokens.
        layout = mesh_of(self.model).layout
        tokens, layers = sums_E2[-2].double() / layout.pp, sums_E2[-1].double() / layout.ranks_per_stage
        return _Step(sums_E2[:-2].double(), tokens * layers)


@dataclass(frozen=True, slots=True)
class _Step:
    """Counts of the whole step, over all ranks and micro-batches, in fp64."""

    pairs_E: torch.Tensor
    """Pairs of token and expert, all layers together."""
    rows: torch.Tensor
    """Rows of router logits of real tokens, all layers together: families record routers of attention, or not all."""


_active: ContextVar[RouterLosses | None] = ContextVar("expertmesh_router_losses", default=None)


def active_router_losses(model: nn.Module) -> RouterLosses | None:
    """Return where the router logits of the next forward go; None if nothing is to be done with them.

    Raises:
        InputError: `moe` asks for router losses and a forward with gradients is in no `router_losses`.
    """
    if not torch.is_grad_enabled() or not attached_balance(model).has_losses:
        return None
    losses = _active.get()
    if losses is None or losses.model is not model:
        raise outside_router_losses()
    return losses
