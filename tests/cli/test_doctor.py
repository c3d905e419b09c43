"""`doctor` finds what is wrong with a machine, says it in one sentence each, and shows no secret."""

import fcntl
import http.server
import json
import os
import resource
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from expertmesh.cli import doctor
from expertmesh.cli.main import main


def test_a_sound_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(["doctor", "--json", "--output", str(tmp_path / "runs")]) == 0
    said = capsys.readouterr().out
    assert "verysecret" not in said
    report = json.loads(said)
    assert report["faults"] == []
    found = report["found"]
    assert f"PyTorch version: {torch.__version__}" in found["torch"]
    assert found["disk"].endswith("; rename, locks right")
    assert "HF_TOKEN=***" in found["variables"]
    assert "a token is set" in found["hub"]
    assert f"torch {torch.__version__}" in found["packages"]
    assert "pytest" not in found["packages"]
    assert list(tmp_path.iterdir()) == []


def test_faults_are_a_sentence_each_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
    assert main(["--error-format", "json", "doctor", "--output", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert "no fault" not in out
    error = json.loads(err)
    assert error["key"] == "doctor.faults"
    first, second = error["message"].splitlines()
    assert "less than any checkpoint" in first
    assert second.startswith("a process may open 256 files, and a rank needs 1024")


def test_a_package_outside_of_what_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", lambda name: "1.0")
    faults = doctor.packages().faults
    assert any(fault.startswith("torch 1.0 is outside of ") for fault in faults)


def test_a_device_that_torch_does_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(doctor, "_DEVICE_FILES", (str(tmp_path / "nvidia0"),))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    (fault,) = doctor.devices().faults
    assert "is there, but torch" in fault


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ("rename", "a directory cannot be renamed or synced there"),
        ("flock", "cannot be locked"),
        ("space", "less than any checkpoint"),
    ],
)
def test_a_disk_that_training_cannot_use(
    broken: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError(5, "Input/output error")

    if broken == "space":
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=5))
    else:
        monkeypatch.setattr(fcntl if broken == "flock" else os, broken, fail)
    (fault,) = doctor.disk(tmp_path).faults
    assert says in fault
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def unwilling_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    class Hub(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response_only(401)
            self.end_headers()

    server = http.server.HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(doctor, "HUB_SECONDS", 120)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield
    server.shutdown()
    server.server_close()


def test_a_hub_that_answers_is_reached_whatever_it_says(unwilling_hub: None) -> None:
    found = doctor.hub()
    assert " reached in " in found.says
    assert found.faults == ()


def test_no_hub_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://user:password@127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    found = doctor.hub()
    assert found.faults == ()
    assert found.says.startswith("http://***@127.0.0.1:9 not reached: local models and the cache alone work")


def test_variables_are_shown_without_secrets() -> None:
    shown = doctor.environment(
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
