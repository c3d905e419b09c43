"""cp: each rank holds a part of every row, and attention sees whole rows with a part of the heads (Ulysses).

Between attention layers a rank computes with its own positions. Around each attention one all-to-all trades positions
for heads: a rank gets whole rows of its share of the query heads (with the key and value heads that belong to them),
runs the backend that the model was built with on them, and trades the result back. Masks, causality, sliding windows
and packing are therefore the backend's own, exact for every one of them; and every rank has the same work.

Installed through transformers' public registries under names of its own ("expertmesh_context_sdpa" and so on). What
cannot be split this way is refused by name before weights are read; in each forward every attention must have come
here exactly once.

    B rows, S positions of a whole row, s = S / cp of them here, N query heads, G key and value heads, D size of a head
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from expertmesh.anatomy import Anatomy, decoder_blocks
from expertmesh.config.errors import InputError
from expertmesh.distributed.collectives import all_gather, all_to_all_even
from expertmesh.distributed.layout import Layout
from expertmesh.distributed.mesh import Mesh
from expertmesh.introspection.attention import attentions, carried_state, own_code_along_the_sequence
from expertmesh.introspection.source_code import attributes_read, registry_call
from expertmesh.state.patching import register_function
from expertmesh.state.sharded_model import attach_to_module, module_state

PREFIX = "expertmesh_context_"
# What attention classes may pass to the registry's function: each is a number, or cut here as it must be.
_KEYWORDS = {"attention_mask", "dropout", "scaling", "sliding_window", "softcap", "is_causal", "s_aux", "position_ids"}
# Tensors for whole rows, which the backend gets as they are (samples of a packed batch, for flash attention).
_WHOLE_ROWS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
# What a family's eager function may read of its module: the same on every rank, or replaced in `_ModuleView`.
_ATTRIBUTES = {"num_key_value_groups", "training", "sinks", "head_dim", "config", "scaling", "is_causal", "layer_idx"}


@dataclass(slots=True, eq=False)
class ContextAttention:
    """What stands behind the attention of one module. `calls`: how often in the forward that its block is in."""

    name: str
    group: dist.ProcessGroup
    backend: str
    function: Callable[..., Any]
    calls: int = 0


def refuse_context(model: nn.Module, anatomy: Anatomy, layout: Layout) -> None:
    """Raise `InputError` for a model whose rows cannot be split over cp exactly. Needs no weights; no communication."""
    if layout.cp == 1:
        return
    family, blocks = model.config.model_type, decoder_blocks(anatomy)  # type: ignore[union-attr]
    where = f"parallel.cp {layout.cp}: {family}"

    def refuse(problem: str, key: str) -> NoReturn:
        raise InputError(f"{where} {problem}; set parallel.cp to 1", key=key)

    if state := carried_state(model, blocks):
        refuse(f"carries state along the sequence ({state}), which needs whole rows", "layout.cp-carried-state")
    heads: set[int] = set()
    for block in blocks:
        found = attentions(model, block)
        if not found:
            nothing = f"has no attention through transformers' registry in {block}"
            refuse(f"{nothing}, so what mixes its positions is not known", "layout.attention-not-recognised")
        for name, module in found.items():
            _refuse_attention(where, name, module)
            heads.add(_query_heads(module))
        if own := own_code_along_the_sequence(model, anatomy, block):
            refuse(f"may look along the sequence by itself in {own[0]} ({own[1]})", "layout.mixes-positions")
    per_rank = math.gcd(*heads) // layout.tp
    if per_rank % layout.cp:
        valid = [size for size in range(1, per_rank + 1) if per_rank % size == 0]
        nearest = min(valid, key=lambda size: (abs(size - layout.cp), size))
        shared = f" (of {math.gcd(*heads)}, over tp {layout.tp})" if layout.tp > 1 else ""
        raise InputError(
            f"{where} has {per_rank} query heads{shared}, which cp does not divide; valid values: "
            f"{', '.join(map(str, valid))}; the nearest is {nearest}",
            key="layout.cp-divides-heads",
        )
    configs = {id(module.config) for block in blocks for module in attentions(model, block).values()}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{block}.") for block in blocks)
        if not inside and registry_call(module) is not None and id(module.config) in configs:
            outside = f"attends outside its decoder blocks ({name}), which cp does not split"
            refuse(outside, "layout.cp-attention-outside-blocks")


def _refuse_attention(where: str, name: str, module: Any) -> None:
    call = registry_call(module)
    assert call is not None
    if odd := sorted(set(call.keywords) - _KEYWORDS):
        raise InputError(
            f"{where} passes {odd[0]} to its attention ({name}), which cp cannot split; set parallel.cp to 1",
            key="layout.cp-attention-arguments",
        )
    backend = _backend(module.config)
    if backend == "eager" and (odd := sorted(set(attributes_read(call.global_of(call.default))) - _ATTRIBUTES)):
        raise InputError(
            f"{where} computes eager attention with {odd[0]} of {name}, which cp cannot split; set model.attention to "
            "sdpa, or parallel.cp to 1",
            key="layout.cp-attention-arguments",
        )
    if _registered(call.global_of(call.mapping), backend, call.global_of(call.default)) is None:
        raise InputError(
            f"{where}: model.attention {backend} is not in transformers' registry; set it to sdpa",
            key="model.unknown-attention",
        )


def _query_heads(module: Any) -> int:
    """By what modules and configurations call them; the exchange sees the real number and checks it again."""
    own = (getattr(module, name, None) for name in ("num_heads", "num_attention_heads", "n_heads"))
    return int(next((heads for heads in own if isinstance(heads, int)), module.config.num_attention_heads))


def split_attention(model: nn.Module, blocks: Sequence[str], mesh: Mesh) -> None:
    """Let the attention of `blocks`, those of the decoder that are here, exchange positions for heads. Called by
    `shard`; no communication.
    """
    if mesh.layout.cp == 1:
        return
    group = mesh.dense.get_group("cp")
    configs: dict[int, Any] = {}
    for block in blocks:
        here = []
        for name, module in attentions(model, block).items():
            call, backend = registry_call(module), _backend(module.config)
            assert call is not None
            function = _registered(call.global_of(call.mapping), backend, call.global_of(call.default))
            assert function is not None, f"{backend} is not registered"
            attach_to_module(module, context_attention=ContextAttention(name, group, backend, function))
            configs[id(module.config)] = module.config
            here.append(_context_of(module))
        _guard(model.get_submodule(block), block, here)
    # The masks are made from the configuration of the model that holds the blocks.
    for parent in {block.rpartition(".")[0].rpartition(".")[0] for block in blocks}:
        owner: Any = model.get_submodule(parent)
        configs[id(owner.config)] = owner.config
    for config in configs.values():
        backend = _backend(config)
        register_function(ALL_ATTENTION_FUNCTIONS, PREFIX + backend, _attention)
        if backend in ALL_MASK_ATTENTION_FUNCTIONS:
            masks = ALL_MASK_ATTENTION_FUNCTIONS
            register_function(masks, PREFIX + backend, masks[backend])
        # Its own alone: a dict leaves the configurations inside it (of a vision tower) as they are.
        config._attn_implementation = {"": PREFIX + backend}


def context_lines(model: nn.Module, layout: Layout) -> Iterator[str]:
    """What cp does to a sharded model, for the printed plan: nothing without cp."""
    here = [context for module in model.modules() if (context := module_state(module).context_attention) is not None]
    if here:
        backends = ", ".join(sorted({context.backend for context in here}))
        yield (
            f"{layout.cp} ranks share rows: each has 1/{layout.cp} of the positions, and for attention ({backends}) "
            f"whole rows of 1/{layout.cp} of the heads"
        )


def _backend(config: Any) -> str:
    """The attention that a configuration asks for, under transformers' name."""
    name: str = config._attn_implementation or "eager"
    return name.removeprefix(PREFIX)


def _registered(mapping: Any, backend: str, default: Callable[..., Any]) -> Callable[..., Any] | None:
    """The function for a backend, where the family's code looks it up; None if there is none."""
    if backend != "eager" and backend not in mapping:
        return None
    function: Callable[..., Any] = mapping.get_interface(backend, default)
    return function


def _guard(block: nn.Module, name: str, here: list[ContextAttention]) -> None:
    """Every attention of a block must have exchanged its positions exactly once when the block is done."""

    def begin(module: nn.Module, args: Any) -> None:
        for context in here:
            context.calls = 0

    def check(module: nn.Module, args: Any, output: Any) -> None:
        for context in here:
            if context.calls != 1:
                raise InputError(
                    f"parallel.cp: {context.name} attended {context.calls} times in one forward of {name} instead of "
                    "once, so its positions were not all exchanged; set parallel.cp to 1",
                    key="layout.cp-attention-calls",
                )

    block.register_forward_pre_hook(begin)
    block.register_forward_hook(check)


def _context_of(module: nn.Module) -> ContextAttention:
    context: ContextAttention | None = module_state(module).context_attention
    if context is None:
        raise InputError(
            f"parallel.cp: {type(module).__name__} attends with the configuration of a model that is split over cp but "
            "is no part of its decoder blocks; give each model a configuration of its own",
            key="layout.cp-shared-config",
        )
    return context


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """What stands in transformers' registry: query `[B, N, s, D]`, key and value `[B, G, s, D]`; `[B, s, N, D]` out.

    `attention_mask` is for whole rows. Collective over the cp group: two all-to-alls, and the same two in backward.
    """
    context = _context_of(module)
    context.calls += 1
    cp, rank = context.group.size(), context.group.rank()
    heads, repeat, groups = _head_counts(context.name, module, query, key, value, cp)
    key, value = (x.repeat_interleave(repeat, dim=1) if repeat > 1 else x for x in (key, value))
    whole = _positions_to_heads((query, key, value), context.group)
    rows, _, length, _ = whole[0].shape
    cut = partial(_own_heads, context.name, heads * cp, rank * heads, heads)
    seen = _ModuleView(
        module, num_key_value_groups=groups, config=_ModuleView(module.config, _attn_implementation=context.backend)
    )
    if isinstance(sinks := getattr(module, "sinks", None), torch.Tensor):
        seen.changes["sinks"] = cut("sinks", sinks)
    for name, option in list(options.items()):
        if name == "s_aux" and option is not None:
            options[name] = cut(name, option)
        elif name == "position_ids" and option is not None:
            # Only flash attention reads them, to find the samples of a packed row; those here are of a part of it.
            options[name] = _whole_positions(option, context.group) if "flash" in context.backend else None
        elif isinstance(option, torch.Tensor) and name not in _WHOLE_ROWS:
            raise InputError(
                f"parallel.cp: {context.name} attends with {name}, which cp cannot split",
                key="layout.cp-attention-arguments",
            )
    if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 4:
        _check_mask(context.name, attention_mask, length)
    out = context.function(seen, *whole, attention_mask, **options)[0]
    if out.shape[:3] != (rows, length, heads):
        raise InputError(
            f"parallel.cp: {context.name} gave {tuple(out.shape)} for {rows} rows, {length} positions and {heads} "
            "heads",
            key="layout.cp-attention-shape",
        )
    return _heads_to_positions(out, context.group), None


def _head_counts(
    name: str, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cp: int
) -> tuple[int, int, int]:
    """(query heads of a rank, how often to repeat each key and value head, query heads for each of those on a rank).

    Key and value heads are repeated as far as a rank's query heads need, in the same order, and no further: with
    at least cp of them that cp divides, not at all.
    """
    query_heads, key_heads = query.shape[1], key.shape[1]
    if query_heads % cp:
        raise InputError(
            f"parallel.cp {cp} does not divide {query_heads} query heads of {name}; set parallel.cp to 1",
            key="layout.cp-divides-heads",
        )
    groups = query_heads // key_heads
    declared = getattr(module, "num_key_value_groups", groups)
    if query_heads % key_heads or value.shape[1] != key_heads or declared != groups:
        raise InputError(
            f"parallel.cp: {name} attends with {query_heads} query, {key_heads} key and {value.shape[1]} value heads, "
            f"{declared} to a group, which cp cannot split; set parallel.cp to 1",
            key="layout.cp-head-groups",
        )
    heads = query_heads // cp
    kept = math.gcd(heads, groups)
    return heads, groups // kept, kept


class _ModuleView:
    """A module or configuration as the backend of one rank has to see it: itself, but for what is in `changes`."""

    def __init__(self, whole: Any, **changes: Any) -> None:
        self.whole, self.changes = whole, changes

    def __getattr__(self, name: str) -> Any:
        changes: dict[str, Any] = self.__dict__["changes"]
        return changes[name] if name in changes else getattr(self.__dict__["whole"], name)


def _own_heads(where: str, all_heads: int, first: int, heads: int, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A rank's part of one value for each query head."""
    if tensor.numel() != all_heads:
        raise InputError(
            f"parallel.cp: {name} {tuple(tensor.shape)} of {where} is not one value for each query head",
            key="layout.cp-attention-arguments",
        )
    return tensor.reshape(-1)[first : first + heads]


def _check_mask(name: str, mask: torch.Tensor, length: int) -> None:
    if mask.shape[1] != 1 or mask.shape[2] not in (1, length) or mask.shape[3] != length:
        raise InputError(
            f"parallel.cp: {name} attends with a mask {tuple(mask.shape)}, not with one for {length} positions and "
            "all heads; set parallel.cp to 1",
            key="layout.cp-attention-arguments",
        )


def _whole_positions(position_ids: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`[..., s]` of every part of the row, together. Collective: one all-gather."""
    return all_gather(position_ids.movedim(-1, 0), group).movedim(0, -1).contiguous()


class _Exchange(torch.autograd.Function):
    """One all-to-all of equal blocks, and the same for their gradients. Keeps nothing for backward."""

    @staticmethod
    def forward(ctx: Any, blocks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return all_to_all_even(blocks.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_to_all_even(grad.contiguous(), ctx.group), None


def _positions_to_heads(tensors: tuple[torch.Tensor, ...], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """`[B, heads, s, D]` each to `[B, heads / cp, S, D]`, all in one exchange."""
    cp = group.size()
    assert len({tensor.dtype for tensor in tensors}) == 1, [tensor.dtype for tensor in tensors]
    shares = [tensor.unflatten(1, (cp, -1)) for tensor in tensors]  # [B, cp, heads, s, D]
    blocks = torch.cat([share.permute(1, 0, 3, 2, 4).flatten(3) for share in shares], dim=-1)
    received = _Exchange.apply(blocks, group)  # [cp, B, s, heads * D of all]: block r is part r of the row
    rows = received.transpose(0, 1).flatten(1, 2)
    widths = [share.shape[2] * share.shape[4] for share in shares]
    split = zip(rows.split(widths, dim=-1), shares, strict=True)
    return [part.unflatten(2, (share.shape[2], -1)).transpose(1, 2) for part, share in split]


def _heads_to_positions(out: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`[B, S, heads / cp, D]` to `[B, s, heads, D]`."""
    blocks = out.unflatten(1, (group.size(), -1)).transpose(0, 1)
    received: torch.Tensor = _Exchange.apply(blocks, group)  # [cp, B, s, heads / cp, D]: block r has rank r's heads
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)
