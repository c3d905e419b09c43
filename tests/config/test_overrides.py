"""Dotted overrides: what they reach, and how a wrong one is refused."""

from typing import Any

import pytest

from expertmesh.config import InputError
from expertmesh.config.overrides import apply_override


@pytest.mark.parametrize(
    ("override", "after", "changed"),
    [
        ("a.b=2", {"a": {"b": 2}, "l": [{"p": "x"}]}, ("a", "b")),
        ("a.c.d=1e-5", {"a": {"b": 1, "c": {"d": 1e-5}}, "l": [{"p": "x"}]}, ("a", "c")),
        ("l.0.p=y", {"a": {"b": 1}, "l": [{"p": "y"}]}, ("l", 0, "p")),
        ("l.1.p=y", {"a": {"b": 1}, "l": [{"p": "x"}, {"p": "y"}]}, ("l", 1)),
        ("m.0.p=y", {"a": {"b": 1}, "l": [{"p": "x"}], "m": [{"p": "y"}]}, ("m",)),
        ("a={c: [1, 2]}", {"a": {"c": [1, 2]}, "l": [{"p": "x"}]}, ("a",)),
        ("a.b=", {"a": {"b": None}, "l": [{"p": "x"}]}, ("a", "b")),
        ("a.b=x=y", {"a": {"b": "x=y"}, "l": [{"p": "x"}]}, ("a", "b")),
    ],
)
def test_an_override_sets_what_it_names(override: str, after: dict[str, Any], changed: tuple[Any, ...]) -> None:
    values: dict[str, Any] = {"a": {"b": 1}, "l": [{"p": "x"}]}
    assert apply_override(values, override) == changed
    assert values == after


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("a.b", "is not of the form key=value"),
        ("=1", "is not of the form key=value"),
        ("a..b=1", "is not of the form key=value"),
        ("a.b.c=1", "a.b is 1, which has no keys; set a.b itself"),
        (
            "l.2.p=1",
            "l is a list of 1, counted from 0, and 2 is not in it; use a smaller number, or 1 to append",
        ),
        ("l.p=1", "and p is not in it"),
        ("a.b=[1", "override 'a.b=[1':1: this is not valid YAML"),
    ],
)
def test_an_override_that_reaches_nothing_is_refused(override: str, sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        apply_override({"a": {"b": 1}, "l": [{"p": "x"}]}, override)
    assert sentence in str(caught.value)
    assert override in str(caught.value)
