"""Tell facts about transformers' code: from a table of what was proven before, or read from a class's source.

known_families.json has the answers by version of transformers, question and key. `python -m tests.families.known`
writes it from tiny models of every family; tests check some answers again. A key names the class of transformers and
every argument that could change the answer. Refusals are never stored, so they are always found again, with their
reason. Anything that is not in the table is proven at run time: another version, another configuration, code that is
not part of transformers.

How a class calls attention, and what looks along the sequence, transformers does not declare. For classes that the
table does not have it is read from their Python source, which is parsed, never run.
"""

import ast
import functools
import hashlib
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, TypeVar

import transformers
from torch import nn
from transformers import PreTrainedConfig

from expertmesh.compat import attention_of, has_hooks

FILE = "known_families.json"
Answers = dict[str, dict[str, Any]]  # by question and key, as JSON has them
_Answer = TypeVar("_Answer")

# The settings of every configuration, without those two that can change what a model's code does.
_OF_EVERY_CONFIG = frozenset(PreTrainedConfig().to_dict()) - {"tie_word_embeddings", "is_encoder_decoder"}
_recorded: ContextVar[Answers | None] = ContextVar("expertmesh_recorded_answers", default=None)


def look_up(
    question: str, key: str | None, find: Callable[[], Any], keep: Callable[[Any], bool] = lambda answer: True
) -> Any:
    """Return the answer from the table, or from `find` if the table has none.

    Args:
        question: a section of the table.
        key: the key in this section; None always calls `find`.
        find: returns the answer, a JSON value.
        keep: returns whether an answer also holds for other sizes; only such answers are recorded, and found once in a
            process.
    """
    recorded = _recorded.get()
    if recorded is None and key is not None:
        known = _table().setdefault(question, {})
        if key in known:
            return known[key]
        answer = find()
        if keep(answer):
            known[key] = answer
        return answer
    answer = find()
    if recorded is not None and key is not None and keep(answer):
        earlier = recorded.setdefault(question, {}).setdefault(key, answer)
        assert earlier == answer, f"{question} of {key} is {earlier} and {answer}: the key lacks an argument"
    return answer


def refusal_by_proof(question: str, key: str | None, prove: Callable[[], str | None]) -> str | None:
    """Return the reason why `prove` refuses, or None; `prove` is not called if the table has the proof."""
    reason: str | None = look_up(question, key, prove, keep=lambda reason: reason is None)
    return reason


def known_by_class(question: str) -> Callable[[Callable[[Any], _Answer]], Callable[[Any], _Answer]]:
    """Decorate a function that answers a question about a class or a function.

    The answer comes from the table if it is there, and is cached otherwise. The decorated function also accepts a
    module, for its class.
    """

    def decorate(find: Callable[[Any], _Answer]) -> Callable[[Any], _Answer]:
        find = functools.cache(find)

        @functools.wraps(find)
        def answer(subject: Any) -> Any:
            kind: Any = type(subject) if isinstance(subject, nn.Module) else subject
            return look_up(question, class_key(kind), lambda: find(kind))

        return answer

    return decorate


@contextmanager
def recording() -> Iterator[Answers]:
    """Record every answer that is found, and ignore the table, while the context is open."""
    answers: Answers = {}
    token = _recorded.set(answers)
    try:
        yield answers
    finally:
        _recorded.reset(token)


def class_key(kind: Any) -> str | None:
    """Return module and name of a class or function of transformers; None for other code.

    Classes that FSDP2 or expertmesh put in front of it are skipped.
    """
    own = own_class(kind)
    return f"{own.__module__} {own.__qualname__}" if own.__module__.startswith("transformers.") else None


def proof_key(module: nn.Module, *others: object) -> str | None:
    """Return the key of a proof about a module: its class, and a hash of everything that could change the result.

    The hash covers the settings of the module and of its configuration without sizes (a number is 0, 1 or "more"), the
    classes of all modules in it, and `others`, the arguments of the proof.

    Returns:
        The key; None if any module in it runs code that is not part of transformers or torch.
    """
    name = class_key(type(module))
    kinds = {own_class(type(part)) for part in module.modules()}
    replaced = any("forward" in vars(part) or has_hooks(part) for part in module.modules())
    if name is None or replaced or not all(map(_runs_published_code, kinds)):
        return None
    config: Any = getattr(module, "config", None)
    settings = [] if config is None else [_settings(config.to_dict()), attention_of(config)]
    classes = sorted({f"{kind.__module__}.{kind.__qualname__}" for kind in kinds})
    text = json.dumps([_settings(vars(module)), classes, settings, *map(str, others)], sort_keys=True)
    return f"{name} {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


def own_class(kind: Any) -> Any:
    """Return a class without those that FSDP2 and expertmesh put in front of it."""
    in_front = ("torch.distributed.", "expertmesh.")
    return next((each for each in getattr(kind, "__mro__", ()) if not each.__module__.startswith(in_front)), kind)


def _runs_published_code(kind: Any) -> bool:
    """Return whether a class and its forward are part of torch or transformers."""
    # The forward is checked too: other libraries replace forwards of classes.
    modules = (kind.__module__, getattr(kind.forward, "__module__", ""))
    return all(module.startswith(("torch.", "transformers.")) for module in modules)


@functools.cache
def _table() -> Answers:
    """Read the answers for the installed version of transformers, by question and key."""
    # The file lists the keys under each answer; keys with an equal start share an entry, their last words are joined.
    content = json.loads(files(__package__).joinpath(FILE).read_text()).get(transformers.__version__, {})
    return {
        question: {
            f"{start} {word}": entry["answer"]
            for entry in entries
            for start, words in entry["keys"].items()
            for word in words.split()
        }
        for question, entries in content.items()
    }


def matters(key: str) -> bool:
    """Return whether a setting can change what a model's code computes: not names, token ids or extra outputs."""
    return key not in _OF_EVERY_CONFIG and not key.startswith(("_", "layer_i")) and not key.endswith("_token_id")


def _settings(value: Any) -> Any:
    """Reduce settings to what can change the code that runs: a number to 0, 1 or "more", a list to its set."""
    if isinstance(value, dict):
        return {key: _settings(each) for key, each in value.items() if matters(str(key))}
    if isinstance(value, list | tuple):
        return sorted({json.dumps(_settings(each), sort_keys=True) for each in value})
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int | float):
        return value if value in (0, 1) else "more"
    return type(value).__name__


# Calls and operators that code needs to see the position of a token, or its neighbours; norms, routers, projections and
# MLPs do not use them. A product of two activations may be attention.
_ALONG_THE_SEQUENCE = {"arange", "linspace", "cumsum", "cumprod", "roll", "flip", "unfold", "conv1d", "pad", "diff"}
_ALONG_THE_SEQUENCE |= {"matmul", "bmm", "baddbmm", "einsum", "@", "[:, a:b]"}
_ALONG_THE_SEQUENCE |= {"scaled_dot_product_attention", "flex_attention", "flash_attn_func", "flash_attn_varlen_func"}
# An attention whose code uses the number of heads, instead of `view` with -1, cannot run with fewer heads.
_COUNTS_HEADS = re.compile(r"self\.(config\.)?(num_(attention_|key_value_|kv_)?heads|n_heads?|hidden_size|embed_dim)\b")
_TAKES_MASKS = re.compile(r"isinstance\((\w+ := )?attention_mask, dict\)")
_TEXT_POSITIONS = re.compile(r"position_ids\.shape\[0\] == 4\b")
_CAUSAL_MASK = re.compile(r"create_(\w+_)?causal_mask")


@dataclass(frozen=True, slots=True)
class RegistryCall:
    """A call of transformers' attention registry in the code of a class."""

    module: str
    """The Python module with the code."""
    mapping: str
    """Name of the registry in `module`."""
    default: str
    """Name of the eager function in `module`."""
    keywords: list[str]
    """Names of the keyword arguments that are passed to the attention function."""

    def global_of(self, name: str) -> Any:
        """Return the value of a global name in `module`."""
        return vars(sys.modules[self.module])[name]


def registry_call(module: nn.Module) -> RegistryCall | None:
    """Return the call of transformers' attention registry in the code of a module, or None if there is none.

    The pattern is the same in all of transformers 5: `interface = REGISTRY.get_interface(implementation, eager)`, then
    `interface(self, query, key, value, mask, ...)`.
    """
    found = _registry_call(module)
    return None if found is None else RegistryCall(**{"module": own_class(type(module)).__module__, **found})


@known_by_class("registry_call")
def _registry_call(kind: Any) -> dict[str, Any] | None:
    for owner in _owners(kind):
        if owner.__module__ == "transformers.modeling_utils":
            continue  # the base class of all models: thousands of lines without attention
        calls = list(_calls(_tree(owner)))
        for call in calls:
            if _called(call) == "get_interface" and len(call.args) == 2 and isinstance(call.args[1], ast.Name):
                assert isinstance(call.func, ast.Attribute)
                interface = [other for other in calls if "interface" in _called(other) and other is not call]
                keywords = {k.arg for other in interface for k in other.keywords if k.arg is not None}
                inherited = {} if owner.__module__ == own_class(kind).__module__ else {"module": owner.__module__}
                mapping, default = ast.unparse(call.func.value), call.args[1].id
                return inherited | {"mapping": mapping, "default": default, "keywords": sorted(keywords)}
    return None


@known_by_class("along_the_sequence")
def along_the_sequence(kind: Any) -> str | None:
    """Return the first call or operator in a class that may look along the sequence, or None."""
    for tree in map(_tree, _owners(kind)):
        used = {_called(call) for call in _calls(tree)} | {_operator(node) for node in ast.walk(tree)}
        if found := sorted(used & _ALONG_THE_SEQUENCE):
            return found[0]
    return None


def only_multiplies(kind: Any) -> bool:
    """Return whether `matmul` is the only call in a class that may look along the sequence."""
    used = {name for tree in map(_tree, _owners(kind)) for name in map(_called, _calls(tree))}
    return used & _ALONG_THE_SEQUENCE <= {"matmul"} and along_the_sequence(kind) == "matmul"


@known_by_class("attributes_read")
def attributes_read(function: Any) -> list[str]:
    """Return the attributes of its argument `module` that a Python function reads."""
    nodes = (node for node in ast.walk(_tree(function)) if isinstance(node, ast.Attribute))
    return sorted({n.attr for n in nodes if isinstance(n.value, ast.Name) and n.value.id == "module"})


@known_by_class("counts_heads")
def counts_heads(kind: Any) -> str | None:
    """Return the first expression in a class that depends on the total number of heads, or None."""
    for owner in kind.__mro__:
        if owner is nn.Module:
            break
        for attribute, function in vars(owner).items():
            if not inspect.isfunction(function) or attribute == "__init__":
                continue
            if found := _COUNTS_HEADS.search(inspect.getsource(function)):
                return found[0]
    return None


@known_by_class("masks")
def mask_refusal(kind: Any) -> str | None:
    """Return the reason why the masks that a decoder builds may not separate packed samples, or None."""
    source = inspect.getsource(own_class(kind))
    if not _CAUSAL_MASK.search(source):
        return "builds attention masks by code of its own, which may not separate packed samples"
    if not _masks_see_positions(source):
        return "builds attention masks without position ids, so samples packed together would mix"
    return None


@known_by_class("takes_masks")
def takes_masks(kind: Any) -> bool:
    """Return whether a decoder accepts masks as a dict with one for each kind of layer."""
    return _TAKES_MASKS.search(inspect.getsource(own_class(kind))) is not None


def takes_text_positions(kind: Any) -> bool:
    """Return whether a decoder with several position axes accepts `[4, B, S]` and builds masks from the first."""
    return _TEXT_POSITIONS.search(inspect.getsource(own_class(kind))) is not None


def _masks_see_positions(source: str) -> bool:
    """Return whether every call of a transformers mask function gets `position_ids`, by name or in an unpacked dict."""
    # Some families omit them; their masks are then causal over the full row, whatever the positions are.
    tree = ast.parse(source)
    unpacked = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        if any(isinstance(key, ast.Constant) and key.value == "position_ids" for key in node.value.keys)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return all(
        any(
            keyword.arg == "position_ids"
            or (keyword.arg is None and isinstance(keyword.value, ast.Name) and keyword.value.id in unpacked)
            for keyword in call.keywords
        )
        for call in _calls(tree)
        if isinstance(call.func, ast.Name) and _CAUSAL_MASK.fullmatch(call.func.id)
    )


def _owners(kind: type) -> Iterator[type]:
    """Yield the module classes in the MRO of a class, without those of torch (FSDP2 adds one) and expertmesh."""
    own = (each for each in kind.__mro__ if issubclass(each, nn.Module))
    yield from (each for each in own if not each.__module__.startswith(("torch.", "expertmesh.")))


@functools.cache
def _tree(owner: Any) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(owner)))
    except (OSError, TypeError):
        return ast.Module([], [])  # a class made at run time has no source


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _operator(node: ast.AST) -> str:
    """Return "@" for a matrix product, "[:, a:b]" for a slice of the second dim of all rows, else an empty string."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return "@"
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple) and len(node.slice.elts) > 1:
        rows, positions = node.slice.elts[:2]
        whole = isinstance(rows, ast.Slice) and rows.lower is None and rows.upper is None
        part = isinstance(positions, ast.Slice) and (positions.lower is not None or positions.upper is not None)
        return "[:, a:b]" if whole and part else ""
    return ""


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
