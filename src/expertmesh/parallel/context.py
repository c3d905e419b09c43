"""Context parallelism: ranks share rows. Decide how each layer sees full rows, and run attention by Ulysses.

Attention that goes through transformers' registry exchanges positions for heads: an all-to-all gives a rank full rows
of its share of the query heads, with their key and value heads. It runs the backend that the model was built with, so
masks, windows and packing are exact, and a second all-to-all exchanges the result back. All other layers that look
along the sequence gather their rows (tensor.py). If a small copy shows that the shares of the heads add up, each rank
computes its share; otherwise each rank computes the full layer, which repeats work, and the plan prints it. A module
that looks along the sequence elsewhere is refused by name. `context_plan` decides on meta, `split_attention` installs.

    B rows, S positions of a full row, s = S / cp of them here, N query heads, G key and value heads, D size of a head
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from expertmesh.anatomy import Anatomy, carries_state, decoder_blocks, is_inside, is_within
from expertmesh.compat import attention_of, set_attention, with_attention
from expertmesh.config.errors import InputError
from expertmesh.distributed.collectives import all_gather, all_to_all_even
from expertmesh.distributed.layout import Layout
from expertmesh.distributed.mesh import Mesh
from expertmesh.introspection.attention import (
    RegistryCall,
    along_the_sequence,
    attributes_read,
    mixes_streams,
    registry_call,
)
from expertmesh.introspection.small_copies import TensorCut, TokenProof, state_heads
from expertmesh.parallel.tensor_plan import TensorPart, line_of, mixers, part_by_heads
from expertmesh.state.model_view import attach_to_module, module_state

PREFIX = "expertmesh_context_"
# Arguments that attention classes may pass to the registry's function: numbers, or tensors that the exchange cuts.
_KEYWORDS = {"attention_mask", "dropout", "scaling", "sliding_window", "softcap", "is_causal", "s_aux", "position_ids"}
# Attributes that a family's eager function may read of its module: equal on all ranks, or replaced in the exchange.
_ATTRIBUTES = {"num_key_value_groups", "training", "sinks", "head_dim", "config", "scaling", "is_causal", "layer_idx"}
# Tensors for full rows, passed to the backend unchanged (sample boundaries of a packed batch, for flash attention).
_FULL_ROWS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}


# Modules by name, of which each family's class has attributes of its own, and their calls of the registry.
_Calls = dict[str, tuple[Any, RegistryCall]]


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """The work of cp in a model."""

    cp: int = 1
    """The number of ranks that share a row."""
    exchanged: tuple[str, ...] = ()
    """Names of the attention modules that exchange positions for heads."""
    gathered: tuple[TensorPart, ...] = ()
    """The parts that gather full rows."""
    backends: tuple[str, ...] = ()
    """The attention backends of the modules, by transformers' names, for the printed plan."""

    def within(self, blocks: Sequence[str]) -> "ContextPlan":
        """Return the plan restricted to `blocks`, those of this rank's pipeline stages."""
        exchanged = tuple(name for name in self.exchanged if is_inside(name, *blocks))
        gathered = tuple(part for part in self.gathered if is_inside(part.name, *blocks))
        return replace(self, exchanged=exchanged, gathered=gathered)

    def gathers(self, block: str) -> bool:
        """Return whether the attention of a block gets full rows, and so rotary tables of all positions."""
        return any(is_inside(part.name, block) for part in self.gathered)

    def lines(self) -> Iterator[str]:
        """Yield the lines to print before training; equal parts of different blocks share a line."""
        if self.cp > 1:
            shared = f"{self.cp} ranks share rows: each has 1/{self.cp} of the positions"
            heads = f", and for attention ({', '.join(self.backends)}) whole rows of 1/{self.cp} of the heads"
            yield shared + (heads if self.exchanged else "")
        for text, count in Counter(map(line_of, self.gathered)).items():
            yield f"{count} × {text}, of whole rows"


def context_plan(model: nn.Module, anatomy: Anatomy, layout: Layout) -> ContextPlan:
    """Plan cp for `model`.

    Raises:
        InputError: positions may be mixed in a place that is not recognised, or cp does not divide the heads.

    Collectives: none.
    """
    if layout.cp == 1:
        return ContextPlan()
    blocks, tokens = decoder_blocks(anatomy), TokenProof(model, anatomy)
    where = f"parallel.cp {layout.cp}: {model.config.model_type}"  # type: ignore[union-attr]
    found = {block: mixers(model, block) for block in blocks}
    for block, names in found.items():
        if not names and not _is_feed_forward(model, anatomy, block):
            _refuse(
                f"{where} has no module in {block} that is recognised as attention, so what mixes its positions is not "
                "known",
                "layout.attention-not-recognised",
            )
        if outside := _outside(model, anatomy, tokens, block, names):
            name, why = outside
            _refuse(f"{where} may look along the sequence by itself in {name} ({why})", "layout.mixes-positions")
    attention = {name: calls for names in found.values() for name in names if (calls := _calls(model, name))}
    parts = [part for name in attention for part in model.get_submodule(name).modules()]
    # Code that looks along the sequence beside the registry's function has to see full rows. If one attention cannot
    # exchange, none does: they may share a configuration, and that names the backend.
    exchanged = not any(carries_state(part) or along_the_sequence(part) for part in parts) and all(
        _can_exchange(where, module, call) for calls in attention.values() for module, call in calls.values()
    )
    backends = sorted({backend_of(module.config) for calls in attention.values() for module, _ in calls.values()})
    if exchanged and attention:
        _refuse_heads(where, [module for calls in attention.values() for module, _ in calls.values()], layout)
        _refuse_outside(where, model, blocks, attention)
    known: dict[Hashable, TensorPart] = {}
    gathered = [
        _gathered_part(model, anatomy, name, layout, known)
        for names in found.values()
        for name in names
        if not (exchanged and name in attention)
    ]
    exchanging = tuple(inner for calls in attention.values() for inner in calls) if exchanged else ()
    return ContextPlan(layout.cp, exchanging, tuple(gathered), tuple(backends))


def _is_feed_forward(model: Any, anatomy: Anatomy, block: str) -> bool:
    """Return whether the configuration declares a block without attention: it holds experts, or is a dense MLP."""
    kinds = getattr(model.config.get_text_config(), "layers_block_type", None) or ()
    number = int(block.rpartition(".")[2])
    holds_experts = any(is_inside(spec.name, block) for spec in anatomy.experts)
    return bool(kinds) and (holds_experts or kinds[number] in ("mlp", "moe"))


def _refuse(problem: str, key: str) -> NoReturn:
    raise InputError(f"{problem}; set parallel.cp to 1", key=key)


def _calls(model: nn.Module, mixer: str) -> _Calls:
    """Return the modules of a mixer whose code calls transformers' attention registry, by name."""
    named = model.get_submodule(mixer).named_modules(prefix=mixer)
    return {name: (module, call) for name, module in named if (call := registry_call(module)) is not None}


def _outside(
    model: Any, anatomy: Anatomy, tokens: TokenProof, block: str, names: Sequence[str]
) -> tuple[str, str] | None:
    """Find the first module of a block, outside of its mixers and experts, that may look along the sequence.

    Returns:
        (its name, how it looks along the sequence); None if every module is proven to compute each token separately.
    """
    for name, module in model.get_submodule(block).named_modules(prefix=block):
        if is_within(name, *names, *(spec.name for spec in anatomy.experts)):
            continue
        if carries_state(module):
            return name, "it carries state"
        used = along_the_sequence(module)
        if used is not None and not (name == block and mixes_streams(model, block)) and not tokens.holds(name):
            return name, used
    return None


def _can_exchange(where: str, module: Any, call: RegistryCall) -> bool:
    """Return whether cp can cut all that an attention passes to its backend.

    Raises:
        InputError: the backend is not in transformers' registry.
    """
    backend = backend_of(module.config)
    if registered(call, backend) is None:
        raise InputError(
            f"{where}: model.attention {backend} is not in transformers' registry; set it to sdpa",
            key="model.unknown-attention",
        )
    eager = attributes_read(call.global_of(call.default)) if backend == "eager" else []
    return set(call.keywords) <= _KEYWORDS and set(eager) <= _ATTRIBUTES


def _refuse_heads(where: str, modules: Sequence[Any], layout: Layout) -> None:
    """Raise `InputError` unless cp divides the query heads that tp leaves a rank."""
    counts = []
    for module in modules:
        # By the names that modules and configurations use; the exchange checks the real number again.
        named = (getattr(module, name, None) for name in ("num_heads", "num_attention_heads", "n_heads"))
        counts.append(next((n for n in named if isinstance(n, int)), module.config.num_attention_heads))
    heads = math.gcd(*counts)
    per_rank = heads // layout.tp
    if per_rank % layout.cp:
        valid = [size for size in range(1, per_rank + 1) if per_rank % size == 0]
        nearest = min(valid, key=lambda size: (abs(size - layout.cp), size))
        shared = f" (of {heads}, over tp {layout.tp})" if layout.tp > 1 else ""
        raise InputError(
            f"{where} has {per_rank} query heads{shared}, which cp does not divide; valid values: "
            f"{', '.join(map(str, valid))}; the nearest is {nearest}",
            key="layout.cp-divides-heads",
        )


def _refuse_outside(where: str, model: nn.Module, blocks: Sequence[str], attention: Mapping[str, _Calls]) -> None:
    """Raise `InputError` if an attention outside of the blocks shares a configuration with one inside."""
    configs = {id(module.config) for calls in attention.values() for module, _ in calls.values()}
    for name, module in model.named_modules():
        if not is_inside(name, *blocks) and registry_call(module) is not None and id(module.config) in configs:
            _refuse(
                f"{where} attends outside its decoder blocks ({name}), which cp does not split",
                "layout.cp-attention-outside-blocks",
            )


def _gathered_part(
    model: nn.Module, anatomy: Anatomy, name: str, layout: Layout, known: dict[Hashable, TensorPart]
) -> TensorPart:
    """Plan the share of each rank in a layer that gets full rows.

    Args:
        known: cache of results, by class and parameter shapes.
    """
    module = model.get_submodule(name)
    kind = (type(module), tuple((leaf, parameter.shape) for leaf, parameter in module.named_parameters()))
    if kind not in known:
        if _calls(model, name):
            part = part_by_heads(model, anatomy, name, layout.cp * layout.tp)
            dims = part.parameter_dims(module) if part.is_split else {}
            known[kind] = replace(part, shares={leaf: TensorCut(dim) for leaf, dim in dims.items()})
        elif isinstance(heads := state_heads(module, layout.cp), str):
            known[kind] = TensorPart(name, True, why_unsplit=heads)
        else:
            cut = dict.fromkeys(leaf.rpartition(".")[0] for leaf in heads.shares if leaf.endswith(".weight"))
            columns = tuple(leaf for leaf in cut if leaf != heads.rows)
            shares, counts = heads.shares, heads.counts
            known[kind] = TensorPart(
                name, True, columns, rows=heads.rows, norms=heads.norms, shares=shares, counts=counts
            )
    return replace(known[kind], name=name)


def backend_of(config: Any) -> str:
    """Return the attention backend of a configuration, by transformers' name."""
    name: str = attention_of(config) or "eager"
    return name.removeprefix(PREFIX)


def registered(call: RegistryCall, backend: str) -> Callable[..., Any] | None:
    """Return the function of a backend from where the family's code looks it up; None if there is none."""
    mapping = call.global_of(call.mapping)
    if backend != "eager" and backend not in mapping:
        return None
    function: Callable[..., Any] = mapping.get_interface(backend, call.global_of(call.default))
    return function


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
    """Make the planned attention layers of `blocks` exchange positions for heads; `shard_model` calls it.

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
        ALL_ATTENTION_FUNCTIONS.register(PREFIX + backend, _attention)
        if backend in ALL_MASK_ATTENTION_FUNCTIONS:
            # Attention sees full rows, so the backend's mask function serves unchanged.
            masks = ALL_MASK_ATTENTION_FUNCTIONS
            masks.register(PREFIX + backend, masks[backend])
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
    """Return the exchange of a module. Raises `InputError` for one outside of the decoder's blocks."""
    context = module_state(module).context_attention
    if context is None:
        raise InputError(
            f"parallel.cp: {type(module).__name__} attends with the configuration of a model that is split over cp but "
            "is no part of its decoder blocks; give each model a configuration of its own",
            key="layout.cp-shared-config",
        )
    return context


def _attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Exchange positions for heads, attend to full rows, and exchange back; the function in transformers' registry.

    Args:
        query: `[B, N, s, D]`.
        key, value: `[B, G, s, D]`.
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
    rows_of_heads = _positions_to_heads((query, key, value), context.group)
    rows, _, length, _ = rows_of_heads[0].shape
    cut = partial(_local_heads, context, heads * cp, rank * heads, heads)
    # The module's configuration names this exchange; the backend has to read its real name there.
    config = _ModuleView(module.config, **with_attention(context.backend))
    seen = _ModuleView(module, num_key_value_groups=groups, config=config)
    if isinstance(sinks := getattr(module, "sinks", None), torch.Tensor):
        seen.changes["sinks"] = cut("sinks", sinks)
    for name, option in list(options.items()):
        if name == "s_aux" and option is not None:
            options[name] = cut(name, option)
        elif name == "position_ids" and option is not None:
            # Only flash attention reads them, to find the samples of a packed row, so it needs those of the full row.
            options[name] = None
            if "flash" in context.backend:
                options[name] = all_gather(option.movedim(-1, 0), context.group).movedim(0, -1).contiguous()
        elif isinstance(option, torch.Tensor) and name not in _FULL_ROWS:
            raise InputError(
                f"parallel.cp: {context.name} attends with {name}, which cp cannot split",
                key="layout.cp-attention-arguments",
            )
    if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 4:
        _check_mask(context.name, attention_mask, length)
    out = context.function(seen, *rows_of_heads, attention_mask, **options)[0]
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
    group_on_rank = math.gcd(heads, groups)
    return heads, groups // group_on_rank, group_on_rank


class _ModuleView:
    """A view of a module or configuration with the attributes in `changes` replaced, for the backend of one rank."""

    def __init__(self, original: Any, **changes: Any) -> None:
        self.original, self.changes = original, changes

    def __getattr__(self, name: str) -> Any:
        changes: dict[str, Any] = self.__dict__["changes"]
        return changes[name] if name in changes else getattr(self.__dict__["original"], name)


def _local_heads(
    context: ContextAttention, all_heads: int, first: int, heads: int, name: str, tensor: torch.Tensor
) -> torch.Tensor:
    """Return the local part `[heads]` of a tensor with one value for each query head."""
    if tensor.numel() != all_heads:
        # The name is read here alone: code that was compiled with it would be of one layer, and compiled for each.
        raise InputError(
            f"parallel.cp: {name} {tuple(tensor.shape)} of {context.name} is not one value for each query head",
            key="layout.cp-attention-arguments",
        )
    return tensor.reshape(-1)[first : first + heads]


def _check_mask(name: str, mask: torch.Tensor, length: int) -> None:
    """Raise `InputError` unless a mask `[B, heads, queries, keys]` is of full rows, and the same for all heads."""
    heads, queries, keys = mask.shape[1:]
    # Not `queries in (1, length)`: torch.compile takes symbolic lengths that are equal for different ones there.
    if heads != 1 or (queries != 1 and queries != length) or keys != length:
        raise InputError(
            f"parallel.cp: {name} attends with a mask {tuple(mask.shape)}, not with one for {length} positions and "
            "all heads; set parallel.cp to 1",
            key="layout.cp-attention-arguments",
        )


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
