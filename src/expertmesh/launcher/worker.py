"""Run one rank of a job: call the launcher's function and turn its end into an exit code.

Our launcher starts `python -m expertmesh.launcher.worker` N times; in ranks of another launcher, `run_rank` is called
in their processes. A rank of our launcher prints no error itself: it leaves a `RankFailure` in the directory of the
attempt, and the launcher reports one for all.
"""

import contextlib
import gc
import importlib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from expertmesh.config import Config, load_config
from expertmesh.io.parent import end_with_parent, watch_parent
from expertmesh.io.terminal import lasting_output, prepare_output
from expertmesh.launcher.rank_files import RankFailure, progress_file, show_stack_when_asked
from expertmesh.training.control import STOP_SIGNALS, Control, Progress, Stopped

TEARDOWN_SECONDS = 30


def run_rank(config: Config, function: str, control: Control) -> int:
    """Call `function` (`module:function`) with `config` and `control`; return 0, or the exit code of `Stopped`.

    Called on every rank, before a process group exists; issues no collective. Raises what the function raises.
    """
    # Before torch is imported; the user's own settings stay.
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        # The rows that experts receive are others in every step: blocks of fixed sizes would fragment.
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if config.train.deterministic:
        take_deterministic_algorithms()
    module, _, name = function.partition(":")
    with lazy_imports():
        imported = importlib.import_module(module)
    try:
        getattr(imported, name)(config, control)
    except Stopped as stopped:
        # Saved and done. torchrun sends SIGTERM to all ranks when the first ends; that must not change the exit code.
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        control.stopped_by = stopped.reason
        return stopped.exit_code
    return 0


@contextmanager
def lazy_imports() -> Iterator[None]:
    """Make imports of torch inside the block faster.

    They make a million objects that stay. Python's garbage collector would search them again and again meanwhile, and
    later in every full collection.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def take_deterministic_algorithms() -> None:
    """Let every operation of this process give the same bits again, or fail by name.

    Call it before a GPU is used: its matrix products read their setting once.
    """
    os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1"}
    import torch

    torch.use_deterministic_algorithms(True)


def leave(code: int) -> NoReturn:
    """End this rank's process with `code`, whatever the libraries in it would make of that.

    gloo's threads abort some processes in tear-down after a correct run ("terminate called without an active
    exception"); after a failure, NCCL's tear-down can wait for lost peers. Both would replace the exit code.
    """
    torch = sys.modules.get("torch")
    if code == 0 and torch is not None and torch.accelerator.is_available() and torch.distributed.is_initialized():
        torch.accelerator.synchronize()
        # NCCL's communicators want to be closed by all; a peer that does not must not keep the others.
        closing = threading.Thread(target=torch.distributed.destroy_process_group, daemon=True)
        closing.start()
        closing.join(TEARDOWN_SECONDS)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def main() -> NoReturn:
    """Run the rank that the launcher's environment (RANK, WORLD_SIZE) names, and end the process.

    On the command line: the configuration's file, the directory of this attempt, the function, the launcher's process,
    and JSON for `Control`.
    """
    # Outside the training loop Ctrl-C ends the process. Python would notice it only between two collectives; the
    # kernel's own way of ending a process works at any moment and prints no traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    prepare_output()
    config, attempt, function, parent, control = sys.argv[1:]
    directory, rank = Path(attempt), int(os.environ["RANK"])
    show_stack_when_asked(directory, rank)
    progress = Progress(progress_file(directory, rank))
    progress.start()
    end_with_parent()
    watch_parent(int(parent), progress.beat)
    with lasting_output():
        try:
            code = run_rank(load_config(config), function, Control(progress, **json.loads(control)))
        except (Exception, SystemExit) as error:
            failure = RankFailure.of(rank, error)
            failure.write(directory)
            code = failure.exit_code
        leave(code)


if __name__ == "__main__":
    main()
