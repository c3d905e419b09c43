"""What runs inside a Hugging Face model's `experts(hidden_states, top_k_index, top_k_weights)`.

Installed through transformers' public experts registry, under the name "expertmesh"; the router, the shared experts
and the block stay the model's own code. The story of one call: route, dispatch, compute, combine.
"""

from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.activations import SiLUActivation
from transformers.integrations import moe as transformers_moe

from expertmesh.anatomy import Anatomy, ExpertsSpec
from expertmesh.config.errors import InputError
from expertmesh.experts.compute import expert_mlp, grouped_mm_refusal
from expertmesh.experts.dispatch import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    Dispatcher,
    LocalDispatcher,
    count_pairs,
)
from expertmesh.experts.form import MlpForm
from expertmesh.experts.post_norm import normed_expert_mlp
from expertmesh.experts.routing import confirm_choice, is_recomputing
from expertmesh.mesh import Mesh

IMPLEMENTATION = "expertmesh"
DispatchName = Literal["auto", "all_to_all", "all_gather"]
ComputeName = Literal["auto", "grouped_mm", "loop"]


class ExpertLayer:
    """The running part of one experts module: how its tokens travel and how its experts compute.

    `load_E`: tokens that this rank's router sent to each expert since `take_load`, int64, in training only and
    never counting a recomputed forward twice.
    """

    def __init__(self, spec: ExpertsSpec, dispatcher: Dispatcher, form: MlpForm, dtype: torch.dtype) -> None:
        self.spec = spec
        self.dispatcher = dispatcher
        self.form = form
        self.dtype = dtype
        self.load_E: torch.Tensor | None = None

    def forward(
        self, experts: nn.Module, hidden: torch.Tensor, index_TK: torch.Tensor, weight_TK: torch.Tensor
    ) -> torch.Tensor:
        """`hidden` `[T, H]` in any float dtype, `index_TK` global expert ids, `weight_TK`; returns `hidden`'s shape.

        Collective over the EP group (see the dispatcher); the parameters are unsharded by FSDP2 around this call.
        """
        confirm_choice(index_TK)
        self._count(experts, index_TK)
        hidden_TH = hidden.reshape(-1, hidden.shape[-1]).to(self.dtype)
        rows_RH, weight_P, pairs, ticket = self.dispatcher.dispatch(hidden_TH, index_TK, weight_TK)
        up, down, *biases = (_local(experts.get_parameter(name)) for name in self.spec.parameters)
        up_bias, down_bias = biases or (None, None)
        if self.spec.post_norm:
            norm: Any = experts.post_expert_norm
            out_RH = normed_expert_mlp(rows_RH, weight_P, pairs, up, down, up_bias, down_bias, self.form, norm)
        else:
            out_RH = expert_mlp(rows_RH, weight_P, pairs, up, down, up_bias, down_bias, self.form)
        out_TH = self.dispatcher.combine(out_RH, ticket).to(hidden.dtype)
        # Not a view: FSDP2 hooks this output, and a model may add to it in place.
        return out_TH if hidden.dim() == 2 else out_TH.view(hidden.shape).clone()

    def take_load(self) -> torch.Tensor | None:
        """The counts since the last call, and start again from zero."""
        load_E, self.load_E = self.load_E, None
        return load_E

    def _count(self, experts: nn.Module, index_TK: torch.Tensor) -> None:
        if not experts.training or is_recomputing():
            return
        load_E = count_pairs(index_TK, self.spec.num_experts)
        self.load_E = load_E if self.load_E is None else self.load_E + load_E


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
        form = MlpForm(
            activation=experts._apply_gate if spec.gated else experts.act_fn,
            silu_gated=is_silu_gated(experts, spec),
            transposed=spec.transposed,
            per_expert=backend == "loop",
        )
        experts._expertmesh_layer = ExpertLayer(spec, _dispatcher(dispatch, spec, mesh), form, dtype)
        experts.config._experts_implementation = IMPLEMENTATION
        backends[backend] = backends.get(backend, 0) + 1
    chosen = "local" if mesh.layout.ep == 1 else ("all_to_all" if dispatch == "auto" else dispatch)
    return {"dispatch": chosen, "compute": ", ".join(f"{name} ({count} layers)" for name, count in backends.items())}


def layer_of(experts: nn.Module) -> ExpertLayer:
    """The running part that `install` put on an experts module."""
    layer = experts._expertmesh_layer
    assert isinstance(layer, ExpertLayer)
    return layer


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _experts_forward(
    experts: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    return layer_of(experts).forward(experts, hidden_states, top_k_index, top_k_weights)


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


def is_silu_gated(experts: nn.Module, spec: ExpertsSpec) -> bool:
    """Whether the experts use transformers' default gate with SiLU on concatenated [gate; up]."""
    default = getattr(type(experts), "_apply_gate", None) is transformers_moe._default_apply_gate
    silu = isinstance(getattr(experts, "act_fn", None), nn.SiLU | SiLUActivation)
    return spec.gated and default and silu and bool(getattr(experts, "is_concatenated", True))
