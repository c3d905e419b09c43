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
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=100).stdout


def test_the_browser_reads_the_page_as_it_was_written(page: Path, tmp_path: Path) -> None:
    read = _browse(tmp_path, page, "--dump-dom")
    # What is not well-formed, the browser mends: the elements would be others.
    written, got = Page(page.read_text("utf-8")), Page(re.sub(r"^<!DOCTYPE html>", "", read))
    assert [tag for tag in got.tags if tag != "tbody"] == [tag for tag in written.tags if tag != "tbody"]
    assert got.ids == written.ids
    assert got.tags.count("svg") == 9
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
