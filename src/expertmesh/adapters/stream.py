"""Stream a sharded model as the tensors of its files, one full tensor after the other, to inference engines.

Names, shapes and values are those that `save_model` writes, or, with adapters merged, those that `expertmesh merge`
writes. Beside the yielded tensor, a rank holds a block of it and A and B of two adapted weights. Never changes the
model.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from expertmesh.adapters.plan import AdapterPlan, plan_of
from expertmesh.adapters.targets import Target
from expertmesh.config.errors import IntegrityError
from expertmesh.distributed.all_ranks import raise_on_all_ranks
from expertmesh.io.boxes import Box, extents, full_box, slices
from expertmesh.state.model_view import ModelView, sharded
from expertmesh.weights.lazy import LazyTensor, read_box
from expertmesh.weights.mapping import StateTensor, plan_save
from expertmesh.weights.save import saved_specs
from expertmesh.weights.write import gather, is_gathered, live_values, owned_values

_BLOCK_ELEMENTS = 1 << 22


@torch.no_grad()
def iter_hf_weights(
    model: PreTrainedModel, *, dtype: torch.dtype | None = None, merge: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of every tensor of the model's files, one after the other, on every rank's device.

        llm.load_weights(em.iter_hf_weights(model, dtype=torch.bfloat16))  # an inference engine on the same ranks

    The names, shapes and bits are those that `save_model(model, dtype=dtype)` writes, per-expert files included.
    Unmapped tensors of the files (MTP layers), which never change, are left out. Works in every layout.

    Args:
        dtype: None for the dtypes that `save_model` chooses.
        merge: Merge adapters as `expertmesh merge` does: added in fp64 and rounded once.

    Yields:
        The name and the full tensor.

    Raises:
        InputError: The save cannot be planned.
        IntegrityError: Values do not fit in `dtype`.

    Collectives: every rank iterates to the end, or to the same place. One all-reduce of each tensor's bytes on the
    default group; for adapted weights an all-gather of A and B; for conversions that compute, one of their inputs
    instead. Errors are raised on all ranks.
    """
    with raise_on_all_ranks("planning what to stream"):
        view = ModelView(model)
        lazies = plan_save(view)
        specs = saved_specs(view, lazies, dtype)
    plan = plan_of(model) if merge else None
    values = _Values(view, plan)
    mesh = sharded(model).mesh
    device = next(model.parameters()).device if mesh is None else mesh.device
    for name, lazy in lazies.items():
        values.prepare(lazy)
        shape = tuple(lazy.shape)
        # The last byte reports values that do not fit: the all-reduce of the tensor also brings the error to all ranks.
        stored = torch.zeros(lazy.numel() * specs[name][0].itemsize + 1, dtype=torch.uint8, device=device)
        tensor = stored[:-1].view(specs[name][0]).view(shape)
        if is_gathered(lazy):
            fits = _compute(lazy, tensor, values)
        else:
            # A list, not a generator: `all` must not stop before every part is copied.
            fits = all([_copy(part, box, tensor) for box, part in owned_values(lazy, values, _BLOCK_ELEMENTS)])
            stored[-1] = not fits
            if dist.is_initialized():
                # MAX over bytes, of which one rank has each and the others zero: exact, and keeps the sign of zeros.
                dist.all_reduce(stored, dist.ReduceOp.MAX)
            fits = not bool(stored[-1])
        if not fits:
            raise IntegrityError(
                f"{name}: has values that {tensor.dtype} cannot hold; stream it in bfloat16 or float32",
                key="weights.dtype-too-narrow",
            )
        yield name, tensor


class _Values:
    """A reader of the model's values that merges adapters; merged values are in fp32 or wider."""

    def __init__(self, view: ModelView, plan: AdapterPlan | None) -> None:
        self._targets = {} if plan is None else {target.weight: target for target in plan.targets}
        self._adapters: Mapping[str, Tensor] = view.adapters if plan is not None else {}
        # Files hold an expert's two projections in turn.
        self._factors = lru_cache(maxsize=2)(self._gather_factors)
        self._gathered: dict[str, Tensor] = {}

    def prepare(self, lazy: LazyTensor) -> None:
        """Gather the tensors that `lazy` needs from other ranks.

        Collectives: every rank calls it; those of `gather` for computed tensors, and for A and B of adapted weights.
        """
        self._gathered = gather(lazy) if is_gathered(lazy) else {}
        for leaf in lazy.leaves():
            if leaf.name in self._targets:
                self._factors(leaf.name)

    def __call__(self, leaf: StateTensor, box: Box) -> Tensor:
        """Return the values of `box` of a tensor, with its adapter merged if it has one. Call `prepare` first."""
        gathered = self._gathered.get(leaf.name)
        values = live_values(leaf, box) if gathered is None else gathered[slices(box)]
        target = self._targets.get(leaf.name)
        if target is None:
            return values
        merged = values.to(torch.promote_types(values.dtype, torch.float32), copy=True)
        add_delta(merged, box, target, self._factors(leaf.name))
        return merged

    def _gather_factors(self, weight: str) -> tuple[Tensor, Tensor]:
        """Return the full A and B of an adapted weight."""
        target = self._targets[weight]
        found = []
        for leaf in target.leaves:
            name = f"{target.module}.{leaf}"
            whole = gather(LazyTensor.of(StateTensor(name, self._adapters[name])))
            found.append(whole.get(name, self._adapters[name]).detach())
        return found[0], found[1]


def add_delta(values: Tensor, box: Box, target: Target, factors: tuple[Tensor, Tensor]) -> None:
    """Add the part of `scaling · B A` in `box` of an adapted weight to `values`.

    Products and sums are in fp64, so that the result does not depend on how the weight was cut into boxes.

    Args:
        values: The values of `box`, in fp32 or wider.
        factors: A `[E, r, in]` and B `[E, out, r]`, without E for a matrix.
    """
    a_ErK, b_ENr = (factor if target.experts is not None else factor.unsqueeze(0) for factor in factors)
    (first, last), rows, columns = box if target.experts is not None else ((0, 1), *box)
    parts = values if target.experts is not None else values.unsqueeze(0)
    for expert, part in zip(range(first, last), parts, strict=True):
        a_rK, b_Nr = a_ErK[expert].double(), b_ENr[expert].double()
        left, right = (a_rK.t(), b_Nr.t()) if target.transposed else (b_Nr, a_rK)
        part.copy_(part.double().addmm_(left[slice(*rows)], right[:, slice(*columns)], alpha=target.scaling))


def _compute(lazy: LazyTensor, tensor: Tensor, values: _Values) -> bool:
    """Fill `tensor` with values computed from gathered ones, and return whether its dtype can hold them."""

    def fetch(leaf: StateTensor, box: Box, out: Tensor) -> None:
        out.copy_(values(leaf, box))

    computed = torch.empty(tuple(lazy.shape), dtype=lazy.dtype)
    read_box(lazy, full_box(lazy.shape), computed, fetch)
    return _copy(computed, full_box(lazy.shape), tensor)


def _copy(values: Tensor, box: Box, tensor: Tensor) -> bool:
    """Copy `values` into the box of `tensor`, and return whether its dtype can hold them."""
    part = tensor[slices(box)]
    assert tuple(part.shape) == extents(box), (part.shape, box)
    part.copy_(values)
    return part.dtype == values.dtype or bool(torch.equal(part.isfinite(), values.isfinite().to(part.device)))
