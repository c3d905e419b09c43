"""`expertmesh verify CONFIG` and `verify --model DIR --parallel "ep=4 fsdp=4"`: starts the ranks of a verification.

What they do is in expertmesh.verification; here is the command line: which of the two it is, the configuration that
`--model` stands for, and options that make no sense together. Imports nothing heavy before the configuration is read.
"""

import argparse
import os
import tempfile
from pathlib import Path

from expertmesh.config import Config, load_config
from expertmesh.config.errors import InputError
from expertmesh.config.overrides import apply_override
from expertmesh.config.yaml_text import dump_yaml
from expertmesh.launcher.launch import in_job, local_ranks
from expertmesh.launcher.launch import run as run_ranks
from expertmesh.launcher.lazy_imports import lazy_imports
from expertmesh.launcher.options import RunOptions
from expertmesh.verification.options import DEFAULT_TOKENS, LAYERS, VerifyOptions

VERIFY = "expertmesh.verification.run:verify"
AXES = ("pp", "replicate", "fsdp", "cp", "tp", "ep")
# No name of a file: `--model` is verified on token ids drawn at random.
_NO_DATA = "random token ids"
_LENGTH = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `verify`, of checkpoints and of configurations alike."""
    parser.add_argument(
        "what",
        metavar="CONFIG_OR_CHECKPOINT",
        nargs="?",
        help="the YAML file of a run, to prove its sharded job; or a checkpoint directory, or that of a run",
    )
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="instead of the file's value")
    parser.add_argument(
        "--json", metavar="FILE", help="write the report to FILE (of a configuration: default output_dir)"
    )
    proof = parser.add_argument_group("to prove a job")
    proof.add_argument("--model", metavar="DIR", help="instead of CONFIG: a model, on random token ids")
    proof.add_argument("--parallel", metavar='"ep=4 fsdp=4"', help="the layout, for --model")
    proof.add_argument("--nproc", metavar="N", type=_positive, help="local ranks to start; not under torchrun")
    proof.add_argument("--layers", metavar="N", type=_positive, help="the model's first N layers alone")
    proof.add_argument(
        "--tokens", metavar="M", type=_positive, help=f"of one step over all ranks, about (default: {DEFAULT_TOKENS:,})"
    )
    proof.add_argument("--only", metavar="LAYER,...", help=f"some layers of the proof: {', '.join(LAYERS)}")
    proof.add_argument("--self-test", action="store_true", help="plant known bugs and show that they are caught")


def run(options: argparse.Namespace) -> int:
    """Verify a checkpoint, or prove a job; returns the exit code."""
    words = [word for word in (options.what, *options.overrides) if word is not None]
    if options.model is None:
        if options.what is None:
            raise InputError("verify: name a configuration or a checkpoint, or a model with --model")
        if options.parallel is not None:
            raise InputError("--parallel is for --model; override parallel.ep=4 and the like for a configuration")
        if not _is_configuration(options.what):
            return _checkpoint(options)
        return _prove(load_config(options.what, options.overrides), options, options.nproc)
    odd = [word for word in words if "=" not in word]
    if odd:
        raise InputError(f"verify: {odd[0]} beside --model; give one of them")
    sizes = _sizes(options.parallel or "")
    return _prove(
        _configuration(options.model, sizes, words, _ranks(sizes, options.nproc)), options, _ranks(sizes, options.nproc)
    )


def _is_configuration(path: str) -> bool:
    return not Path(path).is_dir() and (Path(path).is_file() or Path(path).suffix in (".yaml", ".yml"))


def _checkpoint(options: argparse.Namespace) -> int:
    given = [name for name in ("nproc", "layers", "tokens", "only") if getattr(options, name) is not None]
    given += ["self-test"] if options.self_test else []
    if given or options.overrides:
        what = f"--{given[0]}" if given else options.overrides[0]
        raise InputError(f"{what} is for a configuration, and {options.what} is not one; leave it out")
    with lazy_imports():
        from expertmesh.cli import verify

    return verify.run(options.what, options.json)


def _prove(config: Config, options: argparse.Namespace, nproc: int | None) -> int:
    arguments = VerifyOptions(
        layers=options.layers,
        tokens=options.tokens or DEFAULT_TOKENS,
        self_test=options.self_test,
        only=tuple(options.only.split(",")) if options.only else LAYERS,
        random_data=options.model is not None,
        report=None if options.json is None else str(Path(options.json).absolute()),
    )
    return run_ranks(config, RunOptions(nproc=nproc, arguments=arguments.dump()), VERIFY, preflights=False)


def _sizes(text: str) -> dict[str, int]:
    """`ep=4 fsdp=4` as numbers."""
    sizes = {}
    for word in text.replace(",", " ").split():
        axis, _, number = word.partition("=")
        if axis not in AXES or not number.isdigit() or int(number) < 1:
            raise InputError(f"--parallel {word}: is not an axis and its size; write e.g. ep=4 ({', '.join(AXES)})")
        sizes[axis] = int(number)
    return sizes


def _ranks(sizes: dict[str, int], nproc: int | None) -> int | None:
    """Of the job: those of the launcher, what was asked for, or what the layout makes if it says fsdp."""
    if in_job() or nproc is not None or "fsdp" not in sizes:
        return nproc
    ranks = 1
    for axis in ("pp", "replicate", "fsdp", "cp", "tp"):
        ranks *= sizes.get(axis, 1)
    return ranks


def _configuration(model: str, sizes: dict[str, int], overrides: list[str], nproc: int | None) -> Config:
    """What `--model` stands for: two micro-batches of one row on each data rank (and pp rank), and defaults."""
    ranks = int(os.environ["WORLD_SIZE"]) if in_job() else local_ranks(nproc)
    shared = sizes.get("cp", 1) * sizes.get("tp", 1) * sizes.get("pp", 1)
    values = {
        "model": {"name_or_path": model},
        "data": {"train": [{"path": _NO_DATA}], "max_length": _LENGTH, "packing": False},
        "train": {"global_batch_size": 2 * sizes.get("pp", 1) * max(1, ranks // shared)},
        "parallel": dict(sizes),
        "output_dir": "expertmesh-verify",
    }
    for override in overrides:
        apply_override(values, override)
    with tempfile.TemporaryDirectory(prefix="expertmesh-") as directory:
        path = Path(directory, "model.yaml")
        path.write_text(dump_yaml(values), encoding="utf-8")
        return load_config(path)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)
