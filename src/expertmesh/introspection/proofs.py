"""Keep what was proven about transformers' code, so that a process proves it once for equal modules.

A key names the class of transformers and every argument that could change the answer. Refusals are never kept, so they
are always found again, with their reason. Code that is not part of transformers is proven each time.
"""

import functools
import hashlib
import json
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedConfig

from expertmesh.compat import attention_of, hooks_of

_Answer = TypeVar("_Answer")

# The settings of every configuration, without those two that can change what a model's code does.
_OF_EVERY_CONFIG = frozenset(PreTrainedConfig().to_dict()) - {"tie_word_embeddings", "is_encoder_decoder"}


def look_up(
    question: str, key: str | None, find: Callable[[], Any], keep: Callable[[Any], bool] = lambda answer: True
) -> Any:
    """Return the answer that is kept, or that of `find`.

    Args:
        question: the kind of answers.
        key: the key among these; None always calls `find`.
        find: returns the answer.
        keep: returns whether an answer is kept for the rest of the process.
    """
    known = {} if key is None else _answers().setdefault(question, {})
    if key in known:
        return known[key]
    answer = find()
    if keep(answer):
        known[key] = answer
    return answer


def refusal_by_proof(question: str, key: str | None, prove: Callable[[], str | None]) -> str | None:
    """Return the reason why `prove` refuses, or None; `prove` is not called for what is proven already."""
    reason: str | None = look_up(question, key, prove, keep=lambda reason: reason is None)
    return reason


def by_class(find: Callable[[Any], _Answer]) -> Callable[[Any], _Answer]:
    """Decorate a function that answers a question about a class or a function, so that it is answered once.

    The decorated function also accepts a module, for its class.
    """
    answer = functools.cache(find)

    @functools.wraps(find)
    def ask(subject: Any) -> _Answer:
        kind: Any = type(subject) if isinstance(subject, nn.Module) else subject
        return answer(kind)

    return ask


def proof_key(module: nn.Module, *others: object) -> str | None:
    """Return the key of a proof about a module: its class, and a hash of everything that could change the result.

    The hash covers the settings of the module and of its configuration without sizes (a number is 0, 1 or "more"), the
    classes of all modules in it, and `others`, the arguments of the proof.

    Returns:
        The key; None if any module in it runs code that is not part of transformers or torch.
    """
    own = own_class(type(module))
    kinds = {own_class(type(part)) for part in module.modules()}
    hooks = {str(getattr(hook, "__module__", "")) for part in module.modules() for hook in hooks_of(part)}
    # Hooks by which adapters number the rows of a model change nothing that is proven.
    replaced = any("forward" in vars(part) for part in module.modules())
    replaced = replaced or not all(hook.startswith("expertmesh.adapters.") for hook in hooks)
    if replaced or not own.__module__.startswith("transformers.") or not all(map(_runs_published_code, kinds)):
        return None
    config: Any = getattr(module, "config", None)
    settings = [] if config is None else [_settings(config.to_dict()), attention_of(config)]
    classes = sorted({f"{kind.__module__}.{kind.__qualname__}" for kind in kinds})
    text = json.dumps([_settings(vars(module)), classes, settings, *map(str, others)], sort_keys=True)
    return f"{own.__module__} {own.__qualname__} {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


def own_class(kind: Any) -> Any:
    """Return a class without those that FSDP2 and expertmesh put in front of it."""
    in_front = ("torch.distributed.", "expertmesh.")
    return next((each for each in getattr(kind, "__mro__", ()) if not each.__module__.startswith(in_front)), kind)


def _runs_published_code(kind: Any) -> bool:
    """Return whether a class and its forward are part of torch or transformers."""
    # The forward is checked too: other libraries replace forwards of classes.
    modules = (kind.__module__, getattr(kind.forward, "__module__", ""))
    return all(module.startswith(("torch.", "transformers.")) for module in modules)


@functools.cache
def _answers() -> dict[str, dict[str | None, Any]]:
    """Return the answers of this process, by question and key."""
    return {}


def matters(key: str) -> bool:
    """Return whether a setting can change what a model's code computes: not names, ids of tokens or extra outputs."""
    if key in _OF_EVERY_CONFIG or key == "name_or_path":
        return False
    return not key.startswith(("_", "layer_i")) and not key.endswith("_token_id")


def _settings(value: Any) -> Any:
    """Reduce settings to what can change the code that runs: a number to 0, 1 or "more", a list to its set."""
    if isinstance(value, dict):
        return {key: _settings(each) for key, each in value.items() if matters(str(key))}
    if isinstance(value, list | tuple):
        return sorted({json.dumps(_settings(each), sort_keys=True) for each in value})
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int | float):
        return value if value in (0, 1) else "more"
    return type(value).__name__
