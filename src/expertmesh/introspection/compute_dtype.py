"""Plan the dtype of each tensor of a model under precision.compute, and check that the model runs so.

FSDP2 casts parameters group by group, and nothing else. Parameters that a family keeps in float32, even one of several
in a module, get separate groups, which are gathered when their modules are called: code that reads such a parameter
without the call would see a shard. Buffers keep the dtype of precision.params; those that the family's code cannot
multiply with are cast while their module runs. Any other conflict would raise an error of torch in the first step; one
observed forward on meta shows it before weights are read.
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

from expertmesh.anatomy import Anatomy, decoder_blocks, group_by_kind, is_inside, is_within, settings
from expertmesh.compat import buffer_slots, tree_leaves, tree_map_only
from expertmesh.config.errors import InputError
from expertmesh.introspection.meta_run import WithoutValues, run_text
from expertmesh.introspection.proofs import look_up, proof_key
from expertmesh.state.model_view import is_adapter
from expertmesh.state.patching import exchanged, replace_forward


@dataclass(frozen=True, slots=True)
class DtypePolicy:
    """The dtype policy of a model under a narrower compute dtype; all parameters not listed are cast."""

    in_fp32: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The parameters that are fp32 when they are used, by the module whose call gathers them."""
    routers: tuple[str, ...] = ()
    """The modules in `in_fp32` that are routers whose inputs are cast to fp32."""
    buffers: tuple[str, ...] = ()
    """The modules whose direct buffers are cast to the compute dtype while they run."""


def uncast_modules(
    model: nn.Module, anatomy: Anatomy, kept_in_fp32: Callable[[str], bool]
) -> dict[str, tuple[str, ...]]:
    """Find the parameters that must stay fp32 under a narrower compute dtype.

    FSDP2 casts complete groups, so these parameters need separate groups. Of nested modules the outermost gets the
    group: a family's code may read the weight of a convolution without calling it.

    Returns:
        The parameters by the module whose call gathers them.

    Raises:
        InputError: a parameter cannot have a separate group; names it.
    """
    found: dict[str, tuple[str, ...]] = {}
    for name, module in model.named_modules():
        inside = [leaf for leaf, _ in module.named_parameters(prefix=name)]
        kept = tuple(leaf for leaf in inside if kept_in_fp32(leaf))
        if not kept or is_inside(name, *found):
            continue
        own = [leaf for leaf in kept if leaf.rpartition(".")[0] == name]
        is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)  # never called, so it would never be gathered
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
    """A failed run in the compute dtype."""

    reason: str
    """The reason, as part of an error message."""
    module: str
    """The module whose code is the cause."""
    reader: str | None = None
    """The innermost module that runs around a parameter read without the call that gathers it; None otherwise."""


# A model that cannot run without values: nothing is known about its dtypes.
_UNKNOWN = _Refused("cannot be run without values", "")


def plan_compute(
    meta_model: nn.Module, anatomy: Anatomy, compute: torch.dtype, kept_in_fp32: Callable[[str], bool]
) -> DtypePolicy:
    """Plan how a model computes in `compute` under the casts of FSDP2.

    It is called if a trained parameter has another dtype. It reads no weights. A model that cannot run without values
    is not refused, as nothing is known about it.

    Args:
        meta_model: the meta copy of the model; its state is restored.
        kept_in_fp32: returns by name whether the family computes with a parameter in fp32.

    Raises:
        InputError: the model does not run in `compute`; names the module.

    Collectives: none.
    """
    policy = DtypePolicy(uncast_modules(meta_model, anatomy, kept_in_fp32))
    refused = _refusal(meta_model, anatomy, compute, policy)
    # Each run that fails names one module; widen its group or cast its buffers, and try again.
    while refused is not None and refused is not _UNKNOWN:
        reader, module = refused.reader, refused.module
        if reader and reader not in policy.in_fp32 and not _has_group(reader, anatomy):
            for each in _in_equal_blocks(reader, _equal_blocks(meta_model, anatomy, policy)):
                kept: dict[str, tuple[str, ...]] = {}
                for name, leaves in policy.in_fp32.items():  # those inside `each` are gathered by its call
                    holder = each if is_inside(name, each) else name
                    kept[holder] = (*kept.get(holder, ()), *leaves)
                policy = replace(policy, in_fp32=kept)
        elif (
            reader is None
            and module
            and module not in policy.buffers
            and not all(map(kept_in_fp32, floating_buffers(meta_model, module)))
        ):
            policy = replace(
                policy, buffers=(*policy.buffers, *_in_equal_blocks(module, _equal_blocks(meta_model, anatomy, policy)))
            )
        else:
            dtype = str(compute).removeprefix("torch.")
            raise InputError(
                f"precision.compute {dtype}: {meta_model.config.model_type} {refused.reason}",  # type: ignore[union-attr]
                key="precision.compute-unsupported",
            )
        refused = _run(meta_model, anatomy, compute, policy)
    return policy


def _equal_blocks(meta_model: nn.Module, anatomy: Anatomy, policy: DtypePolicy) -> list[list[str]]:
    """Group the names of blocks with equal settings and tensors of equal dtypes."""
    in_fp32 = {leaf for leaves in policy.in_fp32.values() for leaf in leaves}

    def kind(name: str) -> Hashable:
        block = meta_model.get_submodule(name)
        tensors = [*block.named_parameters(), *block.named_buffers()]
        dtypes = tuple((leaf, tensor.dtype, f"{name}.{leaf}" in in_fp32) for leaf, tensor in tensors)
        around = (*policy.in_fp32, *policy.routers, *policy.buffers)
        return settings(block), dtypes, tuple(each[len(name) :] for each in around if is_inside(each, name))

    return group_by_kind(meta_model, decoder_blocks(anatomy), kind)


def _in_equal_blocks(name: str, groups: Sequence[Sequence[str]]) -> list[str]:
    """Return the name of a module and of the same module in all blocks of the group of its block."""
    for group in groups:
        if block := next((block for block in group if is_within(name, block)), None):
            return [f"{each}{name[len(block) :]}" for each in group]
    return [name]


def with_wide_routers(
    meta_model: nn.Module, anatomy: Anatomy, compute: torch.dtype, policy: DtypePolicy
) -> DtypePolicy:
    """Add fp32 routers to `policy`; return `policy` unchanged if the family's code does not run with them.

    Routers that the family itself keeps in fp32 are left to its code.
    """
    free = [
        name
        for name in anatomy.routers
        if not _has_group(name, anatomy)
        and not any(is_within(name, other) or is_inside(other, name) for other in policy.in_fp32)
    ]
    own = {
        name: tuple(leaf for leaf, _ in meta_model.get_submodule(name).named_parameters(prefix=name)) for name in free
    }
    wide = replace(policy, in_fp32={**policy.in_fp32, **own}, routers=tuple(free))
    return wide if free and _refusal(meta_model, anatomy, compute, wide) is None else policy


def cast_inputs(router: nn.Module, args: Any, kwargs: Any) -> Any:
    """Cast the floating-point inputs of a router to fp32; a forward pre-hook."""
    return tree_map_only(torch.Tensor, lambda x: x.float() if x.is_floating_point() else x, (args, kwargs))


def _refusal(meta_model: nn.Module, anatomy: Anatomy, compute: torch.dtype, policy: DtypePolicy) -> _Refused | None:
    """Return why a model does not run with `policy`, or None; by a run on meta, once for equal models that do."""
    tensors = [*meta_model.named_parameters(), *meta_model.named_buffers()]
    dtypes = {(re.sub(r"\.\d+", "", name), str(tensor.dtype)) for name, tensor in tensors if not is_adapter(name)}
    kinds = {re.sub(r"\.\d+", "", name) for name in policy.in_fp32}
    adapted = any(is_adapter(name) for name, _ in tensors)
    others = ["routers in fp32"] * bool(policy.routers)
    key = proof_key(meta_model, compute, sorted(dtypes), sorted(kinds), adapted, *others)
    refused: _Refused | None = look_up(
        "compute", key, lambda: _run(meta_model, anatomy, compute, policy), keep=lambda refused: refused is None
    )
    return refused


def _has_group(name: str, anatomy: Anatomy) -> bool:
    """Return whether a module or a part of it has an FSDP2 group already: blocks and experts."""
    return any(is_within(part, name) for part in (*anatomy.blocks, *(s.name for s in anatomy.experts)))


def floating_buffers(model: nn.Module, module: str) -> dict[str, torch.Tensor]:
    """Return the floating-point buffers directly in a module, by their names in the model."""
    buffers = model.get_submodule(module).named_buffers(prefix=module, recurse=False)
    return {name: buffer for name, buffer in buffers if buffer.is_floating_point()}


def _run(meta_model: nn.Module, anatomy: Anatomy, compute: torch.dtype, policy: DtypePolicy) -> _Refused | None:
    """Run a forward on meta with `policy`; of equal blocks only the first computes.

    Returns:
        The failure; None if it runs, `_UNKNOWN` if it fails in a single dtype too.
    """
    repeated = [name for group in _equal_blocks(meta_model, anatomy, policy) for name in group[1:]]
    kept = {id(meta_model.get_parameter(leaf)): name for name, leaves in policy.in_fp32.items() for leaf in leaves}
    watch = _Watch(kept)
    cast: list[torch.Tensor] = [parameter for parameter in meta_model.parameters() if id(parameter) not in kept]
    cast += [buffer for name in policy.buffers for buffer in floating_buffers(meta_model, name).values()]
    wide = [parameter for parameter in meta_model.parameters() if id(parameter) in kept]
    hooks = [
        meta_model.get_submodule(name).register_forward_pre_hook(cast_inputs, with_kwargs=True)
        for name in policy.routers
    ]
    try:
        with ExitStack() as stack:
            for context in (cast_on_meta(cast, compute), cast_on_meta(wide, torch.float32), watch.modules):
                stack.enter_context(context)
            run_text(meta_model, anatomy.experts, watch, blocks=decoder_blocks(anatomy), repeated=repeated)
    except _Apart as apart:
        return _Refused(f"{apart}; set precision.compute to float32", watch.innermost, apart.reader)
    except Exception as cause:
        try:  # only where the model runs in a single dtype can dtypes have caused the failure
            with cast_on_meta((*meta_model.parameters(), *meta_model.buffers()), torch.float32):
                run_text(meta_model, anatomy.experts)
        except Exception:
            return _UNKNOWN  # the family's code on tensors without values
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
    """Change the floating-point `tensors` on meta to `dtype` while the context is open."""
    before = [(tensor, tensor.dtype) for tensor in tensors if tensor.is_floating_point()]
    for tensor, _ in before:
        tensor.data = tensor.data.to(dtype)
    try:
        yield
    finally:
        for tensor, own in before:
            tensor.data = tensor.data.to(own)


class _Apart(Exception):
    """Error for a parameter that is not cast and was read outside of the call that gathers it.

    `reader` is the innermost running module around the one that gathers the parameter; "" if there is none.
    """

    def __init__(self, name: str, innermost: str, reader: str) -> None:
        where = f"in {innermost}, without calling the module that holds them"
        super().__init__(f"reads the parameters of {name} {where}")
        self.reader = reader


_PRODUCTS = frozenset(
    packet.default for packet in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)
)


class _Watch(WithoutValues):
    """Mode that raises for products of mixed dtypes and for parameters that are read without being gathered.

    `uncast` has, by id of a parameter that is not cast, the module whose call gathers it.
    """

    def __init__(self, uncast: dict[int, str]) -> None:
        super().__init__()
        self.uncast, self.modules = uncast, ModuleTracker()

    @property
    def innermost(self) -> str:
        """The innermost module that runs, or that was running when an exception was raised."""
        return max(self._running(), key=len, default="the model")

    def _running(self) -> list[str]:
        return [name.partition(".")[2] for name in self.modules.parents if "." in name]  # the root goes by its class

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs or {}))
        if func in _PRODUCTS:
            # On meta, torch accepts a product of two dtypes; on a device it raises an error.
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
    """Install the casts of buffers and of router inputs.

    Args:
        buffers: the modules whose direct buffers are in `dtype` while they run; files keep the buffers' dtype.
        routers: the modules whose inputs are cast to fp32.
    """

    def cast_buffers(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        own = buffer_slots(module)
        cast = {name: buffer.to(dtype) for name, buffer in own.items() if buffer.is_floating_point()}
        with exchanged(own, cast):
            return forward(*args, **kwargs)

    for name in buffers:
        module = model.get_submodule(name)
        forward = partial(cast_buffers, module, module.forward)
        replace_forward(module, functools.wraps(module.forward)(forward))
    for name in routers:
        model.get_submodule(name).register_forward_pre_hook(cast_inputs, with_kwargs=True)
