"""Hold the rendezvous store of a job in a launcher, so that no rank's end disturbs the last messages of the others.

On one machine the system chooses its port. On several the first machine's launcher holds it at the address that all
have, and the launchers meet there first: none starts ranks before all are known to start equally many.
"""

import contextlib
import datetime
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from expertmesh.config.errors import DistributedFailure, InputError
from expertmesh.distributed.environment import LOCALHOST, Node, Rank
from expertmesh.launcher.supervise import StopRequests

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

POLL_SECONDS = 0.1
THIS_MACHINE = Node("expertmesh", 0, 1, None, LOCALHOST, 0)


@dataclass(frozen=True, slots=True)
class Meeting:
    """The rendezvous of a job's launchers."""

    ranks: int
    """Ranks on each machine."""
    node: Node
    """This machine."""
    timeout_seconds: float
    """The most that the other launchers are waited for."""

    def places(self, port: int) -> list[Rank]:
        """Return the places of the ranks on this machine, which meet at `port`."""
        node, world = self.node, self.ranks * self.node.count
        ranks = range(self.ranks * node.number, self.ranks * (node.number + 1))
        return [
            Rank(node.starter, rank, world, local, self.ranks, node.address, port) for local, rank in enumerate(ranks)
        ]

    def open(self, requests: StopRequests) -> "TCPStore | None":
        """Return the store, once the launchers of all machines are there; None on a request to stop.

        Raises `InputError` if this machine cannot hold it or another machine starts another number of ranks, and
        `DistributedFailure` for a machine that does not come.
        """
        from torch.distributed import DistError, DistNetworkError, TCPStore  # type: ignore[attr-defined]

        node, deadline = self.node, time.monotonic() + self.timeout_seconds
        if node.number == 0:
            try:
                store = self._hold(node)
            except (DistNetworkError, OSError) as error:
                raise InputError(
                    f"MASTER_PORT {node.port} cannot be had on this machine ({str(error).splitlines()[0]}); end what "
                    "uses it, or set another one on every machine",
                    key="launch.port-taken",
                ) from error
        elif _reached(node, deadline, requests):
            left = datetime.timedelta(seconds=max(1.0, deadline - time.monotonic()))
            store = TCPStore(node.address, node.port, is_master=False, wait_for_workers=False, timeout=left)
        else:
            return None
        if node.count == 1:
            return store
        try:
            return store if self._all_came(store, deadline, requests) else None
        except DistError as error:
            raise DistributedFailure(
                f"node 0, which this machine met at {node.address}:{node.port}, has ended; its own output says why",
                key="launch.node-missing",
            ) from error

    def _hold(self, node: Node) -> "TCPStore":
        """Open the store, at this machine's own address if the job is on no other machine: nobody else then
        reaches it.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        if node.count > 1:
            return TCPStore(LOCALHOST, node.port, is_master=True, wait_for_workers=False)
        with socket.create_server((LOCALHOST, node.port), backlog=socket.SOMAXCONN) as listening:
            port, descriptor = listening.getsockname()[1], listening.detach()
        return TCPStore(LOCALHOST, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)

    def _all_came(self, store: "TCPStore", deadline: float, requests: StopRequests) -> bool:
        """Compare numbers of ranks with the other launchers; return False on a request to stop before all are there."""
        node = self.node
        keys = [f"expertmesh/node-{number}" for number in range(node.count)]
        store.set(keys[node.number], str(self.ranks))
        while not store.check(keys):
            if requests.requested or requests.forced:
                return False
            if time.monotonic() > deadline:
                missing = [str(number) for number, key in enumerate(keys) if not store.check([key])]
                raise DistributedFailure(
                    f"node {', '.join(missing)} of {node.count} did not come to {node.address}:{node.port} within "
                    f"{self.timeout_seconds:.0f} s (distributed.first_step_timeout_seconds)",
                    key="launch.node-missing",
                )
            time.sleep(POLL_SECONDS)
        ranks = [int(store.get(key)) for key in keys]
        read = store.add("expertmesh/read", 1)
        # The store ends with this process: the others read it first.
        while node.number == 0 and read < node.count and time.monotonic() < deadline:
            if requests.requested or requests.forced:
                return False
            time.sleep(POLL_SECONDS)
            read = store.add("expertmesh/read", 0)
        if len(set(ranks)) > 1:
            raise InputError(
                f"the machines of this job start {', '.join(map(str, ranks))} ranks; start the same number on each "
                "(--nproc, or PET_NPROC_PER_NODE)",
                key="launch.local-world-sizes-differ",
            )
        return True


def _reached(node: Node, deadline: float, requests: StopRequests) -> bool:
    """Wait until the first machine's launcher listens; return False on a request to stop. A signal does not end torch's
    own wait.
    """
    while not (requests.requested or requests.forced):
        with contextlib.suppress(OSError), socket.create_connection((node.address, node.port), timeout=1):
            return True
        if time.monotonic() > deadline:
            raise DistributedFailure(
                f"node 0 cannot be reached at {node.address}:{node.port}; start it, or correct MASTER_ADDR and "
                "MASTER_PORT",
                key="launch.node-missing",
            )
        time.sleep(POLL_SECONDS)
    return False
