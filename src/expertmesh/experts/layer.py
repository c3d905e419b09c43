"""Run what a Hugging Face model calls as `experts(hidden_states, top_k_index, top_k_weights)`.

One forward of `ExpertLayer`:

    1   count the tokens of each expert (training, first run only); find the slots of placed experts
    2a  dispatch: send each token once to each rank that holds any of its experts
    2b  MLP: compute this rank's experts on the rows received, sum the pairs of each row
    2c  combine: return one row per token and rank, sum them at the token's own rank
    3   a shared expert may compute while the rows are in flight

install.py puts the layer into a model. Router, shared experts and block stay the model's own code.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import profiler
from torch.distributed.tensor import DTensor

from expertmesh.anatomy import ExpertsSpec
from expertmesh.compat import is_profiling, storage_key
from expertmesh.experts.activation_checkpointing import computed_once, confirm_choice, is_recomputing
from expertmesh.experts.copies import Copies
from expertmesh.experts.dispatch import AllToAllDispatcher, Dispatched, Dispatcher
from expertmesh.experts.expert_mlp import expert_mlp, normed_expert_mlp
from expertmesh.experts.lora_state import Dropout, running_adapters_of
from expertmesh.experts.mlp_spec import Adapter, Adapters, ExpertMlpSpec, ExpertWeights
from expertmesh.experts.pairs import LocalPairs, count_pairs, sorted_choice
from expertmesh.experts.token_counts import TokensPerExpert, real_tokens
from expertmesh.state.model_view import attach_to_module, module_state
from expertmesh.state.patching import replace_forward


@dataclass(eq=False)
class ExpertLayer:
    """The running part of one experts module: its dispatcher and its MLP."""

    spec: ExpertsSpec
    dispatcher: Dispatcher
    mlp: ExpertMlpSpec
    dtype: torch.dtype
    """The dtype in which the experts compute."""
    expert_L: torch.Tensor
    """The experts that this rank holds, copies behind its own: their numbers in the model, int64."""
    slot_E: torch.Tensor | None = None
    """The slot of each expert among those of all EP ranks, int64; None if that is its number, or with copies."""
    copies: Copies | None = None
    """The copies of other ranks' experts on this rank, which has slots for them behind its own experts'."""
    shared: "SharedExpert | None" = None
    tokens_per_expert: TokensPerExpert = field(default_factory=TokensPerExpert)
    """Real tokens that this rank's router sent to each expert since the last `pop`, in training only; recomputation
    does not count again."""
    step_tokens_per_expert: TokensPerExpert = field(default_factory=TokensPerExpert)
    """The same; popped once per optimizer step."""
    counts_evaluation: bool = False
    """True to count in forwards without training, too."""

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
        # From here to combine, experts have the numbers of their slots.
        if self.copies is not None:
            index_TK = self.copies.slots(index_TK)
        elif self.slot_E is not None:
            index_TK = self.slot_E[index_TK]
        try:
            with span("dispatch"):
                rows_RH, weight_P, pairs, metadata = self._dispatch(hidden, hidden_TH, index_TK, weight_TK)
                # After the dispatch: a mask follows its token to whichever rank computes it.
                dropout = self._dropout(experts, len(hidden_TH), metadata)
            with span("experts"):
                out_RH = self._mlp(experts, rows_RH, weight_P, pairs, dropout)
            with span("combine"):
                return self.dispatcher.combine(out_RH, metadata).to(hidden.dtype)
        except BaseException:  # by one torch ends a block's second run, when it has all that backward needs
            if self.shared is not None:
                self.shared.forget()
            raise

    def forward_dense(self, experts: nn.Module, rows_NH: torch.Tensor) -> torch.Tensor:
        """Compute blocks that pass every token to every expert, `[E * T, H]`, with zeros where the token did not choose
        it.

        Only rows that are not zero are sent: experts return zeros for zeros, with zero gradients (small_copies.py
        checks it).

        Collectives: as `forward`. Waits for the host once more, to learn the number of these rows.
        """
        # `nonzero` waits for the device: only there is the number of rows known.
        place_P = rows_NH.detach().count_nonzero(-1).nonzero().squeeze(1)
        tokens = len(rows_NH) // self.spec.num_experts
        # Rows are expert-major, so a row's place tells its expert and its token.
        rows_PH, expert_P1, real_T = rows_NH[place_P], (place_P // tokens).unsqueeze(1), real_tokens(tokens)
        real_P = None if real_T is None else real_T[place_P % tokens]
        out_PH = self.forward_counted(experts, rows_PH, expert_P1, rows_PH.new_ones(len(rows_PH), 1), real_P)
        return torch.zeros_like(rows_NH).index_put((place_P,), out_PH)

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
        if trains or self.counts_evaluation:
            tokens_E = count_pairs(index_TK, self.spec.num_experts, real_T)
            self.tokens_per_expert.add(tokens_E)
            self.step_tokens_per_expert.add(tokens_E)
        # Selective checkpointing keeps the result: a second dispatch would repeat its collectives.
        out_TH = computed_once(partial(self.forward, experts, hidden, index_TK, weight_TK))
        # Return no view: FSDP2 hooks this output, and a model may add to it in place.
        return out_TH if hidden.dim() == 2 else out_TH.view(hidden.shape).clone()

    def _dispatch(
        self, hidden: torch.Tensor, hidden_TH: torch.Tensor, index_TK: torch.Tensor, weight_TK: torch.Tensor
    ) -> Dispatched:
        """Dispatch, and run the shared expert while rows are in flight."""
        if self.shared is None:
            return self.dispatcher.dispatch(hidden_TH, index_TK, weight_TK)
        assert isinstance(self.dispatcher, AllToAllDispatcher)
        return self.dispatcher.dispatch(hidden_TH, index_TK, weight_TK, meanwhile=partial(self.shared.compute, hidden))

    def _mlp(
        self,
        experts: nn.Module,
        rows_RH: torch.Tensor,
        weight_P: torch.Tensor,
        pairs: LocalPairs,
        dropout: Dropout | None,
    ) -> torch.Tensor:
        """Return the weighted outputs of this rank's experts, summed for each row, `[R, H]`."""
        weights, adapters = self._weights(experts), self._adapters(experts)
        if self.spec.post_norm:
            norm: Any = experts.post_expert_norm
            return normed_expert_mlp(rows_RH, weight_P, pairs, weights, self.mlp, norm, adapters, dropout)
        return expert_mlp(rows_RH, weight_P, pairs, weights, self.mlp, adapters, dropout)

    def _weights(self, experts: nn.Module) -> ExpertWeights:
        """Return this rank's experts in the layout of `mlp`."""
        if self.copies is not None:
            return ExpertWeights(*(self.copies.storages[name] for name in self.spec.parameters))
        first, second, *others = (_local(experts.get_parameter(name)) for name in self.spec.parameters)
        if self.spec.flat_gate is not None:
            by_expert = (-1, self.spec.intermediate_size, self.spec.hidden_size)
            # Gate and up that are stored apart become one product; the copy lives for this call.
            up = torch.cat([first.view(by_expert), second.view(by_expert)], dim=1)
            return ExpertWeights(up, others[0].view(by_expert).transpose(1, 2))
        return ExpertWeights(first, second, *others)

    def _adapters(self, experts: nn.Module) -> Adapters | None:
        """Return the adapters of this rank's experts, or None."""
        up, down = (_adapter(experts, name) for name in (self.spec.up, self.spec.down))
        if self.copies is not None and (up is not None or down is not None):
            up, down = self.copies.with_adapters(up, down)
        return None if up is None and down is None else Adapters(up, down, self.expert_L)

    def _dropout(self, experts: nn.Module, tokens: int, metadata: Any) -> Dropout | None:
        """Return the adapters' dropout with the numbers of the rows received. Collectives: one more exchange if there
        is dropout.
        """
        state = running_adapters_of(experts)
        dropout = state.dropout_of(self.spec.name, tokens) if state is not None and experts.training else None
        return dropout and replace(dropout, number_P=self.dispatcher.numbers(dropout.number_P, metadata))


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
        self.module, self._own = module, module.forward
        self._ahead: tuple[torch.Tensor, int, torch.Tensor] | None = None
        replace_forward(module, self._forward)

    def compute(self, hidden: torch.Tensor) -> None:
        """Run the module, including its hooks, on the input of the routed experts."""
        self.forget()
        self._ahead = (hidden, _version(hidden), self.module(hidden))

    def forget(self) -> None:
        """Free a result that the model will not ask for."""
        self._ahead = None

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        # The same memory is not enough: the model may have changed it in place since, which its version tells.
        ahead, self._ahead = self._ahead, None
        if ahead is not None and _same_values(ahead[0], hidden) and ahead[1] == _version(hidden):
            return ahead[2] if ahead[2].shape == hidden.shape else ahead[2].view(hidden.shape)
        out: torch.Tensor = self._own(hidden)
        return out


def _version(tensor: torch.Tensor) -> int:
    """Return the version of the values; tensors of inference mode have none."""
    return 0 if tensor.is_inference() else tensor._version


def _same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether both are the same memory, viewed in the same order."""
    keys = [(storage_key(x.untyped_storage()), x.storage_offset(), x.numel(), x.dtype) for x in (one, other)]
    return keys[0] == keys[1] and one.is_contiguous() and other.is_contiguous()


def attach_layer(experts: nn.Module, layer: ExpertLayer) -> None:
    """Let the calls of an experts module run `layer` (install.py)."""
    attach_to_module(experts, expert_layer=layer)


def layer_of(experts: nn.Module) -> ExpertLayer:
    """Return the running part that was attached to an experts module."""
    layer = module_state(experts).expert_layer
    assert isinstance(layer, ExpertLayer)
    return layer


def span(part: str) -> AbstractContextManager[Any]:
    """Name a part of the layer in a profile; nothing runs without a profiler."""
    return profiler.record_function(f"expertmesh::{part}") if is_profiling() else nullcontext()


def _adapter(experts: nn.Module, name: str) -> Adapter | None:
    place, _, leaf = name.rpartition(".")
    holder = experts.get_submodule(place)
    # Also while adapters are off: the base alone is the reference of DPO.
    if running_adapters_of(holder) is None or not hasattr(holder, f"{leaf}_lora_A"):
        return None
    a_LrK, b_LNr = (_local(holder.get_parameter(f"{leaf}_lora_{which}")) for which in "AB")
    return Adapter(a_LrK, b_LNr, module_state(holder).lora_scaling[leaf])


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
