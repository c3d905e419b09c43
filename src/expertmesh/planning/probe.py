"""What a block's own code saves and computes, found by running it on meta: no weights, no formulas per family.

The blocks run forward and backward on meta tensors, their experts replaced by nothing (our own expert layer has exact
formulas, blocks.py) and attention by what a fused kernel saves. So a norm that works in fp32, a latent attention or a
shared expert costs what its code costs. One block of each kind is run; figures are linear in the micro-batch.

`UsageTracker` counts what a piece of training holds and sends: bytes of live tensors, their peak, and bytes of each
collective. The probe uses it (a block of a model on meta), the simulation (fake tensors) and the measurements on real
ranks, so that all three count the same. Sizes are those of storages, each counted once while anything refers to it;
what a kernel allocates inside itself is not seen. Collectives are counted where torch hands them to c10d.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from expertmesh.anatomy import Anatomy, is_inside
from expertmesh.compat import (
    FakeTensor,
    TorchDispatchMode,
    attention_of,
    group_of,
    set_attention,
    storage_key,
    tree_leaves,
    varlen_operation,
)
from expertmesh.config.errors import InputError
from expertmesh.experts.lora_state import number_rows
from expertmesh.experts.micro_batch import PackedSamples, packed_samples
from expertmesh.introspection.attention import Separation, decoder_of
from expertmesh.introspection.meta_run import EvenCounts, forwards_of_experts
from expertmesh.parallel import packing
from expertmesh.planning.model_figures import BlockFigures
from expertmesh.state.patching import forwards_replaced
from expertmesh.step.base_model import base_name

# c10d operations by kind. All-to-all counts its input (rows to itself included), the others the larger side.
_KINDS = {
    "all_to_all": ("alltoall_base_", "alltoall_", "all_to_all_single"),
    "all_gather": ("_allgather_base_", "allgather_", "all_gather_into_tensor", "all_gather_into_tensor_out"),
    "reduce_scatter": ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor"),
    "all_reduce": ("allreduce_", "all_reduce", "all_reduce_"),
    "broadcast": ("broadcast_", "broadcast"),
    "send": ("send", "isend"),
    "receive": ("recv_", "irecv"),
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}
_SENDS_NOTHING = ("wait_tensor", "barrier", "_wrap_tensor_autograd")
# Wrappers like DTensor and AsyncCollectiveTensor have no storage of their own.
_WITH_STORAGE = (torch.Tensor, torch.nn.Parameter, FakeTensor)
# What keeps samples of packed rows apart: an explicit mask, or attention that knows them (parallel/packing.py).
Packed = Literal["no", "by masks", "by samples"]


@dataclass(slots=True)
class CollectiveCount:
    """Calls and bytes of one kind of collective over one group."""

    calls: int = 0
    bytes: int = 0
    """Bytes of all calls together."""


class UsageTracker(TorchDispatchMode):
    """Under it, `live` is what tensors made since it began hold (and those given to `include`), `peak` the most of it.

    `sent[group][kind]` counts collectives; groups go by their names. `operations` counts what is more than a view:
    `products` are the FLOPs of matrix products among them, and `moved` the bytes that the others read and write. While
    it `is_off`, nothing counts. Not to be nested.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.operations = 0
        self.products = 0
        self.moved = 0
        self.is_off = False
        self.sent: dict[str, dict[str, CollectiveCount]] = defaultdict(lambda: defaultdict(CollectiveCount))
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[Any]] = {}

    def __enter__(self) -> Self:
        # FSDP2 frees and regrows parameters by resizing storages, which no dispatch sees.
        self._resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = self._resize(storage, size)
            self._count_storage(storage)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*exception)

    def include(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count these as well, from now on."""
        for tensor in tensors:
            self._count_storage(tensor.untyped_storage())

    def reset_peak(self) -> None:
        self.peak = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_off:
            return func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        is_collective = namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd")
        is_collective &= name not in _SENDS_NOTHING
        if is_collective and name not in _KIND_OF:
            raise RuntimeError(f"the tracker does not know the c10d operation {name}, so its bytes would be missed")
        result = func(*args, **(kwargs or {}))
        if is_collective:
            self._count_collective(name, args, result)
        with torch.no_grad():
            # A DTensor makes its local tensor below the tracker: gradients that FSDP2 accumulates.
            leaves = [leaf.to_local() if isinstance(leaf, DTensor) else leaf for leaf in tree_leaves(result)]
        outputs = [leaf for leaf in leaves if type(leaf) in _WITH_STORAGE]
        for output in outputs:
            self._count_storage(output.untyped_storage())
        if (flops := flop_registry.get(func.overloadpacket)) is not None:
            self.products += flops(*args, **(kwargs or {}), out_val=result)
        self._count_operation(func, args, outputs)
        return result

    def _count_operation(self, func: Any, args: Any, outputs: list[torch.Tensor]) -> None:
        inputs = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        read = {storage_key(tensor.untyped_storage()) for tensor in inputs if type(tensor) in _WITH_STORAGE}
        makes = any(storage_key(tensor.untyped_storage()) not in read for tensor in outputs)
        if makes or func._schema.is_mutable:
            self.operations += 1
            if func.overloadpacket not in flop_registry:
                self.moved += sum(tensor.nbytes for tensor in (*inputs, *outputs))

    def _count_storage(self, storage: torch.UntypedStorage) -> None:
        key, size = storage_key(storage), storage.nbytes()

        def forget() -> None:
            self.live -= self._sizes.pop(key, 0)
            self._references.pop(key, None)

        if key not in self._sizes:
            self._sizes[key] = 0
            self._references[key] = weakref.ref(storage, lambda _: forget())
        self.live += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.live)

    def _count_collective(self, name: str, args: Any, result: Any) -> None:
        # A functional operation returns what c10d's own is given to write into.
        sizes = [sum(t.nbytes for t in tree_leaves(arg) if isinstance(t, torch.Tensor)) for arg in (*args, result)]
        boxed = next((arg for arg in args if group_of(arg)), None)
        # A functional operation ends with the group's name; before it may stand that of the reduction.
        group = next((arg for arg in reversed(args) if isinstance(arg, str)), "")
        group = group if boxed is None else str(dist.ProcessGroup.unbox(boxed).group_name)
        entry = self.sent[group][_KIND_OF[name]]
        entry.calls += 1
        if _KIND_OF[name] == "all_to_all":
            entry.bytes += sizes[0 if name == "all_to_all_single" else 1]
        else:
            entry.bytes += max(sizes)


class NotProbed(InputError):
    """A family whose blocks cannot be run on meta, or of which too little is known; there is no plan for it."""


def not_probed(model: nn.Module, why: str) -> NotProbed:
    return NotProbed(f"{model.config.model_type}: {why}", key="plan.model-not-probed")  # type: ignore[union-attr]


@dataclass(frozen=True, slots=True)
class Probed:
    """The figures of a model's blocks and of what is around them, for one sequence."""

    blocks: list[BlockFigures]
    """Figures of each measured block."""
    outside: int
    """Bytes that stay of what is around the blocks, the base model's output left out."""
    tables: int
    """The part of `outside` that exists before the first block (rotary tables), of full rows."""
    first_saves_less: int
    """Bytes that the first block saves less if nothing before it trains (adapters)."""


def probe(
    model: nn.Module,
    anatomy: Anatomy,
    measured: Sequence[str],
    length: int,
    *,
    packed: Packed,
    latents: Collection[str] = (),
    whole: Collection[str] = (),
) -> Probed:
    """Run `model` (on meta, in the compute dtype, not sharded) on one and two sequences of `length` tokens.

    Args:
        measured: First block of each kind, in the model's order.
        packed: What separates the samples of packed rows.
        latents: Modules that every rank of tp computes in full.
        whole: Modules that every rank of cp computes for full rows.

    Raises:
        NotProbed: The family's code needs values, which meta tensors do not have.
    """

    def nothing(experts: nn.Module) -> Callable[..., Any]:
        trained = [parameter for parameter in experts.parameters() if parameter.requires_grad]
        return partial(_NoExperts.apply, trained[0] if trained else None)  # its result has a gradient if they train

    skipped = forwards_of_experts(model, anatomy.experts, nothing)
    embedding = next(model.get_input_embeddings().parameters())  # type: ignore[operator]
    try:
        with forwards_replaced(skipped):
            run = partial(_run, model, anatomy, measured, packed=packed, latents=latents, whole=whole)
            one, two = (run((rows, length)) for rows in (1, 2))
            first = one if embedding.requires_grad else run((1, length), embeds=True)
    except Exception as error:
        # Another package's code on tensors without values may raise anything; there is no plan for it then.
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise not_probed(model, f"its code does not run without values ({cause})") from error
    figures = []
    for name in measured:
        if (single := one.seen.get(name)) is None:
            figures.append(BlockFigures())  # of a tower that text does not come to
            continue
        grows = max(0, two.seen[name].backward - single.backward)
        figures.append(replace(single, backward=grows, gradients=max(0, single.backward - grows)))
    return Probed(figures, one.outside, one.tables, one.first - first.first)


def kept_apart(model: Any, anatomy: Anatomy, device_type: str, dtype: torch.dtype) -> Packed:
    """Return how `train` separates the samples of packed rows; "no" if transformers does, which costs nothing."""
    if packing.varlen_refusal(model, Separation.of(model, anatomy), device_type, dtype) is None:
        return "by samples"
    return "no" if attention_of(model.config) == "flash_attention_2" else "by masks"


class _Attention(TorchFunctionMode):
    """Replaces fused attention and counts router choices; both go to the block that runs, `current`."""

    def __init__(self) -> None:
        super().__init__()
        self.current = BlockFigures()
        self._value_size = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.__bool__:
            return True  # mask functions test whether positions are those of one sample, unpadded
        if func is F.scaled_dot_product_attention:
            query, key, value, *rest = args
            mask = rest[0] if rest else kwargs.get("attn_mask")
            return self._attend(query, key, value, mask, key.shape[2], value.shape[-1])
        if func is varlen_operation:
            query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in args[:3])
            out = self._attend(query, key, value, None, args[6], self._value_size)
            return out.squeeze(0).transpose(0, 1), None, None
        result = func(*args, **kwargs)
        if func in (torch.topk, torch.Tensor.topk):
            self.current.choices += result.indices.nbytes
        return result

    def _attend(self, query: Any, key: Any, value: Any, mask: Any, length: int, value_size: int) -> torch.Tensor:
        """Attend each query to `length` positions; `value_size` is that of values before they were padded."""
        batch, heads, rows, width = query.shape
        products, element = 2 * batch * heads * rows * length, query.element_size()
        out: torch.Tensor = FusedAttention.apply(query, key, value, mask)
        seen, attention, padded = self.current, products * (width + value_size), products * (width + value.shape[-1])
        seen.attention += attention
        seen.hidden += (padded if mask is not None else padded // 2) - attention // 2  # under a mask all is computed
        seen.attended += out.nbytes
        seen.queries += query.nbytes + batch * heads * rows * value_size * element
        seen.keys += (key.numel() // width * (width + value_size)) * element // key.shape[1]
        seen.heads = heads
        seen.normalisers += batch * heads * rows * 4
        if mask is not None:
            seen.mask += mask.numel() * (element if mask.dtype == torch.bool else 0)
        return out

    @contextmanager
    def by_samples(self, decoder: nn.Module, shape: tuple[int, int]) -> Iterator[None]:
        """Let `decoder` attend as it does to packed rows on an accelerator; each row is one sample."""

        def attention(module: Any, query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
            self._value_size = value.shape[-1]
            return packing.attention(module, query, key, value, *args, **options)

        config: Any = decoder.config
        own, (rows, length) = attention_of(config), shape
        borders = [(start, start + length) for start in range(0, rows * length, length)]
        packing.attend_by_samples(decoder)
        ALL_ATTENTION_FUNCTIONS[packing.NAME] = attention
        outer = packed_samples.set(PackedSamples(borders))
        try:
            yield
        finally:
            packed_samples.reset(outer)
            del ALL_ATTENTION_FUNCTIONS[packing.NAME]  # ours alone: what is registered stays
            set_attention(config, own)


class FusedAttention(torch.autograd.Function):
    """Saves what fused kernels save: query, key, value, output, one number per row, and a mask as they convert it."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any) -> Any:
        # Laid out as [B, S, h, d], like the kernels', so that what follows need not copy it.
        batch, heads, length, _ = query.shape
        out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        rows = query.new_empty(batch, heads, length, dtype=torch.float32)
        bias = mask.to(query.dtype) if mask is not None and mask.dtype == torch.bool else mask
        ctx.save_for_backward(query, key, value, out, rows, bias)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Any) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


class _NoExperts(torch.autograd.Function):
    """An output like the tokens, and nothing saved; `trained` gets no gradient."""

    @staticmethod
    def forward(ctx: Any, trained: Any, hidden: Any, *others: Any) -> Any:
        tensors = [(t.shape, t.dtype) if isinstance(t, torch.Tensor) else None for t in (hidden, *others)]
        ctx.like = [None, *tensors]
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return tuple(
            grad.new_empty(like[0], dtype=like[1]) if needed and like else None
            for like, needed in zip(ctx.like, ctx.needs_input_grad, strict=True)
        )


def _run(
    model: nn.Module,
    anatomy: Anatomy,
    measured: Sequence[str],
    shape: tuple[int, int],
    *,
    packed: Packed,
    latents: Collection[str],
    whole: Collection[str],
    embeds: bool = False,
) -> "_BlockWatch":
    """Run one forward and backward of the base model under the tracker. `embeds`: as the embedding is, frozen.

    Every block that is not `measured` hands on the hidden state that it gets, so that those that are get the arguments
    of their place.
    """
    tracker = UsageTracker()
    watch = _BlockWatch(tracker)
    blocks = {name: model.get_submodule(name) for name in anatomy.blocks}
    replacements = {name: partial(watch.twice, name) if name in measured else watch.pass_through for name in blocks}
    forwards = {block: partial(replacements[name], block.forward) for name, block in blocks.items()}
    base: Any = model.get_submodule(base_name(model))
    inputs: dict[str, Any] = {"input_ids": torch.zeros(shape, dtype=torch.int64, device="meta")}
    if packed == "by masks":
        inputs["attention_mask"] = torch.zeros(shape[0], 1, shape[1], shape[1], dtype=torch.bool, device="meta")
    number_rows(model, torch.zeros(shape[0], dtype=torch.int64, device="meta"), shape[1], lambda number_BS: number_BS)
    with ExitStack() as hooks:
        if packed == "by samples":
            hooks.enter_context(watch.attention.by_samples(decoder_of(model, anatomy), shape))
        for spec in anatomy.experts:
            hooks.enter_context(model.get_submodule(spec.name).register_forward_hook(watch.experts_end))
        for names, begins, ends in (
            (latents, partial(watch.latent, -1), partial(watch.latent, 1)),
            (whole, partial(watch.of_full_rows, -1), partial(watch.of_full_rows, 1)),
            (anatomy.shared_experts, partial(watch.shared, True), partial(watch.shared, False)),
        ):
            for module in (model.get_submodule(name) for name in names if is_inside(name, *measured)):
                hooks.enter_context(module.register_forward_pre_hook(begins))
                hooks.enter_context(module.register_forward_hook(ends))
        if not embeds:
            embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
            hooks.enter_context(embedding.register_forward_hook(_start_graph))
        try:
            tracker.include((*model.parameters(), *model.buffers()))
            known = tracker.live
            with torch.enable_grad(), forwards_replaced(forwards), watch.attention, EvenCounts(), tracker:
                hidden = base(**inputs, use_cache=False)[0]
                end = tracker.live
                if hidden.requires_grad:
                    hidden.backward(torch.empty_like(hidden))
        finally:
            for parameter in model.parameters():
                parameter.grad = None
    watch.outside = end - known - hidden.nbytes - 2 * sum(seen.saved for seen in watch.seen.values())
    watch.tables = watch.begin - known - hidden.nbytes
    return watch


def _start_graph(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    """Give the first block's input a gradient under adapters too, as every other block's has one; a leaf would stay."""
    return output if output.requires_grad else output + torch.zeros_like(output[0, 0, 0], requires_grad=True)


class _BlockWatch:
    """Runs each measured block twice in a row and reads the tracker around the second run.

    What a block saves is visible once its output is its successor's input and its own input is free. `first` is what
    the first run of the first block saves, `begin` what is live before it.
    """

    def __init__(self, tracker: UsageTracker) -> None:
        self.tracker, self.attention = tracker, _Attention()
        self.seen: dict[str, BlockFigures] = {}
        self.first = self.begin = self.outside = self.tables = 0
        self._tuples = self._is_behind = self._is_shared = False

    def twice(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what stands for the `forward` of a block of this name."""
        start = self.tracker.live
        self.attention.current = BlockFigures()  # the first run is not counted
        if not self.seen:
            self.begin = start
        hidden = self._hidden_of(forward(*args, **kwargs))
        args, kwargs = _with_hidden(args, kwargs, None)
        if not self.seen:
            self.first = self.tracker.live - start
        seen = self.attention.current = BlockFigures()
        self.seen[name] = seen
        before = self.tracker.live
        self._work(seen, 0, -1)
        seen.products = -self.tracker.products

        def backward_ends(_: torch.Tensor) -> None:
            self._work(seen, 1, +1)
            seen.backward += self.tracker.peak

        def backward_begins(_: torch.Tensor) -> None:
            self.tracker.reset_peak()
            self._work(seen, 1, -1)
            seen.backward = -self.tracker.live

        def saving(tensor: torch.Tensor) -> torch.Tensor:
            current = self.attention.current
            current.behind += self._is_behind and not self._is_shared
            current.behind_shared += self._is_behind and self._is_shared
            return tensor.detach()

        if hidden.requires_grad:
            hidden.register_hook(backward_ends)
        held = [hidden]
        del hidden
        args, kwargs = _with_hidden(args, kwargs, held.pop())
        self._is_behind = False
        with saved_tensors_hooks(saving, lambda tensor: tensor):
            out = forward(*args, **kwargs)
        args, kwargs = _with_hidden(args, kwargs, None)
        self._work(seen, 0, +1)
        seen.products += self.tracker.products
        seen.saved = self.tracker.live - before
        if (hidden := self._hidden_of(out)).requires_grad:
            hidden.register_hook(backward_begins)
        return out

    def latent(self, sign: int, *_: Any) -> None:
        """Count the results of a module as latents: a hook before (-1) or behind (+1) it."""
        self.attention.current.latents += sign * self.tracker.live

    def of_full_rows(self, sign: int, *_: Any) -> None:
        """Count a module that every rank of cp computes for full rows: a hook before (-1) or behind (+1) it."""
        seen = self.attention.current
        now = self.tracker.products, seen.attention // 2 + seen.hidden, self.tracker.moved
        seen.whole = [count + sign * each for count, each in zip(seen.whole, now, strict=True)]

    def experts_end(self, *_: Any) -> None:
        """Note the end of routed experts: a hook behind them; `shared`: one before and behind a shared expert."""
        self._is_behind = True

    def shared(self, begins: bool, *_: Any) -> None:
        self._is_shared = begins

    def pass_through(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replace the `forward` of a block that is not measured: return the hidden state unchanged.

        Other results (chosen positions, keys) are computed, because a measured block may read them.
        """
        hidden = args[0] if args else kwargs["hidden_states"]
        if not self._tuples:
            return hidden
        self.tracker.is_off, self.attention.current = True, BlockFigures()
        with torch.no_grad():
            _, *others = forward(*args, **kwargs)
        self.tracker.is_off = False
        return (hidden, *others)

    def _hidden_of(self, output: Any) -> torch.Tensor:
        self._tuples = isinstance(output, tuple)
        hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return hidden

    def _work(self, seen: BlockFigures, direction: int, sign: int) -> None:
        """Start (-1) or stop (+1) counting what one direction does."""
        seen.moved[direction] += sign * self.tracker.moved
        seen.operations[direction] += sign * self.tracker.operations


def _with_hidden(args: Any, kwargs: Any, hidden: Any) -> tuple[Any, Any]:
    """Return the arguments of a block with other hidden states."""
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})
