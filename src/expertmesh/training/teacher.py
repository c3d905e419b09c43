"""Load the teacher of a distillation: a second model, frozen, in the layout of the model that learns from it.

It is planned, refused, sharded and filled as the model itself is; its parameters get no gradient, and no checkpoint or
result has them. Like a base under adapters it is in precision.compute, its experts and linear layers in
precision.frozen.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedConfig, PreTrainedModel

from expertmesh.config import Config
from expertmesh.config.errors import InputError
from expertmesh.distributed.layout import Layout
from expertmesh.model import ModelOptions, build_model, load_weights, plan_model
from expertmesh.parallel.apply import shard_model
from expertmesh.parallel.shard_plan import ShardOptions, ShardPlan
from expertmesh.weights.audit import AuditMode
from expertmesh.weights.meta_model import read_model_config

if TYPE_CHECKING:
    from expertmesh.distributed.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Teacher:
    """A frozen model with its plan; on meta until it is loaded."""

    model_config: PreTrainedConfig
    directory: Path
    model: PreTrainedModel
    plan: ShardPlan

    @classmethod
    def of(cls, config: Config, student: PreTrainedConfig, layout: Layout, *, weights: bool = True) -> "Teacher | None":
        """Return objective.teacher, built on meta and planned for `layout`; None without one. No communication.

        Args:
            student: The config of the model that learns.
            weights: Whether the weights of a hub repository are downloaded.

        Raises:
            InputError: Its vocabulary has another size, or it cannot be laid out so.
        """
        name = config.objective.teacher
        if name is None:
            return None
        try:
            model_config, directory = read_model_config(
                name, trust_remote_code=config.model.trust_remote_code, weights=weights
            )
            _refuse_other_vocabulary(model_config, student)
            return cls.planned(config, model_config, directory, layout)
        except InputError as error:
            raise type(error)(f"objective.teacher {name}: {error}", key=error.key) from error

    @classmethod
    def planned(cls, config: Config, model_config: PreTrainedConfig, directory: Path, layout: Layout) -> "Teacher":
        """Return the model of `model_config` on meta, planned for `layout`. No communication."""
        precision = config.precision.model_copy(update={"params": config.precision.compute})
        options = replace(ModelOptions.of(config), precision=precision, lora=None, frozen=True)
        model = build_model(model_config, directory, options)
        # It is not balanced, and runs without gradients: nothing is counted or recomputed.
        unbalanced = {"aux_loss_coef": 0.0, "z_loss_coef": 0.0, "bias_update_rate": 0.0}
        moe = config.moe.unplaced.model_copy(update=unbalanced)
        return cls(model_config, directory, model, plan_model(model, layout, ShardOptions(precision, moe)))

    @property
    def kept(self) -> str:
        """Words of the plan about how its weights are kept."""
        precision = self.plan.options.precision
        packed = "" if precision.frozen is None else f", experts and linear layers in {precision.frozen}"
        return f"frozen, in {precision.compute}{packed}"

    def shard(self, mesh: "Mesh") -> None:
        """Shard the model, which stays on meta. Collectives: every rank calls it; those of `shard_model`."""
        shard_model(self.model, self.plan, mesh)

    def load(self, mesh: "Mesh", audit: AuditMode) -> None:
        """Read the weights. Collectives: every rank calls it; those of `load_weights`."""
        load_weights(self.model, self.directory, mesh, audit)


def _refuse_other_vocabulary(teacher: PreTrainedConfig, student: PreTrainedConfig) -> None:
    theirs, own = (int(config.get_text_config().vocab_size) for config in (teacher, student))
    if theirs != own:
        raise InputError(
            f"its vocabulary has {theirs:,} tokens, and that of the model {own:,}; distill compares the probabilities "
            "of the same tokens: choose a teacher of the same vocabulary",
            key="model.other-vocabulary",
        )
