"""What the benchmarks share: tables, the machine, which peer is missing, and what is raised when results differ."""

import dataclasses
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from expertmesh import __version__
from expertmesh.training.reporting.start import device_name


class ResultsDiffer(RuntimeError):
    """Two systems do not compute the same, so that their figures say nothing."""


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with columns of equal width, fit to be read as it is."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    sides = "<" + ">" * (len(head) - 1)
    return "\n".join(
        f"| {' | '.join(f'{cell:{side}{width}}' for cell, side, width in zip(row, sides, widths, strict=True))} |"
        for row in (head, ["-" * width for width in widths], *rows)
    )


def why_missing(peer: str) -> str | None:
    """Why `peer` (`transformers` for its expert parallelism, or `peft`) cannot be measured; None if it can."""
    if peer == "peft":
        return None if _version("peft") else "PEFT is not installed; pip install peft"
    try:
        from transformers.distributed.configuration_utils import DistributedConfig
    except ImportError:
        known = set()
    else:
        known = {field.name for field in dataclasses.fields(DistributedConfig)}
    if not known >= {"ep_size", "fsdp_size"}:
        found = _version("transformers")
        return f"transformers {found} has no expert parallelism on FSDP2; pip install -U transformers"
    # Its loader asks for it as soon as it is told to shard.
    return (
        None if _version("accelerate") else "transformers' expert parallelism needs accelerate; pip install accelerate"
    )


def machine() -> dict[str, Any]:
    """Return what is measured on: the device, the versions (None: not installed), and how busy the machine is."""
    return {
        "device": device_name(torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "versions": {
            "expertmesh": __version__,
            **{name: _version(name) for name in ("torch", "transformers", "accelerate", "peft")},
        },
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
