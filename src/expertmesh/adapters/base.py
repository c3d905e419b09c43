"""Remember, write and compare a hash of the frozen base to which a model's adapters belong.

An adapter on another base is noise, and causes no error by itself: so resuming or merging it there is refused.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from expertmesh.config.errors import IntegrityError
from expertmesh.io.reading import parse_json, read_file
from expertmesh.io.safetensors_reader import open_weight_files
from expertmesh.state.model_view import ModelView, attach, sharded
from expertmesh.weights.mapping import plan_load
from expertmesh.weights.quantised.resident import published_formats
from expertmesh.weights.reading import content_hash

_FROZEN = (None, "float8", "nf4", "mxfp4", "nvfp4")


@dataclass(frozen=True, slots=True)
class Base:
    """The frozen weights of a model with adapters."""

    sha256: str
    """`content_hash` of the frozen weights, in the dtypes that they have in training."""
    dtype: str
    """The dtype of most of them."""
    frozen: str | None = None
    """The format to which they were quantised for training; None if they were not."""

    def __str__(self) -> str:
        packed = "" if self.frozen is None else f", packed as {self.frozen}"
        return f"{self.sha256[:12]} in {self.dtype}{packed}"


def remember_base(model: nn.Module) -> None:
    """Hash the frozen weights of a model with adapters, and remember the hash on the model.

    Collectives: every rank calls it; one all-reduce of one integer per tensor on the default group.
    """
    frozen = (p for p in ModelView(model).full.parameters() if not p.requires_grad)
    dtypes = [str(p.dtype).removeprefix("torch.") for p in frozen]
    kinds = {kind.name for kind in (sharded(model).frozen_formats or {}).values() if not kind.published}
    base = Base(content_hash(model), max(set(dtypes), key=dtypes.count), next(iter(kinds), None))
    attach(model, lora_base=base)


def remember_formats(model: Any, directory: Path) -> None:
    """Find out from headers in which formats the files in `directory` hold those weights of `model` that stay packed.

    Remembers the formats on the model, which may be on meta. No communication.

    Raises:
        InputError: Codes of the files cannot stay as they are.
    """
    view = ModelView(model)
    with open_weight_files(directory, view.weights_file) as files:
        attach(model, frozen_formats=published_formats(model, plan_load(view, files, complete=False)))


def base_of(model: nn.Module) -> Base:
    base = sharded(model).lora_base
    assert isinstance(base, Base), "the adapters of this model were never started"
    return base


def base_bytes(model: nn.Module) -> bytes:
    """Return the content of the file that describes the base beside an adapter."""
    said = {key: value for key, value in asdict(base_of(model)).items() if value is not None}
    return json.dumps(said).encode() + b"\n"


def read_base(path: Path, content: bytes | None = None) -> Base:
    """Read the description that `base_bytes` made from `path`, or from its `content`. Raises `IntegrityError`."""
    try:
        base = Base(**parse_json(read_file(path) if content is None else content))
        if not isinstance(base.sha256, str) or not isinstance(base.dtype, str) or base.frozen not in _FROZEN:
            raise TypeError("not text")
    except (TypeError, ValueError) as error:
        raise IntegrityError(
            f"{path}: does not say which base the adapter belongs to ({error})", key="adapter.damaged"
        ) from error
    return base


def check_base(path: Path, saved: Base, here: Base, otherwise: str = "") -> None:
    """Raise `IntegrityError` if the base `here` is not the `saved` one of `path`.

    Args:
        otherwise: The end of the sentence, for another way to continue.
    """
    if saved != here:
        raise IntegrityError(
            f"{path}: the adapter was trained on another base (weights {saved}, here {here}); use the model, the "
            f"precision.compute and the precision.frozen it was trained with{otherwise}",
            key="adapter.other-base",
        )
