"""From a family to its outcome: proven, refused by us by name, or not built by transformers itself."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from expertmesh.anatomy import describe
from expertmesh.config import MoeConfig
from expertmesh.config.errors import InputError
from expertmesh.introspection.compute_dtype import plan_compute
from expertmesh.parallel.refusals import refuse_model
from expertmesh.state.model_view import meta_copy
from expertmesh.weights.meta_model import build_meta_model, kept_in_fp32
from tests.families.axes import AXES, refusal_of, run_of
from tests.families.bf16 import bf16_ratio
from tests.families.catalogue import Family
from tests.families.lora import LAYOUTS as LORA_LAYOUTS
from tests.families.lora import NoAdapters, prove_adapters
from tests.families.packing import packing_of
from tests.families.proof import LAYOUTS, Layout, Proof, Run, Subject, prove
from tests.families.table import Outcome
from tests.families.tiny import tiny_config


def outcome_of(
    family: Family,
    layouts: Sequence[Layout] = LAYOUTS,
    lora_layouts: Sequence[Layout] = LORA_LAYOUTS,
    axes: Sequence[str] = tuple(AXES),
    with_bf16: bool = False,
) -> Outcome:
    """Build, look for a refusal, prove. A proof that does not hold is raised as it is: it is a bug."""
    name, kind = family.name, family.model_class
    if kind is None:
        return Outcome(name, None, "not built", reason="transformers has no causal language model of it")
    try:
        config = tiny_config(kind, name)
    except Exception as error:
        return Outcome(name, kind, "not built", reason=f"no tiny configuration found: {type(error).__name__}: {error}")
    if reason := _refusal(config):
        return Outcome(name, kind, "refused", reason=reason)
    packing = packing_of(kind, name)
    with tempfile.TemporaryDirectory(prefix="family-") as scratch:
        refused = {axis: reason for axis in axes if (reason := refusal_of(kind, name, axis))}
        runs = {axis: [run_of(axis)] for axis in axes if axis not in refused}
        proofs = prove(Subject(kind, name, Path(scratch, "full")), {"parity": [*map(Run, layouts)], **runs})
        lora = _lora(kind, name, Path(scratch, "lora"), lora_layouts)
        parity = proofs.pop("parity")
        in_bf16, error = not _refused_in_bf16(config), None
        if with_bf16 and in_bf16:
            error = bf16_ratio(kind, name, Path(scratch, "bf16"))
        return Outcome(name, kind, "proven", parity, packing, lora, "", {**proofs, **refused}, not in_bf16, error)


def _lora(model_class: str, family: str, scratch: Path, layouts: Sequence[Layout]) -> Proof | str:
    try:
        return prove_adapters(model_class, family, scratch, layouts)
    except NoAdapters as reason:
        return str(reason)


def _refused_in_bf16(config: PreTrainedConfig) -> bool:
    model = build_meta_model(config, torch.float32)
    try:
        plan_compute(meta_copy(model), describe(model), torch.bfloat16, kept_in_fp32(model, torch.bfloat16))
    except InputError:
        return True
    return False


def _refusal(config: PreTrainedConfig) -> str | None:
    """What a user is told before any weight is read, or None."""
    try:
        model = build_meta_model(config, torch.float32)
        refuse_model(model, describe(model), MoeConfig())
    except InputError as error:
        return str(error)
    return None
