"""A model's figures from its configuration alone, as `plan` reads them."""

from pathlib import Path

from transformers import PreTrainedConfig

from expertmesh.config import LoraConfig, PrecisionConfig
from expertmesh.distributed.layout import Layout
from expertmesh.model import ModelOptions, build_model, plan_model
from expertmesh.parallel.shard_plan import ShardOptions
from expertmesh.planning.model_figures import ModelFigures
from expertmesh.planning.read_model import figures_of_plan


def figures_of(
    config: PreTrainedConfig,
    *,
    length: int,
    precision: PrecisionConfig,
    lora: LoraConfig | None = None,
    packed: bool = True,
    device: str = "cuda",
) -> ModelFigures:
    """Build the model on meta and read its figures; arguments as in `figures_of_plan`."""
    model = build_model(config, Path(config.name_or_path or ""), ModelOptions(precision, lora))
    return figures_of_plan(
        plan_model(model, Layout(), ShardOptions(precision)), length=length, lora=lora, packed=packed, device=device
    )
