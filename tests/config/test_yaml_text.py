"""YAML 1.2 scalars, positions, and everything that is refused in YAML text."""

import math

import pytest
import yaml

from expertmesh.config import InputError
from expertmesh.config.yaml_text import dump_yaml, parse_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1.0e-5", 1e-5),
        ("-2E3", -2000.0),
        (".5", 0.5),
        ("010", 10),
        ("0x10", 16),
        ("0o10", 8),
        ("1_000", "1_000"),
        ("yes", "yes"),
        ("off", "off"),
        ("true", True),
        ("~", None),
        ("", None),
        ("'1e-5'", "1e-5"),
        ("2024-01-01", "2024-01-01"),
        ("12:30", "12:30"),
        ("-.inf", -math.inf),
        ("<<", "<<"),
        ("9" * 5000, math.inf),
    ],
)
def test_plain_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    parsed = parse_yaml(text, "t").value
    assert parsed == value
    assert type(parsed) is type(value)


def test_every_key_and_item_knows_its_line() -> None:
    document = parse_yaml("a: 1\nb:\n  c:\n    - x\n    - d: 2\n", "t")
    assert document.value == {"a": 1, "b": {"c": ["x", {"d": 2}]}}
    assert document.lines[("b",)] == 2
    assert document.lines[("b", "c")] == 3
    assert document.lines[("b", "c", 1, "d")] == 5


@pytest.mark.parametrize(
    ("text", "key", "start"),
    [
        ("a: 1\nb: {c: 1,\n c: 2}", "config.duplicate-key", "t:3: b.c is given twice (first on line 2)"),
        ("a: !!python/object/apply:os.system [ls]", "config.yaml-tag", "t:1: "),
        ("a: !x y", "config.yaml-tag", "t:1: "),
        ("a: &x 1\nb: *x", "config.yaml-alias", "t:2: "),
        ("a: [1\nb: 2", "config.invalid-yaml", "t:2: "),
        ("a: 1\n---\nb: 2", "config.invalid-yaml", "t:2: "),
        ("a: \x00", "config.invalid-yaml", "t: "),
        ("[a]: 1", "config.invalid-yaml", "t:1: "),
        ("[" * 1500 + "]" * 1500, "config.invalid-yaml", "t: "),
    ],
)
def test_what_is_not_plain_yaml_is_refused_with_its_line(text: str, key: str, start: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_yaml(text, "t")
    assert caught.value.key == key
    assert str(caught.value).startswith(start)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        "1e5",
        "12e4567",
        "0o7",
        "1_0",
        "yes",
        "null",
        "2024-01-01",
        "",
        "é",
        "a: b",
        "x" * 300,
        1e-5,
        1e22,
        3,
        None,
        True,
    ],
)
def test_dumped_values_are_read_back_as_they_were(value: object) -> None:
    text = dump_yaml({"key": [value]})
    assert parse_yaml(text, "t").value == {"key": [value]}
    if not isinstance(value, float):  # and by readers of YAML 1.1, which take 1e+22 for text
        assert yaml.safe_load(text) == {"key": [value]}
