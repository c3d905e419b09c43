"""The page in a real browser, headless: it renders, loads nothing, and fits a phone's screen."""

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from matplotlib import colormaps
from matplotlib.image import imread

from expertmesh.report.page import render
from expertmesh.report.run import read_run
from tests.report.made_up import PREDICTED, row, start, write_run
from tests.report.parsed import Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium installed")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip
# Put into a copy of the page, without the policy that would forbid it: what stands wider than the screen.
PROBE = """<script>
const wide = [...document.querySelectorAll("body *")].filter(
  e => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest(".scroll, pre, svg, .hidden"));
document.documentElement.dataset.probe = [innerWidth, document.documentElement.scrollWidth,
  wide.map(e => e.tagName).join(" ")].join(",");
</script>"""


# What the pointer does: over the loss at a step, over a heat map, a rectangle dragged in the loss, a double click.
POINTER = """<script>{
const [loss, ...others] = document.querySelectorAll("svg[data-hover]");
const heat = others.find(svg => JSON.parse(svg.dataset.hover).box);
const say = (svg, kind, x, y) => {
  const at = new DOMPoint(x, y).matrixTransform(svg.getScreenCTM());
  svg.dispatchEvent(new PointerEvent(kind, {clientX: at.x, clientY: at.y, bubbles: true}));
  return svg.parentElement.querySelector("output")?.textContent ?? "";
};
const line = JSON.parse(loss.dataset.hover).lines[0], [left, top, right, bottom] = JSON.parse(heat.dataset.hover).box;
const said = [say(loss, "pointermove", line.x[29] + 1, 100), say(heat, "pointermove", right - 1, bottom - 1)];
const whole = loss.getAttribute("viewBox");
say(loss, "pointerdown", 100, 50); say(loss, "pointerup", 200, 100);
said.push(loss.getAttribute("viewBox").split(" ").map(Number).map(Math.round).join(" "));
say(loss, "dblclick", 100, 50);
said.push(loss.getAttribute("viewBox") === whole ? "whole" : "part");
document.documentElement.dataset.said = said.join("|");
}</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with everything on it."""
    directory = tmp_path_factory.mktemp("browser")
    rows = [row(step, 60, 4, aux_loss=1.0) for step in range(1, 61)]
    rows[4] = row(5, 60, 4, skipped="the loss is nan on rank 1") | {"loss": None, "grad_norm": None}
    rows += [{"step": step, "eval_loss": 3.0, "eval_target_tokens": 9} for step in (30, 60)]
    long = "organisation/" + "a-model-with-a-very-long-name-" * 4
    run = write_run(directory / "run", rows=rows, layers=4, model=long, starts=[start(), start(30, plan=PREDICTED)])
    file = directory / "report.html"
    file.write_text(render(read_run(run)), encoding="utf-8")
    return file


def _browse(profile: Path, page: Path, *options: str) -> str:
    """What the browser prints. Each start has a new, empty profile."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", *options, page.as_uri()]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_the_browser_reads_the_page_as_it_was_written(page: Path, tmp_path: Path) -> None:
    read = _browse(tmp_path, page, "--dump-dom")
    # What is not well-formed, the browser mends: the elements would be others.
    written, got = Page(page.read_text("utf-8")), Page(re.sub(r"^<!DOCTYPE html>", "", read))
    assert [tag for tag in got.tags if tag != "tbody"] == [tag for tag in written.tags if tag != "tbody"]
    assert got.ids == written.ids
    assert got.tags.count("svg") == 10
    assert {section: text.split() for section, text in got.texts.items() if text.strip()} == {
        section: text.split() for section, text in written.texts.items() if text.strip()
    }


def test_the_page_is_drawn_with_its_figures(page: Path, tmp_path: Path) -> None:
    shot = tmp_path / "shot.png"
    _browse(tmp_path / "profile", page, f"--screenshot={shot}", "--window-size=1200,3000")
    pixels = imread(shot)[:, :, :3]
    assert pixels.shape == (3000, 1200, 3)
    ends = colormaps["cividis"]([0.0, 1.0])[:, :3]
    for colour in (
        (0, 0x72 / 255, 0xB2 / 255),
        (0xB8 / 255, 0x50 / 255, 0),
        (0xC2 / 255, 0x41 / 255, 0xC / 255),
        *ends,
    ):
        assert (np.abs(pixels - colour).max(axis=2) < 0.02).sum() > 20, colour


@pytest.mark.parametrize("width", [500, 1280])
def test_nothing_is_wider_than_the_screen(page: Path, tmp_path: Path, width: int) -> None:
    probed = tmp_path / "probed.html"
    source = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text("utf-8"))
    probed.write_text(source.replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    read = _browse(tmp_path / "profile", probed, "--dump-dom", f"--window-size={width},900")
    found = re.search(r'data-probe="([^"]*)"', read)
    assert found is not None
    inner, scroll, wide = found[1].split(",")
    assert wide == ""
    assert int(scroll) <= int(inner)


def test_the_pointer_is_told_values_and_a_dragged_rectangle_fills_the_figure(page: Path, tmp_path: Path) -> None:
    probed = tmp_path / "probed.html"
    source = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text("utf-8"))
    probed.write_text(source.replace("</body>", f"{POINTER}</body>"), encoding="utf-8")
    read = _browse(tmp_path / "profile", probed, "--dump-dom", "--window-size=1200,900")
    found = re.search(r'data-said="([^"]*)"', read)
    assert found is not None
    line, cell, zoomed, after = found[1].split("|")
    loss = row(30, 60, 4)["loss"]
    assert line == f"step 30\ntraining: {float(f'{loss:.4g}')}\nevaluation: 3"
    most = row(60, 60, 4)["expert_load"][3]["max_over_mean"]
    assert cell == f"block 4, to step 60: {float(f'{most:.4g}')}"
    x, y, width, height = map(int, zoomed.split())
    assert (x, width) == (100, 100)
    assert 45 < y < 55
    assert 45 < height < 60
    assert after == "whole"
