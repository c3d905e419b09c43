"""Which peers this machine has, at which versions; what is not there is named, never left out in silence."""

import dataclasses
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from expertmesh.training.recording import device_name

EXTRA = "pip install 'expertmesh[peers]'"


def versions() -> dict[str, str | None]:
    """Of ourselves, the peers and what all of them stand on; None for what is not installed."""
    return {name: _version(name) for name in ("expertmesh", "torch", "transformers", "accelerate", "peft")}


def why_missing(peer: str) -> str | None:
    """Why `peer` (`transformers` for its expert parallelism, or `peft`) cannot be measured; None if it can."""
    if peer == "peft":
        return None if _version("peft") else f"PEFT is not installed; {EXTRA}"
    assert peer == "transformers"
    try:
        from transformers.distributed.configuration_utils import DistributedConfig
    except ImportError:
        known = set()
    else:
        known = {field.name for field in dataclasses.fields(DistributedConfig)}
    if not known >= {"ep_size", "fsdp_size"}:
        return (
            f"transformers {_version('transformers')} has no expert parallelism on FSDP2; pip install -U transformers"
        )
    # Its loader asks for it as soon as it is told to shard.
    return None if _version("accelerate") else f"transformers' expert parallelism needs accelerate; {EXTRA}"


def machine(device: torch.device) -> dict[str, Any]:
    """What is measured on: the device, the versions, and how busy the machine is."""
    return {
        "device": device_name(device),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "versions": versions(),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
