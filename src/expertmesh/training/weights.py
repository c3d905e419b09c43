"""The weights of a run, read at its start and saved at its end, with what there is to say about them: how the audit
went, and what becomes of tensors that the model leaves out.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from expertmesh.adapters.save import AdapterReport, save_adapter
from expertmesh.adapters.start import start as start_adapters
from expertmesh.model import load_weights
from expertmesh.training.plan import Prepared, gib
from expertmesh.training.preflight import ADAPTER, MODEL
from expertmesh.weights.audit import AuditMode, AuditReport, write_audit
from expertmesh.weights.load import LoadReport
from expertmesh.weights.meta_model import materialize
from expertmesh.weights.save import SaveReport, save_model
from expertmesh.weights.unmapped import UnmappedTensors

AUDIT_FILE = "audit.json"
_LISTED = 10


def load_base(run: Prepared, audit: AuditMode) -> None:
    """Fill the model from its files, audit it, and start its adapters. Every rank calls it; rank 0 prints."""
    loaded, audited = load_weights(run.model, run.checked.directory, run.mesh, audit)
    if run.mesh.rank == 0:
        directory = Path(run.config.output_dir)
        if audited.mode == "full":
            write_audit(directory / AUDIT_FILE, audited, run.checked.directory)
        for line in loaded_lines(loaded, audited, directory):
            print(line, flush=True)
    start_adapters(run.model, run.config.train.seed)


def allocate_weights(run: Prepared) -> None:
    """Allocate the shards of a model that a checkpoint is going to fill."""
    materialize(run.model, run.mesh.device)


def save_result(run: Prepared) -> list[str]:
    """Write the trained model, or its adapters alone; what there is to say about it. Every rank calls it."""
    config, model, tokenizer = run.config, run.model, run.data.tokenizer
    directory = Path(config.output_dir)
    metrics = f"metrics in {directory / 'metrics.jsonl'}"
    if config.lora is not None:
        adapter = save_adapter(model, directory / ADAPTER, tokenizer=tokenizer)
        return [*adapter_lines(adapter), f"saved {directory / ADAPTER}; {metrics}"]
    saved = save_model(model, directory / MODEL, tokenizer=tokenizer)
    return [*saved_lines(saved), f"saved {directory / MODEL} in {config.precision.params}; {metrics}"]


def loaded_lines(loaded: LoadReport, audited: AuditReport, output_dir: Path) -> Iterator[str]:
    """Lines for the terminal, by rank 0, after every rank's audit has passed."""
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
    """Lines for the terminal, by rank 0, about tensors of the source that the model does not have."""
    for text in _listed(saved.kept):
        yield f"kept       {text}: not in the model, copied from the files it was loaded from"
    for text in _listed(saved.dropped):
        yield f"dropped    {text}: not in the model, and the files it was loaded from are gone or have changed"


def adapter_lines(saved: AdapterReport) -> Iterator[str]:
    """Lines for the terminal, by rank 0, about which experts' adapters have moved from where they started."""
    yield f"adapter    {saved.tensors:,} tensors, {gib(saved.total_bytes)}"
    for name, shares in saved.filled.items():
        still = [str(expert) for expert, share in enumerate(shares) if share == 0]
        if still:
            shown = ", ".join(still[:_LISTED]) + (f" and {len(still) - _LISTED} more" if len(still) > _LISTED else "")
            yield f"           {name}: B of experts {shown} is all zero; they have seen no token"


def _listed(groups: Sequence[UnmappedTensors]) -> Iterator[str]:
    for group in groups[:_LISTED]:
        yield f"{group.pattern} ({group.tensors:,} tensors, {gib(group.bytes)})"
    if more := groups[_LISTED:]:
        tensors, size = sum(group.tensors for group in more), sum(group.bytes for group in more)
        yield f"{len(more):,} more of the kind of {more[0].pattern} ({tensors:,} tensors, {gib(size)})"
