"""Under torchrun: what our own launcher does, where its agent does otherwise.

The agent starts all ranks again after any failure, also one that every start would end in; and its ranks train on as
orphans when it is killed. It looks at no failure: each rank would print the same refusal, or the connections that it
has lost to the rank which failed first. The directory that torchrun has made for the errors of an attempt is where
ranks see what has been told. There the telling rank leaves its error for the summary of torchrun, as `record` does.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from expertmesh.config.errors import DistributedFailure, ExpertmeshError
from expertmesh.launcher.rank_files import RankFailure

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_TOLD = "expertmesh-told-"
_REFUSED = "expertmesh-refused.json"


@dataclass(frozen=True, slots=True)
class TorchrunAgent:
    """The agent that started this rank, if one did. `notes`: a directory that is the same for all of its attempts."""

    rank: int
    attempt: int
    notes: Path | None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "TorchrunAgent":
        # RUN/attempt_N/LOCAL_RANK/error.json
        error_file, attempt = environment.get(_ERROR_FILE), environment.get("TORCHELASTIC_RESTART_COUNT")
        if not error_file or attempt is None or not attempt.isdecimal():
            return cls(0, 0, None)
        return cls(int(environment["RANK"]), int(attempt), Path(error_file).parents[2])

    @property
    def is_there(self) -> bool:
        return self.notes is not None

    def remember(self, error: ExpertmeshError) -> None:
        """Note what no further attempt can change."""
        if self.notes is not None and not isinstance(error, DistributedFailure):
            with contextlib.suppress(OSError), (self.notes / _REFUSED).open("x", encoding="utf-8") as file:
                json.dump(asdict(RankFailure.of(self.rank, error)), file)

    def refuse_again(self) -> None:
        """Raise what an earlier attempt has ended by, if that would end this one too."""
        if self.notes is None or self.attempt == 0:
            return
        try:
            failure = RankFailure(**json.loads((self.notes / _REFUSED).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return
        raise failure.error(prefix=f"not tried again (attempt {self.attempt + 1}): ")


def has_to_tell(message: str, *, may_follow: bool) -> bool:
    """Whether this rank has to print `message`. Always where torchrun has not started it.

    `may_follow`: the error may come from that of another rank, so anything that has been told is told instead of it.
    """
    if _ERROR_FILE not in os.environ:
        return True
    file = Path(os.environ[_ERROR_FILE])
    attempt = file.parents[1]  # of all local ranks; each has a directory of its own below
    what = "first" if may_follow else hashlib.sha256(message.encode()).hexdigest()[:16]
    try:
        if may_follow and any(attempt.glob(f"{_TOLD}*")):
            return False
        (attempt / f"{_TOLD}{what}").touch(exist_ok=False)
        content = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        file.write_text(json.dumps({"message": content}), encoding="utf-8")
    except FileExistsError:
        return False
    except OSError:
        return True  # a directory that cannot be used must not cost the error itself
    return True
