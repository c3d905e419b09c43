"""Collect the private or changing names of torch and transformers in one place, each with its reason.

Checked on torch 2.11 to 2.14 and transformers 5.17 to 5.24. Read this file before raising an upper bound in
pyproject.toml.
"""

import datetime
import functools
import inspect
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd import profiler
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import debug
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.utils import clip_grad
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only
from transformers import conversion_mapping
from transformers.integrations import moe as transformers_moe

# Arguments in which a block or its attention takes the cache of keys and states: transformers 5.24 calls all of them
# `cache`, 5.17 has two names, and models with code of their own have older ones.
CACHE_ARGUMENTS = ("cache", "cache_params", "layer_past", "past_key_value", "past_key_values")

_Function = TypeVar("_Function", bound=Callable[..., Any])
_SLOTS = 1 << 17  # of 8 bytes, in a frame: its chunk leaves another 1 MiB for the frames below it

# FSDP2's placement of a parameter that was already sharded on the same dim; DTensor has no public name for it.
StridedShard = _StridedShard
# TorchDispatchMode, FakeTensor(Mode), pytree: torch documents all of them under these private paths alone.
pytree = _pytree

# `torch_function` handlers call the wrapped function inside this context; torch documents it under this private path.
NoTorchFunction: Any = torch._C.DisableTorchFunctionSubclass
# The op behind `.item()`, and private forms of `view` and `as_strided` that reach dispatch handlers.
READS_A_VALUE: Any = torch.ops.aten._local_scalar_dense.default
VIEWS_BY_SIZE: tuple[Any, ...] = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
VIEWS_BY_STRIDES: tuple[Any, ...] = (torch.ops.aten.as_strided.default, torch.ops.aten._reshape_alias.default)

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
    # It makes the embedding's output require a gradient as well, which reentrant checkpointing needs. Here backward
    # would run through frozen blocks in front of all that trains.
    cast(Any, model).disable_input_require_grads()


def hooks_of(owner: nn.Module | torch.Tensor) -> list[Callable[..., Any]]:
    """Return the hooks that are registered on a module's forward and backward, or on a tensor's gradient."""
    of_module = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    of_tensor = ("_backward_hooks", "_post_accumulate_grad_hooks")
    registered = (getattr(owner, name) for name in (of_module if isinstance(owner, nn.Module) else of_tensor))
    return [hook for hooks in registered for hook in (hooks or {}).values()]


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


def wrap_clipping(norm: Callable[..., torch.Tensor], scale: Callable[..., None]) -> None:
    """Put `norm(own, gradients, ...)` and `scale(own, parameters, ...)` in front of torch's clipping, permanently.

    `torch.nn.utils.clip_grad_norm_` gets only parameters, so that nothing on a model can take part in it, and torch
    2.13 cannot combine DTensors of several meshes. The names inside its module are replaced, so that it does not matter
    when the function was imported.
    """
    for name, around in (("_get_total_norm", norm), ("_clip_grads_with_norm_", scale)):
        own = getattr(clip_grad, name)
        if getattr(own, "func", None) is not around:
            setattr(clip_grad, name, functools.partial(around, own))


def allow_recompiles(variants: int) -> None:
    """Raise torch.compile's limit of variants per function, which has no public setter."""
    torch._dynamo.config.recompile_limit = max(variants, torch._dynamo.config.recompile_limit)


def compile_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that torch.compile raises for code that it cannot compile.

    The import is here because it takes two seconds, which only users of compile should pay.
    """
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return TorchDynamoException, FailOnRecompileLimitHit


# Of tensors. torch has no public way for any of these.


def wrapper_tensor(kind: type[Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """Return a tensor of the subclass `kind` that has this shape, dtype and device but no storage."""
    return Tensor._make_wrapper_subclass(kind, tuple(shape), dtype=dtype, device=device)


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a number that identifies a storage while it lives; unlike `data_ptr` fake tensors have it too."""
    key: int = storage._cdata
    return key


def change_count(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; 0 in inference mode, whose tensors do not count it."""
    return 0 if tensor.is_inference() else tensor._version


def runs_in_backward() -> bool:
    """Return whether the calling thread runs inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


def is_profiling() -> bool:
    """Return whether a profiler records; ranges with a name are costly where none does."""
    enabled: bool = profiler._is_profiler_enabled
    return enabled


def add_to_all_(tensors: list[Tensor], others: list[Tensor]) -> None:
    """Add tensors pairwise, in place, in few launches."""
    torch._foreach_add_(tensors, others)


def scale_all_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply all tensors by one factor, in place, in few launches."""
    torch._foreach_mul_(tensors, factor)


def norms_of_all(tensors: list[Tensor], order: float, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the norm of each tensor, computed in `dtype`, in few launches."""
    return torch._foreach_norm(tensors, order, dtype=dtype)


# Of modules. Their public accessors leave out entries that are None, and setting one registers it anew.


def parameter_slots(module: nn.Module) -> MutableMapping[str, Any]:
    """Return the module's own parameters by name; a missing bias is None."""
    return module._parameters


def buffer_slots(module: nn.Module) -> MutableMapping[str, Any]:
    """Return the module's own buffers by name."""
    return module._buffers


def child_slots(module: nn.Module) -> MutableMapping[str, Any]:
    """Return the module's own children by name."""
    return module._modules


def apply_to_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter and buffer by `function` of it, as `module.to` does."""
    module._apply(function)


def forget_unfinished_step(model: Any) -> None:
    """Let FSDP2 forget a step of `model` that raised: gradients that are not reduced yet, which `zero_grad` leaves.

    torch 2.13 has a public method, which leaves those of layers whose backward had not ended.
    """
    if not model._get_fsdp_state()._is_root:
        return  # no forward has begun
    if hasattr(model, "reset_iter_state"):
        model.reset_iter_state()
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        state._training_state = idle = type(state._training_state).IDLE
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        for group in getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group]):
            group._training_state, group._partial_reduce_output = idle, None
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None
        module.reshard()


# Of transformers' models. Families state these as class attributes, which have no public accessors.

Declared = Literal[
    "_can_record_outputs",
    "_keep_in_fp32_modules",
    "_keep_in_fp32_modules_strict",
    "_keys_to_ignore_on_load_unexpected",
    "_keys_to_ignore_on_save",
    "_no_split_modules",
    "_supports_flash_attn",
    "_tied_weights_keys",
]


def declared(module: nn.Module, name: Declared) -> Any:
    """Return what a family's class states under `name`; an empty tuple if it states nothing."""
    return getattr(module, name, None) or ()


def ignore_when_loading(model: Any, pattern: str) -> None:
    """Let `model` load from files with tensors of this pattern, which it does not have."""
    model._keys_to_ignore_on_load_unexpected = {*declared(model, "_keys_to_ignore_on_load_unexpected"), pattern}


def trains_a_tower(model: Any) -> bool:
    """Return whether parameters outside of the text model and its head are trained, which run with images alone.

    With other kinds of models inside, it is true more often. `get_decoder` is new in transformers 5 for all models.
    """
    if model.config.get_text_config() is model.config:
        return False
    parts = [part for part in (model.get_decoder(), model.get_output_embeddings()) if part is not None]
    text = {id(parameter) for part in parts for parameter in part.parameters()}
    return any(parameter.requires_grad and id(parameter) not in text for parameter in model.parameters())


def is_sharded_by_transformers(model: nn.Module) -> bool:
    """Return whether transformers itself has sharded a model while it loaded it (`distributed_config`, `tp_plan`)."""
    return bool(getattr(model, "_is_distributed_loading_by_transformers", False))


def attention_of(config: Any) -> Any:
    """Return the name of the attention implementation in a config; None before a model was built."""
    return config._attn_implementation


def set_attention(config: Any, name: Any) -> None:
    """Set the attention implementation: a name of transformers' registry, or `{"": name}` for names it does not check.

    `set_attn_implementation` is a method of models; this is for the config of a part.
    """
    config._attn_implementation = name


def with_attention(name: str) -> dict[str, Any]:
    """Return the attribute of a config that holds the attention implementation, with another value."""
    return {"_attn_implementation": name}


def set_experts(config: Any, name: str) -> None:
    """Set the experts implementation; `set_experts_implementation` refuses names that are not transformers' own."""
    config._experts_implementation = name


def class_mapping(auto: Any) -> Mapping[type, Any]:
    """Return the model class of each config class that an auto class knows."""
    mapping: Mapping[type, Any] = auto._model_mapping
    return mapping


def conversion_family(model_type: str) -> str | None:
    """Return the family whose conversion rules a model type shares, if it has none of its own."""
    family: str | None = conversion_mapping._MODEL_TO_CONVERSION_PATTERN.get(model_type)
    return family


def weight_conversions(model: nn.Module) -> Any:
    """Return the conversion rules that loading applied, which transformers keeps for saving; None without any."""
    return getattr(model, "_weight_conversions", None)


def set_weight_conversions(model: Any, rules: Any) -> None:
    """Set the conversion rules that saving reverts."""
    model._weight_conversions = rules


def init_weights(model: Any, module: nn.Module) -> None:
    """Draw the values of `module` as the family initialises them."""
    model._init_weights(module)


def mark_initialised(tensor: Any) -> None:
    """Keep transformers from initialising this tensor."""
    tensor._is_hf_initialized = True


def checkpointing_takes_value(model: Any) -> bool:
    """Return whether a remote-code model has the hook of transformers 4, which `enable_checkpointing` cannot call."""
    return "value" in inspect.signature(model._set_gradient_checkpointing).parameters


# Of Trainers: what transformers and accelerate read of a model.


def present_as_fsdp(model: Any, name: str) -> None:
    """Let `model` be what Trainers expect of a sharded model: prepared, of the class `name`, generating in lockstep.

    accelerate then neither moves nor wraps it; transformers decides by the name of the class whether label smoothing
    shifts labels.
    """
    model._is_accelerate_prepared = True
    model._get_name = lambda: name
    generate_in_lockstep(model, True)


def logs_the_model(callback: Any) -> bool:
    """Return whether transformers' DVCLiveCallback is set to save the model itself."""
    return getattr(callback, "_log_model", None) is True


def generate_in_lockstep(model: Any, lockstep: bool) -> None:
    """Let a rank that has generated all go on until every other rank has, or not."""
    model._is_fsdp_managed_module = lockstep


def add_metric(trainer: Any, mode: str, name: str, value: float) -> None:
    """Let a TRL trainer log the mean of this value and others of its name; `mode` is "train" or "eval"."""
    trainer._metrics[mode][name].append(value)


# Of datasets, processes and devices.


def fingerprint_of(table: Any) -> str:
    """Return the hash by which datasets caches a table; it has no public accessor."""
    return str(table._fingerprint)


def number_of_groups() -> int:
    """Return how many process groups exist in this process."""
    return len(dist.distributed_c10d._world.pg_map)


def forget_shardings() -> None:
    """Drop what DTensor has cached by mesh and operation: it has offsets of the rank that this process was."""
    debug._clear_sharding_prop_cache()


def group_of(argument: Any) -> bool:
    """Return whether an argument of a collective's op is its process group."""
    return isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type())


def record_memory(events: int | None) -> None:
    """Record this many allocations of the device; None ends it."""
    if events is None:
        torch.cuda.memory._record_memory_history(enabled=None)
    else:
        torch.cuda.memory._record_memory_history(max_entries=events)


def memory_page() -> str:
    """Return the recorded allocations as the HTML page of torch's memory viewer."""
    from torch.cuda._memory_viz import trace_plot

    return str(trace_plot(torch.cuda.memory._snapshot()))


def without_shape_messages() -> tuple[Any, dict[str, Callable[..., Any]]]:
    """Return a class of pipeline stages, and methods for it by name with which stages do not exchange shapes.

    The shapes of their messages are given. torch 2.13 votes on whether they are known (`_warmup_p2p`), which ends with
    an `InferenceMode`; torch 2.11 sends one message in each direction.
    """
    from torch.distributed.pipelining import PipelineStage, schedules
    from torch.distributed.pipelining import _utils as pipelining

    def agreed(schedule: Any, stages: Sequence[Any], *_: Any) -> None:
        for stage in stages:
            stage._inference_mode = pipelining.InferenceMode.STATIC

    schedule: Any = schedules._PipelineSchedule
    if hasattr(schedule, "_warmup_p2p"):
        return schedule, {"_warmup_p2p": agreed}
    return PipelineStage, {"_get_init_p2p_neighbors_ops": lambda stage: []}


def frames_in_one_chunk(function: _Function) -> _Function:
    """Decorate a function that calls deeply and often: its frames and those below them lie in one piece of memory.

    CPython keeps Python frames in chunks of 16 KiB. A call across the end of one maps a new chunk, and its return
    unmaps it (`push_chunk` in Python/pystate.c, 3.11 to 3.14): 7 us, each time. A frame that is larger than a chunk
    gets one of its own, of up to twice its size; memory that nobody touches is not taken.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=_SLOTS)
    return cast(_Function, functools.wraps(function)(call))
