"""The proof of one family on each further parallel axis: the same measure as proof.py, at one small layout of the axis.

A new axis is an entry of `AXES` and of `_REFUSALS`; docs/models.md gets a column for each.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import nn

from expertmesh.anatomy import Anatomy, describe
from expertmesh.config.errors import InputError
from expertmesh.mesh import Layout as Ranks
from expertmesh.parallel.context import refuse_context
from expertmesh.weights.skeleton import build_meta_model
from tests.families.proof import Layout, Proof, prove
from tests.families.tiny import random_model, tiny_config

# By axis: the layout that it is measured at, and its size.
AXES: Mapping[str, tuple[Layout, int]] = {"cp": ((2, 2, "grouped_mm"), 2)}
_REFUSALS: Mapping[str, Callable[[nn.Module, Anatomy, Ranks], None]] = {"cp": refuse_context}


def prove_axis(model_class: str, family: str, scratch: Path, axis: str) -> Proof | str:
    """As `proof.prove` with rows, layers or matrices split over `axis`; or why the family is refused there."""
    layout, size = AXES[axis]
    config = tiny_config(model_class, family)
    model = build_meta_model(config, random_model(model_class, family).dtype)
    try:
        _REFUSALS[axis](model, describe(model), Ranks(**{axis: size}))
    except InputError as refusal:
        return f"refused: {str(refusal).partition(': ')[2]}"
    return prove(model_class, family, scratch, (layout,), {axis: size})
