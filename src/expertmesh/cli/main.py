"""`expertmesh VERB`: reads the command line, calls the verb, turns its end into a message and an exit code.

Exit codes: 0 done; 2 bad input; 3 integrity; 4 refused for security; 5 a rank died or hung; 1 a bug of ours,
with its traceback; 130 and 143 stopped by Ctrl-C and SIGTERM. Nothing heavy is imported before the
configuration is read.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import NoReturn

from expertmesh.cli.launch import in_job
from expertmesh.cli.launch import run as run_training
from expertmesh.cli.worker import leave
from expertmesh.config import load_config
from expertmesh.config.errors import ExpertmeshError

INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb: what it does in a line, the arguments it takes, and the function that does it."""

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; argparse raises `SystemExit` (`--help`, bad options)."""
    verb, rest = _read_verb(arguments)
    parser = argparse.ArgumentParser(prog=f"expertmesh {verb}", description=VERBS[verb].summary)
    VERBS[verb].add_arguments(parser)
    options = parser.parse_intermixed_args(rest)
    try:
        return VERBS[verb].run(options)
    except ExpertmeshError as error:
        _print_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


def entry_point() -> NoReturn:
    """What the `expertmesh` script calls."""
    code = main(sys.argv[1:])
    if in_job():
        leave(code)
    sys.exit(code)


def _read_verb(arguments: Sequence[str]) -> tuple[str, Sequence[str]]:
    width = max(map(len, VERBS))
    lines = "\n".join(f"  {name:<{width}}  {verb.summary}" for name, verb in VERBS.items())
    parser = argparse.ArgumentParser(
        prog="expertmesh",
        usage="expertmesh VERB ...",
        description="Train Hugging Face Mixture-of-Experts models with expert parallelism.",
        epilog=f"verbs (expertmesh VERB --help tells more):\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"expertmesh {version('expertmesh')}")
    if not arguments or arguments[0].startswith("-"):
        parser.parse_args(arguments)
        parser.error(f"a verb is missing; use one of {', '.join(VERBS)}")
    if arguments[0] not in VERBS:
        parser.error(f"{arguments[0]!r} is not a verb; use one of {', '.join(VERBS)}")
    return arguments[0], arguments[1:]


def _print_error(message: str) -> None:
    rank = f"rank {os.environ['RANK']}: " if in_job() else ""
    first, *more = f"{rank}{message}".splitlines()
    print("\n       ".join([f"error: {first}", *more]), file=sys.stderr)


def _config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="the YAML file of the run")
    parser.add_argument(
        "overrides",
        metavar="KEY=VALUE",
        nargs="*",
        help="instead of the file's value, e.g. train.max_steps=10",
    )


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    _config_arguments(parser)
    parser.add_argument(
        "--nproc",
        metavar="N",
        type=_positive,
        help="local ranks to start (default: one per accelerator, 2 on a CPU); not under torchrun",
    )


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="hub id or local directory")
    parser.add_argument("--world-size", metavar="N", type=_positive, help="show the layouts for N ranks")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the model's own Python code run")


def _check_arguments(parser: argparse.ArgumentParser) -> None:
    _config_arguments(parser)
    parser.add_argument("--samples", metavar="N", type=_positive, default=3, help="samples to show (default: 3)")


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _train(options: argparse.Namespace) -> int:
    return run_training(load_config(options.config, options.overrides), options.nproc)


def _inspect(options: argparse.Namespace) -> int:
    from expertmesh.cli import inspect  # like check below: imports torch and transformers

    return inspect.run(options.model, options.world_size, options.trust_remote_code)


def _check(options: argparse.Namespace) -> int:
    config = load_config(options.config, options.overrides)
    from expertmesh.cli import check

    return check.run(config, options.samples)


VERBS = {
    "train": Verb("fine-tune the model that a YAML file describes", _train_arguments, _train),
    "inspect": Verb("show what a model is made of and how it can be laid out", _inspect_arguments, _inspect),
    "check": Verb("validate a YAML file, its data and its tokenizer without training", _check_arguments, _check),
}
