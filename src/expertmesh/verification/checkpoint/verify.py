"""Verify one checkpoint by itself: its files against the manifest, and their contents against each other.

For `expertmesh verify`. It finds all problems, not only the first. It needs no GPU and no process group, and has one
block in memory at a time. It never runs code that comes with a model, opens no pickle and changes no file.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from expertmesh.checkpoint.companions import ADAPTER, HUGGINGFACE, LAYOUT_FILE
from expertmesh.checkpoint.manifest import parse_manifest
from expertmesh.checkpoint.read import Headers, SavedState
from expertmesh.checkpoint.schema import Manifest
from expertmesh.config.errors import InputError, IntegrityError, SecurityError
from expertmesh.export.stored_model import stored_model
from expertmesh.io.safetensors_reader import WeightFiles
from expertmesh.verification.checkpoint.contents import needed_files, small_file_problems
from expertmesh.verification.checkpoint.experts import VerifiedExperts, look_at_experts, what_is_odd
from expertmesh.verification.checkpoint.files import FileCheck, Finding, check_files, unsafe_files
from expertmesh.verification.checkpoint.optimizer import optimizer_problems


@dataclass(frozen=True, slots=True)
class Verification:
    """The results of verifying a checkpoint."""

    directory: Path
    """The checkpoint."""
    manifest: Manifest
    """Its manifest."""
    findings: tuple[Finding, ...]
    """All problems."""
    slots: tuple[str, ...]
    """The kinds of optimizer state."""
    without_slots: tuple[str, ...]
    """The trained parameters without optimizer state, with numbers as `*`."""
    replicated: int
    """The number of chunks that were compared with their fingerprint."""
    experts: tuple[VerifiedExperts, ...]
    """The experts, or their adapters."""
    experts_left_out: str | None
    """Why there are no `experts`, or None."""
    seconds: float
    """The time that it took."""


@torch.no_grad()
def verify(directory: Path) -> Verification:
    """Check everything in the checkpoint `directory`; raise only if nothing can be checked.

    Raises:
        InputError: If there is no such checkpoint, or its format is newer.
        IntegrityError: If the manifest is missing or is not one.
        SecurityError: If file names lead out of the checkpoint, or the manifest is a pickle.
    """
    started = time.monotonic()
    unsafe = unsafe_files(directory)
    try:
        manifest = parse_manifest(directory)
    except IntegrityError as error:
        if unsafe:
            raise SecurityError("\n".join(finding.text for finding in unsafe), key="checkpoint.unsafe") from error
        raise
    with WeightFiles(directory, {}) as files:
        check = check_files(directory, manifest, files)
        state = SavedState(directory, manifest, Headers(directory, manifest), files)
        experts, left_out, odd = _experts(state, check)
    texts, slots, without = optimizer_problems(manifest)
    texts = [*small_file_problems(directory, manifest, check), *texts, *odd]
    return Verification(
        directory=directory,
        manifest=manifest,
        findings=(*unsafe, *check.findings, *map(Finding, texts)),
        slots=slots,
        without_slots=without,
        replicated=check.replicated,
        experts=experts,
        experts_left_out=left_out,
        seconds=time.monotonic() - started,
    )


def _experts(state: SavedState, check: FileCheck) -> tuple[tuple[VerifiedExperts, ...], str | None, list[str]]:
    """Return all experts, why they were left out (or None), and the problems of the model or the experts."""
    if reason := _why_no_model(state, check):
        return (), reason, []
    try:
        experts = tuple(look_at_experts(stored_model(state), state))
    except InputError as error:
        return (), str(error), []
    except IntegrityError as error:
        return (), "the checkpoint does not fit its model", [str(error)]
    return experts, None if experts else "none of them has an adapter", list(what_is_odd(experts))


def _why_no_model(state: SavedState, check: FileCheck) -> str | None:
    missing = needed_files(state.manifest) - state.manifest.by_name.keys()
    kinds = (f"{HUGGINGFACE}/", f"{ADAPTER}/", LAYOUT_FILE)
    needed = [name for name in check.damaged | missing if name.startswith(kinds)]
    if needed:
        return f"{min(needed)} is damaged"
    unreadable = sorted(name for name in check.unreadable if state.manifest.kind_of(name) != "optimizer")
    return f"not all of {unreadable[0]} can be read" if unreadable else None
