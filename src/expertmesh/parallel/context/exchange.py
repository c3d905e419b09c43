"""Run attention under cp (Ulysses): a rank holds a part of every row and attends to full rows with a part of the heads.

Between attention layers a rank computes with its local positions. Before each attention one all-to-all exchanges
positions for heads: a rank gets full rows of its share of the query heads, with their key and value heads. It runs the
backend that the model was built with, and a second all-to-all exchanges the result back. So the backend handles masks,
causality, sliding windows and packing exactly, and every rank has the same work.

The function is in transformers' public registries under separate names ("expertmesh_context_sdpa" and so on). plan.py
decides which attention is exchanged; each of them must run here exactly once in every forward.

    B rows, S positions of a full row, s = S / cp of them here, N query heads, G key and value heads, D size of a head
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from expertmesh.anatomy import is_inside
from expertmesh.compat import set_attention, with_attention
from expertmesh.config.errors import InputError
from expertmesh.distributed.collectives import all_gather, all_to_all_even
from expertmesh.distributed.mesh import Mesh
from expertmesh.introspection.source_code import registry_call
from expertmesh.parallel.context.plan import PREFIX, ContextPlan, backend_of, registered
from expertmesh.state.model_view import attach_to_module, module_state
from expertmesh.state.patching import register_function

# Tensors for full rows, passed to the backend unchanged (sample boundaries of a packed batch, for flash attention).
_WHOLE_ROWS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}


@dataclass(slots=True, eq=False)
class ContextAttention:
    """The exchange of one attention module."""

    name: str
    """Name of the module in the model."""
    group: dist.ProcessGroup
    """The cp group."""
    backend: str
    """The attention backend, by transformers' name."""
    function: Callable[..., Any]
    """The function of the backend."""
    calls: int = 0
    """The number of calls in the current forward of its block."""


def split_attention(model: nn.Module, plan: ContextPlan, blocks: Sequence[str], mesh: Mesh) -> None:
    """Make the planned attention layers of `blocks` exchange positions for heads; `shard` calls it.

    Args:
        blocks: the decoder blocks that this rank holds.

    Collectives: none here; each forward issues those of `_attention`.
    """
    if not plan.exchanged:
        return
    group = mesh.dense.get_group("cp")
    configs: dict[int, Any] = {}
    for block in blocks:
        here = []
        for name in plan.exchanged:
            if not is_inside(name, block):
                continue
            module: Any = model.get_submodule(name)
            call, backend = registry_call(module), backend_of(module.config)
            assert call is not None
            function = registered(call, backend)
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
        backend = backend_of(config)
        register_function(ALL_ATTENTION_FUNCTIONS, PREFIX + backend, _attention)
        if backend in ALL_MASK_ATTENTION_FUNCTIONS:
            # Attention sees full rows, so the backend's mask function serves unchanged.
            masks = ALL_MASK_ATTENTION_FUNCTIONS
            register_function(masks, PREFIX + backend, masks[backend])
        # A dict sets this configuration alone; a string would also change those inside it (of a vision tower).
        set_attention(config, {"": PREFIX + backend})


def _guard(block: nn.Module, name: str, here: list[ContextAttention]) -> None:
    """Add hooks that raise `InputError` unless every attention of a block exchanged its positions exactly once."""

    # No call means that other code attended to local positions alone; two would exchange the positions twice.
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
    """Exchange positions for heads, attend to full rows, and exchange back; the function in transformers' registry.

    Args:
        query: `[B, N, s, D]`.
        key: `[B, G, s, D]`.
        value: `[B, G, s, D]`.
        attention_mask: the mask of full rows `[B, 1, S or 1, S]`, or whatever else the backend takes.

    Returns:
        (the result `[B, s, N, D]`, None).

    Raises:
        InputError: arguments, heads or a result that cp cannot split.

    Collectives: every cp rank calls it; two all-to-alls, again in backward; for flash position ids, one all-gather.
    """
    context = _context_of(module)
    context.calls += 1
    cp, rank = context.group.size(), context.group.rank()
    heads, repeat, groups = _head_counts(context.name, module, query, key, value, cp)
    # Before the exchange, as a rank's query heads may share a key head with those of another rank.
    key, value = (x.repeat_interleave(repeat, dim=1) if repeat > 1 else x for x in (key, value))
    whole = _positions_to_heads((query, key, value), context.group)
    rows, _, length, _ = whole[0].shape
    cut = partial(_own_heads, context.name, heads * cp, rank * heads, heads)
    # The module's configuration names this exchange; the backend has to read its real name there.
    seen = _ModuleView(
        module, num_key_value_groups=groups, config=_ModuleView(module.config, **with_attention(context.backend))
    )
    if isinstance(sinks := getattr(module, "sinks", None), torch.Tensor):
        seen.changes["sinks"] = cut("sinks", sinks)
    for name, option in list(options.items()):
        if name == "s_aux" and option is not None:
            options[name] = cut(name, option)
        elif name == "position_ids" and option is not None:
            # Only flash attention reads them, to find the samples of a packed row, so it needs those of the full row.
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
    """Count the heads of a rank.

    Key and value heads are repeated, in order, only as often as the query heads of a rank need; not at all if cp
    divides their number.

    Returns:
        (query heads of a rank, repeats of each key and value head, query heads for each repeated head on a rank).

    Raises:
        InputError: cp does not divide the query heads, or the heads do not form equal groups.
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
    """A view of a module or configuration with the attributes in `changes` replaced, for the backend of one rank."""

    def __init__(self, whole: Any, **changes: Any) -> None:
        self.whole, self.changes = whole, changes

    def __getattr__(self, name: str) -> Any:
        changes: dict[str, Any] = self.__dict__["changes"]
        return changes[name] if name in changes else getattr(self.__dict__["whole"], name)


def _own_heads(where: str, all_heads: int, first: int, heads: int, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part `[heads]` of a tensor with one value for each query head."""
    if tensor.numel() != all_heads:
        raise InputError(
            f"parallel.cp: {name} {tuple(tensor.shape)} of {where} is not one value for each query head",
            key="layout.cp-attention-arguments",
        )
    return tensor.reshape(-1)[first : first + heads]


def _check_mask(name: str, mask: torch.Tensor, length: int) -> None:
    heads, queries, keys = mask.shape[1:]
    # Not `queries in (1, length)`: torch.compile takes symbolic lengths that are equal for different ones there.
    if heads != 1 or (queries != 1 and queries != length) or keys != length:
        raise InputError(
            f"parallel.cp: {name} attends with a mask {tuple(mask.shape)}, not with one for {length} positions and "
            "all heads; set parallel.cp to 1",
            key="layout.cp-attention-arguments",
        )


def _whole_positions(position_ids: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather `[..., s]` of all ranks to `[..., S]`.

    Collectives: every rank of the group calls it; one all-gather.
    """
    return all_gather(position_ids.movedim(-1, 0), group).movedim(0, -1).contiguous()


class _Exchange(torch.autograd.Function):
    """One all-to-all of equal blocks, and the same for their gradients; saves no tensor for backward."""

    @staticmethod
    def forward(ctx: Any, blocks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return all_to_all_even(blocks.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_to_all_even(grad.contiguous(), ctx.group), None


def _positions_to_heads(tensors: tuple[torch.Tensor, ...], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Exchange tensors `[B, heads, s, D]` for `[B, heads / cp, S, D]`, all of them in one all-to-all."""
    cp = group.size()
    # Queries, keys and values are concatenated for a single all-to-all, so they need one dtype.
    assert len({tensor.dtype for tensor in tensors}) == 1, [tensor.dtype for tensor in tensors]
    # torch.unflatten, not Tensor.unflatten: torch.compile cannot trace that Python method in a recomputed block.
    shares = [torch.unflatten(tensor, 1, (cp, -1)) for tensor in tensors]  # [B, cp, heads, s, D]
    blocks = torch.cat([share.permute(1, 0, 3, 2, 4).flatten(3) for share in shares], dim=-1)
    received = _Exchange.apply(blocks, group)  # [cp, B, s, heads * D of all]: block r is part r of the row
    rows = received.transpose(0, 1).flatten(1, 2)
    widths = [share.shape[2] * share.shape[4] for share in shares]
    split = zip(rows.split(widths, dim=-1), shares, strict=True)
    return [torch.unflatten(part, 2, (share.shape[2], -1)).transpose(1, 2) for part, share in split]


def _heads_to_positions(out: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange `[B, S, heads / cp, D]` for `[B, s, heads, D]` in one all-to-all."""
    blocks = torch.unflatten(out, 1, (group.size(), -1)).transpose(0, 1)
    received: torch.Tensor = _Exchange.apply(blocks, group)  # [cp, B, s, heads / cp, D]: block r has rank r's heads
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)
