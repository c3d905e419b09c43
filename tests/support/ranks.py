"""Real gloo ranks for tests: `shared_ranks(fn, world_size, *args)` runs `fn` on each and returns what each gave.

What prints, or patches another library before ranks are called, is for `run_ranks(fn, world_size, *args)`, which forks
new ones. Forking keeps torch and transformers imported (0.3 s for four ranks instead of 15 s through a launcher). Every
run has a wall-clock limit for the whole job and a shorter one for each collective, and leaves no process behind,
whether it passes, fails or hangs. `LivingRanks` are started once for many functions: what a process pays at its first
steps (pages that it copies after the fork, code that runs for the first time) is then paid once.
"""

import datetime
import faulthandler
import functools
import gc
import inspect
import itertools
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import dill
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.tensor.debug
import tqdm
from accelerate.state import AcceleratorState, GradientState
from torch._guards import detect_fake_mode
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

import expertmesh as em
from expertmesh.config.errors import ExpertmeshError
from expertmesh.state import other_code

# What else a first use would load in every forked rank.
for _name in em.__all__:
    getattr(em, _name)
get_checkpoint_conversion_mapping("qwen3_moe")


# Only what hangs comes near it: on a busy machine a test of seconds may take minutes.
LIMIT_SECONDS = 500
# How long the others get to fail as well when a rank has.
GRACE_SECONDS = 30
# How long a rank that refuses waits for the others to refuse as well.
REFUSAL_SECONDS = 2
# How many functions the same ranks run: their groups stay, each with sockets and sleeping threads.
TURNS = 60


class RankFailed(AssertionError):
    """One or more ranks raised, died or hung; the message carries every rank's traceback."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = LIMIT_SECONDS,
    meanwhile: Callable[[Sequence[BaseProcess]], None] | None = None,
) -> list[Any]:
    """Run `fn(*args)` in `world_size` forked gloo ranks; return the ranks' (picklable) results in rank order.

    The first rank to fail ends the others after a short grace, so that the failure that came first is reported
    first. `timeout` is in seconds, for the whole job. `meanwhile` runs here once all ranks are started, and gets them.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="ranks-") as scratch:
        processes = [
            context.Process(target=_rank_main, args=(fn, args, rank, world_size, scratch, timeout), daemon=True)
            for rank in range(world_size)
        ]
        _start(processes, scratch)
        try:
            if meanwhile is not None:
                meanwhile(processes)
            _wait_for_all(processes, timeout)
        finally:
            _end(processes)
        return _collect(processes, Path(scratch), timeout)


# A function and what it is called with; or the place of one in the `fns` that ranks were started with.
Order = int | tuple[Callable[..., Any], tuple[Any, ...]]


class LivingRanks:
    """Forked gloo ranks that run functions one after the other, each in process groups of its own.

    Of `fns` the ranks have what this process has when they are started, so whatever those need is computed before. A
    function that fails ends the ranks: `alive` is then false, and the next one wants new ranks. A refusal that every
    rank raises does not: no one is left in a collective. What a function patches, and the environment, are put back
    behind it.
    """

    def __init__(self, fns: Sequence[Callable[[], Any]], world_size: int, timeout: float = LIMIT_SECONDS) -> None:
        """Start the ranks. `timeout` is in seconds, for each function."""
        self.alive = True
        self._code: Code | None = None
        self._timeout = timeout
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-")
        self._scratch = Path(self._directory.name)
        code = _code()  # once, for all of them
        context = multiprocessing.get_context("fork")
        pipes = [context.Pipe() for _ in range(world_size)]
        self._connections = [here for here, _ in pipes]
        self._processes: list[Any] = [
            context.Process(
                target=_living_rank_main,
                args=(fns, there, rank, world_size, self._directory.name, timeout, code),
                daemon=True,
            )
            for rank, (_, there) in enumerate(pipes)
        ]
        _start(self._processes, self._directory.name)
        for _, there in pipes:
            there.close()

    def start(self, order: Order) -> bool:
        """Have every rank run what `order` says, in this process's environment.

        False if they have run as many functions as ranks may, or this process has patched code since they were forked.
        """
        message = _pickled((order, dict(os.environ)))
        if self._code is None:
            self._code = _code()  # with what pickling has imported
        elif any(_patches(self._code)):
            self.end()
            return False
        try:
            for connection in self._connections:
                connection.send_bytes(message)
            started = self._all_answer(GRACE_SECONDS)
        except OSError:
            started = False
        if not started:
            self.end()
        return started

    def results(self) -> list[Any]:
        """Return what each rank's function gave, in rank order; raises `RankFailed` as `run_ranks` does."""
        answered = False
        try:
            answered = self._all_answer(self._timeout)
            if not answered:
                _end(self._processes)
            return _collect(self._processes, self._scratch, self._timeout)
        except BaseException:  # a failed rank, or whoever ended this test
            if not answered:
                self.end()
            raise
        finally:
            for path in [*self._scratch.glob("result-*"), *self._scratch.glob("error-*")]:
                path.unlink()

    def end(self) -> None:
        """Leave no process behind."""
        self.alive = False
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._directory.cleanup()

    def _all_answer(self, seconds: float) -> bool:
        """Wait for a word from every rank; when one has ended, the others get the grace of `run_ranks`."""
        deadline = time.monotonic() + seconds
        all_alive = True
        pending = dict(zip(self._processes, self._connections, strict=True))
        while pending and time.monotonic() < deadline:
            # Not the end of a pipe alone: ranks that were forked later have a copy of it.
            sentinels = [process.sentinel for process in pending]
            wait([*sentinels, *pending.values()], timeout=deadline - time.monotonic())
            for process, connection in list(pending.items()):
                try:
                    if connection.poll():
                        connection.recv()
                    elif wait([process.sentinel], timeout=0):
                        raise EOFError
                    else:
                        continue
                except (EOFError, OSError):
                    process.join()  # a sentinel is ready a moment before its process can be waited for
                    all_alive = False
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                del pending[process]
        return all_alive and not pending


class SharedRanks:
    """Called as `run_ranks`, with any function; ranks stay for the next call, by their number, until `end`.

    conftest.py ends large ones behind each module, and all with the session.
    """

    def __init__(self) -> None:
        self._ranks: dict[int, LivingRanks] = {}

    def __call__(self, fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        """Run `fn(*args)` on as many ranks as before, or new ones where those have ended; return their results."""
        ranks = self._ranks.get(world_size)
        if ranks is None or not ranks.alive or not ranks.start((fn, args)):
            ranks = self._ranks[world_size] = LivingRanks([], world_size)
            if not ranks.start((fn, args)):
                raise RuntimeError(f"{world_size} new ranks do not start")
        return ranks.results()

    def end(self, above: int = 0) -> None:
        """Leave none behind of more ranks than `above`."""
        for world_size in [size for size in self._ranks if size > above]:
            ranks = self._ranks.pop(world_size)
            if ranks.alive:
                ranks.end()


shared_ranks = SharedRanks()


def _start(processes: Sequence[BaseProcess], scratch: str) -> None:
    for rank in range(len(processes)):
        Path(scratch, f"stack-{rank}").touch()
    gc.disable()  # until the ranks have frozen what is here
    try:
        for process in processes:
            process.start()
    finally:
        gc.enable()


def _end(processes: Sequence[BaseProcess]) -> None:
    """Kill ranks that hang, when they have written where they are; no process is left."""
    hanging = [process for process in processes if process.is_alive()]
    for process in hanging:
        os.kill(process.pid or 0, signal.SIGUSR1)
    if hanging:
        time.sleep(0.5)
    for process in hanging:
        process.kill()
    for process in processes:
        process.join()


def _wait_for_all(processes: list[Any], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    pending = {process.sentinel: process for process in processes}
    while pending and time.monotonic() < deadline:
        for sentinel in wait(list(pending), timeout=deadline - time.monotonic()):
            process = pending.pop(sentinel)
            process.join()  # a sentinel is ready a moment before its process can be waited for
            if process.exitcode != 0:
                # Peers notice a dead rank within seconds, and then write their own tracebacks.
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)


def _collect(processes: list[Any], scratch: Path, timeout: float) -> list[Any]:
    results, failures = [], []
    for rank, process in enumerate(processes):
        error, result = scratch / f"error-{rank}", scratch / f"result-{rank}"
        if error.exists():
            failures.append((error.stat().st_mtime, f"rank {rank} raised:\n{error.read_text()}"))
        elif process.exitcode not in (0, None) or not result.exists():
            stack = (scratch / f"stack-{rank}").read_text()  # where it crashed, if a signal ended it
            what = f"rank {rank} hung or died (exit {process.exitcode}, limit {timeout} s)"
            failures.append((time.time(), f"{what}\n{stack}"))
        else:
            results.append(pickle.loads(result.read_bytes()))
    if failures:
        raise RankFailed("\n".join(text for _, text in sorted(failures)))
    return results


def _rank_main(
    fn: Callable[..., Any], args: tuple[Any, ...], rank: int, world: int, scratch: str, timeout: float
) -> None:
    _set_up(rank, scratch)
    error = _run(lambda: fn(*args), rank, world, scratch, f"{scratch}/store", timeout)
    # gloo's teardown aborts at random after correct runs; leaving here skips it.
    os._exit(0 if error is None else 1)


def _living_rank_main(
    fns: Sequence[Callable[[], Any]],
    orders: Connection,
    rank: int,
    world: int,
    scratch: str,
    timeout: float,
    before: "Code",
) -> None:
    _set_up(rank, scratch)
    _share_one_device()
    parent = os.getppid()
    left: list[Any] = []
    random_states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    here = Path.cwd()
    for turn in itertools.count():
        while not orders.poll(1):
            if os.getppid() != parent:
                os._exit(1)
        order, environment = dill.loads(orders.recv_bytes())
        if turn == TURNS:
            os._exit(0)
        if turn > 0:  # only now is every rank done with them
            left += _leave_groups()
        torch.set_rng_state(random_states[0])
        np.random.set_state(random_states[1])
        random.setstate(random_states[2])
        os.environ.clear()
        os.environ |= environment
        orders.send("starting")
        fn = fns[order] if isinstance(order, int) else functools.partial(order[0], *order[1])
        run = functools.partial(_unpatched, fn, before)
        error = _run(run, rank, world, scratch, f"{scratch}/store-{turn}", timeout)
        if error is not None and not (isinstance(error, ExpertmeshError) and _all_raise(scratch, world)):
            os._exit(1)
        del error  # with what its frames hold
        os.chdir(here)
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
        orders.send("done")


# Modules and classes, each with the values that its names have.
Code = list[tuple[Any, dict[str, Any]]]
_NEW = object()


def _code() -> Code:
    """Return what tests patch: all of expertmesh, collectives, and what touches files and time."""
    found: Code = []
    for place, module in list(sys.modules.items()):
        if place.startswith("expertmesh") or place in ("os", "shutil", "time", "torch.distributed"):
            classes = [
                value
                for value in list(vars(module).values())
                if issubclass(type(value), type) and value.__module__ == place
            ]
            found += [(owner, dict(vars(owner))) for owner in [module, *classes]]
    return found


def _patches(before: Code) -> Iterator[tuple[Any, str, Any]]:
    """Yield what is not as `before`: a module or class, the name in it, and its value then, or `_NEW`."""
    for owner, then in before:
        now = vars(owner)
        if now == then:  # in C, by identity; nearly always the same
            continue
        for name in now.keys() | then.keys():
            if now.get(name, _NEW) is not then.get(name, _NEW) and not _may_change(owner, name, then.get(name)):
                yield owner, name, then.get(name, _NEW)


def _may_change(owner: Any, name: str, then: Any) -> bool:
    """Return whether a name may have another value: a variable of a module, what torch and pydantic keep in classes."""
    now = vars(owner).get(name)
    if getattr(now, "hooked", None) is True:  # the step of an optimizer's class, wrapped at its first instance
        return now.__wrapped__ is getattr(then, "__wrapped__", then)
    if not inspect.ismodule(owner):
        return name.startswith("__pydantic")
    return not any(callable(each) or inspect.ismodule(each) for each in (now, then))


def _unpatched(fn: Callable[[], Any], before: Code) -> Any:
    """Return what `fn` gives, and put back what it has patched: by mock anywhere, else in `before`."""
    try:
        return fn()
    finally:
        mock.patch.stopall()
        for owner, name, then in list(_patches(before)):
            if then is not _NEW:  # what is new may be a module that was imported
                setattr(owner, name, then)
            elif inspect.isfunction(vars(owner)[name]) and not inspect.ismodule(owner):
                delattr(owner, name)  # it stood over an inherited one


def _pickled(value: Any) -> bytes:
    # Not as a Connection pickles: it would share memory of tensors. Lambdas are for dill, which takes more by value.
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        return bytes(dill.dumps(value))


def _set_up(rank: int, scratch: str) -> None:
    # Garbage of the process that forked must never be collected here: a process group in it would wait for its threads,
    # which a fork does not copy.
    gc.freeze()
    gc.enable()
    # The lock of progress bars is shared with every process, of which some are killed, and with the thread that watches
    # them in the process that forked: whoever holds it at such a moment holds it for ever.
    tqdm.tqdm.set_lock(threading.RLock())
    tqdm.tqdm.monitor_interval = 0
    torch.set_num_threads(1)
    _remember_shapes()
    _record_outputs_of_pickled_models()
    stack = os.open(f"{scratch}/stack-{rank}", os.O_WRONLY)
    # Enabled again, not only for another file: a library may have put handlers of its own over pytest's.
    faulthandler.disable()
    faulthandler.enable(stack)
    faulthandler.register(signal.SIGUSR1, stack)


def _record_outputs_of_pickled_models() -> None:
    """Let a model that comes from another process record router logits: transformers notes in `__init__` who can."""
    set_state = PreTrainedModel.__setstate__

    def noted(self: Any, state: dict[str, Any]) -> None:
        set_state(self, state)
        _CAN_RECORD_REGISTRY[self] = self._can_record_outputs

    PreTrainedModel.__setstate__ = noted  # type: ignore[method-assign]


def _remember_shapes() -> None:
    """Let DTensor ask once in this process which shape an operation gives, not again for every mesh and placement.

    Each question makes a mode of fake tensors: a tenth of what tiny models take.
    """
    propagator: Any = ShardingPropagator
    ask, known = propagator._propagate_tensor_meta_non_cached, dict[Any, Any]()

    def asked_once(self: Any, schema: OpSchema) -> Any:
        arguments = schema.args_schema, schema.kwargs_schema
        shapes = tree_map(lambda each: each.tensor_meta if isinstance(each, DTensorSpec) else each, arguments)
        key = (schema.op, repr(shapes))
        if detect_fake_mode() is not None:  # traced shapes are symbols
            return ask(self, schema)
        if key not in known:
            known[key] = ask(self, schema)
        return known[key]

    propagator._propagate_tensor_meta_non_cached = asked_once


def _share_one_device() -> None:
    """Give all gloo groups of this process one device: each has a thread that wakes a hundred times a second.

    The thread polls without pause for a lock that another thread of the process holds. In batch mode, which it inherits
    from the thread that starts it, it does not take the core from that one: a third of the processor time.
    """
    gloo: Any = dist.ProcessGroupGloo
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    make, device = gloo.__init__, gloo.create_default_device()
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))

    def make_on_device(
        self: Any, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta, **_of_torch_2_15: Any
    ) -> None:
        options = gloo._Options()
        options._devices, options._timeout = [device], timeout
        make(self, store, rank, size, options)

    gloo.__init__ = make_on_device


def _all_raise(scratch: str, world: int) -> bool:
    """Return whether every rank has written a traceback by now, or a moment later."""
    deadline = time.monotonic() + REFUSAL_SECONDS
    while (written := len([*Path(scratch).glob("error-*")])) < world and time.monotonic() < deadline:
        time.sleep(0.005)
    return written == world


def _run(
    fn: Callable[[], Any], rank: int, world: int, scratch: str, store: str, timeout: float
) -> BaseException | None:
    """Write what `fn` gives in a default group of its own, or the traceback of what it raises, which is returned."""
    # A Trainer's arguments may have set up one process alone in the process that forked.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    try:
        limit = datetime.timedelta(seconds=timeout)
        file_store = dist.FileStore(store, world)
        dist.init_process_group("gloo", store=file_store, rank=rank, world_size=world, timeout=limit)
        dist.barrier()  # a rank that ends while another still connects takes that one's traceback with it
        result = fn()
        dist.barrier()
        Path(scratch, f"result-{rank}").write_bytes(pickle.dumps(result))
    except BaseException as error:
        key = f"{type(error).__name__} of key {error.key}\n" if isinstance(error, ExpertmeshError) else ""
        Path(scratch, f"error-{rank}").write_text(traceback.format_exc() + key)
        return error
    return None


def _leave_groups() -> list[Any]:
    """Make torch forget all groups, and empty DTensor's caches: equal device meshes share entries, whose groups are
    then gone. Returns the groups, to be kept for as long as this process lives.
    """
    gc.collect()
    gc.freeze()  # what is left is caches: the next time need not look at them
    other_code._STAGES.clear()  # of models with stages that ran here
    # Alive, not torn down: gloo's teardown crashes at random on a thread of its own, which would end the next function.
    groups = list(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()
    for name in ("_clear_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache"):
        getattr(torch.distributed.tensor.debug, name, lambda: None)()
    return groups
