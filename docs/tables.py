"""The parts of pages that stand in the code as well: keys of the configuration, options of the command line, examples.

    python docs/tables.py            # writes them into docs/*.md, between their marks
    python docs/tables.py --check    # ends with 1 where a page is not current

`<!-- keys -->` ... `<!-- /keys -->` encloses what is written, and so do `help: VERB` (no verb: the verbs themselves),
`example: FILE` of examples/. `make schema` runs it.

It needs `expertmesh.config` and the command line, which import no torch, and no network.
"""

import argparse
import contextlib
import io
import json
import os
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from expertmesh.cli.main import main as expertmesh
from expertmesh.config import Config
from expertmesh.config.base import Section

ROOT = Path(__file__).parents[1]
MARKED = re.compile(
    r"^<!-- (?P<mark>(?P<kind>example|help|keys)(?:: (?P<what>.+?))?) -->\n.*?^<!-- /(?P=kind) -->$",
    re.MULTILINE | re.DOTALL,
)
# A width that a page shows without a scroll bar.
PRINTED = {"COLUMNS": "96", "NO_COLOR": "1", "TERM": "dumb"}


def main() -> int:
    """Write every page anew, or with --check name those that would change."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for page in sorted((ROOT / "docs").glob("*.md")):
        before = page.read_text(encoding="utf-8")
        if (now := current(before)) != before:
            stale.append(page.name)
            if not check:
                page.write_text(now, encoding="utf-8")
    print("\n".join(stale) or "every page is current")
    return int(check and bool(stale))


def current(page: str) -> str:
    """The text of a page with what its marks enclose as the code has it."""
    sources = {"example": _example, "help": _help}
    sources["keys"] = lambda what: "\n".join(_keys(Config))

    def written(found: re.Match[str]) -> str:
        text = sources[found["kind"]](found["what"] or "").strip()
        return f"<!-- {found['mark']} -->\n{text}\n<!-- /{found['kind']} -->"

    return MARKED.sub(written, page)


def _example(name: str) -> str:
    text = (ROOT / "examples" / name).read_text(encoding="utf-8")
    return _fenced(text, "yaml" if name.endswith(".yaml") else "python")


def _help(verb: str) -> str:
    printed = io.StringIO()
    before = {name: os.environ.get(name) for name in PRINTED}
    os.environ |= PRINTED
    try:
        with contextlib.redirect_stdout(printed):
            code = expertmesh([*verb.split(), "--help"])
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
    if code:
        raise RuntimeError(f"expertmesh {verb} --help ends with {code}")
    lines = [line.rstrip() for line in printed.getvalue().splitlines()]
    if verb:  # the list of verbs has its purpose and --help already
        usage, _purpose, rest = "\n".join(lines).strip().split("\n\n", 2)
        lines = [usage, "", *(line for line in rest.splitlines() if not line.startswith("  -h, --help"))]
    return _fenced("\n".join(lines).removesuffix("\nOptions:"), "text")


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
        return f"mapping to {_values(arguments[1])}"
    if origin is not None:  # Literal
        return ", ".join(f"`{argument}`" for argument in arguments)
    words = {int: "integer", float: "number", bool: "boolean", str: "text", Any: "any value"}
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


if __name__ == "__main__":
    sys.exit(main())
