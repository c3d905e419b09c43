"""What one look at the machine has found, and what of it may be shown to others."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

HIDDEN = "***"
# What decides where ranks meet, what they compute on and what they download.
_TELLING = re.compile(
    r"(NCCL|GLOO|PYTORCH|CUDA|HIP|ROCR|ASCEND|HF|HUGGING_?FACE|TRANSFORMERS|OMP|PET|OMPI_COMM_WORLD|PMI)_\w+|TORCH\w+"
    r"|(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|SLURM_(JOB_ID|NNODES|NTASKS|PROCID|LOCALID|STEP_ID|STEP_NODELIST)"
    r"|(https?|no|all)_proxy",
    re.IGNORECASE,
)
_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASS|AUTH|CRED", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"(?<=//)[^/@\s]+(?=@)|\bhf_\w{6,}|(?<=Bearer )\S+")


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of the report, and a sentence for each thing that has to be mended."""

    what: str
    says: str
    faults: tuple[str, ...] = ()


def environment(variables: Mapping[str, str] = os.environ) -> Finding:
    """The variables that decide how a job runs."""
    names = sorted(name for name in variables if _TELLING.fullmatch(name))
    return Finding("variables", "\n".join(f"{name}={shown(name, variables[name])}" for name in names) or "none")


def shown(name: str, value: str) -> str:
    """`value` without what a stranger may not read."""
    return HIDDEN if _SECRET_NAME.search(name) else without_secrets(value)


def without_secrets(text: str) -> str:
    """`text` without passwords in addresses and tokens of the hub."""
    return _SECRET_VALUE.sub(HIDDEN, text)
