"""Turns a matplotlib figure into an `<svg>` element for the page: no id twice, no reference that leads outside.

Colours that mean something are drawn as unlikely ones and replaced by the style sheet's variables, so that one picture
suits a light page, a dark one and paper.
"""

import io
import re
from xml.etree import ElementTree

from matplotlib.figure import Figure

from expertmesh.report.html import Html

INK, GRID, FIRST, SECOND, BAD = "#010203", "#020304", "#030405", "#040506", "#050607"
_COLOURS = {
    INK: "currentColor",
    GRID: "var(--grid)",
    FIRST: "var(--first)",
    SECOND: "var(--second)",
    BAD: "var(--bad)",
}
_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
# Whichever way matplotlib writes it, the size stays and the family goes.
_FONT, _FAMILY = re.compile(r"\bfont: (?:[\w-]+ )*?([\d.]+px)[^;]*"), re.compile(r"font-family:[^;]*(;\s*|$)")
# Pictures inside the figure (heat maps) have this many points per inch.
_DPI = 144


def to_html(figure: Figure, name: str, description: str) -> Html:
    """The figure as one `<svg>` that fills the width it is given; `name` starts all its ids."""
    written = io.BytesIO()
    nothing = {key: None for key in ("Creator", "Date", "Format", "Type")}
    figure.savefig(written, format="svg", dpi=_DPI, metadata=nothing)
    root = ElementTree.fromstring(written.getvalue())
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
        if (link := element.attrib.pop(_LINK, None)) is not None:
            element.set("href", link)
        for key, value in element.attrib.items():
            element.set(key, _local(value, name))
        if "id" in element.attrib:
            element.set("id", f"{name}-{element.get('id')}")
    for unused in ("width", "height", "version"):
        root.attrib.pop(unused, None)
    root.set("role", "img")
    root.set("aria-label", description)
    for parent in root.iter():
        # The style element would hold for the whole page.
        for child in [child for child in parent if child.tag in ("metadata", "style")]:
            parent.remove(child)
        for element in (parent, *parent):
            if element.tag != "text" and not (element.text or "").strip():
                element.text = None
            element.tail = None
    return Html(ElementTree.tostring(root, encoding="unicode", short_empty_elements=False))


def _local(value: str, name: str) -> str:
    """References with the figure's own ids, the page's colours and the page's font."""
    value = re.sub(r"url\(#", f"url(#{name}-", value)
    if value.startswith("#") and value not in _COLOURS:
        return f"#{name}-{value[1:]}"
    for drawn, meant in _COLOURS.items():
        value = value.replace(drawn, meant)
    return _FAMILY.sub("", _FONT.sub(r"font-size: \1", value))
