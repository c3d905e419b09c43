"""Bytes that one rank holds: its state, and the most of everything else at each moment of a step that can be the peak.

Each formula follows the code it is about and says which: FSDP2's groups (parallel/fsdp.py), the expert layer
(experts/compute.py, dispatch.py), the head in chunks (training/loss.py). Blocks' own code comes from the probe.
docs/planning.md derives them; benchmarks/planning.py compares them with what ranks hold.

    R rows received, P pairs, H hidden, I intermediate, W columns of the up projection, L experts on a rank
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Literal, NamedTuple

from expertmesh.config.sections import BYTES_OF
from expertmesh.mesh import Layout
from expertmesh.parallel.refusals import expert_shard_dim
from expertmesh.planning.facts import Block, Experts, Facts, Unit
from expertmesh.planning.routing import Routing, expected
from expertmesh.planning.state import has_root, sizes_of, stage_blocks, stage_kinds, state_of

Mode = Literal["none", "selective", "full"]
CHUNK_TOKENS = 1024  # causal_lm_loss's own
INDEX = 8  # int64


@dataclass(frozen=True, slots=True)
class Batch:
    """How an optimizer step is cut: micro-batches of `rows` sequences, `accumulation` of them."""

    rows: int
    accumulation: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank at its worst moment. `frozen` are parameters that do not train, `master` those that do;
    `unsharded` are parameters and gradients of the blocks in flight, gathered; `activations` what is saved for
    backward; `dispatch` what routed experts hold while they run; `logits` what the head does; `working` what blocks
    hold while they run; `overhead` the device's own.
    """

    frozen: float = 0
    master: float = 0
    gradients: float = 0
    moments: float = 0
    unsharded: float = 0
    activations: float = 0
    dispatch: float = 0
    logits: float = 0
    working: float = 0
    overhead: float = 0
    moment: str = ""

    @property
    def total(self) -> float:
        held = self.unsharded + self.activations + self.dispatch + self.logits + self.working
        return self.state + held + self.overhead

    @property
    def state(self) -> float:
        return self.frozen + self.master + self.gradients + self.moments


def memory_of(
    facts: Facts,
    layout: Layout,
    batch: Batch,
    mode: Mode,
    *,
    moments: int = 2,
    overhead: float = 0.0,
    imbalance: float = 1.0,
    chunk_tokens: int = CHUNK_TOKENS,
    gloo: bool = False,
) -> Memory:
    """The peak of the worst rank. `moments`: tensors the optimizer keeps per parameter (2 for AdamW, 0 for SGD).

    `gloo` reduces from a copy of its input.
    """
    model = _Model(facts, layout, batch, mode, moments, overhead, imbalance, chunk_tokens, gloo)
    # The first stage has most micro-batches in flight and the embedding, the last one the head.
    stages = {0, layout.pp - 1}
    _, stage, worst = max(
        ((model.total(stage, moment), stage, moment) for stage in stages for moment in model.moments_of(stage)),
        key=lambda found: found[0],
    )
    return model.memory(stage, worst)


def saved_of(
    facts: Facts, layout: Layout, batch: Batch, mode: Mode, imbalance: float = 1.0, *, stage: int = 0
) -> float:
    """Bytes saved between forward and backward of one micro-batch, by a stage's blocks, what is around them and the
    head.
    """
    model = _Model(facts, layout, batch, mode, 0, 0.0, imbalance, CHUNK_TOKENS, False)
    kept = model.kept_by(model.stage(stage))[-1] + model.tables + model.handed(stage)
    return kept + (model.outside + model.head_saved() if stage == layout.pp - 1 else 0.0)


@cache
def _edges(facts: Facts, stages: int, stage: int) -> tuple[int, ...]:
    """Blocks at which the peak can be: what is saved falls and gradients grow evenly in between."""
    places: dict[Block, list[int]] = {}
    for index, block in enumerate(stage_blocks(facts, stages, stage)):
        places.setdefault(block, []).append(index)
    return tuple(sorted({edge for found in places.values() for edge in (found[0], found[-1])}, reverse=True))


class _Moment(NamedTuple):
    """What is held at one moment beside state; `share` of the gradients are there by then."""

    name: str
    share: float
    unsharded: float
    activations: float
    dispatch: float = 0.0
    logits: float = 0.0
    working: float = 0.0


def in_flight(layout: Layout, batch: Batch, stage: int) -> int:
    """Micro-batches whose activations a stage holds at once (one forward, one backward: 1F1B)."""
    return min(layout.pp - stage, batch.accumulation)


class _Model:
    """All quantities of one layout, named as docs/planning.md names them; bytes of one rank."""

    def __init__(
        self,
        facts: Facts,
        layout: Layout,
        batch: Batch,
        mode: Mode,
        moments: int,
        overhead: float,
        imbalance: float,
        chunk_tokens: int,
        gloo: bool,
    ) -> None:
        self.facts, self.layout, self.batch, self.mode = facts, layout, batch, mode
        self.moment_count, self.overhead, self.imbalance, self.gloo = moments, overhead, imbalance, gloo
        self.compute = BYTES_OF[facts.precision.compute]
        self.master = BYTES_OF[facts.precision.params]
        self.reduce = max(BYTES_OF[facts.precision.reduce], self.compute)
        self.states = {stage: state_of(facts, layout, stage) for stage in {0, layout.pp - 1}}
        self.tokens = batch.rows * facts.length / (layout.cp * layout.tp)
        self.hidden = self.tokens * facts.hidden * self.compute
        self.chunk = min(chunk_tokens, batch.rows * (facts.length - 1) / layout.cp)
        self.gathers_experts = layout.efsdp * layout.replicate > 1
        kinds = {id(block): block for block, _ in stage_kinds(facts, 1, 0)}
        self.saved = {key: self._saved(block) for key, block in kinds.items()}
        self.kept = {key: self._kept(block) for key, block in kinds.items()}
        self.tables = facts.tables
        self.outside = (facts.outside - facts.tables) * batch.rows / (layout.cp * layout.tp)
        # A head that trains saves its input, though it is called on no token of it (base_model.py).
        self.last = self.hidden if facts.head_trains else 0.0

    def stage(self, stage: int) -> tuple[Block, ...]:
        return stage_blocks(self.facts, self.layout.pp, stage)

    def kept_by(self, blocks: tuple[Block, ...]) -> list[float]:
        """What stays after each block's forward, those before it included."""
        kept = [self.kept[id(block)] for block in blocks]
        if self.mode == "none" and blocks[0] is self.facts.blocks[0]:
            kept[0] -= self.facts.first_saves_less * self.batch.rows / (self.layout.cp * self.layout.tp)
        return list(accumulate(kept))

    def handed(self, stage: int) -> float:
        """What a pipeline stage keeps of a micro-batch at its borders beside what its blocks keep: what it sends; and
        where inputs of blocks are kept, the first block's is among what it has `received`.
        """
        return self.hidden * ((stage < self.layout.pp - 1) - (stage > 0 and self.mode != "none"))

    def received(self, stage: int) -> float:
        """Buffers for what a step's micro-batches receive: hidden states, and their gradients (torch's stages)."""
        return ((stage > 0) + (stage < self.layout.pp - 1)) * self.batch.accumulation * self.hidden

    # Activations.

    def routing(self, experts: Experts) -> Routing:
        return expected(self.tokens, experts.choice, self.layout.ep, self.imbalance)

    def _saved(self, block: Block) -> float:
        """Everything that backward of a block reads, when nothing is recomputed."""
        figures, layout = block.figures, self.layout
        gathered = (block.parts.split + block.parts.whole) * self.hidden * (layout.tp - 1)
        mask = figures.mask * self.batch.rows
        # What each rank of tp computes for all heads: latents.
        gathered += figures.latents * self.batch.rows / layout.cp * (1 - 1 / layout.tp)
        own = (figures.saved - figures.mask) * self.batch.rows / (layout.cp * layout.tp)
        # cp: what attention gives stays as it was before and after the exchange.
        own += figures.attended * self.batch.rows / (layout.cp * layout.tp) if layout.cp > 1 else 0
        return own + mask + gathered + (self.saved_by_experts(block.experts) if block.experts else 0)

    def saved_by_experts(self, experts: Experts) -> float:
        """compute.py saves rows, pre-activations and indices; dispatch.py the indices of the way back."""
        route, spec = self.routing(experts), experts.spec
        pairs = route.pairs * (experts.width * self.compute + 4 + 2 * INDEX)
        if experts.adapted:
            padded = -(-experts.rank // 8) * 8
            pairs += route.pairs * 2 * padded * self.compute
        if self.layout.ep == 1:
            # The rows are the block's own tokens, which its router has saved.
            return pairs + route.pairs * INDEX + (route.tokens + 1) * INDEX
        rows = route.rows * (spec.hidden_size * self.compute + INDEX)
        way_back = (route.pairs + route.tokens * experts.choice.top_k + 2 * route.sent + route.tokens) * INDEX
        return pairs + rows + way_back

    def _kept(self, block: Block) -> float:
        """What stays of a block between forward and backward in this mode."""
        if self.mode == "none":
            return self.saved[id(block)]
        share = self.batch.rows / (self.layout.cp * self.layout.tp)
        kept = self.hidden + block.figures.choices * share
        if self.mode == "selective":
            kept += (block.figures.attended + block.figures.normalisers) * share
        if block.experts is None:
            return kept
        route = self.routing(block.experts)
        kept += route.tokens * block.experts.choice.top_k * 4
        if self.mode == "selective":
            kept += self.saved_by_experts(block.experts) + self.hidden
        return kept

    # Parameters in flight.

    def unsharded(self, unit: Unit | None) -> float:
        """Gathered parameters, as computed with."""
        return sizes_of(unit, self.layout).gathered

    def flat(self, unit: Unit | None) -> float:
        """The buffer a prefetched group is gathered into."""
        return sizes_of(unit, self.layout).flat

    def gradients(self, unit: Unit | None) -> float:
        """Unsharded gradients of a group."""
        return sizes_of(unit, self.layout).gradients

    def reduced(self, unit: Unit | None) -> float:
        """The buffer that a group's gradients are reduced from."""
        return sizes_of(unit, self.layout).reduced * self.reduce

    def copied(self, unit: Unit | None) -> float:
        """Gloo's own copy of that buffer."""
        return self.reduced(unit) if self.gloo and self.layout.world_size > 1 else 0.0

    def experts_here(self, experts: Experts | None, width: int, *, trains: bool | None = None) -> float:
        """A rank's experts with `width` bytes per element."""
        if experts is None:
            return 0.0
        elements = sum(size for size, train, _ in experts.matrices if trains in (None, train))
        return elements * experts.spec.num_experts / self.layout.ep * width

    def experts_gathered(self, experts: Experts | None) -> float:
        return self.experts_here(experts, self.compute) if self.gathers_experts else 0.0

    def experts_flat(self, experts: Experts | None) -> float:
        return self.experts_here(experts, self.compute) if self.layout.efsdp > 1 else 0.0

    def experts_reduced(self, experts: Experts | None) -> float:
        return self.experts_here(experts, self.reduce, trains=True) if self.gathers_experts else 0.0

    # Working memory of routed experts (the sequence of events in experts/compute.py).

    def experts_backward(self, experts: Experts) -> float:
        route, spec = self.routing(experts), experts.spec
        row = route.rows * spec.hidden_size * self.compute
        pair_h = route.pairs * spec.hidden_size * self.compute
        pair_i = route.pairs * spec.intermediate_size * self.compute
        part = min(route.pairs, max(route.pairs / 8, (1 << 20) / experts.width))
        parts = part * spec.intermediate_size * (4 * self.compute + 4)
        here = spec.num_experts / self.layout.ep
        up, down = (here * size * spec.hidden_size for size in (experts.width, spec.intermediate_size))
        train = any(trains for _, trains, _ in experts.matrices[:2]) and not experts.adapted
        cast = self.master != self.compute and not self.gathers_experts and not experts.adapted
        gradient = (self.compute + (self.master if cast else 0)) if train else 0
        kept = self.master if cast else self.compute
        kept_down = kept * down if train else 0
        weight = self.compute if cast else 0
        if experts.looped:
            one = 3 / here
            return row + 4 * route.rows * spec.hidden_size + one * (pair_h + pair_i) + (up + down) * kept
        return max(
            row + pair_h + pair_i + max(parts, down * max(gradient, weight)),
            row + kept_down + pair_h + up * gradient,
            row + kept_down + (up * kept if train else 0) + pair_h + max(row, up * weight),
        )

    def experts_forward(self, experts: Experts) -> float:
        """On top of what is saved."""
        route, spec = self.routing(experts), experts.spec
        row = route.rows * spec.hidden_size * self.compute
        pair_h = route.pairs * spec.hidden_size * self.compute
        pair_i = route.pairs * spec.intermediate_size * self.compute
        if experts.looped:
            return row * (1 + 4 / self.compute)
        return pair_i + pair_h + row

    # Moments.

    def total(self, stage: int, moment: "_Moment") -> float:
        """Bytes of everything at a moment."""
        state = self.states[stage]
        kept = state.frozen + state.master * (1 + self.moment_count) + state.gradients * moment.share
        return kept + sum(moment[2:]) + self.overhead

    def memory(self, stage: int, moment: "_Moment") -> Memory:
        """The same, item by item."""
        state = self.states[stage]
        return Memory(
            frozen=state.frozen,
            master=state.master,
            gradients=state.gradients * moment.share,
            moments=state.master * self.moment_count,
            unsharded=moment.unsharded,
            activations=moment.activations,
            dispatch=moment.dispatch,
            logits=moment.logits,
            working=moment.working,
            overhead=self.overhead,
            moment=moment.name,
        )

    def moments_of(self, stage: int) -> Iterator["_Moment"]:
        """Every moment of a step at which the peak can be, for one rank of a pipeline stage."""
        flying = in_flight(self.layout, self.batch, stage)
        later = min(flying, self.batch.accumulation - 1)
        if later < flying:
            yield from self._backward_of(stage, flying, False)
        if later:
            # From the second micro-batch on gradients are whole, but fewer may be in flight.
            yield from self._backward_of(stage, later, True)

    def _backward_of(self, stage: int, flying: int, whole: bool) -> Iterator["_Moment"]:
        """Moments of one micro-batch while `flying` hold activations; `whole`: gradients are there from before."""
        at = _Moment
        blocks = self.stage(stage)
        root = self.unsharded(self.facts.root) if has_root(self.facts, self.layout.pp, stage) else 0.0
        last = stage == self.layout.pp - 1
        head_gradient = self.gradients(self.facts.root) if last else 0.0
        kept = self.kept_by(blocks)
        before = (flying - 1) * kept[-1] + flying * (self.tables + self.handed(stage)) + self.received(stage)
        before += self.outside + self.last if last else 0.0

        if last:
            yield at("loss", float(whole), root, before + kept[-1], logits=self._head())
        for index in _edges(self.facts, self.layout.pp, stage):
            block = blocks[index]
            previous = blocks[index - 1] if index else None
            share = 1.0 if whole else 1 - (index + 1) / len(blocks)
            flats = self.flat(previous.unit) + self.flat(previous.split) if previous else 0.0
            flats += self.experts_flat(previous.experts) if previous else 0.0
            dense = sum(self.unsharded(unit) for unit in block.units)
            common = root + head_gradient + flats + dense
            saved, mine = self.saved[id(block)], self.kept[id(block)]
            held = before + kept[index] + (saved - mine if self.mode != "none" else 0.0)
            held += self.hidden if self.mode != "none" else 0.0
            # Selective: experts run backward first, from what was kept; then the rest of the block runs again.
            early = before + kept[index] + self.hidden if self.mode == "selective" else held
            after = self._block_after(blocks, index)
            of_experts = 0.0
            if block.experts is not None:
                gathered = self.experts_gathered(block.experts)
                if self.mode == "full":
                    forward = self.experts_forward(block.experts)
                    yield at("recomputing", share, common + gathered + after, held, forward)
                backward = self.experts_backward(block.experts)
                yield at("experts' backward", share, common + gathered + after, early, backward, 0.0, self.hidden)
                of_experts = self.saved_by_experts(block.experts)
                reducing = self.experts_reduced(block.experts)
                grads = self.experts_here(block.experts, self.compute, trains=True) if self.gathers_experts else 0.0
                shard = 1 / self.layout.efsdp
                copied = reducing if self.gloo and self.layout.efsdp > 1 else 0.0
                reduced = common + max(grads + reducing, reducing + copied + reducing * shard)
                yield at("experts' reduction", share, reduced, early - of_experts, 0.0, 0.0, 2 * self.hidden)
                after = reducing or after
            own = (block.figures.backward * self.batch.rows) / (self.layout.cp * self.layout.tp) + self.hidden
            gradients = block.figures.gradients / self.layout.tp
            yield at("block's backward", share, common + after + gradients, held - of_experts, 0.0, 0.0, own)
            grads = self.gradients(block.unit) + self.gradients(block.split)
            copied = self.copied(block.unit) + self.copied(block.split)
            reduced = common - dense + max(grads, copied) + self.reduced(block.unit) + self.reduced(block.split)
            yield at("block's reduction", share, reduced, held - saved, 0.0, 0.0, 2 * self.hidden)
        if stage == 0 and self.facts.embedding is not None:
            embedding = self.facts.embedding
            grads, reducing = self.gradients(embedding), self.reduced(embedding)
            waiting = self.unsharded(embedding) + grads + self._block_after(blocks, -1)
            ends = root + head_gradient + max(waiting, grads + reducing, reducing + self.copied(embedding))
            yield at("embedding's gradient", 1.0, ends, before - self.tables, 0.0, 0.0, self.hidden)
        if root:
            root_reduced = self.reduced(self.facts.root)
            rest = max(head_gradient, self.copied(self.facts.root)) + root_reduced
            yield at("head's reduction", 1.0, rest, self.received(stage))

    def _block_after(self, blocks: tuple[Block, ...], index: int) -> float:
        """The reduction buffer that the block behind this one still holds."""
        if index + 1 == len(blocks):
            return 0.0
        return self.reduced(blocks[index + 1].unit) + self.reduced(blocks[index + 1].split)

    def _head(self) -> float:
        """The loss in chunks (training/loss.py): hidden states, sums of the head's gradient, one chunk's logits."""
        vocabulary = self.facts.vocabulary / self.layout.tp
        targets = self.batch.rows * (self.facts.length - 1) / self.layout.cp
        rows = targets * self.facts.hidden * self.compute
        head = self.facts.head / self.layout.tp if self.facts.head_trains else 0.0
        chunks = -(-targets // self.chunk)
        wide = max(4, self.compute)
        logits = self.chunk * vocabulary * (self.compute * (self.compute < wide) + 3 * wide)
        product = self.chunk * vocabulary * (self.compute + wide * (self.compute < wide)) + head * self.compute
        again = head * self.compute if chunks > 1 else 0.0
        return 3 * rows - self.last + head * wide + max(logits + again, product + again, head * self.compute)

    def head_saved(self) -> float:
        """The head's gradients, taken in forward and kept for backward (training/loss.py)."""
        targets = self.batch.rows * (self.facts.length - 1) / self.layout.cp
        head = self.facts.head / self.layout.tp if self.facts.head_trains else 0.0
        return (targets * self.facts.hidden + head) * self.compute + self.last


def shards_evenly(facts: Facts, layout: Layout) -> None:
    """Raise `InputError` where efsdp cannot shard a rank's experts."""
    for block, _ in stage_kinds(facts, 1, 0):
        if block.experts is not None:
            expert_shard_dim(block.experts.spec, layout)
