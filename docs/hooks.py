"""What `mkdocs build` changes in the pages: links to files of the repository outside docs/ become links to GitHub.

A link that leads nowhere stops the build.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?P<target>[^)#\s:]+)(?P<anchor>#[^)\s]*)?(?=\))")
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
