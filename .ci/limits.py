"""Limits that keep rooms small; part of `make lint`. Prints every place that is over one, and exits with 1."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path("src/expertmesh")
FILES_PER_PACKAGE, LINES_PER_FILE, LINES_PER_FUNCTION, ARGUMENTS, IMPORTS = 14, 400, 60, 8, 12


def over() -> Iterator[str]:
    for package in sorted({path.parent for path in PACKAGE.rglob("*.py")}):
        if (files := len(list(package.glob("*.py")))) > FILES_PER_PACKAGE:
            yield f"{package}: {files} files, at most {FILES_PER_PACKAGE}"
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        if (lines := len(text.splitlines())) > LINES_PER_FILE:
            yield f"{path}: {lines} lines, at most {LINES_PER_FILE}"
        tree = ast.parse(text)
        if (modules := len(_imported(tree))) > IMPORTS and path.name != "__init__.py":
            yield f"{path}: imports {modules} modules of ours, at most {IMPORTS}"
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _function(path, node)


def _imported(tree: ast.Module) -> set[str]:
    """Modules of ours; types that only checkers see are not counted."""
    typed = {id(inner) for node in ast.walk(tree) if _is_type_checking(node) for inner in ast.walk(node)}
    found = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and id(node) not in typed)
    return {node.module for node in found if node.module and node.module.partition(".")[0] == "expertmesh"}


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _function(path: Path, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if lines > LINES_PER_FUNCTION:
        yield f"{path}:{node.lineno}: {node.name} has {lines} lines, at most {LINES_PER_FUNCTION}"
    positional = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
    arguments = len(positional) - (positional[:1] in (["self"], ["cls"], ["ctx"]))
    arguments += len(node.args.kwonlyargs)
    if arguments > ARGUMENTS:
        yield f"{path}:{node.lineno}: {node.name} takes {arguments} arguments, at most {ARGUMENTS}"


if __name__ == "__main__":
    found = list(over())
    print("\n".join(found) or "every room is within its limits")
    sys.exit(bool(found))
