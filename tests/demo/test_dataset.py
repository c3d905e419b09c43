"""The demo's data set: real text, deterministic, in a format that `expertmesh train` reads."""

import json
from pathlib import Path

import pytest

from expertmesh.demo.run import MAX_CHARACTERS, Sample, clean_docstring, stdlib_samples, write_dataset
from tests.support.errors import refused


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A small stand-in for the standard library."""
    files = {
        "posixpath.py": 'def join(a, *p):\n    """Join two or more pathname components with slashes."""\n',
        "shapes/__init__.py": (
            '__all__ = ["area"]\n'
            'def area(x):\n    """Return the area of a shape in square metres."""\n'
            'def helper(x):\n    """Not exported, although it has documentation."""\n'
        ),
        "shapes/solid.py": (
            'class Cube:\n    """A solid with six equal square faces."""\n'
            '    def volume(self):\n        """Return the volume of the cube in cubic metres."""\n'
            '    def _secret(self):\n        """Nobody should be asked about this method."""\n'
        ),
        "copies.py": 'def again(x):\n    """Return the area of a shape in square metres."""\n',
        "_private.py": 'def hidden(x):\n    """Return something that nobody asks about."""\n',
        "test/test_shapes.py": 'def test_area():\n    """A test is not part of the documentation."""\n',
        "site-packages/other.py": 'def other():\n    """A package that somebody else has installed."""\n',
        "template.py": "def {name}(:\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_samples_are_the_public_documented_names_sorted_and_no_answer_twice(library: Path) -> None:
    assert [(s.name, s.question) for s in stdlib_samples(library)] == [
        ("copies.again", "What does `copies.again` do?"),
        ("os.path.join", "What does `os.path.join` do?"),
        ("shapes.solid.Cube", "What is `shapes.solid.Cube`?"),
        ("shapes.solid.Cube.volume", "What does `shapes.solid.Cube.volume` do?"),
    ]


@pytest.mark.slow(why="reads the whole standard library twice")
def test_the_installed_library_gives_thousands_of_samples_in_the_same_order_every_time() -> None:
    samples = stdlib_samples()
    assert len(samples) > 2000
    assert samples == stdlib_samples()
    answers = {sample.name: sample.answer for sample in samples}
    assert answers["os.path.join"].startswith("Join two or more pathname components")
    assert all(len(answer) <= MAX_CHARACTERS for answer in answers.values())


def test_every_twentieth_sample_is_held_out_and_none_is_lost(tmp_path: Path) -> None:
    samples = [Sample(f"module.name{n}", f"What is {n}?", f"It is {n}.") for n in range(100)]
    counts = write_dataset(samples, tmp_path / "train.jsonl", tmp_path / "eval.jsonl")
    rows = [json.loads(line) for name in ("train", "eval") for line in (tmp_path / f"{name}.jsonl").open()]
    assert counts == (95, 5)
    assert {row["messages"][0]["content"] for row in rows} == {sample.question for sample in samples}
    assert [message["role"] for message in rows[0]["messages"]] == ["user", "assistant"]


@pytest.mark.parametrize(
    ("docstring", "answer"),
    [
        (
            "Return the sum\n    of two numbers.\n\n    >>> add(1, 2)\n    3\n",
            "Return the sum of two numbers.",
        ),
        ("Return the sum of two numbers.\n\nMore about it.", "Return the sum of two numbers. More about it."),
        ("Return the sum of two numbers.\n\nExample:\n\n    add(1, 2)", "Return the sum of two numbers."),
        ("Too short.", ""),
        ("word " * 100 + "and no end", ""),
        ("First sentence of many words. " + "x" * MAX_CHARACTERS, ""),
        (
            "A first sentence of quite a few words. " + "x" * MAX_CHARACTERS,
            "A first sentence of quite a few words.",
        ),
    ],
)
def test_answers_are_leading_prose_cut_at_a_sentence(docstring: str, answer: str) -> None:
    assert clean_docstring(docstring) == answer


def test_a_python_without_source_files_is_refused(tmp_path: Path) -> None:
    with refused("demo.no-python-source"):
        stdlib_samples(tmp_path)
