"""The values of the reference's weights: read (or drawn) each time a unit needs them, or held in memory.

Reading follows transformers' conversion rules, with one tensor in memory at a time. All tensors are held in memory only
for several steps of an unsharded model that fits into the machine. Nothing here communicates.
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
from expertmesh.state.model_view import ModelView
from expertmesh.state.shards import local_box, local_tensor
from expertmesh.verification.setup import Setup
from expertmesh.weights.audit import LibraryFiles
from expertmesh.weights.first_values import FirstValues, open_weights
from expertmesh.weights.mapping import LoadPlan, plan_load
from expertmesh.weights.quantised.resident import kept_plan
from expertmesh.weights.reading import read_box


@dataclass
class Weights:
    """The full tensors of a model, by the first name of each tensor.

    A weight with an adapter has the value `W + scaling * B A`. Frozen weights that the job packs have the values that
    their codes stand for. Files are read through the safetensors library, as in the audit, so an error in expertmesh's
    reader becomes visible.
    """

    model: PreTrainedModel
    """The unsharded model, on meta."""
    setup: Setup
    """The verification; names the directory of the files."""
    job_model: PreTrainedModel
    """The sharded model, which has the adapters and the packed formats."""
    device: torch.device
    """The device for the values."""
    adapted: bool = True
    """Add the adapters to the weights."""
    held: dict[str, Tensor] | None = None
    """The leaves in host memory, by name; None: read from the files."""
    files: LibraryFiles | FirstValues = field(default_factory=LibraryFiles)
    """Reads the files, or draws the first values."""
    plan: LoadPlan = field(init=False)
    """The source of each tensor in the files."""
    adapters: AdapterPlan | None = field(init=False)
    """The adapters of the job, or None."""
    state: dict[str, Tensor] = field(init=False)
    """The tensors of `model`, on meta, by name."""
    targets: dict[str, Target] = field(init=False)
    """The adapter of each adapted weight, by the weight's name."""

    def __post_init__(self) -> None:
        view = ModelView(self.model)
        with open_weights(view, self.setup.directory, self.setup.weights_seed) as checkpoint:
            if isinstance(checkpoint, FirstValues):
                self.files = checkpoint
            self.plan = kept_plan(self.job_model, plan_load(view, checkpoint))
        self.adapters = plan_of(self.job_model) if self.adapted else None
        self.state = view.tensors
        targets = self.adapters.targets if self.adapters is not None else ()
        self.targets = {target.weight: target for target in targets}

    def in_memory(self, names: Iterable[str]) -> tuple["Weights", dict[str, Tensor]]:
        """Return the same weights with all leaves of the tensors `names` held in memory, and these leaves.

        The leaves may be trained in place.
        """
        weights = copy(self)
        weights.held = {leaf: value.cpu() for name in names for leaf, value in self.leaves(name).items()}
        return weights, weights.held

    def leaves(self, name: str) -> dict[str, Tensor]:
        """Return the leaves of a tensor on the device, by name: the tensor without adapters, and its A and B."""
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
        """Return the tensor, computed from its leaves under autograd."""
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
    """Set the adapters of a sharded model to the values that the reference has. Collectives: none."""
    if (plan := plan_of(model)) is None:
        return
    state = dict(model.named_parameters())
    for target in plan.targets:
        for name, shape in _adapter_shapes(target).items():
            if name in state:
                local_tensor(state[name]).copy_(adapter_value(name, shape)[slices(local_box(state[name]))])


def adapter_value(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return the value of an adapter matrix during verification, in fp32; it depends on name and shape alone.

    If B were zero as usual, A would have no gradient, and an adapter that is never applied would not be noticed.
    """
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values * (0.5 / shape[-1] ** 0.5 if name.endswith("A") else 0.05)


def _adapter_shapes(target: Target) -> dict[str, tuple[int, ...]]:
    """Return the shapes of A and B of one target, by parameter name."""
    return {f"{target.module}.{leaf}": shape for leaf, shape in zip(target.leaves, target.shapes, strict=True)}
