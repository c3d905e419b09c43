"""Dotted overrides: what they reach, and how a wrong one is refused."""

from typing import Any

import pytest

from expertmesh.config import InputError
from expertmesh.config.files import apply_override


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
    ("override", "key"),
    [
        ("a.b", "config.invalid-override"),
        ("=1", "config.invalid-override"),
        ("a..b=1", "config.invalid-override"),
        ("a.b.c=1", "config.invalid-override"),
        ("l.2.p=1", "config.invalid-override"),
        ("l.p=1", "config.invalid-override"),
        ("a.b=[1", "config.invalid-yaml"),
    ],
)
def test_an_override_that_reaches_nothing_is_refused_and_named(override: str, key: str) -> None:
    with pytest.raises(InputError) as caught:
        apply_override({"a": {"b": 1}, "l": [{"p": "x"}]}, override)
    assert caught.value.key == key
    assert str(caught.value).startswith(f"override {override!r}")
