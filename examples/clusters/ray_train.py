"""Ray Train: `python ray_train.py /shared/config.yaml 32`. Failed workers start again, from the newest checkpoint.

Paths in the configuration are absolute, and every node reaches them.
"""

import sys
from typing import Any

import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def rank(arguments: dict[str, Any]) -> None:
    """One worker: it is in Ray's process group already, which training joins."""
    from expertmesh.cli.main import main

    code = main(["train", *arguments["command_line"]])
    if code:
        raise SystemExit(f"expertmesh train ended with {code}; its own output says why")


def train(command_line: list[str], workers: int, **run: Any) -> None:
    trainer = TorchTrainer(
        rank,
        train_loop_config={"command_line": command_line},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3), **run),
    )
    trainer.fit()


if __name__ == "__main__":
    config, workers, *overrides = sys.argv[1:]
    train([config, *overrides], int(workers))
