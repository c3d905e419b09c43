"""An adapter with keys for each expert's own matrices, under the names that the model's published files give them.

For `expertmesh export --adapter-format per-expert`: `…mlp.experts.3.gate_proj.lora_A.weight` rather than PEFT's layout
of fused experts. Gate and up share one A, which both get; each gets its rows of B. Whatever is adapted beside the
experts is named as in the published files too. Names come from transformers' own rules; none are made up here.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor
from transformers import PreTrainedModel

from expertmesh.adapters.peft_format import PREFIX, is_parameter, parameter_name
from expertmesh.adapters.plan import AdapterPlan
from expertmesh.adapters.targets import Target
from expertmesh.anatomy import describe
from expertmesh.config.errors import InputError
from expertmesh.weights.lazy import LazyTensor
from expertmesh.weights.mapping import StateTensor, adapter_tensors, own_class, plan_save


@dataclass(frozen=True, slots=True)
class PerExpertAdapter:
    """The file's tensors, and the last parts of the names of the modules that adapter_config.json is to target."""

    tensors: dict[str, LazyTensor]
    modules: tuple[str, ...]

    def config(self, content: Mapping[str, Any], plan: AdapterPlan) -> dict[str, Any]:
        """adapter_config.json, made of PEFT's own `content`.

        Dense MLPs and shared experts stay parameters: PEFT takes modules of these names for routed experts.
        """
        dense = [parameter_name(target) for target in plan.targets if is_parameter(target) and not target.parameter]
        endings = content.get("target_parameters") or ()
        kept = [ending for ending in endings if any(name.endswith(f".{ending}") for name in dense)]
        return {**content, "target_modules": list(self.modules), "target_parameters": kept or None}


def per_expert_adapter(model: PreTrainedModel, plan: AdapterPlan) -> PerExpertAdapter:
    """Made of the adapters of `model`, whose files have the family's published layout.

    Raises `InputError` for a model whose files do not hold one matrix per expert (GPT-OSS and others with all experts
    of a layer in one tensor).
    """
    adapters = adapter_tensors(model)
    transposed = {spec.name for spec in describe(model).experts if spec.transposed}
    targets = {parameter_name(target): target for target in plan.targets}
    named, files, modules = Counter[str](), dict[str, LazyTensor](), dict[str, None]()
    for key, lazy in plan_save(model).items():
        weights = [leaf.name for leaf in lazy.leaves() if leaf.name in targets]
        if not weights:
            continue
        target = targets[weights[0]]
        part = _part_of(key, lazy, target, target.module in transposed)
        if part is None:
            _refuse(model, weights[0], key)
        a, b = _factors(adapters, target, *part)
        prefix = f"{PREFIX}{key.removesuffix('.weight')}"
        files |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
        named[weights[0]] += part[1][1] - part[1][0]
        if target.parameter or not is_parameter(target):
            modules[prefix.rpartition(".")[2]] = None
    for weight, target in targets.items():
        if named[weight] != target.out_features * (target.experts or 1):
            _refuse(model, weight, "not all of it")
    return PerExpertAdapter(files, tuple(modules))


def _part_of(key: str, lazy: LazyTensor, target: Target, transposed: bool) -> tuple[int | None, tuple[int, int]] | None:
    """Which expert's, and which outputs, a tensor of the files is; None if it is not one matrix `[outputs, inputs]`."""
    if len(lazy.pieces) != 1 or lazy.dim() != 2 or not key.endswith(".weight"):
        return None
    (piece,) = lazy.pieces
    lead = 0 if target.experts is None else 1
    out, inner = (lead + 1, lead) if transposed and lead else (lead, lead + 1)
    if not isinstance(piece.leaf, StateTensor) or piece.dims != (out, inner):
        return None
    if piece.source[inner] != (0, target.in_features):
        return None
    return piece.source[0][0] if lead else None, piece.source[out]


def _factors(
    adapters: Mapping[str, Tensor], target: Target, expert: int | None, rows: tuple[int, int]
) -> tuple[LazyTensor, LazyTensor]:
    names = [f"{target.module}.{leaf}" for leaf in target.leaves]
    a, b = (LazyTensor.of(StateTensor(name, adapters[name])) for name in names)
    chosen = (a, b[slice(*rows)]) if expert is None else (a[expert], b[expert, slice(*rows)])
    assert all(isinstance(each, LazyTensor) for each in chosen)
    return chosen  # type: ignore[return-value]


def _refuse(model: PreTrainedModel, weight: str, key: str) -> NoReturn:
    raise InputError(
        f"{own_class(model).__name__}: its published files hold {weight} otherwise than as one matrix per expert "
        f"({key}), so there are no per-expert names for it; leave --adapter-format out: readers of such models take "
        "PEFT's own layout",
        key="adapter.no-per-expert-names",
    )
