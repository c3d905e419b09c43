"""What has to be right on a GPU (`pytest -m gpu`: the stages of `make gpu` that check), and that the stages themselves
run: in miniature, on the CPU.
"""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_stage import Run, stage
from tests.support.ranks import run_ranks

STAND_IN = """
import os, sys, time
name = sys.argv[1]
assert sys.stdin.read() == "go"
print('{"case": 1, "ok": %s}' % ("false" if name == "wrong" else "true"), flush=True)
if name == "crashes":
    print("a device-side assertion", file=sys.stderr, flush=True)
    os.abort()
if name == "hangs":
    time.sleep(60)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible; `pytest -m gpu` needs one")
@pytest.mark.parametrize("name", gpu.CHECKS)
def test_what_is_right_on_the_cpu_is_right_on_the_gpu(name: str, tmp_path: Path) -> None:
    ((_, found),) = gpu.run_stages([name], "cuda", tmp_path, budget=110)
    assert found.rows
    assert found.failures == []


def _rows(name: str, out: Path) -> list[gpu.Row]:
    return list(stage(name)(Run(torch.device("cpu"), out)))


@pytest.mark.slow_cases(
    r"(ranks|parity|grouped_mm|environment|.*bench|memory|step|profile|whole)", why="the cheap stages that check stay"
)
@pytest.mark.parametrize("name", gpu.LIMITS)
def test_every_stage_runs_in_miniature_on_the_cpu(name: str, tmp_path: Path) -> None:
    (rows,) = run_ranks(_rows, 1, name, tmp_path)
    assert rows
    json.dumps(rows)
    assert [row for row in rows if row.get("ok") is False] == []
    assert (name in gpu.CHECKS) == any("ok" in row for row in rows)


@pytest.mark.slow(why="every stage in miniature stays")
def test_a_stage_that_fails_stops_no_other_and_the_exit_code_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "PROCESS", (sys.executable, "-c", STAND_IN))
    monkeypatch.setattr(gpu, "LIMITS", dict.fromkeys(("crashes", "wrong", "hangs", "right"), 1.5))
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path)])
    assert gpu.main() == 1
    found, printed = json.loads((tmp_path / "gpu.json").read_text()), capsys.readouterr().out
    assert all(len(each["rows"]) == 1 for each in found.values())
    assert "a device-side assertion" in found["crashes"]["error"]
    assert "did not end within" in found["hangs"]["error"]
    assert found["right"]["error"] is None
    assert [line.split()[:2] for line in printed.splitlines() if line.startswith("FAILED")] == [
        ["FAILED", f"{name}:"] for name in ("crashes", "wrong", "hangs")
    ]
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path), "--stages", "right"])
    assert gpu.main() == 0
