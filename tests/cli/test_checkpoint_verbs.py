"""`verify` and `export` on the command line: what they print, what they end with, and which checkpoint they take."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from expertmesh.cli.main import main
from expertmesh.cli.options import size
from expertmesh.io.terminal import printable
from tests.checkpoint.damage import change_manifest, flip_a_bit, remove, truncate
from tests.checkpoint.make_golden import GOLDEN

STEP = "step-00000002"
SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's directory with two checkpoints and what an interrupted save left; the older one is damaged."""
    for name in ("step-00000001", STEP):
        shutil.copytree(GOLDEN / STEP, tmp_path / "run" / "checkpoints" / name)
    change_manifest(lambda m: m.update(step=1))(tmp_path / "run" / "checkpoints" / "step-00000001")
    flip_a_bit(SHARD, 1.0)(tmp_path / "run" / "checkpoints" / "step-00000001")
    (tmp_path / "run" / "checkpoints" / "step-00000003.tmp-1").mkdir()
    return tmp_path / "run"


def test_verify_looks_at_the_newest_checkpoint_of_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, chosen in (
        (run, ", the newest of 2"),
        (run / "checkpoints", ", the newest of 2"),
        (run / "checkpoints" / STEP, ""),
    ):
        assert main(["verify", str(path)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"checkpoint  {run / 'checkpoints' / STEP}{chosen}"
        assert lines[3].startswith("files       9, ")
        assert "optimizer   exp_avg, exp_avg_sq, step of 30 trained parameters" in lines
        assert any(line.startswith("layer 1     4 experts, 4 different, 0 dead, norm ") for line in lines)
        assert lines[-1].startswith("sound       ")


def test_verify_names_everything_and_ends_with_3(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "checkpoints" / STEP
    truncate(SHARD)(path)
    remove("rng/generators.safetensors")(path)
    report = tmp_path / "report.json"
    assert main(["verify", str(path), "--json", str(report)]) == 3
    captured = capsys.readouterr()
    assert "sound" not in captured.out
    first, *others = captured.err.splitlines()
    assert first == f"error: {path}: 2 things are wrong with it"
    assert [line.split(": ")[0].strip() for line in others] == [
        str(path / SHARD),
        str(path / "rng/generators.safetensors"),
    ]
    content = json.loads(report.read_text())
    assert content["sound"] is False
    assert [finding["text"] for finding in content["findings"]] == [line.strip() for line in others]


def test_verify_writes_a_hash_of_every_expert(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert main(["verify", str(GOLDEN / STEP), "--json", str(report)]) == 0
    content = json.loads(report.read_text())
    assert (content["format"], content["version"], content["sound"]) == ("expertmesh-verification", 1, True)
    (experts,) = content["experts"]
    assert experts["module"] == "model.layers.1.mlp.experts"
    assert len(set(experts["sha256"])) == len(experts["norm"]) == 4


def test_the_report_is_json_where_an_expert_is_not_finite(run: Path, tmp_path: Path) -> None:
    path, report = run / "checkpoints" / STEP / SHARD, tmp_path / "report.json"
    raw = bytearray(path.read_bytes())
    values = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:values])
    start, stop = next(each["data_offsets"] for name, each in header.items() if name.endswith("experts.down_proj"))
    raw[values + start : values + stop] = b"\xff" * (stop - start)  # NaN in each dtype
    path.write_bytes(raw)
    assert main(["verify", str(run), "--json", str(report)]) == 3
    (experts,) = json.loads(report.read_text(), parse_constant=pytest.fail)["experts"]
    assert "nan" in experts["norm"]


@pytest.mark.parametrize("verb", ["verify", "export"])
def test_exit_codes_tell_input_from_damage_from_danger(
    run: Path, tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--output", str(tmp_path / "out")] if verb == "export" else []
    path = run / "checkpoints" / STEP

    def code(given: Path) -> int:
        return main([verb, str(given), *more])

    assert code(tmp_path / "nothing") == 2
    assert "nothing: no such directory" in capsys.readouterr().err
    assert code(tmp_path) == 2
    assert "holds no checkpoint, neither a manifest.json nor checkpoints/step-*" in capsys.readouterr().err
    assert code(run / "checkpoints" / "step-00000003.tmp-1") == 2
    assert code(run / "checkpoints" / "step-00000001") == 3
    assert f"{SHARD}: damaged" in capsys.readouterr().err
    change_manifest(lambda manifest: manifest["files"][0].update(name="../other"))(path)
    assert code(path) == 4
    change_manifest(lambda manifest: manifest.update(schema_version=9))(path)
    assert code(path) == 2
    (path / "manifest.json").unlink()
    assert code(path) == 3
    assert not (tmp_path / "out").exists()


def test_verify_refuses_a_pickle_with_4(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints" / STEP / "optimizer.pt").write_bytes(b"PK\x03\x04")
    assert main(["verify", str(run)]) == 4
    assert "optimizer.pt: is a pickle" in capsys.readouterr().err


def test_export_writes_what_transformers_reads(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out"
    arguments = ["export", str(run), "--output", str(target), "--dtype", "bfloat16", "--max-shard-size", "4KB"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"checkpoint  {run / 'checkpoints' / STEP}, the newest of 2"
    assert lines[1].startswith(f"exported    {target}: the model after step 2, ")
    assert " tensors in bfloat16, " in lines[1]
    assert lines[2].endswith(" of memory above the start")
    assert len(list(target.glob("*.safetensors"))) > 1
    model, notes = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(notes.values()), notes
    assert model.dtype == torch.bfloat16
    assert main(arguments) == 2
    assert "exists and is not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [("5GB", 5 * 10**9), ("500MB", 5 * 10**8), ("1.5 gb", 15 * 10**8), ("4GiB", 4 << 30), ("12345", 12345), ("7B", 7)],
)
def test_sizes_are_read(text: str, expected: int) -> None:
    assert size(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "5X", "5 iB", "0", "five"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size; write 5GB"):
        size(text)


def test_names_from_a_checkpoint_cannot_drive_the_terminal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_manifest(lambda manifest: manifest["versions"].update({"torch\x1b[2J": "1\r"}))(run / "checkpoints" / STEP)
    assert main(["verify", str(run)]) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert printable("a\x1b[2Jb\nc") == "a\\x1b[2Jb\nc"
