"""What `mkdocs build` adds to the pages, so that nothing is written down twice.

A comment in a page stands for text that lives elsewhere: `<!-- example: FILE -->` for a file of examples/,
`<!-- help: VERB -->` for what `expertmesh VERB --help` prints (no verb: the verbs themselves), `<!-- keys -->` for the
keys of the configuration, and `<!-- other names -->` for what other trainers call them. Links to files of the
repository outside docs/ become links to GitHub. A comment or a link that leads nowhere stops the build.

It needs `expertmesh.config` and the command line, which import no torch, and no network.
"""

import json
import os
import posixpath
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page
from pydantic.fields import FieldInfo

from expertmesh.config import Config
from expertmesh.config.base import Section
from expertmesh.config.other_names import THEIRS

ROOT = Path(__file__).parents[1]
MARKER = re.compile(r"^<!-- (?P<kind>example|help|keys|other names)(?:: (?P<what>.+?))? -->$", re.MULTILINE)
LINK = re.compile(r"(?<=\]\()(?P<target>[^)#\s:]+)(?P<anchor>#[^)\s]*)?(?=\))")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in the markers of a page, then point its links to where the site or GitHub has their files."""
    sources = {"example": _example, "help": _help, "keys": lambda what: "\n".join(_keys(Config))}
    sources["other names"] = lambda what: "\n".join(_other_names())
    markdown = MARKER.sub(lambda found: sources[found["kind"]](found["what"] or ""), markdown)
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


def _example(name: str) -> str:
    path = ROOT / "examples" / name
    if not path.is_file():
        raise PluginError(f"examples/ has no {name}")
    return _fenced(path.read_text(encoding="utf-8"), "yaml" if path.suffix == ".yaml" else "python")


def _help(verb: str) -> str:
    """What the verb prints, at a width that a page shows without a scroll bar."""
    command = [sys.executable, "-m", "expertmesh", *verb.split(), "--help"]
    environment = {**os.environ, "COLUMNS": "96", "NO_COLOR": "1", "TERM": "dumb"}
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60)
    if run.returncode:
        raise PluginError(f"{' '.join(command)} ends with {run.returncode}: {run.stderr[-500:]}")
    return _fenced(run.stdout, "text")


def _fenced(text: str, language: str) -> str:
    return f"```{language}\n{text.strip()}\n```"


def _keys(section: type[Section], name: str = "", about: str | None = None) -> Iterator[str]:
    """Headings and tables of a section's keys; those of the sections inside it follow."""
    nested = {key: inner for key, field in section.model_fields.items() if (inner := _section_in(field.annotation))}
    own = {key: field for key, field in section.model_fields.items() if name or key not in nested}
    if name:
        yield from ("", f"## {name}", "", about or (section.__doc__ or "").strip())
    yield from ("", "| key | default | values | |", "|---|---|---|---|")
    for key, field in own.items():
        described = _cell(" ".join((field.description or "").split()))
        yield f"| `{key}` | {_default(field)} | {_cell(_values(field.annotation))} | {described} |"
    for key, inner in nested.items():
        several = "[]" if get_origin(_plain(section.model_fields[key].annotation)) is tuple else ""
        if not (several and key == "eval"):  # its items are those of data.train
            about = None if several else section.model_fields[key].description
            yield from _keys(inner, ".".join(filter(None, [name, key])) + several, about)


def _other_names() -> Iterator[str]:
    yield from ("| here | elsewhere |", "|---|---|")
    for ours, theirs in THEIRS.items():
        yield f"| `{ours}` | {', '.join(f'`{name}`' for name in theirs.split())} |"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True)
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _values(annotation: Any) -> str:
    """The values that a key takes, from its annotation, as a user writes them."""
    annotation = _plain(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return ", ".join(_values(argument) for argument in arguments)
    if origin is tuple:
        inner = _section_in(arguments[0])
        return "list of sections" if inner else f"list of {_values(arguments[0])}"
    if annotation is type(None):
        return "`null`"
    if origin is dict:
        return f"keys of your own, each {_values(arguments[1])}"
    if origin is not None:  # Literal
        return ", ".join(f"`{argument}`" for argument in arguments)
    words = {int: "integer", float: "number", bool: "`true`, `false`", str: "text", Any: "any value"}
    return words.get(annotation, "section")


def _plain(annotation: Any) -> Any:
    """Without `Annotated`."""
    while hasattr(annotation, "__metadata__"):
        annotation = annotation.__origin__
    return annotation


def _section_in(annotation: Any) -> type[Section] | None:
    annotation = _plain(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(_section_in, get_args(annotation))), None)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
