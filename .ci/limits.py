"""Limits that keep rooms small and other people's insides in one room; part of `make lint`.

Prints every place that is over one, and exits with 1. Private names of torch, transformers and datasets are used in
compat.py alone, `unittest.mock` nowhere; tests import no private name of another file of tests. The docstring of a
function begins with one of `VERBS`, that of a property may be a noun phrase, that of a class or a field is one.
Docstrings and comments name files that exist.

Arguments of two kinds are not counted: keyword-only ones of the functions in `expertmesh.__all__`, which are options of
the public interface and a contract, and those of an autograd Function or a Triton kernel, which want every tensor and
size on its own.
"""

import ast
import itertools
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path("src/expertmesh")
COMPAT = PACKAGE / "compat.py"
OTHERS = ("torch", "transformers", "peft", "accelerate", "datasets", "safetensors")
LINES_PER_FILE, LINES_PER_FUNCTION, ARGUMENTS = 700, 60, 8
# What a docstring of a function says that it does; a new verb is added here.
VERBS = """
    Abort Add Advise Allocate Allow Apply Ask Assign Attach Attend Average Begin Build Call Cast Change Check Choose
    Clamp Clip Close Collect Combine Compare Compile Complete Compute Concatenate Convert Copy Count Create Cut
    Decide Decode Decorate Defer Derive Describe Destroy Dispatch Distribute Divide Do Download Draw Drop Enable
    Encode End Enter Escape Estimate Evaluate Examine Exchange Execute Expand Explain Export Fill Find Fine-tune
    Finish Forget Format Free Freeze Fuse Gather Give Group Hash Hide Import Initialise Insert Install Issue Join
    Judge Keep Learn Leave Let Link List Listen Load Locate Look Make Map Mark Merge Mix Move Multiply Name Note
    Open Order Orthogonalise Pad Pass Plan Plant Predict Prepare Print Prove Publish Push Put Quantise Raise Read
    Record Reduce Refuse Register Remember Remove Rename Render Replace Report Reshard Resolve Restore Return Round
    Run Sample Save Say Scale Send Set Shard Shift Show Sort Split Start Store Sum Summarise Switch Sync Take Thin
    Tokenize Train Try Turn Update Upload Validate Verify View Wait Warn Widen Wrap Write Yield Zero
"""
NO_FIRST_WORDS = {"As", "How", "Of", "That", "Those", "What", "When", "Where", "Whether", "Which", "Who", "Why"}
# `os._exit` and `sys._current_frames` are documented.
STANDARD = ("os", "sys", "self", "cls")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def over() -> Iterator[str]:
    """Yield every place that is over a limit, as a sentence."""
    homes = _public_homes()
    texts = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    files = [str(path) for folder in (PACKAGE, Path("tests"), Path("benchmarks")) for path in folder.rglob("*.py")]
    own = {name for tree in trees.values() for name in _defined(tree)}
    for path in (Path(name) for name in files if not name.startswith(str(PACKAGE))):
        yield from _private_imports(path)
    for path, text in texts.items():
        if (lines := len(text.splitlines())) > LINES_PER_FILE:
            yield f"{path}: {lines} lines, at most {LINES_PER_FILE}"
        tree = trees[path]
        yield from _mocks(path, tree)
        yield from _named_files(path, files)
        yield from _first_words_of_fields(path, tree)
        if path != COMPAT:
            yield from _private_names(path, tree, own)
        for node in ast.walk(tree):
            if isinstance(node, Function):
                yield from _length(path, node)
                yield from _first_word(path, node)
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        public = {name for name, home in homes.items() if home == module}
        for node, options_count in _counted(tree, public):
            yield from _arguments(path, node, options_count)


def _private_imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
            for alias in node.names:
                if alias.name.startswith("_"):
                    yield f"{path}:{node.lineno}: {alias.name} is private to {node.module}; name it for its importers"


def _mocks(path: Path, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if any(name.split(".")[0] == "unittest" for name in names):
            yield f"{path}:{node.lineno}: unittest is for tests"


def _named_files(path: Path, files: list[str]) -> Iterator[str]:
    """Yield names of files in comments and docstrings, those under fields too, that no path here ends with."""
    for line, text in _prose(path):
        for name in re.findall(r"(?<![\w./])[\w./]*\w\.py\b", text):
            if not any(f"/{file}".endswith(f"/{name}") for file in files):
                yield f"{path}:{line}: {name} is no file here"


def _prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines and texts of comments, and of strings that are statements: docstrings."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def _private_names(path: Path, tree: ast.Module, own: set[str]) -> Iterator[str]:
    """Yield private names that this package does not define, so that they are another library's."""
    for node in ast.walk(tree):
        found: list[str] = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OTHERS:
            found = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id in STANDARD):
            found = [node.attr]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
            found = [str(argument.value) for argument in node.args[1:2] if isinstance(argument, ast.Constant)]
        for name in found:
            if _is_private(name) and name not in own:
                line = getattr(node, "lineno", 0)
                yield f"{path}:{line}: {name} is another library's own; give it a function in compat.py"


def _defined(tree: ast.Module) -> Iterator[str]:
    """Yield names of functions, classes, variables and attributes that the package itself defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif (
            isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) in STANDARD
        ):
            yield node.attr
        elif isinstance(node, ast.Constant) and str(node.value).startswith("_expertmesh"):
            yield str(node.value)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _first_word(path: Path, node: Function) -> Iterator[str]:
    """Say where a docstring begins with no verb, and is not the noun phrase of a property."""
    word = next(iter((ast.get_docstring(node) or "").split()), "").rstrip(".,:")
    if any("property" in ast.unparse(decorator) for decorator in node.decorator_list):
        begins_well = word not in NO_FIRST_WORDS
    else:
        begins_well = not word or word.capitalize() in VERBS.split()
    if not begins_well:
        yield f"{path}:{node.lineno}: the docstring of {node.name} begins with {word}; begin with one of VERBS"


def _first_words_of_fields(path: Path, tree: ast.Module) -> Iterator[str]:
    """Say where the docstring of a class or a field begins with a question, not with a noun phrase or "True if"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            word = (ast.get_docstring(node) or "").partition(" ")[0]
            if word in NO_FIRST_WORDS:
                yield f"{path}:{node.lineno}: the docstring of {node.name} begins with {word}; begin with a noun"
        body = node.body if isinstance(node, ast.Module | ast.ClassDef) else []
        for field, prose in itertools.pairwise(body):
            if isinstance(field, ast.Assign | ast.AnnAssign) and isinstance(prose, ast.Expr):
                word = str(getattr(prose.value, "value", "")).partition(" ")[0]
                if word in NO_FIRST_WORDS:
                    yield f"{path}:{prose.lineno}: the docstring of a field begins with {word}; begin with a noun"


def _length(path: Path, node: Function) -> Iterator[str]:
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if lines > LINES_PER_FUNCTION:
        yield f"{path}:{node.lineno}: {node.name} has {lines} lines, at most {LINES_PER_FUNCTION}"


def _public_homes() -> dict[str, str]:
    """Return the module of each public name, as `expertmesh/__init__.py` has it."""
    for node in ast.parse((PACKAGE / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["_HOME"]:
            return dict(ast.literal_eval(node.value))
    raise SystemExit(f"{PACKAGE / '__init__.py'} has no _HOME")


def _counted(tree: ast.Module, public: set[str]) -> Iterator[tuple[Function, bool]]:
    """Yield functions whose arguments are counted, and whether keyword-only ones are."""
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
