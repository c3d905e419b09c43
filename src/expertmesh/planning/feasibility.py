"""A cached view of the shard plan for thousands of layouts: which are refused, what tp splits, where stages are cut.

The answers are those of `plan_axes`, which decides for `train` as well, each computed once: tp for every size; cp and
pp with the smallest size that could do, because the remaining conditions are arithmetic (heads, blocks).
"""

import itertools
from collections.abc import Mapping
from functools import cache, cached_property
from typing import Any

from expertmesh.anatomy import decoder_blocks
from expertmesh.config.errors import InputError
from expertmesh.distributed.layout import Layout
from expertmesh.parallel.context import ContextPlan
from expertmesh.parallel.layers import refuse_by_layer
from expertmesh.parallel.shard_plan import KeptInFp32, ShardPlan, plan_axes
from expertmesh.parallel.stages import plan_stages, refuse_few_blocks
from expertmesh.parallel.tensor_plan import TensorPlan
from expertmesh.state.model_view import ModelView

_SMALL = (2, 3, 5, 7)


class Feasibility:
    """The layouts that one model on meta can have. Nothing communicates, the model stays as it is."""

    def __init__(self, model: Any, plan: ShardPlan, heads: int, kept_in_fp32: KeptInFp32) -> None:
        """Keep the model on meta and its shard plan, of any layout."""
        anatomy = plan.anatomy
        self._shards, self._cut = plan, plan.cut
        self._model, self._anatomy, self._heads, self._kept = model, anatomy, heads, kept_in_fp32
        self._blocks = decoder_blocks(anatomy)
        self._view = ModelView(model)

    def refusal(self, layout: Layout) -> str | None:
        """Return why `train` would not split this model so, or None."""
        one_axis = [Layout(tp=layout.tp)] if layout.tp > 1 else []
        if layout.cp > 1:
            one_axis.append(Layout(cp=next((size for size in _SMALL if self._heads % size == 0), layout.cp)))
        if layout.pp > 1:
            one_axis.append(Layout(pp=2))
            try:
                self.stages(layout.pp, layout.pp_virtual_stages)
            except InputError as error:
                return str(error)
        return next((str(found) for found in map(self._plan, one_axis) if isinstance(found, InputError)), None)

    def refuse_by_layer(self, layout: Layout) -> None:
        """Raise `InputError` if the model cannot be trained layer by layer in `layout`."""
        if (refusal := self._by_layer_refusal(layout.pp)) is not None:
            raise refusal

    @cache  # noqa: B019
    def _by_layer_refusal(self, pp: int) -> InputError | None:
        try:
            refuse_by_layer(self._shards, pp)
        except InputError as error:
            return error
        return None

    def any_tensor_plan(self) -> TensorPlan:
        """Return the plan of the fewest ranks that can share this model; of one rank (nothing is split) where
        none can.
        """
        plans = (self._plan(Layout(tp=tp)) for tp in (*_SMALL, 1))
        return next(plan[0] for plan in plans if not isinstance(plan, InputError))

    def any_context_plan(self) -> ContextPlan:
        """Return the plan of the fewest ranks that can share rows; of one rank where none can."""
        plans = (self._plan(Layout(cp=cp)) for cp in (*_SMALL, 1))
        return next(plan[1] for plan in plans if not isinstance(plan, InputError))

    @cache  # noqa: B019
    def stages(self, pp: int, virtual: int = 1) -> tuple[tuple[int, ...], ...]:
        """Return the numbers, among all of the model's blocks, of those of each stage; `virtual` stages on each of `pp`
        ranks. Raises `InputError` if there are too few blocks, or places to cut.
        """
        layout = Layout(pp=pp, pp_virtual_stages=virtual)
        refuse_few_blocks(len(self._blocks), layout)
        ranges = plan_stages(self._model, self._anatomy, self._blocks, layout, self._joined)
        place = {name: number for number, name in enumerate(self._anatomy.blocks)}
        return tuple(tuple(place[self._blocks[n]] for n in numbers) for numbers in ranges)

    @cached_property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        """The numbers, among all of the model's blocks, of those of each layer of accumulation by layer."""
        place = {name: number for number, name in enumerate(self._anatomy.blocks)}
        starts = [number for number in range(len(self._blocks)) if number not in self._joined]
        bounds = itertools.pairwise([*starts, len(self._blocks)])
        return tuple(tuple(place[self._blocks[n]] for n in range(*each)) for each in bounds)

    @cached_property
    def _joined(self) -> Mapping[int, str]:
        if self._cut is not None:
            return self._cut.joined
        return self._shards.decoder.joined

    @cache  # noqa: B019
    def _plan(self, layout: Layout) -> tuple[TensorPlan, ContextPlan] | InputError:
        """Return what tp and cp split, or why the axes of `layout` are refused."""
        try:
            return plan_axes(self._view, self._anatomy, layout, kept_in_fp32=self._kept)[:2]
        except InputError as error:
            return error
