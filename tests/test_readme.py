"""The README is short, its Python runs as it stands, and its picture is drawn from the committed data."""

import os
import re
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from benchmarks import figures
from expertmesh.demo import run as demo
from expertmesh.demo.run import Sample
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SAMPLES = [Sample(f"module.name{i}", f"What does `module.name{i}` do?", f"It returns {i}.") for i in range(20)]


def test_the_readme_is_read_in_minutes() -> None:
    assert len(README.split()) <= 900


def _words_of(svg: str) -> list[str]:
    """Return a picture's style, and its texts in order."""
    return re.findall(r"<style>.*?</style>|(?<=>)[^<>]+(?=</text>)", svg, re.DOTALL)


def test_pictures_are_what_make_figures_draws() -> None:
    pages = [README, (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")]
    pages += [page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")]
    # matplotlib places the report's figures, by its version.
    drawn = (figures.PICTURES / figures.REPORT).read_text(encoding="utf-8")
    assert figures.demo_hash() in drawn, "make figures"
    assert _words_of(figures.report()) == _words_of(drawn), "make figures"
    assert f"pictures/{figures.REPORT}" in README
    for name, text in figures.pictures().items():
        assert (figures.PICTURES / name).read_text(encoding="utf-8") == text, "make figures"
        assert any(f"pictures/{name}" in page for page in pages), name


def test_the_curves_of_the_picture_are_within_its_bound() -> None:
    reference, *others = figures.curves()
    for curve in others:
        pairs = zip(curve.losses, reference.losses, strict=True)
        assert max(abs(own - other) / other for own, other in pairs) < figures.BOUND, curve.name


def _run(source: str, directory: Path) -> None:
    os.chdir(directory)
    with mock.patch.object(dist, "destroy_process_group"):  # run_ranks ends the group itself
        exec(compile(source, "README.md", "exec"), {"__name__": "__main__"})


def test_the_python_loop_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "stdlib_samples", lambda: SAMPLES)
    demo.build_inputs(tmp_path / "demo")
    loops = [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "em.init_mesh" in block]
    assert len(loops) == 1
    run_ranks(_run, 2, loops[0], tmp_path)
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "demo" / "model").state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "demo" / "own-loop").state_dict()
    unchanged = [name for name in before if before[name].equal(after[name])]
    assert not [name for name in unchanged if "experts" not in name], "a dense parameter did not train"
    assert len(unchanged) < sum("experts" in name for name in before)
