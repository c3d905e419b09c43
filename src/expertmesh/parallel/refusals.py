"""Refuse by name whatever cannot be trained exactly, from the model and the settings alone.

`plan_shards` (shard_plan.py) calls these functions, so every command and the Python interface refuse the same cases.
Nothing here reads weights or communicates.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from expertmesh.anatomy import Anatomy, ExpertsSpec, is_inside, is_within
from expertmesh.config import MoeConfig, PrecisionConfig
from expertmesh.config.errors import InputError, MissingHereError
from expertmesh.distributed.layout import Layout, nodes_of_ep, refuse_divided_experts
from expertmesh.experts import deepep
from expertmesh.experts.balance import Balance, balance_of
from expertmesh.experts.lora_state import adapter_state
from expertmesh.experts.placement import Placement, check_fits, no_copies, read_placement, too_many_copies
from expertmesh.introspection.compute_dtype import DtypePolicy, plan_compute, with_wide_routers
from expertmesh.introspection.small_copies import confirm_experts, shared_behind_routed
from expertmesh.state.model_view import ModelView, is_adapter


def refuse_model(model: nn.Module, anatomy: Anatomy, moe: MoeConfig) -> Balance:
    """Raise `InputError` for a model whose loss or routing would silently differ from the settings.

    Returns:
        How its routing is balanced.
    """
    balance = balance_of(model, anatomy, moe)
    if moe.router == "frozen":
        parents = [spec.name.rpartition(".")[0] for spec in anatomy.experts]
        alone = [parent for parent in parents if not any(is_inside(router, parent) for router in anatomy.routers)]
        if alone:
            raise InputError(
                f"moe.router: frozen, but no router is recognised in {alone[0]}; set moe.router to train",
                key="moe.router-not-recognised",
            )
        for router in anatomy.routers:
            if any(is_adapter(name) for name, _ in model.get_submodule(router).named_parameters()):
                raise InputError(
                    f"moe.router: frozen, but lora.targets has {router}; set moe.router to train or leave routers out "
                    "of lora.targets",
                    key="moe.frozen-router-has-adapter",
                )
    confirm_experts(model, anatomy)
    return balance


def refuse_dispatch(moe: MoeConfig, layout: Layout, anatomy: Anatomy, compute: torch.dtype) -> None:
    """Raise `MissingHereError` if the library of `moe.dispatch` is absent, `InputError` if it cannot send the rows."""
    if moe.dispatch == "deepep" and (refusal := deepep.refusal(layout, anatomy.experts, compute)) is not None:
        error = MissingHereError if deepep.without_kernels(layout, anatomy.experts, compute) is None else InputError
        raise error(
            f"moe.dispatch: deepep cannot be used here: {refusal}; set moe.dispatch to auto",
            key="moe.dispatch-unsupported",
        )


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


def expert_shard_dim(spec: ExpertsSpec, layout: Layout) -> int:
    """Return the dim over which efsdp shards a rank's experts: 0 if it divides their number, else 1 or 2.

    Raises:
        InputError: ep does not divide the experts, or efsdp divides no dim.
    """
    # Again: a mesh may have been made without a model (`init_mesh`).
    ep, efsdp, here = layout.ep, layout.efsdp, spec.num_experts // layout.ep
    refuse_divided_experts(f"parallel.ep {ep}", ep, spec.num_experts, efsdp * ep, f" of {spec.name}")
    width = spec.intermediate_size * (2 if spec.gated else 1)
    dims = (spec.hidden_size, width) if spec.transposed else (width, spec.hidden_size)
    down = (spec.intermediate_size, spec.hidden_size) if spec.transposed else (spec.hidden_size, spec.intermediate_size)
    rows = here * spec.intermediate_size if spec.flat_gate is not None else here
    if rows % efsdp == 0:
        return 0
    # All parameters of the module are sharded on one dim, so efsdp must divide it in both projections.
    for dim in (1, 2):
        if not spec.biased and spec.flat_gate is None and dims[dim - 1] % efsdp == 0 and down[dim - 1] % efsdp == 0:
            return dim
    raise InputError(
        f"parallel: efsdp {efsdp} divides neither the {here} experts a rank holds of {spec.name} at ep {layout.ep} "
        f"nor its sizes {dims[0]} x {dims[1]}; choose a larger ep so that efsdp = fsdp * cp * tp / ep becomes smaller",
        key="layout.efsdp-divides-experts",
    )


def adapter_shard_dim(name: str, adapter: torch.Tensor, layout: Layout) -> int:
    """Return the dim over which efsdp shards an adapter `[E, r, in]` or `[E, out, r]`, never r. Raises `InputError`."""
    here, wide = adapter.shape[0] // layout.ep, 2 if name.endswith("A") else 1
    for dim, size in ((0, here), (wide, adapter.shape[wide])):
        if size % layout.efsdp == 0:
            return dim
    raise InputError(
        f"parallel: efsdp {layout.efsdp} divides neither the {here} experts a rank holds nor the "
        f"{adapter.shape[wide]} elements of {name}; choose a larger ep so that efsdp becomes smaller",
        key="layout.efsdp-divides-experts",
    )


def refuse_dtypes(
    view: ModelView,
    anatomy: Anatomy,
    precision: PrecisionConfig,
    kept_in_fp32: Callable[[str], bool],
    router_dtype: str,
) -> DtypePolicy:
    """Raise `InputError` for dtypes that a model does not have, or cannot compute in.

    Args:
        kept_in_fp32: returns by name whether the family computes with a parameter in fp32.
        router_dtype: the value of `moe.router_dtype`.

    Returns:
        The dtype policy: the parameters, buffers and router inputs that are cast or not.
    """
    master, compute = (getattr(torch, name) for name in (precision.params, precision.compute))
    # Of the meta copy: the plan keeps its view, which would keep the parameters that sharding replaces.
    dtypes = {name: parameter.dtype for name, parameter in view.meta.named_parameters()}
    # What adapters have frozen is in the compute dtype; of a model in memory it may be as wide as the masters.
    wide = not any(map(is_adapter, dtypes)) or set(dtypes.values()) == {master}
    _refuse_mixed_dtypes(dtypes, master, master if wide else compute, kept_in_fp32)
    uniform = compute == master and set(dtypes.values()) == {master}
    policy = DtypePolicy() if uniform else plan_compute(view.meta, anatomy, compute, kept_in_fp32)
    if router_dtype == "compute" or compute.itemsize > 2:
        return policy
    return with_wide_routers(view.meta, anatomy, compute, policy)


def _refuse_mixed_dtypes(
    dtypes: Mapping[str, torch.dtype], master: torch.dtype, base: torch.dtype, kept_in_fp32: Callable[[str], bool]
) -> None:
    """Raise `InputError` unless trained parameters have the master dtype; otherwise a conversion would happen silently.

    Args:
        dtypes: the dtype of each parameter; fp32 of those that the family keeps so.
        base: the dtype of a base that adapters have frozen; without adapters, the master dtype.
    """
    for name, dtype in dtypes.items():
        expected = master if is_adapter(name) else base
        if dtype != expected and not (kept_in_fp32(name) and dtype == torch.float32):
            to_float32 = "" if master == torch.float32 else "set precision.params to float32, or "
            raise InputError(
                f"precision: {name} is {dtype}, not {expected}; {to_float32}give a model in memory one dtype "
                f"first: model.to({expected})",
                key="precision.mixed-dtypes",
            )


def choose_dispatch(moe: MoeConfig, layout: Layout) -> str:
    """Return the dispatcher that `moe.dispatch` means in `layout`.

    Raises:
        InputError: `hierarchical`, and ep does not consist of several full nodes.
    """
    if moe.dispatch == "hierarchical" and nodes_of_ep(layout) == 1:
        raise InputError(
            f"moe.dispatch: hierarchical sends rows once to each node, and ep {layout.ep} is not several whole nodes "
            "of LOCAL_WORLD_SIZE ranks; set moe.dispatch to auto or parallel.ep to such nodes",
            key="moe.dispatch-needs-nodes",
        )
    return "local" if layout.ep == 1 else "all_to_all" if moe.dispatch == "auto" else moe.dispatch


def shared_beside_rows(
    view: ModelView, anatomy: Anatomy, layout: Layout, moe: MoeConfig, gathered: Sequence[str]
) -> dict[str, str]:
    """Find the shared experts that can compute while rows are sent.

    There are none under tp, which splits their tokens. The caller excludes compiled models, and selective
    checkpointing, where the second run of a block has the result of the routed experts but not of the shared one.

    Args:
        gathered: the modules of all FSDP2 groups; a shared expert that FSDP2 gathers separately is left out.

    Returns:
        The shared expert by experts module.
    """
    if layout.ep == 1 or layout.tp > 1 or choose_dispatch(moe, layout) != "all_to_all":
        return {}
    found = shared_behind_routed(view.meta, anatomy)
    return {
        experts: shared for experts, shared in found.items() if not any(is_within(name, shared) for name in gathered)
    }


def choose_placement(model: nn.Module, moe: MoeConfig, layout: Layout, anatomy: Anatomy) -> Placement:
    """Return the places of experts as `moe.placement` says before any token was routed.

    `balanced` is contiguous here: a run replaces it when it knows the load (training/startup/prepare.py).

    Raises:
        InputError: ep is 1, the file does not fit the model, or the model cannot have `moe.replicas`.
    """
    if moe.placement == "contiguous":
        return Placement(layout.ep, {})
    if layout.ep == 1:
        if moe.placement == "balanced" and not moe.replicas:
            return Placement(1, {})
        what = f"moe.replicas: {moe.replicas}" if moe.replicas else f"moe.placement: {moe.placement}"
        raise InputError(
            f"{what}: at ep 1 each rank holds all experts; leave it out, or set parallel.ep to more",
            key="moe.placement-unsupported",
        )
    if moe.replicas and (why := _why_no_copies(model, moe, layout, anatomy)) is not None:
        raise no_copies(f"moe.replicas {moe.replicas}", why)
    if moe.placement == "balanced":
        return Placement(layout.ep, {})
    placement = read_placement(Path(moe.placement))
    check_fits(placement, {spec.name: spec.num_experts for spec in anatomy.experts}, layout.ep)
    if placement.replicas != moe.replicas:
        raise InputError(
            f"moe.replicas is {moe.replicas}, and {moe.placement} has {placement.replicas} copies for each rank; set "
            f"moe.replicas to {placement.replicas}",
            key="placement.other-replicas",
        )
    return placement


def _why_no_copies(model: nn.Module, moe: MoeConfig, layout: Layout, anatomy: Anatomy) -> str | None:
    """Return why experts cannot be copied here, or None."""
    experts = {f"{spec.name}.{name}" for spec in anatomy.experts for name in spec.parameters}
    if adapter_state(model) is None or any(model.get_parameter(name).requires_grad for name in experts):
        return "copies are of experts that lora has frozen; add lora, or set moe.replicas to 0"
    if layout.replicate * layout.efsdp > 1 or layout.offload != "none":
        sharded = f"replicate {layout.replicate} * efsdp {layout.efsdp} ranks share"
        where = sharded if layout.offload == "none" else f"parallel.offload: {layout.offload} keeps in host memory"
        return f"{where} each expert, which then cannot lie beside copies; give each stage one EP group"
    if moe.dispatch == "deepep":
        return "deepep's kernels were not tried with it; set moe.dispatch to auto"
    if (flat := next((spec.name for spec in anatomy.experts if spec.flat_gate is not None), None)) is not None:
        return f"{flat} keeps gate and up projections apart, in one matrix of all experts; set moe.replicas to 0"
    return too_many_copies(moe.replicas, anatomy.num_experts, layout.ep)
