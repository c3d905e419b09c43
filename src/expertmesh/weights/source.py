"""What a model remembers of the files that its weights came from, so that saving gives them back in the same way: the
layout, the dtypes, and unmapped tensors, which the files hold and the model does not, such as next-token-prediction
(MTP) layers.

transformers families declare such tensors unused. Loading remembers where they are, and saving copies them from the
files they came from (write.py). They are never trained. Nothing here communicates.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightTransform

from expertmesh.config.errors import ExpertmeshError
from expertmesh.io.safetensors_reader import FileTensor, WeightFiles, read_header
from expertmesh.state.sharded_model import attach, sharded
from expertmesh.weights.mapping import LoadPlan, model_tensors, tied_names
from expertmesh.weights.quantised.published import plain_dtype, quantisation


@dataclass(frozen=True, slots=True)
class Source:
    """`dtypes`: those of the files, bfloat16 where they hold codes, by state name; none of a model made in memory.

    `unmapped` are the tensors that the files hold and the model does not; `quantisation` is the `quantization_config`.
    """

    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    unmapped: tuple[FileTensor, ...] = ()
    quantisation: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, plan: LoadPlan, files: WeightFiles) -> "Source":
        """Of `files`, from which `plan` fills `model`."""
        names = tied_names(model_tensors(model))
        filled = (tied for tied in names if tied[0] in plan.tensors)  # a new head is in no file
        dtypes = {name: plain_dtype(plan.tensors[tied[0]]) for tied in filled for name in tied}
        return cls(dtypes, tuple(files.tensors[name] for name in plan.ignored), quantisation(model.config))


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
