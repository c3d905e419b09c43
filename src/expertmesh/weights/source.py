"""Remember on the model the files that its weights came from, so that saving restores their layout and dtypes.

The memory includes unmapped tensors, which the files hold and the model does not, such as next-token-prediction (MTP)
layers. transformers families declare such tensors unused. Loading remembers where they are, and saving copies them from
the files they came from (write.py). They are never trained. Nothing here communicates.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from torch import nn
from transformers.core_model_loading import WeightTransform

from expertmesh.compat import set_weight_conversions
from expertmesh.config.errors import ExpertmeshError
from expertmesh.io.safetensors_reader import FileTensor, WeightFiles, read_header
from expertmesh.state.model_view import ModelView, Source, attach
from expertmesh.weights.mapping import LoadPlan, plan_save
from expertmesh.weights.quantised.published import plain_dtype


def remember_files(view: ModelView, plan: LoadPlan, files: WeightFiles) -> Source:
    """Remember on the model the layout and dtypes of `files`, from which `plan` fills it."""
    # A new head is not in the files, so that no dtype of the files is recorded for it.
    tied = [names for names in view.ties if names[0] in plan.tensors]
    dtypes = {name: plain_dtype(plan.tensors[names[0]]) for names in tied for name in names}
    unmapped, published = set(plan.ignored), plan.published
    packed = [part for name in published.quantised for part in published.stored[name] if part not in unmapped]
    source = Source(
        dtypes,
        tuple(files.tensors[name] for name in plan.ignored),
        published.settings,
        tuple(files.tensors[name] for name in packed),
        bare=not any(name.startswith(f"{view.module.base_model_prefix}.") for name in published.tensors),
    )
    remember(view.module, plan.conversions, source)
    if source.bare and not plan_save(view).keys() <= published.tensors.keys():
        source = replace(source, bare=False)
        remember(view.module, plan.conversions, source)
    return source


def remember(model: nn.Module, conversions: Iterable[WeightTransform], source: Source) -> None:
    """Attach `source` to the model, and the conversion rules that loading applied, where transformers stores them."""
    set_weight_conversions(model, list(conversions))
    attach(model, source=source)


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
