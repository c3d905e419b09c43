"""`expertmesh export RUN_OR_CHECKPOINT --output DIR`: a training checkpoint as a plain Hugging Face directory.

For someone who wants the model of a run that still goes on, or of an earlier step; of a LoRA run, its adapter as a
plain PEFT directory. One process, no GPU; prints what was written, how long it took and how much memory beyond the
start of the program.
"""

from pathlib import Path

from expertmesh.adapters.peft_format import WEIGHTS_FILE
from expertmesh.checkpoint.remote import locate_local
from expertmesh.cli.printing import bytes_text, located_text, peak_bytes
from expertmesh.export.checkpoint import AdapterFormat, export
from expertmesh.io.terminal import plural, tell
from expertmesh.training.reporting.weights import dtype_text, saved_lines


def run(
    path: str,
    output: str,
    dtype: str | None,
    max_shard_bytes: int,
    trust_remote_code: bool,
    adapter_format: AdapterFormat | None = None,
) -> int:
    """Export the checkpoint at `path`, or the newest of the run at `path`; returns 0. Raises what `export` raises."""
    before = peak_bytes()
    checkpoint, found = locate_local(path)
    tell(f"checkpoint  {located_text(checkpoint, found)}")
    manifest, saved = export(
        checkpoint,
        Path(output),
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        trust_remote_code=trust_remote_code,
        adapter_format=adapter_format,
    )
    for line in saved_lines(saved):
        tell(line)
    files = plural(len(saved.files), "file")
    what = "adapter" if WEIGHTS_FILE in saved.files else "model"
    tell(
        f"exported    {saved.directory}: the {what} after step {manifest.step}, {saved.tensors:,} tensors "
        f"in {dtype_text(saved)}, {bytes_text(saved.total_bytes)} in {files}\n"
        f"            {saved.seconds:.1f} s, {bytes_text(peak_bytes() - before)} of memory above the start"
    )
    return 0
