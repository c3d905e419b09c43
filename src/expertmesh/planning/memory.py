"""Bytes that one rank holds: its state, and the most of everything else at each moment of a step that can be the peak.

What a block saves and needs is in blocks.py, what a rank keeps of parameters and how many micro-batches are in flight
in stages.py; here is when what of it is held together, and the head in chunks (step/loss.py). docs/formulas.md derives
it; benchmarks/planning.py compares it with what ranks hold.

In a step whose micro-batches go through the model layer by layer (step/by_layer.py) only the layer that runs has
unsharded parameters, with their gradients accumulated in the dtype of reductions from the second micro-batch on; the
one that backward comes to next is gathered meanwhile. Activations are those of all micro-batches of a round.

    M micro-batches of a round; layers are counted from 0
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from expertmesh.config.sections import BYTES_OF
from expertmesh.planning.blocks import BlockMemory, BlockSharding, Moment, block_memory, hidden_bytes, reduced_bytes
from expertmesh.planning.model_figures import GroupBytes, group_bytes
from expertmesh.planning.stages import (
    InFlight,
    Piece,
    ResidentState,
    Workload,
    in_flight,
    inputs_that_wait,
    resident_state,
)

CHUNK_TOKENS = 1024  # causal_lm_loss's own


class RoundMemory:
    """Backward of one round. `ready` is true if an earlier one has left gradients."""

    def __init__(self, memory: "RankMemory", *, ready: bool) -> None:
        self.memory, self.ready = memory, ready
        self.batch, hidden = memory.batch, memory.hidden
        self.round = self.batch.together
        rank = memory.workload.rank(0)
        (pieces,) = rank.chunks
        self.layers: list[list[Piece]] = [[pieces[n] for n in numbers] for numbers in memory.model.feasibility.layers]
        ranks, tp = memory.sharding.ranks, memory.sharding.tp
        self.head, self.embedding = (group_bytes(group, ranks, tp) for group in (memory.model.root, rank.embedding))
        self.head_reduced, self.embedding_reduced = (
            reduced_bytes(memory.model, group) for group in (self.head, self.embedding)
        )
        self.embedding_here, self.embeds = rank.embedding is not None, self.embedding.gradients > 0
        # Where the embedding is tied to the head, the first layer is the last to use the root.
        self.first_with_root = len(self.layers) - 1 if self.embedding_here else 0
        # What each layer saves of a micro-batch; the input of all but the first stays until the layer before it is
        # through, and is among what a block saves that is recomputed.
        self.saved = [self._saved(number) for number in range(len(self.layers))]
        self.inputs = [hidden if number else 0.0 for number in range(len(self.layers))]

    def moments(self) -> Iterator[Moment]:
        """Yield every moment at which the peak can be."""
        if self.embedding_here:
            gathered = sum(group.gathered + group.flat for group in (self.embedding, self.head))
            yield Moment("embedding's gather", float(self.ready), gathered, 0.0)
        for number in self._boundaries():
            for index in sorted({0, min(1, self.round - 1), self.round - 1}):
                layer = _LayerMemory(self, number, index)
                if layer.is_last:
                    yield from layer.loss()
                for place in range(len(layer.blocks)):
                    yield from layer.block(place)
                yield from layer.ends()

    def before(self, number: int, index: int) -> float:
        """Return the bytes of activations when micro-batch `index` begins its backward through layer `number`."""
        hidden, left = self.memory.hidden, self.round - index
        kept = self.round * sum(self.saved[:number]) + left * self.saved[number] + self._inputs(number, index)
        kept += index * self.inputs[number]  # the gradient of its input, where it is through
        if number == len(self.layers) - 1:
            return kept + left * self.memory.outside + self.round * hidden
        # The layer behind it is freed when this one is through: its input, the gradient of that, the decoder's result.
        return kept + left * hidden * (3 if number + 2 == len(self.layers) else 2)

    def _inputs(self, number: int, index: int) -> float:
        """Return the bytes of the inputs of this layer and of those before it."""
        if not self.batch.order.inputs_on_host or self.memory.workload.on_cpu:  # where both are one memory
            return self.round * sum(self.inputs[: number + 1])
        # Those of the last layer stay. Of the others all are back whose backward has begun, and the next one.
        is_last, is_end = number == len(self.layers) - 1, index == self.round - 1
        following = self.inputs[number - 1] if is_end and number > 1 else 0.0
        return self.inputs[number] * (self.round if is_last else min(index + 2, self.round)) + following

    def _saved(self, number: int) -> float:
        """Return what a layer saves of a micro-batch, its input left out."""
        memory, pieces = self.memory, self.layers[number]
        # The first forward makes the tables of all layers.
        saved = sum(memory.block(piece).saved for piece in pieces) + (0.0 if number else memory.tables)
        if pieces[0][1] != "none":
            return saved - (memory.hidden if number else 0.0)
        return saved - (0.0 if number else memory.first_saves_less)

    def _boundaries(self) -> list[int]:
        """Return the layers at which the peak can be, the last first."""
        last = len(self.layers) - 1
        return sorted({0, last, max(0, last - 1), *_boundaries(tuple(map(tuple, self.layers)))}, reverse=True)


class _LayerMemory:
    """Micro-batch `index` in backward of layer `number`."""

    def __init__(self, run: RoundMemory, number: int, index: int) -> None:
        memory, count = run.memory, len(run.layers)
        self.run, self.memory, self.index = run, memory, index
        self.pieces = run.layers[number]
        self.blocks = [memory.block(piece) for piece in self.pieces]
        self.is_first, self.is_last, self.is_end = number == 0, number == count - 1, index == run.round - 1
        self.share = 1.0 if run.ready else (count - 1 - number) / count
        self.activations, self.saved = run.before(number, index), run.saved[number]
        following = [memory.block(piece) for piece in run.layers[number - 1]] if number else []
        self.flats = sum(block.flats for block in following)
        self.flat_experts = sum(block.experts.buffered for block in following)
        self.dense = sum(block.dense + self._summed(block.reducing) for block in self.blocks)
        self.experts = sum(block.experts.gathered + self._summed(block.experts.reducing) for block in self.blocks)
        # The buffer that the layer behind has reduced from lives until the next reduction.
        self.behind = 0.0
        if not self.is_last:
            is_head = number + 2 == count and run.first_with_root > 0
            self.behind = run.head_reduced if is_head else memory.block(run.layers[number + 1][0]).reducing
        self.around = 0.0
        if number >= run.first_with_root:
            self.around += run.head.gathered + (run.head_reduced if index or not self.is_last else 0.0)
        if self.is_first and index and run.embeds:
            self.around += run.embedding.gathered + run.embedding_reduced

    def loss(self) -> Iterator[Moment]:
        """Yield the moments at which the losses of the micro-batch are computed, and go backward."""
        unsharded = self.around + self.dense + self.experts + (self.flats if self.index else 0.0)
        # All results of the decoder are among the activations.
        logits = self.memory.loss() + self.memory.head_input - self.memory.hidden
        yield Moment("loss", self.share, unsharded, self.activations, logits=logits)
        if self.memory.sharding.tp > 1:
            # The gradient of a rank's rows of the head becomes one of all of them, in three tensors.
            unsharded += 3 * self.run.head.gradients
            yield Moment("head's backward", self.share, unsharded, self.activations, 0.0, 0.0, self.memory.hidden)

    def block(self, place: int) -> Iterator[Moment]:
        """Yield the moments of the block at `place` in the layer."""
        block, share, hidden, now = self.blocks[place], self.share, self.memory.hidden, self.activations
        mode, experts = self.pieces[place][1], block.experts
        held = self.around + self.dense + self.experts + self.flats + (self.run.head.gradients if self.is_last else 0.0)
        behind = self.behind
        # Experts stay gathered while other micro-batches need them.
        early, full = self.memory.recomputed(self.pieces[place], now)
        rest = full - experts.saved
        if self.pieces[place][0].experts is not None:
            gathering = held + behind
            if self.index == 0 and not self.is_last:
                gathering += experts.buffered - self.flat_experts
            yield Moment("experts' gather", share, gathering, now)
            if mode == "full":
                yield Moment("recomputing", share, gathering, full, experts.again)
            yield Moment("experts' backward", share, held + behind, early, experts.backward, 0.0, hidden)
            if self.is_end:
                held -= experts.gathered + self._summed(experts.reducing)
                reduced = held + max(2 * experts.reducing, experts.reduced)
                yield Moment("experts' reduction", share, reduced, early - experts.saved, 0.0, 0.0, 2 * hidden)
                behind = experts.reducing or behind
            else:
                adding = held + behind + self._adding(experts.reducing)
                yield Moment("experts' sum", share, adding, early - experts.saved, 0.0, 0.0, 2 * hidden)
                held += experts.reducing - self._summed(experts.reducing)
        yield Moment("block's backward", share, held + behind + block.growing, rest, 0.0, 0.0, block.working)
        if self.is_end:
            held -= block.dense + self._summed(block.reducing)
            held += max(block.reducing, block.copied) + block.reducing
            name = "block's reduction"
        else:
            held += behind + self._adding(block.reducing)
            name = "block's sum"
        yield Moment(name, share, held, full - block.reads, 0.0, 0.0, 2 * hidden)

    def ends(self) -> Iterator[Moment]:
        """Yield the moments behind the blocks: the head's gradient is summed or reduced, and the embedding's."""
        run = self.run
        if self.is_end:
            held = self.around + self.flats + max(block.reducing for block in self.blocks)
        else:
            summed = sum(block.reducing + block.experts.reducing for block in self.blocks)
            held = self.around + self.dense + self.experts + self.flats + self.behind + summed * (self.index == 0)
        if self.is_last and run.head.gradients:
            yield self._end("head", held, run.head, run.head_reduced, is_reduced=run.first_with_root > 0)
        if self.is_first and run.embeds:
            held += 0.0 if self.index else run.embedding.gathered
            yield self._end("embedding", held, run.embedding, run.embedding_reduced, is_reduced=True)
        elif self.is_first and not run.first_with_root and run.head.gradients:
            yield self._end("head", held, run.head, run.head_reduced, is_reduced=True)

    def _end(self, name: str, held: float, group: GroupBytes, reducing: float, *, is_reduced: bool) -> Moment:
        if self.is_end and is_reduced:
            copied = reducing if self.memory.sharding.gloo else 0.0
            held += max(reducing, copied) + reducing - group.gathered - self._summed(reducing)
        else:
            held += self._adding(reducing)
        rest = self.activations - self.saved
        return Moment(f"{name}'s gradient", self.share, held, rest, 0.0, 0.0, self.memory.hidden)

    def _summed(self, reducing: float) -> float:
        """Return the bytes of a group's gradients, of the micro-batches before this one."""
        return reducing if self.index else 0.0

    def _adding(self, reducing: float) -> float:
        """Return the bytes of a group's own gradients of this micro-batch, and what they are widened to."""
        gradients = reducing * self.memory.model.compute_bytes / self.memory.model.reduce_bytes
        return gradients if self.index else gradients + reducing


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
        frozen=state.frozen + memory.teacher_state(stage),
        master=state.master,
        gradients=memory.gradients(state) * worst.accumulated,
        moments=state.moments,
        unsharded=worst.unsharded + state.copies,
        activations=worst.activations + memory.teacher_hidden(stage),
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


def inputs_on_host(workload: Workload) -> float:
    """Return the bytes of blocks' inputs in host memory (train.keep_inputs) when forward of a round is through."""
    return RankMemory(workload).hidden * inputs_that_wait(workload) * workload.batch.together


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

    def recomputed(self, piece: Piece, now: float) -> tuple[float, float]:
        """Return the activations while a block's routed experts run backward, and while its remainder does.

        Args:
            now: Those before the block's backward.
        """
        block, mode = self.block(piece), piece[1]
        full = now + (block.reads - block.saved + self.hidden if mode != "none" else 0.0)
        # Selective: experts run backward first, from what was saved; then the remainder of the block runs again. It has
        # run again before where a block saves something behind its experts, as shared ones do.
        return now + self.hidden if mode == "selective" and not piece[0].figures.behind_experts else full, full

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
        """Return what a stage saves of a micro-batch beside its blocks: the hidden states that it sends.

        Where inputs of blocks are saved, the first block's is counted in `received`.
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
        """Return the bytes of the loss in chunks (step/loss.py): hidden states, head's gradient, one chunk's logits."""
        model, targets, head, compute = self.model, self.targets, self.head, self.model.compute_bytes
        vocabulary = model.vocabulary / self.layout.tp
        rows = targets * model.hidden * compute
        chunk = min(CHUNK_TOKENS, targets)
        chunks = -(-targets // chunk)
        wide = max(4, compute)
        # torch's cross-entropy makes two more in backward, after those of its input are freed; ours of a part of the
        # vocabulary (step/loss.py) makes them in forward.
        logits = chunk * vocabulary * (3 * wide if self.layout.tp == 1 else compute * (compute < wide) + 2 * wide)
        teacher = self.workload.teacher
        if teacher is not None:
            # The teacher's as its head gives them; of both models the logits or probabilities, and a product of them.
            logits = chunk * vocabulary * (4 * wide + compute)
            logits += group_bytes(teacher.root, self.sharding.ranks, self.layout.tp).gathered
        product = chunk * vocabulary * (compute + wide * (compute < wide)) + head * compute
        again = head * compute if chunks > 1 else 0.0
        # At the end the sum is rounded, while the last chunk's own gradient and logits are still there.
        rounding = 2 * head * compute + (targets - (chunks - 1) * chunk) * vocabulary * compute
        return 3 * rows - self.head_input + head * wide + max(logits + again, product + again, rounding)

    def teacher_state(self, stage: int) -> float:
        """Return the bytes of a teacher's shards on one pp rank."""
        teacher = self.workload.teacher
        return 0.0 if teacher is None else resident_state(teacher, self.layout, stage).frozen

    def teacher_hidden(self, stage: int) -> float:
        """Return the bytes of a teacher's hidden states for all targets of a step, which the last pp rank keeps."""
        teacher = self.workload.teacher
        if teacher is None or stage != self.layout.pp - 1:
            return 0.0
        return self.batch.accumulation * self.targets * teacher.hidden * teacher.compute_bytes

    def gradients(self, state: ResidentState) -> float:
        """Return the bytes of the shards' gradients, all of them.

        Between replicas FSDP2 holds what it has reduced until the end of backward, beside a gradient of another dtype.
        One of the same dtype is a view of it.
        """
        master, reduced = BYTES_OF[self.model.precision.params], self.model.reduce_bytes
        return state.master * (1 + reduced / master if self.layout.replicate > 1 and reduced != master else 1)

    def peak(self, stage: int) -> tuple[float, Moment]:
        """Return the most bytes of everything that one pp rank holds, and when."""
        state = resident_state(self.model, self.layout, stage, self.workload.optimizer)
        most, worst = -1.0, None
        for moment in self.moments(stage):
            _, accumulated, unsharded, activations, dispatch, logits, working = moment
            held = self.gradients(state) * accumulated + unsharded + activations + dispatch + logits + working
            if held > most:
                most, worst = held, moment
        assert worst is not None
        beside = self.teacher_state(stage) + self.teacher_hidden(stage)
        return most + beside + state.frozen + state.master + state.moments + state.copies, worst

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
    """The backward of one micro-batch of one of a rank's chunks, while others have activations saved as well.

    `before` are the activations saved when its first block begins; `ready` blocks have gradients of earlier backwards.
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
        for index in _boundaries(self.pieces):
            yield from self._block(index, before)
        if self.is_first and self.rank.embedding is not None:
            reducing, embedding = reduced_bytes(memory.model, self.embedding), self.embedding
            copied = reducing if memory.sharding.gloo else 0.0
            waiting = embedding.gathered + max(embedding.flat, embedding.gradients)
            waiting += memory.block(self.pieces[0]).reducing
            ends = max(waiting, embedding.gradients + reducing, reducing + copied)
            held, share = self.root + self.head_gradient + ends, (self.ready + self.own) / self.blocks
            yield Moment("embedding's gradient", share, held, before - memory.tables, 0.0, 0.0, memory.hidden)
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
        early, full = memory.recomputed(pieces[index], now)
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


@cache
def _boundaries(pieces: tuple[Hashable, ...]) -> tuple[int, ...]:
    """Return the first and the last place of each of `pieces`: what is saved falls evenly in between."""
    places: dict[Hashable, list[int]] = {}
    for index, piece in enumerate(pieces):
        places.setdefault(piece, []).append(index)
    return tuple(sorted({end for found in places.values() for end in (found[0], found[-1])}, reverse=True))
