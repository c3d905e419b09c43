"""What a model remembers of the files that its weights came from, so that saving gives them back in the same way: the
layout, the dtypes, and unmapped tensors, which the files hold and the model does not, such as next-token-prediction
(MTP) layers.

transformers families declare such tensors unused. Loading remembers where they are, and saving copies them from the
files they came from (write.py). They are never trained. Nothing here communicates.
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
    """`dtypes`: those of the files, bfloat16 where they hold codes, by state name; none of a model made in memory.

    `unmapped` are the tensors that the files hold and the model does not; `quantisation` is the `quantization_config`,
    and `packed` are the codes and scales, and what belongs to them, of the tensors that the model has. `bare`: the
    files name what is inside the base model without its prefix.
    """

    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    unmapped: tuple[FileTensor, ...] = ()
    quantisation: Mapping[str, Any] | None = None
    packed: tuple[FileTensor, ...] = ()
    bare: bool = False


def remember_files(model: PreTrainedModel, plan: LoadPlan, files: WeightFiles) -> Source:
    """`remember` what there is to know of `files`, from which `plan` fills `model`."""
    # A new head, which the files lack, has the dtype of its own.
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
    """Note on the model how its files hold it: the rules that loading applied, where transformers itself notes them,
    and `source`, for `source_of`.
    """
    model._weight_conversions = list(conversions)  # type: ignore[assignment]
    attach(model, source=source)


def source_of(model: nn.Module) -> Source:
    """What was remembered; an empty one for a model that was not loaded from files."""
    found: Source | None = sharded(model).source
    return found or Source()


@dataclass(frozen=True, slots=True)
class UnmappedTensors:
    """Tensors of the files whose names begin alike; `pattern` is `model.layers.61.*`, or a name."""

    pattern: str
    tensors: int
    bytes: int


def summarize_unmapped(tensors: Sequence[FileTensor], used: Collection[str]) -> tuple[UnmappedTensors, ...]:
    """`tensors` by the shortest prefixes of names, in whole components, that no name in `used` shares."""
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
    """Whether the files still hold `tensors` where they were when the model was loaded."""
    try:
        headers = {path: read_header(path) for path in {tensor.path for tensor in tensors}}
    except ExpertmeshError:
        return False
    return all(headers[tensor.path].get(tensor.name) == tensor for tensor in tensors)


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
