"""Refuse by name what a Trainer cannot do with a sharded model.

For trainer.py, which calls most of these functions before anything is loaded. Every error says how to mend it. Nothing
here communicates or changes anything.

A callback finds DTensors in the model. Elementwise results, an average of weights for example, are right on shards.
Callbacks of transformers and TRL that need full weights are refused by name before training. A callback that reads a
number of one rank's shards alone gets an `InputError` at that place.
"""

import fnmatch
import importlib.util
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PreTrainedModel, Trainer

import expertmesh as em
from expertmesh import LoraConfig, MoeConfig, ParallelConfig
from expertmesh.compat import READS_A_VALUE, TorchDispatchMode, logs_the_model, pytree
from expertmesh.config.errors import InputError
from expertmesh.config.sections import refuse_wrong_order
from expertmesh.integrations import routes

TRL_TRAINERS = ("SFTTrainer", "DPOTrainer", "GRPOTrainer", "RewardTrainer")

# Every method that is overridden, with its parameters: another version may call it with others, or not at all.
OVERRIDDEN = {
    "create_accelerator_and_postprocess": ("self",),
    "_build_accelerator_args": ("self", "kwargs"),
    "_move_model_to_device": ("self", "model", "device"),
    "_clip_grad_norm": ("self", "model"),
    "_get_grad_norm": ("self", "model", "grad_norm"),
    "training_step": ("self", "model", "inputs", "num_items_in_batch"),
    "train": ("self", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"),
    "save_model": ("self", "output_dir", "_internal_call"),
    "_save_checkpoint": ("self", "model", "trial"),
    "_save_optimizer_and_scheduler": ("self", "output_dir"),
    "_load_optimizer_and_scheduler": ("self", "checkpoint"),
    "_load_from_checkpoint": ("self", "resume_from_checkpoint", "model"),
    "_load_best_model": ("self",),
}

# Those of them that call no method of the class.
REPLACED = (
    *("_move_model_to_device", "_clip_grad_norm", "_get_grad_norm", "save_model", "_save_optimizer_and_scheduler"),
    *("_load_optimizer_and_scheduler", "_load_from_checkpoint", "_load_best_model"),
)

# By class, the names in its module that are exchanged while a trainer is made (`patches.handed_over`), and a method
# of it that is wrapped.
EXCHANGED = {
    "DPOTrainer": ("hash_module",),
    "GRPOTrainer": (
        *("create_model_from_path", "VLLMGeneration._iter_named_params", "GRPOTrainer._tool_call_loop"),
        *(f"GRPOTrainer.{name}" for name in routes.WRAPPED),
    ),
}

_ARGUMENTS = {
    "fsdp": "the model is sharded by parallel=; leave it out",
    "deepspeed": "the model is sharded by parallel=; leave it out",
    "parallelism_config": "ranks are laid out by parallel=; leave it out",
    "fp16": "float16 needs loss scaling; use bf16",
    "fp16_full_eval": "a sharded model is not cast; evaluation runs in precision.compute",
    "bf16_full_eval": "a sharded model is not cast; evaluation runs in precision.compute",
    "use_liger_kernel": "it replaces forwards that are sharded; leave it out",
    "torch_compile": "it would compile around the collectives of the experts; leave it out",
    "auto_find_batch_size": "a rank that runs out of memory leaves the others in a collective; set the batch size",
    "activation_offloading": "it holds on to gathered parameters; use gradient_checkpointing",
    "push_to_hub": "the directory of save_model is an ordinary one; upload that",
    "save_on_each_node": "each rank writes its own part of one directory; use a file system that all ranks share",
    "enable_jit_checkpoint": "it saves on one rank when that gets its signal; leave it out",
    "optim_target_modules": "it projects whole gradients, and each rank has a shard; leave it out",
    "use_transformers_continuous_batching": "ranks would not generate in lockstep; leave it out",
    "cast_lm_head_to_fp32": "it replaces a head that is in shards; leave it out",
    "sync_ref_model": "the reference is a model in shards of its own; leave it out",
    "debug": "its hooks read whole weights; leave it out",
}
_GIVEN = {
    "model_init": "a model is sharded once, when the trainer is made; give model=",
    "quantization_config": "quantised files are read as plain weights, as their config says; leave it out",
    "optimizers": "their parameters would be those from before sharding; use args.optim or optimizer_cls_and_kwargs",
}
# Options of `generate` with which a forward has other rows than the batch, or other positions than the next.
SEARCH = (
    *("num_beams", "num_return_sequences", "use_cache", "prefill_chunk_size", "cache_implementation"),
    *("prompt_lookup_num_tokens", "assistant_early_exit", "penalty_alpha", "dola_layers", "guidance_scale"),
)
_ELEMENTWISE = ("adamw_torch", "adamw_torch_fused", "sgd", "rmsprop", "adagrad")
_ELEMENTWISE_CLASSES = tuple(
    getattr(torch.optim, name) for name in ("Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adamax", "NAdam", "RAdam")
)
# Callbacks of transformers and TRL that cannot work on shards, whatever their options; also classes derived from them.
REFUSED_CALLBACKS = {
    "BEMACallback": "it copies the whole model to every rank; average model.parameters() in a callback of your "
    "own, each rank its shards",
    "SyncRefModelCallback": "the reference is a model in shards of its own; leave it out",
    "JITCheckpointCallback": "it saves on one rank when that gets its signal; leave it out",
}
# Environment variables by which other callbacks save or watch weights, on rank 0 alone.
_VARIABLES = {
    "WandbCallback": ("WANDB_LOG_MODEL", "WANDB_WATCH"),
    "DVCLiveCallback": ("HF_DVCLIVE_LOG_MODEL",),
}
_OFF = ("", "false", "0", "no", "n", "off", "f")
_GENERATING = ("LogCompletionsCallback", "WeaveCallback")


def trl_class(trainer_class: type[Trainer]) -> str | None:
    """Return the name of the TRL class that it is, or is derived from; None for transformers' classes."""
    own = (base.__name__ for base in trainer_class.__mro__ if base.__module__.partition(".")[0] == "trl")
    return next((name for name in own if not name.startswith("_")), None)


def refuse_class(trainer_class: type[Trainer]) -> None:
    """Raise `InputError` for a class that is not known to train correctly, or a version with other methods."""
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
        raise _unsupported_class(f"{trainer_class!r} is no Trainer class of transformers; give the class, no instance")
    of_trl = trl_class(trainer_class)
    if of_trl is not None and of_trl not in TRL_TRAINERS:
        supported = f"{', '.join(TRL_TRAINERS)} are, and so is transformers' Trainer"
        raise _unsupported_class(f"{of_trl} of TRL is not supported; {supported}")
    if issubclass(trainer_class, transformers.Seq2SeqTrainer):
        raise _unsupported_class("Seq2SeqTrainer trains encoder-decoders, which are not supported")
    for name, expected in OVERRIDDEN.items():
        method = getattr(trainer_class, name, None)
        found = None if method is None else tuple(inspect.signature(method).parameters)
        # A method of any arguments hands them on.
        if found not in (expected, ("self", "args", "kwargs")):
            has = "has none" if found is None else f"has ({', '.join(found)})"
            raise InputError(
                f"{trainer_class.__name__}.{name} is to be overridden as ({', '.join(expected)}), but this version "
                f"{has}; transformers is {transformers.__version__}, and 5.23 is what this was made for",
                key="trainer.unsupported-version",
            )
    for name in REPLACED:
        home = next(base for base in trainer_class.__mro__ if name in vars(base))
        if home.__module__.partition(".")[0] not in ("transformers", "trl"):
            raise _unsupported_class(
                f"{home.__name__} has a {name} of its own, which would never be called: that of sharded models is in "
                f"its place; leave it out, or derive {home.__name__} from em.trainer(...) of the class below it"
            )
    for name in EXCHANGED.get(of_trl or "", ()):
        module = next(base.__module__ for base in trainer_class.__mro__ if base.__name__ == of_trl)
        found_there: Any = sys.modules[module]
        for part in name.split("."):
            found_there = getattr(found_there, part, None)
        if found_there is None:
            raise InputError(
                f"{module}.{name} is to be exchanged for {of_trl}, but this version of TRL has none; 1.16 is what this "
                "was made for",
                key="trainer.unsupported-version",
            )


def _unsupported_class(why: str) -> InputError:
    return InputError(why, key="trainer.unsupported-class")


def refuse_arguments(args: Any, given: Mapping[str, Any]) -> None:
    """Raise `InputError` for arguments of a Trainer that cannot work on shards.

    Args:
        args: Its `TrainingArguments`.
        given: All its arguments by name, `args` among them.
    """
    for name, why in _ARGUMENTS.items():
        if value := getattr(args, name, None):
            raise unsupported_argument(f"args.{name} is {value!r}", why)
    for name, why in _GIVEN.items():
        value = given.get(name)
        if value is not None and not (isinstance(value, tuple) and all(each is None for each in value)):
            raise unsupported_argument(f"{name}= is given", why)
    mixed, template = _mixed_precision(args), getattr(args, "chat_template_path", None)
    tools = next((name for name in ("tools", "environment_factory") if given.get(name)), None)
    use_vllm = getattr(args, "use_vllm", False)
    for wrong, what, why in (
        (mixed not in ("no", "bf16"), f"mixed precision is {mixed}", "use bf16 or none"),
        (
            not args.accelerator_config.even_batches,
            "args.accelerator_config.even_batches is False",
            "ranks would run different numbers of batches, and each forward needs them all; set it to True",
        ),
        (
            use_vllm and not _has_vllm(),
            "args.use_vllm is True",
            "vllm is not installed; install trl[vllm], or leave it out, and the sharded model generates",
        ),
        (
            tools and use_vllm and (args.vllm_mode == "server" or args.vllm_tensor_parallel_size > 1),
            f"{tools}= is given with args.use_vllm",
            "ranks ask vLLM together, and only some have completions that call a tool; set vllm_mode to "
            '"colocate" with vllm_tensor_parallel_size 1, or use_vllm to False',
        ),
        (
            template is not None and not template.endswith((".jinja", ".j2")),
            f"args.chat_template_path is {template!r}",
            "taking over a tokenizer's template resizes the embeddings of a sharded model; give a .jinja file",
        ),
    ):
        if wrong:
            raise unsupported_argument(what, why)
    _refuse_optimizer(args, given.get("optimizer_cls_and_kwargs"))


def refuse_order(
    accumulate: str, round: int | None, keep_inputs: str, args: Any, given: Mapping[str, Any], of_trl: str | None
) -> None:
    """Raise `InputError` for an order of micro-batches that does not exist, or that a loss does not have.

    Args:
        accumulate: The order; `round` and `keep_inputs` are those of `em.forward_backward`.
        args: Its `TrainingArguments`.
        given: All its arguments by name.
        of_trl: The name of the TRL class, or None.
    """
    refuse_wrong_order(accumulate, round, keep_inputs)
    if accumulate != "by_layer":
        return
    twice = "its loss calls the model more than once"
    smooths = args.label_smoothing_factor and getattr(args, "loss_type", None) == "nll"
    for wrong, what, why in (
        (of_trl in ("DPOTrainer", "GRPOTrainer"), f"by_layer of {of_trl}", f"{twice}; leave it out"),
        (
            of_trl == "SFTTrainer" and (given.get("compute_loss_func") or smooths),
            "by_layer of SFTTrainer with " + ("label_smoothing_factor" if smooths else "compute_loss_func="),
            f"{twice}; leave one out",
        ),
        (
            (args.accelerator_config.gradient_accumulation_kwargs or {}).get("sync_each_batch"),
            "by_layer and sync_each_batch is True",
            "gradients of a layer are reduced once; leave one out",
        ),
    ):
        if wrong:
            raise unsupported_argument(f"accumulate is {what}", why)


def unsupported_argument(what: str, why: str) -> InputError:
    return InputError(f"{what}: {why}", key="trainer.unsupported-argument")


def _has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None


def _mixed_precision(args: Any) -> str:
    return str(getattr(args, "mixed_precision", None) or ("bf16" if args.bf16 else "no"))


def asks_for_bf16(args: Any) -> bool:
    return _mixed_precision(args) == "bf16"


def _refuse_optimizer(args: Any, own: tuple[type, dict[str, Any]] | None) -> None:
    """Raise `InputError` for an optimizer that is not known to be elementwise, as each rank has shards of weights.

    Args:
        own: The class and arguments that the caller gave instead of `args.optim`.
    """
    name = str(getattr(args.optim, "value", args.optim)) if own is None else own[0].__name__
    known = name in _ELEMENTWISE if own is None else own[0] in _ELEMENTWISE_CLASSES
    if not known:
        raise InputError(
            f"the optimizer {name} may not treat every element on its own, and each rank has a shard of every weight; "
            f"set args.optim to one of {', '.join(_ELEMENTWISE)}",
            key="trainer.unsupported-optimizer",
        )


def refuse_checkpointing(options: Mapping[str, Any]) -> None:
    """Raise `InputError` for options of gradient_checkpointing that ours does not have."""
    known = {"use_reentrant", "selective", "every_n_layers"}
    others = [f"{key}={value!r}" for key, value in options.items() if key not in known and value]
    if options.get("use_reentrant"):
        others.append("use_reentrant=True")
    if others:
        why = "gradient_checkpointing becomes this package's own, whose options are selective and every_n_layers"
        raise unsupported_argument(f"gradient_checkpointing_kwargs has {others[0]}", why)


def known_init_options(args: Any) -> dict[str, Any]:
    """Return `args.model_init_kwargs` as arguments of `em.load_model`. Raises `InputError` for other ones."""
    given = dict(getattr(args, "model_init_kwargs", None) or {})
    trust = given.pop("trust_remote_code", getattr(args, "trust_remote_code", False))
    found = {"revision": given.pop("revision", None), "trust_remote_code": bool(trust)}
    found["attention"] = given.pop("attn_implementation", None) or "auto"
    if given:
        key, value = next(iter(given.items()))
        why = "revision, trust_remote_code and attn_implementation are taken, and precision= says the dtypes"
        raise unsupported_argument(f"args.model_init_kwargs has {key}={value!r}", why)
    return found


def refuse_parallel(parallel: ParallelConfig | None) -> None:
    """Raise `InputError` unless ep is a number, and tp, cp and pp are 1.

    Trainers give each process separate rows, and ranks along tp, cp and pp share their rows.
    """
    if parallel is None or parallel.ep == "auto":
        what = "parallel= is not given" if parallel is None else "parallel.ep is auto"
        raise InputError(
            f"{what}, and a Trainer has to be told how many ranks share the experts; give "
            "parallel=em.ParallelConfig(ep=N), where N divides the number of ranks and that of experts",
            key="trainer.ep-not-given",
        )
    for axis in ("tp", "cp", "pp"):
        size = getattr(parallel, axis, 1)
        if size > 1:
            raise InputError(
                f"parallel.{axis} is {size}, but Trainers give each process rows of its own, and ranks along {axis} "
                f"share theirs; set {axis} to 1, or train with `expertmesh train`, which has every axis",
                key="trainer.shared-rows",
            )


def refuse_processes(args: Any, world_size: int, device: torch.device) -> None:
    """Raise `InputError` unless accelerate sees all ranks and the mesh's type of device.

    On CPUs accelerate sees one process unless `args.use_cpu` is set: every rank would train on all rows.
    """
    if args.device.type != device.type:
        raise InputError(
            f"args puts batches on {args.device.type}, and the model is on {device.type}; set args.use_cpu to False",
            key="trainer.processes-differ",
        )
    if args.world_size != world_size:
        raise InputError(
            f"the job has {world_size} ranks, but accelerate sees {args.world_size}; on CPUs set args.use_cpu to True, "
            "and make args after the launcher has set RANK, WORLD_SIZE and LOCAL_RANK",
            key="trainer.processes-differ",
        )


def refuse_launcher(trainer: Trainer) -> None:
    """Raise `InputError` for parallelism that `accelerate launch` has switched on by environment variables."""
    config = getattr(trainer.accelerator, "parallelism_config", None)
    for on, what in (
        (trainer.is_fsdp_enabled, "FSDP"),
        (trainer.is_deepspeed_enabled, "DeepSpeed"),
        (config is not None, "a parallelism config"),
    ):
        if on:
            why = "the model is sharded by parallel=; start with torchrun, or take it out of the configuration"
            raise unsupported_argument(f"accelerate's own configuration asks for {what}", why)


def refuse_moe(moe: MoeConfig | None, args: Any, of_trl: str | None) -> None:
    """Raise `InputError` for router losses and biases, which our optimizer step has and a Trainer's has not.

    Args:
        args: Its `TrainingArguments`.
        of_trl: The name of the TRL class, or None.
    """
    if moe is None:
        return
    for name in ("z_loss_coef", "bias_update_rate"):
        if value := getattr(moe, name):
            raise InputError(
                f"moe.{name} is {value}, which a Trainer's step does not have; set it to 0.0, or train with "
                "`expertmesh train`",
                key="trainer.router-loss",
            )
    own = hasattr(args, "router_aux_loss_coef")
    if moe.aux_loss_coef != "from_model" and (own or moe.aux_loss_coef != 0.0):
        mend = "set args.router_aux_loss_coef" if own else "set it to 0.0, or use SFTTrainer"
        where = "which has none" if of_trl and not own else "which adds the router's auxiliary loss itself"
        raise InputError(
            f"moe.aux_loss_coef is {moe.aux_loss_coef}, but the step is {of_trl or 'Trainer'}'s, {where}; {mend}",
            key="trainer.router-loss",
        )


def refuse_lora(lora: LoraConfig | None, args: Any, of_trl: str | None) -> None:
    """Raise `InputError` for adapters that would not be trained correctly by a Trainer. Arguments as `refuse_moe`."""
    if lora is None:
        return
    if lora.dropout and getattr(args, "disable_dropout", False):
        raise InputError(
            f"lora.dropout is {lora.dropout}, but args.disable_dropout turns it off; set one to 0.0, or the other to "
            "False",
            key="trainer.lora-dropout",
        )
    if of_trl is not None and _adapts_head(lora):
        raise _adapter_on_head()


def refuse_replay(replays: bool, args: Any, given: Mapping[str, Any], of_trl: str | None) -> None:
    """Raise `InputError` if routes are to be replayed and cannot be known. Arguments as `refuse_arguments`."""
    brings = given.get("rollout_func") is not None
    tools = next((name for name in ("tools", "environment_factory") if given.get(name)), None)
    search = [name for name in SEARCH if (getattr(args, "generation_kwargs", None) or {}).get(name) is not None]
    for unknown, what, mend in (
        (of_trl != "GRPOTrainer", f"{of_trl or 'Trainer'} has no rollouts", "leave it out"),
        (tools, f"{tools}= is given, and each call of a tool generates again", "leave one out"),
        (
            getattr(args, "use_vllm", False) and not brings,
            "args.use_vllm is True, and TRL's client drops the routes",
            "give a rollout_func that returns routes",
        ),
        (search and not brings, f"args.generation_kwargs has {', '.join(search)}", "sample without it"),
        (
            getattr(args, "cache_implementation", None) not in (None, "dynamic") and not brings,
            f"args.cache_implementation is {getattr(args, 'cache_implementation', None)!r}",
            'set it to "dynamic"',
        ),
    ):
        if replays and unknown:
            raise routes.not_replayed(what, mend)


def _adapts_head(lora: LoraConfig) -> bool:
    """Return whether its names select lm_head; `refuse_adapted_head` finds a head of another name on the model."""
    if lora.from_adapter is None:
        whole = lora.modules_to_save
        targets: Any = "|".join(fnmatch.translate(name) for name in lora.targets)
    else:
        try:
            content = json.loads(Path(lora.from_adapter, "adapter_config.json").read_text(encoding="utf-8"))
            targets, whole = content["target_modules"], content.get("modules_to_save") or ()
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False  # em.load_model says what is wrong with it
    if any("lm_head".endswith(name) for name in whole):  # as PEFT chooses them
        return True
    return bool(re.fullmatch(targets, "lm_head")) if isinstance(targets, str) else "lm_head" in (targets or ())


def is_of_peft(model: Any) -> bool:
    """Return whether it is a PeftModel, whose adapters become ours."""
    return hasattr(model, "get_base_model") and hasattr(model, "peft_config")


def refuse_in_memory(model: Any, args: Any, of_trl: str | None) -> None:
    """Raise `InputError` for a model that is not transformers', is sharded already, or has unsupported adapters."""
    inner = model.get_base_model() if is_of_peft(model) else model
    if not isinstance(inner, PreTrainedModel):
        what = "not given" if model is None else f"a {type(model).__name__}"
        raise InputError(
            f"model is {what}; give a name, a directory, or a model of transformers", key="trainer.unsupported-model"
        )
    if any(isinstance(parameter, DTensor) for parameter in inner.parameters()):
        raise InputError(
            f"the {type(inner).__name__} is sharded already; give the trainer the model's name, or a model that is "
            "not, and parallel=",
            key="trainer.unsupported-model",
        )
    for config in model.peft_config.values() if is_of_peft(model) else ():
        refuse_lora(em.LoraConfig(dropout=getattr(config, "lora_dropout", 0.0)), args, None)
    if of_trl is not None:
        refuse_adapted_head(inner)


def refuse_adapters_as_reference(model: Any) -> None:
    """Raise `InputError` for a PeftModel, because TRL would not compare it with its frozen base."""
    if is_of_peft(model):
        raise InputError(
            "TRL compares a PeftModel with a copy of the adapters that it starts from, which is not supported; give "
            "ref_model=, or the base model and lora=, whose reference is the base",
            key="trainer.unsupported-model",
        )


def refuse_adapted_head(model: Any) -> None:
    """Raise `InputError` for an adapter on the head, by whatever name, of a model that has its adapters."""
    head = model.get_output_embeddings()
    if head is not None and any("lora_" in name or "modules_to_save" in name for name, _ in head.named_parameters()):
        raise _adapter_on_head()


def refuse_router_loss(model: Any, moe: MoeConfig | None, args: Any, of_trl: str | None) -> None:
    """Raise `InputError` if the model adds a router loss, which transformers' Trainer multiplies by a wrong factor.

    Args:
        model: A name, a directory, or a model in memory.
    """
    if of_trl is not None:
        return
    config = _config_of(model, args)
    text = None if config is None else config.get_text_config()
    factors = {name: getattr(text, name, 0.0) for name in ("router_aux_loss_coef", "aux_loss_coef")}  # JetMoe's second
    factor = next((f"{name} {value}" for name, value in factors.items() if value), None)
    left_out = moe is not None and moe.aux_loss_coef == 0.0
    if getattr(text, "output_router_logits", False) and factor and not left_out:
        raise InputError(
            f"the model's config has output_router_logits and {factor}, which Trainer "
            "multiplies by the number of processes and of accumulated micro-batches; set moe.aux_loss_coef to 0.0, or "
            "use SFTTrainer",
            key="trainer.router-loss",
        )


def _config_of(model: Any, args: Any) -> Any:
    """Return the config of a model in memory, or of a name or directory; None if that cannot be read."""
    if not isinstance(model, str | Path):
        return model.config
    options = known_init_options(args)
    try:
        return AutoConfig.from_pretrained(
            model, revision=options["revision"], trust_remote_code=options["trust_remote_code"]
        )
    except (OSError, ValueError):
        return None  # em.load_model says what is wrong with it


def _adapter_on_head() -> InputError:
    return InputError(
        "lora has an adapter on lm_head, but TRL computes its losses from lm_head.weight alone, so that the adapter "
        "would never be trained; leave lm_head out of lora.targets",
        key="trainer.lora-on-head",
    )


def refuse_callbacks(callbacks: Iterable[Any], ranks: int) -> None:
    """Raise `InputError` for a callback, an instance or a class, that cannot work on shards. No communication."""
    for callback in callbacks:
        kind = callback if isinstance(callback, type) else type(callback)
        for base in kind.__mro__:
            if base.__module__.partition(".")[0] in ("transformers", "trl") and (
                why := _why(base.__name__, callback, ranks)
            ):
                raise InputError(f"the callback {kind.__name__} is given: {why}", key="trainer.unsupported-callback")


def _why(name: str, callback: Any, ranks: int) -> str | None:
    """Return why a callback of the class `name` cannot work on shards, or None."""
    if name in REFUSED_CALLBACKS:
        return REFUSED_CALLBACKS[name]
    for variable in _VARIABLES.get(name, ()):
        value = os.environ.get(variable, "")
        sends_directories = (name, value.lower()) == ("DVCLiveCallback", "all")  # checkpoints: full weights
        if value.lower() not in _OFF and not sends_directories:
            return f"{variable} is {value!r}, by which rank 0 alone would read weights that are in shards; unset it"
    if name == "DVCLiveCallback" and logs_the_model(callback):
        return (
            'log_model is True, by which rank 0 alone would save weights that are in shards; set it to "all" or False'
        )
    if name in _GENERATING and (prompts := len(getattr(callback, "eval_dataset", ()))) % ranks:
        return (
            f"its {prompts} prompts cannot be shared out evenly over {ranks} ranks, which generate together; set "
            f"num_prompts to a multiple of {ranks}"
        )
    return None


def on_shards(call_event: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `CallbackHandler.call_event` so that reading a number of one rank's shards raises `InputError`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _Shards():
            return call_event(*args, **kwargs)

    return call


class _Shards(TorchDispatchMode):
    """A dispatch mode that checks operations on DTensors.

    torch computes `weight.norm().item()` without the other ranks' shards, and raises no error.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        shards = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
        if func is READS_A_VALUE and any(placement.is_partial() for shard in shards for placement in shard.placements):
            raise _in_shards("reads a number that is of this rank's shards alone")
        try:
            return func(*args, **(kwargs or {}))
        except (RuntimeError, NotImplementedError) as error:
            meshes = {shard.device_mesh for shard in shards}
            if shards and (
                len(meshes) > 1 or any(tensor.dim() for tensor in tensors if not isinstance(tensor, DTensor))
            ):
                raise _in_shards(f"calls {func} of shards together with whole tensors, or shards of experts") from error
            raise


def _in_shards(what: str) -> InputError:
    return InputError(
        f"a callback {what}; call .full_tensor() of the parameter, or of its norm or sum, on every rank",
        key="trainer.unsupported-callback",
    )
