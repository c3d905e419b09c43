"""Other people's text reaches no terminal as control characters, from any verb, nor from what libraries log."""

import json
import logging
import os
import shutil
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path

import pytest

from expertmesh.cli.main import app, main
from expertmesh.io import terminal
from expertmesh.io.terminal import lasting_output, prepare_output, printable
from expertmesh.training.lock import NAME, Owner
from tests.data.tokenizers_on_the_fly import CHATML, bpe_tokenizer
from tests.support.models import tiny_config, tiny_model

EVIL = "\x1b]0;owned\x07\x1b[31m\x9b2J\u202e"
GOLDEN = Path(__file__).parents[1] / "checkpoint" / "golden" / "step-00000002"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory whose name drives terminals, with a model, a checkpoint, a run and data that do so too."""
    monkeypatch.delenv("RANK", raising=False)
    root = tmp_path / f"a{EVIL}b"
    model, run = root / "model", root / "run"
    tiny_model("qwen3_moe").save_pretrained(model)
    bpe_tokenizer("{{ raise_exception('" + EVIL + "') }}" + CHATML).save_pretrained(model)
    (root / "rows.jsonl").write_text(json.dumps({"messages": [{"role": EVIL, "content": EVIL}], EVIL: EVIL}) + "\n")
    odd = tiny_config("qwen3_moe").to_dict() | {"model_type": EVIL, "architectures": [EVIL]}
    (root / "odd").mkdir()
    (root / "odd" / "config.json").write_text(json.dumps(odd))
    shutil.copytree(GOLDEN, run / "checkpoints" / GOLDEN.name)
    manifest = run / "checkpoints" / GOLDEN.name / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"versions": {EVIL: EVIL}, "created": EVIL}))
    (run / "config.yaml").write_text(f'"{EVIL.encode("unicode_escape").decode()}": 1\n')
    (run / "run.json").write_text(json.dumps({"schema_version": 1, EVIL: EVIL}))
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 1.0, "skipped": EVIL}) + "\n")
    held = Owner(EVIL, 1, None, time.time())
    (run / NAME).write_text(json.dumps(asdict(held)))
    adapter = root / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": EVIL, "task_type": EVIL}))
    config = root / "c.yaml"
    config.write_text(
        json.dumps({"model": {"name_or_path": "m"}, "data": {"train": [{"path": "d"}]}, "output_dir": "o"})
    )
    return root


def commands(root: Path) -> dict[str, list[list[str]]]:
    at = lambda *names: str(root.joinpath(*names))  # noqa: E731
    config, output = at("c.yaml"), ["--output", at("out")]
    return {
        "train": [[config, f"{EVIL}=1"], [config, f"model.name_or_path={at('model')}"], [config, f"optim.name={EVIL}"]],
        "check": [[config, f"data.train.0.path={EVIL}"], [at("no.yaml")]],
        "inspect": [[at("model")], [at("odd")], [EVIL]],
        "plan": [
            [at("model"), "--devices", EVIL],
            [at("model"), "--devices", "2 h100"],
            [at("odd"), "--devices", "2 h100"],
        ],
        "verify": [[at("run")], [at("model")], [config, "--only", EVIL]],
        "export": [[at("run"), *output], [at("model"), *output]],
        "merge": [[at("adapter"), *output], [at("model"), *output]],
        "convert": [[at("odd"), *output], [at("none"), *output], [at("model"), *output]],
        "report": [[at("run")], [at("model")]],
        "schema": [[EVIL]],
        "demo": [[EVIL]],
        "doctor": [[EVIL]],
        "init": [[EVIL]],
        "prepare": [[at("no.yaml")], [config, f"{EVIL}=1"]],
    }


def test_no_verb_lets_control_characters_through(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = commands(place)
    assert asked.keys() == {command.callback.__name__ for command in app.registered_commands if command.callback}
    for verb, lines in asked.items():
        for arguments in lines:
            code = main([verb, *arguments])
            said = "".join(capsys.readouterr())
            assert said, (verb, arguments)
            assert said == printable(said), (verb, arguments)
            assert code in (0, 2, 3, 4), (verb, arguments, code, said)


def test_what_libraries_log_and_warn_is_visible_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    before = logging.getLogRecordFactory()
    prepare_output()
    try:
        record = logging.getLogger("x").makeRecord("x", 30, "f", 1, "a model of type %s", (EVIL,), None)
        assert record.getMessage() == printable(f"a model of type {EVIL}")
        assert "\x1b" not in warnings.formatwarning(EVIL, UserWarning, "f", 1)
    finally:
        logging.setLogRecordFactory(before)


def test_a_line_without_end_is_cut() -> None:
    shown = printable("a\n" + "x" * 10**6)
    assert len(shown) < 5000
    assert shown.endswith("(1,000,000 characters)")


def test_a_process_goes_on_when_nobody_reads_it_or_the_disk_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    for stream in (os.fdopen(write, "w"), open("/dev/full", "w")):  # noqa: SIM115
        monkeypatch.setattr(sys, "stdout", stream)
        with lasting_output():
            for _ in range(3):
                terminal.tell("line\n" * 10_000)
        stream.flush()
        stream.close()
