"""What mixes the positions of a row inside a decoder block, read off the model's code and configuration on meta.

Attention that goes through transformers' registry (`ALL_ATTENTION_FUNCTIONS`) is known: context.py stands in for the
function. Whatever else looks along the sequence (state spaces, linear attention, convolutions, attention in code of its
own, positions numbered by the module itself) is found here, so that cp and packing can refuse it by name.
"""

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from expertmesh.anatomy import Anatomy

# Kinds of layers (config.layer_types) that mix positions by something other than attention over all of them.
_RECURRENT_LAYERS = ("linear_attention", "mamba", "recurrent", "conv", "short_conv", "compressed")
# What code needs to see where in the sequence a token is, or its neighbours; norms, routers, projections and MLPs do
# without. A product of two activations is attention, or may be.
_ALONG_THE_SEQUENCE = {"arange", "linspace", "cumsum", "cumprod", "roll", "flip", "unfold", "conv1d", "pad", "diff"}
_ALONG_THE_SEQUENCE |= {"matmul", "bmm", "baddbmm", "einsum", "@", "[:, a:b]"}
_ALONG_THE_SEQUENCE |= {"scaled_dot_product_attention", "flex_attention", "flash_attn_func", "flash_attn_varlen_func"}


@dataclass(frozen=True, slots=True)
class RegistryCall:
    """How the code of an attention class calls the registry.

    `mapping` and `default`: names in the module of `owner` for the registry and for the eager function. `keywords`:
    what is passed by name.
    """

    owner: type
    mapping: str
    default: str
    keywords: frozenset[str]

    def global_of(self, name: str) -> Any:
        """What a name means where the class was written."""
        return vars(sys.modules[self.owner.__module__])[name]


def carried_state(model: nn.Module, within: Sequence[str] = ("",)) -> str | None:
    """What carries state along the sequence in the modules under the names `within`, other than attention; or None."""
    config: Any = model.config
    kinds: set[str] = set(getattr(config.get_text_config(), "layer_types", None) or ())
    recurrent = sorted(kind for kind in kinds if any(name in kind for name in _RECURRENT_LAYERS))
    if recurrent:
        return f"{recurrent[0]} layers"
    for parent in within:
        for name, module in model.get_submodule(parent).named_modules(prefix=parent):
            parameters = {leaf for leaf, _ in module.named_parameters(recurse=False)}
            if isinstance(module, nn.Conv1d) or {"A_log", "dt_bias"} & parameters:
                return str(name)
    return None


def attentions(model: nn.Module, block: str) -> dict[str, Any]:
    """The modules of a block whose code calls transformers' attention registry, by name."""
    named = model.get_submodule(block).named_modules(prefix=block)
    return {name: module for name, module in named if registry_call(module) is not None}


def own_code_along_the_sequence(model: nn.Module, anatomy: Anatomy, block: str) -> tuple[str, str] | None:
    """The first module of a block whose code may look along the sequence by itself, and what it uses; or None.

    Experts are left out: they are called with tokens, not with rows. The attention function is no part of its class.
    """
    experts = [spec.name for spec in anatomy.experts]
    for name, module in model.get_submodule(block).named_modules(prefix=block):
        inside = any(name == each or name.startswith(f"{each}.") for each in experts)
        if inside:
            continue
        kind: Any = type(module)
        if (found := _along_the_sequence(kind)) is not None:
            return name, found
    return None


@functools.cache
def _along_the_sequence(kind: Any) -> str | None:
    """What a class uses that may look along the sequence, or None; read once, however many blocks have it."""
    for tree in _trees(kind):
        used = {_called(call) for call in _calls(tree)} | {_operator(node) for node in ast.walk(tree)}
        if found := sorted(used & _ALONG_THE_SEQUENCE):
            return found[0]
    return None


def registry_call(module: nn.Module) -> RegistryCall | None:
    """The call of transformers' attention registry in the code of a module, or None if there is none.

    The pattern is the same in all of transformers 5: `interface = REGISTRY.get_interface(implementation, eager)`, then
    `interface(self, query, key, value, mask, ...)`.
    """
    kind: Any = type(module)
    return _registry_call(kind)


@functools.cache
def _registry_call(kind: Any) -> RegistryCall | None:
    for owner in _owners(kind):
        if owner.__module__ == "transformers.modeling_utils":
            continue  # what all models have in common, thousands of lines without attention
        calls = list(_calls(_tree(owner)))
        for call in calls:
            if _called(call) == "get_interface" and len(call.args) == 2 and isinstance(call.args[1], ast.Name):
                assert isinstance(call.func, ast.Attribute)
                interface = [other for other in calls if "interface" in _called(other) and other is not call]
                keywords = frozenset(k.arg for other in interface for k in other.keywords if k.arg is not None)
                return RegistryCall(owner, ast.unparse(call.func.value), call.args[1].id, keywords)
    return None


@functools.cache
def attributes_read(function: Any, argument: str = "module") -> frozenset[str]:
    """Which attributes of its argument `module` a function of Python reads."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return frozenset(node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == argument)


def _owners(kind: type) -> Iterator[type]:
    """The module classes that a class is made of, but for torch's (FSDP2 puts one of those first) and our adapters."""
    own = (each for each in kind.__mro__ if issubclass(each, nn.Module))
    yield from (each for each in own if not each.__module__.startswith(("torch.", "expertmesh.")))


def _trees(kind: type) -> Iterator[ast.AST]:
    yield from map(_tree, _owners(kind))


@functools.cache
def _tree(owner: Any) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(owner)))
    except (OSError, TypeError):
        return ast.Module([], [])  # made at run time, so without code of its own


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _operator(node: ast.AST) -> str:
    """A matrix product, or a part of the second dim taken from all of the first; else nothing."""
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
