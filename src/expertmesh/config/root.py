"""Define the whole configuration: all sections together, the rules that span several of them, and the JSON schema.

`expertmesh schema > schema/expertmesh.schema.json` writes the schema, for completion and checks in editors. It says
less than `load_config` checks: rules between keys cannot be expressed in it.
"""

import json
from collections.abc import Iterator
from typing import Any, Self

from pydantic import model_validator

from expertmesh.config.base import Name, Section, refuse
from expertmesh.config.data import DataConfig, EvalConfig
from expertmesh.config.objective import ObjectiveConfig, eval_figures, objective_conflicts, takes_responses
from expertmesh.config.output import CheckpointConfig, DistributedConfig, LogConfig, SaveConfig
from expertmesh.config.sections import (
    LoraConfig,
    ModelConfig,
    MoeConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    ScheduleConfig,
    TrainConfig,
)

_RATE_OF_ADAPTERS = 1e-4


def problems_of_random_base(from_config: bool, lora: LoraConfig | None) -> Iterator[str]:
    """Yield a sentence if adapters are to train beside a base with random weights."""
    if from_config and lora is not None:
        yield (
            "model.from_config is true, but lora trains adapters alone, beside weights that would stay random; "
            "remove one of the two"
        )


def problems_of_frozen(precision: PrecisionConfig, lora: LoraConfig | None) -> Iterator[str]:
    """Yield a sentence if weights are to stay packed in a model that trains all of them."""
    if precision.frozen is not None and lora is None:
        yield (
            f"precision.frozen is {precision.frozen}, but without lora nothing is frozen; add lora or set "
            "precision.frozen to null"
        )


class Config(Section):
    """Everything `expertmesh train` needs to know. Each section says itself what it is about."""

    model: ModelConfig
    precision: PrecisionConfig = PrecisionConfig()
    data: DataConfig
    eval: EvalConfig = EvalConfig()
    lora: LoraConfig | None = None
    """Low-rank adapters on a frozen model; null for full fine-tuning."""
    objective: ObjectiveConfig = ObjectiveConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = ParallelConfig()
    moe: MoeConfig = MoeConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    save: SaveConfig = SaveConfig()
    distributed: DistributedConfig = DistributedConfig()
    log: LogConfig = LogConfig()
    output_dir: Name
    """Directory of the results; created if it does not exist."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_by_others(cls, values: Any) -> Any:
        """Set defaults that another section decides, where they are not given.

        LoRA gets a higher learning rate, as adapters start at zero; preference pairs keep the low one. Responses are
        not packed, as each is a row of its own.
        """
        if not isinstance(values, dict):
            return values
        objective = values.get("objective")
        name = objective.get("name") if isinstance(objective, dict) else getattr(objective, "name", None)
        if values.get("lora") is not None and name in (None, "sft"):
            values = _with_default(values, "optim", "learning_rate", _RATE_OF_ADAPTERS)
        return _with_default(values, "data", "packing", False) if takes_responses(name) and "data" in values else values

    @model_validator(mode="after")
    def _combine(self) -> Self:
        problems = list(objective_conflicts(self.objective, self.data, self.lora, self.train))
        if self.train.eval_every_steps is not None and not self.data.eval:
            problems.append(
                f"train.eval_every_steps is {self.train.eval_every_steps}, but data.eval is empty; name data "
                "there or set train.eval_every_steps to null"
            )
        if self.eval.samples and not self.data.eval:
            problems.append(
                f"eval.samples is {self.eval.samples}, but data.eval is empty; name data there or set eval.samples to 0"
            )
        problems += self._model_problems()
        problems += self._stream_problems()
        problems += self._figure_problems()
        if self.objective.teacher is None:
            problems += problems_of_frozen(self.precision, self.lora)
        if self.train.deterministic and self.moe.dispatch == "deepep":
            problems.append(
                "train.deterministic is true, but moe.dispatch is deepep, which does not run under torch's "
                "deterministic algorithms; set moe.dispatch to auto"
            )
        if self.optim.stochastic_rounding and self.precision.params != "bfloat16":
            problems.append(
                f"optim.stochastic_rounding is true, but precision.params is {self.precision.params}, which is not "
                "rounded; set precision.params to bfloat16 or optim.stochastic_rounding to false"
            )
        if self.objective.teacher is not None and self.moe.dispatch == "deepep":
            problems.append(
                "moe.dispatch is deepep, whose buffers two models on a device have not been proven to share, but "
                f"objective {self.objective.name} has a teacher; set moe.dispatch to auto"
            )
        if self.lora is not None and self.save.dtype != "auto":
            problems.append(
                f"save.dtype is {self.save.dtype}, but lora is set: adapters are written in precision.params; remove "
                "save.dtype, and give --dtype to merge or export"
            )
        refuse(*problems)
        return self

    @property
    def trained_precision(self) -> PrecisionConfig:
        """The precision of the model that trains: without adapters nothing of it is frozen, but a teacher may be."""
        return self.precision if self.lora is not None else self.precision.model_copy(update={"frozen": None})

    @property
    def weights_seed(self) -> int | None:
        """The seed of random first weights; None if they are read from files."""
        return self.train.seed if self.model.from_config else None

    def _model_problems(self) -> Iterator[str]:
        yield from problems_of_random_base(self.model.from_config, self.lora)
        if self.model.vision == "train" and self.lora is not None:
            yield ("model.vision is train, but lora trains adapters, whose files have no tower; remove one of the two")
        if self.model.attention == "flash_attention_2" and self.precision.compute != "bfloat16":
            yield (
                f"model.attention is flash_attention_2, which cannot compute in {self.precision.compute}; "
                "set precision.compute to bfloat16 or model.attention to sdpa"
            )

    def _stream_problems(self) -> Iterator[str]:
        if not self.data.stream:
            return
        if self.train.max_steps is None:
            yield "data.stream is true, and a stream has no end; set train.max_steps"
        if self.train.num_epochs > 1:
            epochs = self.train.num_epochs
            yield f"train.num_epochs is {epochs}, but a stream begins again until train.max_steps; remove it"

    def _figure_problems(self) -> Iterator[str]:
        if self.eval.samples and self.objective.facts.rewards:
            yield f"eval.samples is {self.eval.samples}, but a reward model writes nothing; set eval.samples to 0"
        stop, known = self.train.early_stop, eval_figures(self.objective, self.data)
        figures = {"checkpoint.keep_best": self.checkpoint.keep_best}
        figures["train.early_stop.figure"] = None if stop is None else stop.figure
        for key, figure in figures.items():
            if figure is None:
                continue
            if not self.data.eval or self.train.eval_every_steps is None:
                yield (
                    f"{key} is {figure}, but nothing is evaluated on the way; set data.eval and train.eval_every_steps"
                )
            elif figure not in known:
                yield f"{key} is {figure}, which is no figure of these evaluations; choose from {', '.join(known)}"


def _with_default(values: dict[str, Any], section: str, key: str, default: Any) -> dict[str, Any]:
    """Return the values with a default for a key that their section, a dictionary or built already, does not give."""
    found = values.get(section, {})
    if isinstance(found, dict) and key not in found:
        return {**values, section: {**found, key: default}}
    if isinstance(found, Section) and key not in found.model_fields_set:
        return {**values, section: found.model_copy(update={key: default})}
    return values


DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """Return the schema as plain JSON values."""
    return {"$schema": DIALECT, **Config.model_json_schema(mode="validation")}


def schema_text() -> str:
    """Return the schema as it stands in the file."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"
