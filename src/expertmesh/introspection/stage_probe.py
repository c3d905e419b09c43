"""Shows where a decoder can be cut between its blocks: one forward on meta, watched operation by operation.

Between stages travels the hidden state and nothing else; what else a block gets (masks, rotary tables) each stage
computes again from the batch. So where a block reads what an earlier one has made, other than through its hidden state
(in its call, in a container that blocks write to, kept in a module), there is no cut between the two; what the
embedding has made can be read by no block. Values are followed through every operation, integers included. The same run
tells which parameters around the blocks are used before them and which behind, and what the hidden state looks like.
Needs no weights; no communication.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from expertmesh.anatomy import ExpertsSpec, is_inside
from expertmesh.compat import TorchDispatchMode, tree_leaves
from expertmesh.config.errors import InputError
from expertmesh.experts.layer import sorted_forward
from expertmesh.state.patching import forwards_replaced

ROWS, LENGTH = 2, 8  # of a forward of text
_BEFORE = -1  # where a value comes from: before the blocks, block number n, or behind the last
# What takes shape and dtype of a tensor and none of its values.
_LIKE = frozenset(f"{kind}_like" for kind in ("empty", "zeros", "ones", "full")) | frozenset(
    f"new_{kind}" for kind in ("empty", "zeros", "ones", "full")
)


@dataclass(frozen=True, slots=True)
class Decoder:
    """What the run has shown: parameters outside of the blocks, by name, that are used before them (those that text
    never uses are among them) and behind them, and what the hidden state between blocks has beside
    rows and positions (its last dim and maybe others). `items`: how many things a block returns, the hidden state
    first; 0 where it is returned alone. `joined`: the numbers of blocks that belong to the stage of the block before,
    with what each reads, in words. `unused`: what text never uses and belongs to a module around the blocks.
    """

    before: frozenset[str]
    behind: frozenset[str]
    hidden: tuple[int, ...]
    unused: frozenset[str] = frozenset()
    items: int = 0
    joined: Mapping[int, str] = field(default_factory=dict)

    @property
    def hands_on_hidden_alone(self) -> bool:
        """Whether every block gives the next one its hidden state and nothing else."""
        return self.items == 0 and not self.joined


class _Carried(Exception):
    """A block read what the embedding has made, or does not hand on its hidden state as it is; or there is no cut."""


def probe(twin: nn.Module, blocks: Sequence[str], experts: Sequence[ExpertsSpec]) -> Decoder:
    """Run `twin`, a model on meta, watched; it is left as it was. `blocks` are its decoder's, in order.

    Raises `InputError` naming the block that needs more than its hidden state, or why that cannot be known.
    """
    family = twin.config.model_type  # type: ignore[union-attr]
    watch = _Watch(twin, blocks)
    try:
        with stand_ins_for_experts(twin, experts), watch.hooks(), watch:
            forward_of_text(twin)
        if watch.joined and len(watch.joined) == len(blocks) - 1:
            raise _Carried(next(iter(watch.joined.values())))
    except _Carried as carried:
        raise InputError(
            f"parallel.pp: {family} cannot be cut into stages: {carried}; set parallel.pp to 1",
            key="layout.pp-carries-more-than-hidden-state",
        ) from None
    except Exception as cause:
        # The family's code on tensors without values: any exception means that nothing is known.
        raise InputError(
            f"parallel.pp: {family} cannot be run without values ({type(cause).__name__}: {str(cause)[:160]}), so it "
            "is not known whether its blocks need more than the hidden state; set parallel.pp to 1",
            key="layout.pp-not-provable",
        ) from cause
    return watch.decoder()


def rehearse(twin: nn.Module, experts: Sequence[ExpertsSpec] = ()) -> None:
    """Run a model on meta that has placeholders wherever a stage has them, or may have them. Raises `InputError` if it
    cannot. `experts` are those that are no placeholders.
    """
    family = twin.config.model_type  # type: ignore[union-attr]
    try:
        with stand_ins_for_experts(twin, experts), WithoutValues():
            forward_of_text(twin)
    except Exception as cause:
        # The family's own forward asks a module for more than to be called.
        raise InputError(
            f"parallel.pp: {family} cannot be cut into stages: its forward does not run without the modules of another "
            f"stage ({type(cause).__name__}: {str(cause)[:160]}); set parallel.pp to 1",
            key="layout.pp-needs-other-stage",
        ) from cause


@contextmanager
def stand_ins_for_experts(twin: nn.Module, experts: Sequence[ExpertsSpec]) -> Iterator[None]:
    """What they compute is no question on meta, and tokens cannot be sorted without values."""
    with forwards_replaced(forwards_of_experts(twin, experts, lambda module: _weighted, _one_row)):
        yield


@contextmanager
def handed_on(twin: nn.Module, blocks: Sequence[str], repeated: Collection[str]) -> Iterator[None]:
    """Those of `blocks` that are `repeated` hand on their hidden state as it is; they run where blocks return more."""
    returns_more = False

    def run(forward: Callable[..., Any], is_repeated: bool, *args: Any, **kwargs: Any) -> Any:
        nonlocal returns_more
        if is_repeated and not returns_more:
            return args[0] if args else kwargs["hidden_states"]
        output = forward(*args, **kwargs)
        returns_more = not isinstance(output, torch.Tensor)
        return output

    modules = {name: twin.get_submodule(name) for name in blocks}
    with forwards_replaced({block: partial(run, block.forward, name in repeated) for name, block in modules.items()}):
        yield


def forwards_of_experts(
    model: nn.Module,
    experts: Sequence[ExpertsSpec],
    pairs: Callable[[nn.Module], Callable[..., Any]],
    dense: Callable[..., Any] | None = None,
) -> dict[nn.Module, Callable[..., Any]]:
    """By experts module, another forward: what `pairs` gives for the module, called with tokens, choices and weights,
    or `dense`, called with rows. The router of a mixture that sorts its rows runs as ever.
    """
    found: dict[nn.Module, Callable[..., Any]] = {}
    for spec in experts:
        module = model.get_submodule(spec.name)
        forward = pairs(module) if dense is None or spec.call != "dense" else dense
        found[module] = partial(sorted_forward, module, spec, forward) if spec.call == "sorted" else forward
    return found


def forward_of_text(twin: nn.Module) -> None:
    """A few rows through a model on meta. Within `WithoutValues`."""
    training = twin.training
    twin.eval()  # dropout wants to know which tokens these are
    try:
        with torch.no_grad(), EvenCounts():
            twin(input_ids=torch.zeros(ROWS, LENGTH, dtype=torch.int64, device="meta"), use_cache=False)
    finally:
        twin.train(training)


def _weighted(hidden_states: torch.Tensor, index_TK: torch.Tensor, weight_TK: torch.Tensor) -> torch.Tensor:
    return hidden_states * (index_TK * weight_TK).sum().to(hidden_states.dtype)


def _one_row(hidden_states: torch.Tensor) -> torch.Tensor:
    return hidden_states * 1


class EvenCounts(TorchFunctionMode):
    """On meta, tells a router that asks how many pairs its last choice has for each expert: as even as can be."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.pairs = 0, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.tolist and args[0].is_meta and self.pairs and args[0].shape == (self.experts,):
            each, left = divmod(self.pairs, self.experts)
            return [each + (expert < left) for expert in range(self.experts)]
        result = func(*args, **kwargs)
        if func in (torch.topk, torch.Tensor.topk):
            scores, dim = args[0] if args else kwargs["input"], kwargs.get("dim", args[2] if len(args) > 2 else -1)
            self.experts, self.pairs = scores.shape[dim], result.indices.numel()
        return result


class WithoutValues(TorchDispatchMode):
    """Answers the few questions about values that are asked on the way to a mask, or to the tokens that one shows."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return args[0].dtype == torch.bool or 1  # such as "all rows are one sample"
        if func is torch.ops.aten.nonzero.default:
            return _all_places(args[0])
        if func is torch.ops.aten.index.Tensor:
            args = (args[0], [place for index in args[1] for place in _places(index)])
        return func(*args, **(kwargs or {}))


def _places(index: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
    """A mask as the indices of what it keeps: all."""
    return _all_places(index).unbind(1) if index is not None and index.dtype == torch.bool else [index]


def _all_places(mask: torch.Tensor) -> torch.Tensor:
    return mask.new_empty((mask.numel(), mask.dim()), dtype=torch.int64)


class _Watch(WithoutValues):
    """Labels every value with where it comes from, and notes what an operation in a block reads of another's."""

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        super().__init__()
        self.model, self.blocks = model, blocks
        self.at = _BEFORE
        self.hidden: tuple[int, ...] = ()
        self.handed_on: torch.Tensor | None = None
        self.items: set[int] = set()
        self.joined: dict[int, str] = {}
        self.labels: Any = WeakIdKeyDictionary()
        inside = set()
        for number, name in enumerate(blocks):
            for parameter in model.get_submodule(name).parameters():
                if parameter in self.labels:
                    raise InputError(
                        f"parallel.pp: {name} shares a parameter with another block; set parallel.pp to 1",
                        key="layout.pp-shared-parameter",
                    )
                self.labels[parameter] = number
                inside.add(id(parameter))
        # Under each of their names: a tied weight is used on both sides.
        self.outside = {n: p for n, p in model.named_parameters(remove_duplicate=False) if id(p) not in inside}
        self.used: dict[int, set[int]] = {id(parameter): set() for parameter in self.outside.values()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func is torch.ops.aten._local_scalar_dense.default or func.__name__.partition(".")[0] in _LIKE:
            return super().__torch_dispatch__(func, types, args, kwargs)
        for leaf in inputs:
            if id(leaf) in self.used:
                self.used[id(leaf)].add(self.at)
                self.labels[leaf] = self.at
        labels = {self.labels[leaf] for leaf in inputs if leaf in self.labels}
        self._join(labels, func.__name__)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if labels:
            changed = inputs[:1] if func._schema.is_mutable else []
            for leaf in [*tree_leaves(out), *changed]:
                if isinstance(leaf, torch.Tensor):
                    self.labels[leaf] = self.at
        return out

    @contextmanager
    def hooks(self) -> Iterator[None]:
        with ExitStack() as stack:
            for number, name in enumerate(self.blocks):
                block = self.model.get_submodule(name)
                enter, leave = partial(self._enter, number), partial(self._leave, number)
                stack.enter_context(block.register_forward_pre_hook(enter, with_kwargs=True))
                stack.enter_context(block.register_forward_hook(leave))
            yield

    def decoder(self) -> Decoder:
        behind = len(self.blocks)
        if self.at != behind:
            raise self._refusal(f"{self.blocks[self.at + 1]} was not run in a forward of text")
        if len(self.items) > 1:
            raise self._refusal("not all of its blocks return alike")
        names: dict[int, set[str]] = {_BEFORE: set(), behind: set()}
        model: Any = self.model
        modules = {id(module): name for name, module in model.named_modules()}
        embedding, head = (modules.get(id(m)) for m in (model.get_input_embeddings(), model.get_output_embeddings()))
        for name, parameter in self.outside.items():
            uses = self.used[id(parameter)]
            if not uses <= {_BEFORE, behind}:
                raise self._refusal(f"{name} is used between blocks")
            if len(uses) == 2:
                # Tied: which of its modules is which is known of embedding and head alone.
                if (parent := name.rpartition(".")[0]) not in (embedding, head):
                    raise self._refusal(f"{name} is used before the blocks and behind them")
                uses = {_BEFORE} if parent == embedding else {behind}
            # What text never uses (a vision tower) stays with the embedding.
            names[min(uses, default=_BEFORE)].add(name)
        around = {name for name, _ in model.named_modules() if is_inside(self.blocks[0], name)} | {""}
        unused = frozenset(
            name for name, p in self.outside.items() if not self.used[id(p)] and name.rpartition(".")[0] in around
        )
        before, after = frozenset(names[_BEFORE]), frozenset(names[behind])
        return Decoder(before, after, self.hidden, unused, self.items.pop(), dict(sorted(self.joined.items())))

    def _refusal(self, why: str) -> InputError:
        family = self.model.config.model_type  # type: ignore[union-attr]
        return InputError(
            f"parallel.pp: {family} cannot be cut into stages: {why}; set parallel.pp to 1", key="layout.pp-cannot-cut"
        )

    def _join(self, labels: set[int], how: str) -> None:
        """What runs now reads values with `labels`: it belongs to the stage of the blocks that made them."""
        foreign = sorted(labels - {self.at})
        if self.at == _BEFORE or not foreign:
            return
        reader = self.blocks[self.at] if self.at < len(self.blocks) else "what follows the last block"
        if foreign[0] == _BEFORE:
            raise _Carried(f"{reader} reads what the embedding has computed, beside the hidden state (by {how})")
        why = f"{reader} reads what {self.blocks[foreign[0]]} has computed, beside the hidden state (by {how})"
        for number in range(foreign[0] + 1, min(self.at + 1, len(self.blocks))):
            self.joined.setdefault(number, why)

    def _enter(self, number: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        if self.at != number + _BEFORE:
            raise _Carried(f"{self.blocks[number]} does not run after the block before it")
        if number and hidden is not self.handed_on:
            raise _Carried(f"{self.blocks[number]} does not get the hidden state as {self.blocks[self.at]} returns it")
        self.at = number
        fresh = self._fresh(hidden)
        return ((fresh, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": fresh})

    def _leave(self, number: int, block: nn.Module, args: Any, output: Any) -> Any:
        items = list(output) if type(output) in (tuple, list) else []
        hidden = items[0] if items else output
        if not isinstance(hidden, torch.Tensor):
            raise _Carried(f"{self.blocks[number]} returns {type(hidden).__name__}, not the hidden state first")
        if hidden.shape[:2] != (ROWS, LENGTH) or self.hidden not in ((), tuple(hidden.shape[2:])):
            raise _Carried(f"{self.blocks[number]} gives a hidden state of {list(hidden.shape)}")
        self.hidden = tuple(hidden.shape[2:])
        self.items.add(len(items))
        if number == len(self.blocks) - 1:
            self.at = number + 1
        self.handed_on = self._fresh(hidden)
        return type(output)([self.handed_on, *items[1:]]) if items else self.handed_on

    def _fresh(self, hidden: torch.Tensor) -> torch.Tensor:
        fresh = torch.empty_like(hidden)
        self.labels[fresh] = self.at
        return fresh
