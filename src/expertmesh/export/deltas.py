"""Read a base's values from its files, with what a PEFT adapter adds (`scaling · B A`, in fp32 or wider) or replaces.

For merge.py and convert.py. One expert after the other is added straight onto the weights; no product of a whole expert
stack is ever formed. In memory are A and B of the two adapted weights that were used last. Nothing here communicates.
"""

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from expertmesh.adapters.peft_format import WEIGHTS_FILE, model_tensors_from, stored
from expertmesh.adapters.plan import AdapterPlan
from expertmesh.adapters.stream import add_delta
from expertmesh.config.errors import IntegrityError
from expertmesh.io.boxes import Box, extents, full_box
from expertmesh.io.safetensors_reader import WeightFiles
from expertmesh.weights.lazy import LazyTensor, read_box
from expertmesh.weights.mapping import LoadPlan, StateTensor


class Deltas:
    """The adapter in the opened `files`, for a model with `plan`; `targets` are its targets by the weight they adapt,
    `replaced` what it replaces.

    `unused[weight]` are the experts whose B is all zero, known once something of the weight has been added. Raises
    `IntegrityError` for files that do not hold exactly what the plan wants.
    """

    def __init__(self, plan: AdapterPlan, files: WeightFiles) -> None:
        self.targets = {target.weight: target for target in plan.targets}
        self.parts = plan.parts
        self.unused: dict[str, tuple[int, ...]] = {}
        self.replaced = plan.replaced
        tensors = {name: LazyTensor.of(tensor) for name, tensor in files.tensors.items()}
        path = files.directory / WEIGHTS_FILE
        self._new = {name: stored(path, tensors, each.key, each.shape, name) for name, each in plan.replaced.items()}
        for each in plan.replaced.values():
            del tensors[each.key]
        self._tensors = model_tensors_from(tensors, plan.targets, plan.parts, files.directory)
        self._files = files
        # Files hold an expert's two projections in turn.
        self._factors = lru_cache(maxsize=2)(self._read_factors)

    def add(self, weight: str, box: Box, values: Tensor) -> None:
        """Add the delta of `box` of an adapted weight to `values`, which hold that box in fp32 or wider."""
        add_delta(values, box, self.targets[weight], self._factors(weight))

    def replace(self, weight: str, box: Box, values: Tensor) -> None:
        """Write the new values of `box` of a replaced weight into `values`, which hold that box."""
        rows = self.replaced[weight].rows
        if rows is None:
            read_box(self._new[weight], box, values, self._files.read)
        else:
            (first, last), *others = box
            for number, row in enumerate(rows):
                if first <= row < last:
                    part = values[row - first : row - first + 1]
                    read_box(self._new[weight], ((number, number + 1), *others), part, self._files.read)
        self._refuse_non_finite(weight, values)

    def _read_factors(self, weight: str) -> tuple[Tensor, Tensor]:
        """Return A `[E, r, in]` and B `[E, out, r]` in the file's dtype, without E for a matrix."""
        target = self.targets[weight]
        a_ErK, b_ENr = (self._read(f"{target.module}.{leaf}") for leaf in target.leaves)
        if target.experts is not None:
            self.unused[weight] = tuple(expert for expert, b_Nr in enumerate(b_ENr) if not bool(b_Nr.any()))
        return a_ErK, b_ENr

    def _read(self, name: str) -> Tensor:
        lazy = self._tensors[name]
        values = torch.empty(tuple(lazy.shape), dtype=lazy.dtype)
        read_box(lazy, full_box(lazy.shape), values, self._files.read)
        self._refuse_non_finite(name, values)
        return values

    def _refuse_non_finite(self, name: str, values: Tensor) -> None:
        if not bool(values.isfinite().all()):
            raise IntegrityError(
                f"{self._files.directory}: {name} holds a value that is not finite; the adapter is damaged, or its "
                "training diverged",
                key="weights.not-finite",
            )


class FileValues:
    """Reads a model's values from its files, for `save_values`, with an adapter's changes if there is one.

    What is adapted or replaced comes in fp32 or wider, the rest in the dtype of the files.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], load: LoadPlan, files: WeightFiles, deltas: Deltas | None = None
    ) -> None:
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._load, self._files, self._deltas = load, files, deltas

    def __call__(self, leaf: StateTensor, box: Box) -> Tensor:
        name, deltas = self._names[id(leaf.tensor)], self._deltas
        lazy = self._load.tensors[name]
        adapted = deltas is not None and name in deltas.targets
        replaced = deltas is not None and name in deltas.replaced
        dtype = torch.promote_types(lazy.dtype, torch.float32) if adapted or replaced else lazy.dtype
        values = torch.empty(extents(box), dtype=dtype)
        read_box(lazy, box, values, self._files.read)
        if deltas is not None and adapted:
            deltas.add(name, box, values)
        elif deltas is not None and replaced:
            deltas.replace(name, box, values)
        return values
