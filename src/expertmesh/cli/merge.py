"""`expertmesh merge ADAPTER --output DIR`: an adapter and its base as one plain Hugging Face directory.

For someone who serves a LoRA run with a tool that has no adapters, or none on experts. One process, no GPU, memory for
a block of the base and one adapter; prints what was merged in each layer, and how a sample of the result compares.
"""

import contextlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from expertmesh.adapters.peft_format import BASE_FILE, CONFIG_FILE
from expertmesh.adapters.targets import Target
from expertmesh.checkpoint.manifest import MANIFEST
from expertmesh.checkpoint.remote import local_adapter, locate_local
from expertmesh.checkpoint.small_files import ADAPTER
from expertmesh.cli.printing import bytes_text, located_text, peak_bytes
from expertmesh.config.errors import InputError
from expertmesh.export.checkpoint import export
from expertmesh.export.merge import MergeReport, merge
from expertmesh.io.directory import io_errors
from expertmesh.io.terminal import plural, tell
from expertmesh.training.reporting.weights import dtype_text, saved_lines

_LISTED = 10


def run(path: str, output: str, base: str | None, dtype: str, max_shard_bytes: int, trust_remote_code: bool) -> int:
    """Merge the adapter at `path`, or that of the run or checkpoint there; returns 0. Raises what `merge` raises."""
    before = peak_bytes()
    with contextlib.ExitStack() as stack:
        adapter = _adapter_at(local_adapter(path), Path(output), stack, trust_remote_code)
        report = merge(
            adapter,
            Path(output),
            base=base,
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
            trust_remote_code=trust_remote_code,
        )
    for line in _lines(report):
        tell(line)
    tell(f"            {report.seconds:.1f} s, {bytes_text(peak_bytes() - before)} of memory above the start")
    return 0


def _adapter_at(path: Path, output: Path, stack: contextlib.ExitStack, trust_remote_code: bool) -> Path:
    """Return the PEFT directory at `path`; one of a checkpoint is written beside `output` until `stack` is closed."""
    is_checkpoint = (path / MANIFEST).exists()
    for adapter in (path, path / ADAPTER):
        if (adapter / CONFIG_FILE).exists() and not is_checkpoint:
            tell(f"adapter     {adapter}")
            return adapter
    try:
        checkpoint, found = locate_local(str(path))
    except InputError as error:
        if not path.exists():
            raise
        raise InputError(f"{error}; and no {CONFIG_FILE} of an adapter", key="adapter.not-found") from error
    tell(f"adapter     of {located_text(checkpoint, found)}")
    parent = output.absolute().parent
    with io_errors(output, 0):
        place = tempfile.TemporaryDirectory(prefix="expertmesh-", dir=parent if parent.is_dir() else None)
    adapter = Path(stack.enter_context(place)) / ADAPTER
    export(checkpoint, adapter, trust_remote_code=trust_remote_code, adapter_format="peft")
    return adapter


def _lines(report: MergeReport) -> Iterator[str]:
    if report.base_checked:
        yield f"base        {report.base}: its weights are those that the adapter was trained on"
    else:
        yield f"base        {report.base}: cannot be checked, as the adapter has no {BASE_FILE} with its base's hash"
    if report.frozen is not None:
        yield f"            experts as {report.frozen} keeps them, which the adapter was trained on"
    lora = report.plan.lora
    others = "" if report.plan.is_uniform else " and others by pattern"
    yield f"            r {lora.r}, scaling {lora.scaling:g}{others}, {len(report.plan.targets):,} adapted weights"
    layers: dict[str, list[Target]] = {}
    for target in report.plan.targets:
        layers.setdefault(_layer_of(target), []).append(target)
    for layer, targets in layers.items():
        yield f"merged      {layer}: {', '.join(_what(layer, target) for target in targets)}"
        for target in targets:
            if unused := report.unused.get(target.weight):
                shown = ", ".join(map(str, unused[:_LISTED]))
                more = f" and {len(unused) - _LISTED} more" if len(unused) > _LISTED else ""
                yield f"            {target.name}: nothing added to experts {shown}{more}, whose B is all zero"
    for name, each in report.plan.replaced.items():
        rows = "" if each.rows is None else f", {len(each.rows):,} rows"
        yield f"replaced    {name}{rows}"
    yield from saved_lines(report.saved)
    saved, compared = report.saved, report.compared
    files = plural(len(saved.files), "file")
    size = f"{bytes_text(saved.total_bytes)} in {files}"
    yield f"written     {saved.directory}: {saved.tensors:,} tensors in {dtype_text(saved)}, {size}"
    yield (
        f"compared    a sample of {compared.matrices:,} merged weights ({compared.experts:,} of one expert each) with "
        f"base + adapter: off by at most {compared.worst:.2f} of what rounding allows"
    )
    if compared.left is not None:
        yield f"            codes leave {compared.left:.0%} of what the adapter changes; --dtype bfloat16 leaves all"


def _layer_of(target: Target) -> str:
    numbered = re.match(r".*?\.\d+(?=\.)", target.module)
    return numbered[0] if numbered else target.module


def _what(layer: str, target: Target) -> str:
    name = target.name.removeprefix(layer).lstrip(".") or target.name
    return name if target.experts is None else f"{name} of {target.experts} experts"
