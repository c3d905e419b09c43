"""`verify CONFIG` and `verify --model` on the command line: real ranks, the report, and what is refused."""

import json
import tempfile
from pathlib import Path

import pytest

import expertmesh.cli.verify as command_line
from expertmesh.cli.main import main
from expertmesh.config import Config, load_config
from expertmesh.launcher.launch import RunOptions
from expertmesh.training.startup.output_dir import refuse_output_dir
from expertmesh.verification.options import VerifyOptions
from expertmesh.verification.setup import set_up
from tests.training.tiny_run import run_config, write_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Config, RunOptions]]:
    """What would have been started."""
    found: list[tuple[Config, RunOptions]] = []
    monkeypatch.setattr(
        command_line, "run_ranks", lambda config, function, options: found.append((config, options)) or 0
    )
    return found


@pytest.mark.slow(why="two interpreters; cli/test_from_config.py verifies on forked ranks")
def test_verify_proves_a_configuration_on_ranks_of_its_own(
    inputs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_config(inputs, tmp_path / "run")
    arguments = ["--nproc", "2", "--layers", "1", "--tokens", "64", "--only", "bytes,forward"]
    assert main(["verify", str(tmp_path / "run.yaml"), "parallel.ep=2", *arguments]) == 0
    printed = capfd.readouterr().out
    assert "qwen3_moe, the first 1 of 2 layers, float32" in printed
    assert "job         2 ranks (cpu): fsdp 2 × ep 2" in printed
    assert "verified    7 checks passed, 0 not run" in printed
    report = json.loads((tmp_path / "run" / "verification.json").read_text())
    assert report["status"] == "pass"
    assert [layer["name"] for layer in report["layers"]] == ["bytes", "forward"]
    assert list((tmp_path / "run").iterdir()) == [tmp_path / "run" / "verification.json"]
    refuse_output_dir(load_config(tmp_path / "run.yaml"))  # the run can start there


def test_a_model_alone_is_verified_on_random_tokens(inputs: Path, started: list[tuple[Config, RunOptions]]) -> None:
    assert main(["verify", "--model", str(inputs / "model"), "--parallel", "ep=4 fsdp=4", "optim.name=sgd"]) == 0
    ((config, options),) = started
    assert (config.parallel.ep, config.parallel.fsdp, options.nproc) == (4, 4, 4)
    assert config.train.global_batch_size == 8
    assert config.optim.name == "sgd"
    asked = VerifyOptions.load(options.arguments)
    assert asked.random_data
    assert asked.report is None
    assert "token ids are random: no data was named" in set_up(config, asked, 4).notes


def test_what_ranks_have_saved_is_removed_when_they_are_ended(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(config: Config, function: str, options: RunOptions) -> int:
        asked = VerifyOptions.load(options.arguments)
        Path(tempfile.mkdtemp(prefix=asked.scratch_prefix, dir=asked.scratch_beside(config)), "model").touch()
        assert len(list(tmp_path.glob(".expertmesh-verify-*"))) == 2
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "run_ranks", interrupted)
    run_config(inputs, tmp_path / "run")
    of_others = tmp_path / ".expertmesh-verify-0"
    of_others.mkdir()
    assert main(["verify", str(tmp_path / "run.yaml")]) == 130
    assert list(tmp_path.glob(".expertmesh-verify-*")) == [of_others]


def test_stages_get_micro_batches_to_pass_on(inputs: Path, started: list[tuple[Config, RunOptions]]) -> None:
    assert main(["verify", "--model", str(inputs / "model"), "--parallel", "pp=2 ep=2 fsdp=2"]) == 0
    ((config, options),) = started
    assert (config.parallel.pp, config.train.global_batch_size, options.nproc) == (2, 8, 4)


def test_a_directory_is_a_checkpoint_as_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path)]) == 2
    assert "checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "name a configuration or a checkpoint"),
        (["DIR", "--layers", "2"], "--layers is for a configuration"),
        (["DIR", "--self-test"], "--self-test is for a configuration"),
        (["DIR", "a.b=1"], "a.b=1 is for a configuration"),
        (["x.yaml", "--parallel", "ep=2"], "--parallel is for --model"),
        (["x.yaml", "--model", "DIR"], "x.yaml beside --model"),
        (["--model", "DIR", "--parallel", "ep=2,dp=4"], "--parallel dp=4: is not an axis and its size"),
        (["x.yaml", "--only", "bytes,forwards"], "--only forwards: is no layer of the proof"),
        (["x.yaml"], "there is no such configuration file"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if "--only" in arguments:
        (tmp_path / "x.yaml").write_text("model: {name_or_path: m}\ndata: {train: [{path: d}]}\noutput_dir: o\n")
    assert main(["verify", *(str(tmp_path) if word == "DIR" else word for word in arguments)]) == 2
    assert sentence in capsys.readouterr().err
