"""Define the sections about what a run writes (checkpoints, the result, reports), and how long ranks wait.

Nothing here writes a file.
"""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from expertmesh.config.base import Listed, Name, Section, refuse
from expertmesh.config.sections import MAX_SECONDS, PositiveInt, Seconds

Changeable = Literal[
    "optim.learning_rate",
    "optim.weight_decay",
    "optim.betas",
    "optim.momentum",
    "optim.eps",
    "optim.max_grad_norm",
    "schedule",
    "lora.dropout",
    "moe.aux_loss_coef",
    "moe.z_loss_coef",
    "moe.bias_update_rate",
    "objective.beta",
    "objective.gamma",
    "objective.desirable_weight",
    "objective.undesirable_weight",
    "objective.temperature",
    "objective.sft_weight",
]


class CheckpointConfig(Section):
    """Resumable checkpoints in output_dir/checkpoints; docs/checkpoints.md tells the rules."""

    section: ClassVar[str] = "checkpoint"

    every_steps: PositiveInt | None = 200
    """Optimizer steps between saves; the last step is saved too. null saves only by every_minutes or when stopped."""
    every_minutes: Annotated[float, Field(gt=0, le=MAX_SECONDS / 60)] | Literal["auto"] | None = None
    """Minutes between saves; auto loses least time for the measured pause and
    device_hours_per_failure."""
    device_hours_per_failure: float = Field(default=50_000.0, gt=0, le=MAX_SECONDS)
    """Hours of one device between failures, for every_minutes: auto; the default is Llama 3's."""
    remote: Annotated[str, Field(min_length=1)] | None = None
    """Object storage (s3://, gs://, az:// or file://) for checkpoints and the result; the run continues from it where
    output_dir is empty or older."""
    keep_last: PositiveInt = 2
    """Number of newest checkpoints to keep; one more is on the disk while written."""
    keep_best: Name | None = None
    """Figure of evaluations, as eval_loss: the best checkpoint (lowest loss, any other figure highest) is saved and
    kept beside the newest."""
    asynchronous: bool = True
    """Write from a copy in host memory while training goes on; false waits for the disk."""
    resume: Name = "auto"
    """auto continues from the newest checkpoint, if any; never starts anew; or a checkpoint, as step-00000200 or a
    path."""
    resume_changed: Listed[Changeable] = ()
    """Keys that may differ from the resumed run, beside what always may; schedule stands for all its keys."""
    resume_weights_only: bool = False
    """Another run from the weights, or adapters, of the checkpoint that resume names; it continues from its own
    checkpoints once it has any."""

    @model_validator(mode="after")
    def _combine(self) -> Self:
        if self.resume_weights_only and self.resume in ("auto", "never"):
            refuse(
                f"checkpoint.resume_weights_only needs the path of another run's checkpoint in checkpoint.resume, not "
                f"{self.resume}; name one, or set checkpoint.resume_weights_only to false"
            )
        return self


class SaveConfig(Section):
    """The model that a run leaves in output_dir/model, and that export makes of its checkpoints."""

    section: ClassVar[str] = "save"

    dtype: Literal["auto", "bfloat16", "float16", "float32", "as_loaded"] = "auto"
    """Dtype of its weights, except what the family keeps in float32; auto is that of the loaded files, bfloat16 where
    these are quantised; as_loaded writes quantised files in their own format. Adapters are written as trained."""
    push_to_hub: str | None = Field(default=None, pattern=r"^[\w.-]+/[\w.-]+$")
    """Repository of the hub (owner/name) that gets the result and its model card."""
    hub_private: bool = True
    """Make that repository private; one that exists stays as it is."""


class LogConfig(Section):
    """Reports and their intervals."""

    section: ClassVar[str] = "log"

    every_steps: PositiveInt = 1
    """Report every so many optimizer steps."""
    report_to: Listed[Literal["jsonl", "tensorboard", "wandb", "trackio", "mlflow"]] = ("jsonl",)
    """Destinations of metrics; jsonl (output_dir/metrics.jsonl) is always on."""
    level: Literal["debug", "info", "warning"] = "info"
    """Verbosity: warnings alone, rank 0's steps, or where every rank is until the first step."""
    project: str | None = Field(default=None, min_length=1)
    """Project of wandb and trackio, and MLflow's experiment; null for WANDB_PROJECT, TRACKIO_PROJECT or
    MLFLOW_EXPERIMENT_NAME, or expertmesh."""
    run_name: str | None = Field(default=None, min_length=1)
    """Name of the run in trackers; null for the last part of output_dir."""

    @field_validator("report_to", mode="after")
    @classmethod
    def _jsonl_always(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(("jsonl", *value)))


class DistributedConfig(Section):
    """Time limits of ranks that wait for each other."""

    section: ClassVar[str] = "distributed"

    timeout_seconds: Seconds = 600
    """Longest time one collective may take before the job ends."""
    first_step_timeout_seconds: Seconds = 1800
    """The same up to the end of the first step."""

    @model_validator(mode="after")
    def _combine(self) -> Self:
        if self.first_step_timeout_seconds < self.timeout_seconds:
            refuse(
                f"distributed.first_step_timeout_seconds ({self.first_step_timeout_seconds}) must be at least "
                f"distributed.timeout_seconds ({self.timeout_seconds}); change one of them"
            )
        return self
