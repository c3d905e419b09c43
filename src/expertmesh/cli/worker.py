"""One rank of a training job: runs the training function and turns how it ends into an exit code.

`python -m expertmesh.cli.worker CONFIG RECORDS` is what our launcher starts N times; under torchrun,
`run_rank` is called in the process that torchrun started. A rank of our launcher prints no error itself: it
leaves a record in the directory RECORDS, and the launcher reports one for all.
"""

import argparse
import importlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from expertmesh.cli.failures import RankFailure, wait_for_peers
from expertmesh.config import Config, load_config
from expertmesh.config.errors import ExpertmeshError

TRAIN = "expertmesh.training.run:train"
UNEXPECTED = 1
PEERS_SECONDS = 3.0


def run_rank(config: Config, train: str, failed: Callable[[RankFailure], None]) -> int:
    """Call `train` (`module:function`) with `config` and return this rank's exit code.

    Called on every rank, before a process group exists; issues no collective. `failed` receives the failure.
    """
    rank = int(os.environ["RANK"])
    try:
        module, _, function = train.partition(":")
        getattr(importlib.import_module(module), function)(config)
    except ExpertmeshError as error:
        failed(RankFailure(rank, error.exit_code, str(error), "", time.time_ns()))
        return error.exit_code
    except (Exception, SystemExit) as error:
        named = f"{type(error).__name__}: {error}".rstrip(": ").splitlines()[0]
        failed(RankFailure(rank, UNEXPECTED, named, traceback.format_exc(), time.time_ns()))
        return UNEXPECTED
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
    # The launcher forwards Ctrl-C to every rank. Python would notice it only between two collectives; the
    # kernel's own way of ending a process works at any moment and prints no traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parser = argparse.ArgumentParser(prog="python -m expertmesh.cli.worker")
    parser.add_argument("config", type=Path)
    parser.add_argument("records", type=Path)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--train", default=TRAIN)
    options = parser.parse_args(arguments)
    _end_when_gone(options.parent)

    def record(failure: RankFailure) -> None:
        failure.write(options.records)
        if not failure.traceback:
            wait_for_peers(options.records, int(os.environ["WORLD_SIZE"]), PEERS_SECONDS)

    leave(run_rank(load_config(options.config), options.train, record))


def _end_when_gone(parent: int) -> None:
    """End this process when the launcher is gone, even by SIGKILL: a rank must never outlive its job."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(128 + signal.SIGHUP)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


if __name__ == "__main__":
    main()
