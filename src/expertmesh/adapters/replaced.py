"""Find the weights whose new values a PEFT directory holds beside its low-rank adapters, for a merge.

`modules_to_save` are modules that were trained in full, `trainable_token_indices` rows of embeddings. Follows PEFT's
rules for their names. Reads no values; nothing here communicates.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from expertmesh.adapters.peft_config import refuse_field
from expertmesh.adapters.peft_format import PREFIX
from expertmesh.adapters.targets import embedding_target
from expertmesh.state.model_view import ModelView


@dataclass(frozen=True, slots=True)
class Replaced:
    """New values of a weight, or of some of its rows."""

    key: str
    """Their name in PEFT's file."""
    rows: tuple[int, ...] | None
    """The rows of the weight, in the order of the file's; None for all of the weight."""
    shape: tuple[int, ...]
    """Shape of the new values."""


def replaced_by(model: nn.Module, content: Mapping[str, Any], directory: Path) -> dict[str, Replaced]:
    """Return what an adapter_config.json replaces of `model`, by the name of the weight.

    Args:
        directory: For messages.

    Raises:
        InputError: Rows that the weight does not have, or a tied weight that PEFT would untie.
    """
    view, modules = ModelView(model), [name for name, _ in model.named_modules()]
    found: dict[str, Replaced] = {}
    for entry in content.get("modules_to_save") or ():
        inside = tuple(f"{module}." for module in modules if module.endswith(entry))
        of_entry = {name: tuple(tensor.shape) for name, tensor in view.tensors.items() if name.startswith(inside)}
        found |= {name: Replaced(PREFIX + name, None, shape) for name, shape in of_entry.items()}
    for entry, rows in _token_rows(model, content):
        ends = [name for name in modules if name.endswith(entry) and f"{name}.weight" in view.tensors]
        if not ends:
            refuse_field(str(directory), "trainable_token_indices", entry, "no embedding here has this name")
        for module in ends:
            count, *others = view.tensors[f"{module}.weight"].shape
            if not all(row < count for row in rows):
                refuse_field(str(directory), "trainable_token_indices", max(rows), f"{module} has {count:,} rows")
            key = f"{PREFIX}{module}.token_adapter.trainable_tokens_delta"
            found[f"{module}.weight"] = Replaced(key, rows, (len(rows), *others))
    embedding = embedding_target(model).weight
    for names in view.ties:
        of_tie = [name for name in names if name in found] if len(names) > 1 else []
        whole = any(found[name].rows is None for name in of_tie)
        # PEFT ties the rows of an input embedding, and nothing else.
        if whole or len(of_tie) > 1 or (of_tie and of_tie[0] != embedding):
            key = "modules_to_save" if whole else "trainable_token_indices"
            refuse_field(str(directory), key, content[key], f"{' and '.join(names)} are one weight, which it parts")
        for name in of_tie:
            found[names[0]] = found.pop(name)
    return found


def _token_rows(model: nn.Module, content: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the ends of modules' names with the rows of their weights that were trained."""
    said = content.get("trainable_token_indices") or {}
    if isinstance(said, list):
        said = {embedding_target(model).module.rpartition(".")[2]: said}
    yield from ((entry, tuple(rows)) for entry, rows in said.items())
