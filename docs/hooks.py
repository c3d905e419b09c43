"""What `mkdocs build` changes in the pages: links to files of the repository outside docs/ become links to GitHub.

A link that leads nowhere stops the build, and so does a page that does not fit a phone, where a browser is installed.
"""

import logging
import posixpath
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?P<target>[^)#\s:]+)(?P<anchor>#[^)\s]*)?(?=\))")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# What is wider than a phone and does not scroll, names in tables that are broken, and the colours that are shown.
PROBE = """<script>addEventListener("load", () => {
const root = document.documentElement, article = document.querySelector("article");
root.style.width = "390px";
const wide = [...article.querySelectorAll("*")].filter(
  e => e.getBoundingClientRect().right > 391 && !e.closest("pre, svg, .md-typeset__scrollwrap"));
const broken = [...article.querySelectorAll("td code")].filter(e => e.getClientRects().length > 1);
root.dataset.probe = [...wide, ...broken].map(e => e.textContent.trim().slice(0, 40)).join("; ");
root.dataset.scheme = document.body.dataset.mdColorScheme;
})</script>"""
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links of a page to where the site or GitHub has their files."""
    repository = f"{(config.repo_url or '').rstrip('/')}/blob/main"

    def moved(found: re.Match[str]) -> str:
        return _target(found["target"], repository, files) + (found["anchor"] or "")

    # A link inside a fenced block is an example, not a link.
    pieces, end = [], 0
    for block in FENCED.finditer(markdown):
        pieces += [LINK.sub(moved, markdown[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*pieces, LINK.sub(moved, markdown[end:])])


def _target(target: str, repository: str, files: Files) -> str:
    """A link as the page has it, of a file in docs/ or elsewhere in the repository."""
    path = posixpath.normpath(posixpath.join("docs", target))
    if files.get_file_from_path(posixpath.relpath(path, "docs")):
        return posixpath.relpath(path, "docs")
    if not (ROOT / path).exists():
        raise PluginError(f"the link to {target} leads nowhere")
    return f"{repository}/{path}"


def on_post_build(config: MkDocsConfig) -> None:
    """Look at every page at a phone's width, and at the first one in the dark."""
    if CHROMIUM is None:
        logging.getLogger("mkdocs.hooks").info("no Chromium: the pages are not looked at")
        return
    for number, page in enumerate(sorted(Path(config.site_dir).glob("**/index.html"))):
        scheme, dark = ("slate", ["--blink-settings=preferredColorScheme=0"]) if number == 0 else ("default", [])
        probed = page.with_name("probed.html")
        probed.write_text(page.read_text("utf-8").replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
        try:
            with tempfile.TemporaryDirectory() as profile:
                options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", *dark]
                command = [CHROMIUM, *options, "--window-size=500,900", "--dump-dom", probed.as_uri()]
                shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
        finally:
            probed.unlink()
        found = {key: value for key, value in re.findall(r'data-(probe|scheme)="([^"]*)"', shown)}
        if found != {"probe": "", "scheme": scheme}:
            raise PluginError(f"{page.parent.name or 'index'} at 390 pixels, {scheme}: {found}")
