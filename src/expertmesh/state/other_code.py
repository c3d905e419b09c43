"""Let other libraries' code work correctly on a sharded model, or stop with one sentence that names the right call.

`guard` puts `_OtherCode` in front of the model's class and adds hooks to its forward and its state dict. Each refusal
is at the first attribute or method that a library uses, so that every rank raises the same error before anything has
been wrapped, written or sent. Only torch's gradient clipping is extended globally (compat.py), because it never sees
the model. `BeforeSharding` covers objects, above all an optimizer, that were made from a model in memory before it was
sharded.
"""

import inspect
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from expertmesh.compat import (
    hooks_of,
    is_compiled,
    is_sharded_by_transformers,
    pytree,
    tree_leaves,
    wrap_clipping,
)
from expertmesh.config.errors import InputError
from expertmesh.distributed.layout import Layout
from expertmesh.state.model_view import attach, mesh_of, sharded
from expertmesh.state.patching import mix_in

M = TypeVar("M", bound=nn.Module)
# Floating-point arguments of a forward that belong to text, not to media.
_TEXT = {"inputs_embeds", "attention_mask"}
# For each model with several pipeline stages: the ranks of the stage that this rank is in.
_STAGES: set[frozenset[int]] = set()


def guard(model: nn.Module, layout: Layout) -> None:
    """Install the refusals on a model that has just been sharded in `layout`. No communication."""
    mix_in(model, _OtherCode)
    model.register_forward_pre_hook(_refuse_compiled, prepend=True)
    model.register_forward_pre_hook(_refuse_labels, with_kwargs=True, prepend=True)
    model.register_forward_hook(_refuse_backward_of_loss, with_kwargs=True)
    model.register_state_dict_post_hook(_refuse_pickling)
    if layout.pp > 1:
        first = dist.get_rank() // layout.ranks_per_stage * layout.ranks_per_stage
        _STAGES.add(frozenset(range(first, first + layout.ranks_per_stage)))
    wrap_clipping(_total_norm, _scale_gradients)


def like_ddp(model: M) -> M:
    """Average the gradients of `model`'s outputs over the ranks, as `DistributedDataParallel` does, and return it.

        model = em.like_ddp(em.load_model(name, mesh))
        optimizer, loader = accelerator.prepare(torch.optim.AdamW(model.parameters()), loader)  # not the model
        loss = model(**batch).loss
        accelerator.backward(loss)

    For loops of accelerate, Fabric or your own that compute each rank's loss as a mean over its own rows. A gradient
    that enters the model through one of its outputs is divided by the number of ranks, and a gradient that leaves it
    through an input is multiplied by it, so that every parameter gets the gradient that DDP would give it.
    `causal_lm_loss` and `forward_backward`, which count targets of all ranks, do not change.

    Raises:
        InputError: With tp, cp or pp, whose ranks share rows.

    Collectives: none.
    """
    layout = mesh_of(model).layout
    if layout.data_ranks != layout.world_size:
        what = "like_ddp averages over ranks that have rows of their own"
        raise ranks_share_rows(what, layout, "use em.forward_backward, which knows every layout")
    if not sharded(model).averages_gradients:
        attach(model, averages_gradients=True)
        model.register_forward_pre_hook(_refuse_media_of_call, with_kwargs=True)
        model.register_forward_pre_hook(_scale_inputs, with_kwargs=True)
        model.register_forward_hook(_scale_outputs)
    return model


def refuse_sharded(model: nn.Module) -> None:
    """Raise `InputError` for a model that is already sharded: by expertmesh, by transformers, or by anybody's DTensors.

    Every rank gets the same result; no communication.
    """
    if sharded(model).mesh is not None:
        raise InputError(
            f"parallelize: this {type(model).__name__} is parallelized already; load it anew for another mesh",
            key="model.already-sharded",
        )
    by_transformers = is_sharded_by_transformers(model)
    name = next((name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)), None)
    if name is not None or by_transformers:
        how = "transformers has sharded it (distributed_config, tp_plan)" if by_transformers else f"{name} is a DTensor"
        raise InputError(
            f"parallelize takes a model that every rank holds whole, and {how}; load it without that, or let "
            "em.load_model read each rank's part of it",
            key="model.already-sharded",
        )


def media_in(batch: Mapping[str, Any]) -> list[str]:
    """Return the names of a batch's inputs beside text: images, video, sound, which are floating-point tensors."""

    def is_medium(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.is_floating_point()

    return sorted(name for name in batch.keys() - _TEXT if any(map(is_medium, tree_leaves(batch[name]))))


def refuse_media_on_some_ranks(model: nn.Module, batches: Sequence[Mapping[str, Any]]) -> None:
    """Raise `InputError` unless all ranks call `model` with the same kinds of media.

    A tower that runs on some ranks only would gather and reduce there, while the other ranks wait in another
    collective.

    Collectives: every rank calls it. For a model with a tower and several data ranks, one all-reduce of two integers on
    the default group, which the host waits for.
    """
    config: Any = model.config
    if config.get_text_config() is config or mesh_of(model).layout.data_ranks == 1:
        return
    media = [media_in(batch) for batch in batches]
    own = zlib.crc32(repr(media).encode())
    ends = torch.tensor([own, -own], device=mesh_of(model).device)
    dist.all_reduce(ends, op=dist.ReduceOp.MIN)
    least, most = ends.tolist()
    if least != -most:
        given = "; ".join(", ".join(names) or "text alone" for names in media)
        raise InputError(
            f"the model is called with {given} on this rank and with something else on others, which would wait for "
            "each other in its tower; give all ranks images in a micro-batch (a blank one at the end of a row, without "
            "targets), or none",
            key="model.media-on-some-ranks",
        )


@dataclass(frozen=True, slots=True)
class BeforeSharding:
    """References to a model in memory that is about to be sharded; FSDP2 will put new parameters into its modules.

    An optimizer made before would update parameters that no backward reaches. These parameters cannot become the new
    ones (a Parameter and a DTensor differ in slots, so `torch.utils.swap_tensors` refuses them), and their holders are
    unknown. So the parameters themselves raise an error when their gradient is read.
    """

    parameters: Sequence[tuple[str, weakref.ref[nn.Parameter]]]
    """By name. References are weak, so that each is freed when its shards are made, unless somebody holds it."""
    hooked: Mapping[str, nn.Module]
    """The modules that have hooks."""

    @classmethod
    def of(cls, model: nn.Module) -> "BeforeSharding":
        """Record the parameters and hooks of `model`. No communication.

        Raises:
            InputError: Compiled code, a gradient or a hook that would have no effect on the sharded model.
        """
        for name, module in model.named_modules():
            if is_compiled(module):
                raise _compiled(f"{name or type(module).__name__} is compiled; parallelize the model without that")
        for name, parameter in model.named_parameters():
            has = "a gradient" if parameter.grad is not None else "hooks" if hooks_of(parameter) else None
            if has is not None:
                raise InputError(
                    f"parallelize: {name} has {has}, which the shards in its place will not have; call "
                    "model.zero_grad() first, and register hooks (register_post_accumulate_grad_hook) afterwards",
                    key="model.attached-to-parameter",
                )
        parameters = [(name, weakref.ref(parameter)) for name, parameter in model.named_parameters()]
        return cls(parameters, {name: module for name, module in model.named_modules() if hooks_of(module)})

    def refuse_lost_hooks(self, model: nn.Module) -> None:
        """Raise `InputError` for hooks of modules that are no longer in `model`, which is not yet sharded."""
        modules = set(model.modules())
        for name, module in self.hooked.items():
            if module not in modules:
                raise InputError(
                    f"parallelize: {name} ({type(module).__name__}) has hooks, and is no part of the model from here "
                    "on: lists of experts are fused, PEFT's layers become ours; remove its hooks",
                    key="model.hooks-of-replaced-module",
                )

    def retire_parameters(self, model: nn.Module) -> None:
        """Make every recorded parameter that the sharded `model` no longer has refuse to be trained."""
        current = {id(parameter) for parameter in model.parameters()}
        for name, reference in self.parameters:
            parameter = reference()
            if parameter is not None and id(parameter) not in current:
                mix_in(parameter, _Retired)
                parameter.retired_name = name  # type: ignore[attr-defined]
                if parameter.requires_grad:
                    parameter.register_hook(partial(_refuse_retired, name))


class _Retired:
    """Put in front of the class of a parameter that shards have replaced. Its values may still be read."""

    retired_name: str

    @property
    def grad(self) -> NoReturn:
        _refuse_retired(self.retired_name)

    @grad.setter
    def grad(self, value: Any) -> None:
        _refuse_retired(self.retired_name)


def _refuse_retired(name: str, gradient: Any = None) -> NoReturn:
    raise InputError(
        f"{name} is the parameter from before em.parallelize, which nothing trains any more; make the optimizer, and "
        "whatever else holds parameters, of model.parameters() after em.parallelize",
        key="model.parameter-from-before",
    )


class _OtherCode:
    """Put in front of a sharded model's class.

    An attribute that only one library reads is a cached property, so that code that knows better can set it on the
    model.
    """

    def save_pretrained(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to write a single rank's shards."""
        raise InputError(
            "save_pretrained would write one rank's shards; call em.save_model(model, directory) on every rank, "
            "em.save_adapter for adapters",
            key="model.sharded-save-pretrained",
        )

    def push_to_hub(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to upload a single rank's shards."""
        raise InputError(
            "push_to_hub would upload one rank's shards; call em.save_model(model, directory) on every rank, then "
            "upload the directory from one (huggingface_hub.upload_folder)",
            key="model.sharded-push-to-hub",
        )

    def add_adapter(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _adapters_first()

    def load_adapter(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _adapters_first()

    @property
    def peft_config(self) -> Any:
        raise AttributeError("a sharded model has no adapters of PEFT")

    @peft_config.setter
    def peft_config(self, value: Any) -> None:
        raise _adapters_first()

    @cached_property
    def _is_accelerate_prepared(self) -> bool:
        raise InputError(
            "the model is sharded already, so accelerate (accelerator.prepare, or a Trainer) cannot wrap it; in a loop "
            "of your own call em.like_ddp(model) and prepare everything but the model, and make a Trainer by "
            "em.trainer(TrainerClass), which shards its model itself",
            key="model.sharded-accelerate",
        )

    @cached_property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        raise InputError(
            "the model is sharded already, so DistributedDataParallel cannot replicate it; call em.like_ddp(model) "
            "instead, whose gradients are averaged over ranks as DDP averages them",
            key="model.sharded-ddp",
        )


def _adapters_first() -> InputError:
    return InputError(
        "PEFT cannot put adapters on a sharded model: every rank would train its own; give load_model or parallelize "
        "lora=em.LoraConfig(...) (em.lora_from_peft makes one of PEFT's), or parallelize the PeftModel",
        key="model.sharded-peft",
    )


def _compiled(why: str) -> InputError:
    return InputError(
        f"torch.compile: {why}, and let em.load_model or em.parallelize compile what can be (compile=True): routing "
        "and dispatch run as they are",
        key="model.compiled",
    )


def _refuse_compiled(model: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        # The tracer would swallow an exception of traced code and run this function again without compiling it. It
        # really calls a disabled function, so that this exception reaches the user.
        torch.compiler.disable(_refuse_compiled_call)()


def _refuse_compiled_call() -> NoReturn:
    raise _compiled("a sharded model is called by compiled code; call the model itself")


def _refuse_labels(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a call with labels whose loss would be wrong.

    The model's own loss covers only this rank's rows, and gradients are summed over ranks.
    """
    layout = mesh_of(model).layout
    if layout.pp > 1 or not _has_labels(model, args, kwargs):
        return  # with pp, a pipeline stage refuses every call on its own
    if layout.cp * layout.tp > 1:
        what = "the model is called with labels, and its own loss is of whole rows"
        raise ranks_share_rows(what, layout, "use em.causal_lm_loss(model, batch, target_tokens=n)")
    if model.training and torch.is_grad_enabled():
        if _sums(model):
            raise _summed(layout)
        refuse_dropped_router_losses(model)


def refuse_dropped_router_losses(model: nn.Module) -> None:
    """Raise `InputError` if `moe` asks for router losses that the model's own loss does not have."""
    plan = sharded(model).shard_plan
    if plan is not None and plan.balance.beside_the_models:
        raise outside_router_losses()


def outside_router_losses() -> InputError:
    """Return the error for a loss that lacks the router losses of the optimizer step."""
    return InputError(
        "moe asks for router losses on this model, and they are taken over a whole optimizer step; run its "
        "micro-batches by causal_lm_loss inside expertmesh.router_losses(model, micro_batches), or set "
        "moe.aux_loss_coef and moe.z_loss_coef to 0.0",
        key="moe.loss-outside-router-losses",
    )


def _refuse_media_of_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    names = inspect.signature(model.forward).parameters if args else ()
    refuse_media_on_some_ranks(model, [dict(zip(names, args, strict=False)) | kwargs])


def _refuse_backward_of_loss(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Refuse the backward of the model's own loss, whose gradients are summed over ranks.

    In evaluation mode the loss itself may be read.
    """
    if _has_labels(model, args, kwargs) and _sums(model):
        loss = output["loss"] if isinstance(output, dict) else output[0]

        def refuse(gradient: torch.Tensor) -> NoReturn:
            raise _summed(mesh_of(model).layout)

        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            loss.register_hook(refuse)


def _sums(model: nn.Module) -> bool:
    return mesh_of(model).layout.data_ranks > 1 and not sharded(model).averages_gradients


def _summed(layout: Layout) -> InputError:
    return InputError(
        f"the model is called with labels, but gradients of a sharded model are summed over its {layout.data_ranks} "
        "data ranks, while its own loss is a mean over this rank's targets; use em.causal_lm_loss(model, batch, "
        "target_tokens=n), or em.like_ddp(model) to have gradients averaged as DDP does",
        key="model.labels-with-summed-gradients",
    )


def _has_labels(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    names = inspect.signature(model.forward).parameters if args else ()
    return {**dict(zip(names, args, strict=False)), **kwargs}.get("labels") is not None


def ranks_share_rows(what: str, layout: Layout, instead: str) -> InputError:
    """Return the error for code that takes the rows of a rank for its own."""
    axes = ", ".join(axis for axis in ("tp", "cp", "pp") if layout.size(axis) > 1)
    return InputError(
        f"{what}, but ranks along {axes} share each row; {instead}, or set these axes to 1",
        key="layout.ranks-share-rows",
    )


def _refuse_pickling(model: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Make sharded values of a state dict refuse to be pickled: each holds only one rank's shard.

    `keep_vars=True` gives the parameters themselves, which nobody pickles.

    Raises:
        InputError: Experts are placed, so that another job would take them for others.
    """
    plan = sharded(model).shard_plan
    placed = plan is not None and bool(plan.expert_orders)
    if placed and any(isinstance(value, DTensor) and not isinstance(value, nn.Parameter) for value in state.values()):
        raise InputError(
            "state_dict would have experts in the order of moe.placement, and whoever loads it would take them for "
            "others; call em.save_checkpoint or em.iter_hf_weights, or set moe.placement to contiguous",
            key="model.placed-state-dict",
        )
    for value in state.values():
        if isinstance(value, DTensor) and not isinstance(value, nn.Parameter):
            value.__reduce_ex__ = _pickled  # type: ignore[method-assign]


def _pickled(protocol: Any) -> NoReturn:
    raise InputError(
        "torch.save would write one rank's shards of the state dict; call em.save_model(model, directory) or "
        "em.save_checkpoint(model, optimizer, directory, step=n) on every rank",
        key="model.sharded-torch-save",
    )


class _ScaledGradient(torch.autograd.Function):
    """The identity, with its gradient multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.detach()  # not a view for autograd, so that the result may be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None


def _scale_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _scaled((args, kwargs), float(mesh_of(model).layout.data_ranks))


def _scale_outputs(model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return _scaled(output, 1.0 / mesh_of(model).layout.data_ranks)


def _scaled(values: Any, factor: float) -> Any:
    """Scale the gradient of every tensor in `values` that requires one, at any depth."""

    def scale(value: Any) -> Any:
        differentiable = isinstance(value, torch.Tensor) and value.requires_grad
        return _ScaledGradient.apply(value, factor) if differentiable else value

    return pytree.tree_map(scale, values) if torch.is_grad_enabled() else values


def _total_norm(
    own: Callable[..., torch.Tensor], gradients: Sequence[torch.Tensor], norm_type: float, *options: Any
) -> torch.Tensor:
    """Return torch's joint norm of gradients, `own`, also for DTensors on several meshes: dense and experts."""
    by_mesh: dict[Any, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_mesh.setdefault(_mesh_of(gradient), []).append(gradient)
    if any(mesh is not None and frozenset(mesh.mesh.flatten().tolist()) in _STAGES for mesh in by_mesh):
        raise InputError(
            "torch.nn.utils.clip_grad_norm_ sees one pipeline stage, and each would be clipped by a norm of its own; "
            "use em.clip_grad_norm_(model, max_norm)",
            key="layout.pp-clipping",
        )
    if len(by_mesh) < 2:
        return own(gradients, norm_type, *options)
    norms = [own(of_mesh, norm_type, *options) for of_mesh in by_mesh.values()]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(whole), norm_type)
    return total


def _scale_gradients(
    own: Callable[..., None], parameters: Sequence[torch.Tensor], max_norm: float, total: torch.Tensor, *options: Any
) -> None:
    """Scale gradients by the norm with torch's `own`, one mesh after the other."""
    by_mesh: dict[Any, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_mesh.setdefault(_mesh_of(parameter.grad), []).append(parameter)
    for of_mesh in by_mesh.values():
        own(of_mesh, max_norm, total, *options)


def _mesh_of(tensor: torch.Tensor) -> DeviceMesh | None:
    return tensor.device_mesh if isinstance(tensor, DTensor) else None
