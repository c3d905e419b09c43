"""The values of the reference's weights: read from the files each time a unit wants them, or held in memory.

`FileWeights` follow transformers' own conversion rules with one tensor in memory at a time; `MemoryWeights` are for
several steps of an unsharded model that fits into the machine. `AdaptedWeights` add low-rank adapters as what they
mean, `W + scaling * B A`, whatever way the job computes them.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertmesh.adapters.peft_format import parameter_name
from expertmesh.adapters.plan import AdapterPlan, plan_of
from expertmesh.adapters.targets import Target
from expertmesh.anatomy import Anatomy
from expertmesh.io.boxes import full_box, slices
from expertmesh.io.safetensors_reader import open_weight_files
from expertmesh.state.shards import local_box, local_tensor
from expertmesh.weights.audit import LibraryFiles
from expertmesh.weights.load import weights_file
from expertmesh.weights.mapping import LoadPlan, model_tensors, plan_load
from expertmesh.weights.reading import read_box


class Weights(ABC):
    """Where the values of the model's tensors come from, by the first of each tensor's names."""

    @abstractmethod
    def leaves(self, name: str) -> dict[str, Tensor]:
        """What a gradient is wanted of, on the device, by name: the tensor itself, or what it is made of."""

    def value(self, name: str, leaves: Mapping[str, Tensor]) -> Tensor:
        """The tensor, computed from its leaves under autograd."""
        return leaves[name]


@dataclass
class FileWeights(Weights):
    """Whole tensors of `model` (on meta) from its files, in its dtypes.

    Read through the safetensors library, as the audit does, so that a mistake of expertmesh's own reader shows.
    """

    model: PreTrainedModel
    directory: Path
    device: torch.device
    files: LibraryFiles = field(default_factory=LibraryFiles)
    plan: LoadPlan = field(init=False)
    state: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        with open_weight_files(self.directory, weights_file(self.model)) as checkpoint:
            self.plan = plan_load(self.model, checkpoint)
        self.state = model_tensors(self.model)

    def leaves(self, name: str) -> dict[str, Tensor]:
        lazy = self.plan.tensors[name]
        value = torch.empty(tuple(lazy.shape), dtype=self.state[name].dtype)
        read_box(lazy, full_box(lazy.shape), value, self.files)
        return {name: value.to(self.device)}


@dataclass
class MemoryWeights(Weights):
    """The whole unsharded model in host memory, by name; trainable in place."""

    tensors: dict[str, Tensor]
    device: torch.device

    @classmethod
    def of(cls, names: Iterable[str], weights: Weights, device: torch.device) -> "MemoryWeights":
        """All leaves of the tensors `names` (of tied ones the first)."""
        return cls({leaf: value.cpu() for name in names for leaf, value in weights.leaves(name).items()}, device)

    def leaves(self, name: str) -> dict[str, Tensor]:
        return {name: self.tensors[name].detach().to(self.device, copy=True)}


@dataclass
class AdaptedWeights(Weights):
    """`inner` with adapters on some weights, whose leaves carry the job's names; their values are `held`, or those of
    `adapter_value`.
    """

    inner: Weights
    plan: AdapterPlan
    anatomy: Anatomy
    dtype: torch.dtype
    device: torch.device
    held: dict[str, Tensor] | None = None
    targets: dict[str, Target] = field(init=False)

    def __post_init__(self) -> None:
        self.targets = {parameter_name(target): target for target in self.plan.targets}

    def leaves(self, name: str) -> dict[str, Tensor]:
        leaves = self.inner.leaves(name)
        if target := self.targets.get(name):
            for leaf, shape in _adapter_shapes(target, self.plan.lora.r).items():
                value = adapter_value(leaf, shape) if self.held is None else self.held[leaf]
                leaves[leaf] = value.detach().to(self.device, self.dtype, copy=True)
        return leaves

    def value(self, name: str, leaves: Mapping[str, Tensor]) -> Tensor:
        value = self.inner.value(name, leaves)
        target = self.targets.get(name)
        if target is None:
            return value
        a, b = (leaves[f"{target.module}.{leaf}"] for leaf in target.leaves)
        delta = b @ a
        if target.experts is not None and any(s.name == target.module and s.transposed for s in self.anatomy.experts):
            delta = delta.mT
        return value + (self.plan.lora.scaling * delta).to(value.dtype)


@torch.no_grad()
def set_adapters(model: PreTrainedModel) -> None:
    """Give the adapters of a sharded model the values that the reference has. No communication."""
    if (plan := plan_of(model)) is None:
        return
    state = dict(model.named_parameters())
    for target in plan.targets:
        for name, shape in _adapter_shapes(target, plan.lora.r).items():
            if name in state:
                local_tensor(state[name]).copy_(adapter_value(name, shape)[slices(local_box(state[name]))])


def adapter_value(name: str, shape: tuple[int, ...]) -> Tensor:
    """What verification puts into an adapter, by its name alone, in fp32: with B at its usual zero, A would have no
    gradient and an adapter that is never applied would go unnoticed.
    """
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values * (0.5 / shape[-1] ** 0.5 if name.endswith("A") else 0.05)


def _adapter_shapes(target: Target, r: int) -> dict[str, tuple[int, ...]]:
    """The shapes of A and B of one target, by parameter name."""
    lead = () if target.experts is None else (target.experts,)
    shapes = ((*lead, r, target.in_features), (*lead, target.out_features, r))
    return {f"{target.module}.{leaf}": shape for leaf, shape in zip(target.leaves, shapes, strict=True)}
