"""Under torchrun: what our own launcher does, where its agent does otherwise.

The agent starts all ranks again after any failure, also one that every start would end in; and its ranks train on as
orphans when it is killed.
"""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from expertmesh.config.errors import DistributedFailure, ExpertmeshError
from expertmesh.launcher.rank_files import RankFailure

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
        error_file, attempt = environment.get("TORCHELASTIC_ERROR_FILE"), environment.get("TORCHELASTIC_RESTART_COUNT")
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
