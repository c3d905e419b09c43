"""`expertmesh VERB`: reads the command line, calls the verb, turns its end into a message and an exit code.

Exit codes: 0 done; 2 bad input; 3 integrity; 4 refused for security; 5 a rank died or hung; 1 a bug of ours,
with its traceback; 130 and 143 stopped by Ctrl-C and SIGTERM; 141 nobody reads the output any more. Nothing
heavy is imported before the configuration is read.
"""

import argparse
import gc
import os
import select
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import NoReturn

from expertmesh.cli import prove
from expertmesh.cli.plan_options import add_arguments as plan_arguments
from expertmesh.config import load_config
from expertmesh.config.errors import ExpertmeshError
from expertmesh.io.terminal import printable
from expertmesh.launcher.launch import in_job
from expertmesh.launcher.launch import run as run_training
from expertmesh.launcher.lazy_imports import lazy_imports
from expertmesh.launcher.options import RunOptions, duration, size
from expertmesh.launcher.worker import leave

# What each rank of `train` runs: training, with a forecast from the planner, which training does not know.
TRAIN = "expertmesh.planning.forecast:train_with_forecast"
INTERRUPTED = 130
PIPE_CLOSED = 141  # what a shell says of a process that ended by SIGPIPE


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
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        if not _nobody_reads(sys.stdout.fileno()):
            raise
        # Whoever read the output (`| head`) has what they wanted; Python must not try to write the rest at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = PIPE_CLOSED
    if in_job():
        leave(code)
    gc.freeze()  # nothing here is worth a search for garbage before the process ends
    sys.exit(code)


def _nobody_reads(descriptor: int) -> bool:
    """Whether this is a pipe whose other end is closed, not some other pipe that broke."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


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
    first, *more = printable(f"{rank}{message}").splitlines()
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
    parser.add_argument(
        "--max-time",
        metavar="TIME",
        type=duration,
        help="save and stop (exit 143) after the step at which this time is over: 90s, 30m, 2h or seconds",
    )
    parser.add_argument(
        "--max-restarts",
        metavar="N",
        type=_count,
        default=0,
        help="how often to start all local ranks again after one died or hung (default: 0)",
    )
    parser.add_argument(
        "--audit",
        choices=("sampled", "full"),
        default="sampled",
        help="compare samples of the loaded weights with their files (default), or every byte, with a hash per expert",
    )


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="hub id or local directory")
    parser.add_argument("--world-size", metavar="N", type=_positive, help="show the layouts for N ranks")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the model's own Python code run")


def _check_arguments(parser: argparse.ArgumentParser) -> None:
    _config_arguments(parser)
    parser.add_argument("--samples", metavar="N", type=_positive, default=3, help="samples to show (default: 3)")


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint",
        metavar="RUN_OR_CHECKPOINT",
        help="a checkpoint directory, or that of a run: its newest checkpoint",
    )
    _output_arguments(parser, "as trained")
    parser.add_argument(
        "--adapter-format",
        choices=("peft", "per-expert"),
        help="of a LoRA run's adapter: PEFT's own (default), or with keys for each expert, as vLLM reads them",
    )


def _merge_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "adapter",
        metavar="ADAPTER",
        help="a directory of PEFT, or of a LoRA run (its adapter, or else its newest checkpoint's), or a checkpoint",
    )
    parser.add_argument("--base", metavar="MODEL", help="hub id or local directory (default: what the adapter says)")
    _output_arguments(parser, "that of the base's files")


def _output_arguments(parser: argparse.ArgumentParser, default_dtype: str) -> None:
    parser.add_argument("--output", metavar="DIR", required=True, help="directory to write; new or empty")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help=f"of the weights written, but for what the family keeps in float32 (default: {default_dtype})",
    )
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        type=size,
        default=size("5GB"),
        help="of one file of a model's weights: 5GB (default), 500MB, 4GiB or bytes",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="let the model's own Python code run")


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the output_dir of a run, finished or not")
    parser.add_argument("--output", metavar="FILE", help="where to write the page (default: RUN/report.html)")


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("parts", metavar="PART", nargs="*", help="step, layer, load or lora (default: all of them)")
    parser.add_argument(
        "--quick", action="store_true", help="smaller sizes and fewer repetitions: a look, not a result"
    )
    parser.add_argument(
        "--nproc", metavar="N", type=_positive, help="local ranks (default: one per accelerator; CPU: 4)"
    )
    parser.add_argument("--json", metavar="FILE", help="write every figure to FILE")


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return int(text)


def _train(options: argparse.Namespace) -> int:
    run_options = RunOptions(
        nproc=options.nproc,
        max_seconds=options.max_time,
        max_restarts=options.max_restarts,
        audit=options.audit,
    )
    return run_training(load_config(options.config, options.overrides), run_options, TRAIN)


def _inspect(options: argparse.Namespace) -> int:
    with lazy_imports():
        from expertmesh.cli import inspect

    return inspect.run(options.model, options.world_size, options.trust_remote_code)


def _check(options: argparse.Namespace) -> int:
    config = load_config(options.config, options.overrides)
    with lazy_imports():
        from expertmesh.cli import check

    return check.run(config, options.samples)


def _plan(options: argparse.Namespace) -> int:
    with lazy_imports():
        from expertmesh.cli import plan

    return plan.run(options)


def _export(options: argparse.Namespace) -> int:
    with lazy_imports():
        from expertmesh.cli import export

    return export.run(
        options.checkpoint,
        options.output,
        options.dtype,
        options.max_shard_size,
        options.trust_remote_code,
        options.adapter_format,
    )


def _merge(options: argparse.Namespace) -> int:
    with lazy_imports():
        from expertmesh.cli import merge

    return merge.run(
        options.adapter,
        options.output,
        options.base,
        options.dtype,
        options.max_shard_size,
        options.trust_remote_code,
    )


def _report(options: argparse.Namespace) -> int:
    with lazy_imports():
        from expertmesh.cli import report

    return report.run(options.run, options.output)


def _bench(options: argparse.Namespace) -> int:
    # torch reads it when it is imported; its profiler warns of every block that was there before.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with lazy_imports():
        from expertmesh.cli import bench

    return bench.run(options.parts, options.quick, options.nproc, options.json)


VERBS = {
    "train": Verb("fine-tune the model that a YAML file describes", _train_arguments, _train),
    "inspect": Verb("show what a model is made of and how it can be laid out", _inspect_arguments, _inspect),
    "check": Verb("validate a YAML file, its data and its tokenizer without training", _check_arguments, _check),
    "plan": Verb("predict memory, speed and cost of every layout, without GPUs", plan_arguments, _plan),
    "verify": Verb("prove a job against the unsharded model, or check a checkpoint", prove.add_arguments, prove.run),
    "export": Verb("write a checkpoint as a plain Hugging Face directory", _export_arguments, _export),
    "merge": Verb("write an adapter and its base as one plain Hugging Face directory", _merge_arguments, _merge),
    "report": Verb("write one HTML page about a run", _report_arguments, _report),
    "bench": Verb("measure expertmesh beside its peers on this machine", _bench_arguments, _bench),
}
