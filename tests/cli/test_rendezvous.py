"""Launchers of several machines, played by threads: each learns that all are there, or why the job cannot start."""

import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from expertmesh.config import DistributedFailure, InputError
from expertmesh.distributed.environment import Node
from expertmesh.launcher.launch import THIS_MACHINE, Rendezvous
from expertmesh.launcher.supervise import StopRequests
from tests.cli.jobs import free_port


@pytest.fixture
def port() -> int:
    return free_port()


def node(number: int, port: int) -> Node:
    return Node("Kubeflow", number, 3, None, "127.0.0.1", port)


def open_all(port: int, ranks: tuple[int, ...]) -> list[Any]:
    """What each launcher gets, in the order of nodes; the last comes late."""

    def open_one(number: int) -> Any:
        time.sleep(0.3 * (number == 2))
        try:
            return Rendezvous(ranks[number], node(number, port), 300).open(StopRequests())
        except (InputError, DistributedFailure) as error:
            return error

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(open_one, range(3)))


def test_all_machines_get_a_store_and_places_that_follow_each_other(port: int) -> None:
    stores = open_all(port, (2, 2, 2))
    assert {store.port for store in stores} == {port}
    places = [place for number in range(3) for place in Rendezvous(2, node(number, port), 300).places(port)]
    assert [place.rank for place in places] == list(range(6))
    assert [place.local_rank for place in places] == [0, 1] * 3
    assert {(place.world_size, place.local_world_size, place.port) for place in places} == {(6, 2, port)}


def test_machines_with_other_numbers_of_ranks_are_all_told(port: int) -> None:
    for error in open_all(port, (2, 2, 3)):
        assert isinstance(error, InputError)
        assert str(error).startswith("the machines of this job start 2, 2, 3 ranks; ")
        assert error.key == "launch.local-world-sizes-differ"


@pytest.mark.parametrize(("number", "words"), [(0, "node 1, 2 of 3 did not come"), (1, "node 0 cannot be reached")])
def test_a_machine_that_does_not_come_is_named(port: int, number: int, words: str) -> None:
    with pytest.raises(DistributedFailure, match=words) as failure:
        Rendezvous(1, node(number, port), 0.2).open(StopRequests())
    assert failure.value.key == "launch.node-missing"


def test_a_port_in_use_is_named(port: int) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", port))
        other.listen()
        with pytest.raises(InputError, match=f"MASTER_PORT {port} cannot be had") as refusal:
            Rendezvous(1, node(0, port), 1).open(StopRequests())
    assert refusal.value.key == "launch.port-taken"


@pytest.mark.parametrize("number", [0, 1])
def test_waiting_for_the_others_ends_by_a_signal(number: int, port: int) -> None:
    requests = StopRequests()
    threading.Timer(0.3, requests.receive, (signal.SIGTERM, None)).start()
    assert Rendezvous(1, node(number, port), 300).open(requests) is None


def test_a_job_on_one_machine_is_reached_from_there_alone() -> None:
    store = Rendezvous(2, THIS_MACHINE, 300).open(StopRequests())
    assert store is not None
    listening = f":{store.port:04X}"
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    addresses = [line.split()[1] for table in tables for line in table if line.split()[3] == "0A"]
    assert [address for address in addresses if address.endswith(listening)] == [f"0100007F{listening}"]
