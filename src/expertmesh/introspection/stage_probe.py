"""Find where a decoder can be cut between its blocks, by one forward on meta with every operation observed.

Stages send the hidden state and nothing else; each stage computes other inputs of blocks (masks, rotary tables) again
from the batch. So if a block reads a value of an earlier block other than the hidden state (as an argument, in a
container that blocks write to, or stored in a module), there is no cut between the two. No block may read a value that
the embedding computed. Values are followed through every operation, integers included. The same run shows which
parameters around the blocks are used before and after them, and the shape of the hidden state.

By a backward on meta, `without_gradient` finds the parameters that a loss on text never trains: modules that only
select (the indexer of sparse attention, a router of image tokens) get no gradient, so an adapter there would be
reported as trained and stay zero. Nothing here needs weights or communicates.
"""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from expertmesh.anatomy import Anatomy, ExpertsSpec, decoder_blocks, group_by_kind, is_inside, settings
from expertmesh.compat import READS_A_VALUE, tree_leaves
from expertmesh.config.errors import InputError
from expertmesh.introspection.meta_run import LENGTH, ROWS, WithoutValues, run_text
from expertmesh.introspection.proofs import look_up, proof_key
from expertmesh.state.model_view import meta_copy

_BEFORE = -1  # the origin of a value is before the blocks (-1), block number n, or after the last (number of blocks)
# Operations that read the shape and dtype of a tensor and none of its values.
_LIKE = frozenset(f"{kind}_like" for kind in ("empty", "zeros", "ones", "full")) | frozenset(
    f"new_{kind}" for kind in ("empty", "zeros", "ones", "full")
)


@dataclass(frozen=True, slots=True)
class Decoder:
    """The findings of the run."""

    before: frozenset[str]
    """Names of the parameters outside of the blocks that are used before them, or that text never uses."""
    behind: frozenset[str]
    """Names of the parameters outside of the blocks that are used after them."""
    hidden: tuple[int, ...]
    """The dims of the hidden state between blocks after `[B, S]`."""
    unused: frozenset[str] = frozenset()
    """Names of the parameters in `before` that text never uses, of modules that contain the blocks."""
    items: int = 0
    """Number of values that a block returns, the hidden state first; 0 if it returns the hidden state without a
    tuple."""
    joined: Mapping[int, str] = field(default_factory=dict)
    """The blocks that must be on the stage of the block before them, by number, and the reason."""

    @property
    def hands_on_hidden_alone(self) -> bool:
        """True if every block passes its hidden state to the next one and nothing else."""
        return self.items == 0 and not self.joined


class CannotCut(InputError):
    """Error for a decoder whose blocks cannot run in stages; `why` is the sentence without its setting and cure."""

    def __init__(self, model: nn.Module, why: object, key: str, to: str = "1") -> None:
        self.why = f"{model.config.model_type} cannot be cut into stages: {why}"  # type: ignore[union-attr]
        super().__init__(f"parallel.pp: {self.why}; set parallel.pp to {to}", key=key)


def cannot_cut(model: nn.Module, why: str) -> CannotCut:
    return CannotCut(model, why, key="layout.pp-cannot-cut")


def carries_more(model: nn.Module, why: object, to: str = "1") -> CannotCut:
    return CannotCut(model, why, key="layout.pp-carries-more-than-hidden-state", to=to)


class _Carried(Exception):
    """Error for a decoder that cannot be cut.

    A block read a value of the embedding, the hidden state is not passed on unchanged, or no place for a cut is left.
    """


def probe(meta_model: nn.Module, blocks: Sequence[str], experts: Sequence[ExpertsSpec]) -> Decoder:
    """Run a model on meta and find where it can be cut.

    Args:
        meta_model: a model on meta; its state is restored.
        blocks: names of its decoder's blocks, in order.
        experts: all of its experts modules.

    Raises:
        InputError: the decoder cannot be cut, or cannot run without values; names the block that needs more than the
            hidden state.
    """
    watch = _Watch(meta_model, blocks)
    try:
        with watch.hooks():
            run_text(meta_model, experts, watch)
        if watch.joined and len(watch.joined) == len(blocks) - 1:
            raise _Carried(next(iter(watch.joined.values())))
    except _Carried as carried:
        raise carries_more(meta_model, carried) from None
    except Exception as cause:
        # The family's code may fail in any way on tensors without values; nothing is known then.
        raise CannotCut(
            meta_model,
            f"it cannot be run without values ({type(cause).__name__}: {str(cause)[:160]}), so it is not known whether "
            "its blocks need more than the hidden state",
            key="layout.pp-not-provable",
        ) from cause
    return watch.decoder()


def rehearse(meta_model: nn.Module, experts: Sequence[ExpertsSpec] = ()) -> None:
    """Run a model on meta with the placeholders of a stage.

    Args:
        meta_model: a model on meta, with placeholders in it.
        experts: the experts modules that are not inside placeholders.

    Raises:
        InputError: the forward does not run.
    """
    try:
        run_text(meta_model, experts)
    except Exception as cause:
        # The family's forward uses more of a module than its call, which a placeholder does not have.
        raise CannotCut(
            meta_model,
            f"its forward does not run without another stage's modules ({type(cause).__name__}: {str(cause)[:160]})",
            key="layout.pp-needs-other-stage",
        ) from cause


class _Watch(WithoutValues):
    """Mode that labels every value with its origin, and records what operations read from other blocks."""

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        super().__init__()
        self.model, self.blocks = model, blocks
        self.at = _BEFORE
        self.hidden: tuple[int, ...] = ()
        self.handed_on: torch.Tensor | None = None
        self.items: set[int] = set()
        self.joined: dict[int, str] = {}
        self.labels: MutableMapping[torch.Tensor, int] = WeakIdKeyDictionary()
        inside = set()
        for number, name in enumerate(blocks):
            for parameter in model.get_submodule(name).parameters():
                if parameter in self.labels:
                    raise CannotCut(
                        model, f"{name} shares a parameter with another block", key="layout.pp-shared-parameter"
                    )
                self.labels[parameter] = number
                inside.add(id(parameter))
        # List parameters under each of their names: a tied weight is used before and after the blocks.
        self.outside = {n: p for n, p in model.named_parameters(remove_duplicate=False) if id(p) not in inside}
        self.used: dict[int, set[int]] = {id(parameter): set() for parameter in self.outside.values()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        # The result of these operations has no value of the input, so it gets no label.
        if func is READS_A_VALUE or func.__name__.partition(".")[0] in _LIKE:
            return super().__torch_dispatch__(func, types, args, kwargs)
        for leaf in inputs:
            if id(leaf) in self.used:
                self.used[id(leaf)].add(self.at)
                self.labels[leaf] = self.at
        labels = {self.labels[leaf] for leaf in inputs if leaf in self.labels}
        self._join(labels, func.__name__)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if labels:
            # An operation in place also changes its first input.
            changed = inputs[:1] if func._schema.is_mutable else []
            for leaf in [*tree_leaves(out), *changed]:
                if isinstance(leaf, torch.Tensor):
                    self.labels[leaf] = self.at
        return out

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Register hooks at the boundaries of blocks while the context is open."""
        with ExitStack() as stack:
            for number, name in enumerate(self.blocks):
                block = self.model.get_submodule(name)
                enter, leave = partial(self._enter, number), partial(self._leave, number)
                stack.enter_context(block.register_forward_pre_hook(enter, with_kwargs=True))
                stack.enter_context(block.register_forward_hook(leave))
            yield

    def decoder(self) -> Decoder:
        """Return the findings after a forward.

        Raises:
            InputError: the decoder cannot be cut.
        """
        behind = len(self.blocks)
        if self.at != behind:
            raise cannot_cut(self.model, f"{self.blocks[self.at + 1]} was not run in a forward of text")
        if len(self.items) > 1:
            raise cannot_cut(self.model, "not all of its blocks return alike")
        names: dict[int, set[str]] = {_BEFORE: set(), behind: set()}
        model: Any = self.model
        modules = {id(module): name for name, module in model.named_modules()}
        embedding, head = (modules.get(id(m)) for m in (model.get_input_embeddings(), model.get_output_embeddings()))
        for name, parameter in self.outside.items():
            owner = name.rpartition(".")[0]
            # What is never used is where the rest of its module is, as a head in whose place adapters train another.
            beside = [self.used[id(p)] for other, p in self.outside.items() if other.rpartition(".")[0] == owner]
            uses = self.used[id(parameter)] or set().union(*beside)
            if not uses <= {_BEFORE, behind}:
                raise cannot_cut(self.model, f"{name} is used between blocks")
            if len(uses) == 2:
                # A tied weight: only for the embedding and the head is it known on which side its module is.
                if owner not in (embedding, head):
                    raise cannot_cut(self.model, f"{name} is used before the blocks and behind them")
                uses = {_BEFORE} if owner == embedding else {behind}
            # Parameters that text never uses (a vision tower) stay with the embedding.
            names[min(uses, default=_BEFORE)].add(name)
        around = {name for name, _ in model.named_modules() if is_inside(self.blocks[0], name)} | {""}
        unused = frozenset(
            name for name, p in self.outside.items() if not self.used[id(p)] and name.rpartition(".")[0] in around
        )
        before, after = frozenset(names[_BEFORE]), frozenset(names[behind])
        return Decoder(before, after, self.hidden, unused, self.items.pop(), dict(sorted(self.joined.items())))

    def _join(self, labels: set[int], how: str) -> None:
        """Join the running block to the stage of the blocks whose values it reads.

        Args:
            labels: the origins of the values.
            how: name of the operation that reads them.
        """
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
        # Labelled with this block, so that reading the hidden state joins no blocks.
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
        """Return an empty tensor like the hidden state, labelled with the running block."""
        fresh = torch.empty_like(hidden)
        self.labels[fresh] = self.at
        return fresh


def without_gradient(model: nn.Module, anatomy: Anatomy) -> frozenset[str]:
    """Return the names of the parameters that get no gradient in any block; parameters of routed experts are left out.

    The result is empty if the model's code does not run without values. An adapter without gradients is then reported
    when it is saved.
    """
    blocks = decoder_blocks(anatomy)

    def find() -> list[str]:
        """Return the untrained parameters by their names in a block, from one block of each kind."""
        meta_model = meta_copy(model)
        kinds = group_by_kind(meta_model, blocks, lambda name: settings(meta_model.get_submodule(name)))
        firsts = [names[0] for names in kinds]
        for parameter in meta_model.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        try:
            run_text(meta_model, anatomy.experts, blocks=blocks, repeated=set(blocks) - set(firsts), backward=True)
        except Exception:  # the family's code may fail in any way on tensors without values: nothing is known then
            return []
        trained: dict[str, bool] = {}
        for block in firsts:
            for name, parameter in meta_model.get_submodule(block).named_parameters(remove_duplicate=False):
                if not any(is_inside(f"{block}.{name}", spec.name) for spec in anatomy.experts):
                    trained[name] = trained.get(name, False) or parameter.grad is not None
        return sorted(name for name, is_trained in trained.items() if not is_trained)

    names = look_up("gradients", proof_key(model), find)
    return frozenset(f"{block}.{name}" for block in blocks for name in names)
