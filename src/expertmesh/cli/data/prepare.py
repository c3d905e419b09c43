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
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from expertmesh.cli.data.check import checked_here, note_lines
from expertmesh.config import Config
from expertmesh.config.errors import DistributedFailure, ExpertmeshError
from expertmesh.data import Preparation, PreparedData, Recipe, load_tokenizer
from expertmesh.data.sources import RowShare
from expertmesh.io.terminal import counted, plural
from expertmesh.launcher.supervise import processors
from expertmesh.training.startup.data import held_by_another

_SECONDS_BETWEEN_LOOKS = 2.0


def run(config: Config, workers: int | None = None) -> int:
    """Prepare `data.train` and `data.eval` with so many processes, by default one for each processor; returns 0.

    Raises what `train` would raise about them and about the model; what another machine or `output_dir` mends is noted.
    """
    notes: list[ExpertmeshError] = []
    checked = checked_here(config, notes=notes)
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
    print("\n".join(note_lines(notes)), end="\n" * bool(notes))
    return 0


def prepare(name: str, preparation: Preparation, workers: int) -> PreparedData:
    """Find the prepared tokens of the set `name`, or make them in `workers` processes; print which."""
    with ExitStack() as stack:
        while (found := preparation.find()) is None and (holder := held_by_another(stack, preparation)):
            print(f"{name} data: waiting for {holder}, which tokenizes it", flush=True)
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        if (found := found or preparation.find()) is not None:
            print(f"{name} data: is prepared already")
            return found
        return _made(name, preparation, workers)


def _made(name: str, preparation: Preparation, workers: int) -> PreparedData:
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
    print(f"{name} data: {plural(rows, 'row')} in {seconds:.1f} s, {rows / seconds:,.0f} rows/s, {workers} processes")
    found = preparation.find()
    assert found is not None
    return found


def _write(name: str, preparation: Preparation, building: Path, workers: int) -> int:
    """Let `workers` processes write their shares; returns how many rows there were."""
    context = multiprocessing.get_context("fork")
    running: dict[Connection, BaseProcess] = {}
    for index in range(workers):
        receiver, sender = context.Pipe(duplex=False)
        arguments = preparation, building, RowShare(index, workers), sender
        running[receiver] = context.Process(target=_work, args=arguments, daemon=True)
        running[receiver].start()
        sender.close()
    rows = 0
    try:
        with counted(f"tokenizing {name} data", "rows") as told:  # after the forks: a bar has a thread
            while running:
                for ready in wait(list(running)):
                    assert isinstance(ready, Connection)
                    try:
                        more = ready.recv()
                    except EOFError:
                        _refuse_dead(running.pop(ready))
                        continue
                    rows += more
                    told(more)
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


def _work(preparation: Preparation, building: Path, share: RowShare, sender: Connection) -> None:
    # One thread each: there are as many processes as processors.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    preparation.write_share(building, share, sender.send)
