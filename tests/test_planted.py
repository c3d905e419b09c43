"""The table of planted bugs is that of today's source, and each bug's test is in `make test`."""

import ast

import pytest

from tests.planted import ROOT, Bug, bugs, planted

BUGS = bugs()


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_a_planted_bug_fits_the_source_and_names_a_quick_test(bug: Bug) -> None:
    ast.parse(planted(bug))
    file, _, name = bug.test.partition("::")
    functions = [each for each in ast.parse((ROOT / file).read_text()).body if isinstance(each, ast.FunctionDef)]
    (test,) = [function for function in functions if function.name == name]
    # A test of which all cases are slow is for `python -m tests.planted` to find.
    assert not any(ast.unparse(mark).startswith("pytest.mark.slow(") for mark in test.decorator_list)


def test_a_text_that_is_no_longer_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="stands 0 times"):
        planted(BUGS[0]._replace(old="no such text"))
