"""Register our dispatch and compute as an implementation of transformers' own expert parallelism.

    import expertmesh.integrations.transformers_ep
    config = DistributedConfig(fsdp_size=8, ep_size=8, ep_implementation="expertmesh")
    model = AutoModelForCausalLM.from_pretrained(name, distributed_config=config)

Importing this module registers the name. Loading, sharding, loss and saving stay transformers'. Each token is then sent
once to each rank that holds some of its experts, and experts save less for backward. It works inside one experts
module; unlike the other files of this package it uses more than the public Python interface.
"""

from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from expertmesh.anatomy import ExpertsSpec, experts_spec
from expertmesh.config.errors import InputError
from expertmesh.experts.dispatch import AllToAllDispatcher
from expertmesh.experts.expert_mlp import expert_mlp
from expertmesh.experts.install import choose_backend, mlp_spec_of
from expertmesh.experts.mlp_spec import ExpertMlpSpec, ExpertWeights

try:
    from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
except ImportError as error:
    raise InputError(
        f"transformers {transformers.__version__} has no registry of expert-parallel implementations; 5.23 has one",
        key="install.transformers-without-ep-registry",
    ) from error

NAME = "expertmesh"


class ExpertmeshEP(EPImplementation):
    """The forward of one experts module.

    Args:
        ep_mesh: The ranks that together hold all experts, each rank a contiguous range.
        tp_mesh: Has to have size 1.

    Raises:
        InputError: The module would not be computed exactly.
    """

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self._experts: Any = experts
        self._spec = _supported_spec(experts, ep_mesh, tp_mesh)
        self._dispatcher = AllToAllDispatcher(self._spec.num_experts, ep_mesh.get_group())
        self._mlps: dict[torch.dtype, ExpertMlpSpec] = {}

    def __call__(self, hidden_TH: torch.Tensor, index_TK: torch.Tensor, weight_TK: torch.Tensor) -> torch.Tensor:
        """Compute the experts' output.

        transformers has gathered the module's parameters over FSDP and made them local.

        Args:
            hidden_TH: The tokens of this rank.
            index_TK: Global expert ids.
            weight_TK: The router's weights.

        Returns:
            `[T, H]`.

        Collectives: every rank of the EP group calls it, also without a token; the dispatcher's, forward and backward.
        """
        rows_RH, weight_P, pairs, metadata = self._dispatcher.dispatch(hidden_TH, index_TK, weight_TK)
        weights = ExpertWeights(*(getattr(self._experts, name) for name in self._spec.parameters))
        return self._dispatcher.combine(
            expert_mlp(rows_RH, weight_P, pairs, weights, self._mlp(hidden_TH.dtype)), metadata
        )

    def _mlp(self, dtype: torch.dtype) -> ExpertMlpSpec:
        """Return the computation of the local experts in `dtype`, chosen once for each dtype."""
        if dtype not in self._mlps:
            experts = self._spec.num_experts // self._dispatcher.group.size()
            per_expert = choose_backend(self._spec, "auto", dtype, experts) == "loop"
            self._mlps[dtype] = mlp_spec_of(self._experts, self._spec, per_expert=per_expert)
        return self._mlps[dtype]


def _supported_spec(experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> ExpertsSpec:
    """Return the spec of the experts on all ranks. Raises `InputError` if we would not compute them exactly."""
    spec = experts_spec(type(experts).__name__, experts)
    if tp_mesh.size() > 1:
        _refuse(f"tp_size is {tp_mesh.size()}, whose ranks hold the same tokens; set it to 1")
    if spec.call != "interface" or spec.post_norm:
        _refuse(f"{spec.name} has experts that are called in a way of their own, or a norm behind them")
    for name in spec.parameters:
        parameter = experts.get_parameter(name)
        here = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if here.shape[0] * ep_mesh.size() != spec.num_experts:
            _refuse(
                f"the ep_plan leaves {spec.name}.{name} whole, beside experts that are shared out; shard it as well"
            )
    return spec


def _refuse(why: str) -> None:
    raise InputError(f'ep_implementation "{NAME}": {why}, or use "all_to_all"', key="layout.ep-implementation")


EPImplementationInterface.register(NAME, ExpertmeshEP)
