"""Bytes that one rank holds: its state, and the most of everything else at each moment of a step that can be the peak.

What a block keeps and needs is in blocks.py, what a rank keeps of parameters in state.py, how many micro-batches are in
flight in schedule.py; here is when what of it is held together, and the head in chunks (step/loss.py).
docs/planning.md derives it; benchmarks/planning.py compares it with what ranks hold.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from expertmesh.config.sections import BYTES_OF
from expertmesh.distributed.layout import Layout
from expertmesh.parallel.refusals import expert_shard_dim
from expertmesh.planning.blocks import Costs, Share, costs_of, hidden_bytes, reduced_bytes
from expertmesh.planning.facts import Facts
from expertmesh.planning.schedule import Held, backwards
from expertmesh.planning.state import (
    CheckpointedLayers,
    Cut,
    Mode,
    Piece,
    State,
    chunk_pieces,
    cut_of,
    distinct_stages,
    has_root,
    sizes_of,
    stage_kinds,
    state_of,
)

CHUNK_TOKENS = 1024  # causal_lm_loss's own


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
    layers: CheckpointedLayers = "all",
    moments: int = 2,
    overhead: float = 0.0,
    imbalance: float = 1.0,
    chunk_tokens: int = CHUNK_TOKENS,
    gloo: bool = False,
) -> Memory:
    """The peak of the worst rank. `layers`: train.checkpoint_layers. `moments`: tensors the optimizer keeps per
    parameter (2 for AdamW, 0 for SGD). `gloo` reduces from a copy of its input.
    """
    model = _Model(facts, layout, batch, mode, layers, moments, overhead, imbalance, chunk_tokens, gloo)
    found = [(*model.peak(stage), stage) for stage in distinct_stages(facts, model.cut, mode, layers)]
    _, worst, stage = max(found, key=lambda each: each[0])
    return model.memory(stage, worst)


def peak_of(
    facts: Facts, layout: Layout, batch: Batch, mode: Mode, stage: int, *, layers: CheckpointedLayers = "all"
) -> float:
    """The peak of one pp rank, without what the device takes for itself."""
    model = _Model(facts, layout, batch, mode, layers, 2, 0.0, 1.0, CHUNK_TOKENS, False)
    return model.peak(stage)[0]


def fullest_stage(facts: Facts, layout: Layout, batch: Batch, mode: Mode) -> int:
    """The pp rank whose peak is the highest."""
    stages = distinct_stages(facts, cut_of(layout), mode, "all")
    return max(stages, key=lambda stage: peak_of(facts, layout, batch, mode, stage))


def saved_of(
    facts: Facts,
    layout: Layout,
    batch: Batch,
    mode: Mode,
    imbalance: float = 1.0,
    *,
    layers: CheckpointedLayers = "all",
    stage: int = 0,
    chunk: int = -1,
) -> float:
    """Bytes saved between forward and backward of one micro-batch, by the blocks of one of a pp rank's stages, what is
    around them and the head.
    """
    model = _Model(facts, layout, batch, mode, layers, 0, 0.0, imbalance, CHUNK_TOKENS, False)
    chunks = range(layout.pp_virtual_stages)
    kept = model.kept_by(stage, chunks[chunk])[-1] + model.tables + model.handed(stage, chunks[chunk])
    return kept + (model.outside + model.head_saved() if model.is_last(stage, chunks[chunk]) else 0.0)


@cache
def _edges(pieces: tuple[Piece, ...]) -> tuple[int, ...]:
    """Blocks at which the peak can be: what is saved falls and gradients grow evenly in between."""
    places: dict[Piece, list[int]] = {}
    for index, piece in enumerate(pieces):
        places.setdefault(piece, []).append(index)
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


class _Model:
    """All quantities of one layout, named as docs/planning.md names them; bytes of one rank."""

    def __init__(
        self,
        facts: Facts,
        layout: Layout,
        batch: Batch,
        mode: Mode,
        layers: CheckpointedLayers,
        moments: int,
        overhead: float,
        imbalance: float,
        chunk_tokens: int,
        gloo: bool,
    ) -> None:
        self.facts, self.layout, self.batch, self.mode, self.layers = facts, layout, batch, mode, layers
        self.moment_count, self.overhead = moments, overhead
        self.cut: Cut = cut_of(layout)
        self.share = Share.of(layout, batch.rows, imbalance, gloo=gloo)
        self.known: dict[Piece, Costs] = {}
        self.states: dict[int, State] = {}
        self.compute = BYTES_OF[facts.precision.compute]
        self.hidden = hidden_bytes(facts, self.share)
        self.chunk = min(chunk_tokens, batch.rows * (facts.length - 1) / layout.cp)
        self.tables = facts.tables
        part = batch.rows / (layout.cp * layout.tp)
        self.outside = (facts.outside - facts.tables) * part
        self.first_saves_less = facts.first_saves_less * part
        # A head that trains saves its input, though it is called on no token of it (base_model.py).
        self.last = self.hidden if facts.head_trains else 0.0

    def pieces(self, stage: int, chunk: int) -> tuple[Piece, ...]:
        return chunk_pieces(self.facts, self.cut, stage, self.mode, self.layers)[chunk]

    def costs(self, piece: Piece) -> Costs:
        found = self.known.get(piece)
        if found is None:
            found = self.known[piece] = costs_of(self.facts, *piece, self.share)
        return found

    def is_last(self, stage: int, chunk: int) -> bool:
        return stage == self.layout.pp - 1 and chunk == self.layout.pp_virtual_stages - 1

    def kept_by(self, stage: int, chunk: int) -> list[float]:
        """What stays after each block's forward, those before it included."""
        kept = [self.costs(piece).kept for piece in self.pieces(stage, chunk)]
        if stage == chunk == 0 and self.pieces(stage, chunk)[0][1] == "none":
            kept[0] -= self.first_saves_less
        return list(accumulate(kept))

    def handed(self, stage: int, chunk: int) -> float:
        """What a stage keeps of a micro-batch at its borders beside what its blocks keep: what it sends; and where
        inputs of blocks are kept, the first block's is among what it has `received`.
        """
        is_first, is_last, mode = stage == chunk == 0, self.is_last(stage, chunk), self.pieces(stage, chunk)[0][1]
        handed = self.hidden * ((not is_last) - (not is_first and mode != "none"))
        # What is behind the last block runs, for nothing, in the forward of every chunk of the rank that has it.
        return handed + (self.outside + self.last if stage == self.layout.pp - 1 and not is_last else 0.0)

    def received(self, stage: int) -> float:
        """Buffers for what a step's micro-batches receive: hidden states, and their gradients (torch's stages)."""
        ends = 2 * self.layout.pp_virtual_stages - (stage == 0) - (stage == self.layout.pp - 1)
        return ends * self.batch.accumulation * self.hidden

    # Moments.

    def state(self, stage: int) -> State:
        if stage not in self.states:
            self.states[stage] = state_of(self.facts, self.layout, stage)
        return self.states[stage]

    def peak(self, stage: int) -> tuple[float, "_Moment"]:
        """The most bytes of everything that one pp rank holds, and when."""
        state, most, worst = self.state(stage), -1.0, None
        for moment in self.moments_of(stage):
            _, share, unsharded, activations, dispatch, logits, working = moment
            held = state.gradients * share + unsharded + activations + dispatch + logits + working
            if held > most:
                most, worst = held, moment
        assert worst is not None
        return most + state.frozen + state.master * (1 + self.moment_count) + self.overhead, worst

    def memory(self, stage: int, moment: "_Moment") -> Memory:
        """The same, item by item."""
        state = self.state(stage)
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
        """Every moment of a step at which the peak can be, for one pp rank."""
        chunks = range(self.layout.pp_virtual_stages)
        kept = [self.kept_by(stage, chunk) for chunk in chunks]
        handed = [self.handed(stage, chunk) for chunk in chunks]
        for held in backwards(self.layout, self.batch.accumulation, stage):
            yield from self._backward_of(stage, held, kept, handed)

    def _backward_of(
        self, stage: int, held: Held, kept_by: list[list[float]], handed: list[float]
    ) -> Iterator["_Moment"]:
        """Moments of one micro-batch of one chunk while others hold activations as well."""
        at, facts, chunk = _Moment, self.facts, held.chunk
        pieces, kept, hidden = self.pieces(stage, chunk), kept_by[chunk], self.hidden
        is_last = self.is_last(stage, chunk)
        around = has_root(facts, self.layout.pp, stage)
        head = sizes_of(facts.root, self.layout)
        root = head.gathered if around else 0.0
        head_gradient = head.gradients if is_last else 0.0
        blocks = sum(len(whole) for whole in kept_by)
        ready = sum(len(whole) for whole, there in zip(kept_by, held.whole, strict=True) if there)
        own = 0 if held.whole[chunk] else len(pieces)
        before = self.received(stage) - kept[-1]
        for flying, whole, sent in zip(held.flying, kept_by, handed, strict=True):
            before += flying * (whole[-1] + self.tables + sent)
        if stage == chunk == 0 and facts.embedding is not None:
            # Forward begins with what is around the blocks, and FSDP2 keeps both flat buffers for a while.
            embedding = sizes_of(facts.embedding, self.layout)
            gathered = embedding.gathered + embedding.flat + (root + head.flat if around else 0.0)
            yield at("embedding's gather", ready / blocks, gathered, before - self.tables)
        if stage == self.layout.pp - 1:
            # Losses are taken in forward, with the head's gradient (step/loss.py).
            before += (held.flying[-1] - is_last) * (self.outside + self.head_saved())
        before += self.outside + self.last if is_last else 0.0

        if is_last:
            yield at("loss", ready / blocks, root, before + kept[-1], logits=self._head())
        before_blocks = 0.0
        if stage == 0 and facts.embedding is not None:
            before_blocks = sizes_of(facts.embedding, self.layout).flat
        behind = 0.0  # the reduction buffer that the block behind still holds
        for index in _edges(pieces):
            costs = self.costs(pieces[index])
            mode = pieces[index][1]
            share = (ready + max(0, own - index - 1)) / blocks
            flats = self.costs(pieces[index - 1]).flats if index else before_blocks
            behind = self.costs(pieces[index + 1]).after if index + 1 < len(pieces) else 0.0
            common = root + head_gradient + flats + costs.dense
            now = before + kept[index]
            full = now + (costs.saved - costs.kept + hidden if mode != "none" else 0.0)
            # Selective: experts run backward first, from what was kept; then the rest of the block runs again.
            early = now + hidden if mode == "selective" else full
            if pieces[index][0].experts is not None:
                at_work = common + costs.gathered + behind
                # Gathering, and in forward for a while after, there is their own buffer, and not yet that of the
                # experts before them.
                gathering = at_work + costs.buffered - (self.costs(pieces[index - 1]).buffered if index else 0.0)
                yield at("experts' gather", share, gathering, now)
                if mode == "full":
                    yield at("recomputing", share, gathering, full, costs.forward)
                yield at("experts' backward", share, at_work, early, costs.backward, 0.0, hidden)
                reduced, rest = common + costs.reduced, early - costs.of_experts
                yield at("experts' reduction", share, reduced, rest, 0.0, 0.0, 2 * hidden)
                behind = costs.reducing or behind
            running, rest = common + behind + costs.grown, full - costs.of_experts
            yield at("block's backward", share, running, rest, 0.0, 0.0, costs.own)
            reduced = common - costs.dense + max(costs.gradients, costs.copied) + costs.after
            yield at("block's reduction", share, reduced, full - costs.saved, 0.0, 0.0, 2 * hidden)
        share = (ready + own) / blocks
        if stage == chunk == 0 and facts.embedding is not None:
            embedding = sizes_of(facts.embedding, self.layout)
            reducing = reduced_bytes(facts, embedding)
            waiting = embedding.gathered + embedding.gradients + self.costs(pieces[0]).after
            if held.vain and not around:
                # FSDP2 prefetches the last block of another micro-batch, for nothing.
                last = self.costs(pieces[-1])
                waiting += last.flats - last.buffered
            copied = reducing if self.share.gloo else 0.0
            ends = root + head_gradient + max(waiting, embedding.gradients + reducing, reducing + copied)
            yield at("embedding's gradient", share, ends, before - self.tables, 0.0, 0.0, hidden)
        if around:
            reducing = reduced_bytes(facts, head)
            copied = reducing if self.share.gloo else 0.0
            yield at("head's reduction", share, max(head_gradient, copied) + reducing, self.received(stage))

    def _head(self) -> float:
        """The loss in chunks (step/loss.py): hidden states, sums of the head's gradient, one chunk's logits."""
        vocabulary = self.facts.vocabulary / self.layout.tp
        targets = self.batch.rows * (self.facts.length - 1) / self.layout.cp
        rows = targets * self.facts.hidden * self.compute
        head = self.facts.head / self.layout.tp if self.facts.head_trains else 0.0
        chunks = -(-targets // self.chunk)
        wide = max(4, self.compute)
        # torch's cross-entropy keeps its own; ours of a part of the vocabulary (vocabulary.py) turns it into gradients.
        copies = 3 if self.layout.tp == 1 else 2
        logits = self.chunk * vocabulary * (self.compute * (self.compute < wide) + copies * wide)
        product = self.chunk * vocabulary * (self.compute + wide * (self.compute < wide)) + head * self.compute
        again = head * self.compute if chunks > 1 else 0.0
        # At the end the sum is rounded, while the last chunk's own gradient and logits are still there.
        rounding = 2 * head * self.compute + (targets - (chunks - 1) * self.chunk) * vocabulary * self.compute
        return 3 * rows - self.last + head * wide + max(logits + again, product + again, rounding)

    def head_saved(self) -> float:
        """The head's gradients, taken in forward and kept for backward (step/loss.py)."""
        targets = self.batch.rows * (self.facts.length - 1) / self.layout.cp
        head = self.facts.head / self.layout.tp if self.facts.head_trains else 0.0
        return (targets * self.facts.hidden + head) * self.compute + self.last


def shards_evenly(facts: Facts, layout: Layout) -> None:
    """Raise `InputError` where efsdp cannot shard a rank's experts."""
    for block, _ in stage_kinds(facts, (1, 1), 0):
        if block.experts is not None:
            expert_shard_dim(block.experts.spec, layout)
