"""The network interface of a job on several machines; two real ones, as namespaces, are in cli/test_starts.py."""

import ipaddress
import socket
from pathlib import Path

import pytest

from expertmesh.config import DistributedFailure
from expertmesh.distributed import environment
from expertmesh.distributed.environment import GLOO, NCCL, choose_interface

LO, ETH, IB = (ipaddress.ip_address(each) for each in ("127.0.0.1", "10.0.0.7", "10.1.0.7"))


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of two, alone on its machine, which has two networks; its name stands for 127.0.1.1, as on Debian."""
    names = {"node1": "127.0.1.1", "localhost": "127.0.0.1", "other": "10.1.0.8"}
    routes = {"127.": LO, "10.1.": IB, "10.0.": ETH, "198.": ETH}
    monkeypatch.setattr(environment, "_interfaces", lambda: iter([("lo", LO), ("eth0", ETH), ("ib0", IB)]))
    monkeypatch.setattr(environment, "_resolve", lambda host, seconds: [names.get(host, host)])
    monkeypatch.setattr(
        environment, "_route_to", lambda to: next((routes[net] for net in routes if to.startswith(net)), None)
    )
    monkeypatch.setattr(environment, "_NCCL_SETTINGS", ())
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    for name in (GLOO, NCCL):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("master", "name"),
    [("10.1.0.8", "ib0"), ("other", "ib0"), ("10.0.0.7", "eth0"), ("node1", "eth0"), ("localhost", "lo")],
)
def test_it_is_the_one_on_the_route_to_rank_0(master: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", master)
    said = choose_interface(1)
    assert said is not None
    assert said.startswith(f"network interface {name} (")
    assert (environment.os.environ[GLOO], environment.os.environ[NCCL]) == (name, f"={name}")


def test_what_somebody_has_named_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MASTER_ADDR", "other")
    settings = tmp_path / "nccl.conf"
    settings.write_text("NCCL_SOCKET_IFNAME=ib1\n")
    monkeypatch.setattr(environment, "_NCCL_SETTINGS", (settings,))
    assert choose_interface(1) is not None
    assert NCCL not in environment.os.environ
    monkeypatch.setenv(GLOO, "eth0")
    assert choose_interface(1) is None
    assert environment.os.environ[GLOO] == "eth0"


def test_one_machine_keeps_to_itself_and_an_unknown_route_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "172.16.0.1")
    said = choose_interface(1)
    assert said is not None
    assert "left to torch" in said
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert choose_interface(1) is None
    assert environment.os.environ[GLOO] == "lo"
    assert NCCL not in environment.os.environ


def test_a_name_without_an_address_is_waited_for_and_then_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    asked = []

    def look_up(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        asked.append(host)
        if len(asked) < 2:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("10.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(environment.time, "sleep", lambda seconds: None)
    assert environment._resolve("pod-0", 60) == ["10.0.0.1"]
    asked.clear()
    with pytest.raises(DistributedFailure, match="MASTER_ADDR is pod-0, a name without an address") as failure:
        environment._resolve("pod-0", 0)
    assert failure.value.key == "launch.unknown-host"


def test_this_machine_s_own_interfaces_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert environment._route_to("127.0.0.1") == LO
    assert environment._interface_of(ipaddress.ip_address("127.0.1.1")) == "lo"
