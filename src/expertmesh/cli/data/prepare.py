"""`expertmesh prepare CONFIG.yaml`: tokenize the data of a run before it, by all processors of this machine.

Afterwards `train` on any number of ranks, `check` and `verify` map the tokens. `train` prepares data itself that is not
prepared; this verb does it where no accelerator has to wait. Reads the model's config.json and tokenizer, never its
weights.
"""

import multiprocessing
import os
import shutil
import time
import uuid
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from expertmesh.cli.data.check import checked_here
from expertmesh.config import Config
from expertmesh.config.errors import DistributedFailure
from expertmesh.data import Preparation, PreparedData, Recipe, load_tokenizer
from expertmesh.data.sources import Share

_SECONDS_BETWEEN_LINES = 10.0


def run(config: Config, workers: int | None = None) -> int:
    """Prepare `data.train` and `data.eval` with so many processes, by default one for each processor; returns 0.

    Raises what `train` would raise about them.
    """
    checked = checked_here(config)
    tokenizer = load_tokenizer(config.model, config.data.chat_template)
    date = None
    sets = {f"eval {name}".strip(): sources for name, sources in config.data.eval_sets().items()}
    if config.data.stream:
        print("train data: is read as a stream, so there is nothing to prepare")
    else:
        sets = {"train": config.data.train} | sets
    for name, sources in sets.items():
        recipe = Recipe.of(config, sources, tokenizer, checked.vocab_size, date)
        found = prepare(name, Preparation.of(config, recipe), workers or processors())
        date = date or found.date
        print("\n".join(found.report.lines()))
        print(f"{name} data: {found.directory}", flush=True)
    return 0


def processors() -> int:
    """Those that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prepare(name: str, preparation: Preparation, workers: int) -> PreparedData:
    """Find the tokens, or have `workers` processes make them; says which."""
    if (found := preparation.find()) is not None:
        print(f"{name} data: is prepared already")
        return found
    if preparation.is_stale():
        print(f"{name} data: its rows have changed since it was prepared")
    began, building = time.monotonic(), preparation.building(uuid.uuid4().hex)
    try:
        rows = _write(name, preparation, building, workers)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    preparation.finish(building, workers)
    seconds = time.monotonic() - began
    print(f"{name} data: {rows:,} rows in {seconds:.1f} s, {rows / seconds:,.0f} rows/s, {workers} processes")
    found = preparation.find()
    assert found is not None
    return found


def _write(name: str, preparation: Preparation, building: Path, workers: int) -> int:
    """Let `workers` processes write their shares; returns how many rows there were."""
    context = multiprocessing.get_context("fork")
    running: dict[Connection, BaseProcess] = {}
    for index in range(workers):
        receiver, sender = context.Pipe(duplex=False)
        arguments = preparation, building, Share(index, workers), sender
        running[receiver] = context.Process(target=_work, args=arguments, daemon=True)
        running[receiver].start()
        sender.close()
    began = said = time.monotonic()
    rows = 0
    try:
        while running:
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                try:
                    rows += ready.recv()
                except EOFError:
                    _refuse_dead(running.pop(ready))
            now = time.monotonic()
            if now - said >= _SECONDS_BETWEEN_LINES:
                said = now
                print(f"{name} data: {rows:,} rows, {rows / (now - began):,.0f} rows/s", flush=True)
    finally:
        for process in running.values():
            process.kill()
            process.join()
    return rows


def _refuse_dead(process: BaseProcess) -> None:
    process.join()
    if process.exitcode:
        raise DistributedFailure(
            f"a process that tokenizes ended with {process.exitcode}, perhaps for want of memory; start again with "
            "fewer --workers",
            key="data.worker-ended",
        )


def _work(preparation: Preparation, building: Path, share: Share, sender: Connection) -> None:
    # One thread each: there are as many processes as processors.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    preparation.write_share(building, share, sender.send)
