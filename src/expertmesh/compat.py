"""Collect the private or changing names of torch and transformers in one place, each with its reason.

Checked on torch 2.11 to 2.13 and transformers 5.17 to 5.23. Read this file before raising an upper bound in
pyproject.toml.
"""

import datetime
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.utils import clip_grad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.integrations import moe as transformers_moe

__all__ = [
    "FUSED_ATTENTION",
    "StridedShard",
    "TorchDispatchMode",
    "all_gather_into",
    "allow_recompiles",
    "assert_async",
    "compile_errors",
    "default_apply_gate",
    "enable_checkpointing",
    "has_hooks",
    "is_compiled",
    "job_store",
    "reduce_scatter_into",
    "refuse_fully_shard",
    "set_group_timeout",
    "tree_leaves",
    "tree_map_only",
    "update_as",
    "varlen_attn",
    "varlen_operation",
    "wrap_clipping",
]

# FSDP2's placement of a parameter that was already sharded on the same dim; DTensor has no public name for it.
StridedShard = _StridedShard
# TorchDispatchMode, tree_*: torch documents dispatch modes under this private path; there is no other path.

# torch 2.13 renamed both and deprecated the old names; torch 2.11 has only the old ones.
all_gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_into: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# The ops behind F.scaled_dot_product_attention, because torch's selective checkpointing takes ops. Also the op of
# variable-length attention, which is new in torch 2.11.
FUSED_ATTENTION: list[Any] = [
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default,
]
varlen_attn: Any = None
varlen_operation: Any = None
try:
    from torch.nn.attention import varlen
except ImportError:
    pass
else:
    varlen_attn, varlen_operation = varlen.varlen_attn, torch.ops.torch_attn._varlen_attn
    FUSED_ATTENTION.append(varlen_operation.default)

# transformers' gate of experts that define none; experts with this gate compute act(gate) * up.
default_apply_gate: Callable[..., torch.Tensor] = transformers_moe._default_apply_gate


def assert_async(condition: torch.Tensor, message: str) -> None:
    """Raise an error where `condition` is false, without waiting for an accelerator; torch has no public way."""
    torch._assert_async(condition, message)


def set_group_timeout(group: dist.ProcessGroup, timeout: datetime.timedelta) -> None:
    """Set the timeout of a group that DeviceMesh has made.

    torch's own trainer (pytorch/torchtitan) calls the same private function.
    """
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def job_store() -> Any:
    """Return the rendezvous store of the default group over a new connection; torch has no public name for it."""
    return dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]


def enable_checkpointing(model: nn.Module, options: dict[str, Any]) -> None:
    """Enable activation checkpointing of a transformers model.

    transformers 5.23 renamed its hook and deprecated the old name; 5.17 has only the old one.
    """
    enable: Any = getattr(model, "activation_checkpointing_enable", None)
    if enable is not None:
        enable(activation_checkpointing_kwargs=options)
    else:
        enable = model.gradient_checkpointing_enable
        enable(gradient_checkpointing_kwargs=options)


def has_hooks(owner: nn.Module | torch.Tensor) -> bool:
    """Return whether hooks are registered on a module's forward or backward, or on a tensor's gradient."""
    of_module = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    of_tensor = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return any(getattr(owner, name) for name in (of_module if isinstance(owner, nn.Module) else of_tensor))


def is_compiled(module: nn.Module) -> bool:
    """Return whether `module` is the result of torch.compile, or its own `compile` was called."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def update_as(optimizer: torch.optim.Optimizer, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let one of torch's optimizers update `view(tensor)` in place of each parameter, gradient and state tensor.

    The step of every optimizer of torch collects these tensors into lists with `_init_group`, and the lists are changed
    there. The stored state does not change.
    """
    collect: Any = optimizer._init_group  # type: ignore[attr-defined]

    def _init_group(group: dict[str, Any], *lists: list[torch.Tensor]) -> Any:
        answer = collect(group, *lists)
        for tensors in lists:
            tensors[:] = [view(tensor) for tensor in tensors]
        return answer

    optimizer._init_group = _init_group  # type: ignore[attr-defined]


class _Applied(OrderedDict[Any, Any]):
    """The record of composable functions that were applied to a module; `fully_shard` reads it before anything else."""

    refuse: Callable[[], NoReturn]

    def __contains__(self, key: object) -> bool:
        if fully_shard.__name__ in (key, getattr(key, "__name__", None)):
            self.refuse()
        return super().__contains__(key)


def refuse_fully_shard(module: nn.Module, refuse: Callable[[], NoReturn]) -> None:
    """Make torch's `fully_shard` of `module` call `refuse`, which raises; torch's own errors name no solution."""
    for key in (STATE_KEY, REGISTRY_KEY):
        applied = _Applied(module.__dict__.get(key, {}))
        applied.refuse = refuse
        module.__dict__[key] = applied


def wrap_clipping(norm: Callable[..., torch.Tensor], scale: Callable[..., None]) -> None:
    """Put `norm(own, gradients, ...)` and `scale(own, parameters, ...)` in front of torch's clipping, permanently.

    `torch.nn.utils.clip_grad_norm_` gets only parameters, so that nothing on a model can take part in it, and torch
    2.13 cannot combine DTensors of several meshes. The names inside its module are replaced, so that it does not matter
    when the function was imported.
    """
    for name, around in (("_get_total_norm", norm), ("_clip_grads_with_norm_", scale)):
        own = getattr(clip_grad, name)
        if getattr(own, "func", None) is not around:
            setattr(clip_grad, name, partial(around, own))


def allow_recompiles(variants: int) -> None:
    """Raise torch.compile's limit of variants per function, which has no public setter."""
    torch._dynamo.config.recompile_limit = max(variants, torch._dynamo.config.recompile_limit)


def compile_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that torch.compile raises for code that it cannot compile.

    The import is here because it takes two seconds, which only users of compile should pay.
    """
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return TorchDynamoException, FailOnRecompileLimitHit
