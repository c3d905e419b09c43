"""Cut full tensors of the reference into the parts that this rank of the job holds.

The reference keeps experts that are a list of MLPs as they are; the job has them in fused parameters. This module maps
the names and boxes between both. It never communicates.
"""

import torch
from torch import Tensor

from expertmesh.experts.module_list import FusedExperts
from expertmesh.io.boxes import Box, extents, full_box, intersect, slices
from expertmesh.state.shards import local_box
from expertmesh.verification.job import Job
from expertmesh.verification.setup import Setup

# The place of a tensor of the unsharded model in a fused parameter of the job: the parameter's name, and the box.
FusedPlaces = dict[str, tuple[str, Box]]


class LocalParts:
    """Collects this rank's parts of the reference's full tensors in `parts`, by the job's names."""

    def __init__(self, job: Job, places: FusedPlaces) -> None:
        self._places = places
        self._boxes = {name: local_box(parameter) for name, parameter in job.parameters().items()}
        self.parts: dict[str, Tensor] = {}

    def take(self, name: str, whole: Tensor) -> None:
        """Store this rank's part of the full tensor `whole`; ignore a tensor of which this rank has no part."""
        into, box = self._places.get(name, (name, full_box(whole.shape)))
        if into not in self._boxes:
            return
        held = self._boxes[into]
        if into not in self.parts:
            self.parts[into] = torch.zeros(extents(held), dtype=whole.dtype, device=whole.device)
        common = intersect(box, held)
        if common is not None:
            self.parts[into][slices(common, held)] = whole.view(extents(box))[slices(common, box)]


def places_of_list_members(setup: Setup) -> FusedPlaces:
    """Return the places of the linears of experts that are a list, in the job's fused parameters.

    Returns:
        The fused parameter and the box, by the name of the linear's weight or bias; empty for other models.
    """
    places: FusedPlaces = {}
    for name, module in setup.meta_model(torch.float32).named_modules():
        if not isinstance(module, FusedExperts):
            continue
        up = "gate_up_proj" if module.has_gate else "up_proj"
        for leaf, end in (("weight", ""), ("bias", "_bias"))[: 1 + module.has_bias]:
            for linears, target in ((module.ups, up), ((module.down,), "down_proj")):
                whole = tuple(module.get_parameter(f"{target}{end}").shape)
                rows = whole[1] // len(linears)
                for expert in range(whole[0]):
                    for part, linear in enumerate(linears):
                        box = ((expert, expert + 1), (part * rows, (part + 1) * rows), *full_box(whole[2:]))
                        places[f"{name}.{expert}.{linear}.{leaf}"] = f"{name}.{target}{end}", box
    return places
