"""`expertmesh verify`: proves the sharded job of a configuration or a model, or checks a training checkpoint.

What ranks do in a proof is in expertmesh.verification; here is which of the three is meant, the configuration that
`--model` stands for, and options that make no sense together. Imports nothing heavy before these are refused.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertmesh.cli.options import VerifyArguments
from expertmesh.cli.printing import located_text, refuse_unwritable
from expertmesh.config import Config, load_config, make_config
from expertmesh.config.errors import InputError, IntegrityError, SecurityError
from expertmesh.distributed.environment import find_place
from expertmesh.distributed.layout import CONFIGURED_AXES, DENSE_AXES
from expertmesh.io.terminal import bytes_text, plural, tell
from expertmesh.launcher.launch import RunOptions, job_size
from expertmesh.launcher.launch import run as run_ranks
from expertmesh.launcher.worker import lazy_imports
from expertmesh.verification.options import DEFAULT_TOKENS, LAYERS, VerifyOptions

if TYPE_CHECKING:
    from expertmesh.verification.checkpoint import Verification, VerifiedExperts

FORMAT, VERSION = "expertmesh-verification", 1
VERIFY = "expertmesh.verification.run:verify"
# No name of a file: `--model` is verified on token ids drawn at random.
_NO_DATA = "random token ids"
_LENGTH = 512


def run(arguments: VerifyArguments) -> int:
    """Check a checkpoint, or prove a job; returns the exit code."""
    refuse_unwritable(arguments.json)
    if arguments.model is not None:
        return _prove_model(arguments, arguments.model)
    if arguments.what is None:
        raise InputError("verify: name a configuration or a checkpoint, or a model with --model", key="cli.usage")
    if arguments.parallel is not None:
        raise InputError(
            "--parallel is for --model; override parallel.ep=4 and the like for a configuration", key="cli.usage"
        )
    path = Path(arguments.what)
    if not path.is_dir() and (path.is_file() or path.suffix in (".yaml", ".yml")):
        return _prove(load_config(path, arguments.overrides or ()), arguments, arguments.nproc)
    given = [name for name in ("nproc", "layers", "tokens", "only", "self_test") if getattr(arguments, name)]
    if given or arguments.overrides:
        what = f"--{given[0].replace('_', '-')}" if given else (arguments.overrides or [""])[0]
        raise InputError(
            f"{what} is for a configuration, and {arguments.what} is not one; leave it out", key="cli.usage"
        )
    return _check(arguments.what, arguments.json)


def _prove_model(arguments: VerifyArguments, model: str) -> int:
    words = [word for word in (arguments.what, *(arguments.overrides or ())) if word is not None]
    if odd := [word for word in words if "=" not in word]:
        raise InputError(f"verify: {odd[0]} beside --model; give one of them", key="cli.usage")
    tell(f"model       {model}, on random token ids")
    sizes = _sizes(arguments.parallel or "")
    ranks = arguments.nproc
    if ranks is None and "fsdp" in sizes and find_place() is None:
        ranks = math.prod(sizes.get(axis, 1) for axis in DENSE_AXES)
    return _prove(_configuration(model, sizes, words, ranks), arguments, ranks)


def _prove(config: Config, arguments: VerifyArguments, nproc: int | None) -> int:
    options = VerifyOptions(
        layers=arguments.layers,
        tokens=arguments.tokens or DEFAULT_TOKENS,
        self_test=arguments.self_test,
        only=tuple(arguments.only.split(",")) if arguments.only else LAYERS,
        random_data=arguments.model is not None,
        report=None if arguments.json is None else str(Path(arguments.json).absolute()),
    )
    try:
        return run_ranks(config, VERIFY, RunOptions(nproc=nproc, arguments=options.dump()))
    finally:
        options.remove_scratch(config)


def _sizes(text: str) -> dict[str, int]:
    """Return the size of each axis in a text such as `ep=4 fsdp=4`."""
    sizes = {}
    for word in text.replace(",", " ").split():
        axis, _, number = word.partition("=")
        if axis not in CONFIGURED_AXES or not number.isdecimal() or int(number) < 1:
            raise InputError(
                f"--parallel {word}: is not an axis and its size; write e.g. ep=4 ({', '.join(CONFIGURED_AXES)})",
                key="cli.usage",
            )
        sizes[axis] = int(number)
    return sizes


def _configuration(model: str, sizes: dict[str, int], overrides: list[str], nproc: int | None) -> Config:
    """Return the configuration of `--model`: two micro-batches of one row on each data and pp rank, and defaults."""
    ranks, _ = job_size(nproc)
    shared = sizes.get("cp", 1) * sizes.get("tp", 1) * sizes.get("pp", 1)
    values = {
        "model": {"name_or_path": model},
        "data": {"train": [{"path": _NO_DATA}], "max_length": _LENGTH, "packing": False},
        "train": {"global_batch_size": 2 * sizes.get("pp", 1) * max(1, ranks // shared)},
        "parallel": dict(sizes),
        "output_dir": "expertmesh-verify",
    }
    return make_config(values, overrides, source="--model")


def _check(path: str, report: str | None) -> int:
    """Check the checkpoint at `path`, or the newest of the run at `path`, and print what its experts look like.

    Returns 0 if nothing is wrong with it. Raises `IntegrityError` with everything that is wrong, `SecurityError` if
    something in it is unsafe, `InputError` when there is no checkpoint to read.
    """
    with lazy_imports():
        from expertmesh.checkpoint.remote import locate_local
        from expertmesh.verification.checkpoint import verify
        from expertmesh.verification.result import write_json

    checkpoint, found = locate_local(path, anew=True)
    tell(f"checkpoint  {located_text(checkpoint, found)}")
    verified = verify(checkpoint)
    for line in _lines(verified):
        tell(line)
    if report is not None:
        write_json(_content(verified), Path(report))
    if not verified.findings:
        tell(f"sound       all files are there, and no others; hashes and values are right ({verified.seconds:.1f} s)")
        return 0
    count = len(verified.findings)
    title = f"{checkpoint}: {count} thing{'s are' if count > 1 else ' is'} wrong with it"
    unsafe = any(finding.unsafe for finding in verified.findings)
    kind, key = (SecurityError, "checkpoint.unsafe") if unsafe else (IntegrityError, "checkpoint.damaged")
    raise kind("\n".join([title, *(finding.text for finding in verified.findings)]), key=key)


def _lines(verified: "Verification") -> Iterator[str]:
    manifest = verified.manifest
    axes = ", ".join(f"{axis} {size}" for axis, size in manifest.layout.items() if size > 1) or "one process"
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    ranks = plural(manifest.world_size, "rank")
    yield f"written     {manifest.created}, after step {manifest.step}, by {ranks} ({axes})"
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


def _experts_text(experts: "VerifiedExperts") -> str:
    distinct, dead = len(set(experts.sha256)), experts.norm.count(0.0)
    low, high = min(experts.norm), max(experts.norm)
    if experts.filled is None:
        return f"{len(experts.norm)} experts, {distinct} different, {dead} dead, norm {low:.4g} to {high:.4g}"
    zero, filled = experts.filled.count(0.0), [share for share in experts.filled if share] or [0.0]
    adapters = f"{len(experts.norm)} experts' adapters, {distinct} different, norm {low:.4g} to {high:.4g}"
    return f"{adapters}; B all zero in {zero}, else {min(filled):.0%} to {max(filled):.0%} not zero"


def _content(verified: "Verification") -> dict[str, Any]:
    """Return what the report holds."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "checkpoint": str(verified.directory),
        "step": verified.manifest.step,
        "sound": not verified.findings,
        "findings": verified.findings,
        "files": len(verified.manifest.files),
        "bytes": verified.manifest.total_bytes,
        "replicated_parts": verified.replicated,
        "experts": verified.experts,
        "experts_left_out": verified.experts_left_out,
    }
