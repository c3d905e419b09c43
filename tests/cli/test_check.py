"""`check` shows what training would see and exits 0, or refuses hopeless input with its line."""

import contextlib
import functools
import json
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from expertmesh.cli.data import Terminal, run_check, run_prepare
from expertmesh.config import Config, ObjectiveConfig, ParallelConfig, dump_config
from expertmesh.config.errors import DistributedFailure
from expertmesh.data.encoding.encode import Encoder
from expertmesh.launcher import launch
from expertmesh.launcher.hangs import is_stopped
from tests.cli.jobs import wait_until
from tests.data import tokenizers_on_the_fly as on_the_fly
from tests.data.tokenizers_on_the_fly import bpe_tokenizer
from tests.support.errors import refused
from tests.support.models import tiny_config

QUESTION, ANSWER = "What is it?", "Nothing\x1b[31m special."


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory without weights, which `check` must not miss."""
    directory = tmp_path / "model"
    tiny_config("qwen3_moe", vocab_size=706, max_position_embeddings=16384).save_pretrained(directory)
    bpe_tokenizer(on_the_fly.CHATML).save_pretrained(directory)
    return directory


def config_of(model: Path, data: Path, lora: dict[str, Any] | None = None, **changes: Any) -> Config:
    defaults = {"train": [{"path": str(data)}], "max_length": 64}
    return Config.model_validate(
        {
            "model": {"name_or_path": str(model)},
            "data": {**defaults, **changes},
            "lora": lora,
            "train": {"global_batch_size": 2},
            "output_dir": str(model.parent / "run"),
        }
    )


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), "utf-8")
    return path


def chat(answer: str = ANSWER) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": answer}]}


def test_both_responses_of_a_pair_are_shown_with_their_targets(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = {"role": "user", "content": QUESTION}
    answers = [[{"role": "assistant", "content": text}] for text in ("Something.", "Nothing.")]
    data = write(tmp_path / "pairs.jsonl", [{"prompt": [ask], "chosen": answers[0], "rejected": answers[1]}] * 3)
    config = config_of(model, data, packing=False)
    config = config.model_copy(update={"objective": ObjectiveConfig(name="dpo")})
    assert run_check(config, samples=1) == 0
    out = capsys.readouterr().out
    assert f"chosen {data}:1: " in out
    assert f"rejected {data}:1: " in out
    assert "[[Something.<|im_end|>\n]]" in out
    assert "[[Nothing.<|im_end|>\n]]" in out
    assert out.count("[[") == 2
    assert "samples 3 of 3 rows" in out
    assert "global batch 2 pairs: 2 steps in the first epoch" in out


def test_prepared_data_is_shown_alike_and_not_tokenized_again(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [chat(f"{ANSWER} {i}") for i in range(1200)]
    config = config_of(model, write(tmp_path / "a.jsonl", [*rows, "{"]), on_error="skip")
    config = config.model_copy(
        update={"data": config.data.model_copy(update={"eval": config_of(model, tmp_path / "a.jsonl").data.train})}
    )
    assert run_check(config) == 0
    before = capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    assert run_prepare(config, workers=2) == 0
    said = capsys.readouterr().out
    assert "train data: 1,201 rows in " in said
    assert "rows/s, 2 processes" in said
    assert "skipped, malformed: 1:" in said
    assert f"eval data: {tmp_path / 'run' / 'prepared'}/" in said

    def tokenizing(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a row is tokenized")

    monkeypatch.setattr(Encoder, "encode", tokenizing)
    assert run_prepare(config) == 0
    assert "train data: is prepared already" in capsys.readouterr().out
    assert run_check(config) == 0
    assert capsys.readouterr().out == before


def test_error_of_a_worker_is_that_of_the_row(model: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "a.jsonl", [*(chat() for _ in range(600)), "{"])
    with refused("data.malformed-row", naming="a.jsonl:601: "):
        run_prepare(config_of(model, data), workers=2)
    assert list((tmp_path / "run" / "prepared").iterdir()) == []


def test_a_worker_that_is_killed_ends_the_preparation(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(Encoder, "encode", killed)
    with refused("data.worker-ended", DistributedFailure, naming="ended with -9"):
        run_prepare(config_of(model, write(tmp_path / "a.jsonl", [chat()])), workers=2)
    assert list((tmp_path / "run" / "prepared").iterdir()) == []


def test_report_shows_samples_targets_and_every_row_that_is_lost(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    silent = {"messages": [{"role": "user", "content": "anyone?"}]}
    data = write(tmp_path / "a.jsonl", [chat(), silent, "{", chat("word " * 80), chat()])
    assert run_check(config_of(model, data, on_error="skip"), samples=2) == 0
    out = capsys.readouterr().out
    assert "<|im_start|>assistant\n[[Nothing\\x1b[31m special.<|im_end|>]]\n" in out
    assert out.count("[[") == 2
    assert f"sample {data}:1: " in out
    assert f"{data}: format messages (detected), 5 rows in 1 file" in out
    assert "cut to 64 tokens: 1" in out
    assert f"no target token: 1 ({data}:2)" in out
    assert f"{data}:3: the line is not JSON" in out
    assert "3 samples in 2 rows of 64 tokens" in out
    assert "global batch 2 rows: 1 step in the first epoch, 1 in 1 epoch" in out
    assert "warning: 1 optimizer step in all teach little" in out
    histogram = [line for line in out.splitlines() if "█" in line]
    assert [int(line.split()[-1]) for line in histogram] == [1, 2, 1]


def test_a_finished_run_and_a_small_disk_are_notes_beside_the_data(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(model, write(tmp_path / "a.jsonl", [chat()] * 40), packing=False)
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text(dump_config(config))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=10**12, used=10**12, free=1000))
    assert run_check(config, samples=1) == 0
    out = capsys.readouterr().out
    assert f"sample {tmp_path / 'a.jsonl'}:1: " in out
    assert f"note: train would stop here: output_dir {tmp_path / 'run'} holds this run, finished" in out
    assert "the disk has 1,000 bytes free" in out
    assert "teach little" not in out
    assert run_prepare(config, workers=1) == 0
    assert "note: train would stop here: output_dir" in capsys.readouterr().out


def test_a_wrong_layout_is_refused_after_the_data_are_shown(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(model, write(tmp_path / "a.jsonl", [chat(), "{"]), on_error="skip")
    config = config.model_copy(update={"parallel": ParallelConfig(ep=3)})
    with refused("layout.ep-divides-experts", naming="parallel.ep 3 does not divide"):
        run_check(config, samples=1)
    out = capsys.readouterr().out
    assert "refused    parallel.ep 3 does not divide" in out
    assert f"{tmp_path / 'a.jsonl'}:2: the line is not JSON" in out
    config = config.model_copy(update={"data": config.data.model_copy(update={"on_error": "stop"})})
    with refused("layout.ep-divides-experts", naming="parallel.ep 3 does not divide"):
        run_check(config)


@pytest.mark.parametrize(("nproc", "predicted"), [(None, True), (1, True), (2, True), (4, False)])
def test_it_predicts_for_the_ranks_that_this_machine_can_start(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    nproc: int | None,
    predicted: bool,
) -> None:
    monkeypatch.setattr(launch, "processors", lambda: 2)
    config = config_of(model, write(tmp_path / "a.jsonl", [chat()]))
    config = config.model_copy(update={"train": config.train.model_copy(update={"global_batch_size": 4})})
    assert run_check(config, nproc=nproc) == 0
    out = capsys.readouterr().out
    assert f"layout of {nproc or 2} rank" in out
    assert (" s a step" in out) is predicted
    assert ("predicted  nothing: train would start 2 ranks here" in out) is not predicted


def test_targets_are_coloured_on_a_terminal(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = functools.partial(Terminal, force_terminal=True, color_system="standard")
    monkeypatch.setattr("expertmesh.cli.data.Terminal", terminal)
    run_check(config_of(model, write(tmp_path / "a.jsonl", [chat("Nothing.")])))
    out = capsys.readouterr().out
    assert "assistant\n\x1b[1;32mNothing.<|im_end|>\x1b[0m\n" in out
    assert "[[" not in out


def test_evaluation_data_is_reported_as_well(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write(tmp_path / "a.jsonl", [chat()])
    held_out = write(tmp_path / "b.jsonl", [{"text": "some text"}])
    run_check(config_of(model, data, eval=[{"path": str(held_out)}], packing=False))
    out = capsys.readouterr().out
    assert f"eval data\n{held_out}: format text" in out
    assert "packing" not in out


def test_adapters_are_told_and_wrong_targets_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "a.jsonl", [chat()])
    assert run_check(config_of(model, data, lora={"r": 4, "targets": ["attention", "experts"]})) == 0
    said = capsys.readouterr().out
    assert "lora attention: " in said
    assert "lora experts covered: all " in said
    with refused("lora.targets-nothing", naming="expert"):
        run_check(config_of(model, data, lora={"targets": ["expert"]}))


def test_suspicious_target_share_is_a_warning(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long_question = {"prompt": "why " * 2000, "completion": "so"}
    run_check(config_of(model, write(tmp_path / "a.jsonl", [long_question]), max_length=8192))
    assert "warning: 0% of all tokens are targets" in capsys.readouterr().out
    all_answer = {"prompt": "", "completion": "so " * 500}
    run_check(config_of(model, write(tmp_path / "b.jsonl", [all_answer]), max_length=8192))
    assert "warning: 100% of all tokens are targets" in capsys.readouterr().out
    run_check(config_of(model, write(tmp_path / "c.jsonl", [{"text": "so " * 500}]), max_length=8192))
    assert "of all tokens are targets" not in capsys.readouterr().out


def test_hopeless_input_is_refused(model: Path, tmp_path: Path) -> None:
    with refused("data.malformed-row", naming="a.jsonl:2: "):
        run_check(config_of(model, write(tmp_path / "a.jsonl", [chat(), "{"])))
    good = write(tmp_path / "b.jsonl", [chat()])
    (model / "tokenizer.json").write_text("{}")
    with refused("tokenizer.not-loaded"):
        run_check(config_of(model, good))


def test_of_two_that_need_the_same_tokens_one_makes_them(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(model, write(tmp_path / "a.jsonl", [chat() for _ in range(50)]))
    context, counter = multiprocessing.get_context("fork"), tmp_path / "made"
    encode, go_on = Encoder.encode, tmp_path / "go on"

    def slow(self: Encoder, records: Any, *directory: Any) -> Any:
        with counter.open("a") as file:
            file.write(f"{len(records)}\n")
        while not go_on.exists():
            time.sleep(0.01)
        return encode(self, records, *directory)

    def let_go_on(seconds: float) -> None:
        """Of who waits for the other."""
        go_on.touch()
        sleep(0.01)

    sleep = time.sleep
    monkeypatch.setattr(Encoder, "encode", slow)
    monkeypatch.setattr("expertmesh.cli.data.time", SimpleNamespace(monotonic=time.monotonic, sleep=let_go_on))
    first = context.Process(target=run_prepare, args=(config, 1))
    first.start()
    while not counter.exists():
        time.sleep(0.01)
    assert run_prepare(config, 1) == 0
    first.join()
    assert first.exitcode == 0
    assert counter.read_text() == "50\n"
    said = capfd.readouterr().out
    assert "train data: waiting for process " in said
    assert said.count(" rows/s, 1 processes") == 1
    assert not [path.name for path in (tmp_path / "run" / "prepared").iterdir() if path.name.startswith(".")]
    # Who has died holds nothing up.
    (tmp_path / "other").mkdir()
    other = config.model_copy(update={"output_dir": str(tmp_path / "other")})
    counter.unlink()
    go_on.unlink()
    dying = context.Process(target=run_prepare, args=(other, 1))
    dying.start()
    while not counter.exists():
        time.sleep(0.01)
    os.kill(dying.pid or 0, signal.SIGKILL)
    dying.join()
    go_on.touch()
    assert run_prepare(other, 1) == 0


def test_processes_that_tokenize_end_with_the_one_that_started_them(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, workers = config_of(model, write(tmp_path / "a.jsonl", [chat()])), tmp_path / "workers"
    workers.mkdir()

    def endless(self: Encoder, records: Any, *directory: Any) -> Any:
        (workers / str(os.getpid())).touch()
        while True:
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(600)

    monkeypatch.setattr(Encoder, "encode", endless)
    starter = multiprocessing.get_context("fork").Process(target=run_prepare, args=(config, 1))
    starter.start()
    wait_until(lambda: len(list(workers.iterdir())) == 1)
    (worker,) = (int(path.name) for path in workers.iterdir())
    os.kill(worker, signal.SIGINT)
    os.kill(starter.pid or 0, signal.SIGKILL)
    starter.join()
    try:
        wait_until(lambda: not Path(f"/proc/{worker}").exists() or is_stopped(worker, "ZX"))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
