"""What cannot be trained exactly is refused here by name, from the model and the settings alone, before any sharding.

Called by `shard` for every way into the product and by `preflight` before ranks start.
"""

import inspect
from typing import Any

import torch
from torch import nn

from expertmesh.anatomy import Anatomy, ExpertsSpec
from expertmesh.config import MoeConfig
from expertmesh.config.errors import InputError
from expertmesh.mesh import Layout


def refuse_model(model: nn.Module, anatomy: Anatomy, moe: MoeConfig) -> None:
    """Raise `InputError` for a model whose loss or routing would silently not be what was asked for."""
    config: Any = model.config
    text = config.get_text_config()
    coefficient = getattr(text, "router_aux_loss_coef", 0.0)
    if moe.aux_loss_coef == "from_model" and getattr(text, "output_router_logits", False) and coefficient:
        # The model's own auxiliary loss is per process; until it is exact over the global batch it must be off.
        raise InputError(
            f"moe.aux_loss_coef: from_model means {coefficient} for this model, and the auxiliary loss "
            "is not available yet; set moe.aux_loss_coef to 0.0 to train without it"
        )
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise InputError(f"{type(model).__name__} cannot compute logits of chosen tokens only (logits_to_keep)")
    if moe.router == "frozen":
        parents = [spec.name.rpartition(".")[0] for spec in anatomy.experts]
        alone = [parent for parent in parents if not any(router.startswith(f"{parent}.") for router in anatomy.routers)]
        if alone:
            raise InputError(f"moe.router: frozen, but no router is recognised in {alone[0]}; set moe.router to train")


def expert_shard_dim(spec: ExpertsSpec, layout: Layout) -> int:
    """The dim over which efsdp shards a rank's experts: 0 if it divides them, else a later one, else refused."""
    efsdp, here = layout.efsdp, spec.num_experts // layout.ep
    width = spec.intermediate_size * (2 if spec.gated else 1)
    dims = (spec.hidden_size, width) if spec.transposed else (width, spec.hidden_size)
    down = (spec.intermediate_size, spec.hidden_size) if spec.transposed else (spec.hidden_size, spec.intermediate_size)
    if here % efsdp == 0:
        return 0
    for dim in (1, 2):
        if not spec.biased and dims[dim - 1] % efsdp == 0 and down[dim - 1] % efsdp == 0:
            return dim
    raise InputError(
        f"parallel: efsdp {efsdp} divides neither the {here} experts a rank holds of {spec.name} at ep {layout.ep} "
        f"nor its sizes {dims[0]} x {dims[1]}; choose a larger ep so that efsdp = fsdp * cp * tp / ep becomes smaller"
    )


def refuse_mixed_dtypes(model: nn.Module, master: torch.dtype) -> None:
    """All parameters must have the master dtype, or a conversion nobody asked for would hide somewhere."""
    odd = {name: parameter.dtype for name, parameter in model.named_parameters() if parameter.dtype != master}
    if odd:
        name, dtype = next(iter(odd.items()))
        raise InputError(
            f"precision.params is {master}, but {name} is {dtype} ({len(odd)} such parameters); "
            f"set precision.params to float32, or give a model in memory one dtype first"
        )
