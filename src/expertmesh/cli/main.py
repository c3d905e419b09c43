"""`expertmesh VERB`: reads the command line, calls the verb, turns its end into a message and an exit code.

Exit codes: 0 done; 2 bad input; 3 integrity; 4 refused for security; 5 a rank died or hung; 1 a bug of ours,
with its traceback; 130 and 143 stopped by Ctrl-C and SIGTERM; 141 nobody reads the output any more. Nothing
heavy is imported before the configuration is read.
"""

import gc
import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import typer

from expertmesh.cli.verbs import app
from expertmesh.config.errors import ExpertmeshError, InputError
from expertmesh.io.terminal import prepare_output
from expertmesh.launcher.torchrun import report
from expertmesh.launcher.worker import leave

INTERRUPTED = 130
PIPE_CLOSED = 141  # what a shell says of a process that ended by SIGPIPE


def main(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    said: dict[str, str] = {}
    try:
        verb = app(list(arguments), prog_name="expertmesh", standalone_mode=False, obj=said)
        # An exit code, after --help and the like. The verb runs here because typer takes every broken pipe for a
        # reader that has ended.
        return verb if isinstance(verb, int) else int(verb())
    except typer.TyperException as error:
        return report(_usage_error(error), as_json=said.get("error_format") == "json")
    except ExpertmeshError as error:
        return report(error, as_json=said.get("error_format") == "json")
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
        if not _nobody_reads(sys.stdout.fileno()):
            raise
        # Whoever read the output (`| head`) has what they wanted; Python must not try to write the rest at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = PIPE_CLOSED
    if code == INTERRUPTED:  # a third must not end the ending
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if "RANK" in os.environ:
        leave(code)
    gc.freeze()  # nothing here is worth a search for garbage before the process ends
    sys.exit(code)


def _nobody_reads(descriptor: int) -> bool:
    """Return whether this is a pipe whose other end is closed, not some other pipe that broke."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _usage_error(error: typer.TyperException) -> InputError:
    """Return typer's complaint about a wrong command line as one sentence."""
    context = getattr(error, "ctx", None)
    command = "expertmesh" if context is None else context.command_path
    message = error.format_message().removesuffix(".").replace("Value error, ", "")
    if meant := getattr(error, "possibilities", None):
        message = f"{error.message}. Did you mean {' or '.join(sorted(meant))}?"
    more = "" if message.endswith("?") else f"; {command} --help tells more"
    return InputError(f"{message}{more}", key="cli.usage")
