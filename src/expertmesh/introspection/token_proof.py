"""Prove that a module computes each token separately, if its code may look along the sequence.

Some code multiplies matrices over experts or residual streams, or slices a dim, and no token sees another. One forward
of the model on meta shows the arguments of such a module. A small copy with the family's code is then called with all
of several random tokens and with each of them alone; the results must be equal. A module that cannot run so, or whose
results differ, may look along the sequence. The proof needs no weights and does not communicate.
"""

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from expertmesh.anatomy import Anatomy, is_inside
from expertmesh.anatomy.expert_module import relative_error, small_copy
from expertmesh.compat import tree_leaves, tree_map_only
from expertmesh.introspection.heads_proof import TOLERANCE
from expertmesh.introspection.known_families import own_class, proof_key, refusal_by_proof
from expertmesh.introspection.stage_probe import LENGTH, ROWS, WithoutValues, forward_of_text, stand_ins_for_experts
from expertmesh.state.model_view import meta_copy

_HIDDEN, _TOKENS = 8, ROWS * LENGTH
_Call = tuple[tuple[Any, ...], dict[str, Any]]


class TokenProof:
    """The proofs for the modules of one model; the model runs on meta once, if the table of families lacks a proof."""

    def __init__(self, model: nn.Module, anatomy: Anatomy) -> None:
        self._model: Any = model
        self._anatomy = anatomy
        self._calls: dict[str, _Call] | None = None

    def holds(self, name: str) -> bool:
        """Return whether the module `name` of a block computes each token separately; one with experts never is."""
        module, caller = self._model.get_submodule(name), self._model.get_submodule(name.rpartition(".")[0])
        key = proof_key(module, own_class(type(caller)).__qualname__)
        return refusal_by_proof("tokens", key, partial(self._why_not, name)) is None

    def _why_not(self, name: str) -> str | None:
        if any(spec.name == name or is_inside(spec.name, name) for spec in self._anatomy.experts):
            return "it holds experts"
        try:
            if self._calls is None:
                self._calls = _calls(meta_copy(self._model), self._anatomy)
            module = self._model.get_submodule(name)
            error = _error(module, self._calls[name], self._model.config.get_text_config().hidden_size)
        # The family's code may fail in any way without values, or at another size; nothing is proven then.
        except Exception as cause:
            return f"it cannot be run on a small copy ({type(cause).__name__}: {cause})"
        return None if error <= TOLERANCE else f"its tokens see each other (off by {error:.1e} on a small copy)"


def _calls(meta_model: nn.Module, anatomy: Anatomy) -> dict[str, _Call]:
    """Record the arguments of each module in a forward of text on meta."""
    calls: dict[str, _Call] = {}

    def note(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[name] = (args, kwargs)

    with ExitStack() as stack:
        for name, module in meta_model.named_modules():
            stack.enter_context(module.register_forward_pre_hook(partial(note, name), with_kwargs=True))
        stack.enter_context(stand_ins_for_experts(meta_model, anatomy.experts))
        stack.enter_context(WithoutValues())
        forward_of_text(meta_model)
    return calls


@torch.no_grad()
def _error(module: nn.Module, call: _Call, hidden: int) -> float:
    """Return the relative error between the outputs of a small copy for all tokens at once and for each token alone."""
    generator = torch.Generator().manual_seed(0)
    copy = small_copy(module, {hidden: _HIDDEN}, generator).eval()
    args, kwargs = tree_map_only(torch.Tensor, partial(_random, hidden, generator), call)
    whole = _by_token(copy(*args, **kwargs), _TOKENS)
    alone = []
    for token in range(_TOKENS):
        one_args, one_kwargs = tree_map_only(torch.Tensor, partial(_of_token, token), (args, kwargs))
        alone.append(_by_token(copy(*one_args, **one_kwargs), 1))
    return relative_error(whole, [torch.cat(parts) for parts in zip(*alone, strict=True)])


def _random(hidden: int, generator: torch.Generator, x: torch.Tensor) -> torch.Tensor:
    dims = _token_dims(x)
    shape = [*x.shape[:dims], *(_HIDDEN if size == hidden else size for size in x.shape[dims:])]
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def _of_token(token: int, x: torch.Tensor) -> torch.Tensor:
    dims = _token_dims(x)
    return x.flatten(0, dims - 1)[token].view(*[1] * dims, *x.shape[dims:])


def _token_dims(x: torch.Tensor) -> int:
    """Return how many dims number the tokens: two for `[B, S, ...]`, one for `[B * S, ...]`.

    Raises:
        ValueError: a tensor of another shape, or of integers.
    """
    if x.is_floating_point() and x.shape[:2] == (ROWS, LENGTH):
        return 2
    if x.is_floating_point() and x.shape[:1] == (_TOKENS,):
        return 1
    raise ValueError(f"it gets {x.dtype} {tuple(x.shape)}")


def _by_token(output: Any, tokens: int) -> list[torch.Tensor]:
    return [leaf.reshape(tokens, -1) for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
