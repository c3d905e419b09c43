"""The whole page, from a run that was read: `render` gives it as text, `write` puts it in its place.

One file without scripts, fonts or pictures from elsewhere: its own content security policy forbids the browser to
load anything at all.
"""

from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from expertmesh.config.errors import InputError
from expertmesh.report import experts, facts, summary, training
from expertmesh.report.html import Html, join, tag
from expertmesh.report.run import Run
from expertmesh.report.style import CSS

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def render(run: Run) -> str:
    """The page as HTML text. The same run gives the same page but for the time in its footer."""
    sections = (
        ("training", "Training", training.section(run)),
        ("experts", "Experts", experts.section(run, training.marks_of(run))),
        ("plan", "Plan and measurement", facts.plan(run)),
        ("verification", "Verification", facts.verification(run)),
        ("starts", "Where it ran", facts.starts(run)),
        ("configuration", "Configuration", facts.configuration(run)),
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{summary.title(run)} – expertmesh report"),
        tag("style", Html(CSS)),
    )
    links = (tag("li", tag("a", heading, href=f"#{name}")) for name, heading, _ in sections)
    body = tag(
        "body",
        tag("header", summary.header(run)),
        tag("nav", tag("ul", *links), aria_label="Sections"),
        tag(
            "main",
            summary.cards(run),
            _notes(run),
            *(tag("section", tag("h2", heading), content, id=name) for name, heading, content in sections),
        ),
        tag("footer", f"Written by expertmesh {version('expertmesh')} on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC."),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def _notes(run: Run) -> Html:
    """What could not be read or used, before anything else is looked at."""
    if not run.notes:
        return join()
    return tag("div", tag("strong", "To know"), tag("ul", *(tag("li", note) for note in run.notes)), class_="notes")


def write(path: Path, page: str) -> None:
    """Put the page at `path`, whole or not at all. `InputError` if that cannot be written."""
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        unfinished.write_text(page, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise InputError(f"{path}: the report cannot be written: {error.strerror}; choose another --output") from error
