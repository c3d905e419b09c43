"""One rank of a job: runs the function that the launcher was given and turns how it ends into an exit code.

`python -m expertmesh.launcher.worker CONFIG DIRECTORY --function MODULE:FUNCTION` is what our launcher starts N times;
under torchrun, `run_rank` is called in the process that torchrun started. A rank of our launcher prints no error
itself: it leaves a `RankFailure` in DIRECTORY, and the launcher reports one for all.
"""

import argparse
import ctypes
import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from expertmesh.config import Config, load_config
from expertmesh.launcher.lazy_imports import lazy_imports
from expertmesh.launcher.rank_files import RankFailure, progress_file, show_stack_when_asked
from expertmesh.training.control import Control, Stopped
from expertmesh.training.progress import Progress

BEAT_SECONDS = 0.5
PR_SET_PDEATHSIG = 1


def run_rank(config: Config, function: str, control: Control) -> int:
    """Call `function` (`module:function`) with `config` and `control`; returns 0, or the exit code of `Stopped`.

    Called on every rank, before a process group exists; issues no collective. Raises what the function raises.
    """
    module, _, name = function.partition(":")
    with lazy_imports():
        imported = importlib.import_module(module)
    try:
        getattr(imported, name)(config, control)
    except Stopped as stopped:
        # Saved and done. torchrun sends SIGTERM to all ranks when the first ends; that must not change the exit code.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        return stopped.exit_code
    return 0


def leave(code: int) -> NoReturn:
    """End this rank's process with `code`, whatever the libraries in it would make of that.

    On CPU, gloo's threads abort some processes in tear-down after a correct run ("terminate called without an
    active exception"); after a failure, NCCL's tear-down can wait for peers that are gone. Both would replace
    the exit code.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    torch = sys.modules.get("torch")
    if code == 0 and torch is not None and torch.accelerator.is_available():
        sys.exit(0)
    os._exit(code)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the rank that the launcher's environment (RANK, WORLD_SIZE) names, and end the process."""
    # Outside the training loop Ctrl-C ends the process. Python would notice it only between two collectives; the
    # kernel's own way of ending a process works at any moment and prints no traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parser = argparse.ArgumentParser(prog="python -m expertmesh.launcher.worker")
    parser.add_argument("config", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--function", required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--launch", required=True)
    parser.add_argument("--deadline", type=float)
    parser.add_argument("--audit", default="sampled")
    parser.add_argument("--arguments", default="")
    options = parser.parse_args(arguments)

    rank = int(os.environ["RANK"])
    show_stack_when_asked(options.directory, rank)
    progress = Progress(progress_file(options.directory, rank))
    progress.start()
    _watch(options.parent, progress)
    control = Control(progress, options.deadline, options.launch, options.audit, options.arguments)
    try:
        code = run_rank(load_config(options.config), options.function, control)
    except (Exception, SystemExit) as error:
        failure = RankFailure.of(rank, error)
        failure.write(options.directory)
        code = failure.exit_code
    leave(code)


def _watch(parent: int, progress: Progress) -> None:
    """Show that this process runs, and end it when the launcher is gone, even by SIGKILL: no rank outlives its job."""
    if sys.platform == "linux":  # the kernel does it also for a rank that is stopped or stuck
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            progress.beat()
            time.sleep(BEAT_SECONDS)
        os._exit(128 + signal.SIGHUP)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


if __name__ == "__main__":
    main()
