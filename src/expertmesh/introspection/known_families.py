"""Look up facts about transformers' code that were proven before, so that they need not be proven again.

known_families.json has the answers by version of transformers, question and key. `python -m tests.families.known`
writes it from tiny models of every family; tests check some answers again. A key names the class of transformers and
every argument that could change the answer. Refusals are never stored, so they are always found again, with their
reason. Anything that is not in the table is proven at run time: another version, another configuration, code that is
not part of transformers.
"""

import functools
import hashlib
import json
from collections.abc import Callable
from importlib.resources import files
from typing import Any, TypeVar

import transformers
from torch import nn
from transformers import PreTrainedConfig

from expertmesh.compat import attention_of, hooks_of

FILE = "known_families.json"
Answers = dict[str, dict[str | None, Any]]  # by question and key, as JSON has them
_Answer = TypeVar("_Answer")

# The settings of every configuration, without those two that can change what a model's code does.
_OF_EVERY_CONFIG = frozenset(PreTrainedConfig().to_dict()) - {"tie_word_embeddings", "is_encoder_decoder"}


def look_up(
    question: str, key: str | None, find: Callable[[], Any], keep: Callable[[Any], bool] = lambda answer: True
) -> Any:
    """Return the answer from the table, or from `find` if the table has none.

    Args:
        question: a section of the table.
        key: the key in this section; None always calls `find`.
        find: returns the answer, a JSON value.
        keep: returns whether an answer also holds for other sizes; only such answers are recorded, and found once in a
            process.
    """
    known = {} if key is None else _table().setdefault(question, {})
    if key in known:
        return known[key]
    answer = find()
    if keep(answer):
        known[key] = answer
    return answer


def refusal_by_proof(question: str, key: str | None, prove: Callable[[], str | None]) -> str | None:
    """Return the reason why `prove` refuses, or None; `prove` is not called if the table has the proof."""
    reason: str | None = look_up(question, key, prove, keep=lambda reason: reason is None)
    return reason


def known_by_class(question: str) -> Callable[[Callable[[Any], _Answer]], Callable[[Any], _Answer]]:
    """Decorate a function that answers a question about a class or a function.

    The answer comes from the table if it is there, and is cached otherwise. The decorated function also accepts a
    module, for its class.
    """

    def decorate(find: Callable[[Any], _Answer]) -> Callable[[Any], _Answer]:
        find = functools.cache(find)

        @functools.wraps(find)
        def answer(subject: Any) -> Any:
            kind: Any = type(subject) if isinstance(subject, nn.Module) else subject
            return look_up(question, class_key(kind), lambda: find(kind))

        return answer

    return decorate


def class_key(kind: Any) -> str | None:
    """Return module and name of a class or function of transformers; None for other code.

    Classes that FSDP2 or expertmesh put in front of it are skipped.
    """
    own = own_class(kind)
    return f"{own.__module__} {own.__qualname__}" if own.__module__.startswith("transformers.") else None


def proof_key(module: nn.Module, *others: object) -> str | None:
    """Return the key of a proof about a module: its class, and a hash of everything that could change the result.

    The hash covers the settings of the module and of its configuration without sizes (a number is 0, 1 or "more"), the
    classes of all modules in it, and `others`, the arguments of the proof.

    Returns:
        The key; None if any module in it runs code that is not part of transformers or torch.
    """
    name = class_key(type(module))
    kinds = {own_class(type(part)) for part in module.modules()}
    hooks = {str(getattr(hook, "__module__", "")) for part in module.modules() for hook in hooks_of(part)}
    # Hooks by which adapters number the rows of a model change nothing that is proven.
    replaced = any("forward" in vars(part) for part in module.modules())
    replaced = replaced or not all(hook.startswith("expertmesh.adapters.") for hook in hooks)
    if name is None or replaced or not all(map(_runs_published_code, kinds)):
        return None
    config: Any = getattr(module, "config", None)
    settings = [] if config is None else [_settings(config.to_dict()), attention_of(config)]
    classes = sorted({f"{kind.__module__}.{kind.__qualname__}" for kind in kinds})
    text = json.dumps([_settings(vars(module)), classes, settings, *map(str, others)], sort_keys=True)
    return f"{name} {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


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
def _table() -> Answers:
    """Read the answers for the installed version of transformers, by question and key."""
    # The file lists the keys under each answer; keys with an equal start share an entry, their last words are joined.
    content = json.loads(files(__package__).joinpath(FILE).read_text()).get(transformers.__version__, {})
    return {
        question: {
            f"{start} {word}": entry["answer"]
            for entry in entries
            for start, words in entry["keys"].items()
            for word in words.split()
        }
        for question, entries in content.items()
    }


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
