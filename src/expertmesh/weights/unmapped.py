"""Unmapped tensors: what the files hold and the model does not, such as next-token-prediction (MTP) layers.

transformers families declare such tensors unused. Loading remembers where they are, and saving copies them from the
files they came from (write.py). They are never trained. Nothing here communicates.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from torch import nn
from transformers.core_model_loading import WeightTransform

from expertmesh.config.errors import ExpertmeshError
from expertmesh.io.safetensors_reader import FileTensor, read_header
from expertmesh.state.sharded_model import attach, sharded


@dataclass(frozen=True, slots=True)
class UnmappedTensors:
    """Tensors of the files whose names begin alike; `pattern` is `model.layers.61.*`, or a name."""

    pattern: str
    tensors: int
    bytes: int


def remember(model: nn.Module, conversions: Iterable[WeightTransform], tensors: Iterable[FileTensor]) -> None:
    """Note on the model how its files hold it, for when it is saved: the rules that loading applied, where transformers
    itself notes them, and the tensors beside it, for `remembered`.
    """
    model._weight_conversions = list(conversions)  # type: ignore[assignment]
    attach(model, unmapped=tuple(tensors))


def remembered(model: nn.Module) -> tuple[FileTensor, ...]:
    return sharded(model).unmapped


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
