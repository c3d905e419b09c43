"""Find the modules of a decoder block that mix positions, from the model's code and configuration on meta.

Attention that goes through transformers' registry (`ALL_ATTENTION_FUNCTIONS`) is known: parallel/context.py
replaces its function. Other code that looks along the sequence (state spaces, linear attention, convolutions, attention
outside of the registry, positions numbered by the module itself) is found here, so that cp and packing can handle it or
refuse it by name. transformers does not declare how a class calls attention and what looks along the sequence: it is
read from the Python source of the class, which is parsed, never run.

Some code multiplies matrices over experts or residual streams, or slices a dim, and no token sees another: `TokenProof`
finds it out. Nothing here reads weights or communicates.
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
from transformers import PreTrainedModel

from expertmesh.anatomy import HIDDEN_OF_KEYS, Anatomy, carries_state, decoder_blocks, describe, is_inside, is_within
from expertmesh.compat import CACHE_ARGUMENTS, attention_of
from expertmesh.introspection.proofs import by_class, own_class
from expertmesh.introspection.small_copies import TokenProof

# Kinds of layers (config.layer_types) that mix positions without attention over all of them.
_RECURRENT_LAYERS = ("linear_attention", "mamba", "recurrent", "conv", "short_conv", "compressed")
# Kinds for which transformers has masks that keep packed samples apart.
MASKED_KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
# Arguments of a module's forward that can be cut into samples: each has values per position, or none.
_OF_ROWS = {"hidden_states", "position_embeddings", "position_ids", "attention_mask", "conv_mask", "input_ids"}
_OF_ROWS |= {"prev_topk_indices", "kwargs", *CACHE_ARGUMENTS}
# Calls and operators that code needs to see the position of a token, or its neighbours; norms, routers, projections and
# MLPs do not use them. A product of two activations may be attention.
_ALONG_THE_SEQUENCE = {
    "arange", "linspace", "cumsum", "cumprod", "roll", "flip", "unfold", "conv1d", "pad", "diff",
    "matmul", "bmm", "baddbmm", "einsum", "@", "[:, a:b]",
    "scaled_dot_product_attention", "flex_attention", "flash_attn_func", "flash_attn_varlen_func",
}  # fmt: skip
# An attention whose code uses the number of heads, instead of `view` with -1, cannot run with fewer heads.
_COUNTS_HEADS = re.compile(r"self\.(config\.)?(num_(attention_|key_value_|kv_)?heads|n_heads?|hidden_size|embed_dim)\b")
_TAKES_MASKS = re.compile(r"isinstance\((\w+ := )?attention_mask, dict\)")
_TEXT_POSITIONS = re.compile(r"position_ids\.shape\[0\] == 4\b")
_CAUSAL_MASK = re.compile(r"create_(\w+_)?causal_mask")


def carried_state(model: nn.Module) -> str | None:
    """Find what carries state along the sequence, other than attention.

    Returns:
        A kind of layers in the configuration, or the name of a module; None if there is neither.
    """
    config: Any = model.config
    kinds: set[str] = set(getattr(config.get_text_config(), "layer_types", None) or ())
    recurrent = sorted(kind for kind in kinds if any(name in kind for name in _RECURRENT_LAYERS))
    if recurrent:
        return f"{recurrent[0]} layers"
    return next((name for name, module in model.named_modules() if carries_state(module)), None)


def packing_refusal(model: nn.Module) -> str | None:
    """Return the reason why packed samples cannot be kept apart, or None if they can.

    transformers' mask functions keep attention inside samples when position ids restart, if the family's code passes
    the position ids to them. If it does not, the decoder gets masks. Layers that carry a state along the sequence run
    on each sample separately, if they can be identified.
    """
    config: Any = model.config
    anatomy = describe(model)
    if what := carried_state(model):
        looking, tokens = _looking_along(model, anatomy), TokenProof(model, anatomy)
        if looking is None or not all(map(tokens.holds, looking.others)):
            return (
                f"{config.model_type} carries state along the sequence ({what}), so samples packed together would mix"
            )
    found = Separation.of(model, anatomy)
    # A decoder that takes `[4, B, S]` builds masks from the first.
    if found.has_axes and _TEXT_POSITIONS.search(_source(own_class(type(found.decoder)))) is None:
        return f"{config.model_type} numbers positions along several axes, so samples do not start again at position 0"
    refusal = mask_refusal(found.decoder)
    in_blocks = ((name, part) for name, part in model.named_modules() if is_within(name, *decoder_blocks(anatomy)))
    attends = (name for name, part in in_blocks if registry_call(part) is not None)
    separates = refusal is None or found.needs_masks or all(is_within(name, *found.mixers) for name in attends)
    return None if separates else f"{config.model_type} {refusal}"


@dataclass(frozen=True, slots=True)
class Separation:
    """The way in which a model keeps samples of packed rows apart; the same before and after sharding."""

    decoder: nn.Module
    """The module that runs the decoder's blocks and builds their masks."""
    mixers: list[str]
    """The `recurrent_mixers`."""
    mixers_attend: bool
    """True if attention is among the mixers; it then needs masks of full rows."""
    needs_masks: bool
    """True if the decoder builds masks without position ids, but accepts masks."""
    has_axes: bool
    """True if positions are numbered along time, height and width, as in vision-language models."""

    @classmethod
    def of(cls, model: nn.Module, anatomy: Anatomy) -> "Separation":
        """Find it from the model's code and configuration."""
        decoder: Any = decoder_of(model, anatomy)
        kinds = {kind for kind in mask_kinds(decoder.config) if not any(name in kind for name in _RECURRENT_LAYERS)}
        takes = bool(kinds) and kinds <= MASKED_KINDS and takes_masks(decoder)
        mixers = recurrent_mixers(model, anatomy)
        return cls(
            decoder,
            mixers,
            mixers_attend=any(_attends(model.get_submodule(name)) for name in mixers),
            needs_masks=takes and mask_refusal(decoder) is not None,
            has_axes=any(hasattr(module, "get_rope_index") for module in model.modules()),
        )


def decoder_of(model: nn.Module, anatomy: Anatomy) -> nn.Module:
    """Return the module that runs the decoder's blocks and builds their masks."""
    return model.get_submodule(decoder_blocks(anatomy)[0].rpartition(".")[0].rpartition(".")[0])


def mask_kinds(config: Any) -> set[str]:
    """Return the kinds of layers, which are the keys of the masks that a decoder accepts."""
    text = config.get_text_config()
    return {str(kind) for name in ("layer_types", "layers_block_type") for kind in getattr(text, name, None) or ()}


def narrower_masks(decoder: Any) -> set[str]:
    """Return the kinds of masks that a decoder may build beside the causal one, by its layers or by its code."""
    config, source = decoder.config, _source(own_class(type(decoder)))
    made_by = {"sliding_window": ("sliding_attention", "create_sliding_window_causal_mask")}
    made_by |= {"attention_chunk_size": ("chunked_attention", "create_chunked_causal_mask")}
    by_code = {kind for key, (kind, call) in made_by.items() if getattr(config, key, None) and call in source}
    return by_code | (mask_kinds(config) & MASKED_KINDS - {"full_attention"})


def recurrent_mixers(model: nn.Module, anatomy: Anatomy) -> list[str]:
    """Return the modules of the blocks that must run on each packed sample separately.

    They carry a state along the sequence. In a model with such modules, attention that compresses or indexes its keys
    is among them. The list is empty if running these modules by samples would not keep the samples apart.
    """
    looking = _looking_along(model, anatomy)
    return [] if looking is None else looking.mixers


@dataclass(frozen=True, slots=True)
class _Looking:
    """The modules of the blocks that may look along the sequence."""

    mixers: list[str]
    """Names of the modules that can run on each sample separately."""
    others: list[str]
    """Names of the modules that must be proven to compute each token separately."""


def _looking_along(model: nn.Module, anatomy: Anatomy) -> _Looking | None:
    """Find the modules that may look along the sequence, by structure alone, before or after sharding.

    Returns:
        The modules; None if a module carries a state that cannot be separated by samples.
    """
    blocks, experts = decoder_blocks(anatomy), [spec.name for spec in anatomy.experts]
    named = dict(model.named_modules())
    inner = [name for name, module in named.items() if isinstance(module, PreTrainedModel)]
    # Models inside the model that hold no block of the decoder: text does not come to them.
    towers = [name for name in inner if name and not any(is_inside(block, name) for block in blocks)]
    if any(carries_state(module) for name, module in named.items() if not is_within(name, *towers, *blocks)):
        return None
    has_state = carried_state(model) is not None
    # The masks of attention are tensors, which can be cut into samples, or causal without a tensor.
    config: Any = model.config
    masks_can_be_cut = (attention_of(config.get_text_config()) or "eager") in ("eager", "sdpa")
    looking = _Looking([], [])
    for block in blocks:
        if along_the_sequence(model.get_submodule(block)) is not None and not mixes_streams(model, block):
            return None
        for name, module in model.get_submodule(block).named_children():
            name = f"{block}.{name}"
            taken = set(inspect.signature(own_class(type(module)).forward).parameters) - {"self"}
            parts = {p: part for p, part in module.named_modules(prefix=name) if not is_within(p, *experts)}
            suspects = [p for p, part in parts.items() if along_the_sequence(part) is not None]
            has_own_state = any(map(carries_state, parts.values()))
            # Positions that an earlier block selected count within a sample if that block ran by samples.
            if not suspects and not has_own_state and not (has_state and "prev_topk_indices" in taken):
                continue
            separable = masks_can_be_cut and has_state if _attends(module) else True
            holds_experts = any(is_within(expert, name) for expert in experts)
            if separable and not holds_experts and taken <= _OF_ROWS | HIDDEN_OF_KEYS:
                looking.mixers.append(name)
            elif has_own_state or _attends(module):
                return None
            else:
                looking.others.extend(suspects)
    return looking


def mixes_streams(model: Any, block: str) -> bool:
    """Return whether a block multiplies matrices over residual streams `[B, S, streams, H]`, on the last two dims.

    False if its code uses anything else that may look along the sequence.
    """
    kind = type(model.get_submodule(block))
    used = {name for tree in map(_tree, _owners(kind)) for name in map(_called, _calls(tree))}
    only_multiplies = used & _ALONG_THE_SEQUENCE <= {"matmul"} and along_the_sequence(kind) == "matmul"
    return bool(getattr(model.config.get_text_config(), "hc_mult", None)) and only_multiplies


def _attends(module: nn.Module) -> bool:
    return any(registry_call(part) is not None for part in module.modules())


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


@by_class
def registry_call(kind: Any) -> RegistryCall | None:
    """Return the call of transformers' attention registry in the code of a class, or None if there is none.

    The pattern is the same in all of transformers 5: `interface = REGISTRY.get_interface(implementation, eager)`, then
    `interface(self, query, key, value, mask, ...)`.
    """
    for owner in _owners(kind):
        if owner.__module__ == "transformers.modeling_utils":
            continue  # the base class of all models: thousands of lines without attention
        calls = list(_calls(_tree(owner)))
        for call in calls:
            if _called(call) == "get_interface" and len(call.args) == 2 and isinstance(call.args[1], ast.Name):
                assert isinstance(call.func, ast.Attribute)
                interface = [other for other in calls if "interface" in _called(other) and other is not call]
                keywords = {k.arg for other in interface for k in other.keywords if k.arg is not None}
                mapping = ast.unparse(call.func.value)
                return RegistryCall(owner.__module__, mapping, call.args[1].id, sorted(keywords))
    return None


@by_class
def along_the_sequence(kind: Any) -> str | None:
    """Return the first call or operator in a class that may look along the sequence, or None."""
    for tree in map(_tree, _owners(kind)):
        used = {_called(call) for call in _calls(tree)} | {_operator(node) for node in ast.walk(tree)}
        if found := sorted(used & _ALONG_THE_SEQUENCE):
            return found[0]
    return None


@by_class
def attributes_read(function: Any) -> list[str]:
    """Return the attributes of its argument `module` that a Python function reads."""
    nodes = (node for node in ast.walk(_tree(function)) if isinstance(node, ast.Attribute))
    return sorted({n.attr for n in nodes if isinstance(n.value, ast.Name) and n.value.id == "module"})


@by_class
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


@by_class
def mask_refusal(kind: Any) -> str | None:
    """Return the reason why the masks that a decoder builds may not separate packed samples, or None."""
    source = _source(own_class(kind))
    if not _CAUSAL_MASK.search(source):
        return "builds attention masks by code of its own, which may not separate packed samples"
    if not _masks_see_positions(source):
        return "builds attention masks without position ids, so samples packed together would mix"
    return None


@by_class
def takes_masks(kind: Any) -> bool:
    """Return whether a decoder accepts masks as a dict with one for each kind of layer."""
    return _TAKES_MASKS.search(_source(own_class(kind))) is not None


def _source(owner: Any) -> str:
    """Return the source of a class or a function. Raises `OSError` or `TypeError` for one made at run time."""
    classes = _classes_of(owner.__module__) if inspect.isclass(owner) else {}
    return classes.get(owner.__qualname__) or textwrap.dedent(inspect.getsource(owner))


@functools.cache
def _classes_of(module: str) -> dict[str, str]:
    """Return the source of each class of a module. Before Python 3.13 inspect parses the whole module for each one."""
    source = inspect.getsource(sys.modules[module])
    lines = source.split("\n")
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    firsts = [min(node.lineno, *(each.lineno for each in node.decorator_list), node.lineno) for node in classes]
    return {
        node.name: "\n".join(lines[first - 1 : node.end_lineno]) for node, first in zip(classes, firsts, strict=True)
    }


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
        return ast.parse(_source(owner))
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
