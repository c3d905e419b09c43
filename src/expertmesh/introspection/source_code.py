"""Read facts about a class from its Python source: how it calls attention, what looks along the sequence.

transformers declares none of them. Source is read for classes that known_families.py does not have: other versions of
transformers, and models with custom code. The code is parsed, never run.
"""

import ast
import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from expertmesh.introspection.known_families import known_by_class, own_class

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
