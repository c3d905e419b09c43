"""Build a model on meta under a configuration, and find out how it will be sharded or why it cannot be trained so.

Preflight, check, verify and the forecast use it. No weights, no data, no communication.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from expertmesh.adapters.start import check_adapter
from expertmesh.anatomy import Anatomy, describe
from expertmesh.config import Config
from expertmesh.config.errors import InputError
from expertmesh.config.sections import Accumulate, KeepInputs, TrainConfig
from expertmesh.data.loader import accumulation_of
from expertmesh.distributed.layout import Layout, ep_reason, resolve_layout
from expertmesh.introspection.attention import packing_refusal
from expertmesh.io.terminal import plural
from expertmesh.model import ModelOptions, build_model, plan_model, vision_parameters
from expertmesh.parallel.checkpointing import checkpointing_mode
from expertmesh.parallel.packing import cannot_pack
from expertmesh.parallel.pipeline import refuse_by_layer
from expertmesh.parallel.shard_plan import ShardOptions, ShardPlan, expert_traffic
from expertmesh.step.forward_backward import Order
from expertmesh.step.pipeline_schedule import interleaves
from expertmesh.training.objective import RunObjective, Teacher


@dataclass(frozen=True, slots=True)
class Checked:
    """A model on meta with its adapters, and how it will be sharded; training continues with it."""

    model_config: PreTrainedConfig
    directory: Path
    model: PreTrainedModel
    plan: ShardPlan
    order: Order
    """The order of the micro-batches of a step."""
    order_reason: str
    """Words of the plan about the choice of the order."""
    layout_reason: str | None
    """Words of the plan about the choice of ep: `distributed.layout.ep_reason`."""
    objective: RunObjective
    weights_seed: int | None
    """The seed of random first weights; None if they are read from files."""
    placement: str | None = None
    """Words of the plan about the places of experts; None for the model's order."""
    expected_load: float | None = None
    """The tokens of the busiest EP rank over the mean, of the worst layer, by the load that experts were placed by."""
    checkpoint_bytes: int = 0
    """Bytes of one checkpoint; 0 without any, or before they were requested."""

    def in_order(self, order: tuple[Order, str] | None) -> "Checked":
        """Return it with another order of micro-batches and the reason for that; None changes nothing."""
        return self if order is None else replace(self, order=order[0], order_reason=order[1])

    def order_line(self, accumulation: int) -> str:
        """Return the plan's words about the order of so many micro-batches of a step."""
        if not self.order.by_layer:
            return f"by micro-batch: {self.order_reason}"
        rounds = self.order.rounds(accumulation)
        size, where = -(-accumulation // rounds), ", inputs in host memory" if self.order.inputs_on_host else ""
        return f"by layer, {plural(rounds, 'round')} of up to {size}{where}: {self.order_reason}"

    @property
    def anatomy(self) -> Anatomy:
        return self.plan.anatomy

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    @property
    def vocab_size(self) -> int:
        """The number of embeddings of the model."""
        return int(self.model_config.get_text_config().vocab_size)


def check_model(
    config: Config,
    model_config: PreTrainedConfig,
    directory: Path,
    world_size: int,
    ranks_per_node: int | None = None,
    *,
    weights: bool = True,
) -> Checked:
    """Build the model on meta and plan its shards, and those of a teacher.

    Args:
        weights: Whether the weights of a teacher on the hub are downloaded.

    Raises:
        InputError: `config` cannot be done with it.
    """
    refuse_length("data.max_length", config.data.max_length, model_config)
    if config.objective.reference:
        _refuse_noise(config.objective.name, model_config)
    model = build_model(model_config, directory, ModelOptions.of(config))
    if config.model.vision == "train" and not vision_parameters(model):
        raise InputError(
            f"model.vision is train, and {model_config.model_type} has no tower; remove it", key="config.combination"
        )
    experts = describe(model).num_experts
    options, rows = shard_options(config), config.train.micro_batch_size * config.objective.sequences
    traffic = expert_traffic(model, options, rows * config.data.max_length)
    layout = resolve_layout(config.parallel, world_size, experts, ranks_per_node, traffic)
    accumulation = accumulation_of(config.train.global_batch_size, config.train.micro_batch_size, layout.data_ranks)
    _refuse_interleaving(layout, accumulation)
    teacher = Teacher.of(config, model_config, layout, weights=weights)
    if config.data.packing:
        _refuse_packing(config, model)
    if teacher is not None:
        _refuse_rows(config, teacher)
    check_adapter(model)
    plan = plan_model(model, layout, options)
    order, why = choose_order(
        OrderWish.of(config.train),
        layout,
        accumulation,
        recomputes_all=options.activation_checkpointing == "full" and options.checkpoint_layers == "all",
        refuse=partial(refuse_by_layer, plan, layout.pp),
    )
    reason = ep_reason(config.parallel, layout, traffic, ranks_per_node)
    objective = RunObjective.of(config, teacher)
    placement = None if config.moe.placement == "contiguous" else f"by {config.moe.placement}"
    seed = config.weights_seed
    return Checked(model_config, directory, model, plan, order, why, reason, objective, seed, placement)


def shard_options(config: Config) -> ShardOptions:
    """Return what `config` says about sharding, beside the layout."""
    train, mode = config.train, checkpointing_mode(config.train.activation_checkpointing)
    return ShardOptions(config.trained_precision, config.moe, mode, train.checkpoint_layers, train.compile)


class OrderWish(NamedTuple):
    """The keys of section `train` about the order of micro-batches."""

    accumulate: Accumulate = "auto"
    round: int | None = None
    """None for auto."""
    keep_inputs: KeepInputs = "auto"

    @classmethod
    def of(cls, config: TrainConfig) -> Self:
        return cls(config.accumulate, None if config.round == "auto" else config.round, config.keep_inputs)


def choose_order(
    wish: OrderWish,
    layout: Layout,
    accumulation: int,
    *,
    recomputes_all: bool,
    refuse: Callable[[], object],
) -> tuple[Order, str]:
    """Return the order of the micro-batches of a step, and the reason in words. `train` and the planner use it.

    By layer all micro-batches are a round, and inputs stay on the device, unless the wish says otherwise. Memory is for
    `order_that_fits`.

    Args:
        accumulation: Micro-batches of a step.
        recomputes_all: Whether every block is recomputed in full.
        refuse: Raises `InputError` if the model's blocks cannot run one by one.

    Raises:
        InputError: `train.accumulate` is by_layer, and the model's blocks cannot run one by one.
    """
    if wish.accumulate == "by_layer":
        refuse()
        if accumulation == 1:
            return Order(), "a step has one micro-batch, for which by layer is the same"
        return Order(by_layer=True, round=wish.round, inputs_on_host=wish.keep_inputs == "host"), "as set"
    if wish.accumulate == "by_micro_batch":
        return Order(), "as set"
    if accumulation == 1:
        return Order(), "a step has one micro-batch"
    if layout.pp > 1:
        return Order(), "by the schedule of its stages"
    if not recomputes_all:
        return Order(), "by layer would keep the activations of all micro-batches that are not recomputed"
    if layout.world_size == 1 and layout.offload == "none":
        return Order(), "one rank gathers nothing"
    try:
        refuse()
    except InputError as refusal:
        return Order(), f"its blocks cannot run one by one ({refusal})"
    return Order(by_layer=True), f"a block is gathered twice a round, not {2 * accumulation} times a step"


def order_that_fits(
    wish: OrderWish,
    chosen: tuple[Order, str],
    accumulation: int,
    fits: Callable[[Order], bool],
    *,
    may_use_host: bool,
) -> tuple[Order, str]:
    """Return what `choose_order` has chosen, or what is next to it if a step is predicted not to fit.

    First the inputs of blocks wait in host memory, then rounds have fewer micro-batches; what the wish says stays.

    Args:
        accumulation: Micro-batches of a step.
        fits: Whether a step in an order is predicted to fit.
        may_use_host: Whether `keep_inputs: auto` may take host memory here.
    """
    order, why = chosen
    if not order.by_layer or accumulation == 1 or fits(order):
        return chosen
    on_host = replace(order, inputs_on_host=True)
    places = [order, on_host] if wish.keep_inputs == "auto" and may_use_host else [order]
    if on_host in places and fits(on_host):
        return on_host, f"{why}; on the device they are predicted not to fit"
    if order.round is not None:
        return chosen
    # In several rounds a larger one needs more. Rounds are of nearly equal size, so not every size makes a difference.
    sizes = sorted({-(-accumulation // rounds) for rounds in range(2, accumulation)}, reverse=True)
    if sizes and any(fits(replace(place, round=sizes[-1])) for place in places):
        smaller = (replace(place, round=size) for size in sizes for place in places)
        return next(filter(fits, smaller)), f"{why}; more of a round are predicted not to fit"
    if wish.accumulate == "auto":
        return Order(), "by layer, two micro-batches of a round are predicted not to fit"
    return replace(order, round=1), f"{why}; more of a round are predicted not to fit"


def longest(model_config: PreTrainedConfig) -> int | None:
    """Return how many positions a model is made for, if its config has it."""
    most = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    return most if isinstance(most, int) else None


def refuse_length(key: str, length: int, model_config: PreTrainedConfig) -> None:
    """Refuse rows with more positions than the model is made for."""
    most = longest(model_config)
    if most is not None and length > most:
        raise InputError(
            f"{key} {length}: {model_config.model_type} has max_position_embeddings {most}; set {key} to at most "
            f"{most}, or extend the model's positions in its config.json first",
            key="model.max-positions",
        )


def _refuse_interleaving(layout: Layout, accumulation: int) -> None:
    """Refuse a schedule that only some steps could run, rather than replace it in all of them."""
    if layout.pp_virtual_stages > 1 and not interleaves(accumulation, layout.pp):
        rounds = accumulation // layout.pp
        raise InputError(
            f"parallel.pp_schedule: interleaved_1f1b runs micro-batches in {rounds} equal rounds, and the "
            f"{accumulation} of a step (train.global_batch_size over data ranks and train.micro_batch_size) are no "
            f"multiple of {rounds}; change train.global_batch_size so that they are a multiple of {layout.pp}, or set "
            "parallel.pp_virtual_stages to 1",
            key="layout.pp-interleaving-rounds",
        )


def _refuse_noise(objective: str, model_config: PreTrainedConfig) -> None:
    """Refuse randomness in training alone: the reference would not be the model from which training starts."""
    for key, value in model_config.get_text_config().to_dict().items():
        if any(word in key for word in ("dropout", "pdrop", "jitter")) and isinstance(value, float) and value:
            raise InputError(
                f"objective.name {objective}: {model_config.model_type} has {key} {value}, noise in training that its "
                f"reference does not have; set {key} to 0.0 in the model's config.json",
                key="model.noise-in-training",
            )


def _refuse_rows(config: Config, teacher: Teacher) -> None:
    """Refuse rows that the teacher cannot read."""
    try:
        refuse_length("data.max_length", config.data.max_length, teacher.model_config)
        if config.data.packing:
            _refuse_packing(config, teacher.model)
    except InputError as error:
        raise InputError(f"objective.teacher {config.objective.teacher}: {error}", key=error.key) from error


def _refuse_packing(config: Config, model: nn.Module) -> None:
    if reason := packing_refusal(model):
        raise cannot_pack(reason)
    if config.model.attention == "flash_attention_2" and config.train.micro_batch_size > 1:
        # transformers derives sample borders from position ids only for a batch of one row.
        raise InputError(
            f"train.micro_batch_size {config.train.micro_batch_size}: flash_attention_2 separates packed samples only "
            "at train.micro_batch_size 1; set that, or model.attention to sdpa",
            key="data.packing-micro-batch",
        )
