"""The command line: what reaches a verb, and how every kind of end becomes a message and an exit code."""

import gc
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import expertmesh.cli
import expertmesh.cli.main as command_line
from expertmesh.cli.main import entry_point, main
from expertmesh.config import Config, IntegrityError, SecurityError
from expertmesh.launcher.lazy_imports import lazy_imports
from expertmesh.launcher.options import RunOptions

CONFIG = "model: {name_or_path: m}\ndata: {train: [{path: d}]}\noutput_dir: out\n"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("RANK", raising=False)
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG, encoding="utf-8")
    return str(path)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Every verb replaced by one that records its arguments and returns 0."""
    seen: list[tuple[Any, ...]] = []
    fake = SimpleNamespace(run=lambda *arguments: seen.append(arguments) or 0)
    for name in ("inspect", "check"):
        monkeypatch.setitem(sys.modules, f"expertmesh.cli.{name}", fake)
        monkeypatch.setattr(expertmesh.cli, name, fake, raising=False)
    monkeypatch.setattr(command_line, "run_training", fake.run)
    return seen


def test_train_reads_overrides_before_and_after_options(
    config: str, calls: list[tuple[Config, RunOptions, str]]
) -> None:
    assert main(["train", config, "train.seed=1", "--nproc", "3", "train.max_steps=2"]) == 0
    ((read, options, _),) = calls
    assert (read.train.seed, read.train.max_steps, options) == (1, 2, RunOptions(nproc=3))


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("30m", 1800), ("1.5h", 5400), ("2d", 172800)]
)  # fmt: skip
def test_train_reads_how_long_and_how_often_it_may_run(
    config: str, calls: list[tuple[Any, ...]], text: str, seconds: float
) -> None:
    assert main(["train", config, "--max-time", text, "--max-restarts", "2"]) == 0
    assert calls[0][1] == RunOptions(max_seconds=seconds, max_restarts=2)


def test_check_and_inspect_receive_their_arguments(config: str, calls: list[tuple[Any, ...]]) -> None:
    assert main(["check", config, "train.seed=1", "--samples", "5"]) == 0
    assert main(["inspect", "some/model", "--world-size", "8", "--trust-remote-code"]) == 0
    assert main(["inspect", "some/model"]) == 0
    assert calls[0][0].train.seed == 1
    assert calls[0][1] == 5
    assert calls[1:] == [("some/model", 8, True), ("some/model", None, False)]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (IntegrityError("a weight\nand another"), 3, "error: a weight\n       and another\n"),
        (SecurityError("no"), 4, "error: no\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_error_becomes_a_message_and_its_exit_code(
    config: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    said: str,
) -> None:
    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(command_line, "run_training", fail)
    assert main(["train", config]) == code
    assert capsys.readouterr().err == said


def test_a_bug_keeps_its_traceback(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(command_line, "run_training", fail)
    with pytest.raises(ZeroDivisionError):
        main(["train", config])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["verfy", "x"], "'verfy' is not a verb; use one of train, inspect, check, plan, verify, export"),
        ([], "a verb is missing; use one of train, inspect, check, plan, verify, export"),
        (["train"], "the following arguments are required: CONFIG"),
        (["train", "x", "--nproc", "0"], "argument --nproc: '0' is not a positive number"),
        (["train", "x", "--max-time", "soon"], "argument --max-time: 'soon' is not a length of time; write 90s, 30m"),
        (["train", "x", "--max-time", "0s"], "argument --max-time: '0s' is not a length of time"),
        (["train", "x", "--max-restarts", "-1"], "argument --max-restarts: "),
        (["train", "x", "--procs", "2"], "unrecognized arguments: --procs"),
    ],
)
def test_a_wrong_command_line_ends_with_2(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("expertmesh 0.")


def test_a_bad_config_ends_with_2_before_torch_is_imported(config: str) -> None:
    code = (
        "import sys; from expertmesh.cli.main import main; code = main(sys.argv[1:]); "
        "assert not {'torch', 'transformers'} & set(sys.modules); sys.exit(code)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, "train", config, "trian.seed=1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stderr == (
        "error: override 'trian.seed=1': trian is not a key of the configuration; did you mean train?\n"
    )
    assert ended.returncode == 2


def test_the_module_and_the_script_are_the_same_command() -> None:
    for command in ([sys.executable, "-m", "expertmesh"], [str(Path(sys.executable).parent / "expertmesh")]):
        ended = subprocess.run([*command, "--help"], capture_output=True, text=True, check=False)
        assert ended.returncode == 0
        assert "train    fine-tune the model" in ended.stdout


def test_whoever_reads_only_the_beginning_gets_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(sys, "stdout", open(write, "w"))  # noqa: SIM115
    monkeypatch.setattr(command_line, "main", lambda arguments: print("line\n" * 50_000) or 0)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    with pytest.raises(SystemExit) as ended:
        entry_point()
    assert ended.value.code == 141
    sys.stdout.close()


def test_a_pipe_of_the_programs_own_that_breaks_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(arguments: object) -> int:
        raise BrokenPipeError("a helper process is gone")

    read, write = os.pipe()
    monkeypatch.setattr(sys, "stdout", open(write, "w"))  # noqa: SIM115
    monkeypatch.setattr(command_line, "main", broken)
    with pytest.raises(BrokenPipeError, match="a helper process is gone"):
        entry_point()
    sys.stdout.close()
    os.close(read)


def test_imports_are_not_searched_for_garbage_and_all_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with lazy_imports():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert frozen == [False]
    monkeypatch.setitem(sys.modules, "torch", gc)
    with lazy_imports():
        assert gc.isenabled()  # what is there already need not be imported
    assert len(frozen) == 1
