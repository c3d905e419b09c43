"""What cannot be trained exactly is refused here by name, from the model and the settings alone.

Called by `plan_shards` (shard_plan.py) for every way into the product.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from expertmesh.anatomy import Anatomy, ExpertsSpec, is_adapter, is_classifier, is_inside
from expertmesh.config import MoeConfig, PrecisionConfig
from expertmesh.config.errors import InputError
from expertmesh.distributed.layout import Layout, nodes_of_ep
from expertmesh.experts.balance import Balance, balance_of
from expertmesh.experts.dispatchers import deepep
from expertmesh.experts.lora_state import adapter_state
from expertmesh.introspection.compute_dtype import Casts, plan_compute, with_wide_routers
from expertmesh.introspection.experts_proof import confirm_experts
from expertmesh.introspection.shared_expert import shared_behind_routed
from expertmesh.parallel.sequence import refuse_blocks
from expertmesh.state.stage_view import MetaTwin


def refuse_model(model: nn.Module, anatomy: Anatomy, moe: MoeConfig) -> Balance:
    """Raise `InputError` for a model whose loss or routing would silently not be what was asked for.

    Returns how its routing is balanced.
    """
    balance = balance_of(model, anatomy, moe)
    if moe.router == "frozen":
        parents = [spec.name.rpartition(".")[0] for spec in anatomy.experts]
        alone = [parent for parent in parents if not any(router.startswith(f"{parent}.") for router in anatomy.routers)]
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


def choose_dispatch(moe: MoeConfig, layout: Layout) -> str:
    """What `moe.dispatch` means in `layout`; refuses the hierarchical one where ep is not of several nodes."""
    if moe.dispatch == "hierarchical" and nodes_of_ep(layout) == 1:
        raise InputError(
            f"moe.dispatch: hierarchical sends rows once to each node, and ep {layout.ep} is not several whole nodes "
            "of LOCAL_WORLD_SIZE ranks; set moe.dispatch to auto or parallel.ep to such nodes",
            key="moe.dispatch-needs-nodes",
        )
    return "local" if layout.ep == 1 else "all_to_all" if moe.dispatch == "auto" else moe.dispatch


def refuse_dispatch(moe: MoeConfig, layout: Layout, anatomy: Anatomy, compute: torch.dtype) -> None:
    """Raise `InputError` where `moe.dispatch` names a library that is absent, or cannot carry these rows."""
    if moe.dispatch == "deepep" and (refusal := deepep.refusal(layout, anatomy.experts, compute)) is not None:
        raise InputError(
            f"moe.dispatch: deepep cannot be used here: {refusal}; set moe.dispatch to auto",
            key="moe.dispatch-unsupported",
        )


def shared_beside_rows(
    twin: MetaTwin, anatomy: Anatomy, layout: Layout, moe: MoeConfig, gathered: Sequence[str]
) -> dict[str, str]:
    """By experts module, the shared expert that computes while rows travel. Not under tp, which splits its tokens, nor
    where FSDP2 gathers it alone, among the modules `gathered`. The caller leaves out compiled ones, and selective
    checkpointing, where a block's second run has the routed experts' result but not its own.
    """
    if layout.ep == 1 or layout.tp > 1 or choose_dispatch(moe, layout) != "all_to_all":
        return {}
    found = shared_behind_routed(twin.module, anatomy)
    alone = {shared for shared in found.values() for name in gathered if name == shared or is_inside(name, shared)}
    return {experts: shared for experts, shared in found.items() if shared not in alone}


def expert_shard_dim(spec: ExpertsSpec, layout: Layout) -> int:
    """The dim over which efsdp shards a rank's experts: 0 if it divides them, else a later one, else refused."""
    if spec.num_experts % layout.ep:
        # A mesh may have been made without a model in sight (`init_mesh`).
        both = math.gcd(spec.num_experts, layout.efsdp * layout.ep)
        valid = ", ".join(str(size) for size in range(1, both + 1) if both % size == 0)
        raise InputError(
            f"parallel.ep {layout.ep} does not divide the {spec.num_experts} experts of {spec.name}; valid values: "
            f"{valid}",
            key="layout.ep-divides-experts",
        )
    efsdp, here = layout.efsdp, spec.num_experts // layout.ep
    width = spec.intermediate_size * (2 if spec.gated else 1)
    dims = (spec.hidden_size, width) if spec.transposed else (width, spec.hidden_size)
    down = (spec.intermediate_size, spec.hidden_size) if spec.transposed else (spec.hidden_size, spec.intermediate_size)
    rows = here * spec.intermediate_size if spec.flat_gate is not None else here
    if rows % efsdp == 0:
        return 0
    for dim in (1, 2):
        if not spec.biased and spec.flat_gate is None and dims[dim - 1] % efsdp == 0 and down[dim - 1] % efsdp == 0:
            return dim
    raise InputError(
        f"parallel: efsdp {efsdp} divides neither the {here} experts a rank holds of {spec.name} at ep {layout.ep} "
        f"nor its sizes {dims[0]} x {dims[1]}; choose a larger ep so that efsdp = fsdp * cp * tp / ep becomes smaller",
        key="layout.efsdp-divides-experts",
    )


def adapter_shard_dim(name: str, adapter: torch.Tensor, layout: Layout) -> int:
    """Over which dim efsdp shards an adapter `[E, r, in]` or `[E, out, r]` of a rank's experts: never over r."""
    here, wide = adapter.shape[0] // layout.ep, 2 if name.endswith("A") else 1
    for dim, size in ((0, here), (wide, adapter.shape[wide])):
        if size % layout.efsdp == 0:
            return dim
    raise InputError(
        f"parallel: efsdp {layout.efsdp} divides neither the {here} experts a rank holds nor the "
        f"{adapter.shape[wide]} elements of {name}; choose a larger ep so that efsdp becomes smaller",
        key="layout.efsdp-divides-experts",
    )


def refuse_axes(model: nn.Module, anatomy: Anatomy, layout: Layout) -> None:
    """Raise `InputError` for a model whose rows or positions tp, cp or pp cannot share."""
    axis = next((axis for axis in ("tp", "cp", "pp") if layout.size(axis) > 1), None)
    if is_classifier(model) and axis is not None:
        raise InputError(
            f"parallel.{axis} is {layout.size(axis)}, but {type(model).__name__} is a sequence classifier, which is "
            f"called with whole rows, and ranks along {axis} share theirs; set {axis} to 1",
            key="layout.ranks-share-rows",
        )
    refuse_blocks(model, anatomy, layout)


def refuse_dtypes(
    model: nn.Module,
    anatomy: Anatomy,
    precision: PrecisionConfig,
    kept_in_fp32: Callable[[str], bool],
    twin: MetaTwin,
    router_dtype: str,
) -> Casts:
    """Raise `InputError` for dtypes that a model does not have, or cannot be computed in. Returns how it is."""
    master, compute = (getattr(torch, name) for name in (precision.params, precision.compute))
    # What adapters have frozen is in the compute dtype; of a model in memory it may be as wide as the masters.
    wide = adapter_state(model) is None or all(parameter.dtype == master for parameter in model.parameters())
    _refuse_mixed_dtypes(model, master, master if wide else compute, kept_in_fp32)
    casts = Casts() if compute == master else plan_compute(model, anatomy, compute, kept_in_fp32, twin.module)
    if router_dtype == "compute" or compute.itemsize > 2:
        return casts
    return with_wide_routers(model, anatomy, compute, casts, twin.module)


def _refuse_mixed_dtypes(
    model: nn.Module, master: torch.dtype, base: torch.dtype, kept_in_fp32: Callable[[str], bool]
) -> None:
    """What trains must have the master dtype, or a conversion nobody asked for would hide somewhere.

    `base` is the dtype of a base that adapters have frozen (but for what the family keeps in fp32), else the master's.
    """
    frozen = base != master
    for name, parameter in model.named_parameters():
        expected = master if is_adapter(name) or not frozen else base
        if parameter.dtype != expected and not (frozen and kept_in_fp32(name) and parameter.dtype == torch.float32):
            to_float32 = "" if master == torch.float32 else "set precision.params to float32, or "
            raise InputError(
                f"precision: {name} is {parameter.dtype}, not {expected}; {to_float32}give a model in memory one dtype "
                f"first: model.to({expected})",
                key="precision.mixed-dtypes",
            )
