"""The command line: what reaches a verb, and how every kind of end becomes a message and an exit code."""

import gc
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import expertmesh.cli.main as command_line
import expertmesh.cli.main as verbs
from expertmesh.cli.main import entry_point, main
from expertmesh.cli.options import PlanOptions
from expertmesh.config import IntegrityError, SecurityError
from expertmesh.config.root import schema_text
from expertmesh.launcher.launch import RunOptions
from expertmesh.launcher.worker import lazy_imports

VERBS = (
    "train",
    "inspect",
    "check",
    "prepare",
    "plan",
    "verify",
    "export",
    "merge",
    "convert",
    "report",
    "schema",
    "demo",
)
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
    functions = ("run", "run_check", "run_prepare", "run_export")
    fake = SimpleNamespace(**dict.fromkeys(functions, lambda *arguments: seen.append(arguments) or 0))
    for name in ("inspect", "data", "plan", "weights", "report"):
        monkeypatch.setitem(sys.modules, f"expertmesh.cli.{name}", fake)
    monkeypatch.setattr(verbs, "run_ranks", fake.run)
    return seen


def test_train_reads_overrides_before_and_after_options(config: str, calls: list[tuple[Any, ...]]) -> None:
    assert main(["train", config, "train.seed=1", "--nproc", "3", "train.max_steps=2"]) == 0
    ((read, function, options, _),) = calls
    assert (read.train.seed, read.train.max_steps, options) == (1, 2, RunOptions(nproc=3))
    assert function == "expertmesh.planning.forecast:train_with_forecast"
    assert read.log.level == "info"
    assert main(["train", config, "-q"]) == 0
    assert calls[1][0].log.level == "warning"
    assert main(["train", config, "--profile", "3:5"]) == 0
    assert calls[2][2] == RunOptions(profile=(3, 5))
    assert main(["train", config, "--profile", "5:3"]) == 2


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("30m", 1800), ("1.5h", 5400), ("2d", 172800)]
)  # fmt: skip
def test_train_reads_how_long_and_how_often_it_may_run(
    config: str, calls: list[tuple[Any, ...]], text: str, seconds: float
) -> None:
    assert main(["train", config, "--max-time", text, "--max-restarts", "2"]) == 0
    assert calls[0][2] == RunOptions(max_seconds=seconds, max_restarts=2)


def test_check_and_inspect_receive_their_arguments(config: str, calls: list[tuple[Any, ...]]) -> None:
    assert main(["check", config, "train.seed=1", "--samples", "5"]) == 0
    assert main(["inspect", "some/model", "--trust-remote-code"]) == 0
    assert main(["inspect", "some/model"]) == 0
    assert calls[0][0].train.seed == 1
    assert calls[0][1] == 5
    assert calls[1:] == [("some/model", True), ("some/model", False)]


def test_plan_export_and_report_receive_their_arguments(calls: list[tuple[Any, ...]]) -> None:
    assert main(["plan", "m", "--devices", "8 h100", "--lora", "r=4", "--lora", "alpha=8"]) == 0
    assert main(["export", "run", "--output=out", "--max-shard-size", "4GiB", "--dtype", "bfloat16"]) == 0
    assert main(["report", "run"]) == 0
    assert calls == [
        (PlanOptions(model="m", devices="8 h100", lora=["r=4", "alpha=8"]),),
        ("run", "out", "bfloat16", 4 << 30, False, None),
        (["run"], None),
    ]


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

    monkeypatch.setattr(verbs, "run_ranks", fail)
    assert main(["train", config]) == code
    assert capsys.readouterr().err == said


def test_a_bug_keeps_its_traceback(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(verbs, "run_ranks", fail)
    with pytest.raises(ZeroDivisionError):
        main(["train", config])


def test_an_error_is_a_json_object_for_programs(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--error-format", "json", "train", config, "lr=1"]) == 2
    record = json.loads(capsys.readouterr().err)
    assert (record["key"], record["exit_code"]) == ("config.unknown-key", 2)
    assert record["message"].endswith("lr is not a key of the configuration; did you mean optim.learning_rate?")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    assert main(["--error-format", "json", "verify"]) == 2
    assert json.loads(capsys.readouterr().err)["rank"] == 1
    for no_verb in (["trian"], []):
        assert main(["--error-format", "json", *no_verb]) == 2
        assert json.loads(capsys.readouterr().err)["key"] == "cli.usage"


SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}


@pytest.mark.parametrize(
    ("names", "job"),
    [
        (("SLURM_PROCID", "SLURM_LOCALID"), SLURM),
        (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"), MPI),
        (("RANK", "LOCAL_RANK"), {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}),
    ],
    ids=["srun", "mpirun", "RANK"],
)
def test_a_wrong_configuration_is_told_by_the_first_process_of_a_machine(
    config: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    names: tuple[str, str],
    job: dict[str, str],
) -> None:
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    told = []
    for rank in range(4):
        for name, value in zip(names, (rank, rank % 2), strict=True):
            monkeypatch.setenv(name, str(value))
        assert main(["train", config, "lr=1"]) == 2
        told.append(capsys.readouterr().err.count("did you mean optim.learning_rate?"))
    assert told == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["verfy", "x"], "No such command 'verfy'. Did you mean 'verify'?"),
        (["train", "x", "--nprocs", "2"], "No such option: --nprocs. Did you mean --nproc?"),
        ([], "Missing command; expertmesh --help tells more"),
        (["train"], "Missing argument 'CONFIG'; expertmesh train --help tells more"),
        (["merge", "a"], "Missing option '--output'"),
        (["train", "x", "--nproc", "0"], "Invalid value for '--nproc': Input should be greater than or equal to 1"),
        (["train", "x", "--max-time", "soon"], "'--max-time': 'soon' is not a length of time; write 90s, 30m"),
        (["train", "x", "--max-time", "0s"], "'--max-time': '0s' is not a length of time"),
        (["train", "x", "--max-restarts", "-1"], "Invalid value for '--max-restarts': "),
        (["train", "x", "--audit", "none"], "'--audit': 'none' is not one of 'sampled', 'full'"),
        (["merge", "a", "--output", "o", "--max-shard-size", "0"], "'0' is not a size; write 5GB"),
        (["plan", "m", "--devices", "8 h100", "--yaml", "--json"], "--yaml and --json: give one of them"),
    ],
)
def test_a_wrong_command_line_ends_with_2(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert said in line


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("expertmesh 0.")


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert capsys.readouterr().out == schema_text()


def without_torch(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """`expertmesh` with `arguments`, in a process where importing torch or transformers is an error."""
    code = "import sys; sys.modules.update(torch=None, transformers=None)"
    command = [sys.executable, "-c", f"{code}; from expertmesh.cli.main import entry_point; entry_point()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow_cases(r"(?!None|train|plan|verify).*", why="a process each; four verbs stay")
@pytest.mark.parametrize("verb", [None, *VERBS])
def test_help_is_told_before_torch_is_imported(verb: str | None) -> None:
    ended = without_torch(*([verb] if verb else []), "--help")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(f"Usage: expertmesh {verb or '[OPTIONS] VERB'} ")


def test_what_train_does_is_on_the_screen_before_torch_is_imported(config: str) -> None:
    ended = without_torch("train", config)
    assert ended.stdout == "starting   importing torch and transformers, checking the configuration\n"


def test_a_terminal_is_told_that_a_verb_takes_seconds_to_start(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []

    def imported(module: str) -> SimpleNamespace:
        told.append(capsys.readouterr().err)
        return SimpleNamespace(run_check=lambda *arguments: 0)

    monkeypatch.setattr(verbs.importlib, "import_module", imported)
    assert main(["check", config]) == 0
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["check", config]) == 0
    assert told == ["", "starting   importing torch and transformers\n"]


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("expertmesh re", ["report"]),
        ("expertmesh train --max", ["--max-time", "--max-restarts"]),
        ("expertmesh train x --audit ", ["sampled", "full"]),
    ],
)
def test_a_shell_completes_verbs_options_and_choices(
    words: str, completed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"_EXPERTMESH_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    assert without_torch().stdout.split() == completed


def test_a_bad_config_ends_with_2_before_torch_is_imported(config: str) -> None:
    ended = without_torch("train", config, "trian.seed=1")
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
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    with pytest.raises(SystemExit) as ended:
        entry_point()
    assert ended.value.code == 141
    sys.stdout.close()


@pytest.mark.parametrize("imported", [True, False])
def test_triton_finds_nothing_that_leaked_at_exit(imported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, partial(calls.append, name))
    monkeypatch.setattr(command_line, "main", lambda arguments: 0)
    monkeypatch.setattr(command_line, "prepare_output", lambda: None)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    if imported:
        monkeypatch.setitem(sys.modules, "triton", gc)
    with pytest.raises(SystemExit):
        entry_point()
    assert calls == ["unfreeze" if imported else "freeze"]


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
