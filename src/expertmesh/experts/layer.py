"""Run what a Hugging Face model calls as `experts(hidden_states, top_k_index, top_k_weights)`.

One forward of `ExpertLayer`, from the router's choice to the block's next line:

    0   enter     transformers calls `experts_forward` for `experts(...)`. `forward_counted` counts the tokens of each
                  expert (training, first run only), and runs `forward` or takes the result that selective
                  checkpointing has of the first run.
    1   slots     Translate expert ids to slots, where experts are placed or copied.
    2a  dispatch  Send each token once to each rank that holds any of its experts. A shared expert may compute while
                  the rows are in flight.
    2b  experts   Compute this rank's experts on the rows received; sum the weighted pairs of each row.
    2c  combine   Return one row per token and rank; sum them on the token's rank.
    3   shared    The model calls its shared expert, and gets the result of 2a.

install.py puts the layer into a model. Router, shared experts and block stay the model's own code.

`Copies` holds copies of other ranks' experts beside the local ones, so that ranks share their tokens (`moe.replicas`).
Copied experts are frozen: their weights are fetched once from the ranks that own them. Adapters on them train: a step
exchanges those of copied experts before its first forward, and at its end sends the gradients of the copies to the
owners, which sum them (`copies_of_step`); a forward outside a step does so for itself. Files, checkpoints and hashes
contain no copies.

    T tokens here, K top-k, H hidden, R rows and P pairs received, E experts, L experts of this rank; a trailing 1 is a
    dim of size 1
    of copies: L local experts of a rank, C copies beside them, S = L + C slots, X experts that this rank sends,
    F numbers of an expert, M most ranks that hold an expert
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import profiler
from torch.distributed.tensor import DTensor

from expertmesh.anatomy import ExpertsSpec
from expertmesh.compat import change_count, is_profiling, storage_key
from expertmesh.distributed.collectives import all_to_all
from expertmesh.experts.activation_checkpointing import computed_once, confirm_choice, is_recomputing
from expertmesh.experts.dispatch import AllToAllDispatcher, Dispatcher
from expertmesh.experts.expert_mlp import expert_mlp, normed_expert_mlp
from expertmesh.experts.lora_state import running_adapters_of
from expertmesh.experts.micro_batch import real_tokens
from expertmesh.experts.mlp_spec import Adapter, Adapters, ExpertMlpSpec, ExpertWeights
from expertmesh.experts.pairs import Segments, count_pairs, count_together, segment_sum, segments_of, sorted_choice
from expertmesh.experts.placement import Copied, slots_from
from expertmesh.io.boxes import inverse
from expertmesh.state.model_view import module_state, sharded, stage_names
from expertmesh.state.packed import PackedTensor, stored
from expertmesh.state.patching import replace_forward, set_at
from expertmesh.state.shards import local_tensor, placed_like, to_local


def experts_forward(
    experts: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute what transformers calls as `experts(...)`: step 0. Collectives: as `ExpertLayer.forward`."""
    real_T = real_tokens(len(top_k_index))
    return layer_of(experts).forward_counted(experts, hidden_states, top_k_index, top_k_weights, real_T)


@dataclass(eq=False)
class TokensPerExpert:
    """A running count of tokens per expert, on the device."""

    counts_E: torch.Tensor | None = None
    """int64; None if nothing was counted since the last `pop`."""

    def add(self, tokens_E: torch.Tensor) -> None:
        self.counts_E = tokens_E if self.counts_E is None else self.counts_E + tokens_E

    def pop(self) -> torch.Tensor | None:
        """Return the counts since the last call, and restart from zero."""
        counts_E, self.counts_E = self.counts_E, None
        return counts_E


@dataclass(eq=False)
class ExpertLayer:
    """The running part of one experts module: its dispatcher and its MLP."""

    spec: ExpertsSpec
    """The layout of the module's parameters."""
    dispatcher: Dispatcher
    """Steps 2a and 2c."""
    mlp: ExpertMlpSpec
    """Step 2b."""
    dtype: torch.dtype
    """The dtype in which the experts compute."""
    expert_L: torch.Tensor
    """The numbers in the model of the experts that this rank holds, `[L]` int64; `[S]` with copies behind its own."""
    slot_E: torch.Tensor | None = None
    """The slot of each expert among those of all EP ranks, int64; None if that is its number, or with copies."""
    copies: "Copies | None" = None
    """The copies of other ranks' experts on this rank, which has slots for them behind the local experts'."""
    shared: "SharedExpert | None" = None
    """The shared expert that computes during the dispatch."""
    tokens_per_expert: TokensPerExpert = field(default_factory=TokensPerExpert)
    """Real tokens that this rank's router sent to each expert since the last `pop`, in training only; recomputation
    does not count again."""
    step_tokens_per_expert: TokensPerExpert | None = None
    """The same since the last `update_router_bias`; None where no bias moves."""
    together_EE: torch.Tensor | None = None
    """Real tokens that chose both of two experts, int64, counted where it is given; its diagonal is tokens of one."""

    def forward_counted(
        self,
        experts: nn.Module,
        hidden: torch.Tensor,
        index_TK: torch.Tensor,
        weight_TK: torch.Tensor,
        real_T: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run `forward`, count its real tokens (`real_T` None: all), and do what activation checkpointing asks for.

        Returns the shape of `hidden`. Collectives: as `forward`.
        """
        confirm_choice(index_TK)
        # A forward without gradients counts for a router loss; the same tokens come again with gradients.
        trains = experts.training and torch.is_grad_enabled() and not is_recomputing()
        if self.together_EE is not None:
            self.together_EE += count_together(index_TK, self.spec.num_experts, real_T)
        if trains:
            tokens_E = count_pairs(index_TK, self.spec.num_experts, real_T)
            self.tokens_per_expert.add(tokens_E)
            if self.step_tokens_per_expert is not None:
                self.step_tokens_per_expert.add(tokens_E)
        # Selective checkpointing keeps the result: a second dispatch would repeat its collectives.
        out_TH = computed_once(partial(self.forward, experts, hidden, index_TK, weight_TK))
        # Return no view: FSDP2 hooks this output, and a model may add to it in place.
        return out_TH if hidden.dim() == 2 else out_TH.view(hidden.shape).clone()

    def forward(
        self, experts: nn.Module, hidden: torch.Tensor, index_TK: torch.Tensor, weight_TK: torch.Tensor
    ) -> torch.Tensor:
        """Compute the routed experts.

        Args:
            hidden: `[..., H]` in any float dtype.
            index_TK: Global expert ids.
            weight_TK: Routing weights.

        Returns:
            `[T, H]` in the dtype of `hidden`.

        Collectives: those of the dispatcher over the EP group. FSDP2 has unsharded the parameters around this call.
        """
        # Cast before sending: fp32 hidden states would double the bytes between ranks.
        hidden_TH = hidden.reshape(-1, hidden.shape[-1]).to(self.dtype)
        # 1: from here to combine, expert ids are numbers of slots.
        if self.copies is not None:
            index_TK = self.copies.slots(index_TK)
        elif self.slot_E is not None:
            index_TK = self.slot_E[index_TK]
        try:
            with span("dispatch"):  # 2a
                if self.shared is None:
                    dispatched = self.dispatcher.dispatch(hidden_TH, index_TK, weight_TK)
                else:
                    assert isinstance(self.dispatcher, AllToAllDispatcher)
                    meanwhile = partial(self.shared.compute, hidden)
                    dispatched = self.dispatcher.dispatch(hidden_TH, index_TK, weight_TK, meanwhile=meanwhile)
                rows_RH, weight_P, pairs, metadata = dispatched
                state = running_adapters_of(experts) if experts.training else None
                dropout = None if state is None else state.dropout_of(self.spec.name, len(hidden_TH))
                if dropout is not None:
                    # One more exchange: a mask follows its token to whichever rank computes it.
                    numbers_R = self.dispatcher.send_token_numbers(dropout.token_numbers, metadata)
                    dropout = replace(dropout, token_numbers=numbers_R)
            with span("experts"):  # 2b
                weights, adapters = self._weights(experts), self._adapters(experts)
                if self.spec.post_norm:
                    norm: Any = experts.post_expert_norm  # a module, which nn.Module's type does not tell
                    out_RH = normed_expert_mlp(rows_RH, weight_P, pairs, weights, self.mlp, norm, adapters, dropout)
                else:
                    out_RH = expert_mlp(rows_RH, weight_P, pairs, weights, self.mlp, adapters, dropout)
            with span("combine"):  # 2c; never skipped, since a rank without tokens is part of the collective
                return self.dispatcher.combine(out_RH, metadata).to(hidden.dtype)
        except BaseException:  # torch ends a block's second run by one, once it has all that backward needs
            if self.shared is not None:
                self.shared.forget()
            raise

    def forward_dense(self, experts: nn.Module, rows_NH: torch.Tensor) -> torch.Tensor:
        """Compute blocks that pass every token to every expert, `[E * T, H]`, with zeros where the token did not choose
        it.

        Only rows that are not zero are sent: experts return zeros for zeros, with zero gradients (small_copies.py
        checks it).

        Collectives: as `forward`. The host waits for the device once more, for the number of these rows.
        """
        # `nonzero` waits for the device: only there is the number of rows known.
        place_P = rows_NH.detach().count_nonzero(-1).nonzero().squeeze(1)
        tokens = len(rows_NH) // self.spec.num_experts
        # Rows are expert-major, so a row's place tells its expert and its token.
        rows_PH, expert_P1, real_T = rows_NH[place_P], (place_P // tokens).unsqueeze(1), real_tokens(tokens)
        real_P = None if real_T is None else real_T[place_P % tokens]
        out_PH = self.forward_counted(experts, rows_PH, expert_P1, rows_PH.new_ones(len(rows_PH), 1), real_P)
        return torch.zeros_like(rows_NH).index_put((place_P,), out_PH)

    def _weights(self, experts: nn.Module) -> ExpertWeights:
        """Return this rank's experts in the layout of `mlp`."""
        if self.copies is not None:
            return ExpertWeights(*(self.copies.storages[name] for name in self.spec.parameters))
        first, second, *others = (to_local(experts.get_parameter(name)) for name in self.spec.parameters)
        if self.spec.flat_gate is not None:
            by_expert = (-1, self.spec.intermediate_size, self.spec.hidden_size)
            # Gate and up that are stored apart become one product; the copy lives for this call.
            up = torch.cat([first.view(by_expert), second.view(by_expert)], dim=1)
            return ExpertWeights(up, others[0].view(by_expert).transpose(1, 2))
        return ExpertWeights(first, second, *others)

    def local_adapters(self, experts: nn.Module) -> tuple[Adapter | None, Adapter | None]:
        """Return the adapters of the up and the down projection, without copies; None for one that has none."""
        return _adapter(experts, self.spec.up), _adapter(experts, self.spec.down)

    def _adapters(self, experts: nn.Module) -> Adapters | None:
        """Return the adapters of this rank's experts, or None."""
        up, down = self.local_adapters(experts)
        if self.copies is not None and (up is not None or down is not None):
            up, down = self.copies.with_adapters(up, down)
        return None if up is None and down is None else Adapters(up, down, self.expert_L)


def sorted_forward(
    mixture: nn.Module, spec: ExpertsSpec, compute: Callable[..., torch.Tensor], hidden_states: torch.Tensor
) -> torch.Tensor:
    """Return the forward of a mixture whose router sorts rows (`spec.call` is "sorted").

    `compute(hidden, index_TK, weight_TK)` replaces its stacks of matrices. The router stays the model's own code, and
    so does its wait for the device.
    """
    assert spec.router is not None
    hidden_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
    order_P, _, weight_P, counts, *_ = mixture.get_submodule(spec.router)(hidden_TH)
    index_TK, weight_TK = sorted_choice(order_P, weight_P, counts, len(hidden_TH))
    out = compute(hidden_states, index_TK, weight_TK)
    bias = getattr(mixture, "bias", None)
    return out if bias is None else out + bias


class SharedExpert:
    """A shared expert that the model calls after the routed ones, with their tokens.

    It computes while these are in flight, and returns its result when the model calls it. With any other input it runs
    as usual.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self._module_forward = module, module.forward
        self._ahead: tuple[torch.Tensor, tuple[object, ...], torch.Tensor] | None = None
        replace_forward(module, self._forward)

    def compute(self, hidden: torch.Tensor) -> None:
        """Run the module, including its hooks, on the input of the routed experts."""
        self.forget()
        # The input is held as well, so that its memory cannot get other values under the same address.
        self._ahead = (hidden, _identity(hidden), self.module(hidden))

    def forget(self) -> None:
        """Free a result that the model will not ask for."""
        self._ahead = None

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and hidden.is_contiguous() and ahead[1] == _identity(hidden):
            return ahead[2].view(hidden.shape) if ahead[2].shape != hidden.shape else ahead[2]
        out: torch.Tensor = self._module_forward(hidden)
        return out


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what differs if a tensor is other memory, or its memory was changed in place since."""
    memory = (storage_key(tensor.untyped_storage()), tensor.storage_offset(), tensor.numel(), tensor.dtype)
    return *memory, tensor.is_contiguous(), change_count(tensor)


def layer_of(experts: nn.Module) -> ExpertLayer:
    """Return the running part that was attached to an experts module."""
    layer = module_state(experts).expert_layer
    assert isinstance(layer, ExpertLayer)
    return layer


def span(part: str) -> AbstractContextManager[Any]:
    """Name a part of the layer in a profile; nothing runs without a profiler."""
    return profiler.record_function(f"expertmesh::{part}") if is_profiling() else nullcontext()


def _adapter(experts: nn.Module, name: str) -> Adapter | None:
    """Return the adapter of the parameter `name`; None if it has none, or adapters are off."""
    place, _, leaf = name.rpartition(".")
    holder = experts.get_submodule(place)
    # Also while adapters are off: the base alone is the reference of DPO.
    if running_adapters_of(holder) is None or not hasattr(holder, f"{leaf}_lora_A"):
        return None
    a_LrK, b_LNr = (to_local(holder.get_parameter(f"{leaf}_lora_{which}")) for which in "AB")
    return Adapter(a_LrK, b_LNr, module_state(holder).lora_scaling[leaf])


def _tensors(adapters: Sequence[Adapter | None]) -> list[torch.Tensor]:
    return [tensor for adapter in adapters if adapter is not None for tensor in (adapter.a_LrK, adapter.b_LNr)]


@dataclass(eq=False)
class Copies:
    """The copies on a rank of an EP group, for one layer, and the experts that it sends to other ranks."""

    group: dist.ProcessGroup
    """The EP group."""
    sent_X: torch.Tensor
    """The slots of the local experts that other ranks copy, by the rank that gets them, int64."""
    by_owner: Segments
    """The places of each local expert in `sent_X`, to sum the gradients received in backward."""
    send: list[int]
    """The number of them that each rank gets."""
    receive: list[int]
    """The number that each rank sends to this one; its copies have the order of their owners."""
    slot_EM: torch.Tensor
    """The slots that this rank's tokens go to by turns, int64."""
    turns_E: torch.Tensor
    """The number of these slots, int64."""
    storages: dict[str, torch.Tensor] = field(default_factory=dict)
    """Frozen weights `[S, ...]` by the parameter's name in the experts module, which is a view of the first L."""
    adapters_of_step: Sequence[torch.Tensor] | None = None
    """During a step, the copies' adapters `[C, ...]`: leaves, in which the step's gradients gather. Else None."""

    @classmethod
    def of(cls, order: Sequence[int], copies: Copied, group: dist.ProcessGroup, device: torch.device) -> "Copies":
        """Make the copies of this rank, whose weights `fetch` gets.

        Args:
            group: The EP group.
            device: The device of the indices.
            order: The expert in each slot of local experts, by EP rank.
            copies: The experts that each EP rank copies, in the order of their slots.
        """
        rank, per_rank, slots = group.rank(), len(order) // group.size(), inverse(order)
        sent = [[slots[e] - rank * per_rank for e in experts if slots[e] // per_rank == rank] for experts in copies]
        owners = [slots[expert] // per_rank for expert in copies[rank]]
        slots_of_expert = slots_from(rank, order, copies)
        most = max(map(len, slots_of_expert))
        sent_X = torch.tensor([expert for experts in sent for expert in experts], dtype=torch.int64, device=device)
        return cls(
            group=group,
            sent_X=sent_X,
            by_owner=segments_of(sent_X, per_rank),
            send=[len(experts) for experts in sent],
            receive=[owners.count(owner) for owner in range(group.size())],
            slot_EM=torch.tensor([[*each, *[0] * (most - len(each))] for each in slots_of_expert], device=device),
            turns_E=torch.tensor([len(each) for each in slots_of_expert], device=device),
        )

    def slots(self, index_TK: torch.Tensor) -> torch.Tensor:
        """Return the slot, of all EP ranks', that each token goes to for each of its experts."""
        token_T1 = torch.arange(len(index_TK), device=index_TK.device).unsqueeze(1)
        return self.slot_EM[index_TK, token_T1 % self.turns_E[index_TK]]

    def fetch(self, experts: nn.Module, names: Sequence[str]) -> None:
        """Copy the frozen parameters `names` from their owners. Replaces them by views of one storage with the copies.

        Collectives: every rank of the group calls it; one all-to-all for each name.
        """
        for name in names:
            parameter: Any = experts.get_parameter(name)
            local = local_tensor(parameter)
            copied, _ = all_to_all(stored(local)[self.sent_X], self.send, self.receive, self.group)
            # One storage for both, because a grouped product takes the experts of a rank as one tensor.
            values = torch.cat([stored(local), copied])
            storage = PackedTensor(values, local.kind, local.dtype) if isinstance(local, PackedTensor) else values
            self.storages[name] = storage
            own, placements = storage[: len(local)], (parameter.device_mesh, parameter.placements)
            view = nn.Parameter(DTensor.from_local(own, *placements, run_check=False), requires_grad=False)
            set_at(experts, name, placed_like(view, parameter))

    def with_adapters(self, *local: Adapter | None) -> list[Adapter | None]:
        """Return adapters `[S, ...]` of the local experts' `[L, ...]`, differentiable.

        Collectives: every rank of the group calls it; outside a step one all-to-all in forward, one in backward.
        """
        tensors = _tensors(local)
        copied = self.exchanged(tensors) if self.adapters_of_step is None else self.adapters_of_step
        joined = (torch.cat(pair) for pair in zip(tensors, copied, strict=True))
        return [adapter and Adapter(next(joined), next(joined), adapter.scaling) for adapter in local]

    def exchanged(self, local: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the values `[C, ...]` of copies of each tensor of `local`, `[L, ...]`, differentiable."""
        # Every rank of the group comes here, with tokens or without.
        copied: Sequence[torch.Tensor] = _Exchanged.apply(self, *local)
        return copied


class _Exchanged(torch.autograd.Function):
    """Send the values of local experts to their copies, and the gradients of copies back to be summed."""

    @staticmethod
    def forward(ctx: Any, copies: Copies, *local: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.copies, ctx.shapes = copies, [tensor.shape for tensor in local]
        sent_XF = torch.cat([tensor[copies.sent_X].flatten(1) for tensor in local], dim=1)
        copied_CF, _ = all_to_all(sent_XF, copies.send, copies.receive, copies.group)
        parts = copied_CF.split([shape[1:].numel() for shape in ctx.shapes], dim=1)
        return tuple(part.reshape(-1, *shape[1:]) for part, shape in zip(parts, ctx.shapes, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        copies = ctx.copies
        grad_CF = torch.cat([grad.flatten(1) for grad in grads], dim=1)
        grad_XF, _ = all_to_all(grad_CF, copies.receive, copies.send, copies.group)
        parts = grad_XF.split([shape[1:].numel() for shape in ctx.shapes], dim=1)
        # Not by `index_add_`, which adds in another order on each run on a GPU.
        summed = (segment_sum(part, copies.by_owner).view(shape) for part, shape in zip(parts, ctx.shapes, strict=True))
        return None, *summed


@contextmanager
def copies_of_step(model: nn.Module) -> Iterator[None]:
    """Exchange the adapters of copied experts once, and the gradients of the copies once, for all forwards inside.

    Collectives: every rank calls it; over the EP group one all-to-all at the start and one at the end for each layer
    that has copies with adapters.
    """
    exchanged = list[tuple[Copies, Sequence[torch.Tensor]]]()
    plan = sharded(model).shard_plan
    copied = () if plan is None else plan.experts.placement.copies
    for experts in map(model.get_submodule, stage_names(model, copied) if copied else ()):
        layer = layer_of(experts)
        if layer.copies is not None and (own := _tensors(layer.local_adapters(experts))):
            exchanged.append((layer.copies, layer.copies.exchanged(own)))
    try:
        for copies, values in exchanged:
            copies.adapters_of_step = [value.detach().requires_grad_(value.requires_grad) for value in values]
        yield
        for copies, values in exchanged:
            if values[0].requires_grad:
                leaves = copies.adapters_of_step or ()
                # A leaf without a gradient sends zeros: skipping the collective would hang the owner.
                grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
                torch.autograd.backward(values, grads)
    finally:
        for copies, _ in exchanged:
            copies.adapters_of_step = None
