"""`train --audit full` reaches the training function, as an option of ours and through the launcher's ranks."""

import os
from pathlib import Path

import pytest

import expertmesh.cli.main as command_line
from expertmesh.cli.main import main
from expertmesh.config import Config, load_config
from expertmesh.launcher.launch import RunOptions, launch
from expertmesh.training.control import Control

CONFIG = "model: {name_or_path: m}\ndata: {train: [{path: d}]}\noutput_dir: out\n"


def say_audit(config: Config, control: Control) -> None:
    """In the place of the trainer, in a rank."""
    print(f"{config.output_dir}: audit {control.audit}")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("RANK", raising=False)
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG, encoding="utf-8")
    return path


def test_sampled_is_the_default_and_full_is_asked_for(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(
        command_line, "run_ranks", lambda config, function, options, preflight: seen.append(options.audit) or 0
    )
    for arguments in ([], ["--audit", "full"], ["--audit", "sampled"]):
        assert main(["train", str(config), *arguments]) == 0
    assert seen == ["sampled", "full", "sampled"]
    assert main(["train", str(config), "--audit", "none"]) == 2


def test_the_launcher_passes_it_to_its_ranks(
    config: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    assert launch(load_config(config), 1, f"{__name__}:say_audit", options=RunOptions(audit="full")) == 0
    assert capfd.readouterr().out == "out: audit full\n"
