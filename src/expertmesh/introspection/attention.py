"""What mixes the positions of a row inside a decoder block, read off the model's code and configuration on meta.

Attention that goes through transformers' registry (`ALL_ATTENTION_FUNCTIONS`) is known: context.py stands in for the
function. Whatever else looks along the sequence (state spaces, linear attention, convolutions, attention in code of its
own, positions numbered by the module itself) is found here, so that cp and packing can refuse it by name.
"""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from expertmesh.anatomy import HIDDEN_OF_KEYS, Anatomy, carries_state, decoder_blocks, describe, is_inside
from expertmesh.introspection.known_families import own_class
from expertmesh.introspection.source_code import (
    along_the_sequence,
    mask_refusal,
    only_multiplies,
    registry_call,
    takes_masks,
    takes_text_positions,
)
from expertmesh.introspection.token_proof import TokenProof

# Kinds of layers (config.layer_types) that mix positions by something other than attention over all of them.
_RECURRENT_LAYERS = ("linear_attention", "mamba", "recurrent", "conv", "short_conv", "compressed")


# Kinds for which transformers has masks that keep packed samples apart.
MASKED_KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
# What a module's forward may take beside hidden states, each for every position or for none.
_OF_ROWS = {"hidden_states", "position_embeddings", "position_ids", "attention_mask", "conv_mask", "input_ids"}
_OF_ROWS |= {"prev_topk_indices", "cache_params", "past_key_values", "kwargs"}


def carried_state(model: nn.Module, within: Sequence[str] = ("",)) -> str | None:
    """What carries state along the sequence in the modules under the names `within`, other than attention; or None."""
    config: Any = model.config
    kinds: set[str] = set(getattr(config.get_text_config(), "layer_types", None) or ())
    recurrent = sorted(kind for kind in kinds if any(name in kind for name in _RECURRENT_LAYERS))
    if recurrent:
        return f"{recurrent[0]} layers"
    for parent in within:
        for name, module in model.get_submodule(parent).named_modules(prefix=parent):
            if carries_state(module):
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
        inside = any(name == each or is_inside(name, each) for each in experts)
        if not inside and (found := along_the_sequence(module)) is not None:
            return name, found
    return None


def packing_refusal(model: nn.Module) -> str | None:
    """Why packed samples cannot be kept apart, or None if they can.

    transformers' mask functions keep attention inside samples when position ids restart, if the family's code hands
    them these; else masks are given to it (`needs_masks`). Layers that carry a state along the sequence are run on each
    sample by itself (`recurrent_mixers`), where they can be told from all else.
    """
    config: Any = model.config
    anatomy = describe(model)
    if what := carried_state(model):
        looking, tokens = _looking_along(model, anatomy), TokenProof(model, anatomy)
        if looking is None or not all(map(tokens.holds, looking.others)):
            return (
                f"{config.model_type} carries state along the sequence ({what}), so samples packed together would mix"
            )
    decoder = decoder_of(model, anatomy)
    if has_position_axes(model) and not takes_text_positions(type(decoder)):
        return f"{config.model_type} numbers positions along several axes, so samples do not start again at position 0"
    refusal = mask_refusal(decoder)
    separates = refusal is None or needs_masks(model, anatomy) or _attends_by_samples_alone(model, anatomy)
    return None if separates else f"{config.model_type} {refusal}"


def has_position_axes(model: nn.Module) -> bool:
    """Whether positions are numbered along time, height and width, as vision-language models do."""
    return any(hasattr(module, "get_rope_index") for module in model.modules())


def decoder_of(model: nn.Module, anatomy: Anatomy) -> nn.Module:
    """The module that runs the decoder's blocks and makes the masks for them."""
    return model.get_submodule(decoder_blocks(anatomy)[0].rpartition(".")[0].rpartition(".")[0])


def mask_kinds(config: Any) -> set[str]:
    """The kinds of layers, by which a decoder that takes masks looks them up."""
    text = config.get_text_config()
    return {str(kind) for name in ("layer_types", "layers_block_type") for kind in getattr(text, name, None) or ()}


def needs_masks(model: nn.Module, anatomy: Anatomy) -> bool:
    """Whether a decoder makes masks without position ids, but computes with those that it is given."""
    decoder: Any = decoder_of(model, anatomy)
    kinds = {kind for kind in mask_kinds(decoder.config) if not any(name in kind for name in _RECURRENT_LAYERS)}
    if not kinds or not kinds <= MASKED_KINDS or not takes_masks(decoder):
        return False
    return mask_refusal(decoder) is not None


def recurrent_mixers(model: nn.Module, anatomy: Anatomy) -> list[str]:
    """The modules of the decoder's blocks that look along the sequence by a state of their own, to be run on each
    packed sample by itself; none where that would not be enough.

    Among them is attention that compresses or indexes what it attends to, in a model that carries state.
    """
    looking = _looking_along(model, anatomy)
    return [] if looking is None else looking.mixers


@dataclass(frozen=True, slots=True)
class _Looking:
    """What may look along the sequence in the blocks: `mixers` that can be run on each sample by itself, and `others`,
    for which that has to be proven superfluous.
    """

    mixers: list[str]
    others: list[str]


def _looking_along(model: nn.Module, anatomy: Anatomy) -> _Looking | None:
    """By structure alone, before and after sharding; None where something carries state that cannot be separated."""
    blocks, experts = decoder_blocks(anatomy), [spec.name for spec in anatomy.experts]
    if any(carries_state(module) for name, module in _of_text(model, blocks) if not _in_any(name, blocks)):
        return None
    has_state = carried_state(model) is not None
    looking = _Looking([], [])
    for block in blocks:
        if along_the_sequence(model.get_submodule(block)) is not None and not mixes_streams(model, block):
            return None
        for name, module in model.get_submodule(block).named_children():
            name = f"{block}.{name}"
            named = module.named_modules(prefix=name)
            parts = {inner: part for inner, part in named if not _in_any(inner, experts)}
            suspects = [inner for inner, part in parts.items() if along_the_sequence(part) is not None]
            has_own_state = any(map(carries_state, parts.values()))
            if not suspects and not has_own_state and not (has_state and _takes_chosen_positions(module)):
                continue
            separable = _masks_can_be_cut(model) and has_state if _attends(module) else True
            holds_experts = any(_in_any(expert, [name]) for expert in experts)
            if separable and not holds_experts and _takes_rows_alone(module):
                looking.mixers.append(name)
            elif has_own_state or _attends(module):
                return None
            else:
                looking.others.extend(suspects)
    return looking


def attention_by_samples(model: nn.Module, anatomy: Anatomy) -> bool:
    """Whether attention is among the `recurrent_mixers`: it must then be called with masks of whole rows."""
    return any(_attends(model.get_submodule(name)) for name in recurrent_mixers(model, anatomy))


def _attends_by_samples_alone(model: nn.Module, anatomy: Anatomy) -> bool:
    """Whether all attention is among the `recurrent_mixers`."""
    mixers = recurrent_mixers(model, anatomy)
    return all(_in_any(name, mixers) for block in decoder_blocks(anatomy) for name in attentions(model, block))


def mixes_streams(model: Any, block: str) -> bool:
    """Whether a block multiplies matrices over the last two dims of residual streams, `[B, S, streams, H]`, and uses
    nothing else that may look along the sequence.
    """
    streams = getattr(model.config.get_text_config(), "hc_mult", None)
    return bool(streams) and only_multiplies(type(model.get_submodule(block)))


def _of_text(model: nn.Module, blocks: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """All modules but those of towers: models inside the model that hold no block of the decoder."""
    named = list(model.named_modules())
    inner = [name for name, module in named if isinstance(module, PreTrainedModel)]
    towers = [name for name in inner if name and not any(is_inside(block, name) for block in blocks)]
    yield from ((name, module) for name, module in named if not _in_any(name, towers))


def _in_any(name: str, parents: Sequence[str]) -> bool:
    return any(name == parent or is_inside(name, parent) for parent in parents)


def _attends(module: nn.Module) -> bool:
    return any(registry_call(part) is not None for part in module.modules())


def _masks_can_be_cut(model: Any) -> bool:
    """Whether the masks of attention are tensors, or nothing is masked but the future."""
    return (model.config.get_text_config()._attn_implementation or "eager") in ("eager", "sdpa")


def _takes_chosen_positions(module: nn.Module) -> bool:
    """Whether a module attends to positions that a block before it has chosen: counted in a sample, if that ran so."""
    return "prev_topk_indices" in inspect.signature(own_class(type(module)).forward).parameters


def _takes_rows_alone(module: nn.Module) -> bool:
    """Whether a module's forward takes nothing but what can be cut into samples."""
    taken = inspect.signature(own_class(type(module)).forward).parameters
    return taken.keys() - {"self"} <= _OF_ROWS | HIDDEN_OF_KEYS
