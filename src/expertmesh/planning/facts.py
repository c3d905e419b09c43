"""What the planner knows of a model: its parameters as FSDP2 will group them, its experts, and what its blocks keep.

Read from config.json through the model on meta, so counts are exact for every family and nothing is downloaded but
JSON. `Facts` is plain data: everything after it (memory.py, traffic.py, speed.py) is arithmetic.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from expertmesh.adapters.plan import adapt
from expertmesh.anatomy import Anatomy, ExpertsSpec, describe, is_adapter, is_inside
from expertmesh.config import LoraConfig, PrecisionConfig
from expertmesh.experts.install import choose_backend, is_silu_gated
from expertmesh.introspection.compute_dtype import uncast_modules
from expertmesh.parallel.tensor_plan import TensorPlan, shared_by_heads
from expertmesh.planning.asked import Asked
from expertmesh.planning.probe import BlockFigures, Probed, probe
from expertmesh.planning.routing import Choice
from expertmesh.weights.meta_model import build_meta_model, kept_in_fp32


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter that is not a routed expert's. `bytes` per element as stored, `compute` as computed with; `split`:
    the dim that tp splits, or None.
    """

    shape: tuple[int, ...]
    trains: bool
    bytes: int
    compute: int
    split: int | None

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def shard(self, ranks: int, tp: int) -> float:
        """Elements of the largest of FSDP2's shards of dim 0, over `ranks` of fsdp and cp, and over tp: where that has
        not split the parameter before, it is sharded over it as well.
        """
        first, *others = self.shape or (1,)
        if self.split is None:
            return -(-first // (ranks * tp)) * prod(others)
        if self.split == 0:
            return -(-(first // tp) // ranks) * prod(others)
        return -(-first // ranks) * prod(others) / tp


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Parameters that FSDP2 gathers and reduces together."""

    weights: tuple[Weight, ...]

    @property
    def numel(self) -> int:
        return sum(weight.numel for weight in self.weights)


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """The routed experts of one block. `matrices` are per expert: (elements, trains, bytes as stored)."""

    spec: ExpertsSpec
    choice: Choice
    matrices: tuple[tuple[int, bool, int], ...]
    looped: bool
    silu: bool
    adapted: bool
    rank: int

    @property
    def elements(self) -> int:
        """Of all experts."""
        return self.spec.num_experts * sum(size for size, _, _ in self.matrices)

    @property
    def width(self) -> int:
        """Columns of the up projection."""
        return self.spec.intermediate_size * (2 if self.spec.gated else 1)


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One kind of decoder block. `unit` is what FSDP2 groups at the block, `uncast` what it must not cast, and `split`
    what tp splits (a group for each such part under tp, otherwise part of the block's own).
    """

    unit: Unit
    uncast: Unit | None
    split: Unit | None
    experts: Experts | None
    figures: BlockFigures
    parts: "Parts"

    @property
    def units(self) -> tuple[Unit, ...]:
        return tuple(unit for unit in (self.unit, self.split, self.uncast) if unit is not None)


@dataclass(frozen=True, slots=True)
class Parts:
    """How many parts of a block gather positions under tp: `split` ones, the last of which may be the block's `last`
    module, and those that each rank computes `whole`. `features`: of outputs that are put together again.
    """

    split: int = 0
    last: bool = False
    whole: int = 0
    features: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Facts:
    """A model, a precision and a sequence length. Blocks in order; equal ones are the same object."""

    family: str
    blocks: tuple[Block, ...]
    embedding: Unit | None
    root: Unit
    head: int
    head_trains: bool
    vocabulary: int
    hidden: int
    heads: int
    key_value_heads: int
    length: int
    packed: bool
    outside: int
    tables: int
    first_saves_less: int
    precision: PrecisionConfig
    adapted: bool
    checkpointable: bool
    anatomy: Anatomy
    asked: Asked

    @property
    def moe(self) -> tuple[Block, ...]:
        return tuple(block for block in self.blocks if block.experts is not None)

    @property
    def embeds_trained(self) -> bool:
        """Whether the embedding trains, so that the first block's input has a gradient."""
        return any(weight.trains for weight in (self.root if self.embedding is None else self.embedding).weights)

    @property
    def units(self) -> tuple[Unit, ...]:
        """Every dense FSDP2 group of the model."""
        inside = [unit for block in self.blocks for unit in block.units]
        return tuple(unit for unit in (*inside, self.embedding, self.root) if unit is not None)

    @property
    def dense(self) -> int:
        return sum(unit.numel for unit in self.units)

    @property
    def expert(self) -> int:
        return sum(block.experts.elements for block in self.moe if block.experts is not None)

    @property
    def total(self) -> int:
        return self.dense + self.expert


def facts_of(
    config: PreTrainedConfig,
    *,
    length: int,
    precision: PrecisionConfig,
    lora: LoraConfig | None = None,
    packed: bool = True,
    attention: str | None = None,
    compute: str = "auto",
    trust_remote_code: bool = False,
) -> Facts:
    """Build the model on meta and look at it; no weights, no ranks, no communication.

    `packed`: attention masks keep samples apart, which costs what explicit masks cost. `compute` is moe.compute. Raises
    `InputError` for what `train` would refuse about the model.
    """
    width = getattr(torch, precision.compute)
    model = build_meta_model(config, width, attention=attention, trust_remote_code=trust_remote_code)
    if lora is not None:
        adapt(model, lora, width, None)
    return facts_of_model(model, length=length, precision=precision, lora=lora, packed=packed, compute=compute)


def facts_of_model(
    model: Any, *, length: int, precision: PrecisionConfig, lora: LoraConfig | None, packed: bool, compute: str
) -> Facts:
    """The same for a model on meta in the compute dtype, with its adapters. It is left as it was."""
    anatomy = describe(model)
    text = model.config.get_text_config()
    sizes = text.to_dict()  # attributes that differ between layers cannot be asked for
    attention_heads = int(sizes.get("num_attention_heads") or 1)
    kept = kept_in_fp32(model, getattr(torch, precision.compute))
    if precision.params != precision.compute:
        uncast_modules(model, anatomy, kept)  # refuses parameters that cannot have a group of their own
    asked = Asked(model, anatomy, attention_heads, kept)
    tensor = asked.any_tensor_plan()
    reader = _Reader(model, anatomy, precision, lora, compute, tensor)
    kinds: dict[int, int] = {}
    signatures: dict[Any, int] = {}
    for index, name in enumerate(anatomy.blocks):
        kinds[index] = signatures.setdefault(reader.signature(name), len(signatures))
    explicit = packed and (model.config._attn_implementation != "flash_attention_2")
    probed = probe(model, anatomy, kinds, length, explicit, shared_by_heads(model, tensor))
    made = {kind: reader.block(anatomy.blocks[index], probed, kind) for index, kind in reversed(kinds.items())}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is not None and head.weight is embedding.weight
    names = {id(module): name for name, module in model.named_modules()}
    embeds = names[id(embedding)]
    around = [name for name, _ in model.named_parameters() if not _inside(name, anatomy.blocks)]
    in_root = [name for name in around if tied or not name.startswith(f"{embeds}.")]
    return Facts(
        family=str(model.config.model_type),
        blocks=tuple(made[kind] for kind in kinds.values()),
        embedding=None if tied else reader.unit([name for name in around if name not in in_root]),
        root=reader.unit(in_root),
        head=0 if head is None else head.weight.numel(),
        head_trains=head is not None and head.weight.requires_grad,
        vocabulary=int(text.vocab_size),
        hidden=anatomy.experts[0].hidden_size,
        heads=attention_heads,
        key_value_heads=int(sizes.get("num_key_value_heads") or attention_heads),
        length=length,
        packed=packed,
        outside=probed.outside,
        tables=probed.tables,
        first_saves_less=probed.first_saves_less,
        precision=precision,
        adapted=lora is not None,
        checkpointable=bool(getattr(model, "supports_gradient_checkpointing", False)),
        anatomy=anatomy,
        asked=asked,
    )


class _Reader:
    """Turns modules of a model on meta into units and blocks."""

    def __init__(
        self,
        model: Any,
        anatomy: Anatomy,
        precision: PrecisionConfig,
        lora: LoraConfig | None,
        compute: str,
        tensor: TensorPlan,
    ) -> None:
        self.model, self.anatomy, self.lora, self.compute = model, anatomy, lora, compute
        self.master: torch.dtype = getattr(torch, precision.params)
        self.width: torch.dtype = getattr(torch, precision.compute)
        self.kept = kept_in_fp32(model, self.width)
        self.specs = {spec.name: spec for spec in anatomy.experts}
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.tensor = tensor
        self.split_dims = {
            f"{part.name}.{leaf}": dim
            for part in tensor.parts
            if part.is_split
            for leaf, dim in part.parameter_dims(model.get_submodule(part.name)).items()
        }
        self.of_block: dict[str, list[str]] = {name: [] for name in anatomy.blocks}
        for name in self.parameters:
            if (block := _block_of(name, self.of_block)) is not None:
                self.of_block[block].append(name)

    def signature(self, block: str) -> Any:
        module = self.model.get_submodule(block)
        inside = [(n.removeprefix(block), p.shape, p.requires_grad) for n, p in self._of(block)]
        kinds = tuple(
            str(getattr(part, "layer_type", getattr(part, "attention_type", ""))) for part in module.children()
        )
        window = tuple(str(getattr(part, "sliding_window", "")) for part in module.children())
        return type(module).__name__, str(getattr(module, "attention_type", "")), kinds, window, tuple(inside)

    def block(self, name: str, probed: Probed, kind: int) -> Block:
        spec = next((spec for spec in self.specs.values() if spec.name.startswith(f"{name}.")), None)
        dense = [n for n, _ in self._of(name) if not self._is_expert(n)]
        uncast = [n for n in dense if self._uncast(n)]
        split = [n for n in dense if n in self.split_dims]
        return Block(
            unit=self.unit([n for n in dense if n not in (*uncast, *split)]),
            uncast=self.unit(uncast) if uncast else None,
            split=self.unit(split) if split else None,
            experts=None if spec is None else self._experts(spec),
            figures=probed.blocks[kind],
            parts=self._parts(name),
        )

    def _parts(self, block: str) -> Parts:
        parts = self.tensor.within([block]).parts
        split = [part for part in parts if part.is_split]
        features = sum(
            self.model.get_submodule(f"{part.name}.{leaf}").out_features for part in split for leaf in part.gathered
        )
        last = bool(split) and not split[-1].mixes_positions
        return Parts(len(split), last, len(parts) - len(split), features)

    def unit(self, names: Iterable[str]) -> Unit:
        return Unit(tuple(self._weight(name) for name in names))

    def _experts(self, spec: ExpertsSpec) -> Experts:
        module = self.model.get_submodule(spec.name)
        matrices = []
        for name, parameter in module.named_parameters(recurse=False):
            trained = parameter.requires_grad
            own = self.width if self.lora is not None and not is_adapter(name) else self.master
            matrices.append((parameter.numel() // spec.num_experts, trained, own.itemsize))
        text = self.model.config.get_text_config()
        groups, kept = (getattr(text, key, None) for key in ("n_group", "topk_group"))
        limited = isinstance(groups, int) and isinstance(kept, int) and 1 <= kept < groups
        assert spec.top_k is not None
        return Experts(
            spec=spec,
            choice=Choice(spec.num_experts, spec.top_k, *((groups, kept) if limited else ())),
            matrices=tuple(matrices),
            looped=choose_backend(spec, self.compute, self.width) == "loop",  # type: ignore[arg-type]
            silu=is_silu_gated(module, spec),
            adapted=any(is_adapter(name) for name, _ in module.named_parameters(recurse=False)),
            rank=0 if self.lora is None else self.lora.r,
        )

    def _weight(self, name: str) -> Weight:
        parameter = self.parameters[name]
        kept = self.kept(name)
        stored = self.width if self.lora is not None and not is_adapter(name) else self.master
        compute = max(self.width.itemsize, 4 if kept else 0)
        stored_bytes = max(stored.itemsize, 4 if kept else 0)
        return Weight(tuple(parameter.shape), parameter.requires_grad, stored_bytes, compute, self.split_dims.get(name))

    def _of(self, block: str) -> list[tuple[str, nn.Parameter]]:
        return [(name, self.parameters[name]) for name in self.of_block[block]]

    def _is_expert(self, name: str) -> bool:
        owner = self.specs.get(name.rpartition(".")[0])
        return owner is not None and (name.rpartition(".")[2] in owner.parameters or is_adapter(name))

    def _uncast(self, name: str) -> bool:
        return self.kept(name) and self.master != self.width


def _block_of(name: str, blocks: Iterable[str] | dict[str, Any]) -> str | None:
    """The block that a parameter is in, by its dotted prefixes."""
    while name:
        name = name.rpartition(".")[0]
        if name in blocks:
            return name
    return None


def _inside(name: str, blocks: tuple[str, ...]) -> bool:
    return any(is_inside(name, block) for block in blocks)
