"""Choose the network interface that ranks on several machines announce to each other: the one on the route to
MASTER_ADDR.

Otherwise gloo announces the address of the host's name. On many machines that is 127.0.0.1, and the other ranks wait
without end. No packet is sent here.
"""

import array
import ipaddress
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from expertmesh.config.errors import DistributedFailure

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
# Reserved for documentation: whatever is routed there takes the default route.
_ELSEWHERE = ("198.51.100.1", "2001:db8::1")
_SIOCGIFCONF, _IFREQ_BYTES = 0x8912, 40
_NCCL_SETTINGS = (Path("/etc/nccl.conf"), Path("~/.nccl.conf"))


def choose_interface(timeout_seconds: float) -> str | None:
    """Let gloo and NCCL use the interface on the route to MASTER_ADDR, unless the user has named one.

    Call it before a rank's process group starts. gloo's ranks on one machine listen on the loopback interface alone.

    Returns:
        The decision for several machines, as a sentence.

    Raises:
        DistributedFailure: MASTER_ADDR has had no address for `timeout_seconds`.
    """
    master, here = os.environ["MASTER_ADDR"], os.environ.get("LOCAL_WORLD_SIZE")
    if GLOO in os.environ:
        return None
    if here == os.environ["WORLD_SIZE"]:
        if loopback := _interface_of(ipaddress.ip_address("127.0.0.1")):
            os.environ[GLOO] = loopback
        return None
    address = _own_address(master, timeout_seconds)
    name = None if address is None else _interface_of(address)
    if name is None:
        return (
            f"network interface left to torch, as none has {address or 'a route'} to {master}; set {GLOO} if ranks wait"
        )
    os.environ[GLOO] = name
    if NCCL not in os.environ and not any(_names_interface(path) for path in _NCCL_SETTINGS):
        os.environ[NCCL] = f"={name}"  # not a prefix of names
    return f"network interface {name} ({address}), on the route to {master}"


def _own_address(master: str, timeout_seconds: float) -> Address | None:
    """Return the address of this machine, as other machines reach it.

    The host's name may stand for a loopback address on the host itself; others reach the host over its default route,
    or over its only other interface.
    """
    addresses = _resolve(master, timeout_seconds)
    own = next((found for each in addresses if (found := _route_to(each))), None)
    if own is None or not own.is_loopback or master == "localhost" or _is_address(master):
        return own
    routed = next((found for each in _ELSEWHERE if (found := _route_to(each))), None)
    others = [each for _, each in _interfaces() if not each.is_loopback and not each.is_link_local]
    return routed or (others[0] if len(others) == 1 else own)


def _resolve(host: str, timeout_seconds: float) -> list[str]:
    """Return the addresses of `host`, and wait for them: a cluster's name service may know the first machine later than
    the others.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            return [str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)]
        except socket.gaierror as error:
            if time.monotonic() >= deadline:
                raise DistributedFailure(
                    f"MASTER_ADDR is {host}, a name without an address on this machine ({error.strerror}); set it to "
                    "an address of rank 0's machine, or mend the name service",
                    key="launch.unknown-host",
                ) from error
        time.sleep(1)


def _route_to(address: str) -> Address | None:
    """Return this machine's address on the route to `address`, or None if there is no route."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    except OSError:
        return None


def _interface_of(address: Address) -> str | None:
    if address.is_loopback:
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    return next((name for name, found in _interfaces() if found == address), None)


def _interfaces() -> Iterator[tuple[str, Address]]:
    """Return the names of interfaces with their addresses on Linux; nothing on other systems."""
    if sys.platform != "linux":
        return
    import fcntl

    buffer = array.array("B", bytes(1024 * _IFREQ_BYTES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
        length, _ = struct.unpack("iL", fcntl.ioctl(probe, _SIOCGIFCONF, request))
    for start in range(0, length, _IFREQ_BYTES):
        label = buffer[start : start + 16].tobytes().partition(b"\0")[0].decode()
        name = label.partition(":")[0]  # of a second address, `eth0:1`
        yield name, ipaddress.IPv4Address(buffer[start + 20 : start + 24].tobytes())
    if (table := Path("/proc/net/if_inet6")).exists():
        for line in table.read_text().splitlines():
            digits, *_, name = line.split()
            yield name, ipaddress.IPv6Address(bytes.fromhex(digits))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _names_interface(settings: Path) -> bool:
    """Return whether a file of NCCL's names an interface, which the environment would override."""
    try:
        return NCCL in settings.expanduser().read_text(errors="replace")
    except OSError:
        return False
