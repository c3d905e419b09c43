"""Two machines on one: two network namespaces joined by a cable, each with a loopback of its own."""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

TOOLS = ("unshare", "nsenter", "ip")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
_NEW = ["unshare", "--user", "--map-root-user", "--net"]


@dataclass(frozen=True)
class Nodes:
    """`holders` are the processes that keep the namespaces; the first has `cable0`, the second `cable1`."""

    holders: tuple[int, int]

    def command(self, node: int, command: Sequence[str]) -> list[str]:
        """`command`, run on a node."""
        space = ["--net", "--target", str(self.holders[node])]
        user = ["nsenter", "--preserve-credentials", "--user", "--target", str(self.holders[0])]
        return [*user, "nsenter", *space, *command]

    def run(self, node: int, *command: str) -> None:
        subprocess.run(self.command(node, command), check=True, capture_output=True)

    def cut(self) -> None:
        """Pull the cable: packets are lost, nobody is told."""
        self.run(0, "ip", "link", "set", "cable0", "down")

    def sent(self) -> tuple[int, int]:
        """Bytes that each node has put on the cable so far."""
        found = []
        for node, holder in enumerate(self.holders):
            lines = Path(f"/proc/{holder}/net/dev").read_text().splitlines()
            (line,) = (line for line in lines if line.strip().startswith(f"cable{node}:"))
            found.append(int(line.partition(":")[2].split()[8]))
        return found[0], found[1]


@contextlib.contextmanager
def two_nodes() -> Iterator[Nodes]:
    """Skips where the kernel does not allow namespaces."""
    if not all(map(shutil.which, TOOLS)) or subprocess.run([*_NEW, "true"], capture_output=True).returncode:
        pytest.skip(f"needs the right to create network namespaces, and the commands {', '.join(TOOLS)}")
    with contextlib.ExitStack() as stack:
        first = _hold(stack, _NEW)
        inside = ["nsenter", "--preserve-credentials", "--user", "--net", "--target", str(first)]
        nodes = Nodes((first, _hold(stack, [*inside, "unshare", "--net"])))
        nodes.run(0, "sh", "-c", f"ip link add cable0 type veth peer name cable1 netns {nodes.holders[1]}")
        for node, address in enumerate(ADDRESSES):
            nodes.run(node, "ip", "link", "set", "lo", "up")
            nodes.run(node, "ip", "address", "add", f"{address}/24", "dev", f"cable{node}")
            nodes.run(node, "ip", "link", "set", f"cable{node}", "up")
        yield nodes


def _hold(stack: contextlib.ExitStack, command: Sequence[str]) -> int:
    """Start a process in a new network namespace."""
    process = stack.enter_context(subprocess.Popen([*command, "sleep", "1000"]))
    stack.callback(process.kill)
    deadline = time.monotonic() + 120
    while Path(f"/proc/{process.pid}/comm").read_text().strip() != "sleep":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert os.readlink(f"/proc/{process.pid}/ns/net") != os.readlink("/proc/self/ns/net")
    return process.pid
