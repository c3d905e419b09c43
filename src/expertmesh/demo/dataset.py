"""A real instruction data set from text that every machine has: the docs of Python's standard library.

`stdlib_samples` reads the library's source files (nothing is imported or run) and turns the docstring of each
public function, class and method into one question and its answer; `write_dataset` writes them as `messages`
JSONL. For the demo and as an example of the format. The samples depend on the installed Python alone, and so
does their order.
"""

import ast
import inspect
import json
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from expertmesh.config.errors import InputError

# Tests, an editor, installers and demonstrations: not what someone asks about.
EXCLUDED = {"test", "tests", "idlelib", "lib2to3", "ensurepip", "turtledemo", "pydoc_data", "ntpath"}
EXCLUDED |= {"site-packages", "dist-packages"}
# Modules that are documented under another name.
KNOWN_AS = {"posixpath": "os.path"}
MIN_CHARACTERS = 30
MAX_CHARACTERS = 400
EVAL_EVERY = 20

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Sample:
    """One question about `name`, a dotted name such as `os.path.join`, and its documentation."""

    name: str
    question: str
    answer: str

    def to_json(self) -> str:
        """Return one line of `messages` JSONL."""
        user = {"role": "user", "content": self.question}
        assistant = {"role": "assistant", "content": self.answer}
        return json.dumps({"messages": [user, assistant]}, ensure_ascii=False)


def stdlib_samples(library: Path | None = None) -> list[Sample]:
    """Return samples of the public names in `library` (default: the running Python's), by name, no answer twice.

    Raises `InputError` if there are no source files to read, as in a Python that ships bytecode only.
    """
    library = library or Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, Sample] = {}
    for path in sorted(library.rglob("*.py")):
        module = _module_name(path.relative_to(library))
        if module is not None:
            for sample in _module_samples(path, module):
                found.setdefault(sample.name, sample)
    first = {found[name].answer: found[name] for name in sorted(found, reverse=True)}
    samples = sorted(first.values(), key=lambda sample: sample.name)
    if not samples:
        raise InputError(
            f"demo: no documented Python source under {library}, although the data set is made of it; use a "
            "Python that has its library's source files",
            key="demo.no-python-source",
        )
    return samples


def write_dataset(samples: Sequence[Sample], train: Path, evaluation: Path) -> tuple[int, int]:
    """Write every 20th sample to `evaluation`, the others to `train`; returns how many went to each."""
    counts = []
    for path, held_out in ((train, False), (evaluation, True)):
        lines = [s.to_json() + "\n" for i, s in enumerate(samples) if (i % EVAL_EVERY == EVAL_EVERY - 1) is held_out]
        path.write_text("".join(lines), encoding="utf-8")
        counts.append(len(lines))
    return counts[0], counts[1]


def _module_name(relative: Path) -> str | None:
    """Return the dotted name of a public module's file, None for private and excluded ones."""
    parts = [*relative.parts[:-1], relative.stem]
    if parts[-1] == "__init__":
        parts.pop()
    if not parts or any(part.startswith("_") or part in EXCLUDED or not part.isidentifier() for part in parts):
        return None
    name = ".".join(parts)
    return KNOWN_AS.get(name, name)


def _module_samples(path: Path, module: str) -> Iterator[Sample]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old library files have invalid escapes in their strings
            tree = ast.parse(path.read_bytes())
    except SyntaxError:
        return  # templates and broken-on-purpose files that some installations keep beside the library
    exported = _exported(tree)
    for node in tree.body:
        if isinstance(node, Definition) and (node.name in exported if exported else not node.name.startswith("_")):
            yield from _definition_samples(node, f"{module}.{node.name}")


def _exported(tree: ast.Module) -> set[str]:
    """Return the names in a literal `__all__`; empty when the module has none."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if "__all__" in map(ast.unparse, targets):
                with suppress(ValueError):
                    names.update(ast.literal_eval(node.value))
    return names


def _definition_samples(node: Definition, name: str) -> Iterator[Sample]:
    answer = clean_docstring(ast.get_docstring(node, clean=False) or "")
    if answer:
        asks = "What is `{}`?" if isinstance(node, ast.ClassDef) else "What does `{}` do?"
        yield Sample(name, asks.format(name), answer)
    if isinstance(node, ast.ClassDef):
        for child in node.body:
            if isinstance(child, Definition) and not child.name.startswith("_"):
                yield from _definition_samples(child, f"{name}.{child.name}")


def clean_docstring(docstring: str) -> str:
    """Return the leading prose of a docstring, at most 400 characters cut at a sentence; empty if too little.

    Prose ends at the first doctest, list, indented block or section heading.
    """
    kept: list[str] = []
    for paragraph in inspect.cleandoc(docstring).split("\n\n"):
        lines = paragraph.strip("\n").splitlines()
        if not lines or any(line.startswith((" ", ">>>", "- ", "* ", ":", "|", "+")) for line in lines):
            break
        text = " ".join(" ".join(lines).split())
        if kept and (text.endswith(":") or len(" ".join(kept)) + len(text) >= MAX_CHARACTERS):
            break
        kept.append(text)
    answer = _cut(" ".join(kept))
    return answer if len(answer) >= MIN_CHARACTERS else ""


def _cut(text: str) -> str:
    """Return `text` up to the last complete sentence within the limit; empty if there is none."""
    if len(text) <= MAX_CHARACTERS:
        return text.strip()
    head, stop, _ = text[:MAX_CHARACTERS].rpartition(". ")
    return (head + stop).strip()
