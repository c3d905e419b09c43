"""Reads a page as a browser would and holds it to what every report has to be.

Well-formed: every element that is opened is closed, in order. Alone: nothing in it makes a browser load anything, or
run anything but the one script that its policy names.
"""

import base64
import hashlib
import json
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

VOID = {"meta"}
LOADS = ("src", "srcset", "href", "xlink:href", "data", "action", "poster", "background")
FORBIDDEN = {"iframe", "object", "embed", "link", "base", "form", "img", "audio", "video", "foreignobject"}


@dataclass
class Page(HTMLParser):
    """What stands in the page: `texts` by the id of their section, `ids`, `tags`."""

    source: str
    tags: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    references: set[str] = field(default_factory=set)
    texts: dict[str, str] = field(default_factory=dict)
    described: list[str] = field(default_factory=list)
    policy: str = ""
    scripts: list[str] = field(default_factory=list)
    hovers: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.section = "top"
        self.feed(self.source)
        self.close()
        # As a reader sees it: white space counts as one blank.
        self.texts = {section: " ".join(text.split()) for section, text in self.texts.items()}
        assert not self.open, f"never closed: {self.open}"
        assert len(self.ids) == len(set(self.ids)), "an id stands twice"
        assert self.references <= set(self.ids), f"lead nowhere: {self.references - set(self.ids)}"
        assert self.policy.startswith("default-src 'none'")
        (script,) = self.scripts
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"script-src 'sha256-{digest}';" in self.policy

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in FORBIDDEN, tag
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        values = dict(attrs)
        assert len(values) == len(attrs), f"{tag} has an attribute twice"
        if tag in ("td", "th"):
            self.handle_data(" ")
        if tag == "section":
            self.section = values["id"] or ""
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"] or ""
        if "id" in values:
            self.ids.append(values["id"] or "")
        if values.get("role") == "img":
            self.described.append(values["aria-label"] or "")
        if tag == "script":
            assert not attrs
            self.scripts.append("")
        if "data-hover" in values:
            self.hovers.append(json.loads(values["data-hover"] or ""))
        for name, value in values.items():
            assert not name.startswith("on"), f"{tag} has a handler: {name}"
            if name in LOADS:
                assert value is not None
                assert value.startswith(("#", "data:image/png;base64,")), f"{tag} loads {value[:80]}"
                self.references |= {value[1:]} if value.startswith("#") else set()
            self.references |= set(re.findall(r"url\(#([^)]*)\)", value or ""))
            assert not re.search(r"url\((?!#)", value or ""), f"{tag} loads {value}"

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            assert "url(" not in data
            assert "@import" not in data
            return
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
            return
        self.texts[self.section] = self.texts.get(self.section, "") + data

    @property
    def text(self) -> str:
        return "\n".join(self.texts.values())
