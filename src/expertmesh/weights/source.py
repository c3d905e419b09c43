"""Remember on the model the files that its weights came from, so that saving restores their layout and dtypes.

The memory includes unmapped tensors, which the files hold and the model does not, such as next-token-prediction (MTP)
layers. transformers families declare such tensors unused. Loading remembers where they are, and saving copies them from
the files they came from (write.py). They are never trained. Nothing here communicates.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightTransform

from expertmesh.config.errors import ExpertmeshError
from expertmesh.io.safetensors_reader import FileTensor, WeightFiles, read_header
from expertmesh.state.sharded_model import attach, sharded
from expertmesh.weights.mapping import LoadPlan, model_tensors, plan_save, tied_names
from expertmesh.weights.quantised.published import plain_dtype, quantisation


@dataclass(frozen=True, slots=True)
class Source:
    """The files that a model was loaded from."""

    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    """The dtypes in the files by state-dict name, bfloat16 where they hold codes; empty for a model made in memory."""
    unmapped: tuple[FileTensor, ...] = ()
    """The tensors that the files hold and the model does not."""
    quantisation: Mapping[str, Any] | None = None
    """The `quantization_config` of the files."""
    packed: tuple[FileTensor, ...] = ()
    """The codes, scales and further parts of the tensors that the model has."""
    bare: bool = False
    """The files name the tensors inside the base model without its prefix."""


def remember_files(model: PreTrainedModel, plan: LoadPlan, files: WeightFiles) -> Source:
    """Remember on `model` the layout and dtypes of `files`, from which `plan` fills it."""
    # A new head is not in the files, so that no dtype of the files is recorded for it.
    tied = [names for names in tied_names(model_tensors(model)) if names[0] in plan.tensors]
    dtypes = {name: plain_dtype(plan.tensors[names[0]]) for names in tied for name in names}
    unmapped, published = set(plan.ignored), plan.published
    packed = [part for name in published.quantised for part in published.stored[name] if part not in unmapped]
    source = Source(
        dtypes,
        tuple(files.tensors[name] for name in plan.ignored),
        quantisation(model.config),
        tuple(files.tensors[name] for name in packed),
    )
    remember(model, plan.conversions, source)
    if not any(name.startswith(f"{model.base_model_prefix}.") for name in published.tensors):
        remember(model, plan.conversions, replace(source, bare=True))
        if not plan_save(model).keys() <= published.tensors.keys():
            remember(model, plan.conversions, source)
    return source_of(model)


def remember(model: nn.Module, conversions: Iterable[WeightTransform], source: Source) -> None:
    """Attach `source` to the model, and the conversion rules that loading applied, where transformers stores them."""
    model._weight_conversions = list(conversions)  # type: ignore[assignment]
    attach(model, source=source)


def source_of(model: nn.Module) -> Source:
    """Return the remembered source; an empty one for a model that was not loaded from files."""
    found: Source | None = sharded(model).source
    return found or Source()


@dataclass(frozen=True, slots=True)
class UnmappedTensors:
    """Tensors of the files whose names begin with the same components."""

    pattern: str
    """For example `model.layers.61.*`, or the name of a single tensor."""
    tensors: int
    bytes: int


def summarize_unmapped(tensors: Sequence[FileTensor], used: Collection[str]) -> tuple[UnmappedTensors, ...]:
    """Group `tensors` by the shortest prefixes of full name components that no name in `used` shares."""
    taken = {prefix for name in used for prefix in _prefixes(name)}
    groups: dict[str, list[FileTensor]] = {}
    for tensor in tensors:
        free = next((prefix for prefix in _prefixes(tensor.name) if prefix not in taken), tensor.name)
        groups.setdefault(free if free == tensor.name else f"{free}.*", []).append(tensor)
    return tuple(
        UnmappedTensors(pattern, len(group), sum(tensor.nbytes for tensor in group))
        for pattern, group in groups.items()
    )


def still_readable(tensors: Sequence[FileTensor]) -> bool:
    """Return whether the files still hold `tensors` where they were when the model was loaded."""
    try:
        headers = {path: read_header(path) for path in {tensor.path for tensor in tensors}}
    except ExpertmeshError:
        return False
    return all(headers[tensor.path].get(tensor.name) == tensor for tensor in tensors)


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
