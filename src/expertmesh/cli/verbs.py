"""The verbs of `expertmesh`: what each takes, and the module that it calls.

typer reads the command line, prints help, completes in shells and suggests what was meant. A verb runs after typer has
returned (see `main`), and imports what is heavy only then.
"""

import functools
import inspect as signatures
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer
from typer import Argument, Option

from expertmesh.cli.options import (
    DEFAULT_SHARD_SIZE,
    ConfigFile,
    Dtype,
    Model,
    Output,
    Overrides,
    PlanOptions,
    ShardSize,
    TrustRemoteCode,
    VerifyArguments,
    duration,
)
from expertmesh.config import Config, InputError, load_config
from expertmesh.launcher.launch import RunOptions
from expertmesh.launcher.launch import run as run_ranks
from expertmesh.launcher.lazy_imports import lazy_imports

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
        def call(**arguments: Any) -> int:
            return function(options(**arguments))

        call.__name__, call.__doc__ = function.__name__, function.__doc__
        call.__signature__ = signatures.signature(options)  # type: ignore[attr-defined]
        return call

    return decorate


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"expertmesh {version('expertmesh')}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    error_format: Annotated[
        ErrorFormat, Option(help="of an error on stderr: a sentence, or a JSON object with its stable key")
    ] = "text",
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    context.obj["error_format"] = error_format


@verb
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    nproc: Annotated[
        int | None,
        Option(
            metavar="N",
            min=1,
            help="local ranks to start (default: one per accelerator, 2 on a CPU); not under torchrun",
        ),
    ] = None,
    max_time: Annotated[
        float | None,
        Option(
            metavar="TIME",
            parser=duration,
            help="save and stop (exit 143) after the step at which this time is over: 90s, 30m, 2h or seconds",
        ),
    ] = None,
    max_restarts: Annotated[
        int, Option(metavar="N", min=0, help="how often to start all local ranks again after one died or hung")
    ] = 0,
    audit: Annotated[
        Literal["sampled", "full"],
        Option(help="compare samples of the loaded weights with their files, or every byte, with a hash per expert"),
    ] = "sampled",
) -> int:
    """fine-tune the model that a YAML file describes"""
    options = RunOptions(nproc=nproc, max_seconds=max_time, max_restarts=max_restarts, audit=audit)
    return run_ranks(load_config(config, overrides or ()), TRAIN, options, _preflight)


def _preflight(config: Config, ranks: int) -> None:
    """What ranks would refuse, before they are started; under torchrun each rank calls it itself."""
    with lazy_imports():
        from expertmesh.training.preflight import preflight

    preflight(config, ranks, ranks_per_node=ranks)


@verb
def inspect(
    model: Model,
    world_size: Annotated[int | None, Option(metavar="N", min=1, help="show the layouts for N ranks")] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> int:
    """show what a model is made of and how it can be laid out"""
    with lazy_imports():
        from expertmesh.cli.inspect import run

    return run(model, world_size, trust_remote_code)


@verb
def check(
    config: ConfigFile,
    overrides: Overrides = None,
    samples: Annotated[int, Option(metavar="N", min=1, help="samples to show")] = 3,
) -> int:
    """validate a YAML file, its data and its tokenizer without training"""
    found = load_config(config, overrides or ())
    with lazy_imports():
        from expertmesh.cli.check import run

    return run(found, samples)


@verb
@with_options(PlanOptions)
def plan(options: PlanOptions) -> int:
    """predict memory, speed and cost of every layout, without GPUs"""
    if options.yaml and options.json:
        raise InputError("--yaml and --json: give one of them", key="cli.usage")
    with lazy_imports():
        from expertmesh.cli.plan import run

    return run(options)


@verb
@with_options(VerifyArguments)
def verify(arguments: VerifyArguments) -> int:
    """prove a job against the unsharded model, or check a checkpoint"""
    from expertmesh.cli.verify import run

    return run(arguments)


@verb
def export(
    checkpoint: Annotated[
        str,
        Argument(metavar="RUN_OR_CHECKPOINT", help="a checkpoint directory, or that of a run: its newest checkpoint"),
    ],
    output: Output,
    dtype: Dtype = None,
    max_shard_size: ShardSize = DEFAULT_SHARD_SIZE,
    trust_remote_code: TrustRemoteCode = False,
    adapter_format: Annotated[
        Literal["peft", "per-expert"] | None,
        Option(help="of a LoRA run's adapter: PEFT's own (default), or with keys for each expert, as vLLM reads them"),
    ] = None,
) -> int:
    """write a checkpoint as a plain Hugging Face directory"""
    with lazy_imports():
        from expertmesh.cli.export import run

    return run(checkpoint, output, dtype, max_shard_size, trust_remote_code, adapter_format)


@verb
def merge(
    adapter: Annotated[
        str,
        Argument(
            metavar="ADAPTER",
            help="a PEFT directory; a LoRA run: its adapter, or else its newest checkpoint's; or a checkpoint",
        ),
    ],
    output: Output,
    base: Annotated[
        str | None, Option(metavar="MODEL", help="hub id or local directory (default: what the adapter says)")
    ] = None,
    dtype: Dtype = None,
    max_shard_size: ShardSize = DEFAULT_SHARD_SIZE,
    trust_remote_code: TrustRemoteCode = False,
) -> int:
    """write an adapter and its base as one plain Hugging Face directory"""
    with lazy_imports():
        from expertmesh.cli.merge import run

    return run(adapter, output, base, dtype, max_shard_size, trust_remote_code)


@verb
def report(
    run: Annotated[str, Argument(metavar="RUN", help="the output_dir of a run, finished or not")],
    output: Annotated[
        str | None, Option(metavar="FILE", help="where to write the page (default: RUN/report.html)")
    ] = None,
) -> int:
    """write one HTML page about a run"""
    with lazy_imports():
        from expertmesh.cli.report import run as write_report

    return write_report(run, output)


@verb
def bench(
    parts: Annotated[
        list[str] | None, Argument(metavar="PART", help="step, layer, load or lora (default: all of them)")
    ] = None,
    quick: Annotated[bool, Option("--quick", help="smaller sizes and fewer repetitions: a look, not a result")] = False,
    nproc: Annotated[
        int | None, Option(metavar="N", min=1, help="local ranks (default: one per accelerator; CPU: 4)")
    ] = None,
    json: Annotated[str | None, Option(metavar="FILE", help="write every figure to FILE")] = None,
) -> int:
    """measure expertmesh beside its peers on this machine"""
    # torch reads it when it is imported; its profiler warns of every block that was there before.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with lazy_imports():
        from expertmesh.cli.bench import run

    return run(parts or [], quick, nproc, json)


@verb
def schema() -> int:
    """print the JSON schema of the configuration, for editors"""
    from expertmesh.config.schema import schema_text

    print(schema_text(), end="")
    return 0


@verb
def demo(
    output: Annotated[Path, Option(metavar="DIR", help="directory of inputs and runs")] = Path("demo"),
) -> int:
    """train a small model on 2 ranks of this machine, without downloads"""
    from expertmesh.demo.run import run

    return run(output)
