"""The model of `expertmesh plan`: refused where `train` refuses it, turned into figures. Reads config.json only."""

from transformers import PreTrainedConfig

from expertmesh.cli.options import PlanOptions
from expertmesh.config import LoraConfig, PrecisionConfig
from expertmesh.distributed.layout import Layout
from expertmesh.introspection.attention import packing_refusal
from expertmesh.model import ModelOptions, build_model, plan_model
from expertmesh.parallel.shard_plan import ShardOptions
from expertmesh.planning.model_figures import ModelFigures
from expertmesh.planning.read_model import figures_of_plan
from expertmesh.training.startup.model_check import longest, refuse_length
from expertmesh.weights.meta_model import read_model_config

USUAL_LENGTH = 4096


def read_figures(
    options: PlanOptions, lora: LoraConfig | None, device: str
) -> tuple[PreTrainedConfig, ModelFigures, str | None]:
    """Read the figures of the model that a plan is for, without its weights.

    Args:
        device: Torch device type that packed rows are attended on.

    Returns:
        The configuration, the figures, and why the model cannot have packed rows: None if it can or if
        `--no-packing` is given. The figures are of packed rows unless either of the two rules them out.

    Raises:
        InputError: The model cannot be read or sharded.
    """
    config, directory = read_model_config(options.model, trust_remote_code=options.trust_remote_code, weights=False)
    length = options.seq_len or usual_length(config)
    refuse_length("--seq-len", length, config)
    precision = PrecisionConfig(params=options.params, compute=options.compute, frozen=options.frozen)
    built = ModelOptions(precision, lora, trust_remote_code=options.trust_remote_code, name=options.model)
    model = build_model(config, directory, built)
    why_unpacked = None if options.no_packing else packing_refusal(model)
    shards = plan_model(model, Layout(), ShardOptions(precision))
    packed = not options.no_packing and why_unpacked is None
    figures = figures_of_plan(shards, length=length, lora=lora, packed=packed, device=device)
    return config, figures, why_unpacked


def usual_length(config: PreTrainedConfig) -> int:
    """Return the tokens of a sequence if `--seq-len` is not given."""
    return min(USUAL_LENGTH, longest(config) or USUAL_LENGTH)
