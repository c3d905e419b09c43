"""HTML that cannot be broken by what stands in it: every text is escaped unless it is `Html` already.

`tag("p", "1 < 2", class_="note")` gives `<p class="note">1 &lt; 2</p>`. Control characters, bidirectional overrides and
what is no Unicode character are shown as escapes, so that no string can hide what it is.
"""

import html

_WITHOUT_END = frozenset({"meta", "br", "hr"})


class Html(str):
    """Text that is HTML. Only this module and the drawing of SVG make it from strings."""


def text(value: object) -> Html:
    """`value` as it reads."""
    if isinstance(value, Html):
        return value
    shown = "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in str(value))
    return Html(html.escape(shown, quote=True))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """An element. Attribute names lose one trailing `_` (`class_`) and other `_` become `-`; None is left out."""
    said = "".join(
        f' {key.removesuffix("_").replace("_", "-")}="{text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _WITHOUT_END:
        return Html(f"<{name}{said}>")
    return Html(f"<{name}{said}>{''.join(text(child) for child in children)}</{name}>")


def join(*children: object) -> Html:
    """Several one after the other."""
    return Html("".join(text(child) for child in children))


def table(
    head: tuple[str, ...], rows: list[tuple[object, ...]], *, label: str, class_: str | None = None, numbers: int = 99
) -> Html:
    """A table that scrolls sideways on a narrow screen instead of the page. Columns from `numbers` on are numbers.

    The first cell of a row is its header.
    """
    header = tag("tr", *(tag("th", name, scope="col", class_=_kind(at, numbers)) for at, name in enumerate(head)))
    body = [
        tag(
            "tr",
            *(
                tag("th", cell, scope="row") if at == 0 else tag("td", cell, class_=_kind(at, numbers))
                for at, cell in enumerate(row)
            ),
        )
        for row in rows
    ]
    return tag(
        "div",
        tag("table", tag("caption", label, class_="hidden"), tag("thead", header), tag("tbody", *body), class_=class_),
        class_="scroll",
        role="region",
        aria_label=label,
        tabindex=0,
    )


def _kind(column: int, numbers: int) -> str | None:
    return "number" if column >= numbers else None
