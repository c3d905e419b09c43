"""The further parallel axes of one family: the runs that prove each, or why the product refuses it.

The measure is proof.py's, at one small layout of the axis. A new axis is an entry of `AXES` and of `_REFUSALS`;
docs/models.md gets a column for each.
"""

from collections.abc import Callable, Mapping

from torch import nn

from expertmesh.anatomy import Anatomy, describe
from expertmesh.config.errors import InputError
from expertmesh.distributed.layout import Layout as Ranks
from expertmesh.parallel.context import context_plan
from expertmesh.parallel.sequence import refuse_blocks
from expertmesh.parallel.stages import plan_cut
from expertmesh.parallel.tensor_plan import tensor_plan
from expertmesh.weights.meta_model import build_meta_model
from tests.families.proof import Layout, Run
from tests.families.tiny import random_model, tiny_config

# By axis: the layout that it is measured at, and its size.
AXES: Mapping[str, tuple[Layout, int]] = {
    "tp": ((2, 2, "grouped_mm"), 2),
    "cp": ((2, 2, "grouped_mm"), 2),
    "pp": ((2, 1, "grouped_mm"), 2),
}


def _refuse_tp(model: nn.Module, anatomy: Anatomy, ranks: Ranks) -> None:
    refuse_blocks(model, anatomy, ranks)
    tensor_plan(model, anatomy, ranks.tp, lambda name: False)


def _refuse_cp(model: nn.Module, anatomy: Anatomy, ranks: Ranks) -> None:
    context_plan(model, anatomy, ranks)
    refuse_blocks(model, anatomy, ranks)


_REFUSALS: Mapping[str, Callable[[nn.Module, Anatomy, Ranks], object]] = {
    "tp": _refuse_tp,
    "cp": _refuse_cp,
    "pp": plan_cut,
}


def run_of(axis: str) -> Run:
    """What proves `axis`."""
    layout, size = AXES[axis]
    return Run(layout, {axis: size})


def refusal_of(model_class: str, family: str, axis: str) -> str | None:
    """Why the product refuses the family on `axis`, before it reads a weight; or None."""
    config = tiny_config(model_class, family)
    model = build_meta_model(config, random_model(model_class, family).dtype)
    try:
        _REFUSALS[axis](model, describe(model), Ranks(**{axis: AXES[axis][1]}))
    except InputError as refusal:
        return f"refused: {str(refusal).partition(': ')[2]}"
    return None
