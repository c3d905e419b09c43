"""The values of the reference's weights: read from the files each time a unit wants them, or held in memory.

Reading follows transformers' own conversion rules with one tensor in memory at a time; all of them are held for several
steps of an unsharded model that fits into the machine.
"""

import hashlib
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertmesh.adapters.plan import AdapterPlan, plan_of
from expertmesh.adapters.targets import Target
from expertmesh.io.boxes import full_box, slices
from expertmesh.io.safetensors_reader import open_weight_files
from expertmesh.state.model_view import ModelView
from expertmesh.state.shards import local_box, local_tensor
from expertmesh.verification.setup import Setup
from expertmesh.weights.audit import LibraryFiles
from expertmesh.weights.load import weights_file
from expertmesh.weights.mapping import LoadPlan, plan_load
from expertmesh.weights.quantised.resident import kept_plan
from expertmesh.weights.reading import read_box


@dataclass
class Weights:
    """Whole tensors of `model` (on meta), by the first of each tensor's names: from its files, or those that are `held`
    in host memory. The adapters of the sharded `job_model` are added as what they mean, `W + scaling * B A`, unless
    `adapted` is off; its packed experts have the values that their codes stand for.

    Files are read through the safetensors library, as the audit does: a mistake of expertmesh's own reader shows.
    """

    model: PreTrainedModel
    setup: Setup
    job_model: PreTrainedModel
    device: torch.device
    adapted: bool = True
    held: dict[str, Tensor] | None = None
    files: LibraryFiles = field(default_factory=LibraryFiles)
    plan: LoadPlan = field(init=False)
    adapters: AdapterPlan | None = field(init=False)
    state: dict[str, Tensor] = field(init=False)
    targets: dict[str, Target] = field(init=False)

    def __post_init__(self) -> None:
        with open_weight_files(self.setup.directory, weights_file(self.model)) as checkpoint:
            self.plan = kept_plan(self.job_model, plan_load(ModelView(self.model), checkpoint))
        self.adapters = plan_of(self.job_model) if self.adapted else None
        self.state = ModelView(self.model).tensors
        targets = self.adapters.targets if self.adapters is not None else ()
        self.targets = {target.weight: target for target in targets}

    def in_memory(self, names: Iterable[str]) -> tuple["Weights", dict[str, Tensor]]:
        """The same weights with all leaves of the tensors `names` held; and these, which may be trained in place."""
        weights = copy(self)
        weights.held = {leaf: value.cpu() for name in names for leaf, value in self.leaves(name).items()}
        return weights, weights.held

    def leaves(self, name: str) -> dict[str, Tensor]:
        """What a gradient is wanted of, on the device, by name: the tensor itself, and the adapters on it."""
        target = self.targets.get(name)
        shapes = {} if target is None else _adapter_shapes(target)
        if self.held is not None:
            return {leaf: self.held[leaf].detach().to(self.device, copy=True) for leaf in (name, *shapes)}
        lazy, dtype = self.plan.tensors[name], self.state[name].dtype
        value = torch.empty(tuple(lazy.shape), dtype=dtype)
        read_box(lazy, full_box(lazy.shape), value, self.files)
        wide = torch.promote_types(dtype, torch.float32)
        adapters = {leaf: adapter_value(leaf, shape).to(self.device, wide) for leaf, shape in shapes.items()}
        return {name: value.to(self.device), **adapters}

    def value(self, name: str, leaves: Mapping[str, Tensor]) -> Tensor:
        """The tensor, computed from its leaves under autograd."""
        value, target = leaves[name], self.targets.get(name)
        if target is None:
            return value
        a, b = (leaves[f"{target.module}.{leaf}"] for leaf in target.leaves)
        delta = b @ a
        if target.experts is not None and any(
            target.module in spec.holders and spec.transposed for spec in self.setup.anatomy.experts
        ):
            delta = delta.mT
        return value + (target.scaling * delta).to(value.dtype)


@torch.no_grad()
def set_adapters(model: PreTrainedModel) -> None:
    """Give the adapters of a sharded model the values that the reference has. No communication."""
    if (plan := plan_of(model)) is None:
        return
    state = dict(model.named_parameters())
    for target in plan.targets:
        for name, shape in _adapter_shapes(target).items():
            if name in state:
                local_tensor(state[name]).copy_(adapter_value(name, shape)[slices(local_box(state[name]))])


def adapter_value(name: str, shape: tuple[int, ...]) -> Tensor:
    """What verification puts into an adapter, by its name alone, in fp32: with B at its usual zero, A would have no
    gradient and an adapter that is never applied would go unnoticed.
    """
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values * (0.5 / shape[-1] ** 0.5 if name.endswith("A") else 0.05)


def _adapter_shapes(target: Target) -> dict[str, tuple[int, ...]]:
    """The shapes of A and B of one target, by parameter name."""
    return {f"{target.module}.{leaf}": shape for leaf, shape in zip(target.leaves, target.shapes, strict=True)}
