"""Define the sections of the configuration file: one typed, frozen class each.

The docstring under a field is its documentation and its description in the JSON schema. Nothing here imports torch,
reads the model or knows the number of ranks: what depends on those is checked where they are known.
"""

import math
import re
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from expertmesh.config.base import Listed, Mapped, Name, Plain, Section, is_named, pattern_problem, refuse
from expertmesh.config.data import EarlyStopConfig
from expertmesh.config.errors import InputError

# Beyond what anybody trains with: what is larger is a slip, and would be noticed late.
MAX_RANKS, MAX_SECONDS, MAX_RANK, MAX_ALPHA, MAX_FACTOR = 2**20, 366 * 86400, 2**16, 1e6, 1e6
PositiveInt = Annotated[int, Field(ge=1, le=2**31 - 1)]
Ranks = Annotated[int, Field(ge=1, le=MAX_RANKS)]
Seconds = Annotated[int, Field(ge=1, le=MAX_SECONDS)]
Sequences = Annotated[int, Field(ge=1, le=2**24)]
Dtype = Literal["float32", "bfloat16", "float64"]
OptimizerName = Literal["adamw", "adamw_8bit", "muon", "sgd"]
Accumulate = Literal["auto", "by_micro_batch", "by_layer"]
KeepInputs = Literal["auto", "device", "host"]
BYTES_OF = {"bfloat16": 2, "float32": 4, "float64": 8}


class ModelConfig(Section):
    """The model to train."""

    section: ClassVar[str] = "model"

    name_or_path: Name
    """Hub id, ModelScope id (ms://...), directory or object storage (s3://...) of the model and its tokenizer."""
    revision: Plain | None = None
    """Branch, tag or commit on the hub; null takes the default branch."""
    from_config: bool = False
    """Random weights by train.seed, for a model with a config and no weights."""
    trust_remote_code: bool = False
    """Let the model's own Python code run."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flex_attention"] = "auto"
    """Attention implementation of transformers; auto is its own choice."""
    vision: Literal["frozen", "train"] = "frozen"
    """Towers of images and projectors, which text alone never trains."""

    def idle(self) -> dict[str, str]:
        # A run that was started before these keys existed has to be the same run.
        off = {"from_config": False, "vision": "frozen"}
        return {key: "" for key, value in off.items() if getattr(self, key) == value}


class PrecisionConfig(Section):
    """Dtypes of training. float64, for proofs, must be given three times."""

    section: ClassVar[str] = "precision"

    params: Dtype = "float32"
    """Dtype of the master weights."""
    compute: Dtype = "bfloat16"
    """Dtype of forward and backward; not wider than params."""
    reduce: Dtype = "float32"
    """Dtype of gradient reductions."""
    frozen: Literal["float8", "nf4", "mxfp4", "nvfp4", "as_published"] | None = None
    """Frozen experts and linear layers, under LoRA or of a teacher, in 8 or 4 bits; null: in precision.compute."""

    @field_validator("params", "compute", "reduce", mode="before")
    @classmethod
    def _no_float16(cls, value: object) -> object:
        if value in ("float16", "fp16", "half"):
            raise ValueError("float16 needs loss scaling, which is not supported; use bfloat16 or float32")
        return value

    @model_validator(mode="after")
    def _combine(self) -> Self:
        problems = []
        names = (self.params, self.compute, self.reduce)
        if "float64" in names and names != ("float64", "float64", "float64"):
            problems.append(
                f"precision.params, compute and reduce are {', '.join(names)}, but float64 cannot be mixed "
                "with other dtypes; set all three to float64"
            )
        elif BYTES_OF[self.compute] > BYTES_OF[self.params]:
            problems.append(
                f"precision.compute is {self.compute}, which is wider than precision.params ({self.params}); "
                f"set precision.params to {self.compute} or precision.compute to {self.params}"
            )
        refuse(*problems)
        return self


class LoraConfig(Section):
    """Low-rank adapters; the base weights are frozen and kept in precision.compute."""

    section: ClassVar[str] = "lora"
    _SAID_BY_ADAPTER: ClassVar[tuple[str, ...]] = (
        *("r", "expert_r", "alpha", "rank_pattern", "alpha_pattern", "targets", "exclude", "use_rslora", "init"),
        *("modules_to_save", "trainable_token_indices", "lora_bias"),
    )

    r: Annotated[int, Field(ge=1, le=MAX_RANK)] = 16
    """Rank of the adapters."""
    expert_r: Annotated[int, Field(ge=1, le=MAX_RANK)] | None = None
    """Rank of those on routed experts, of which each token passes top-k; null for r. An entry of rank_pattern wins."""
    alpha: float = Field(default=32.0, gt=0, le=MAX_ALPHA)
    """Each adapter is scaled by alpha / its own rank."""
    rank_pattern: Mapped[Annotated[int, Field(ge=1, le=MAX_RANK)]] = Field({}, validate_default=True)
    """Another r for some: regular expressions of ends of their names, as PEFT reads them."""
    alpha_pattern: Mapped[Annotated[float, Field(gt=0, le=MAX_ALPHA)]] = Field({}, validate_default=True)
    """Another alpha, in the same way."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the input of every adapter, in training only."""
    targets: Listed[Name] = Field(default=("attention", "experts"), min_length=1)
    """Modules that get adapters: attention, experts, shared_experts, dense_mlp, router, lm_head, all-linear (every
    linear layer but lm_head; no routed experts), or names of modules or parameters, with * for any text."""
    exclude: Listed[str] = ()
    """Modules among the targets that get none, by the same words."""
    modules_to_save: Listed[Name] = ()
    """Modules that train whole beside the adapters: the input embedding (embed_tokens), the head (lm_head)."""
    trainable_token_indices: Listed[Annotated[int, Field(ge=0)]] = ()
    """Tokens whose rows of the input embedding train beside the adapters."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r) (arXiv 2312.03732)."""
    lora_bias: bool = False
    """Give B a bias, which is added to the layer's: targets have to be linear layers with a bias."""
    init: Literal["default", "gaussian"] = "default"
    """Initialisation of A, as PEFT does it: uniform (Kaiming), or normal with deviation 1 / r. B starts at zero."""
    from_adapter: Plain | None = None
    """Directory of a PEFT adapter to continue from; it then says all but dropout."""

    def idle(self) -> dict[str, str]:
        why = "beside lora.from_adapter, whose adapter says it; remove one of the two"
        return {} if self.from_adapter is None else dict.fromkeys(self._SAID_BY_ADAPTER, why)

    @model_validator(mode="after")
    def _combine(self) -> Self:
        if len({*self.trainable_token_indices}) < len(self.trainable_token_indices):
            refuse("lora.trainable_token_indices has a token twice; leave one out")
        if self.lora_bias and self.init != "default":
            refuse(f"lora.lora_bias: PEFT has it with init default alone, not {self.init}; change one of the two")
        for key, patterns in (("rank_pattern", self.rank_pattern), ("alpha_pattern", self.alpha_pattern)):
            refuse(*(f"lora.{key}: {problem}" for pattern in patterns if (problem := pattern_problem(pattern))))
        return self

    @property
    def scaling(self) -> float:
        """The factor of an adapter's product."""
        return self.scaling_of(self.r, self.alpha)

    def scaling_of(self, r: int, alpha: float) -> float:
        """Return the same for an adapter of another `r` and `alpha`."""
        return alpha / (math.sqrt(r) if self.use_rslora else r)

    def of(self, name: str, *, of_experts: bool = False) -> tuple[int, float]:
        """Return r and alpha of the adapter on the module, or parameter, of this name.

        Args:
            of_experts: It holds routed experts.
        """
        default = self.expert_r if of_experts and self.expert_r is not None else self.r
        r = next((r for pattern, r in self.rank_pattern.items() if is_named(name, pattern)), default)
        alphas = (alpha for pattern, alpha in self.alpha_pattern.items() if is_named(name, pattern))
        return r, next(alphas, self.alpha)


class OptimConfig(Section):
    """The optimizer."""

    section: ClassVar[str] = "optim"

    name: OptimizerName = "adamw"
    """AdamW, AdamW with moments in 8 bits, Muon (for matrices; AdamW for all else), or SGD without momentum."""
    learning_rate: float = Field(default=1e-5, gt=0, le=MAX_FACTOR)
    """Peak learning rate, reached at the end of the warm-up; with lora and objective sft the default is 1e-4."""
    weight_decay: float = Field(default=0.0, ge=0, le=MAX_FACTOR)
    """Weight decay of every parameter: decoupled; L2 for sgd."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay rates of AdamW's two moments; not for sgd."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Decay rate of Muon's momentum (Nesterov's form); for muon alone."""
    eps: float = Field(default=1e-8, gt=0, le=1)
    """AdamW's denominator term; not for sgd."""
    stochastic_rounding: bool = False
    """Round by chance, so that small updates count on average; needs precision.params bfloat16; not for sgd."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Limit of the gradients' global 2-norm; null does not clip."""

    @field_validator("betas", mode="before")
    @classmethod
    def _as_tuple(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    def idle(self) -> dict[str, str]:
        idle = {} if self.name == "muon" else {"momentum": "muon"}
        idle |= dict.fromkeys(("betas", "eps", "stochastic_rounding"), "adamw") if self.name == "sgd" else {}
        return {key: f"with optim.name {self.name}; remove it or use {user}" for key, user in idle.items()}


class ScheduleConfig(Section):
    """The learning rate over optimizer steps."""

    section: ClassVar[str] = "schedule"

    _ONLY_FOR: ClassVar[dict[str, tuple[str, ...]]] = {
        "min_ratio": ("cosine", "linear", "wsd"),
        "decay_ratio": ("wsd",),
    }

    name: Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"] = "cosine"
    """Fall of the learning rate after the warm-up: cosine, linear, none, linear over the last steps alone (wsd), or
    with the inverse square root of the steps."""
    warmup_ratio: float = Field(default=0.03, ge=0, le=1)
    """Share of all steps with a linear rise from zero."""
    warmup_steps: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """The same as a number of steps, in place of warmup_ratio."""
    min_ratio: float = Field(default=0.0, ge=0, le=1)
    """Final rate of cosine, linear and wsd, as a share of the peak."""
    decay_ratio: float = Field(default=0.1, gt=0, le=1)
    """Share of all steps over which wsd falls."""

    def idle(self) -> dict[str, str]:
        idle = {
            key: f"with schedule.name {self.name}; remove it, or use {' or '.join(names)}"
            for key, names in self._ONLY_FOR.items()
            if self.name not in names
        }
        if self.warmup_steps is None:
            return idle | {"warmup_steps": ""}
        return idle | {"warmup_ratio": "with schedule.warmup_steps; remove one"}


class TrainConfig(Section):
    """Batches, steps and memory of the training loop."""

    section: ClassVar[str] = "train"

    global_batch_size: Sequences = 64
    """Sequences per optimizer step of the job; accumulation follows and is printed."""
    micro_batch_size: Sequences = 1
    """Sequences per forward pass on one data rank."""
    num_epochs: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """Passes over the training data."""
    max_steps: PositiveInt | None = None
    """Most optimizer steps; epochs may end before."""
    eval_every_steps: PositiveInt | None = None
    """Optimizer steps between evaluations; the last step has one too. null: only the last step."""
    early_stop: EarlyStopConfig | None = None
    """End the run before its last step when an evaluation's figure gets no better; null for never."""
    seed: int = Field(default=42, ge=0, lt=2**63)
    """Seed of everything random: shuffling and dropout."""
    activation_checkpointing: Literal["auto", "none", "selective", "full"] = "auto"
    """Part of a block that backward recomputes: all (full), or all but experts and fused attention (selective). auto is
    full on accelerators and none on a CPU."""
    checkpoint_layers: Literal["all"] | Annotated[int, Field(ge=2)] | Listed[Annotated[int, Field(ge=0)]] = "all"
    """Blocks that are recomputed, from 0: all, N for every Nth from the first on, or a list."""
    accumulate: Accumulate = "auto"
    """Order of micro-batches: each through the whole model, or all of a round through one block before the next. auto
    is by_layer where blocks are recomputed in full and gathered (printed)."""
    round: Literal["auto"] | PositiveInt = "auto"
    """Micro-batches of a round by layer, at most; auto takes all that are predicted to fit."""
    keep_inputs: KeepInputs = "auto"
    """Place where blocks' inputs wait for backward, by layer. auto is host where a round is else predicted not to
    fit."""
    compile: bool = False
    """Compile the dense parts of each block with torch.compile."""
    deterministic: bool = False
    """Take torch's deterministic algorithms: GPUs repeat a run bit for bit; an operation without one ends it."""

    @field_validator("checkpoint_layers", mode="after")
    @classmethod
    def _each_once(cls, value: object) -> object:
        if isinstance(value, tuple) and (not value or len(set(value)) < len(value)):
            raise ValueError("a list names at least one block, and none twice; give all, a number or another list")
        return value

    @model_validator(mode="after")
    def _combine(self) -> Self:
        if self.checkpoint_layers != "all" and self.activation_checkpointing not in ("selective", "full"):
            refuse(
                "train.checkpoint_layers does nothing with train.activation_checkpointing "
                f"{self.activation_checkpointing}; set that to selective or full"
            )
        for key in ("round", "keep_inputs"):
            if (value := getattr(self, key)) != "auto" and self.accumulate != "by_layer":
                refuse(
                    f"train.{key} is {value}, but does nothing with train.accumulate {self.accumulate}; set that to "
                    f"by_layer, or train.{key} to auto"
                )
        if self.global_batch_size % self.micro_batch_size:
            refuse(
                f"train.global_batch_size ({self.global_batch_size}) must be a multiple of "
                f"train.micro_batch_size ({self.micro_batch_size}); change one of them"
            )
        return self


def refuse_wrong_order(accumulate: str, round: int | None, keep_inputs: str) -> None:
    """Raise `InputError` for an order of micro-batches that the arguments of the Python interface do not have."""
    by_layer = accumulate == "by_layer"
    if not by_layer and accumulate != "by_micro_batch":
        wrong = f"accumulate is {accumulate!r}; set it to by_micro_batch or by_layer"
    elif round is not None and (not by_layer or round < 1):
        wrong = f"round is {round} with accumulate {accumulate}; give at least 1 with by_layer, or None"
    elif keep_inputs != "device" and (not by_layer or keep_inputs != "host"):
        wrong = f"keep_inputs is {keep_inputs!r} with accumulate {accumulate}; give device, or host with by_layer"
    else:
        return
    raise InputError(wrong, key="config.wrong-value")


class ParallelConfig(Section):
    """The layout of ranks. World size = pp × replicate × fsdp × cp × tp; efsdp = fsdp × cp × tp / ep."""

    section: ClassVar[str] = "parallel"

    ep: Ranks | Literal["auto"] = "auto"
    """Neighbouring ranks that hold all routed experts once; auto takes what moves least."""
    ep_across_nodes: bool = False
    """Allow groups of ep that cut nodes; auto never does."""
    fsdp: Ranks | Literal["auto"] = "auto"
    """Ranks over which parameters are sharded; auto takes all that the other axes leave."""
    replicate: Ranks = 1
    """Copies of the sharded model (hybrid sharding)."""
    tp: Ranks = 1
    """Ranks that split attention, dense MLPs and vocabulary (tensor parallelism)."""
    cp: Ranks = 1
    """Ranks that split each sequence (context parallelism, Ulysses)."""
    pp: Ranks = 1
    """Ranks that split the decoder's blocks into stages (pipeline parallelism)."""
    pp_schedule: Literal["auto", "gpipe", "1f1b", "interleaved_1f1b"] = "auto"
    """Order of micro-batches; auto is 1f1b, interleaved with virtual stages."""
    pp_virtual_stages: Ranks = 1
    """Stages of each pp rank; more than 1 need interleaved_1f1b."""
    offload: Literal["none", "experts"] = "none"
    """experts: packed experts stay in host memory and are copied to the device a layer ahead."""

    @field_validator("pp_schedule", mode="before")
    @classmethod
    def _no_zero_bubble(cls, value: object) -> object:
        name = re.sub(r"[^a-z0-9]", "", value.lower()) if isinstance(value, str) else ""
        if any(part in name for part in ("zerobubble", "zbv", "zb1p", "dualpipe")):
            raise ValueError(
                "zero-bubble schedules compute weight gradients apart from the rest of backward, where FSDP2 does not "
                "reduce them and the last stage silently gets none; use 1f1b or interleaved_1f1b"
            )
        return value

    @model_validator(mode="after")
    def _combine(self) -> Self:
        problems = []
        virtual = self.pp_virtual_stages
        if virtual > 1 and (self.pp == 1 or self.pp_schedule not in ("auto", "interleaved_1f1b")):
            what = "pp is 1" if self.pp == 1 else f"pp_schedule is {self.pp_schedule}"
            problems.append(f"parallel.pp_virtual_stages is {virtual}, but {what}; set parallel.pp_virtual_stages to 1")
        if self.pp_schedule == "interleaved_1f1b" and virtual == 1:
            problems.append(
                "parallel.pp_schedule is interleaved_1f1b, but each rank has one stage; set parallel.pp_virtual_stages "
                "to 2 or more"
            )
        ranks = math.prod(size for size in (self.pp, self.replicate, self.fsdp, self.cp, self.tp) if size != "auto")
        if ranks > MAX_RANKS:
            problems.append(f"parallel.pp × replicate × fsdp × cp × tp are {ranks:,} ranks, more than {MAX_RANKS:,}")
        if isinstance(self.ep, int) and isinstance(self.fsdp, int) and not problems:
            ranks = self.fsdp * self.cp * self.tp
            if ranks % self.ep:
                choices = [str(n) for n in range(1, ranks + 1) if ranks % n == 0]
                one_of = f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
                of = "parallel.fsdp" if ranks == self.fsdp else "parallel.fsdp × cp × tp"
                problems.append(
                    f"parallel.ep is {self.ep}, which does not divide {of} ({ranks}); "
                    f"set parallel.ep to auto or {one_of}, or parallel.fsdp to auto"
                )
        refuse(*problems)
        return self


class MoeConfig(Section):
    """Routers and routed experts."""

    section: ClassVar[str] = "moe"

    router: Literal["train", "frozen"] = "train"
    """Train router weights, or freeze them."""
    router_dtype: Literal["float32", "compute"] = "float32"
    """Dtype of routers under a narrower precision.compute, where the family's code can (printed)."""
    aux_loss_coef: Annotated[float, Field(ge=0, le=MAX_FACTOR)] | Literal["from_model"] = "from_model"
    """Factor of the load-balancing loss over a step's global batch; from_model takes the model's own (none unless its
    config has output_router_logits)."""
    z_loss_coef: float = Field(default=0.0, ge=0, le=MAX_FACTOR)
    """Factor of the router z-loss (arXiv 2202.08906)."""
    bias_update_rate: float = Field(default=0.0, ge=0, le=MAX_FACTOR)
    """Step of routers' correction biases after each optimizer step (arXiv 2408.15664)."""
    dispatch: Literal["auto", "all_to_all", "hierarchical", "deepep"] = "auto"
    """Transport of tokens to their experts; hierarchical: once to each node; deepep: by DeepEP's kernels."""
    placement: str = Field(default="contiguous", min_length=1)
    """Experts of each EP rank: contiguous; balanced by output_dir's expert_load.json, else by a calibration; or a file
    of `expertmesh plan --placement`."""
    replicas: int = Field(default=0, ge=0)
    """Copies of busy experts on each EP rank and layer, whose tokens they share; experts have to be frozen (lora)."""
    calibration_batches: int = Field(default=8, ge=1)
    """Micro-batches of each data rank in that calibration."""
    compute: Literal["auto", "grouped_mm", "loop"] = "auto"
    """Grouped matrix products, or expert after expert."""
    kernels: Literal["auto", "torch", "triton"] = "auto"
    """Kernels around the products: Triton's where a trial passes, or torch's."""

    @field_validator("dispatch", mode="before")
    @classmethod
    def _no_nccl_ep(cls, value: object) -> object:
        if isinstance(value, str) and re.sub(r"[^a-z]", "", value.lower()) == "ncclep":
            raise ValueError(
                "nccl.ep is not supported: it waits for the device whenever it dispatches into ordinary tensors, in "
                "backward, too, and ends the process at more tokens than it was told of; use deepep or hierarchical"
            )
        return value

    @property
    def unplaced(self) -> Self:
        """This section with the experts in the model's order, and no copies."""
        return self.model_copy(update={"placement": "contiguous", "replicas": 0})

    @model_validator(mode="after")
    def _combine(self) -> Self:
        if self.replicas and self.placement == "contiguous":
            refuse(
                f"moe.replicas is {self.replicas}, but moe.placement is contiguous; set moe.placement to balanced or a "
                "file with copies"
            )
        for key in ("aux_loss_coef", "z_loss_coef", "bias_update_rate") if self.router == "frozen" else ():
            if (value := getattr(self, key)) not in ("from_model", 0.0):
                refuse(f"moe.{key} is {value}, but moe.router is frozen; set moe.{key} to 0.0 or moe.router to train")
        return self
