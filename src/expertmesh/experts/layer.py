"""What runs inside a Hugging Face model's `experts(hidden_states, top_k_index, top_k_weights)`.

Installed through transformers' public experts registry, under the name "expertmesh", or in the place of `forward` of
experts that do not use it; the router, the shared experts and the block stay the model's own code. The story of one
call: route, dispatch, compute, combine.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.activations import SiLUActivation
from transformers.integrations import moe as transformers_moe

from expertmesh.anatomy import Anatomy, ExpertsSpec
from expertmesh.config.errors import InputError
from expertmesh.distributed.mesh import Mesh
from expertmesh.experts.compute import expert_mlp, grouped_mm_refusal
from expertmesh.experts.dispatch import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    Dispatcher,
    LocalDispatcher,
    count_pairs,
)
from expertmesh.experts.dropout import Dropout
from expertmesh.experts.kept import computed_once
from expertmesh.experts.lora import Adapter, Adapters, adapted_expert_mlp
from expertmesh.experts.lora_state import adapter_state_of
from expertmesh.experts.mlp_spec import ExpertMlpSpec, ExpertWeights
from expertmesh.experts.post_norm import normed_expert_mlp
from expertmesh.experts.real_tokens import real_tokens
from expertmesh.experts.routing import confirm_choice, is_recomputing

IMPLEMENTATION = "expertmesh"
DispatchName = Literal["auto", "all_to_all", "all_gather"]
ComputeName = Literal["auto", "grouped_mm", "loop"]


class ExpertLayer:
    """The running part of one experts module: how its tokens travel and how its experts compute.

    `load_E`: real tokens that this rank's router sent to each expert since `take_load`, int64, in training only and
    never counting a recomputed forward twice (`forward_gathered` counts padding too). `step_load_E`: the same since
    `take_step_load`.
    """

    def __init__(
        self, spec: ExpertsSpec, dispatcher: Dispatcher, form: ExpertMlpSpec, dtype: torch.dtype, first_expert: int = 0
    ) -> None:
        self.spec = spec
        self.dispatcher = dispatcher
        self.form = form
        self.dtype = dtype
        self.first_expert = first_expert
        self.load_E: torch.Tensor | None = None
        self.step_load_E: torch.Tensor | None = None

    def forward(
        self, experts: nn.Module, hidden: torch.Tensor, index_TK: torch.Tensor, weight_TK: torch.Tensor
    ) -> torch.Tensor:
        """`hidden` `[T, H]` in any float dtype, `index_TK` global expert ids, `weight_TK`; returns `hidden`'s shape.

        Collective over the EP group (see the dispatcher); the parameters are unsharded by FSDP2 around this call.
        """
        return self._forward(experts, hidden, index_TK, weight_TK, real_tokens(len(index_TK)))

    def forward_gathered(
        self, experts: nn.Module, rows_PH: torch.Tensor, expert_P1: torch.Tensor, weight_P1: torch.Tensor
    ) -> torch.Tensor:
        """For blocks that give each expert its rows themselves, `[P, H]`. Which token a row is is not known here, so
        the load counts padding too (balance.py refuses to steer by it). Collective like `forward`.
        """
        return self._forward(experts, rows_PH, expert_P1, weight_P1, None)

    def _forward(
        self,
        experts: nn.Module,
        hidden: torch.Tensor,
        index_TK: torch.Tensor,
        weight_TK: torch.Tensor,
        real_T: torch.Tensor | None,
    ) -> torch.Tensor:
        confirm_choice(index_TK)
        self._count(experts, index_TK, real_T)
        out_TH = computed_once(partial(self._compute, experts, hidden, index_TK, weight_TK))
        # Not a view: FSDP2 hooks this output, and a model may add to it in place.
        return out_TH if hidden.dim() == 2 else out_TH.view(hidden.shape).clone()

    def _compute(
        self, experts: nn.Module, hidden: torch.Tensor, index_TK: torch.Tensor, weight_TK: torch.Tensor
    ) -> torch.Tensor:
        """Dispatch, experts, combine: `[T, H]` in `hidden`'s dtype."""
        hidden_TH = hidden.reshape(-1, hidden.shape[-1]).to(self.dtype)
        rows_RH, weight_P, pairs, metadata = self.dispatcher.dispatch(hidden_TH, index_TK, weight_TK)
        weights = self._weights(experts)
        if self.spec.post_norm:
            norm: Any = experts.post_expert_norm
            out_RH = normed_expert_mlp(rows_RH, weight_P, pairs, weights, self.form, norm)
        elif (adapters := self._adapters(experts)) is not None:
            dropout = self._dropout(experts, len(hidden_TH), metadata)
            out_RH = adapted_expert_mlp(rows_RH, weight_P, pairs, weights, self.form, adapters, dropout)
        else:
            out_RH = expert_mlp(rows_RH, weight_P, pairs, weights, self.form)
        return self.dispatcher.combine(out_RH, metadata).to(hidden.dtype)

    def forward_dense(self, experts: nn.Module, rows_NH: torch.Tensor) -> torch.Tensor:
        """For blocks that pass every token to every expert, `[E * T, H]`, with zeros where it did not choose it.

        Only rows that are not zero travel: experts give zeros for zeros, with zero gradients (confirm.py has seen it).
        Collective like `forward`; waits for the host once more, to learn how many they are.
        """
        place_P = rows_NH.detach().count_nonzero(-1).nonzero().squeeze(1)
        tokens = len(rows_NH) // self.spec.num_experts
        rows_PH, expert_P, real_T = rows_NH[place_P], place_P // tokens, real_tokens(tokens)
        real_P = None if real_T is None else real_T[place_P % tokens]
        out_PH = self._forward(experts, rows_PH, expert_P.unsqueeze(1), rows_PH.new_ones(len(rows_PH), 1), real_P)
        return torch.zeros_like(rows_NH).index_put((place_P,), out_PH)

    def take_load(self) -> torch.Tensor | None:
        """The counts since the last call, and start again from zero."""
        load_E, self.load_E = self.load_E, None
        return load_E

    def take_step_load(self) -> torch.Tensor | None:
        """The same for the counts of an optimizer step."""
        load_E, self.step_load_E = self.step_load_E, None
        return load_E

    def _weights(self, experts: nn.Module) -> ExpertWeights:
        """This rank's experts in the layout of `form`."""
        first, second, *others = (_local(experts.get_parameter(name)) for name in self.spec.parameters)
        if self.spec.flat_gate is not None:
            by_expert = (-1, self.spec.intermediate_size, self.spec.hidden_size)
            up = torch.cat([first.view(by_expert), second.view(by_expert)], dim=1)
            return ExpertWeights(up, others[0].view(by_expert).transpose(1, 2))
        return ExpertWeights(first, second, *others)

    def _adapters(self, experts: nn.Module) -> Adapters | None:
        """The adapters of this rank's experts, if they have any."""
        state = adapter_state_of(experts)
        if state is None:
            return None
        up, down = (_adapter(experts, name) for name in (self.spec.up, self.spec.down))
        return Adapters(up, down, state.scaling, self.first_expert)

    def _dropout(self, experts: nn.Module, tokens: int, metadata: Any) -> Dropout | None:
        """The adapters' dropout with the numbers of the rows that came here; one more collective where there is any."""
        state = adapter_state_of(experts)
        dropout = state.dropout_of(self.spec.name, tokens) if state is not None and experts.training else None
        return dropout and replace(dropout, number_P=self.dispatcher.numbers(dropout.number_P, metadata))

    def _count(self, experts: nn.Module, index_TK: torch.Tensor, real_T: torch.Tensor | None) -> None:
        # Without gradients it is the count of a router loss, and the same tokens come again.
        if not experts.training or not torch.is_grad_enabled() or is_recomputing():
            return
        load_E = count_pairs(index_TK, self.spec.num_experts, real_T)
        self.load_E = load_E if self.load_E is None else self.load_E + load_E
        self.step_load_E = load_E if self.step_load_E is None else self.step_load_E + load_E


def install(
    model: nn.Module, anatomy: Anatomy, mesh: Mesh, *, dispatch: DispatchName, compute: ComputeName, dtype: torch.dtype
) -> dict[str, str]:
    """Make every experts module of `model` run here. Called by `parallelize`; no communication.

    `dtype` is the compute dtype. Returns what the two `auto`s became, to be printed. Raises `InputError` when the
    compute backend asked for cannot run these experts.
    """
    transformers_moe.ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts_forward)
    backends: dict[str, int] = {}
    for spec in anatomy.experts:
        experts: Any = model.get_submodule(spec.name)
        backend = choose_backend(spec, compute, dtype)
        form = form_of(experts, spec, per_expert=backend == "loop")
        first_expert = mesh.expert["ep"].get_local_rank() * (spec.num_experts // mesh.layout.ep)
        experts._expertmesh_layer = ExpertLayer(spec, _dispatcher(dispatch, spec, mesh), form, dtype, first_expert)
        if spec.call == "interface":
            experts.config._experts_implementation = IMPLEMENTATION
        else:
            experts.forward = partial(_dense_forward if spec.call == "dense" else _experts_forward, experts)
        backends[backend] = backends.get(backend, 0) + 1
    chosen = "local" if mesh.layout.ep == 1 else ("all_to_all" if dispatch == "auto" else dispatch)
    return {"dispatch": chosen, "compute": ", ".join(f"{name} ({count} layers)" for name, count in backends.items())}


def layer_of(experts: nn.Module) -> ExpertLayer:
    """The running part that `install` put on an experts module."""
    layer = experts._expertmesh_layer
    assert isinstance(layer, ExpertLayer)
    return layer


def _adapter(experts: nn.Module, name: str) -> Adapter | None:
    if not hasattr(experts, f"{name}_lora_A"):
        return None
    return Adapter(*(_local(experts.get_parameter(f"{name}_lora_{which}")) for which in "AB"))


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _experts_forward(
    experts: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    return layer_of(experts).forward(experts, hidden_states, top_k_index, top_k_weights)


def _dense_forward(experts: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    return layer_of(experts).forward_dense(experts, hidden_states)


def _dispatcher(name: DispatchName, spec: ExpertsSpec, mesh: Mesh) -> Dispatcher:
    if mesh.layout.ep == 1:
        return LocalDispatcher(spec.num_experts)
    kind = AllGatherDispatcher if name == "all_gather" else AllToAllDispatcher
    return kind(spec.num_experts, mesh.ep_group)


def choose_backend(spec: ExpertsSpec, compute: ComputeName, dtype: torch.dtype) -> str:
    """What `moe.compute` means for these experts in `dtype`; `InputError` when what was asked for cannot run.

    `auto` is the grouped product wherever torch has it for them, else one expert after the other.
    """
    width = 2 * spec.intermediate_size if spec.gated else spec.intermediate_size
    refusal = grouped_mm_refusal(dtype, spec.hidden_size, spec.intermediate_size) or grouped_mm_refusal(
        dtype, spec.hidden_size, width
    )
    if compute == "grouped_mm" and refusal:
        raise InputError(f"moe.compute: grouped_mm cannot run {spec.name}: {refusal}; set moe.compute to loop or auto")
    return "loop" if compute == "loop" or refusal else "grouped_mm"


def form_of(experts: Any, spec: ExpertsSpec, *, per_expert: bool) -> ExpertMlpSpec:
    """How these experts compute, by the module's own activation and gate."""
    activation: Callable[[torch.Tensor], torch.Tensor]
    if not spec.gated:
        activation = experts.act_fn
    elif hasattr(experts, "_apply_gate"):
        activation = experts._apply_gate
    elif (act_fn := _act_fn(experts)) is not None:
        activation = partial(_gated, act_fn)
    else:
        raise InputError(f"{spec.name}: no activation is recognised (act_fn or activation_fn); it is not supported")
    return ExpertMlpSpec(activation, is_silu_gated(experts, spec), spec.transposed, per_expert)


def is_silu_gated(experts: nn.Module, spec: ExpertsSpec) -> bool:
    """Whether the experts use transformers' default gate with SiLU on concatenated [gate; up]."""
    default = getattr(type(experts), "_apply_gate", None) in (None, transformers_moe._default_apply_gate)
    silu = isinstance(_act_fn(experts), nn.SiLU | SiLUActivation)
    return spec.gated and default and silu and bool(getattr(experts, "is_concatenated", True))


def _act_fn(experts: nn.Module) -> Any:
    """The activation, by the names that transformers uses; in the module itself or in the one it wraps."""
    for module in (experts, *experts.children()):
        for name in ("act_fn", "activation_fn"):
            if hasattr(module, name):
                return getattr(module, name)
    return None


def _gated(act_fn: Callable[[torch.Tensor], torch.Tensor], pre_P2I: torch.Tensor) -> torch.Tensor:
    gate_PI, up_PI = pre_P2I.chunk(2, dim=-1)
    return act_fn(gate_PI) * up_PI
