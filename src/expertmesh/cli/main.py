"""`expertmesh VERB`: reads the command line, calls the verb, turns its end into a message and an exit code.

Exit codes: 0 done; 2 bad input; 3 integrity; 4 refused for security; 5 a rank died or hung; 1 a bug of ours,
with its traceback; 130 and 143 stopped by Ctrl-C and SIGTERM; 141 nobody reads the output any more.

typer reads the command line, prints help, completes in shells and suggests what was meant. A verb runs after typer has
returned (see `main`), and imports what is heavy only then.
"""

import functools
import gc
import importlib
import inspect as signatures
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import typer
from typer import Argument, Option

from expertmesh import __version__
from expertmesh.cli.options import (
    DEFAULT_SHARD_SIZE,
    DTYPE,
    FILE,
    SHARD_SIZE,
    ConfigFile,
    InitOptions,
    MergedDtype,
    Model,
    N,
    Output,
    Overrides,
    PlanOptions,
    TrainArguments,
    TrustRemoteCode,
    VerifyArguments,
    WrittenDtype,
)
from expertmesh.config import Config, load_config
from expertmesh.config.errors import ExpertmeshError, InputError
from expertmesh.config.root import schema_text
from expertmesh.io.terminal import prepare_output, print_log, tell
from expertmesh.launcher.launch import RunOptions
from expertmesh.launcher.launch import run as run_ranks
from expertmesh.launcher.torchrun import report as report_error
from expertmesh.launcher.worker import lazy_imports, leave
from expertmesh.training.startup.packages import refuse_missing_packages

INTERRUPTED = 130
PIPE_CLOSED = 141  # what a shell says of a process that ended by SIGPIPE
TRAIN = "expertmesh.planning.forecast:train_with_forecast"
ErrorFormat = Literal["text", "json"]
Options = TypeVar("Options")
app = typer.Typer(
    help="Train Hugging Face Mixture-of-Experts models with expert parallelism.",
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    subcommand_metavar="VERB ...",
)


def main(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    said: dict[str, str] = {}
    try:
        verb = app(list(arguments), prog_name="expertmesh", standalone_mode=False, obj=said)
        # An exit code, after --help and the like. The verb runs here because typer takes every broken pipe for a
        # reader that has ended.
        return verb if isinstance(verb, int) else int(verb())
    except typer.TyperException as error:
        return report_error(_usage_error(error), as_json=said.get("error_format") == "json")
    except ExpertmeshError as error:
        return report_error(error, as_json=said.get("error_format") == "json")
    except KeyboardInterrupt:
        return INTERRUPTED


def entry_point() -> NoReturn:
    """Run the `expertmesh` script."""
    prepare_output()
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:  # a second one, while the first was dealt with
        code = INTERRUPTED
    except BrokenPipeError:
        # A pipe whose other end is closed, not some other pipe that broke.
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        if not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
            raise
        # Whoever read the output (`| head`) has what they wanted; Python must not try to write the rest at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = PIPE_CLOSED
    if code == INTERRUPTED:  # a third must not end the ending
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if "RANK" in os.environ:
        leave(code)
    if "triton" in sys.modules:  # torch imports it; at exit it prints a page of what was not collected
        gc.unfreeze()
    else:
        gc.freeze()  # nothing here is worth a search for garbage before the process ends
    sys.exit(code)


def _usage_error(error: typer.TyperException) -> InputError:
    """Return typer's complaint about a wrong command line as one sentence."""
    context = getattr(error, "ctx", None)
    command = "expertmesh" if context is None else context.command_path
    message = error.format_message().removesuffix(".").replace("Value error, ", "")
    if meant := getattr(error, "possibilities", None):
        message = f"{error.message}. Did you mean {' or '.join(sorted(meant))}?"
    more = "" if message.endswith("?") else f"; {command} --help tells more"
    return InputError(f"{message}{more}", key="cli.usage")


def verb(function: Callable[..., int]) -> Callable[..., int]:
    """Make `function` a verb of its name. For typer it returns what is to be called, with its arguments."""

    @functools.wraps(function)
    def read(**arguments: Any) -> Callable[[], int]:
        return functools.partial(function, **arguments)

    app.command()(read)
    return function


def with_options(options: type[Options]) -> Callable[[Callable[[Options], int]], Callable[..., int]]:
    """Make the fields of a dataclass the options of a function that takes one."""

    def decorate(function: Callable[[Options], int]) -> Callable[..., int]:
        def expanded(**arguments: Any) -> int:
            return function(options(**arguments))

        expanded.__name__, expanded.__doc__ = function.__name__, function.__doc__
        expanded.__signature__ = signatures.signature(options)  # type: ignore[attr-defined]
        return expanded

    return decorate


def call(function: str, *arguments: object) -> int:
    """Import the module of `module:function`, which takes seconds; call it and return its exit code."""
    print_log("info")
    if sys.stderr.isatty():
        tell("starting   importing torch and transformers", error=True)
    module, _, name = function.partition(":")
    with lazy_imports():
        imported = importlib.import_module(module)
    return int(getattr(imported, name)(*arguments))


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"expertmesh {__version__}")
        raise typer.Exit


def _keep_error_format(context: typer.Context, wanted: ErrorFormat) -> ErrorFormat:
    """Store the format as soon as it is read, so that it holds for an unknown verb too."""
    context.ensure_object(dict)["error_format"] = wanted
    return wanted


@app.callback()
def root(
    error_format: Annotated[
        ErrorFormat,
        Option(
            callback=_keep_error_format, help="of an error on stderr: a sentence, or a JSON object with its stable key"
        ),
    ] = "text",
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Take the options before the verb."""


@verb
@with_options(InitOptions)
def init(options: InitOptions) -> int:
    """write a configuration that fits a model, its data and these devices"""
    return call("expertmesh.cli.init:run", options)


@verb
@with_options(TrainArguments)
def train(arguments: TrainArguments) -> int:
    """fine-tune the model that a YAML file describes"""
    given = arguments
    options = RunOptions(
        given.nproc, given.max_time, given.max_restarts, given.audit, given.profile, elastic=given.elastic
    )
    quiet = ["log.level=warning"] if given.quiet else []
    read = load_config(given.config, [*(given.overrides or ()), *quiet])
    refuse_missing_packages(read)
    return run_ranks(read, TRAIN, options, _preflight)


def _preflight(config: Config, ranks: int, ranks_per_node: int) -> None:
    """Refuse what ranks would refuse, before they are started; under torchrun each rank calls it itself."""
    with lazy_imports():
        from expertmesh.training.startup.preflight import preflight, refuse_weights

    refuse_weights(preflight(config, ranks, ranks_per_node))


@verb
def inspect(
    model: Model,
    trust_remote_code: TrustRemoteCode = False,
) -> int:
    """show what a model is made of, from its configuration alone"""
    return call("expertmesh.cli.inspect:run", model, trust_remote_code)


@verb
def check(
    config: ConfigFile,
    overrides: Overrides = None,
    samples: Annotated[int, N(help="samples to show")] = 3,
    nproc: Annotated[int | None, N(help="for so many ranks (default: as in train)")] = None,
) -> int:
    """validate a YAML file, its data and its tokenizer without training"""
    return call("expertmesh.cli.data:run_check", load_config(config, overrides or ()), samples, nproc)


@verb
def prepare(
    config: ConfigFile,
    overrides: Overrides = None,
    workers: Annotated[int | None, N(help="processes (default: one for each processor)")] = None,
) -> int:
    """tokenize the data of a YAML file once, for every start that comes"""
    return call("expertmesh.cli.data:run_prepare", load_config(config, overrides or ()), workers)


@verb
@with_options(PlanOptions)
def plan(options: PlanOptions) -> int:
    """predict memory and speed of every layout, without GPUs"""
    given = [f"--{name}" for name in ("yaml", "json", "simulate") if getattr(options, name)]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)}: give one of them", key="cli.usage")
    placing = {name: getattr(options, name) for name in ("placement", "ep", "replicas", "output")}
    if options.placement is not None:
        if options != PlanOptions(**placing):
            raise InputError(
                "--placement: takes --ep, --replicas and --output alone; plan layouts in a call of its own",
                key="cli.usage",
            )
        return call("expertmesh.cli.plan:run_placement", options)
    if alone := [f"--{name}" for name, value in placing.items() if value is not None]:
        raise InputError(f"{' and '.join(alone)}: of --placement, which is not given", key="cli.usage")
    if not options.model or not options.devices:
        raise InputError("plan: give MODEL and --devices, or --placement and --ep", key="cli.usage")
    return call("expertmesh.cli.plan:run", options)


@verb
@with_options(VerifyArguments)
def verify(arguments: VerifyArguments) -> int:
    """prove a job against the unsharded model, or check a checkpoint"""
    return call("expertmesh.cli.verify:run", arguments)


@verb
def export(
    checkpoint: Annotated[str, Argument(metavar="RUN_OR_CHECKPOINT", help="a checkpoint, or a run: its newest one")],
    output: Output,
    dtype: Annotated[WrittenDtype | None, Option(help="as save.dtype, or a format (default: the run's)")] = None,
    max_shard_size: Annotated[int, SHARD_SIZE] = DEFAULT_SHARD_SIZE,
    trust_remote_code: TrustRemoteCode = False,
    adapter_format: Annotated[
        Literal["peft", "per-expert"] | None,
        Option(help="of a LoRA run's adapter: PEFT's own (default), or with keys for each expert, as vLLM reads them"),
    ] = None,
) -> int:
    """write a checkpoint as a plain Hugging Face directory"""
    arguments = (checkpoint, output, dtype, max_shard_size, trust_remote_code, adapter_format)
    return call("expertmesh.cli.weights:run_export", *arguments)


@verb
def merge(
    adapter: Annotated[
        str,
        Argument(metavar="ADAPTER", help="PEFT directory, LoRA run (its adapter or newest checkpoint) or checkpoint"),
    ],
    output: Output,
    base: Annotated[str | None, Option(metavar="MODEL", help="hub id or directory (default: the adapter's)")] = None,
    dtype: Annotated[MergedDtype, DTYPE] = "auto",
    max_shard_size: Annotated[int, SHARD_SIZE] = DEFAULT_SHARD_SIZE,
    trust_remote_code: TrustRemoteCode = False,
) -> int:
    """write an adapter and its base as one plain Hugging Face directory"""
    return call("expertmesh.cli.weights:run_merge", adapter, output, base, dtype, max_shard_size, trust_remote_code)


@verb
def convert(
    model: Annotated[str, Argument(metavar="MODEL", help="hub id or local directory")],
    output: Output,
    dtype: Annotated[WrittenDtype, DTYPE] = "auto",
    max_shard_size: Annotated[int, SHARD_SIZE] = DEFAULT_SHARD_SIZE,
    trust_remote_code: TrustRemoteCode = False,
) -> int:
    """write a model's weights in another dtype, plain or quantised"""
    return call("expertmesh.cli.weights:run_convert", model, output, dtype, max_shard_size, trust_remote_code)


@verb
def report(
    runs: Annotated[list[str], Argument(metavar="RUN...", help="output_dir of a run, finished or not; of several")],
    output: Annotated[
        str | None, FILE(help="where to write the page (default: RUN/report.html, or report.html of several runs)")
    ] = None,
) -> int:
    """write one HTML page about a run, or one that compares several"""
    return call("expertmesh.cli.report:run", runs, output)


@verb
def doctor(
    output: Annotated[str, Option(metavar="DIR", help="where runs will be written")] = ".",
    json: Annotated[bool, Option("--json", help="print everything as JSON")] = False,
) -> int:
    """say whether this machine can train, in a block for bug reports"""
    return call("expertmesh.cli.doctor:run", output, json)


@verb
def schema() -> int:
    """print the JSON schema of the configuration, for editors"""
    print(schema_text(), end="")
    return 0


@verb
def demo(
    output: Annotated[Path, Option(metavar="DIR", help="directory of inputs and runs")] = Path("demo"),
    long: Annotated[bool, Option("--long", help="three epochs: minutes instead of half a minute")] = False,
) -> int:
    """train a small model on 2 ranks of this machine and prove it, without downloads"""
    return call("expertmesh.demo.run:run", output, long)
