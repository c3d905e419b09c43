"""The demo's frame: inputs are used again, runs never overwrite each other, metrics give the verdict."""

import json
import subprocess
from pathlib import Path

import pytest

from expertmesh.config import load_config
from expertmesh.demo import run as demo
from expertmesh.demo.run import Sample

SAMPLES = [Sample(f"module.name{i}", f"What does `module.name{i}` do?", f"It returns {i}.") for i in range(20)]


@pytest.fixture
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "stdlib_samples", lambda: SAMPLES)


def write_metrics(path: Path, losses: list[float]) -> None:
    path.write_text("".join(json.dumps({"step": i + 1, "loss": loss}) + "\n" for i, loss in enumerate(losses)))


@pytest.mark.usefixtures("few_samples")
def test_the_written_config_is_valid_and_names_the_inputs_that_exist(tmp_path: Path) -> None:
    config = load_config(demo.build_inputs(tmp_path / "a place, with: {odd} # characters"))
    assert (Path(config.model.name_or_path) / "model.safetensors").is_file()
    assert (Path(config.model.name_or_path) / "tokenizer.json").is_file()
    assert all(Path(source.path).is_file() for source in (*config.data.train, *config.data.eval))
    assert config.parallel.ep == demo.RANKS


@pytest.mark.usefixtures("few_samples")
def test_complete_inputs_are_used_again_and_incomplete_ones_are_made_anew(tmp_path: Path) -> None:
    demo.build_inputs(tmp_path)
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(b"kept")
    demo.build_inputs(tmp_path)
    assert weights.read_bytes() == b"kept"
    stamp = tmp_path / "inputs.json"
    for spoil in (stamp.unlink, lambda: stamp.write_text('{"python": "2.7.18"}')):
        spoil()
        demo.build_inputs(tmp_path)
        assert weights.read_bytes() != b"kept"
        weights.write_bytes(b"kept")


@pytest.mark.usefixtures("few_samples")
def test_an_interrupted_build_is_never_taken_for_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo.build_inputs(tmp_path)
    (tmp_path / "inputs.json").write_text("{}")

    def interrupt(*_: object) -> tuple[int, int]:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "write_checkpoint", interrupt)
    with pytest.raises(KeyboardInterrupt):
        demo.build_inputs(tmp_path)
    assert not (tmp_path / "inputs.json").exists()


def test_a_second_run_gets_a_directory_of_its_own(tmp_path: Path) -> None:
    assert demo.fresh_run(tmp_path) == tmp_path / "run"
    (tmp_path / "run").mkdir()
    (tmp_path / "run-2").mkdir()
    assert demo.fresh_run(tmp_path) == tmp_path / "run-3"


@pytest.mark.parametrize(("end", "code"), [(5.0, 0), (5.9, 0), (6.1, 1), (9.5, 1)])
def test_the_demo_fails_unless_the_loss_fell_by_a_third(
    end: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "answers", lambda directory: [""] * len(demo.PROMPTS))
    run = tmp_path / "run"
    run.mkdir()
    write_metrics(run / "metrics.jsonl", [9.0, 8.0] + [7.0] * 10 + [end] * demo.WINDOW)
    assert demo.show(tmp_path, run) == code


@pytest.mark.parametrize("failing", ["train", "verify", "report", None])
@pytest.mark.usefixtures("few_samples")
def test_the_demo_trains_proves_and_draws_and_ends_with_the_code_of_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failing: str | None
) -> None:
    started: list[str] = []

    def start(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        verb = command[3]
        started.append(verb)
        said = "every byte equals\nnot asked for\nfloat32: gradients: 1e-7\nverified    6 checks\n"
        return subprocess.CompletedProcess(command, 4 if verb == failing else 0, said)

    monkeypatch.setattr(subprocess, "run", start)
    monkeypatch.setattr(demo, "show", lambda root, run: 0)
    verbs = ["train", "verify", "report"]
    assert demo.run(tmp_path) == (4 if failing else 0)
    assert started == (verbs[: verbs.index(failing) + 1] if failing else verbs)
    printed = capsys.readouterr().out
    assert ("not asked for" in printed) == (failing == "verify")
    assert ("gradients" in printed) == (failing != "train")
    assert ("expertmesh init" in printed) == (failing is None)


@pytest.mark.parametrize(("long", "steps"), [(False, demo.STEPS), (True, None)])
@pytest.mark.usefixtures("few_samples")
def test_the_long_demo_goes_through_the_data_three_times(tmp_path: Path, long: bool, steps: int | None) -> None:
    train = load_config(demo.build_inputs(tmp_path, long=long)).train
    assert train.max_steps == steps
    assert train.num_epochs == (3 if long else 1)


@pytest.mark.parametrize(("accelerators", "ranks"), [(0, 2), (1, 1), (8, 2)])
@pytest.mark.usefixtures("few_samples")
def test_the_trainers_exit_code_is_the_demos_on_any_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accelerators: int, ranks: int
) -> None:
    started: list[list[str]] = []

    class Failed:
        returncode = 5

    def start(command: list[str], **_: object) -> Failed:
        started.append(command)
        return Failed()

    monkeypatch.setattr(subprocess, "run", start)
    monkeypatch.setattr("expertmesh.launcher.launch._accelerators", lambda: accelerators)
    assert demo.run(tmp_path) == 5
    assert started[0][1:4] == ["-m", "expertmesh", "train"]
    assert started[0][-2:] == ["--nproc", str(ranks)]
    assert load_config(tmp_path / "config.yaml").parallel.ep == ranks
