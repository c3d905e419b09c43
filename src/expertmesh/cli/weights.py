"""`expertmesh export`, `merge` and `convert`: weights as a plain Hugging Face directory. One process, no GPU.

`export RUN_OR_CHECKPOINT` is for someone who wants the model of a run that still goes on, or of an earlier step; of a
LoRA run, its adapter as a plain PEFT directory. `merge ADAPTER` joins an adapter and its base, for a tool that has no
adapters, or none on experts. `convert MODEL` writes a model's weights in another dtype, quantised ones as plain values.
Each takes memory for a block of the weights, and prints what was written, how long it took and how much memory beyond
the start of the program.
"""

import contextlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from expertmesh.adapters.peft_format import BASE_FILE, CONFIG_FILE, WEIGHTS_FILE
from expertmesh.adapters.targets import Target
from expertmesh.checkpoint.manifest import MANIFEST
from expertmesh.checkpoint.remote import local_adapter, locate_local
from expertmesh.checkpoint.small_files import ADAPTER
from expertmesh.cli.printing import located_text, peak_bytes
from expertmesh.config.errors import InputError
from expertmesh.export.checkpoint import AdapterFormat, export
from expertmesh.export.merge import MergeReport, convert, merge
from expertmesh.io.directory import io_errors
from expertmesh.io.terminal import bytes_text, plural, tell
from expertmesh.training.reporting.weights import dtype_text, saved_lines
from expertmesh.weights.save import SaveReport

# Experts that are named of those that an adapter left as they were.
_LISTED = 10


def run_export(
    path: str,
    output: str,
    dtype: str | None,
    max_shard_bytes: int,
    trust_remote_code: bool,
    adapter_format: AdapterFormat | None = None,
) -> int:
    """Export the checkpoint at `path`, or the newest of the run at `path`; return 0. Raises what `export` raises."""
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
    what = f"the {'adapter' if WEIGHTS_FILE in saved.files else 'model'} after step {manifest.step}, "
    tell(*saved_lines(saved), _written("exported", saved, what), _took(saved.seconds, before))
    return 0


def run_merge(
    path: str, output: str, base: str | None, dtype: str, max_shard_bytes: int, trust_remote_code: bool
) -> int:
    """Merge the adapter at `path`, or that of the run or checkpoint there; return 0. Raises what `merge` raises."""
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
    tell(*_merge_lines(report), _took(report.seconds, before))
    return 0


def run_convert(model: str, output: str, dtype: str, max_shard_bytes: int, trust_remote_code: bool) -> int:
    """Convert the model; return 0. Raises what `convert` raises."""
    before = peak_bytes()
    report = convert(
        model, Path(output), dtype=dtype, max_shard_bytes=max_shard_bytes, trust_remote_code=trust_remote_code
    )
    saved = report.saved
    how = f"quantised ({report.method})" if report.method is not None else "plain weights"
    source = f"source      {report.source}: {how}, {bytes_text(report.source_bytes)}"
    tell(source, *saved_lines(saved), _written("written", saved), _took(report.seconds, before))
    return 0


def _written(label: str, saved: SaveReport, what: str = "") -> str:
    size = f"{bytes_text(saved.total_bytes)} in {plural(len(saved.files), 'file')}"
    return f"{label:<11} {saved.directory}: {what}{saved.tensors:,} tensors in {dtype_text(saved)}, {size}"


def _took(seconds: float, before: int) -> str:
    return f"            {seconds:.1f} s, {bytes_text(peak_bytes() - before)} of memory above the start"


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


def _merge_lines(report: MergeReport) -> Iterator[str]:
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
        numbered = re.match(r".*?\.\d+(?=\.)", target.module)
        layers.setdefault(numbered[0] if numbered else target.module, []).append(target)
    for layer, targets in layers.items():
        names = (target.name.removeprefix(layer).lstrip(".") or target.name for target in targets)
        counts = ("" if target.experts is None else f" of {target.experts} experts" for target in targets)
        yield f"merged      {layer}: {', '.join(map(str.__add__, names, counts))}"
        for target in targets:
            if unused := report.unused.get(target.weight):
                shown = ", ".join(map(str, unused[:_LISTED]))
                more = f" and {len(unused) - _LISTED} more" if len(unused) > _LISTED else ""
                yield f"            {target.name}: nothing added to experts {shown}{more}, whose B is all zero"
    if biases := [name for name, each in report.plan.replaced.items() if each.scaling is not None]:
        yield f"added       {len(biases):,} biases of adapters, to {biases[0]} and the like"
    for name, each in report.plan.replaced.items():
        if each.scaling is None:
            rows = "" if each.rows is None else f", {len(each.rows):,} rows"
            yield f"replaced    {name}{rows}"
    yield from saved_lines(report.saved)
    yield _written("written", report.saved)
    compared = report.compared
    yield (
        f"compared    a sample of {compared.matrices:,} merged weights ({compared.experts:,} of one expert each) with "
        f"base + adapter: off by at most {compared.worst:.2f} of what rounding allows"
    )
    if compared.left is not None:
        yield f"            codes leave {compared.left:.0%} of what the adapter changes; --dtype bfloat16 leaves all"
