"""Limits that keep rooms small; part of `make lint`. Prints every place that is over one, and exits with 1.

Arguments of two kinds are not counted: keyword-only ones of the functions in `expertmesh.__all__`, which are options of
the public interface and a contract, and those of an autograd Function or a Triton kernel, which want every tensor and
size on its own.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path("src/expertmesh")
LINES_PER_FILE, LINES_PER_FUNCTION, ARGUMENTS = 700, 60, 8
Function = ast.FunctionDef | ast.AsyncFunctionDef


def over() -> Iterator[str]:
    """Every place that is over a limit, as a sentence."""
    homes = _public_homes()
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        if (lines := len(text.splitlines())) > LINES_PER_FILE:
            yield f"{path}: {lines} lines, at most {LINES_PER_FILE}"
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, Function):
                yield from _length(path, node)
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        public = {name for name, home in homes.items() if home == module}
        for node, options_count in _counted(tree, public):
            yield from _arguments(path, node, options_count)


def _length(path: Path, node: Function) -> Iterator[str]:
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if lines > LINES_PER_FUNCTION:
        yield f"{path}:{node.lineno}: {node.name} has {lines} lines, at most {LINES_PER_FUNCTION}"


def _public_homes() -> dict[str, str]:
    """The module of each public name, as `expertmesh/__init__.py` has it."""
    for node in ast.parse((PACKAGE / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["_HOME"]:
            return dict(ast.literal_eval(node.value))
    raise SystemExit(f"{PACKAGE / '__init__.py'} has no _HOME")


def _counted(tree: ast.Module, public: set[str]) -> Iterator[tuple[Function, bool]]:
    """Functions whose arguments are counted, and whether keyword-only ones are."""
    autograd = {
        id(method)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).endswith("autograd.Function") for base in node.bases)
        for method in node.body
        if isinstance(method, ast.FunctionDef)
        and any(ast.unparse(decorator) == "staticmethod" for decorator in method.decorator_list)
    }
    contract = {id(node) for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in public}
    for node in ast.walk(tree):
        kernel = isinstance(node, Function) and "triton.jit" in map(ast.unparse, node.decorator_list)
        if isinstance(node, Function) and id(node) not in autograd and not kernel:
            yield node, id(node) not in contract


def _arguments(path: Path, node: Function, options_count: bool) -> Iterator[str]:
    positional = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
    arguments = len(positional) - (positional[:1] in (["self"], ["cls"], ["ctx"]))
    arguments += len(node.args.kwonlyargs) if options_count else 0
    if arguments > ARGUMENTS:
        yield f"{path}:{node.lineno}: {node.name} takes {arguments} arguments, at most {ARGUMENTS}"


if __name__ == "__main__":
    found = list(over())
    print("\n".join(found) or "every room is within its limits")
    sys.exit(bool(found))
