"""View a model as the full one, whatever of it this rank holds: its structure, tensors, ties, class and files.

A model may be plain, on meta, sharded by FSDP2, or one of several pipeline stages. Files, checkpoints, audits and
optimizers handle the full model and must not depend on the layout. So a function of the public interface makes one view
and hands it to the functions below it, and none of them asks the model again.

A view answers at the first question and keeps the answer: after parameters were replaced (allocated, adapted, split
into stages) make a new one. Nothing here communicates.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from expertmesh.config.errors import InputError
from expertmesh.state.sharded_model import ShardedModel, sharded
from expertmesh.state.shards import full_state

_Module = TypeVar("_Module", bound=nn.Module)


@dataclass(eq=False)
class ModelView:
    """A model as the full one."""

    module: Any
    """The model as this rank holds it, a `PreTrainedModel` wherever files are involved."""
    full: Any = field(init=False)
    """The full model: `module` itself, or on meta if `module` is a stage. Its structure may be used, never its
    values."""

    def __post_init__(self) -> None:
        stage = sharded(self.module).stage_view
        self.full = self.module if stage is None else stage.meta_model

    @property
    def is_stage(self) -> bool:
        """True if this rank holds one of several pipeline stages."""
        return self.full is not self.module

    @property
    def attached(self) -> ShardedModel:
        """The state attached to the model: mesh, plans, source."""
        return sharded(self.module)

    @property
    def family(self) -> Any:
        """The model's class, without the subclass that FSDP2 puts in front of it."""
        return _published_class(type(self.module))

    @cached_property
    def state(self) -> dict[str, Tensor]:
        """The full model's state dict, in its order; tied tensors are one object under each of their names.

        Tensors of other stages have a name, a shape and a dtype, and this rank holds an empty part of them.
        """
        state = dict(self.module.state_dict(keep_vars=True))
        stage = self.attached.stage_view
        return state if stage is None else full_state(stage, state)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers by state-dict name, without adapters.

        Raises:
            InputError: An entry of the state dict is not a tensor.
        """
        tensors = {name: value for name, value in self.state.items() if not is_adapter(name)}
        for name, value in tensors.items():
            if not isinstance(value, Tensor):
                raise InputError(
                    f"{type(self.module).__name__}: state {name} is not a tensor, which is not supported",
                    key="model.state-not-tensor",
                )
        return tensors

    @cached_property
    def adapters(self) -> dict[str, Tensor]:
        """The low-rank adapters by name; empty for a model without adapters."""
        return {name: parameter for name, parameter in self.state.items() if is_adapter(name)}

    @cached_property
    def ties(self) -> list[list[str]]:
        """The names of each of `tensors`, in their order: one name, or several for a tied tensor."""
        return tied_names(self.tensors)

    @cached_property
    def unique(self) -> dict[str, Tensor]:
        """Each of `tensors` once, under the first of its names."""
        return {names[0]: self.tensors[names[0]] for names in self.ties}

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of this rank's stage by their names in the full model; a tied one by its first name."""
        if not self.is_stage:
            return dict(self.module.named_parameters())
        held = {id(parameter) for parameter in self.module.parameters()}
        names = (name for name, _ in self.full.named_parameters())
        return {name: self.state[name] for name in names if id(self.state[name]) in held}  # type: ignore[misc]

    @cached_property
    def meta(self) -> Any:
        """A copy of `module` on meta. Code that runs or changes it must restore it."""
        return meta_copy(self.module)

    @property
    def weights_file(self) -> str | None:
        """The name of the weights file if the config names one instead of the usual file, else None."""
        name: str | None = getattr(self.module.config, "transformers_weights", None)
        return name

    @contextmanager
    def published_classes(self) -> Iterator[None]:
        """Give sharded modules their original classes back inside the `with` block.

        transformers finds conversion rules by class name and skips classes defined outside of transformers. FSDP2's
        `FSDPMixtralForCausalLM` fails both tests: without this, a sharded model would have no rules and would be saved
        in another layout.
        """
        modules = [(module, type(module)) for module in self.module.modules() if isinstance(module, FSDPModule)]
        try:
            for module, kind in modules:
                module.__class__ = _published_class(kind)
            yield
        finally:
            for module, kind in modules:
                module.__class__ = kind


def is_adapter(name: str) -> bool:
    """Return whether the name of a parameter is that of a low-rank adapter, which is beside what it adapts."""
    return name.endswith(("lora_A", "lora_B"))


def tied_names(state: dict[str, Tensor]) -> list[list[str]]:
    """Return the names of each tensor, in state-dict order: a list of one name, or of several for a tied tensor."""
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    return list(names.values())


def _published_class(kind: type) -> type:
    return next(each for each in kind.__mro__ if issubclass(each, nn.Module) and not issubclass(each, FSDPModule))


def meta_copy(model: _Module) -> _Module:
    """Return a copy of `model` without values: parameters and buffers on meta, with the same ties."""
    memo: dict[int, object] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        # `deepcopy` treats entries of `memo` as already copied, so that it never copies a value.
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
    return deepcopy(model, memo)


def stage_names(model: nn.Module, names: Collection[str]) -> Iterator[str]:
    """Yield those of `names`, names of modules of the full model, that this rank's stage has, in order."""
    held = {name for name, _ in model.named_modules()}
    return (name for name in names if name in held)
