"""`model.from_config: true` on the command line: train from random weights, then prove and resume that very run."""

import math
from pathlib import Path

import pytest

from expertmesh.cli.main import main
from tests.cli.rank_of_srun import rank_of_srun
from tests.support.ranks import shared_ranks
from tests.training.tiny_run import metrics, run_config, weights, write_inputs


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration of a run whose model has a config and a tokenizer alone, of transformers' own deviation."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    inputs = write_inputs(tmp_path, initializer_range=0.02)
    (inputs / "model" / "model.safetensors").unlink()
    run_config(inputs, tmp_path / "run")
    return tmp_path / "run.yaml"


def test_a_run_from_a_config_trains_is_verified_and_goes_on(
    run: Path,
) -> None:
    def said(verb: str, *words: str) -> str:
        arguments = [verb, str(run), "model.from_config=true", "checkpoint.every_steps=1", *words]
        assert shared_ranks(rank_of_srun, 2, arguments, str(run)) == [0, 0]
        return Path(f"{run}.0.txt").read_text()

    assert "weights    random, drawn from train.seed 42" in said("train", "train.max_steps=2")
    first = metrics(run.with_suffix(""))[0]["loss"]
    # Untrained, it knows nothing.
    vocabulary = len(weights(run.with_suffix(""))["lm_head.weight"])
    assert abs(first - math.log(vocabulary)) < 0.1

    verified = said("verify", "train.max_steps=2", "parallel.ep=2", "--only", "bytes,forward,backward,artifacts")
    assert "every byte equals what is drawn" in verified
    assert "note        the weights are random, drawn from train.seed 42" in verified

    assert "resume     step-00000002" in said("train", "train.max_steps=3", "parallel.ep=2")
    assert metrics(run.with_suffix(""))[0]["loss"] == first


def test_check_and_init_take_it_and_train_without_it_names_the_key(
    run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    assert main(["check", str(run), "model.from_config=true", "--nproc", "1"]) == 0
    assert main(["init", "model", "--data", "train.jsonl", "--output", "new.yaml", "model.from_config=true"]) == 0
    assert "  from_config: true\n" in (run.parent / "new.yaml").read_text()
    capfd.readouterr()
    assert main(["train", str(run), "--nproc", "1"]) == 2
    assert "model.from_config" in capfd.readouterr().err
    assert (
        main(["init", "model", "--data", "train.jsonl", "--lora", "--output", "l.yaml", "model.from_config=true"]) == 2
    )
    assert "lora" in capfd.readouterr().err
