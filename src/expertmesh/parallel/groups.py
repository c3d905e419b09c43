"""Decide for each parameter how it is split, sharded and stored.

A parameter may be split over ep or tp, belongs to at most one FSDP2 group, and, if frozen, may stay packed in 8 or
4 bits (`precision.frozen`). `plan_groups` and `plan_frozen` decide, for `plan_shards`; `fsdp.shard` makes the groups
and calls `pack_linears` and `pack_experts`. Nothing here communicates.
"""

import itertools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from expertmesh.anatomy import Anatomy, ExpertsSpec, describe, is_inside, packable_linears
from expertmesh.config.errors import InputError
from expertmesh.distributed.layout import Layout
from expertmesh.experts.module_list import FusedExperts
from expertmesh.parallel.refusals import adapter_shard_dim, expert_shard_dim
from expertmesh.parallel.tensor_plan import TensorPlan
from expertmesh.state.model_view import attach, is_adapter, sharded
from expertmesh.state.packed import HostCopies, PackedTensor
from expertmesh.state.packed_format import PackedFormat, quantised_format

View = Literal["dense", "dense_tp", "expert"]


@dataclass(frozen=True, slots=True)
class Split:
    """The split of a parameter before FSDP2 shards it."""

    axis: Literal["ep", "tp"]
    """The mesh axis over which it is split."""
    dim: int
    """The dim that is split into equal parts."""


@dataclass(frozen=True, slots=True)
class Group:
    """One FSDP2 group: the modules of one `fully_shard` call and the parameters that it manages."""

    modules: tuple[str, ...]
    """Names of the modules; "" is the root."""
    view: View
    """The mesh that it is sharded over: `Mesh.dense_shard`, `Mesh.dense_tp_shard` or `Mesh.expert_shard`."""
    casts: bool = True
    """True if its parameters are cast to the compute dtype, False if they are used in float32."""
    dims: Mapping[str, int] = field(default_factory=dict)
    """The dim that is sharded, by parameter; dim 0 for parameters that are not listed."""
    parameters: tuple[str, ...] = ()
    """Names of the parameters that it manages."""


def plan_expert_dims(model: nn.Module, anatomy: Anatomy, layout: Layout) -> dict[str, int]:
    """Return the dim that efsdp shards, by expert parameter, adapters included.

    Raises:
        InputError: efsdp or ep divides no dim of a parameter.
    """
    dims: dict[str, int] = {}
    for spec in anatomy.experts:
        dims |= dict.fromkeys((f"{spec.name}.{name}" for name in spec.parameters), expert_shard_dim(spec, layout))
        for holder in spec.holders:
            for name, parameter in model.get_submodule(holder).named_parameters(recurse=False):
                if is_adapter(name):
                    dims[f"{holder}.{name}"] = adapter_shard_dim(name, parameter, layout)
    return dims


def plan_groups(
    model: nn.Module,
    anatomy: Anatomy,
    layout: Layout,
    tensor: TensorPlan,
    expert_dims: Mapping[str, int],
    uncast: Mapping[str, Sequence[str]],
) -> tuple[dict[str, Split], tuple[Group, ...]]:
    """Plan the splits over ep and tp, and the FSDP2 groups.

    Args:
        expert_dims: the result of `plan_expert_dims`.
        uncast: the parameters that are never cast, by the module whose call gathers them.

    Returns:
        (the split by parameter, the groups in the order of their `fully_shard` calls, the root last).
    """
    splits = dict.fromkeys(expert_dims, Split("ep", 0))
    for part in tensor.parts:
        if part.is_split:
            dims = part.parameter_dims(model.get_submodule(part.name))
            splits |= {f"{part.name}.{leaf}": Split("tp", dim) for leaf, dim in dims.items()}
    groups = list(_groups(model, anatomy, layout, tensor, expert_dims, tuple(uncast)))
    kept = {name for names in uncast.values() for name in names}
    return splits, tuple(_with_parameters(model, groups, splits, kept))


def view_of(split: Split | None) -> View:
    """Return the mesh over which FSDP2 shards a parameter with this split; None is a parameter that is not split."""
    if split is None:
        return "dense"
    return "expert" if split.axis == "ep" else "dense_tp"


def _groups(
    model: nn.Module,
    anatomy: Anatomy,
    layout: Layout,
    tensor: TensorPlan,
    expert_dims: Mapping[str, int],
    uncast: Sequence[str],
) -> Iterator[Group]:
    """Yield the groups in the order of their `fully_shard` calls, without their parameters.

    The order is: experts; each block; the input embedding; the parts that tp splits; parameters that are never cast, by
    block; the remainder. Parts that tp splits, mixtures that contain their routers, and modules with parameters that
    are not cast come after their blocks: those modules also hold other parameters, which belong to the group of the
    block, and FSDP2 does not look into a module that has a group already.
    """
    for spec in anatomy.experts:
        if spec.post_norm:
            # Shared by all experts, so dense: its gradient is summed over all ranks, not over efsdp alone.
            yield Group((f"{spec.name}.post_expert_norm",), "dense")
        if spec.call != "sorted":
            yield from _expert_groups(spec, layout, expert_dims)
    yield from (Group((block,), "dense") for block in anatomy.blocks)
    for spec in anatomy.experts:
        if spec.call == "sorted":
            yield from _expert_groups(spec, layout, expert_dims)
    names = {module: name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    tied = head is not None and getattr(head, "weight", None) is embedding.weight
    if not tied or layout.pp > 1:  # stages have one of the two
        yield Group((names[embedding],), "dense")
    yield from (Group((part.name,), "dense_tp") for part in tensor.parts if part.is_split)
    # The loss calls the head while the root is gathered, so a head that is not cast makes the root's group one.
    root_casts = head is None or names[head] not in uncast
    others = [name for name in uncast if root_casts or name != names[head]]
    for _, inside in itertools.groupby(
        others, key=lambda name: next((block for block in anatomy.blocks if is_inside(name, block)), name)
    ):
        yield Group(tuple(inside), "dense", casts=False)
    if not root_casts:
        taken = (*anatomy.blocks, *uncast, names[embedding])
        left = [name for name, _ in model.named_parameters() if not any(is_inside(name, module) for module in taken)]
        yield from (Group((module,), "dense") for module in dict.fromkeys(name.rpartition(".")[0] for name in left))
    yield Group(("",), "dense", casts=root_casts)


def _expert_groups(spec: ExpertsSpec, layout: Layout, expert_dims: Mapping[str, int]) -> Iterator[Group]:
    """Yield the group of one experts module, if it needs one."""
    # With one rank there is nothing to gather or reduce, but FSDP2 would still copy parameters and gradients. Weights
    # in host memory need the copy.
    if layout.replicate * layout.efsdp > 1 or layout.offload == "experts":
        dims = {name: dim for name, dim in expert_dims.items() if is_inside(name, spec.name)}
        yield Group((spec.name,), "expert", dims=dims)


def _with_parameters(
    model: nn.Module, groups: Sequence[Group], splits: Mapping[str, Split], uncast: Container[str]
) -> Iterator[Group]:
    """Yield the groups with their parameters: each belongs to the innermost group with its view and dtype policy."""
    by_place = {
        (group.view, group.casts, module): number for number, group in enumerate(groups) for module in group.modules
    }
    members: list[list[str]] = [[] for _ in groups]
    # List a tied parameter under both of its names: a pipeline stage may hold only one of the two.
    for name, _ in model.named_parameters(remove_duplicate=False):
        (view, casts), module = (view_of(splits.get(name)), name not in uncast), name
        while module and (view, casts, module) not in by_place:
            module = module.rpartition(".")[0]
        if (view, casts, module) in by_place:
            members[by_place[view, casts, module]].append(name)
    for group, names in zip(groups, members, strict=True):
        yield replace(group, parameters=tuple(names))


def plan_frozen(
    model: nn.Module,
    anatomy: Anatomy,
    layout: Layout,
    splits: Mapping[str, Split],
    expert_dims: Mapping[str, int],
    frozen: str | None,
) -> dict[str, PackedFormat]:
    """Return the format of each parameter that stays packed, by name.

    Args:
        expert_dims: the dim that efsdp shards, by parameter.
        frozen: the value of `precision.frozen`. Formats for `as_published` were read from the headers of the files
            before (weights/quantised/resident.py).

    Raises:
        InputError: a parameter cannot stay packed, or `parallel.offload` is set without packed experts.
    """
    if frozen is None:
        if layout.offload != "none":
            raise InputError(
                f"parallel.offload: {layout.offload}: no experts stay packed; give precision.frozen, with lora",
                key="layout.offload-needs-frozen",
            )
        return {}
    formats = packed_formats(model, anatomy, frozen)
    for name, kind in formats.items():
        parameter = model.get_parameter(name)
        if parameter.requires_grad:
            raise _refused(frozen, f"{name} trains; add lora, or set precision.frozen to null")
        if kind.by_rows:
            _refuse_cut_rows(frozen, name, parameter.shape, kind, layout, splits.get(name))
        elif expert_dims[name] != 0:
            raise _refused(
                frozen,
                f"efsdp cuts {name} inside its experts, which stay whole when they are packed; choose parallel sizes "
                "at which ep * efsdp divides the number of experts",
            )
    return formats


def _refuse_cut_rows(
    frozen: str, name: str, shape: torch.Size, kind: PackedFormat, layout: Layout, split: Split | None
) -> None:
    """Raise `InputError` unless all ranks get equally many complete rows, and tp cuts no quantisation block."""
    rows, columns = shape
    rows = rows // layout.tp if split is not None and split.dim == 0 else rows
    # FSDP2 shards parameters that tp does not split over the tp ranks too.
    ranks = layout.fsdp * layout.cp * (1 if split is not None else layout.tp)
    if rows % ranks:
        raise _refused(frozen, f"{ranks} ranks cannot share the {rows} rows of {name} evenly; choose other sizes")
    part = columns // layout.tp
    if split is not None and split.dim == 1 and (part % 2 or (kind.grid[1] > 1 and part % kind.block[1])):
        raise _refused(
            frozen,
            f"tp {layout.tp} cuts {name} inside its blocks of {kind.block[1]} columns, of which it has {columns}; "
            "choose a smaller tp",
        )


def attach_formats(model: nn.Module, frozen: str) -> None:
    """Record on a model, which may be on meta, the weights that training has quantised to `frozen`."""
    attach(model, frozen_formats=quantised_formats(model, describe(model), frozen))


def pack_linears(model: nn.Module, formats: Mapping[str, PackedFormat], device: torch.device) -> None:
    """Replace the parameters in `formats` whose units are rows by packed tensors on `device`.

    Values are quantised before tp splits them; nothing is computed on meta.
    """
    for name, kind in formats.items():
        if kind.by_rows:
            whole = model.get_parameter(name).detach()
            packed = PackedTensor.of(whole, kind, whole.dtype)
            _replace(model, name, packed if packed.is_meta else packed.to(device))


def pack_experts(model: nn.Module, formats: Mapping[str, PackedFormat], on_host: bool) -> None:
    """Replace the local experts in `formats` by packed tensors, after ep has split them.

    Values are quantised expert by expert; nothing is computed on meta.

    Args:
        on_host: True stores the packed tensors in host memory.
    """
    for name, kind in formats.items():
        if not kind.by_rows:
            whole = model.get_parameter(name).data
            assert isinstance(whole, DTensor)
            with torch.no_grad():
                packed = PackedTensor.of(whole.to_local(), kind, whole.dtype, HostCopies() if on_host else None)
                own = DTensor.from_local(packed, whole.device_mesh, whole.placements, run_check=False)
            _replace(model, name, own)


def link_copies(model: nn.Module, anatomy: Anatomy, stage_starts: Callable[[str], bool]) -> None:
    """Link the host copies of consecutive layers, so that experts are copied from host memory one layer ahead.

    This is for experts that FSDP2 does not prefetch: a group of one rank gathers nothing.

    Args:
        anatomy: the anatomy of this rank's blocks.
        stage_starts: returns whether a block is the first of a pipeline stage; it is not linked to the block before.
    """
    before: dict[str, HostCopies] = {}
    for block in anatomy.blocks:
        before = {} if stage_starts(block) else before
        for spec in anatomy.experts:
            if is_inside(spec.name, block):
                for role, leaf in (("up", spec.up), ("down", spec.down)):
                    whole: Any = model.get_submodule(spec.name).get_parameter(leaf)
                    local = whole.to_local() if isinstance(whole, DTensor) else whole
                    if isinstance(local, PackedTensor) and local.host is not None:
                        if (previous := before.get(role)) is not None:
                            previous.following, local.host.preceding = local.host, previous
                        before[role] = local.host


def _replace(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, nn.Parameter(tensor, requires_grad=False))


def packed_formats(model: nn.Module, anatomy: Anatomy, frozen: str | None) -> dict[str, PackedFormat]:
    """Return the format of each weight that `precision.frozen` keeps packed, by name.

    Raises:
        InputError: the experts of the model cannot be packed.
    """
    if frozen is None:
        return {}
    if frozen != "as_published":
        return quantised_formats(model, anatomy, frozen)
    formats: Mapping[str, PackedFormat] | None = sharded(model).frozen_formats
    if formats is None:
        raise _refused("as_published", "a model in memory has no files with codes; choose nf4, mxfp4, nvfp4 or float8")
    return dict(formats)


def quantised_formats(model: nn.Module, anatomy: Anatomy, frozen: str) -> dict[str, PackedFormat]:
    """Return the format of each weight that is quantised to `frozen`: routed experts, and linear layers of the blocks.

    Raises:
        InputError: experts that cannot be quantised.
    """
    formats = {}
    for spec in anatomy.experts:
        if spec.flat_gate is not None or isinstance(model.get_submodule(spec.name), FusedExperts):
            raise _refused(frozen, f"{spec.name} does not hold its experts as one stack of matrices")
        for name in (f"{spec.name}.{spec.up}", f"{spec.name}.{spec.down}"):
            rows, columns = model.get_parameter(name).shape[1:]
            if spec.transposed:
                rows, columns = columns, rows
            if columns % 2:
                raise _refused(
                    frozen, f"{name} has {columns} columns, and a byte holds the codes of two; choose float8"
                )
            formats[name] = quantised_format(frozen, rows, columns, transposed=spec.transposed)
    for layer in packable_linears(model, anatomy):
        rows, columns = model.get_parameter(f"{layer}.weight").shape
        # In 4-bit formats a byte holds two columns; a linear layer with an odd number of columns stays unpacked.
        if columns % 2 == 0:
            formats[f"{layer}.weight"] = quantised_format(frozen, rows, columns, by_rows=True)
    return formats


def _refused(frozen: str, why: str) -> InputError:
    return InputError(f"precision.frozen: {frozen}: {why}", key="precision.frozen-unsupported")
