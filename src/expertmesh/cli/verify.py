"""`expertmesh verify CHECKPOINT`: whether a training checkpoint is what was written, and what its experts look like.

For someone who is about to resume from it, to copy it, or to trust it. Names everything that is wrong, not only the
first thing; `--json` writes the same, with a hash of each expert, for tools. Changes nothing.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from expertmesh.checkpoint.directory import locate
from expertmesh.cli.export import located_text
from expertmesh.cli.inspect import bytes_text
from expertmesh.config.errors import InputError, IntegrityError, SecurityError
from expertmesh.io.terminal import printable
from expertmesh.verification.checkpoint.experts import VerifiedExperts
from expertmesh.verification.checkpoint.verify import Verification, verify

FORMAT, VERSION = "expertmesh-verification", 1


def run(path: str, report: str | None = None) -> int:
    """Verify the checkpoint at `path`, or the newest of the run at `path`; returns 0 if nothing is wrong with it.

    Raises `IntegrityError` with everything that is wrong, `SecurityError` if something in it is unsafe, `InputError`
    when there is no checkpoint to read.
    """
    checkpoint, found = locate(Path(path))
    print(f"checkpoint  {located_text(checkpoint, found)}", flush=True)
    verified = verify(checkpoint)
    for line in _lines(verified):
        print(printable(line))
    if report is not None:
        _write_report(Path(report), verified)
    if not verified.findings:
        print(f"sound       all files are there, and no others; hashes and values are right ({verified.seconds:.1f} s)")
        return 0
    count = len(verified.findings)
    title = f"{checkpoint}: {count} thing{'s are' if count > 1 else ' is'} wrong with it"
    kind = SecurityError if any(finding.unsafe for finding in verified.findings) else IntegrityError
    raise kind("\n".join([title, *(finding.text for finding in verified.findings)]))


def _lines(verified: Verification) -> Iterator[str]:
    manifest = verified.manifest
    axes = ", ".join(f"{axis} {size}" for axis, size in manifest.layout.items() if size > 1) or "one process"
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    yield f"written     {manifest.created}, after step {manifest.step}, by {manifest.world_size} ranks ({axes})"
    yield f"            {versions}"
    yield f"files       {len(manifest.files)}, {bytes_text(manifest.total_bytes)}"
    yield f"tensors     {len(manifest.model):,} of the model, {len(manifest.optimizer):,} of the optimizer"
    yield f"replicas    {verified.replicated:,} parts that several ranks held, compared by fingerprint"
    if manifest.trained:
        yield f"optimizer   {', '.join(verified.slots) or 'no state'} of {len(manifest.trained):,} trained parameters"
    for pattern in verified.without_slots:
        yield f"            none for {pattern}: no step has trained it"
    for experts in verified.experts:
        yield f"{experts.layer:<11} {_experts_text(experts)}"
    if verified.experts_left_out is not None:
        yield f"experts     not looked at one by one: {verified.experts_left_out}"


def _experts_text(experts: VerifiedExperts) -> str:
    distinct, dead = len(set(experts.sha256)), experts.norm.count(0.0)
    low, high = min(experts.norm), max(experts.norm)
    if experts.filled is None:
        return f"{len(experts.norm)} experts, {distinct} different, {dead} dead, norm {low:.4g} to {high:.4g}"
    zero, filled = experts.filled.count(0.0), [share for share in experts.filled if share] or [0.0]
    adapters = f"{len(experts.norm)} experts' adapters, {distinct} different, norm {low:.4g} to {high:.4g}"
    return f"{adapters}; B all zero in {zero}, else {min(filled):.0%} to {max(filled):.0%} not zero"


def _write_report(path: Path, verified: Verification) -> None:
    content = {
        "format": FORMAT,
        "version": VERSION,
        "checkpoint": str(verified.directory),
        "step": verified.manifest.step,
        "sound": not verified.findings,
        "findings": [asdict(finding) for finding in verified.findings],
        "files": len(verified.manifest.files),
        "bytes": verified.manifest.total_bytes,
        "replicated_parts": verified.replicated,
        "experts": [asdict(experts) for experts in verified.experts],
        "experts_left_out": verified.experts_left_out,
    }
    try:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--json {path}: cannot be written: {error.strerror}") from error
