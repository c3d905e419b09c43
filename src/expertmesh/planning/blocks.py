"""What one block of a kind keeps, gathers and needs while it runs: bytes of one rank, for one micro-batch.

Each formula follows the code it is about and says which: FSDP2's groups (parallel/fsdp.py), the expert layer
(experts/expert_mlp.py, dispatch.py), checkpointing (experts/activation_checkpointing.py). Blocks' own code comes from
the probe. docs/planning.md derives them. What layouts have in common is computed once (`costs_of`).

    R rows received, P pairs, H hidden, I intermediate, W columns of the up projection, L experts on a rank
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from expertmesh.config.sections import BYTES_OF
from expertmesh.distributed.layout import Layout
from expertmesh.planning.facts import Block, Experts, Facts, Unit
from expertmesh.planning.routing import Routing, expected
from expertmesh.planning.state import Mode, Sizes, sizes_over

INDEX = 8  # int64


@dataclass(frozen=True, slots=True)
class Share:
    """What of a layout a block's bytes depend on, and the micro-batch: `ranks` of fsdp and cp, tp, cp, ep, efsdp,
    whether there are replicas, `rows` sequences, whether gloo (which reduces from a copy of its input) is at work.
    """

    ranks: int
    tp: int
    cp: int
    ep: int
    efsdp: int
    replicated: bool
    rows: int
    imbalance: float
    gloo: bool

    @classmethod
    def of(cls, layout: Layout, rows: int, imbalance: float = 1.0, *, gloo: bool = False) -> "Share":
        return cls(
            ranks=layout.fsdp * layout.cp,
            tp=layout.tp,
            cp=layout.cp,
            ep=layout.ep,
            efsdp=layout.efsdp,
            replicated=layout.replicate > 1,
            rows=rows,
            imbalance=imbalance,
            gloo=gloo and layout.world_size > 1,
        )


@dataclass(frozen=True, slots=True)
class Kept:
    """Of `blocks` blocks that are alike, the first of them number `first`: what one keeps of a micro-batch between
    forward and backward, by mode.
    """

    first: int
    blocks: int
    has_experts: bool
    by_mode: dict[Mode, float]


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one block in one mode. `saved`: everything that backward reads; `kept`: what stays between forward and
    backward. `dense`: its dense parameters gathered; `flats`: everything of it prefetched as flat buffers; `after`: the
    buffer its dense gradients are reduced from, which lives until the next one. `gradients`: its dense parameters', and
    `copied`, gloo's copy. `own`: what its own code needs in backward on top of them.
    `of_experts` is the part of `saved` that routed experts save; they are `gathered`, out of what is `buffered`, a part
    of `flats`; `forward` and `backward` come on top while they run; `reduced` is the most while their gradients are,
    and `reducing` what is left of that afterwards.
    """

    saved: float
    kept: float
    dense: float
    flats: float
    after: float
    gradients: float
    copied: float
    own: float
    grown: float
    of_experts: float
    gathered: float
    buffered: float
    forward: float
    backward: float
    reduced: float
    reducing: float


@cache
def costs_of(facts: Facts, block: Block, mode: Mode, share: Share) -> Costs:
    """All of it; `facts` is the model of which `block` is."""
    return _Block(facts, block, share).costs(mode)


def kept_by_kind(facts: Facts, share: Share, modes: Sequence[Mode]) -> list[Kept]:
    """Activations of each kind of block of the whole model, in the order of their first."""
    return [
        Kept(
            facts.blocks.index(block),
            count,
            block.experts is not None,
            {mode: costs_of(facts, block, mode, share).kept for mode in modes},
        )
        for block, count in Counter(facts.blocks).items()
    ]


def hidden_bytes(facts: Facts, share: Share) -> float:
    """Of the hidden states of a rank's own positions."""
    return share.rows * facts.length / (share.cp * share.tp) * facts.hidden * BYTES_OF[facts.precision.compute]


def reduced_bytes(facts: Facts, sizes: Sizes) -> float:
    """The buffer that a dense group's gradients are reduced from."""
    return sizes.reduced * max(BYTES_OF[facts.precision.reduce], BYTES_OF[facts.precision.compute])


class _Block:
    """Quantities named as docs/planning.md names them."""

    def __init__(self, facts: Facts, block: Block, share: Share) -> None:
        self.facts, self.block, self.share = facts, block, share
        self.compute = BYTES_OF[facts.precision.compute]
        self.master = BYTES_OF[facts.precision.params]
        self.reduce = max(BYTES_OF[facts.precision.reduce], self.compute)
        self.tokens = share.rows * facts.length / (share.cp * share.tp)
        self.hidden = hidden_bytes(facts, share)
        self.gathers_experts = share.efsdp > 1 or share.replicated
        self.part = share.rows / (share.cp * share.tp)

    def costs(self, mode: Mode) -> Costs:
        block, experts, share = self.block, self.block.experts, self.share
        own, split, uncast = (self.sizes(unit) for unit in (block.unit, block.split, block.uncast))
        after = reduced_bytes(self.facts, own) + reduced_bytes(self.facts, split)
        saved = self.saved()
        reduced = 0.0
        if experts is not None:
            reducing = self.experts_reduced(experts)
            gradients = self.experts_here(experts, self.compute, trains=True) if self.gathers_experts else 0.0
            copied = reducing if share.gloo and share.efsdp > 1 else 0.0
            reduced = max(gradients + reducing, reducing + copied + reducing / share.efsdp)
        flat = self.experts_here(experts, self.compute) if experts is not None and share.efsdp > 1 else 0.0
        return Costs(
            saved=saved,
            kept=self.kept(mode, saved),
            dense=own.gathered + split.gathered + uncast.gathered,
            flats=own.flat + split.flat + flat,
            after=after,
            gradients=own.gradients + split.gradients,
            copied=after if share.gloo else 0.0,
            own=block.figures.backward * self.part + self.hidden,
            grown=block.figures.gradients / share.tp,
            of_experts=0.0 if experts is None else self.saved_by_experts(experts),
            gathered=0.0 if experts is None or not self.gathers_experts else self.experts_here(experts, self.compute),
            buffered=flat,
            forward=0.0 if experts is None else self.experts_forward(experts),
            backward=0.0 if experts is None else self.experts_backward(experts),
            reduced=reduced,
            reducing=0.0 if experts is None else self.experts_reduced(experts),
        )

    def sizes(self, unit: Unit | None) -> Sizes:
        return sizes_over(unit, self.share.ranks, self.share.tp)

    # Activations.

    def routing(self, experts: Experts) -> Routing:
        return expected(self.tokens, experts.choice, self.share.ep, self.share.imbalance)

    def saved(self) -> float:
        """Everything that backward of the block reads, when nothing is recomputed."""
        figures, share, parts = self.block.figures, self.share, self.block.parts
        gathered = (parts.split + parts.whole) * self.hidden * (share.tp - 1)
        mask = figures.mask * share.rows
        # What each rank of tp computes for all heads: latents.
        gathered += figures.latents * share.rows / share.cp * (1 - 1 / share.tp)
        own = (figures.saved - figures.mask) * self.part
        # cp: what attention gives stays as it was before and after the exchange.
        own += figures.attended * self.part if share.cp > 1 else 0
        return own + mask + gathered + (self.saved_by_experts(self.block.experts) if self.block.experts else 0)

    def saved_by_experts(self, experts: Experts) -> float:
        """expert_mlp.py saves rows, pre-activations and indices; dispatch.py the indices of the way back."""
        route, spec = self.routing(experts), experts.spec
        pairs = route.pairs * (experts.width * self.compute + 4 + 2 * INDEX)
        if experts.adapted:
            padded = -(-experts.rank // 8) * 8
            pairs += route.pairs * 2 * padded * self.compute
        if self.share.ep == 1:
            # The rows are the block's own tokens, which its router has saved.
            return pairs + route.pairs * INDEX + (route.tokens + 1) * INDEX
        rows = route.rows * (spec.hidden_size * self.compute + INDEX)
        way_back = (route.pairs + route.tokens * experts.choice.top_k + 2 * route.sent + route.tokens) * INDEX
        return pairs + rows + way_back

    def kept(self, mode: Mode, saved: float) -> float:
        """What stays of the block between forward and backward in a mode."""
        if mode == "none":
            return saved
        figures, experts = self.block.figures, self.block.experts
        kept = self.hidden + figures.choices * self.part
        if mode == "selective":
            kept += (figures.attended + figures.normalisers) * self.part
        if experts is None:
            return kept
        kept += self.routing(experts).tokens * experts.choice.top_k * 4
        if mode == "selective":
            kept += self.saved_by_experts(experts) + self.hidden
        return kept

    def experts_here(self, experts: Experts, width: int, *, trains: bool | None = None) -> float:
        """A rank's experts with `width` bytes per element."""
        elements = sum(size for size, train, _ in experts.matrices if trains in (None, train))
        return elements * experts.spec.num_experts / self.share.ep * width

    def experts_reduced(self, experts: Experts) -> float:
        return self.experts_here(experts, self.reduce, trains=True) if self.gathers_experts else 0.0

    # Working memory of routed experts (the sequence of events in experts/expert_mlp.py).

    def experts_backward(self, experts: Experts) -> float:
        route, spec = self.routing(experts), experts.spec
        row = route.rows * spec.hidden_size * self.compute
        pair_h = route.pairs * spec.hidden_size * self.compute
        pair_i = route.pairs * spec.intermediate_size * self.compute
        part = min(route.pairs, max(route.pairs / 8, (1 << 20) / experts.width))
        parts = part * spec.intermediate_size * (4 * self.compute + 4)
        here = spec.num_experts / self.share.ep
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
