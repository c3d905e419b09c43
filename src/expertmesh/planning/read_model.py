"""Reads a model's figures from config.json, through the model on meta: counts are exact for every family, and only JSON
is downloaded.
"""

import inspect
from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from expertmesh.anatomy import HIDDEN_OF_KEYS, ExpertsSpec, group_by_kind, head_of, is_classifier, is_inside
from expertmesh.config import LoraConfig
from expertmesh.introspection.compute_dtype import cast_inputs, cast_on_meta
from expertmesh.parallel.shard_plan import KeptInFp32, ShardPlan, expert_traffic, top_k_router
from expertmesh.parallel.tensor_plan import TensorPlan, shared_by_heads
from expertmesh.planning.model_figures import (
    Block,
    BlockFigures,
    Experts,
    ExpertWeight,
    Feasibility,
    ModelFigures,
    ParamGroup,
    TensorParallelParts,
    Weight,
)
from expertmesh.planning.probe import Packed, kept_apart, not_probed, probe
from expertmesh.state.model_view import is_adapter
from expertmesh.training.objective import Teacher
from expertmesh.training.optimizers.muon import matrices_of
from expertmesh.weights.meta_model import kept_in_fp32

if TYPE_CHECKING:
    from expertmesh.parallel.context import ContextPlan


def figures_of_plan(
    plan: ShardPlan, *, length: int, lora: LoraConfig | None, packed: bool, device: str
) -> ModelFigures:
    """Return the figures of a model whose shards are planned, in any layout. The plan's meta copy is left unchanged.

    Args:
        length: Tokens of a sequence.
        packed: Whether rows are packed, so that masks or attention by samples are counted.
        device: Torch device type that rows are attended on; it decides which of the two.
    """
    meta_model: Any = plan.view.meta
    compute = plan.dtypes.compute
    fp32 = kept_in_fp32(meta_model, compute)
    state = meta_model.state_dict(keep_vars=True)
    with ExitStack() as stack:
        for router in map(meta_model.get_submodule, plan.wide_routers):
            stack.callback(router.register_forward_pre_hook(cast_inputs, with_kwargs=True).remove)
        stack.enter_context(cast_on_meta([tensor for name, tensor in state.items() if not fp32(name)], compute))
        wide = [tensor for name, tensor in state.items() if name in plan.uncast]
        stack.enter_context(cast_on_meta(wide, torch.float32))
        apart = kept_apart(meta_model, plan.anatomy, device, compute) if packed else "no"
        return _figures(meta_model, plan, fp32, length=length, lora=lora, packed=apart)


def figures_of_teacher(teacher: Teacher | None, *, length: int, packed: bool, device: str) -> ModelFigures | None:
    """Return the figures of a teacher, of which nothing trains; None without one. Arguments as in `figures_of_plan`."""
    if teacher is None:
        return None
    return figures_of_plan(teacher.plan, length=length, lora=None, packed=packed, device=device)


def _figures(
    model: Any, plan: ShardPlan, fp32: KeptInFp32, *, length: int, lora: LoraConfig | None, packed: Packed
) -> ModelFigures:
    """Return the figures of a model on meta in the compute dtype."""
    anatomy, precision = plan.anatomy, plan.options.precision
    text = model.config.get_text_config()
    sizes = text.to_dict()  # not by attributes: reading one that differs between layers raises
    attention_heads = int(sizes.get("num_attention_heads") or 1)
    feasibility = Feasibility(model, plan, attention_heads, fp32)
    tensor_plan, context_plan = feasibility.smallest(tp=True)[0], feasibility.smallest()[1]
    reader = _FiguresReader(model, plan, fp32, lora, tensor_plan, context_plan)
    kinds = group_by_kind(model, anatomy.blocks)
    firsts = [names[0] for names in kinds]
    latents, whole = shared_by_heads(model, tensor_plan), computed_in_full(model, context_plan)
    probed = probe(model, anatomy, firsts, length, packed=packed, latents=latents, whole=whole)
    found = probed.blocks
    measured = [reader.block(first, figures) for first, figures in zip(firsts, found, strict=True)]
    of_block = {name: each for names, each in zip(kinds, measured, strict=True) for name in names}
    traffic = expert_traffic(model, plan.options, length)
    assert traffic is not None  # a router of unknown top-k is no block's
    head, embedding = head_of(model), model.get_input_embeddings()
    tied = head is not None and head.weight is embedding.weight
    embedded = next(f"{name}." for name, module in model.named_modules() if module is embedding)
    in_embedding = [name for name in reader.around if not tied and name.startswith(embedded)]
    return ModelFigures(
        family=str(model.config.model_type),
        blocks=tuple(of_block[name] for name in anatomy.blocks),
        embedding=None if tied else reader.group(in_embedding),
        root=reader.group(name for name in reader.around if name not in in_embedding),
        head=0 if head is None else head.weight.numel(),
        head_trains=head is not None and head.weight.requires_grad,
        vocabulary=int(model.config.num_labels if is_classifier(model) else text.vocab_size),
        hidden=anatomy.experts[0].hidden_size,
        heads=attention_heads,
        key_value_heads=int(sizes.get("num_key_value_heads") or attention_heads),
        length=length,
        packed=packed != "no",
        outside=probed.outside,
        tables=probed.tables,
        first_saves_less=probed.first_saves_less,
        precision=precision,
        adapted=lora is not None,
        checkpointable=bool(getattr(model, "supports_gradient_checkpointing", False)),
        anatomy=anatomy,
        feasibility=feasibility,
        traffic=traffic,
        replicas=plan.options.moe.replicas,
    )


def computed_in_full(model: nn.Module, plan: "ContextPlan") -> list[str]:
    """Return the modules that every rank of cp computes for full rows.

    They are the layers that cp does not cut, and in layers cut by heads the parts before the heads (latents, indices).
    """
    found = [part.name for part in plan.gathered if not part.is_split]
    for part in plan.gathered:
        for leaf, child in model.get_submodule(part.name).named_children() if part.is_split else ():
            is_cut = any(name.startswith(f"{leaf}.") for name in part.shares)
            if not is_cut and any(isinstance(module, nn.Linear) for module in child.modules()):
                found.append(f"{part.name}.{leaf}")
    return found


class _FiguresReader:
    """Turns modules of a model on meta into groups and blocks; `around` are parameters outside blocks."""

    def __init__(
        self,
        model: Any,
        plan: ShardPlan,
        fp32: KeptInFp32,
        lora: LoraConfig | None,
        tensor_plan: TensorPlan,
        context_plan: "ContextPlan",
    ) -> None:
        self.context_plan = context_plan
        self.model, self.fp32, self.uncast, self.lora, self.tensor_plan = model, fp32, plan.uncast, lora, tensor_plan
        self.master, self.width, _ = plan.dtypes
        self.backends, self.packed = plan.experts.compute, plan.packed
        self.specs = {spec.name: spec for spec in plan.anatomy.experts}
        self.of_experts = {f"{spec.name}.{leaf}" for spec in plan.anatomy.experts for leaf in spec.parameters}
        self.holders = {holder for spec in plan.anatomy.experts for holder in spec.holders}
        self.matrices = matrices_of(model, plan.anatomy)
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.split_dims = {
            f"{part.name}.{leaf}": dim
            for part in tensor_plan.parts
            if part.is_split
            for leaf, dim in part.parameter_dims(model.get_submodule(part.name)).items()
        }
        self.of_block = {block: [n for n in self.parameters if is_inside(n, block)] for block in plan.anatomy.blocks}
        inside = {name for names in self.of_block.values() for name in names}
        self.around = [name for name in self.parameters if name not in inside]

    def block(self, name: str, figures: BlockFigures) -> Block:
        spec = next((spec for spec in self.specs.values() if spec.name.startswith(f"{name}.")), None)
        dense = [parameter for parameter in self.of_block[name] if not self._is_expert(parameter)]
        uncast = [parameter for parameter in dense if parameter in self.uncast]
        split = [parameter for parameter in dense if parameter in self.split_dims]
        return Block(
            own=self.group(parameter for parameter in dense if parameter not in (*uncast, *split)),
            uncast=self.group(uncast) if uncast else None,
            split=self.group(split) if split else None,
            experts=None if spec is None else self._experts(spec),
            figures=figures,
            parts=self._parts(name),
        )

    def group(self, names: Iterable[str]) -> ParamGroup:
        return ParamGroup(tuple(self._weight(name) for name in names))

    def _parts(self, block: str) -> TensorParallelParts:
        parts = self.tensor_plan.within([block]).parts
        split = [part for part in parts if part.is_split]
        gathered = [f"{part.name}.{leaf}" for part in split for leaf in (*part.gathered, *part.norms)]
        features = sum(self.parameters[f"{name}.weight"].shape[0] for name in gathered)
        last = bool(split) and not split[-1].mixes_positions
        rows = self.context_plan.within([block]).gathered
        by_heads = sum(part.is_split for part in rows)

        def hidden_states(mixer: str) -> int:
            """Return how many hidden states a module that mixes positions is called with; it gathers each of them."""
            taken = inspect.signature(self.model.get_submodule(mixer).forward).parameters
            return 1 + len(HIDDEN_OF_KEYS & taken.keys())

        whole, rows_whole = (
            sum(hidden_states(part.name) for part in found if not part.is_split) for found in (parts, rows)
        )
        return TensorParallelParts(len(split), last, whole, len(gathered), features, by_heads, rows_whole)

    def _experts(self, spec: ExpertsSpec) -> Experts:
        module = self.model.get_submodule(spec.name)
        own = {name: p for name, p in module.named_parameters() if self._is_expert(f"{spec.name}.{name}")}
        router = top_k_router(self.model, spec)
        if router is None:
            raise not_probed(self.model, "its config does not say how many experts a token is sent to")
        return Experts(
            spec=spec,
            router=router,
            matrices=tuple(self._expert_weight(spec, name, parameter) for name, parameter in own.items()),
            looped=self.backends[spec.name] == "loop",
            rank=max((own[name].shape[1] for name in own if is_adapter(name) and name.endswith("A")), default=0),
            last=sum(own[name].numel() for name in (spec.down, f"{spec.down}_lora_B") if name in own)
            // spec.num_experts,
        )

    def _expert_weight(self, spec: ExpertsSpec, leaf: str, parameter: nn.Parameter) -> ExpertWeight:
        elements, kind = parameter.numel() // spec.num_experts, self.packed.get(f"{spec.name}.{leaf}")
        return ExpertWeight(
            shape=tuple(parameter.shape),
            elements=elements,
            trains=parameter.requires_grad,
            bytes=self._stored(leaf).itemsize if kind is None else kind.bytes / elements,
            is_adapter_a=is_adapter(leaf) and leaf.endswith("A"),
            is_matrix=f"{spec.name}.{leaf}" in self.matrices,
            packed=kind is not None,
        )

    def _weight(self, name: str) -> Weight:
        parameter, kind = self.parameters[name], self.packed.get(name)
        least = 4 if self.fp32(name) else 0  # of a base that is stored in the compute dtype
        packed = None if kind is None else kind.bytes / kind.columns
        return Weight(
            shape=tuple(parameter.shape),
            trains=parameter.requires_grad,
            bytes=packed or max(self._stored(name).itemsize, least),
            compute=packed or (4 if name in self.uncast else self.width.itemsize),
            packed=kind is not None,
            split=self.split_dims.get(name),
            is_matrix=name in self.matrices,
        )

    def _stored(self, name: str) -> torch.dtype:
        """Return the stored dtype; a base that adapters have frozen is in the compute dtype."""
        return self.width if self.lora is not None and not is_adapter(name) else self.master

    def _is_expert(self, name: str) -> bool:
        return name in self.of_experts or (is_adapter(name) and name.rpartition(".")[0] in self.holders)
