"""`doctor` finds what is wrong with a machine, says it in one sentence each, and shows no secret."""

import datetime
import http.server
import json
import os
import re
import resource
import threading
import time
from collections.abc import Iterator
from email.utils import format_datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from huggingface_hub import constants

from expertmesh.cli.doctor import machine, ranks, storage
from expertmesh.cli.doctor.finding import environment
from expertmesh.cli.main import main
from expertmesh.config.errors import DistributedFailure, IntegrityError
from expertmesh.distributed.environment import Rank
from expertmesh.training.control import Control
from tests.support.errors import refused_on_ranks
from tests.support.ranks import run_ranks


def test_a_sound_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(["doctor", "--json", "--nproc", "2", "--output", str(tmp_path / "runs")]) == 0
    said = capsys.readouterr().out
    assert "verysecret" not in said
    report = json.loads(said)
    assert report["faults"] == []
    found = report["found"]
    assert found["ranks"].startswith("2 by gloo over lo: all-reduce of 1 MiB in ")
    assert found["disk"].endswith("; rename, locks, clock right")
    assert "HF_TOKEN=***" in found["variables"]
    assert "a token is set" in found["hub"]
    assert f"torch {torch.__version__}" in found["packages"]
    assert "pytest" not in found["packages"]
    assert list(tmp_path.iterdir()) == []


def test_faults_are_a_sentence_each_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: Any, **options: Any) -> int:
        raise DistributedFailure("rank 1 hung before the first step: it\nat line 5", key="rank.hung")

    monkeypatch.setattr(ranks, "launch", fail)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
    assert main(["--error-format", "json", "doctor", "--nproc", "2", "--output", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert "no fault" not in out
    error = json.loads(err)
    assert error["key"] == "doctor.faults"
    first, second = error["message"].splitlines()
    assert first.startswith("ranks cannot exchange data: rank 1 hung before the first step: it; see ")
    assert second.startswith("a process may open 256 files, and a rank needs 1024")


def test_an_error_of_torch_in_a_job_that_somebody_has_started_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("Connection closed by peer [10.0.0.2]\nException raised from ...")

    monkeypatch.setattr(ranks, "exchange", fail)
    (fault,) = ranks.between_ranks(Rank("torchrun", 0, 2), None).faults
    assert fault.startswith("ranks cannot exchange data: Connection closed by peer [10.0.0.2]; see ")


def _exchange_with_a_bug(directory: Path) -> None:
    real = dist.all_to_all_single

    def swapped(output: torch.Tensor, rows: torch.Tensor, **options: Any) -> None:
        real(output, rows.flip(0), **options)

    dist.all_to_all_single = swapped
    try:
        ranks.exchange(SimpleNamespace(distributed=SimpleNamespace(first_step_timeout_seconds=60)), Control())  # type: ignore[arg-type]
    finally:
        dist.all_to_all_single = real


def test_wrong_values_between_ranks_are_found(tmp_path: Path) -> None:
    with refused_on_ranks("doctor.wrong-values", IntegrityError, naming="other values than the 2 ranks have sent"):
        run_ranks(_exchange_with_a_bug, 2, tmp_path)


def test_ranks_with_other_versions_or_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    times = {f"{name} {attempt}": 0.01 for name in ("all-reduce", "all-to-all") for attempt in (0, 1)}
    everybody = [{"versions": {"torch": "2.13"}, "time": 0.0}, {"versions": {"torch": "2.12"}, "time": 100.0}]
    version, clock = ranks._compared(everybody, times)["faults"]
    assert version.startswith("rank 1 has {'torch': '2.12'}, rank 0 ")
    assert clock.startswith("the clocks of the ranks are 100 s apart")


def test_a_package_outside_of_what_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "version", lambda name: "1.0")
    faults = machine.packages().faults
    assert any(fault.startswith("torch 1.0 is outside of ") for fault in faults)


def test_a_device_that_torch_does_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(machine, "_DEVICE_FILES", (str(tmp_path / "nvidia0"),))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    (fault,) = machine.devices().faults
    assert "is there, but torch" in fault


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ("rename", "a directory cannot be renamed or synced there"),
        ("link", "cannot be locked"),
        ("clock", "its clock and this machine's are"),
        ("space", "less than any checkpoint"),
    ],
)
def test_a_disk_that_training_cannot_use(
    broken: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError(5, "Input/output error")

    if broken == "clock":
        monkeypatch.setattr(storage.time, "time", lambda: time.monotonic() + 1e10)
    elif broken == "space":
        monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: SimpleNamespace(free=5))
    else:
        monkeypatch.setattr(os, broken, fail)
    (fault,) = storage.disk(tmp_path).faults
    assert says in fault
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def hub_an_hour_ahead(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    class Hub(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response_only(401)
            later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
            self.send_header("Date", format_datetime(later, usegmt=True))
            self.end_headers()

    server = http.server.HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(storage, "HUB_SECONDS", 120)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield
    server.shutdown()
    server.server_close()


def test_the_clock_is_compared_with_the_hubs(hub_an_hour_ahead: None) -> None:
    found = storage.hub()
    assert " reached in " in found.says
    (fault,) = found.faults
    behind = re.match(r"the clock is (\d+) s behind that of http", fault)
    assert behind is not None
    assert 3000 < int(behind[1]) <= 3600  # an hour, less what the answer took


def test_no_hub_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://user:password@127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    found = storage.hub()
    assert found.faults == ()
    assert found.says.startswith("http://***@127.0.0.1:9 not reached: local models and the cache alone work")


def test_variables_are_shown_without_secrets() -> None:
    shown = environment(
        {
            "NCCL_DEBUG": "INFO",
            "HF_TOKEN": "hf_abcdefgh",
            "HUGGING_FACE_HUB_TOKEN": "x",
            "https_proxy": "http://me:pass@proxy:80",
            "HF_HOME": "/data/hf_abcdefgh",
            "AWS_SECRET_ACCESS_KEY": "y",
            "PATH": "/bin",
        }
    ).says.splitlines()
    assert shown == [
        "HF_HOME=/data/***",
        "HF_TOKEN=***",
        "HUGGING_FACE_HUB_TOKEN=***",
        "NCCL_DEBUG=INFO",
        "https_proxy=http://***@proxy:80",
    ]
