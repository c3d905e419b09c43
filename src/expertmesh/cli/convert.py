"""`expertmesh convert MODEL --output DIR`: a model's weights in another dtype, quantised ones as plain values.

For someone whose other tools read no 4- or 8-bit files, or who wants to see what a published checkpoint holds. One
process, no GPU, memory for a block of the weights.
"""

from pathlib import Path

from expertmesh.cli.printing import bytes_text, peak_bytes
from expertmesh.export.convert import convert
from expertmesh.io.terminal import plural, tell
from expertmesh.training.reporting.weights import dtype_text, saved_lines


def run(model: str, output: str, dtype: str, max_shard_bytes: int, trust_remote_code: bool) -> int:
    """Convert the model; returns 0. Raises what `convert` raises."""
    before = peak_bytes()
    report = convert(
        model,
        Path(output),
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        trust_remote_code=trust_remote_code,
    )
    saved = report.saved
    how = f"quantised ({report.method})" if report.method is not None else "plain weights"
    files = plural(len(saved.files), "file")
    size = f"{bytes_text(saved.total_bytes)} in {files}"
    lines = [
        f"source      {report.source}: {how}, {bytes_text(report.source_bytes)}",
        *saved_lines(saved),
        f"written     {saved.directory}: {saved.tensors:,} tensors in {dtype_text(saved)}, {size}",
        f"            {report.seconds:.1f} s, {bytes_text(peak_bytes() - before)} of memory above the start",
    ]
    for line in lines:
        tell(line)
    return 0
