"""Turn a PeftModel in memory into a model of ours, whose adapters start from PEFT's values.

Nothing changes the model until all of it is known to be plain LoRA, maybe with modules_to_save; anything else is
refused by name, with the model unchanged. Used by `parallelize`. Nothing here communicates.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import PreTrainedModel

from expertmesh.adapters.peft_config import lora_of, plain_content, refuse_content, refuse_start
from expertmesh.adapters.peft_format import PREFIX
from expertmesh.adapters.plan import (
    AdapterPlan,
    attach_adapters,
    plan_targets,
    refuse_untrained_head,
    replaced_by,
    unadaptable,
)
from expertmesh.adapters.start import copy_adapter
from expertmesh.adapters.targets import Target, candidates
from expertmesh.anatomy import describe
from expertmesh.config import LoraConfig
from expertmesh.config.errors import InputError
from expertmesh.state.model_view import attach, meta_copy
from expertmesh.state.patching import mix_in, set_at

_WHERE = "the PeftModel"
# Parts of the names of what trains in a PeftModel.
_TRAINED = (".lora_A.", ".lora_B.", ".modules_to_save.")


@dataclass(frozen=True, slots=True)
class PeftAdapters:
    """The adapters of one PeftModel."""

    model: nn.Module
    plan: AdapterPlan
    """The plan of the same adapters on the model without PEFT."""
    values: Mapping[str, nn.Parameter]
    """By the keys of PEFT's file."""

    @property
    def dtype(self) -> torch.dtype:
        """The widest dtype of them: PEFT keeps modules_to_save in the base's."""
        return max((value.dtype for value in self.values.values()), key=lambda dtype: dtype.itemsize)

    @torch.no_grad()
    def become_ours(self, dtype: torch.dtype) -> PreTrainedModel:
        """Replace PEFT's layers by adapters of ours with the same values, in place, and return the frozen model.

        Args:
            dtype: The dtype of the new adapters.
        """
        base: PreTrainedModel = _unwrapped(self.model)
        plan = self.plan
        attach_adapters(base, plan.targets, plan.replaced, plan.lora, dtype)
        attach(base, lora_plan=plan)
        copy_adapter(base, plan, self.values, Path(_WHERE))
        if base is not self.model:
            mix_in(self.model, _Empty)
        return base


class _Empty:
    """Mixed in before a PeftModel whose adapters have become ours: every use of it raises."""

    @property
    def _expertmesh(self) -> NoReturn:
        raise _moved()

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _moved()

    def save_pretrained(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _moved()


def _moved() -> InputError:
    return InputError(
        "this PeftModel was parallelized and has no adapters any more; go on with the model that em.parallelize "
        "returned, and save it by em.save_adapter",
        key="adapter.peft-model-was-parallelized",
    )


def peft_adapters(model: nn.Module, lora: LoraConfig | None) -> PeftAdapters | None:
    """Return the adapters that PEFT has put into `model`, which is not changed; None for a model without PEFT.

    Args:
        lora: The adapters that the caller requested; has to be None if `model` has some.

    Raises:
        InputError: The model has anything but one active plain LoRA adapter on a frozen base.
    """
    if "peft" not in sys.modules:
        return None
    from peft import PeftModel

    layers = dict(_tuner_layers(model))
    if not layers and not isinstance(model, PeftModel):
        return None
    if lora is not None:
        _refuse("lora is given, and it has adapters of its own; leave one of them out")
    name, content = _only_config(model)
    refuse_content(content, _WHERE, in_memory=True)
    refuse_start(content, _WHERE)
    refuse_untrained_head(_base_of(model), content, _WHERE)
    for place, layer in layers.items():
        _refuse_layer(place, layer, name)
    for place, wrapper in _saved_modules(model):
        _refuse_inactive(place, wrapper, name)
    _refuse_trainables(model)
    meta_model = _unwrapped(meta_copy(model))
    targets = tuple(_targets(meta_model, layers, name))
    config = lora_of(
        {**content, "init_lora_weights": True},
        dropout=float(content.get("lora_dropout") or 0.0),
        targets=tuple(target.name for target in targets),
    )
    for place, layer in layers.items():
        wanted = config.scaling_of(layer.r[name], layer.lora_alpha[name])
        if layer.scaling[name] != wanted:
            _refuse(f"{place} is scaled by {layer.scaling[name]:g}, not by the {wanted:g} of its config")
    base, revision = content.get("base_model_name_or_path"), content.get("revision")
    base = base or meta_model.config.name_or_path or None
    replaced = replaced_by(meta_model, content, _WHERE)
    plan = AdapterPlan(config, targets, None, base, revision, in_memory=True, replaced=replaced)
    return PeftAdapters(model, plan_targets(meta_model, plan, _WHERE), dict(_values(model, name)))


def _only_config(model: Any) -> tuple[str, dict[str, Any]]:
    """Return name and config content of the model's one adapter. Raises `InputError` for none or several."""
    configs = getattr(model, "peft_config", {})
    if len(configs) != 1:
        _refuse(f"it has {len(configs)} adapters ({', '.join(configs)}); keep one (delete_adapter)")
    ((name, config),) = configs.items()
    content = plain_content(config)
    # The targets are read from its layers, because PEFT interprets names in a different way from family to family.
    return name, {**content, "target_modules": None, "target_parameters": None}


def _tuner_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    yield from ((name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer))


def _saved_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.utils.other import ModulesToSaveWrapper

    yield from ((name, module) for name, module in model.named_modules() if isinstance(module, ModulesToSaveWrapper))


def _refuse_layer(name: str, layer: Any, adapter: str) -> None:
    """Raise `InputError` unless the layer is plain LoRA, active and apart from its base."""
    from peft.tuners.lora.layer import Linear, ParamWrapper

    if type(layer) not in (Linear, ParamWrapper):
        _refuse(f"{name} is a {type(layer).__name__}, which cannot be taken over; linear layers and parameters can")
    _refuse_inactive(name, layer, adapter)
    for is_so, what in (
        (layer.merged, "merged into its base; call unmerge_adapter first"),
        (adapter not in layer.lora_A, "not there"),
        (bool(layer.lora_variant), "a variant of LoRA"),
    ):
        if is_so:
            _refuse(f"its adapter {adapter} on {name} is {what}")


def _refuse_inactive(name: str, layer: Any, adapter: str) -> None:
    """Raise `InputError` unless `adapter` is what a layer of PEFT computes with."""
    if layer.disable_adapters:
        _refuse(f"its adapter {adapter} on {name} is disabled; enable it first")
    if layer.active_adapters != [adapter]:
        _refuse(f"its adapter {adapter} on {name} is not active, but {layer.active_adapters}")


def _refuse_trainables(model: nn.Module) -> None:
    """Raise `InputError` unless exactly the adapters train, and modules_to_save: another choice would be lost."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad != any(part in name for part in _TRAINED):
            state = "trains, but only adapters do" if parameter.requires_grad else "is frozen, but adapters train"
            _refuse(f"{name} {state} here; set its requires_grad to {not parameter.requires_grad}")


def _targets(meta_model: nn.Module, layers: Mapping[str, Any], adapter: str) -> Iterator[Target]:
    """Yield the targets of the layers in module order of the model without PEFT, each with its rank and scaling.

    Args:
        meta_model: A meta copy of the model without PEFT.
    """
    adapted: dict[tuple[str, str | None], str] = {}
    for name, layer in layers.items():
        module = name.removeprefix(PREFIX)
        while module.endswith(".base_layer"):
            module = module.removesuffix(".base_layer")
        parameter = getattr(layer, "parameter_name", None)
        is_linear = type(layer.get_base_layer()) is nn.Linear
        adapted[module, None if is_linear and parameter == "weight" else parameter] = name
    for target in candidates(meta_model, describe(meta_model)):
        if (place := adapted.pop((target.module, target.parameter), None)) is not None:
            layer = layers[place]
            rank, alpha = layer.r[adapter], float(layer.lora_alpha[adapter])
            yield replace(target, r=rank, alpha=alpha, scaling=layer.scaling[adapter])
    if adapted:
        raise unadaptable(_WHERE, next(iter(adapted.values())))


def _values(model: nn.Module, adapter: str) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the adapters by the keys that they would have in PEFT's file."""
    own = {part + adapter: part.removesuffix(".") for part in _TRAINED[:2]} | {f"{_TRAINED[2]}{adapter}": ""}
    for name, parameter in model.named_parameters():
        for part, kept in own.items():
            if f"{part}." in name:
                yield PREFIX + name.removeprefix(PREFIX).replace(part, kept), parameter


def _base_of(model: Any) -> Any:
    from peft import PeftModel

    return model.get_base_model() if isinstance(model, PeftModel) else model


def _unwrapped(model: Any) -> Any:
    """Take PEFT out of the model, in place, and return the base model."""
    base = _base_of(model)
    for name, wrapper in list(_saved_modules(base)):
        set_at(base, name, wrapper.original_module)
    for name, layer in dict(_tuner_layers(base)).items():
        if not name.endswith(".base_layer"):
            set_at(base, name, layer.get_base_layer())
    for attribute in ("peft_config", "_hf_peft_config_loaded"):
        base.__dict__.pop(attribute, None)
    return base


def _refuse(why: str) -> NoReturn:
    raise InputError(f"{_WHERE} cannot be parallelized: {why}", key="adapter.unsupported-peft-model")
