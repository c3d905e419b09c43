"""Make a Trainer class of transformers or TRL whose model is sharded over all ranks, with equal results: `em.trainer`.

A mixin is put before the class. It shards the model when the trainer is made, keeps accelerate from wrapping it,
averages gradients over the ranks as the Trainer expects of DDP, and clips, saves and resumes by this package. It does
not change data, schedules, losses, metrics and callbacks, which stay the Trainer's.
"""

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.integrations.integration_utils import get_reporting_integration_callbacks
from transformers.trainer_utils import rotate_checkpoints

import expertmesh as em
from expertmesh import LoraConfig, MoeConfig, ParallelConfig, PrecisionConfig
from expertmesh.compat import pytree, scale_all_
from expertmesh.integrations import checkpoints, patches, refusals
from expertmesh.integrations.refusals import unsupported_argument
from expertmesh.integrations.routes import RouteReplay
from expertmesh.launcher.torchrun import OneSentence

T = TypeVar("T", bound=Trainer)


def trainer(trainer_class: type[T]) -> type[T]:
    """Derive a class for sharded models from `trainer_class` (transformers' Trainer, TRL's, or one derived from them).

        SFTTrainer = em.trainer(SFTTrainer)
        trainer = SFTTrainer(model="Qwen/Qwen3-30B-A3B", parallel=em.ParallelConfig(ep=8), args=..., train_dataset=...)

    Every rank makes the trainer and calls its methods. Beside the class's arguments it takes `parallel` (`fsdp`,
    `replicate` and `ep`), `precision`, `moe`, `lora` (`em.LoraConfig`, or PEFT's `LoraConfig`, which `peft_config`
    takes too), `accumulate`, `round` and `keep_inputs` as `em.forward_backward` does, and for GRPO `replay_routes`.
    `model` is a name, a directory, or a model in memory that is equal on every rank. Losses, gradients, gradient norms
    and weights are those of the stock class under DDP; docs/trainers.md lists what is refused.

    After this call an error that a user can mend ends the script with one sentence and its exit code.

    Raises:
        InputError: The class, or its version, is not known to train correctly.
    """
    if isinstance(trainer_class, type) and issubclass(trainer_class, ShardedTrainer):
        return trainer_class
    if not isinstance(sys.excepthook, OneSentence):
        sys.excepthook = OneSentence()
    refusals.refuse_class(trainer_class)
    namespace = {"__doc__": trainer_class.__doc__, "__module__": __name__, "__qualname__": trainer_class.__qualname__}
    made: type[T] = type(trainer_class.__name__, (ShardedTrainer, trainer_class), namespace)
    return made


class ShardedTrainer(Trainer):
    """A mixin before a Trainer class. `refusals.OVERRIDDEN` lists the methods that it overrides, to check a version."""

    _by_layer: "_ByLayer | None" = None

    def __init__(
        self,
        *args: Any,
        parallel: ParallelConfig | None = None,
        precision: PrecisionConfig | None = None,
        moe: MoeConfig | None = None,
        lora: Any = None,
        replay_routes: bool = False,
        accumulate: Literal["by_micro_batch", "by_layer"] = "by_micro_batch",
        round: int | None = None,
        keep_inputs: Literal["device", "host"] = "device",
        **kwargs: Any,
    ) -> None:
        given = _by_name(super().__init__, args, kwargs)
        model, of_trl = given.get("model"), refusals.trl_class(type(self))
        arguments = given["args"] = given.get("args") or _stock_arguments(of_trl, model)
        refusals.refuse_arguments(arguments, given)
        reporting = get_reporting_integration_callbacks(arguments.report_to)
        refusals.refuse_callbacks([*(given.get("callbacks") or ()), *reporting], ranks=1)
        refusals.refuse_parallel(parallel)
        lora = _lora(lora, given.pop("peft_config", None))
        refusals.refuse_moe(moe, arguments, of_trl)
        refusals.refuse_lora(lora, arguments, of_trl)
        refusals.refuse_replay(replay_routes, arguments, given, of_trl)
        refusals.refuse_order(accumulate, round, keep_inputs, arguments, given, of_trl)
        by_layer = accumulate == "by_layer"
        options = {"precision": precision, "moe": moe, "lora": lora, "by_layer": by_layer, **_checkpointing(arguments)}
        if isinstance(model, str | Path):
            refusals.known_init_options(arguments)
            options |= {"num_labels": 1} if of_trl == "RewardTrainer" else {}
        else:
            refusals.refuse_in_memory(model, arguments, of_trl)
        refusals.refuse_router_loss(model, moe, arguments, of_trl)
        asks = "ref_model" in inspect.signature(super().__init__).parameters  # GRPO loads the reference itself
        compares = asks or bool(of_trl and getattr(arguments, "beta", 0.0))
        if compares and given.get("ref_model") is None:
            refusals.refuse_adapters_as_reference(model)
        mesh = em.init_mesh(parallel)
        refusals.refuse_processes(arguments, mesh.layout.world_size, mesh.device)
        self._has_adapters = lora is not None or refusals.is_of_peft(model)
        frozen: Any = _reference(given, mesh, options) if compares else None
        given["model"] = sharded = em.like_ddp(_sharded(model, mesh, arguments, options))
        # The base of a policy with adapters is the reference: no second model in memory.
        if compares and frozen is None and self._has_adapters:
            frozen = patches.AdaptersOff(sharded)
        if asks:
            given["ref_model"] = frozen
        if moe is not None and moe.aux_loss_coef == 0.0:
            sharded.config.get_text_config().output_router_logits = False
        if of_trl is not None:
            refusals.refuse_adapted_head(sharded)
        with patches.handed_over(frozen):
            super().__init__(**given)
        self._number_rows({"round": round, "keep_inputs": keep_inputs} if by_layer else None)
        if of_trl == "GRPOTrainer":
            self._in_lockstep(replay_routes)
        handler: Any = self.callback_handler
        handler.call_event = refusals.on_shards(handler.call_event)

    def _number_rows(self, order: dict[str, Any] | None) -> None:
        """Give rows numbers, for the dropout of adapters; by layer, when the micro-batches of a step run in `order`."""
        numbers = patches.RowNumbers(self) if self._has_adapters else None
        if order is not None:
            self._by_layer = _ByLayer(self, numbers, order)
        elif numbers is not None:
            self._shards.register_forward_pre_hook(numbers, with_kwargs=True, prepend=True)

    def _in_lockstep(self, replay_routes: bool) -> None:
        """Let ranks of GRPO call the model equally often, and replay the routes of rollouts if that is asked for."""
        lockstep = patches.Lockstep(self._shards)
        for name in ("rollout_func", "_tool_call_loop"):
            if (calls := getattr(self, name)) is not None:
                setattr(self, name, lockstep(calls))
        if replay_routes:
            RouteReplay(self)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, and refuse parallelism that its launcher has switched on."""
        super().create_accelerator_and_postprocess()
        refusals.refuse_launcher(self)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Turn autocast off: FSDP2 casts for compute, and autocast would cast again by other rules."""
        return {**super()._build_accelerator_args(**kwargs), "mixed_precision": "no"}

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: shards are on their device already."""

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Clip by the norm of the full gradients, which are in shards. Every rank calls it; collective.

        A norm that is not finite scales them as well, to zeros or NaN: the Trainer steps, and
        `em.clip_grad_norm_` would leave them whole for a caller that does not.
        """
        norm = em.clip_grad_norm_(model, None)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
        if local:
            scale_all_(local, torch.clamp(self.args.max_grad_norm / (norm + 1e-6), max=1.0))
        return norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Return the norm of the full gradients, computed if nothing was clipped. Every rank calls it; collective."""
        return em.clip_grad_norm_(model, None) if grad_norm is None else grad_norm

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the stock step of a micro-batch; by layer, keep it until the last one of the optimizer step."""
        micro_step = partial(super().training_step, *args, **kwargs)
        return micro_step() if self._by_layer is None else self._by_layer(micro_step)

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train as the Trainer does, from a complete checkpoint-N if one is to be resumed.

        Raises:
            InputError: A callback cannot work on shards; also as `checkpoints.find_start`, with `IntegrityError`.
        """
        # Again, with the callbacks that were added since, and now with the number of ranks.
        refusals.refuse_callbacks(self.callback_handler.callbacks, self.args.world_size)
        if self._by_layer is not None:
            self._by_layer.kept.clear()  # of a run that stopped within a step
        saves = self.args.save_strategy != "no"
        start = checkpoints.find_start(self._output, resume_from_checkpoint, saves=saves)
        return super().train(None if start is None else str(start), trial, ignore_keys_for_eval)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a plain Hugging Face directory, or one of PEFT for a model with adapters; each rank writes its part.

        Collectives: every rank calls it; those of `em.save_model` or `em.save_adapter`.
        """
        directory = self._output if output_dir is None else Path(output_dir)
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        checkpoints.save_weights(self._shards, directory, tokenizer, adapters=self._has_adapters)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write checkpoint-N, mark it as complete, and then remove the oldest ones. Every rank calls it."""
        # Older checkpoints are removed only after this one is complete.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        output_dir, best = str(self._output), self.state.best_model_checkpoint
        checkpoints.mark_complete(self._output / f"checkpoint-{self.state.global_step}")
        checkpoints.on_rank_0(lambda: rotate_checkpoints(output_dir, limit, best))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        step = self.state.global_step
        checkpoints.save_training_state(self._shards, self._optimizer, self.lr_scheduler, Path(output_dir), step)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            checkpoints.load_training_state(self._shards, self._optimizer, self.lr_scheduler, Path(checkpoint))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        em.load_weights(self._shards, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        em.load_weights(self._shards, cast(str, self.state.best_model_checkpoint))

    @property
    def _shards(self) -> PreTrainedModel:
        return cast(PreTrainedModel, self.model)

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        """The optimizer inside accelerate's wrapper."""
        return cast(torch.optim.Optimizer, getattr(self.optimizer, "optimizer", self.optimizer))

    @property
    def _output(self) -> Path:
        return Path(cast(str, self.args.output_dir))


class _Reached(BaseException):
    """Ends a micro-step at its call of the model. It is no Exception, which a loss might catch."""

    def __init__(self, call: dict[str, Any]) -> None:
        self.call = call


class _ByLayer:
    """Keeps the micro-steps of an optimizer step, and runs them together by layer.

    With what a stock step calls the model is known when it does. So each runs up to there first, and to its end when it
    is its turn to run the last layer.
    """

    def __init__(self, trainer: Trainer, numbers: patches.RowNumbers | None, order: dict[str, Any]) -> None:
        self.trainer, self.numbers, self.order = trainer, numbers, order
        self.kept: list[Callable[[], torch.Tensor]] = []

    def __call__(self, micro_step: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Keep a micro-step, and run all of them at the last one of an optimizer step.

        Returns:
            The sum of their losses, which the Trainer would sum; zero before.

        Collectives: every rank calls it; those of `em.accumulate_by_layer` and of the micro-steps.
        """
        trainer: Any = self.trainer
        # Micro-batches of an epoch that ends within a step are run in the next one, as their gradients would be kept.
        self.kept.append(partial(self._divided, trainer.current_gradient_accumulation_steps, micro_step))
        if not trainer.accelerator.sync_gradients:
            return torch.zeros((), device=trainer.args.device)
        steps, self.kept = self.kept, []
        calls = [self._call_of(step) for step in steps]
        batches = [self._batch_of(call) for call in calls]

        def run(number: int) -> torch.Tensor:
            return self._run(steps[number], calls[number], batches[number].get("row_numbers"))

        return torch.stack(em.accumulate_by_layer(trainer.model, batches, run, **self.order)).sum()

    def _divided(self, steps: int, micro_step: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run a micro-step whose loss is divided by the number of `steps` that it was loaded with."""
        trainer: Any = self.trainer
        now, trainer.current_gradient_accumulation_steps = trainer.current_gradient_accumulation_steps, steps
        try:
            return micro_step()
        finally:
            trainer.current_gradient_accumulation_steps = now

    def _call_of(self, micro_step: Callable[[], torch.Tensor]) -> dict[str, Any]:
        """Run a micro-step up to its call of the model, and return the call's arguments by name."""

        def leave(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
            raise _Reached(_named(model, args, kwargs))

        with self._before_forward(leave):
            try:
                micro_step()
            except _Reached as reached:
                return reached.call
        raise self._refused("does not call the model")

    def _batch_of(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments for the blocks, with numbers of the rows if there are adapters."""
        batch = {name: value for name, value in call.items() if name != "fused_lm_head"}  # of TRL's head
        return batch if self.numbers is None else self.numbers(cast(PreTrainedModel, self.trainer.model), (), batch)[1]

    def _run(
        self, micro_step: Callable[[], torch.Tensor], call: dict[str, Any], row_numbers_B: torch.Tensor | None
    ) -> torch.Tensor:
        """Run a whole micro-step; refuse one that does not call the model once, as it did before."""
        count = 0

        def check(model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            nonlocal count
            count += 1
            if count > 1:
                raise self._refused("calls the model more than once")
            if not _equal(_named(model, args, kwargs), call):
                raise self._refused("calls the model with other values when it runs again (random ones?)")
            return (), call if row_numbers_B is None else {**call, "row_numbers": row_numbers_B}

        with self._before_forward(check):
            loss = micro_step()
        if count != 1:
            raise self._refused("does not call the model when it runs again")
        return loss

    @contextmanager
    def _before_forward(self, hook: Callable[..., Any]) -> Iterator[None]:
        handle = cast(nn.Module, self.trainer.model).register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _refused(self, what: str) -> Exception:
        name = type(self.trainer).__name__
        return unsupported_argument("accumulate is by_layer", f"the loss of {name} {what}; leave it out")


def _named(model: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of the model by name."""
    return {**dict(zip(inspect.signature(model.forward).parameters, args, strict=False)), **kwargs}


def _equal(here: dict[str, Any], there: dict[str, Any]) -> bool:
    """Return whether two calls have equal arguments. The host waits for the device."""
    leaves, others = pytree.tree_leaves(here), pytree.tree_leaves(there)
    return here.keys() == there.keys() and all(
        a.shape == b.shape and torch.equal(a, b) if isinstance(a, torch.Tensor) else a is b or a == b
        for a, b in zip(leaves, others, strict=True)
    )


def _stock_arguments(of_trl: str | None, model: Any) -> Any:
    """Return the arguments that the stock class uses if `args` is not given."""
    if of_trl is None:
        return TrainingArguments(output_dir="tmp_trainer")
    kind = of_trl.removesuffix("Trainer")
    name = model if isinstance(model, str | Path) else getattr(getattr(model, "config", None), "name_or_path", "")
    return getattr(sys.modules["trl"], f"{kind}Config")(f"{Path(name).name}-{kind}")


def _lora(lora: Any, peft_config: Any) -> LoraConfig | None:
    """Return the requested adapters, from either argument, as our configuration."""
    if lora is not None and peft_config is not None:
        raise unsupported_argument("lora= and peft_config= are both given", "leave one out")
    requested = peft_config if lora is None else lora
    return requested if requested is None or isinstance(requested, LoraConfig) else em.lora_from_peft(requested)


def _by_name(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names."""
    signature = inspect.signature(function)
    given = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    return given


def _checkpointing(args: Any) -> dict[str, Any]:
    """Return `gradient_checkpointing` and its options as arguments of `em.load_model`."""
    if not getattr(args, "activation_checkpointing", args.gradient_checkpointing):
        return {}
    options = getattr(args, "activation_checkpointing_kwargs", args.gradient_checkpointing_kwargs) or {}
    refusals.refuse_checkpointing(options)
    layers = options.get("every_n_layers", 1)
    mode = "selective" if options.get("selective") else "full"
    return {"activation_checkpointing": mode, "checkpoint_layers": "all" if layers == 1 else layers}


def _sharded(model: Any, mesh: Any, args: Any, options: dict[str, Any]) -> PreTrainedModel:
    """Load or shard the model, and give it the attributes that the Trainer's code expects.

    Collectives: every rank calls it; those of `em.load_model` or `em.parallelize`.
    """
    bf16 = refusals.asks_for_bf16(args)
    if isinstance(model, str | Path):
        options["precision"] = options["precision"] or PrecisionConfig(compute="bfloat16" if bf16 else "float32")
        sharded = em.load_model(model, mesh, **options, **refusals.known_init_options(args), seed=args.seed)
    else:
        if bf16 and options["precision"] is None and model.dtype == torch.float32:
            options["precision"] = PrecisionConfig()
        sharded = em.parallelize(model, mesh, **options, seed=args.seed)
    patches.prepare(sharded)
    return sharded


def _reference(given: dict[str, Any], mesh: Any, options: dict[str, Any]) -> PreTrainedModel | None:
    """Return a frozen sharded reference: the one that the caller gave, or the model as it is before training.

    Returns:
        None if the policy can compute the reference: with its adapters off, or before training starts.

    Collectives: every rank calls it; those of `em.load_model` or `em.parallelize` for a reference.
    """
    source, args = given.get("ref_model"), given["args"]
    if source is None:
        if options["lora"] is not None or getattr(args, "precompute_ref_log_probs", False):
            return None
        model = given["model"]
        source = model if isinstance(model, str | Path) else copy.deepcopy(model)
    elif not isinstance(source, str | Path):
        refusals.refuse_in_memory(source, args, None)
    wanted = {"precision": options["precision"], "moe": options["moe"] and options["moe"].unplaced, "lora": None}
    return patches.freeze(_sharded(source, mesh, args, wanted))
