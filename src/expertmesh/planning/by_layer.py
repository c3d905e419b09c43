"""The most that one rank holds in a step whose micro-batches go through the model layer by layer (step/by_layer.py).

Only the layer that runs has unsharded parameters, with their gradients accumulated in the dtype of reductions from the
second micro-batch on; the one that backward comes to next is gathered meanwhile. Activations are those of all
micro-batches of a round. What a block saves and needs for one of them is in blocks.py. docs/formulas.md derives it.

    M micro-batches of a round; layers are counted from 0
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from expertmesh.planning.blocks import Moment, reduced_bytes
from expertmesh.planning.model_figures import GroupBytes, group_bytes
from expertmesh.planning.stages import Piece

if TYPE_CHECKING:
    from expertmesh.planning.memory import RankMemory


class RoundMemory:
    """Backward of one round. `ready` is true if an earlier one has left gradients."""

    def __init__(self, memory: "RankMemory", *, ready: bool) -> None:
        self.memory, self.ready = memory, ready
        self.round, hidden = memory.batch.together, memory.hidden
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
        for number in self._edges():
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
        kept = self.round * (sum(self.saved[:number]) + sum(self.inputs[: number + 1])) + left * self.saved[number]
        kept += index * self.inputs[number]  # the gradient of its input, where it is through
        if number == len(self.layers) - 1:
            return kept + left * self.memory.outside + self.round * hidden
        # The layer behind it is freed when this one is through: its input, the gradient of that, the decoder's result.
        return kept + left * hidden * (3 if number + 2 == len(self.layers) else 2)

    def _saved(self, number: int) -> float:
        """Return what a layer saves of a micro-batch, its input left out."""
        memory, pieces = self.memory, self.layers[number]
        # The first forward makes the tables of all layers.
        saved = sum(memory.block(piece).saved for piece in pieces) + (0.0 if number else memory.tables)
        if pieces[0][1] != "none":
            return saved - (memory.hidden if number else 0.0)
        return saved - (0.0 if number else memory.first_saves_less)

    def _edges(self) -> list[int]:
        """Return the layers at which the peak can be: what is saved falls evenly in between."""
        places: dict[tuple[Piece, ...], list[int]] = {}
        for number, pieces in enumerate(self.layers):
            places.setdefault(tuple(pieces), []).append(number)
        edges = {edge for found in places.values() for edge in (found[0], found[-1])}
        last = len(self.layers) - 1
        return sorted({0, last, max(0, last - 1), *edges}, reverse=True)


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
        full = now + (block.reads - block.saved + hidden if mode != "none" else 0.0)
        # As by micro-batch (memory.py), but experts stay gathered while other micro-batches need them.
        early = now + hidden if mode == "selective" else full
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
