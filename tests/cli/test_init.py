"""`init` writes a configuration that `check` takes and the planner predicts to fit, or one sentence and no file."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.shapes import qwen3_30b_a3b
from expertmesh.cli.data import run_check
from expertmesh.cli.main import main
from expertmesh.config import Config, LoraConfig, ObjectiveConfig, load_config
from expertmesh.planning.forecast import devices_here, forecast
from expertmesh.training.startup.preflight import preflight
from tests.data.tokenizers_on_the_fly import CHATML, bpe_tokenizer
from tests.support.list_models import write_own_qwen
from tests.training.tiny_run import write_inputs

CHAT = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "Nothing special."}]
FOR_ONE_H100 = "full fine-tuning does not fit: 461."


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 30 B parameters, of which there are only config.json and a tokenizer."""
    directory = tmp_path_factory.mktemp("large") / "Qwen3-30B-A3B"
    qwen3_30b_a3b().save_pretrained(directory)
    bpe_tokenizer(CHATML).save_pretrained(directory)
    return directory


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return rows(tmp_path, [{"messages": CHAT}] * 5)


def rows(root: Path, content: list[dict[str, Any]]) -> str:
    (root / "train, mine.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in content))
    return "train, mine.jsonl"


def written(*arguments: str) -> Config:
    assert main(["init", *arguments, "--output", "new.yaml"]) == 0
    return load_config("new.yaml")


def test_what_it_writes_for_this_machine_passes_check_and_fits(
    tmp_path: Path, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_inputs(tmp_path)
    config = written("model", "--data", data)
    text = Path("new.yaml").read_text()
    assert capsys.readouterr().out == f"{text}wrote new.yaml\n"
    assert len([line for line in text.splitlines() if not line.startswith("#")]) <= 16
    assert "messages; " in text
    assert "found by " in text
    assert (config.lora, config.precision.compute, config.data.max_length) == (None, "float32", 64)
    assert run_check(config, nproc=2) == 0
    prediction = forecast(config, preflight(config, 2))
    assert prediction.warning is None
    assert prediction.prediction is not None
    devices = devices_here(2)
    assert devices is not None
    assert prediction.prediction.peak_memory_bytes < devices.hardware.memory

    assert main(["init", "model", "--data", data, "--output", "new.yaml"]) == 2
    assert "new.yaml exists already and stays as it is" in capsys.readouterr().err
    assert Path("new.yaml").read_text() == text


@pytest.mark.slow(why="each builds 48 layers for its search; test_search.py's searches and what fits nowhere stay")
@pytest.mark.parametrize(
    ("devices", "options", "targets", "frozen", "says"),
    [
        ("8xh100", [], None, None, "full fine-tuning, on 1x8 h100"),
        ("1 h100", [], ("attention", "experts"), None, FOR_ONE_H100),
        ("1xrtx4090", ["--max-length", "2048"], ("attention",), "nf4", "LoRA on attention does not fit"),
    ],
)
def test_it_trains_what_fits_and_says_what_does_not(
    large: Path,
    data: str,
    devices: str,
    options: list[str],
    targets: tuple[str, ...] | None,
    frozen: str | None,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**12))
    config = written(str(large), "--data", data, "--devices", devices, *options)
    assert (None if config.lora is None else config.lora.targets) == targets
    assert config.precision.frozen == frozen
    assert config.optim.learning_rate == (1e-5 if targets is None else 1e-4)
    assert says in Path("new.yaml").read_text()
    preflight(config, int(devices[0]), weights=False)


def test_quantised_experts_stay_as_they_are_published(tmp_path: Path, data: str) -> None:
    write_inputs(tmp_path)
    assert main(["convert", "model", "--output", "fp8", "--dtype", "fp8"]) == 0
    assert written("fp8", "--data", data, "--lora").precision.frozen == "as_published"


def optimizer_steps(config: Config, capsys: pytest.CaptureFixture[str]) -> int:
    """In all, as `check` counts them; it must find nothing to warn of."""
    capsys.readouterr()
    assert run_check(config, nproc=2) == 0
    said = capsys.readouterr().out
    assert "warning" not in said
    found = re.search(r" in the first epoch, (\d+) in ", said)
    assert found is not None
    return int(found[1])


@pytest.mark.slow_cases(r".*-True", why="the smallest stays")
@pytest.mark.parametrize(("count", "packed"), [(12, False), (200, True), (3000, True)])
def test_small_data_get_twenty_optimizer_steps(
    tmp_path: Path, data: str, capsys: pytest.CaptureFixture[str], count: int, packed: bool
) -> None:
    write_inputs(tmp_path)
    config = written("model", "--data", rows(tmp_path, [{"messages": CHAT}] * count))
    assert (config.data.packing, config.train.num_epochs > 1) == (packed, not packed)
    assert 20 <= optimizer_steps(config, capsys) <= 60
    Path("new.yaml").unlink()
    config = written("model", "--data", rows(tmp_path, [{"messages": CHAT}] * count), "train.global_batch_size=4")
    assert config.train.global_batch_size == 4
    assert optimizer_steps(config, capsys) >= 20


@pytest.mark.slow(why="small data stay")
def test_large_data_get_the_whole_global_batch(large: Path, tmp_path: Path, data: str) -> None:
    long = [CHAT[0], {"role": "assistant", "content": "Nothing special. " * 1000}]
    config = written(str(large), "--data", rows(tmp_path, [{"messages": long}] * 1300), "--devices", "8xh100")
    assert (config.train.global_batch_size, config.data.packing, config.data.max_length) == (64, True, 4096)
    assert config.train.num_epochs == 1


@pytest.mark.slow_cases(r"False", why="adapters stay")
@pytest.mark.parametrize("lora", [False, True])
def test_pairs_are_trained_as_pairs(tmp_path: Path, data: str, capsys: pytest.CaptureFixture[str], lora: bool) -> None:
    write_inputs(tmp_path)
    row = {"prompt": "What is it? ", "chosen": "Nothing special.", "rejected": "Nothing."}
    config = written("model", "--data", rows(tmp_path, [row] * 200), *["--lora"] * lora)
    assert (config.objective.name, config.data.packing, config.lora is not None) == ("dpo", False, lora)
    assert config.optim.learning_rate == (5e-6 if lora else 1e-6)
    assert optimizer_steps(config, capsys) >= 20
    prediction = forecast(config, preflight(config, 2)).prediction
    assert prediction is not None
    assert f"# {prediction.peak_memory_bytes / 2**30:.1f} GiB a rank of " in Path("new.yaml").read_text()
    Path("new.yaml").unlink()
    asked = ["objective.name=simpo", "objective.gamma=1.0", *["--lora"] * lora]
    simpo = written("model", "--data", "train, mine.jsonl", *asked)
    assert simpo == config.model_copy(
        update={"objective": ObjectiveConfig(name="simpo", gamma=1.0), "output_dir": simpo.output_dir}
    )


def test_labelled_responses_are_trained_by_kto(tmp_path: Path, data: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_inputs(tmp_path)
    labelled = [{"prompt": "What is it? ", "completion": "Nothing.", "label": n % 2 == 1} for n in range(200)]
    config = written("model", "--data", rows(tmp_path, labelled))
    assert (config.objective.name, config.data.packing, config.optim.learning_rate) == ("kto", False, 1e-6)
    capsys.readouterr()
    assert run_check(config, nproc=2, samples=2) == 0
    said = capsys.readouterr().out
    assert re.search(r"^undesirable .*:1: .*\n(.*\n)+desirable .*:2: ", said, re.MULTILINE)
    assert "100 of 200 responses are desirable" in said


def test_key_value_is_what_the_file_says_and_what_is_planned(
    tmp_path: Path, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_inputs(tmp_path)
    wanted = ["train.micro_batch_size=3", "parallel.ep=2", "lora.r=4", "lora.targets=[attention]", "log.report_to=[]"]
    config = written("model", "--data", data, *wanted, "data.max_length=96", "output_dir=elsewhere")
    text = Path("new.yaml").read_text()
    assert (config.train.micro_batch_size, config.parallel.ep, config.data.max_length) == (3, 2, 96)
    assert config.lora == LoraConfig(r=4, targets=("attention",))
    assert (config.optim.learning_rate, config.output_dir) == (1e-4, "elsewhere")
    assert "LoRA on attention, on 1x2 cpu" in text
    assert "micro-batch 3 × 2 data ranks" in text
    assert "\noutput_dir: elsewhere\n" in text
    prediction = forecast(config, preflight(config, 2)).prediction
    assert prediction is not None
    assert f", {prediction.step_seconds:.3g} s a step, " in text
    for wrong, says in (
        ("train.nope=1", "train.nope is not a key of the configuration"),
        ("parallel.ep=3", "parallel.ep 3 does not divide"),
        ("objective.name=dpo", "which only objective.name sft or distill trains on"),
        ("data.max_length=1000", "data.max_length 1000: qwen3_moe has max_position_embeddings 128"),
    ):
        assert main(["init", "model", "--data", data, wrong, "--output", "other.yaml"]) == 2
        assert says in capsys.readouterr().err
        assert not Path("other.yaml").exists()


def test_keys_of_the_model_hold_for_the_plan_as_well(tmp_path: Path, data: str) -> None:
    write_inputs(tmp_path)
    write_own_qwen(tmp_path / "own", vocab_size=706)
    bpe_tokenizer(CHATML).save_pretrained("own")
    assert written("own", "--data", data, "model.trust_remote_code=true").model.trust_remote_code


def test_nothing_is_written_where_nothing_fits(large: Path, data: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(large), "--data", data, "--devices", "1 h100", "--full"]) == 2
    said = capsys.readouterr().err
    assert "does not fit on 1x1 h100 with rows of 64 tokens" in said
    assert FOR_ONE_H100 in said
    assert not list(Path().glob("*.yaml"))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([{"messages": CHAT}, {"messages": [{"role": "user"}]}], "mine.jsonl:2: "),
        ([{"question": "What?"}], "mine.jsonl:1: the row's keys (question) fit none of the formats"),
        ([{"prompt": "a", "chosen": "b", "rejected": ""}], "mine.jsonl:1: 'rejected' is empty"),
        ([{"messages": CHAT[:1]}], "has no target token at all"),
    ],
)
def test_mistakes_in_the_data_are_said_before_anything_is_written(
    large: Path, tmp_path: Path, data: str, content: list[Any], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(large), "--data", rows(tmp_path, content), "--devices", "8 h100"]) == 2
    assert says in capsys.readouterr().err
    assert not list(Path().glob("*.yaml"))


def test_an_axis_that_is_given_leaves_ep_to_the_rule(tmp_path: Path, data: str) -> None:
    write_inputs(tmp_path)
    parallel = written("model", "--data", data, "--devices", "1x4 h100", "parallel.tp=2").parallel
    assert (parallel.tp, parallel.fsdp, parallel.ep) == (2, 2, 1)
