"""What one block of a kind saves, gathers and needs while it runs: bytes of one rank, for one micro-batch.

Each formula follows the code it is about and says which: FSDP2's groups (parallel/apply.py), the expert layer
(experts/expert_mlp.py, dispatch.py), checkpointing (experts/activation_checkpointing.py). Blocks' own code comes from
the probe. docs/formulas.md derives them. What layouts have in common is computed once (`block_memory`).
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from expertmesh.config.sections import BYTES_OF
from expertmesh.parallel.checkpointing import CheckpointingMode
from expertmesh.planning.model_figures import Block, Experts, GroupBytes, ModelFigures, group_bytes
from expertmesh.planning.stages import Workload, runs_shared_beside
from expertmesh.state.packed import elements_together

INDEX = 8  # int64
# Bytes of a packed weight while it is looked up: code, int32 index, fp32 value.
_LOOKED_UP = 0.5 + 2 + 4


@dataclass(frozen=True, slots=True)
class BlockSharding:
    """The figures of a layout and a micro-batch that a block's bytes depend on, beside the model."""

    ranks: int
    """Ranks of fsdp and cp together."""
    tp: int
    cp: int
    ep: int
    replicated: bool
    """True if there are replicas (HSDP)."""
    rows: int
    """Sequences of a micro-batch."""
    imbalance: float
    """Rows of the busiest rank of an EP group over their mean, in the worst layer."""
    mean_imbalance: float
    """The same, as the mean of a stage's layers."""
    on_cpu: bool
    """True if devices are CPUs."""
    gloo: bool
    """True if gloo reduces, from a copy of its input."""
    offload: bool = False
    """True if packed experts live in host memory."""
    shared_beside: bool = False
    """True if shared experts run while rows are in flight."""

    @classmethod
    def of(cls, workload: Workload) -> "BlockSharding":
        layout = workload.layout
        return cls(
            ranks=layout.fsdp * layout.cp,
            tp=layout.tp,
            cp=layout.cp,
            ep=layout.ep,
            replicated=layout.replicate > 1,
            rows=workload.batch.rows,
            imbalance=workload.imbalance,
            mean_imbalance=max(map(workload.mean_imbalance, range(layout.pp))),
            on_cpu=workload.on_cpu,
            gloo=workload.on_cpu and layout.world_size > 1,
            offload=layout.offload == "experts",
            shared_beside=runs_shared_beside(layout, workload.ep_nodes),
        )

    @property
    def together(self) -> int:
        """The elements of packed weights that are dequantised together."""
        return elements_together("cpu" if self.on_cpu else "cuda")

    @property
    def efsdp(self) -> int:
        return self.ranks * self.tp // self.ep

    @property
    def part(self) -> float:
        """Sequences of a rank, of which cp and tp ranks share each."""
        return self.rows / (self.cp * self.tp)


@dataclass(frozen=True, slots=True)
class ExpertsMemory:
    """The memory of one block's routed experts, in bytes of one rank."""

    saved: float = 0.0
    """Bytes that backward reads."""
    gathered: float = 0.0
    """Unsharded parameters, 0 if FSDP2 does not gather them."""
    buffered: float = 0.0
    """The flat buffer that gathered parameters are copied out of."""
    forward: float = 0.0
    """Bytes that forward needs on top of `saved`."""
    again: float = 0.0
    """Bytes that recomputation needs on top of `saved`."""
    backward: float = 0.0
    """Bytes that backward needs on top of `saved`."""
    reduced: float = 0.0
    """The most while gradients are reduced: gradients, reduction buffers, shards."""
    reducing: float = 0.0
    """The buffer that gradients are reduced from; it lives until the next reduction."""


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """The memory of one block in one checkpointing mode, in bytes of one rank."""

    reads: float
    """Everything that backward reads, routed experts included."""
    saved: float
    """Bytes that stay between forward and backward."""
    dense: float
    """Gathered dense parameters."""
    flats: float
    """The flat buffers of all its prefetched parameters, routed experts included."""
    reducing: float
    """The buffer that dense gradients are reduced from; it lives until the next reduction."""
    gradients: float
    """Dense gradients, unsharded, in the compute dtype."""
    copied: float
    """Gloo's copy of the reduction buffer, else 0."""
    working: float
    """Bytes that the block's own code needs in backward on top of `reads`; grows with the micro-batch."""
    growing: float
    """Parameters' gradients that the block's backward makes on top of `working`; tp splits them."""
    experts: ExpertsMemory


class Moment(NamedTuple):
    """The bytes of one rank at one moment, beside its parameters and optimizer state."""

    name: str
    accumulated: float
    """Share of the gradients that exist."""
    unsharded: float
    activations: float
    dispatch: float = 0.0
    logits: float = 0.0
    working: float = 0.0


@cache
def block_memory(model: ModelFigures, block: Block, mode: CheckpointingMode, sharding: BlockSharding) -> BlockMemory:
    """Return the bytes of one rank for `block`, a block of `model`, and one micro-batch."""
    groups = (block.own, block.split, block.uncast)
    own, split, uncast = (group_bytes(group, sharding.ranks, sharding.tp) for group in groups)
    reducing = reduced_bytes(model, own) + reduced_bytes(model, split)
    ends = block.ends_in_experts(mode, shared_beside=sharding.shared_beside)
    experts = (
        _Experts(model, block.experts, sharding, mode).memory(ends) if block.experts is not None else ExpertsMemory()
    )
    figures, parts, hidden = block.figures, block.parts, hidden_bytes(model, sharding)
    # What backward reads when nothing is recomputed: each rank of tp gathers hidden states, and computes latents of all
    # heads; under cp what attention gives stays as it was before and after the exchange.
    gathered = (parts.split + parts.whole) * hidden * (sharding.tp - 1)
    gathered += figures.latents * sharding.rows / sharding.cp * (1 - 1 / sharding.tp)
    here = (figures.saved - figures.mask) * sharding.part + (figures.attended * sharding.part if sharding.cp > 1 else 0)
    reads = here + figures.mask * sharding.rows + gathered + experts.saved
    # The largest packed linear layer's values (`_Linear` of state/packed.py), and what a few rows become on the way.
    packed: list[float] = [size for group in (block.own, block.uncast) if group is not None for size in group.packed]
    packed += [] if block.split is None else [size / sharding.tp for size in block.split.packed]
    largest, width = max(packed, default=0), model.compute_bytes
    dequantised = largest * width + min(largest, sharding.together) * (_LOOKED_UP + width)
    return BlockMemory(
        reads=reads,
        saved=reads if mode == "none" else _checkpointed(model, block, mode, sharding, experts.saved),
        dense=own.gathered + split.gathered + uncast.gathered,
        flats=own.flat + split.flat + experts.buffered,
        reducing=reducing,
        gradients=own.gradients + split.gradients,
        copied=reducing if sharding.gloo else 0.0,
        working=figures.backward * sharding.part + hidden + dequantised,
        growing=figures.gradients / sharding.tp,
        experts=experts,
    )


def hidden_bytes(model: ModelFigures, sharding: BlockSharding) -> float:
    """Return the bytes of the hidden states of a rank's positions."""
    return sharding.part * model.length * model.hidden * model.compute_bytes


def reduced_bytes(model: ModelFigures, sizes: GroupBytes) -> float:
    """Return the bytes of the buffer that a dense group's gradients are reduced from."""
    return sizes.reduced * model.reduce_bytes


def _checkpointed(
    model: ModelFigures, block: Block, mode: CheckpointingMode, sharding: BlockSharding, by_experts: float
) -> float:
    """Return what stays of the block between forward and backward where it is recomputed."""
    figures, hidden = block.figures, hidden_bytes(model, sharding)
    saved = hidden + figures.choices * sharding.part
    if mode == "selective":
        saved += (figures.attended + figures.normalisers) * sharding.part
    if block.experts is not None:
        saved += sharding.part * model.length * block.experts.router.top_k * 4
        if mode == "selective":
            saved += by_experts + hidden
        else:  # indices of the backward all-to-all's rows (dispatch.SumRows)
            saved += block.experts.router.routed(sharding.part * model.length, sharding.ep).sent * INDEX
    return saved


class _Experts:
    """The sequence of events in experts/expert_mlp.py. R rows received, P pairs, H hidden, I intermediate."""

    def __init__(self, model: ModelFigures, experts: Experts, sharding: BlockSharding, mode: CheckpointingMode) -> None:
        self.experts, self.spec, self.sharding = experts, experts.spec, sharding
        self.compute, self.reduce = model.compute_bytes, model.reduce_bytes
        self.master, self.replicas = BYTES_OF[model.precision.params], model.replicas
        tokens = sharding.part * model.length
        self.routed = experts.router.routed(tokens, sharding.ep, sharding.imbalance)
        # What all layers keep grows by their mean at most; of recomputed ones one at a time has anything.
        kept = sharding.imbalance if mode == "full" else sharding.mean_imbalance
        self.kept = experts.router.routed(tokens, sharding.ep, kept)
        self.gathers = sharding.efsdp > 1 or sharding.replicated or sharding.offload
        self.rows_RH = self.routed.rows * self.spec.hidden_size * self.compute
        self.pairs_PH = self.routed.pairs * self.spec.hidden_size * self.compute
        self.pairs_PI = self.routed.pairs * self.spec.intermediate_size * self.compute

    def memory(self, ends: bool) -> ExpertsMemory:
        """Return the memory of the block's experts; `ends`: recomputation stops before the down projection."""
        efsdp = self.sharding.efsdp
        reducing = self.here(self.reduce, trains=True) if self.gathers else 0.0
        gradients = self.here(self.compute, trains=True) if self.gathers else 0.0
        copied = reducing if self.sharding.gloo and efsdp > 1 else 0.0
        return ExpertsMemory(
            saved=self.saved(),
            gathered=self.gathered() if self.gathers else 0.0,
            buffered=self.gathered() if efsdp > 1 or self.sharding.offload else 0.0,
            forward=self.forward(),
            again=self.again() if ends else self.forward(),
            backward=self.backward(),
            reduced=max(gradients + reducing, reducing + copied + reducing / efsdp),
            reducing=reducing,
        )

    def here(self, width: int, *, trains: bool | None = None) -> float:
        """Return a rank's experts with `width` bytes per element."""
        return self.experts.elements(trains) * self.spec.num_experts / self.sharding.ep * width

    def gathered(self) -> float:
        """Return a rank's experts as FSDP2 gathers them."""
        return self.experts.gathered(self.compute) * self.spec.num_experts / self.sharding.ep

    def dequantised(self) -> float:
        """Return what a few packed experts are while their values are looked up."""
        packed = [matrix.elements for matrix in self.experts.matrices if matrix.packed]
        if not packed:
            return 0.0
        here = self.spec.num_experts / self.sharding.ep
        together = 1 if self.experts.looped else max(1, self.sharding.together // max(packed))
        return min(here, together) * max(packed) * _LOOKED_UP

    def saved(self) -> float:
        """Return what is saved: rows, pre-activations and indices, those of combine included."""
        routed, experts = self.kept, self.experts
        pairs = routed.pairs * (experts.width * self.compute + 4 + 2 * INDEX)
        if experts.rank:
            padded = -(-experts.rank // 8) * 8
            pairs += routed.pairs * 2 * padded * self.compute
        if self.replicas:  # adapters of local experts and of copies, joined
            pairs += self.here(self.master, trains=True) + self.replicas * experts.elements(trains=True) * self.master
        if self.sharding.ep == 1:
            # The rows are the block's own tokens, which its router has saved.
            return pairs + routed.pairs * INDEX + (routed.tokens + 1) * INDEX
        rows = routed.rows * (self.spec.hidden_size * self.compute + INDEX)
        way_back = (routed.pairs + routed.tokens * experts.router.top_k + 2 * routed.sent + routed.tokens) * INDEX
        return pairs + rows + way_back

    def forward(self) -> float:
        """Return the bytes of forward, on top of what is saved."""
        if self.experts.looped:
            return self.rows_RH * (1 + 4 / self.compute) + self.dequantised()
        return self.pairs_PI + self.pairs_PH + max(self.rows_RH, self.dequantised())

    def again(self) -> float:
        """Return the bytes of a second run that ends with what is saved: gathered rows, and received gradients."""
        return self.rows_RH + (self.dequantised() if self.experts.looped else max(self.pairs_PH, self.dequantised()))

    def backward(self) -> float:
        """Return the largest of three moments, on top of what is saved."""
        routed, experts, spec = self.routed, self.experts, self.spec
        part = min(routed.pairs, max(routed.pairs / 8, (1 << 20) / experts.width))
        parts = part * spec.intermediate_size * (4 * self.compute + 4)
        here = spec.num_experts / self.sharding.ep
        up, down = (here * size * spec.hidden_size for size in (experts.width, spec.intermediate_size))
        trains = any(each.trains for each in experts.matrices[:2]) and not experts.rank
        # Weights that FSDP2 does not gather are cast in the forward, and their gradients cast back.
        cast = self.master != self.compute and not self.gathers and not experts.rank
        gradient = (self.compute + (self.master if cast else 0)) if trains else 0
        stays = self.master if cast else self.compute
        if experts.looped:
            one = 3 / here
            looped = self.rows_RH + 4 * routed.rows * spec.hidden_size + one * (self.pairs_PH + self.pairs_PI)
            return looped + (up + down) * stays + self.dequantised()
        weight, values = self.compute if cast else 0, self.dequantised()
        rows, pairs = self.rows_RH, self.pairs_PH
        down_stays, up_stays = (stays * down, up * stays) if trains else (0, 0)
        return max(
            rows + pairs + self.pairs_PI + max(parts, down * max(gradient, weight), values),
            rows + down_stays + pairs + up * gradient,
            rows + down_stays + up_stays + pairs + max(rows, up * weight, values),
        )
