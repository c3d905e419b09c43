"""What precision.compute means for each tensor of a model whose parameters are in another dtype, and whether that runs.

FSDP2 casts parameters group by group and nothing else. What a family keeps in float32, be it one parameter among others
of a module, has groups of its own, gathered when their modules are called: code that reads such a parameter without the
call would meet a shard of it. And buffers keep the dtype of precision.params; those that a family's own code cannot
multiply with are cast while their module runs. What is left would end in the middle of the first step with an error of
torch; one forward on meta, watched, shows it before weights are read.
"""

import functools
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.module_tracker import ModuleTracker

from expertmesh.anatomy import Anatomy, ExpertsSpec, alike, decoder_blocks, is_adapter, is_inside, settings
from expertmesh.compat import tree_leaves, tree_map_only
from expertmesh.config.errors import InputError
from expertmesh.experts.lora_state import adapter_state
from expertmesh.introspection.known_families import proof_key, refusal_by_proof
from expertmesh.introspection.stage_probe import WithoutValues, forward_of_text, handed_on, stand_ins_for_experts
from expertmesh.state.patching import exchanged, replace_forward
from expertmesh.state.stage_view import meta_twin


@dataclass(frozen=True, slots=True)
class Casts:
    """What a narrower compute dtype leaves as it is, and what it changes beside the parameters.

    `kept`: the parameters that are fp32 when they are used, by the module whose call gathers them. `routers`: those of
    these modules that are routers whose inputs are cast to fp32. `buffers`: the modules whose own buffers are cast to
    the compute dtype while they run.
    """

    kept: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    routers: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()


def uncast_modules(
    model: nn.Module, anatomy: Anatomy, kept_in_fp32: Callable[[str], bool]
) -> dict[str, tuple[str, ...]]:
    """The parameters that must stay fp32 under a narrower compute dtype, by the module whose call gathers them: FSDP2
    casts whole groups, so they need groups of their own. What cannot have one is refused by name.

    Of modules inside each other the outermost: a family's code may read the weight of a convolution without calling it.
    """
    found: dict[str, tuple[str, ...]] = {}
    for name, module in model.named_modules():
        inside = [leaf for leaf, _ in module.named_parameters(prefix=name)]
        kept = tuple(leaf for leaf in inside if kept_in_fp32(leaf))
        if not kept or any(is_inside(name, taken) for taken in found):
            continue
        own = [leaf for leaf in kept if leaf.rpartition(".")[0] == name]
        is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)  # which is never called
        if not is_list and not _has_group(name, anatomy) and (own or len(kept) == len(inside)):
            found[name] = kept
        elif own:
            raise InputError(
                f"precision.compute: {model.config.model_type} computes with {own[0]} in float32, and {name} is "  # type: ignore[union-attr]
                "gathered in the compute dtype; set precision.compute to float32",
                key="precision.compute-unsupported",
            )
    return found


@dataclass(frozen=True, slots=True)
class _Refused:
    """Why a model does not run in the compute dtype, and which module's code is the cause. `reader`: the module that
    would have to be called for a parameter that is read without calling the one that gathers it.
    """

    reason: str
    module: str
    reader: str | None = None


def plan_compute(
    model: nn.Module,
    anatomy: Anatomy,
    compute: torch.dtype,
    kept_in_fp32: Callable[[str], bool],
    twin: nn.Module | None = None,
) -> Casts:
    """How `model` is computed in `compute` as FSDP2 casts. Raises `InputError` where it cannot be.

    Called where a parameter that trains has another dtype. A model that cannot be run without values is not refused:
    nothing is known of it. `twin` is the model's on meta, if there is one, and is left as it was, as `model` is. Takes
    no weights; no communication.
    """
    casts = Casts(uncast_modules(model, anatomy, kept_in_fp32))
    twin = meta_twin(model) if twin is None else twin
    if _is_proven(model, anatomy, compute, casts, twin):
        return casts
    while refused := _run(twin, anatomy, compute, casts):
        reader, module = refused.reader, refused.module
        if reader and reader not in casts.kept and not _has_group(reader, anatomy):
            for each in _in_blocks_alike(reader, _alike(twin, anatomy, casts)):
                casts = replace(casts, kept=_gathered_with(each, casts.kept))
        elif reader is None and module not in casts.buffers and _can_cast(model, module, kept_in_fp32):
            casts = replace(casts, buffers=(*casts.buffers, *_in_blocks_alike(module, _alike(twin, anatomy, casts))))
        else:
            dtype = str(compute).removeprefix("torch.")
            raise InputError(
                f"precision.compute {dtype}: {model.config.model_type} {refused.reason}",  # type: ignore[union-attr]
                key="precision.compute-unsupported",
            )
    return casts


def _alike(twin: nn.Module, anatomy: Anatomy, casts: Casts) -> list[list[str]]:
    """The names of blocks in groups that do the same, with tensors of the same dtypes."""
    kept = {leaf for leaves in casts.kept.values() for leaf in leaves}

    def kind(name: str) -> Hashable:
        block = twin.get_submodule(name)
        tensors = [*block.named_parameters(), *block.named_buffers()]
        dtypes = tuple((leaf, tensor.dtype, f"{name}.{leaf}" in kept) for leaf, tensor in tensors)
        around = (*casts.kept, *casts.routers, *casts.buffers)
        return settings(block), dtypes, tuple(each[len(name) :] for each in around if is_inside(each, name))

    return alike(twin, decoder_blocks(anatomy), kind)


def _in_blocks_alike(name: str, groups: Sequence[Sequence[str]]) -> list[str]:
    """The module of this name, and its equals in the blocks that are like its own."""
    for group in groups:
        if block := next((block for block in group if name == block or is_inside(name, block)), None):
            return [f"{each}{name[len(block) :]}" for each in group]
    return [name]


def with_wide_routers(model: nn.Module, anatomy: Anatomy, compute: torch.dtype, casts: Casts, twin: nn.Module) -> Casts:
    """`casts` with routers in fp32 as well, or as they are if the family's code does not run so.

    Routers that the family keeps in fp32 itself are left to its own code.
    """
    free = [
        name
        for name in anatomy.routers
        if not _has_group(name, anatomy)
        and not any(name == kept or is_inside(name, kept) or is_inside(kept, name) for kept in casts.kept)
    ]
    own = {name: tuple(leaf for leaf, _ in model.get_submodule(name).named_parameters(prefix=name)) for name in free}
    wide = replace(casts, kept={**casts.kept, **own}, routers=tuple(free))
    return wide if free and _is_proven(model, anatomy, compute, wide, twin) else casts


def cast_inputs(router: nn.Module, args: Any, kwargs: Any) -> Any:
    """A hook before a router's forward: floating-point inputs become fp32."""
    return tree_map_only(torch.Tensor, lambda x: x.float() if x.is_floating_point() else x, (args, kwargs))


def _is_proven(model: nn.Module, anatomy: Anatomy, compute: torch.dtype, casts: Casts, twin: nn.Module) -> bool:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    dtypes = {(re.sub(r"\.\d+", "", name), str(tensor.dtype)) for name, tensor in tensors if not is_adapter(name)}
    kinds = {re.sub(r"\.\d+", "", name) for name in casts.kept}
    others = ["routers in fp32"] * bool(casts.routers)
    key = proof_key(model, compute, sorted(dtypes), sorted(kinds), adapter_state(model) is not None, *others)

    def prove() -> str | None:
        refused = _run(twin, anatomy, compute, casts)
        return None if refused is None else refused.reason

    return refusal_by_proof("compute", key, prove) is None


def _has_group(name: str, anatomy: Anatomy) -> bool:
    """Whether a module has an FSDP2 group already, or parts of it have: blocks and experts."""
    return any(part == name or is_inside(part, name) for part in (*anatomy.blocks, *(s.name for s in anatomy.experts)))


def _gathered_with(wider: str, kept: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """`kept` with what is inside `wider` gathered when that is called."""
    found: dict[str, tuple[str, ...]] = {}
    for name, leaves in kept.items():
        holder = wider if is_inside(name, wider) else name
        found[holder] = (*found.get(holder, ()), *leaves)
    return found


def _can_cast(model: nn.Module, module: str, kept_in_fp32: Callable[[str], bool]) -> bool:
    return bool(module) and any(not kept_in_fp32(name) for name in floating_buffers(model, module))


def floating_buffers(model: nn.Module, module: str) -> dict[str, torch.Tensor]:
    """The floating-point buffers of a module itself, by their names in the model."""
    buffers = model.get_submodule(module).named_buffers(prefix=module, recurse=False)
    return {name: buffer for name, buffer in buffers if buffer.is_floating_point()}


def _run(twin: nn.Module, anatomy: Anatomy, compute: torch.dtype, casts: Casts) -> _Refused | None:
    """Of blocks that do the same, the first."""
    repeated = [name for group in _alike(twin, anatomy, casts) for name in group[1:]]
    kept = {id(twin.get_parameter(leaf)): name for name, leaves in casts.kept.items() for leaf in leaves}
    watch = _Watch(kept)
    cast: list[torch.Tensor] = [parameter for parameter in twin.parameters() if id(parameter) not in kept]
    cast += [buffer for name in casts.buffers for buffer in floating_buffers(twin, name).values()]
    wide = [parameter for parameter in twin.parameters() if id(parameter) in kept]
    hooks = [
        twin.get_submodule(name).register_forward_pre_hook(cast_inputs, with_kwargs=True) for name in casts.routers
    ]
    try:
        with ExitStack() as stack:
            for context in (
                stand_ins_for_experts(twin, anatomy.experts),
                handed_on(twin, decoder_blocks(anatomy), repeated),
                cast_on_meta(cast, compute),
                cast_on_meta(wide, torch.float32),
                watch.modules,
                watch,
            ):
                stack.enter_context(context)
            forward_of_text(twin)
    except _Apart as apart:
        return _Refused(f"{apart}; set precision.compute to float32", watch.innermost, apart.reader)
    except Exception as cause:
        if not _runs_in_one_dtype(twin, anatomy.experts):
            return None
        first, dtype = str(cause).partition("\n")[0], str(compute).removeprefix("torch.")
        return _Refused(
            f"does not run with its parameters in {dtype} and its buffers as precision.params has them "
            f"({watch.innermost}: {first[:160]}); set precision.compute and precision.params to one dtype",
            watch.innermost,
        )
    finally:
        for hook in hooks:
            hook.remove()
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
    """A parameter that is not cast was read outside of the call that gathers it, within the call of `reader`."""

    def __init__(self, name: str, innermost: str, reader: str) -> None:
        where = f"in {innermost}, without calling the module that holds them"
        super().__init__(f"reads the parameters of {name} {where}")
        self.reader = reader


_PRODUCTS = frozenset(
    packet.default for packet in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)
)


class _Watch(WithoutValues):
    """`uncast`: ids of parameters that are not cast, and which module's call gathers each."""

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
        leaves = tree_leaves((args, kwargs or {}))
        if func in _PRODUCTS:
            # Tensors on meta may differ, which those with values may not.
            dtypes = {str(leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor)}
            if len(dtypes) > 1:
                raise TypeError(f"a matrix product of {' and '.join(sorted(dtypes))}")
        for leaf in leaves:
            name = self.uncast.get(id(leaf))
            if name is not None and name not in self._running():
                around = (module for module in self._running() if is_inside(name, module))
                raise _Apart(name, self.innermost, max(around, key=len, default=""))
        return super().__torch_dispatch__(func, types, args, kwargs)


def cast_in_forward(model: nn.Module, buffers: Sequence[str], routers: Sequence[str], dtype: torch.dtype) -> None:
    """Let the modules `buffers` see their own buffers in `dtype` while they run (in files these keep theirs), and the
    modules `routers` get inputs in fp32.
    """
    for name in buffers:
        module = model.get_submodule(name)
        forward = partial(_with_cast_buffers, module, module.forward, dtype)
        replace_forward(module, functools.wraps(module.forward)(forward))
    for name in routers:
        model.get_submodule(name).register_forward_pre_hook(cast_inputs, with_kwargs=True)


def _with_cast_buffers(
    module: nn.Module, forward: Callable[..., Any], dtype: torch.dtype, *args: Any, **kwargs: Any
) -> Any:
    buffers: dict[str, Any] = module._buffers
    cast = {name: buffer.to(dtype) for name, buffer in buffers.items() if buffer.is_floating_point()}
    with exchanged(buffers, cast):
        return forward(*args, **kwargs)
