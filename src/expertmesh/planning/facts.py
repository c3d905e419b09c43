"""What the planner knows of a model: its parameters as FSDP2 will group them, its experts, and what its blocks keep.

Read from config.json through the model on meta, so counts are exact for every family and nothing is downloaded but
JSON. `Facts` is plain data: everything after it (memory.py, traffic.py, speed.py) is arithmetic.
"""

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from expertmesh.adapters.plan import adapt
from expertmesh.anatomy import Anatomy, ExpertsSpec, describe, is_adapter
from expertmesh.config import LoraConfig, PrecisionConfig
from expertmesh.experts.layer import choose_backend, is_silu_gated
from expertmesh.planning.probe import BlockFigures, Probed, probe
from expertmesh.planning.routing import Choice
from expertmesh.weights.skeleton import build_meta_model, kept_in_fp32


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter that is not a routed expert's. `bytes` per element as stored, `compute` as computed with; `split`
    over tp by the family's plan.
    """

    shape: tuple[int, ...]
    trains: bool
    bytes: int
    compute: int
    split: bool

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def padded(self, ranks: int) -> int:
        """Elements after FSDP2 has padded dim 0 to a multiple of `ranks`."""
        first, *others = self.shape or (1,)
        return -(-first // ranks) * ranks * prod(others)


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
    """One kind of decoder block. `inputs_gathered`: how many of its parts gather the sequence under tp."""

    unit: Unit
    uncast: Unit | None
    experts: Experts | None
    figures: BlockFigures
    inputs_gathered: int


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
    head_width: int
    length: int
    packed: bool
    outside: int
    first_saves_less: int
    precision: PrecisionConfig
    adapted: bool
    checkpointable: bool
    anatomy: Anatomy

    @property
    def moe(self) -> tuple[Block, ...]:
        return tuple(block for block in self.blocks if block.experts is not None)

    @property
    def units(self) -> tuple[Unit, ...]:
        """Every dense FSDP2 group of the model."""
        inside = [unit for block in self.blocks for unit in (block.uncast, block.unit)]
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
    reader = _Reader(model, anatomy, precision, lora, compute)
    kinds: dict[int, int] = {}
    signatures: dict[Any, int] = {}
    for index, name in enumerate(anatomy.blocks):
        kinds[index] = signatures.setdefault(reader.signature(name), len(signatures))
    explicit = packed and (model.config._attn_implementation != "flash_attention_2")
    probed = probe(model, anatomy, kinds, length, explicit)
    made = {kind: reader.block(anatomy.blocks[index], probed, kind) for index, kind in reversed(kinds.items())}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is not None and head.weight is embedding.weight
    names = {id(module): name for name, module in model.named_modules()}
    embeds = names[id(embedding)]
    around = [name for name, _ in model.named_parameters() if not _inside(name, anatomy.blocks)]
    in_root = [name for name in around if tied or not name.startswith(f"{embeds}.")]
    sizes = text.to_dict()  # attributes that differ between layers cannot be asked for
    attention_heads = int(sizes.get("num_attention_heads") or 1)
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
        head_width=int(sizes.get("head_dim") or anatomy.experts[0].hidden_size // attention_heads),
        length=length,
        packed=packed,
        outside=probed.outside,
        first_saves_less=probed.first_saves_less,
        precision=precision,
        adapted=lora is not None,
        checkpointable=bool(getattr(model, "supports_gradient_checkpointing", False)),
        anatomy=anatomy,
    )


class _Reader:
    """Turns modules of a model on meta into units and blocks."""

    def __init__(
        self, model: Any, anatomy: Anatomy, precision: PrecisionConfig, lora: LoraConfig | None, compute: str
    ) -> None:
        self.model, self.anatomy, self.lora, self.compute = model, anatomy, lora, compute
        self.master: torch.dtype = getattr(torch, precision.params)
        self.width: torch.dtype = getattr(torch, precision.compute)
        self.kept = kept_in_fp32(model, self.width)
        self.specs = {spec.name: spec for spec in anatomy.experts}
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        plan = dict(getattr(model, "tp_plan", None) or {})
        self.split_patterns = [pattern for pattern, style in plan.items() if "wise" in style]
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
        split = {n.removeprefix(f"{name}.").partition(".")[0] for n in dense if self._split(n)}
        return Block(
            unit=self.unit([n for n in dense if n not in uncast]),
            uncast=self.unit(uncast) if uncast else None,
            experts=None if spec is None else self._experts(spec),
            figures=probed.blocks[kind],
            inputs_gathered=len(split),
        )

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
        return Weight(tuple(parameter.shape), parameter.requires_grad, stored_bytes, compute, self._split(name))

    def _of(self, block: str) -> list[tuple[str, nn.Parameter]]:
        return [(name, self.parameters[name]) for name in self.of_block[block]]

    def _is_expert(self, name: str) -> bool:
        owner = self.specs.get(name.rpartition(".")[0])
        return owner is not None and (name.rpartition(".")[2] in owner.parameters or is_adapter(name))

    def _uncast(self, name: str) -> bool:
        return self.kept(name) and self.master != self.width

    def _split(self, name: str) -> bool:
        module = name.rpartition(".")[0]
        return any(fnmatch.fnmatchcase(module, pattern) for pattern in self.split_patterns)


def _block_of(name: str, blocks: Iterable[str] | dict[str, Any]) -> str | None:
    """The block that a parameter is in, by its dotted prefixes."""
    while name:
        name = name.rpartition(".")[0]
        if name in blocks:
            return name
    return None


def _inside(name: str, blocks: tuple[str, ...]) -> bool:
    return any(name.startswith(f"{block}.") for block in blocks)
