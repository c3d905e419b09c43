"""Name what a run minimises, and refuse keys that do not go with it. Imports no torch.

`OBJECTIVES` has the facts of each objective; code that needs one reads it there and never compares names.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from expertmesh.config.base import Name, Section, refuse
from expertmesh.config.data import DataConfig, DataFormat
from expertmesh.config.sections import MAX_FACTOR, LoraConfig, TrainConfig

ObjectiveName = Literal["sft", "dpo", "simpo", "orpo", "kto", "distill", "reward"]
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of an objective that a run needs before it trains."""

    keys: tuple[str, ...] = ()
    """The keys of section objective that it takes beside its name."""
    format: DataFormat | None = "preference"
    """The format of its rows, whose loss is of responses, each in a row of its own; None for those of sft."""
    at_reference: tuple[str, float] | None = None
    """The loss of a model that equals its reference, in words and as a number; None if there is no reference."""
    rewards: bool = False
    """True if the model is a sequence classifier that gives each row a reward, and no language model."""
    evaluated: tuple[str, ...] = REWARDS
    """The figures of an evaluation beside the loss."""


OBJECTIVES: Mapping[ObjectiveName, Facts] = {
    "sft": Facts(format=None, evaluated=("token_accuracy",)),
    "dpo": Facts(("beta",), at_reference=("ln 2", math.log(2))),
    "simpo": Facts(("beta", "gamma")),
    "orpo": Facts(("beta",)),
    "kto": Facts(
        ("beta", "desirable_weight", "undesirable_weight"),
        format="unpaired_preference",
        at_reference=("1/2", 0.5),
        evaluated=(*REWARDS[:2], REWARDS[3], "kl"),
    ),
    "distill": Facts(("teacher", "temperature", "kl", "sft_weight"), format=None, evaluated=()),
    "reward": Facts(rewards=True),
}
_OF_RESPONSES = {facts.format for facts in OBJECTIVES.values() if facts.format is not None}


class ObjectiveConfig(Section):
    """The loss that an optimizer step minimises."""

    section: ClassVar[str] = "objective"

    name: ObjectiveName = "sft"
    """Cross-entropy of target tokens (sft); a loss of pairs of responses (format preference; batch sizes count pairs):
    dpo (arXiv 2305.18290), simpo (2405.14734), orpo (2403.07691) or reward (a reward model); of labelled responses
    (unpaired_preference): kto (2402.01306). distill takes sft's rows and learns from a teacher."""
    beta: float = Field(default=0.1, gt=0, le=MAX_FACTOR)
    """Factor of log-probabilities in dpo, kto (the larger, the closer to the reference: the model before its first
    step) and simpo, of the odds ratio's loss in orpo."""
    gamma: float = Field(default=0.5, ge=0, le=MAX_FACTOR)
    """Reward by which simpo wants a chosen response above the rejected one; for simpo alone."""
    desirable_weight: float = Field(default=1.0, gt=0, le=MAX_FACTOR)
    """Factor of desirable responses' losses in kto."""
    undesirable_weight: float = Field(default=1.0, gt=0, le=MAX_FACTOR)
    """The same of the others."""
    teacher: Name | None = None
    """The model that distill learns from, frozen, of the same vocabulary; named as model.name_or_path."""
    temperature: float = Field(default=1.0, gt=0, le=MAX_FACTOR)
    """Divisor of both models' logits in distill."""
    kl: Literal["forward", "reverse"] = "forward"
    """KL(teacher || model) or KL(model || teacher) in distill."""
    sft_weight: float = Field(default=0.0, ge=0, le=MAX_FACTOR)
    """Factor of the cross-entropy that distill adds."""

    def idle(self) -> dict[str, str]:
        users = {key: [n for n, facts in OBJECTIVES.items() if key in facts.keys] for key in type(self).model_fields}
        others = (key for key in users if key not in ("name", *self.facts.keys))
        return {key: f"with objective.name {self.name}; remove it or use {_either(users[key])}" for key in others}

    @model_validator(mode="after")
    def _combine(self) -> Self:
        if "teacher" in self.facts.keys and self.teacher is None:
            refuse(f"objective.name is {self.name}, but objective.teacher is not set; name the model to learn from")
        return self

    @property
    def facts(self) -> Facts:
        return OBJECTIVES[self.name]

    @property
    def options(self) -> dict[str, Any]:
        """The values of the keys that it takes beside its name."""
        return {key: getattr(self, key) for key in self.facts.keys}

    @property
    def pairs(self) -> bool:
        """True if a row is a preference, of two sequences."""
        return self.facts.format == "preference"

    @property
    def judged(self) -> bool:
        """True if a row is one response with a label."""
        return self.facts.format == "unpaired_preference"

    @property
    def of_responses(self) -> bool:
        """True if its loss is of responses, each in a row of its own, and not of tokens."""
        return self.facts.format is not None

    @property
    def sequences(self) -> int:
        """Sequences of a row."""
        return 2 if self.pairs else 1

    @property
    def reference(self) -> bool:
        """True if it compares the model with the model before the first step."""
        return self.facts.at_reference is not None

    @property
    def at_reference(self) -> tuple[str, float] | None:
        """The loss of a model that equals its reference; None also if it depends on how many rows are desirable."""
        return self.facts.at_reference if self.desirable_weight == self.undesirable_weight == 1.0 else None


def objectives_of(format_name: str) -> str:
    """Return the names of the objectives that train on rows of that format, as one phrase."""
    wanted = format_name if format_name in _OF_RESPONSES else None
    return _either([name for name, facts in OBJECTIVES.items() if facts.format == wanted])


def takes_responses(name: object) -> bool:
    """Return whether `name`, as a user wrote it, is an objective whose loss is of responses."""
    return any(facts.format is not None for known, facts in OBJECTIVES.items() if known == name)


def _either(names: list[ObjectiveName]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def eval_figures(objective: ObjectiveConfig, data: DataConfig) -> list[str]:
    """Return what an evaluation reports: keys of metrics.jsonl."""
    of_set = ["loss", *objective.facts.evaluated]
    sets = [name for name in data.eval_sets() if name]
    return [f"eval_{prefix}{figure}" for prefix in ("", *(f"{name}_" for name in sets)) for figure in of_set]


def objective_conflicts(
    objective: ObjectiveConfig, data: DataConfig, lora: LoraConfig | None, train: TrainConfig
) -> Iterator[str]:
    """Yield what an objective cannot go with, as sentences that begin with the key to change."""
    chosen, own, unit = objective.name, objective.facts.format, "pairs" if objective.pairs else "rows"
    named = [("data.format", data.format)]
    for section, sources in (("train", data.train), ("eval", data.eval)):
        named += [(f"data.{section}.{place}.format", source.format) for place, source in enumerate(sources)]
    for key, name in named:
        if name not in ("auto", own) and (own is not None or name in _OF_RESPONSES):
            wanted = own or f"another format, or objective.name to {objectives_of(name)}"
            yield f"{key} is {name}, but objective.name is {chosen}; set {key} to {wanted}"
    if not objective.of_responses:
        return
    if data.packing:
        yield (
            f"data.packing is true, but objective {chosen} compares responses, each in a row of its own; set "
            "data.packing to false"
        )
    if data.loss_on != "assistant":
        yield (
            f"data.loss_on is {data.loss_on}, but with objective {chosen} a response is all that follows the prompt; "
            "remove data.loss_on"
        )
    if data.thinking == "every_turn":
        yield (
            f"data.thinking every_turn does nothing with objective {chosen}; set data.thinking to auto, drop or "
            "keep_last"
        )
    if data.stream:
        why = f"needs all {unit} before the first step, for their reference"
        if not objective.reference:
            why = "takes its rows in twos, which a stream would shuffle apart"
        yield f"data.stream is true, but objective {chosen} {why}; set data.stream to false"
    if objective.judged and train.global_batch_size == 1:
        yield (
            f"train.global_batch_size is 1, but objective {chosen} needs the completion of another row of each step; "
            "set train.global_batch_size to 2 or more"
        )
    if objective.reference and lora is not None and lora.dropout:
        yield (
            f"lora.dropout is {lora.dropout}, but objective {chosen} compares the model with a reference without "
            "dropout; set lora.dropout to 0.0"
        )
