"""What a run minimises, and which other keys go with it. Imports no torch."""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_serializer, model_validator

from expertmesh.config.base import Section, refuse
from expertmesh.config.data import DataConfig
from expertmesh.config.sections import MAX_FACTOR, LoraConfig


class ObjectiveConfig(Section):
    """What an optimizer step minimises."""

    section: ClassVar[str] = "objective"

    name: Literal["sft", "dpo"] = "sft"
    """Cross-entropy of target tokens (sft), or the preference loss of pairs of responses (dpo, arXiv 2305.18290), whose
    data have the format preference; batch sizes then count pairs."""
    beta: float = Field(default=0.1, gt=0, le=MAX_FACTOR)
    """Factor of dpo's differences of log-probabilities: the larger, the closer the model stays to the reference,
    which is the model before its first step; not for sft."""

    @model_validator(mode="after")
    def _combine(self) -> Self:
        if self.name == "sft" and "beta" in self.model_fields_set:
            refuse("objective.beta does nothing with objective.name sft; remove it or use dpo")
        return self

    @model_serializer(mode="wrap")
    def _without_what_does_nothing(self, serialize: Callable[[Self], dict[str, Any]]) -> dict[str, Any]:
        return {key: value for key, value in serialize(self).items() if self.name == "dpo" or key != "beta"}


def eval_figures(objective: ObjectiveConfig, data: DataConfig) -> list[str]:
    """Return what an evaluation reports: keys of metrics.jsonl."""
    of_set = ["loss", "token_accuracy"]
    if objective.name == "dpo":
        of_set = ["loss", *(f"rewards/{name}" for name in ("chosen", "rejected", "accuracies", "margins"))]
    sets = [name for name in data.eval_sets() if name]
    return [f"eval_{prefix}{figure}" for prefix in ("", *(f"{name}_" for name in sets)) for figure in of_set]


def objective_conflicts(objective: ObjectiveConfig, data: DataConfig, lora: LoraConfig | None) -> Iterator[str]:
    """Yield what an objective cannot go with, as sentences that begin with the key to change."""
    named = [("data.format", data.format)]
    for section, sources in (("train", data.train), ("eval", data.eval)):
        named += [(f"data.{section}.{place}.format", source.format) for place, source in enumerate(sources)]
    for key, name in named:
        if name != "auto" and (name == "preference") != (objective.name == "dpo"):
            wanted = "preference" if objective.name == "dpo" else "another format, or objective.name to dpo"
            yield f"{key} is {name}, but objective.name is {objective.name}; set {key} to {wanted}"
    if objective.name != "dpo":
        return
    if data.packing:
        yield (
            "data.packing is true, but objective dpo compares the two responses of a pair, each in a row of its own; "
            "set data.packing to false"
        )
    if data.loss_on != "assistant":
        yield (
            f"data.loss_on is {data.loss_on}, but with objective dpo a response is all that follows the prompt; remove "
            "data.loss_on"
        )
    if data.thinking == "every_turn":
        yield "data.thinking every_turn does nothing with objective dpo; set data.thinking to auto, drop or keep_last"
    if lora is not None and lora.dropout:
        yield (
            f"lora.dropout is {lora.dropout}, but objective dpo compares the model with a reference without dropout; "
            "set lora.dropout to 0.0"
        )
