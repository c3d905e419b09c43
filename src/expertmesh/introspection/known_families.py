"""Answers about transformers' own code that were found before: what was proven for a family need not be proven again.

known_families.json has them by version of transformers, question and key. `python -m tests.families.known` writes it,
by asking every question of every family on tiny models; tests ask some of them again. A key names the class of
transformers that the answer is about, and every argument that could change it. Refusals by proof are never written, so
they are always found anew, with their reason. Whatever is not in the table is proven on the spot: another version,
another configuration, code that is not transformers' own.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.resources import files
from typing import Any, TypeVar

import transformers
from torch import nn
from transformers import PreTrainedConfig

FILE = "known_families.json"
Answers = dict[str, dict[str, Any]]  # by question and key, as JSON has them
_Answer = TypeVar("_Answer")

# Of what every configuration has, only these can change what a model's code does.
_OF_EVERY_CONFIG = frozenset(PreTrainedConfig().to_dict()) - {"tie_word_embeddings", "is_encoder_decoder"}
_recorded: ContextVar[Answers | None] = ContextVar("expertmesh_recorded_answers", default=None)


def look_up(
    question: str, key: str | None, find: Callable[[], Any], keep: Callable[[Any], bool] = lambda answer: True
) -> Any:
    """The table's answer, or what `find` answers (a JSON value) where the table has none; None is no key. `keep`: which
    answers hold for other sizes as well; those are found once in a process.
    """
    recorded = _recorded.get()
    if recorded is None and key is not None:
        known = _table().setdefault(question, {})
        if key in known:
            return known[key]
        answer = find()
        if keep(answer):
            known[key] = answer
        return answer
    answer = find()
    if recorded is not None and key is not None and keep(answer):
        earlier = recorded.setdefault(question, {}).setdefault(key, answer)
        assert earlier == answer, f"{question} of {key} is {earlier} and {answer}: the key lacks an argument"
    return answer


def refusal_by_proof(question: str, key: str | None, prove: Callable[[], str | None]) -> str | None:
    """Why `prove` refuses, or None; None without asking where the table says that this was proven."""
    reason: str | None = look_up(question, key, prove, keep=lambda reason: reason is None)
    return reason


def known_by_class(question: str) -> Callable[[Callable[[Any], _Answer]], Callable[[Any], _Answer]]:
    """Make a function that answers a question about a class, or a function, look it up first, and answer once. It may
    then be called with a module, for its class.
    """

    def decorate(find: Callable[[Any], _Answer]) -> Callable[[Any], _Answer]:
        find = functools.cache(find)

        @functools.wraps(find)
        def answer(subject: Any) -> Any:
            kind: Any = type(subject) if isinstance(subject, nn.Module) else subject
            return look_up(question, class_key(kind), lambda: find(kind))

        return answer

    return decorate


@contextmanager
def recording() -> Iterator[Answers]:
    """Answer nothing from the table, and note every answer that is found."""
    answers: Answers = {}
    token = _recorded.set(answers)
    try:
        yield answers
    finally:
        _recorded.reset(token)


def class_key(kind: Any) -> str | None:
    """Module and name of a class or function of transformers, without what FSDP2 or we put in front; None for other
    code.
    """
    own = own_class(kind)
    return f"{own.__module__} {own.__qualname__}" if own.__module__.startswith("transformers.") else None


def proof_key(module: nn.Module, *others: object) -> str | None:
    """The module's class and, hashed, whatever else of it could change what a proof finds; None where anything in it
    runs code that is not transformers' or torch's own.

    That is: its settings and its configuration's, without sizes (of numbers, whether they are 0, 1 or more), the
    classes of all modules in it, and `others`, the arguments of the proof.
    """
    name = class_key(type(module))
    kinds = {own_class(type(part)) for part in module.modules()}
    replaced = any(
        "forward" in vars(part) or part._forward_pre_hooks or part._forward_hooks for part in module.modules()
    )
    if name is None or replaced or not all(map(_runs_published_code, kinds)):
        return None
    config: Any = getattr(module, "config", None)
    settings = [] if config is None else [_settings(config.to_dict()), config._attn_implementation]
    classes = sorted({f"{kind.__module__}.{kind.__qualname__}" for kind in kinds})
    text = json.dumps([_settings(vars(module)), classes, settings, *map(str, others)], sort_keys=True)
    return f"{name} {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


def own_class(kind: Any) -> Any:
    """Without the classes that FSDP2 and adapters put in front."""
    in_front = ("torch.distributed.", "expertmesh.")
    return next((each for each in getattr(kind, "__mro__", ()) if not each.__module__.startswith(in_front)), kind)


def _runs_published_code(kind: Any) -> bool:
    """Whether a class and its forward are torch's or transformers': other libraries replace forwards of classes."""
    modules = (kind.__module__, getattr(kind.forward, "__module__", ""))
    return all(module.startswith(("torch.", "transformers.")) for module in modules)


@functools.cache
def _table() -> Answers:
    """The file has for each question its answers, and for each of those its keys, whose last words are joined."""
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
    """Whether a setting can change what a model's code does: not names, tokens, or what a forward returns beside."""
    return key not in _OF_EVERY_CONFIG and not key.startswith(("_", "layer_i")) and not key.endswith("_token_id")


def _settings(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _settings(each) for key, each in value.items() if matters(str(key))}
    if isinstance(value, list | tuple):
        return sorted({json.dumps(_settings(each), sort_keys=True) for each in value})
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int | float):
        return value if value in (0, 1) else "more"
    return type(value).__name__
