"""Define, read and check the configuration: typed sections, YAML in and out, overrides, and the errors of users.

It imports neither torch nor transformers nor anything else of expertmesh, so a wrong configuration is refused before
anything heavy is loaded.
"""

from expertmesh.config.data import DataConfig, DataSource, EvalConfig
from expertmesh.config.errors import (
    DistributedFailure,
    ExpertmeshError,
    InputError,
    IntegrityError,
    SecurityError,
)
from expertmesh.config.files import dump_config, load_config, make_config
from expertmesh.config.objective import ObjectiveConfig
from expertmesh.config.output import CheckpointConfig, DistributedConfig, LogConfig, SaveConfig
from expertmesh.config.root import Config, json_schema
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

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DataSource",
    "DistributedConfig",
    "DistributedFailure",
    "EvalConfig",
    "ExpertmeshError",
    "InputError",
    "IntegrityError",
    "LogConfig",
    "LoraConfig",
    "ModelConfig",
    "MoeConfig",
    "ObjectiveConfig",
    "OptimConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "SaveConfig",
    "ScheduleConfig",
    "SecurityError",
    "TrainConfig",
    "dump_config",
    "json_schema",
    "load_config",
    "make_config",
]
