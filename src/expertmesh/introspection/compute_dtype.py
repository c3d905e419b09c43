"""What precision.compute means for each module of a model whose parameters are in another dtype, and whether that runs.

FSDP2 casts parameters group by group and nothing else. What a family keeps in float32 has groups of its own, gathered
when their modules are called: code that reads such a parameter without the call would meet a shard of it. And buffers
keep the dtype of precision.params, which a family's own code may not multiply with. Either would end in the middle of
the first step with an error of torch; one forward on meta, watched, shows it before weights are read.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.module_tracker import ModuleTracker

from expertmesh.anatomy import Anatomy, ExpertsSpec, is_adapter, is_inside
from expertmesh.compat import tree_leaves
from expertmesh.config.errors import InputError
from expertmesh.experts.lora_state import adapter_state
from expertmesh.introspection.known_families import proof_key, refusal_by_proof
from expertmesh.introspection.stage_probe import WithoutValues, forward_of_text, stand_ins_for_experts
from expertmesh.state.stage_view import meta_twin


def uncast_modules(model: nn.Module, anatomy: Anatomy, kept_in_fp32: Callable[[str], bool]) -> list[str]:
    """Modules whose parameters must stay fp32 under a narrower compute dtype. FSDP2 casts whole groups, so they need
    groups of their own; what cannot have one is refused by name.

    Of modules inside each other the outermost: a family's code may read the weight of a convolution without calling it.
    """
    names: list[str] = []
    holds = [*anatomy.blocks, *(spec.name for spec in anatomy.experts)]
    for name, module in model.named_modules():
        inside = [leaf for leaf, _ in module.named_parameters(prefix=name)]
        kept = [leaf for leaf in inside if kept_in_fp32(leaf)]
        if not kept or any(is_inside(name, taken) for taken in names):
            continue
        has_group = any(part == name or is_inside(part, name) for part in holds)
        if len(kept) == len(inside) and not has_group and not isinstance(module, nn.ModuleList | nn.ModuleDict):
            names.append(name)
        elif own := [leaf for leaf in kept if leaf.rpartition(".")[0] == name]:
            raise InputError(
                f"precision.compute: {model.config.model_type} computes with {own[0]} in float32, and {name} holds "  # type: ignore[union-attr]
                "parameters that it does not; set precision.compute to float32",
                key="precision.compute-unsupported",
            )
    return names


def refuse_compute(
    model: nn.Module,
    anatomy: Anatomy,
    compute: torch.dtype,
    kept_in_fp32: Callable[[str], bool],
    twin: nn.Module | None = None,
) -> None:
    """Raise `InputError` for a model that cannot be computed in `compute` as FSDP2 casts; `model` stays as it is.

    Called where a parameter that trains has another dtype. A model that cannot be run without values is not refused:
    nothing is known of it. `twin` is the model's on meta, if there is one, and is left as it was. Takes no weights; no
    communication.
    """
    uncast = uncast_modules(model, anatomy, kept_in_fp32)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    dtypes = {(re.sub(r"\.\d+", "", name), str(tensor.dtype)) for name, tensor in tensors if not is_adapter(name)}
    kinds = {re.sub(r"\.\d+", "", name) for name in uncast}
    key = proof_key(model, compute, sorted(dtypes), sorted(kinds), adapter_state(model) is not None)

    def prove() -> str | None:
        return _refusal(meta_twin(model) if twin is None else twin, anatomy.experts, compute, uncast)

    if reason := refusal_by_proof("compute", key, prove):
        dtype = str(compute).removeprefix("torch.")
        raise InputError(
            f"precision.compute {dtype}: {model.config.model_type} {reason}",  # type: ignore[union-attr]
            key="precision.compute-unsupported",
        )


def _refusal(
    twin: nn.Module, experts: Sequence[ExpertsSpec], compute: torch.dtype, uncast_names: Sequence[str]
) -> str | None:
    uncast = {id(parameter): name for name in uncast_names for parameter in twin.get_submodule(name).parameters()}
    watch = _Watch(uncast)
    cast = (parameter for parameter in twin.parameters() if id(parameter) not in uncast)
    try:
        with stand_ins_for_experts(twin, experts), cast_on_meta(cast, compute), watch.modules, watch:
            forward_of_text(twin)
    except _Apart as apart:
        return f"{apart}; set precision.compute to float32"
    except Exception as cause:
        if not _runs_in_one_dtype(twin, experts):
            return None
        first, dtype = str(cause).partition("\n")[0], str(compute).removeprefix("torch.")
        return (
            f"does not run with its parameters in {dtype} and its buffers as precision.params has them "
            f"({watch.innermost}: {first[:160]}); set precision.compute and precision.params to one dtype"
        )
    return None


@contextmanager
def cast_on_meta(tensors: Iterable[torch.Tensor], dtype: torch.dtype) -> Iterator[None]:
    """`tensors` on meta, as far as they are floating point, in `dtype`: the dtype is all there is to change."""
    before = [(tensor, tensor.dtype) for tensor in tensors if tensor.is_floating_point()]
    for tensor, _ in before:
        tensor.data = tensor.data.to(dtype)
    try:
        yield
    finally:
        for tensor, own in before:
            tensor.data = tensor.data.to(own)


def _runs_in_one_dtype(twin: nn.Module, experts: Sequence[ExpertsSpec]) -> bool:
    """Whether nothing but dtypes can have been the cause."""
    tensors = (*twin.parameters(), *twin.buffers())
    try:
        with stand_ins_for_experts(twin, experts), cast_on_meta(tensors, torch.float32), WithoutValues():
            forward_of_text(twin)
    except Exception:
        return False  # the family's code on tensors without values: nothing is known
    return True


class _Apart(Exception):
    """A parameter that is not cast was read outside of the call that gathers it."""


class _Watch(WithoutValues):
    """`uncast`: ids of parameters, and which module's call gathers each."""

    def __init__(self, uncast: dict[int, str]) -> None:
        super().__init__()
        self.uncast, self.modules = uncast, ModuleTracker()

    @property
    def innermost(self) -> str:
        """The module that runs, or that was running when an exception was raised."""
        return max(self._running(), key=len, default="the model")

    def _running(self) -> list[str]:
        return [name.partition(".")[2] for name in self.modules.parents if "." in name]  # the root goes by its class

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs or {})):
            name = self.uncast.get(id(leaf))
            if name is not None and name not in self._running():
                how = f"in {self.innermost}, without calling the module that holds them"
                raise _Apart(f"reads the parameters of {name} {how}")
        return super().__torch_dispatch__(func, types, args, kwargs)
