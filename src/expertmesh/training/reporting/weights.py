"""Report on a run's weights: the result of the audit, and tensors that the model leaves out."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from expertmesh.adapters.save import AdapterReport
from expertmesh.io.terminal import bytes_text
from expertmesh.weights.audit import AuditReport
from expertmesh.weights.load import LoadReport, UnmappedTensors
from expertmesh.weights.save import SaveReport

AUDIT_FILE = "audit.json"
_LISTED = 10


def loaded_lines(loaded: LoadReport, audited: AuditReport, output_dir: Path) -> Iterator[str]:
    """Return lines for the terminal, on rank 0, after every rank's audit has passed."""
    seconds = f"({audited.seconds:.1f} s)"
    if audited.mode == "full":
        hashes = sum(len(experts.sha256) for experts in audited.experts)
        yield f"audit      full: all {audited.total_bytes:,} bytes on all ranks equal the files {seconds}"
        yield f"           hashes of {hashes:,} experts are in {output_dir / AUDIT_FILE}"
    else:
        places = f"{audited.reads:,} places in rank 0's shards"
        yield f"audit      sampled: {places}, and like that on every rank, equal the files {seconds}"
    for text in _listed(loaded.unmapped):
        yield f"left out   {text}: in the files, not in the model; will be copied to the saved model"


def saved_lines(saved: SaveReport) -> Iterator[str]:
    """Return lines for the terminal, on rank 0: tensors that the model does not have, the rounding of codes, what
    engines cannot read."""
    for text in _listed(saved.kept):
        yield f"kept       {text}: not in the model, copied from the files it was loaded from"
    for text in _listed(saved.dropped):
        yield f"dropped    {text}: not in the model, and the files it was loaded from are gone or have changed"
    for each in saved.rounded:
        kept = f", {each.kept:.1%} of its blocks as they were" if each.kept else ""
        yield f"rounded    {each.pattern} ({each.tensors:,} tensors): off by {each.error:.2%} of its norm{kept}"
    yield from _serving_lines(saved.unread)


def dtype_text(saved: SaveReport) -> str:
    """Return what most of the weights were written in."""
    plain = str(saved.dtype).removeprefix("torch.")
    return f"codes and {plain}" if saved.rounded else plain


def adapter_lines(saved: AdapterReport) -> Iterator[str]:
    """Yield lines for rank 0's terminal about which adapters have moved from where they started."""
    yield f"adapter    {saved.tensors:,} tensors, {bytes_text(saved.total_bytes)}"
    for name, shares in saved.filled.items():
        still = [str(expert) for expert, share in enumerate(shares) if share == 0]
        if still:
            shown = ", ".join(still[:_LISTED]) + (f" and {len(still) - _LISTED} more" if len(still) > _LISTED else "")
            yield f"           {name}: B of experts {shown} is all zero; they have seen no token"
    for name in saved.untrained[:_LISTED]:
        yield f"           {name}: B is all zero; no gradient has moved it"
    if more := saved.untrained[_LISTED:]:
        yield f"           {len(more):,} more, from {more[0]}: B is all zero"
    yield from _serving_lines(saved.unread)


def _serving_lines(unread: Sequence[str]) -> Iterator[str]:
    return (f"serving    not read as it is by {sentence}" for sentence in unread)


def _listed(groups: Sequence[UnmappedTensors]) -> Iterator[str]:
    for group in groups[:_LISTED]:
        yield f"{group.pattern} ({group.tensors:,} tensors, {bytes_text(group.bytes)})"
    if more := groups[_LISTED:]:
        tensors, size = sum(group.tensors for group in more), sum(group.bytes for group in more)
        yield f"{len(more):,} more of the kind of {more[0].pattern} ({tensors:,} tensors, {bytes_text(size)})"
