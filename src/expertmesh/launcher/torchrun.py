"""Do under torchrun what our own launcher does, where torchrun's agent differs.

The agent starts all ranks again after any failure, also one by which every start would end; and its ranks train on as
orphans when it is killed. It examines no failure: each rank would print the same refusal, or its lost connections to
the rank which failed first. In the directory that torchrun has made for the errors of an attempt, ranks see what has
been printed. The printing rank leaves its error there for torchrun's summary, as `record` does.
"""

import contextlib
import hashlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from expertmesh.config import Config
from expertmesh.config.errors import DistributedFailure, ExpertmeshError, InputError
from expertmesh.distributed.environment import Rank, find_place
from expertmesh.io.parent import watch_parent
from expertmesh.io.terminal import printable, tell
from expertmesh.launcher.hangs import open_liveness
from expertmesh.launcher.rank_files import UNEXPECTED, RankFailure, continued_run, stopped_sentence
from expertmesh.launcher.worker import run_rank
from expertmesh.training.control import Control, StopReason

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_PRINTED = "expertmesh-told-"
_REFUSED = "expertmesh-refused.json"
_STOPPED = "expertmesh-stopped"
# By these a user ends a job. By SIGTERM an agent ends ranks that are to go on with others, by SIGUSR1 a machine goes.
_FOR_GOOD = (StopReason.MAX_TIME, StopReason.SIGINT)
# What the ranks of a job have found out together (hangs.py).
VERDICTS = ("rank.hung", "rank.lost")
# Keys of what every process on a machine finds, so that one prints it: the command line, its file, the installation.
_ONCE = ("cli.", "config.", "install.", "launch.nproc-differs", "launch.restarts-in-job", "launch.elastic-start")


@dataclass(frozen=True, slots=True)
class TorchrunAgent:
    """The agent that started this rank."""

    rank: int
    """The rank that it started."""
    attempt: int
    """Number of the agent's start, from 0."""
    directory: Path | None
    """A directory that is the same for all of its attempts; None if it has none."""
    world_size: int = 1
    """The number of ranks of the job."""
    run_id: str | None = None
    """The full job's name at torchrun."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "TorchrunAgent":
        # RUN/attempt_N/LOCAL_RANK/error.json
        error_file, attempt = environment.get(_ERROR_FILE), environment.get("TORCHELASTIC_RESTART_COUNT")
        if not error_file or attempt is None or not attempt.isdecimal():
            return cls(0, 0, None)
        rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        return cls(rank, int(attempt), Path(error_file).parents[2], world_size, environment.get("TORCHELASTIC_RUN_ID"))

    @property
    def is_there(self) -> bool:
        return self.directory is not None

    def remember(self, error: ExpertmeshError) -> None:
        """Record what no further attempt of equally many ranks can change."""
        if self.directory is not None and not isinstance(error, DistributedFailure):
            with contextlib.suppress(OSError), (self.directory / _REFUSED).open("x", encoding="utf-8") as file:
                json.dump({"world_size": self.world_size, "failure": asdict(RankFailure.of(self.rank, error))}, file)

    def remember_stop(self, reason: StopReason) -> None:
        """Record that the job has ended as its user wants: to the agent each exit code but 0 is a failure."""
        if self.directory is not None and reason in _FOR_GOOD:
            with contextlib.suppress(OSError):
                (self.directory / _STOPPED).write_text(str(reason.exit_code), encoding="utf-8")

    def stopped(self) -> int | None:
        """Return the exit code with which an earlier attempt has ended for good, or None."""
        try:
            return None if self.directory is None else int((self.directory / _STOPPED).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def refuse_again(self) -> None:
        """Raise the error by which an earlier attempt has ended, if it would end this one too."""
        if self.directory is None or self.attempt == 0:
            return
        try:
            record = json.loads((self.directory / _REFUSED).read_text(encoding="utf-8"))
            failure, ranks = RankFailure(**record["failure"]), record["world_size"]
        except (OSError, ValueError, TypeError, KeyError):
            return
        if ranks == self.world_size:
            raise failure.error(prefix=f"not tried again (attempt {self.attempt + 1}): ")


def run_here(config: Config, function: str, control: Control) -> int:
    """Run `function` as one rank of another launcher's job, which reports no bug of ours; return the exit code."""
    agent = TorchrunAgent.of(os.environ)
    if (code := agent.stopped()) is not None:
        return code
    agent.refuse_again()
    if agent.is_there:
        watch_parent(os.getppid(), control.progress.beat)
    liveness = open_liveness(control.progress, config, _tell_verdict)
    try:
        code = run_rank(config, function, control)
        agent.remember_stop(control.stopped_by)
        return code
    except ExpertmeshError as error:
        agent.remember(error)
        raise
    except KeyboardInterrupt:
        if os.environ["RANK"] == "0":
            run = continued_run(config, control.arguments)
            tell(stopped_sentence(signal.SIGINT, control.progress.status(), run), error=True)
        raise
    except (Exception, SystemExit) as error:
        if liveness is not None and (verdict := liveness.verdict_on(error)) is not None:
            raise verdict from error
        what = f"rank {os.environ['RANK']} failed {control.progress.status()}:\n{traceback.format_exc().rstrip()}"
        if must_print(what, may_follow=True):
            tell(f"error: {what}", error=True)
        return UNEXPECTED


def _tell_verdict(verdict: DistributedFailure) -> None:
    """Print the verdict in a rank that is ended because the others have waited for it in vain."""
    if must_print(str(verdict), may_follow=False):
        tell(f"error: {verdict}", error=True)


def refuse_elastic(ranks: tuple[int, int], place: Rank | None, environment: Mapping[str, str]) -> None:
    """Refuse a start with `--elastic` that no agent of torchrun can repeat with other ranks, or with too many."""
    fewest, most = ranks
    how = "torchrun --nnodes MIN:MAX --rdzv-backend c10d --rdzv-id NAME --max-restarts N"
    if place is None or place.starter != "torchrun":
        wrong = (
            f" {fewest}:{most} is for torchrun, whose agents start again on the machines that are left; start with "
            f"{how} -m expertmesh train"
        )
    elif not fewest <= place.world_size <= most:
        wrong = f" {fewest}:{most}, but torchrun has started {place.world_size} ranks; make --nnodes times "
        wrong += "--nproc-per-node fit"
    elif environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        wrong = ": torchrun would let ranks read the addresses of those that are gone; start it with the environment "
        wrong += "variable TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    elif environment.get("TORCHELASTIC_RUN_ID", "none") == "none":
        wrong = ": torchrun has no --rdzv-id, by which a start knows the output_dir of the one before it; give it one "
        wrong += "that no other job has"
    else:
        return
    raise InputError(f"--elastic{wrong}", key="launch.elastic-start")


def report(error: ExpertmeshError, *, as_json: bool = False) -> int:
    """Print the error that ends this process, on one of the ranks that end by it; return its exit code."""
    rank = os.environ.get("RANK", "")
    may_follow = isinstance(error, DistributedFailure) and error.key not in VERDICTS
    if _printed_by_another(error) or not must_print(str(error), may_follow=may_follow):
        return error.exit_code
    if as_json:
        record = {"key": error.key, "exit_code": error.exit_code, "message": str(error)}
        print(json.dumps({"rank": int(rank), **record} if rank.isdigit() else record), file=sys.stderr)
    else:
        first, *more = printable(f"rank {rank}: {error}" if rank else str(error)).splitlines()
        print("\n       ".join([f"error: {first}", *more]), file=sys.stderr)
    return error.exit_code


def _printed_by_another(error: ExpertmeshError) -> bool:
    """Return whether another process of a job of srun, mpirun or the like prints `error` for this one.

    Rank 0 prints what all ranks raise, the first rank of a machine what all of that machine find. For torchrun see
    `must_print`.
    """
    if error.on_all_ranks and not TorchrunAgent.of(os.environ).is_there:
        return os.environ.get("RANK", "0") != "0"
    if not error.key.startswith(_ONCE):
        return False
    try:
        place = find_place()
    except InputError:
        return False
    return place is not None and place.starter != "torchrun" and (place.local_rank or 0) > 0


class OneSentence:
    """A `sys.excepthook` for scripts that train by this package.

    An error that a user can mend ends them as it ends the command line, by one sentence and its exit code. Every other
    exception goes to the previous hook. Only what ends the process gets here: not what a notebook, a debugger or a test
    catches.
    """

    def __init__(self) -> None:
        self.before = sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        interactive = hasattr(sys, "ps1") or sys.flags.interactive  # a prompt goes on after an exception
        if isinstance(error, ExpertmeshError) and not interactive:
            # torch's own hook, in front of this one once ranks have met, collects what is printed and would not get on.
            with contextlib.redirect_stderr(sys.__stderr__):
                code = report(error)
            raise SystemExit(code)
        self.before(kind, error, trace)


def must_print(message: str, *, may_follow: bool) -> bool:
    """Return whether this rank has to print `message`. Always true where torchrun has not started it.

    `may_follow`: the error may follow from that of another rank, so anything that has been printed counts in place of
    it.
    """
    if _ERROR_FILE not in os.environ:
        return True
    file = Path(os.environ[_ERROR_FILE])
    attempt = file.parents[1]  # of all local ranks; each has a directory of its own below
    what = "first" if may_follow else hashlib.sha256(message.encode()).hexdigest()[:16]
    try:
        if may_follow and any(attempt.glob(f"{_PRINTED}*")):
            return False
        (attempt / f"{_PRINTED}{what}").touch(exist_ok=False)
        content = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        file.write_text(json.dumps({"message": content}), encoding="utf-8")
    except FileExistsError:
        return False
    except OSError:
        return True  # a directory that cannot be used must not cost the error itself
    return True
