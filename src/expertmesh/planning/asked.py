"""What the planner asks of the code that trains: which layouts it would refuse, what tp splits, where stages are cut.

The answers come from the functions that `train` calls before it reads weights, on the same model on meta, and each is
asked once: tp for every size; cp and pp for the family with the smallest size that could do, the rest of their
conditions being arithmetic (heads, blocks).
"""

from collections.abc import Callable
from typing import Any

from expertmesh.anatomy import Anatomy
from expertmesh.config.errors import InputError
from expertmesh.distributed.layout import Layout
from expertmesh.parallel.context import refuse_context
from expertmesh.parallel.pipeline import plan_cut
from expertmesh.parallel.sequence import decoder_blocks, refuse_blocks
from expertmesh.parallel.stages import plan_stages
from expertmesh.parallel.tensor_plan import TensorPlan, tensor_plan

_SMALL = (2, 3, 5, 7)


class Asked:
    """Of one model on meta, as `facts_of` has built it. Nothing communicates, the model stays as it is."""

    def __init__(self, model: Any, anatomy: Anatomy, heads: int, kept_in_fp32: Callable[[str], bool]) -> None:
        self._model, self._anatomy, self._heads, self._kept = model, anatomy, heads, kept_in_fp32
        self._blocks = decoder_blocks(anatomy)
        self._refusals: dict[tuple[str, int], str | None] = {}
        self._plans: dict[int, TensorPlan] = {}
        self._stages: dict[tuple[int, int], tuple[tuple[int, ...], ...]] = {}

    def refusal(self, layout: Layout) -> str | None:
        """Why `train` would not split this model so, or None."""
        found = None
        if layout.tp > 1:
            found = self._once("tp", layout.tp, lambda: self.tensor_plan(layout.tp))
        if layout.cp > 1:
            least = next((size for size in _SMALL if self._heads % size == 0), layout.cp)
            found = found or self._once("cp", least, lambda: self._refuse_context(least))
        if layout.cp * layout.tp > 1:
            found = found or self._once("blocks", 2, lambda: refuse_blocks(self._model, self._anatomy, Layout(cp=2)))
        if layout.pp > 1:
            virtual = layout.pp_virtual_stages
            found = found or self._once(f"{virtual} stages", layout.pp, lambda: self.stages(layout.pp, virtual))
            found = found or self._once("pp", 2, lambda: plan_cut(self._model, self._anatomy, Layout(pp=2)))
        return found

    def tensor_plan(self, tp: int) -> TensorPlan:
        """Raises `InputError` where tp ranks cannot share this model."""
        if tp not in self._plans:
            self._plans[tp] = tensor_plan(self._model, self._anatomy, tp, self._kept)
        return self._plans[tp]

    def any_tensor_plan(self) -> TensorPlan:
        """Of the fewest ranks that can share this model; of one rank (nothing is split) where none can."""
        for tp in _SMALL:
            if self._once("tp", tp, lambda tp=tp: self.tensor_plan(tp)) is None:  # type: ignore[misc]
                return self.tensor_plan(tp)
        return self.tensor_plan(1)

    def stages(self, pp: int, virtual: int = 1) -> tuple[tuple[int, ...], ...]:
        """The numbers, among all of the model's blocks, of those of each stage; `virtual` stages on each of `pp` ranks.
        Raises `InputError` if there are too few blocks.
        """
        if (pp, virtual) not in self._stages:
            layout = Layout(pp=pp, pp_virtual_stages=virtual)
            ranges = plan_stages(self._model, self._anatomy, self._blocks, layout)
            place = {name: number for number, name in enumerate(self._anatomy.blocks)}
            found = tuple(tuple(place[self._blocks[n]] for n in numbers) for numbers in ranges)
            self._stages[pp, virtual] = found
        return self._stages[pp, virtual]

    def _refuse_context(self, cp: int) -> None:
        refuse_context(self._model, self._anatomy, Layout(cp=cp))

    def _once(self, axis: str, size: int, ask: Callable[[], Any]) -> str | None:
        if (axis, size) not in self._refusals:
            try:
                ask()
                self._refusals[axis, size] = None
            except InputError as error:
                self._refusals[axis, size] = str(error)
        return self._refusals[axis, size]
