"""Exchange JSON between the processes of a job by the store where they met, beside all process groups.

Ranks report by it where they hang (launcher/hangs.py), and rank 0 shares uploads out (checkpoint/remote.py). Each call
is a request to the process that holds the store, from any thread; nothing here is a collective. A lost store raises
`torch.distributed.DistError`.
"""

import datetime
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it has it, and does not list it


@dataclass(frozen=True, slots=True)
class JobStore:
    """A part of the job's store: keys below `prefix`, each with a JSON value."""

    store: "TCPStore"
    prefix: str
    """Begins every key; another for each use, and for each start of ranks that a store may outlive."""

    @classmethod
    def connect(cls, address: str, port: int, prefix: str, seconds: float) -> "JobStore":
        """Open a connection of its own; wait at most `seconds` for the store, and in each later call."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        timeout = datetime.timedelta(seconds=seconds)
        return cls(TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout), prefix)

    def put(self, key: str, value: Any) -> None:
        """Write a value of `key`, in place of an earlier one."""
        self.store.set(self.prefix + key, json.dumps(value))

    def get(self, key: str) -> Any:
        """Return the value of `key`, or None while there is none."""
        key = self.prefix + key
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def take(self, key: str) -> Any:
        """Return the value of `key` and delete it, or None while there is none."""
        value = self.get(key)
        if value is not None:
            self.store.delete_key(self.prefix + key)
        return value

    def wait(self, key: str, seconds: float) -> Any:
        """Return the value of `key`, which is waited for; in no thread that has to receive signals."""
        self.store.wait([self.prefix + key], datetime.timedelta(seconds=seconds))
        return json.loads(self.store.get(self.prefix + key))

    def count(self, key: str) -> int:
        """Add 1 to a number, which begins at 0, and return it."""
        return int(self.store.add(self.prefix + key, 1))
