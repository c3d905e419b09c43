"""Bytes that one rank holds: its state, and the most of everything else at each moment of a step that can be the peak.

What a block saves and needs is in blocks.py, what a rank keeps of parameters and how many micro-batches are in flight
in stages.py; here is when what of it is held together, and the head in chunks (step/loss.py). docs/formulas.md derives
it; benchmarks/planning.py compares it with what ranks hold.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from expertmesh.planning.blocks import BlockMemory, BlockSharding, Moment, block_memory, hidden_bytes, reduced_bytes
from expertmesh.planning.by_layer import RoundMemory
from expertmesh.planning.model_figures import group_bytes
from expertmesh.planning.stages import InFlight, Piece, Workload, in_flight, resident_state

CHUNK_TOKENS = 1024  # causal_lm_loss's own


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank at its worst moment."""

    frozen: float
    """Parameters that do not train."""
    master: float
    """Parameters that train."""
    gradients: float
    """Gradients of `master` that exist at that moment."""
    moments: float
    """Optimizer state."""
    unsharded: float
    """Gathered parameters, their gradients and their buffers."""
    activations: float
    """Activations saved for backward."""
    dispatch: float
    """Bytes that routed experts need while they run."""
    logits: float
    """Bytes that the head needs while losses are computed."""
    working: float
    """Bytes that blocks need while they run."""
    overhead: float
    """Bytes that the device's driver and communication take."""
    moment: str
    """Name of the moment."""

    @property
    def total(self) -> float:
        held = self.unsharded + self.activations + self.dispatch + self.logits + self.working
        return self.state + held + self.overhead

    @property
    def state(self) -> float:
        return self.frozen + self.master + self.gradients + self.moments


def memory_of(workload: Workload, *, overhead: float = 0.0) -> Memory:
    """Return the peak of the worst rank; `overhead`: bytes that the device takes beside tensors."""
    memory = RankMemory(workload)
    found = [(memory.peak(stage), stage) for stage in workload.distinct_stages()]
    (_, worst), stage = max(found, key=lambda each: each[0][0])
    state = resident_state(workload.model, workload.layout, stage, workload.optimizer)
    return Memory(
        frozen=state.frozen,
        master=state.master,
        gradients=state.master * worst.accumulated,
        moments=state.moments,
        unsharded=worst.unsharded,
        activations=worst.activations,
        dispatch=worst.dispatch,
        logits=worst.logits,
        working=worst.working,
        overhead=overhead,
        moment=worst.name,
    )


def peak_of(workload: Workload, stage: int) -> float:
    """Return the peak of one pp rank, without what the device takes for itself."""
    return RankMemory(workload).peak(stage)[0]


def fullest_stage(workload: Workload) -> int:
    """Return the pp rank whose peak is the highest."""
    return max(workload.distinct_stages(), key=lambda stage: peak_of(workload, stage))


def saved_of(workload: Workload, *, stage: int = 0, chunk: int = -1) -> float:
    """Return the bytes that one stage saves of a micro-batch for backward: blocks, what is around them, and the head.

    Args:
        stage: The pp rank.
        chunk: Which of its `pp_virtual_stages` stages, counted as in a list; -1 is the last.
    """
    memory, chunk = RankMemory(workload), range(workload.layout.pp_virtual_stages)[chunk]
    saved = memory.saved(stage, chunk)[-1] + memory.tables + memory.at_borders(stage, chunk)
    return saved + (memory.outside + memory.head_saved if memory.is_last(stage, chunk) else 0.0)


class RankMemory:
    """The memory of ranks of one layout, named as docs/formulas.md names it; bytes of one rank."""

    def __init__(self, workload: Workload) -> None:
        self.workload, self.model = workload, workload.model
        self.layout, self.batch = workload.layout, workload.batch
        self.sharding = BlockSharding.of(workload)
        self.hidden = hidden_bytes(self.model, self.sharding)
        self.tables = self.model.tables
        self.outside = (self.model.outside - self.model.tables) * self.sharding.part
        self.first_saves_less = self.model.first_saves_less * self.sharding.part
        # A head that trains saves its input, though it is called on no token of it (base_model.py).
        self.head_input = self.hidden if self.model.head_trains else 0.0
        self.targets = self.batch.rows * (self.model.length - 1) / self.layout.cp
        self.head = self.model.head / self.layout.tp if self.model.head_trains else 0.0
        # The head's gradients, computed in forward and saved for backward (step/loss.py).
        self.head_saved = (self.targets * self.model.hidden + self.head) * self.model.compute_bytes + self.head_input

    def block(self, piece: Piece) -> BlockMemory:
        return block_memory(self.model, *piece, self.sharding)

    def is_last(self, stage: int, chunk: int) -> bool:
        return stage == self.layout.pp - 1 and chunk == self.layout.pp_virtual_stages - 1

    def saved(self, stage: int, chunk: int) -> list[float]:
        """Return what stays after each block's forward, those before it included."""
        pieces = self.workload.rank(stage).chunks[chunk]
        saved = [self.block(piece).saved for piece in pieces]
        if stage == chunk == 0 and pieces[0][1] == "none":
            saved[0] -= self.first_saves_less
        return list(accumulate(saved))

    def at_borders(self, stage: int, chunk: int) -> float:
        """Return what a stage saves of a micro-batch beside what its blocks save: what it sends; and where inputs of
        blocks are saved, the first block's is among what it has `received`.
        """
        is_first, is_last = stage == chunk == 0, self.is_last(stage, chunk)
        mode = self.workload.rank(stage).chunks[chunk][0][1]
        at_borders = self.hidden * ((not is_last) - (not is_first and mode != "none"))
        # What is behind the last block runs in the forward of every chunk of the rank that has it.
        return at_borders + (self.outside + self.head_input if stage == self.layout.pp - 1 and not is_last else 0.0)

    def received(self, stage: int) -> float:
        """Return the bytes of a step's receive buffers: hidden states and their gradients (torch's stages)."""
        ends = 2 * self.layout.pp_virtual_stages - (stage == 0) - (stage == self.layout.pp - 1)
        return ends * self.batch.accumulation * self.hidden

    def loss(self) -> float:
        """Return the bytes of the loss in chunks (step/loss.py): hidden states, sums of the head's gradient, one
        chunk's logits.
        """
        model, targets, head, compute = self.model, self.targets, self.head, self.model.compute_bytes
        vocabulary = model.vocabulary / self.layout.tp
        rows = targets * model.hidden * compute
        chunk = min(CHUNK_TOKENS, targets)
        chunks = -(-targets // chunk)
        wide = max(4, compute)
        # torch's cross-entropy makes two more in backward, after those of its input are freed; ours of a part of the
        # vocabulary (vocabulary.py) makes them in forward.
        logits = chunk * vocabulary * (3 * wide if self.layout.tp == 1 else compute * (compute < wide) + 2 * wide)
        product = chunk * vocabulary * (compute + wide * (compute < wide)) + head * compute
        again = head * compute if chunks > 1 else 0.0
        # At the end the sum is rounded, while the last chunk's own gradient and logits are still there.
        rounding = 2 * head * compute + (targets - (chunks - 1) * chunk) * vocabulary * compute
        return 3 * rows - self.head_input + head * wide + max(logits + again, product + again, rounding)

    def peak(self, stage: int) -> tuple[float, Moment]:
        """Return the most bytes of everything that one pp rank holds, and when."""
        state = resident_state(self.model, self.layout, stage, self.workload.optimizer)
        most, worst = -1.0, None
        for moment in self.moments(stage):
            _, accumulated, unsharded, activations, dispatch, logits, working = moment
            held = state.master * accumulated + unsharded + activations + dispatch + logits + working
            if held > most:
                most, worst = held, moment
        assert worst is not None
        return most + state.frozen + state.master + state.moments, worst

    def moments(self, stage: int) -> Iterator[Moment]:
        """Yield every moment of a step at which the peak of one pp rank can be."""
        if self.batch.together:
            for ready in {self.batch.passes > 1, False}:
                yield from RoundMemory(self, ready=ready).moments()
            return
        chunks = range(self.layout.pp_virtual_stages)
        saved = [self.saved(stage, chunk) for chunk in chunks]
        at_borders = [self.at_borders(stage, chunk) for chunk in chunks]
        for situation in in_flight(self.layout, self.batch.accumulation, stage):
            yield from _Backward(self, stage, situation, saved, at_borders).moments()


class _Backward:
    """One micro-batch of one of a rank's chunks, while others have activations saved as well. `before` are the
    activations saved when its first block begins; `ready` blocks have gradients from earlier backwards.
    """

    def __init__(
        self, memory: RankMemory, stage: int, situation: InFlight, saved: list[list[float]], at_borders: list[float]
    ) -> None:
        self.memory, self.stage, self.situation, self.saved = memory, stage, situation, saved[situation.chunk]
        self.rank = memory.workload.rank(stage)
        self.pieces = self.rank.chunks[situation.chunk]
        self.is_first = stage == situation.chunk == 0
        self.is_last = memory.is_last(stage, situation.chunk)
        ranks, tp = memory.sharding.ranks, memory.sharding.tp
        self.head = group_bytes(memory.model.root, ranks, tp)
        self.embedding = group_bytes(self.rank.embedding, ranks, tp)  # zeros if it is on another stage
        self.root = self.head.gathered if self.rank.has_root else 0.0
        self.head_gradient = self.head.gradients if self.is_last else 0.0
        self.blocks = sum(map(len, saved))
        self.ready = sum(len(whole) for whole, there in zip(saved, situation.accumulated, strict=True) if there)
        self.own = 0 if situation.accumulated[situation.chunk] else len(self.pieces)
        self.before = memory.received(stage) - self.saved[-1]
        for count, whole, sent in zip(situation.saved, saved, at_borders, strict=True):
            self.before += count * (whole[-1] + memory.tables + sent)

    def moments(self) -> Iterator[Moment]:
        """Yield every moment at which the peak can be."""
        memory, before = self.memory, self.before
        if self.is_first and self.rank.embedding is not None:
            # Forward begins with what is around the blocks, and FSDP2 keeps both flat buffers for a while.
            behind = self.root + self.head.flat if self.rank.has_root else 0.0
            gathered = self.embedding.gathered + self.embedding.flat + behind
            yield Moment("embedding's gather", self.ready / self.blocks, gathered, before - memory.tables)
        if self.stage == memory.layout.pp - 1:
            # Losses are taken in forward, with the head's gradient (step/loss.py).
            before += (self.situation.saved[-1] - self.is_last) * (memory.outside + memory.head_saved)
        before += memory.outside + memory.head_input if self.is_last else 0.0
        if self.is_last:
            activations = before + self.saved[-1]
            yield Moment("loss", self.ready / self.blocks, self.root, activations, logits=memory.loss())
        for index in _edges(self.pieces):
            yield from self._block(index, before)
        if self.is_first and self.rank.embedding is not None:
            yield self._embedding(before)
        if self.rank.has_root:
            reducing = reduced_bytes(memory.model, self.head)
            copied = reducing if memory.sharding.gloo else 0.0
            unsharded = max(self.head_gradient, copied) + reducing
            accumulated = (self.ready + self.own) / self.blocks
            yield Moment("head's reduction", accumulated, unsharded, memory.received(self.stage))

    def _block(self, index: int, before: float) -> Iterator[Moment]:
        memory, pieces, hidden = self.memory, self.pieces, self.memory.hidden
        mode = pieces[index][1]
        block = memory.block(pieces[index])
        experts = block.experts
        following = memory.block(pieces[index - 1]) if index else None  # backward comes to it next
        accumulated = (self.ready + max(0, self.own - index - 1)) / self.blocks
        flats = following.flats if following else 0.0
        # The reduction buffer that the block behind still holds.
        behind = memory.block(pieces[index + 1]).reducing if index + 1 < len(pieces) else 0.0
        common = self.root + self.head_gradient + flats + block.dense
        now = before + self.saved[index]
        full = now + (block.reads - block.saved + hidden if mode != "none" else 0.0)
        # Selective: experts run backward first, from what was saved; then the rest of the block runs again.
        early = now + hidden if mode == "selective" else full
        if pieces[index][0].experts is not None:
            at_work = common + experts.gathered + behind
            # Gathering, and in forward for a while after, there is their own buffer, and not yet that of the experts
            # before them.
            gathering = at_work + experts.buffered - (following.experts.buffered if following else 0.0)
            yield Moment("experts' gather", accumulated, gathering, now)
            if mode == "full":
                yield Moment("recomputing", accumulated, gathering, full, experts.again)
            yield Moment("experts' backward", accumulated, at_work, early, experts.backward, 0.0, hidden)
            reduced, rest = common + experts.reduced, early - experts.saved
            yield Moment("experts' reduction", accumulated, reduced, rest, 0.0, 0.0, 2 * hidden)
            behind = experts.reducing or behind
        running, rest = common + behind + block.growing, full - experts.saved
        yield Moment("block's backward", accumulated, running, rest, 0.0, 0.0, block.working)
        reduced = common - block.dense + max(block.gradients, block.copied) + block.reducing
        yield Moment("block's reduction", accumulated, reduced, full - block.reads, 0.0, 0.0, 2 * hidden)

    def _embedding(self, before: float) -> Moment:
        memory, embedding = self.memory, self.embedding
        reducing = reduced_bytes(memory.model, embedding)
        running = embedding.gathered + max(embedding.flat, embedding.gradients)
        waiting = running + memory.block(self.pieces[0]).reducing
        copied = reducing if memory.sharding.gloo else 0.0
        ends = max(waiting, embedding.gradients + reducing, reducing + copied)
        unsharded = self.root + self.head_gradient + ends
        accumulated = (self.ready + self.own) / self.blocks
        return Moment("embedding's gradient", accumulated, unsharded, before - memory.tables, 0.0, 0.0, memory.hidden)


@cache
def _edges(pieces: tuple[Piece, ...]) -> tuple[int, ...]:
    """Return the blocks at which the peak can be: what is saved falls and gradients grow evenly in between."""
    places: dict[Piece, list[int]] = {}
    for index, piece in enumerate(pieces):
        places.setdefault(piece, []).append(index)
    return tuple(sorted({edge for found in places.values() for edge in (found[0], found[-1])}, reverse=True))
