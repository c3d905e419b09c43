"""`python -m tests.families.known`: ask every question about the code of every family, and write the answers down.

They go to src/expertmesh/introspection/known_families.json under the installed version of transformers, beside those of
other versions. Each family is asked at its tiny configuration and again for each of its switches, turned; some families
for each two of them; and each published configuration of tests/published, which has several turned at once.
`python -m tests.families.known NAME ...` asks those families (or `published`) alone and adds their answers.
"""

import itertools
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from expertmesh.adapters.plan import adapt
from expertmesh.anatomy import Anatomy, describe
from expertmesh.config import LoraConfig
from expertmesh.distributed.layout import Layout
from expertmesh.introspection import known_families
from expertmesh.introspection.attention import attributes_read, packing_refusal, registry_call
from expertmesh.introspection.compute_dtype import plan_compute, with_wide_routers
from expertmesh.introspection.known_families import Answers
from expertmesh.introspection.small_copies import confirm_experts
from expertmesh.introspection.stage_probe import without_gradient
from expertmesh.parallel.context import context_plan
from expertmesh.parallel.stages import plan_cut
from expertmesh.parallel.tensor_plan import tensor_plan
from expertmesh.state.model_view import meta_copy
from expertmesh.weights.meta_model import build_meta_model, kept_in_fp32, read_model_config
from tests.families.catalogue import Family, families
from tests.families.tiny import tiny_config, turned_switches

# Whose published models differ in more than one switch from what is the default.
CORE = ("qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss", "glm4_moe", "olmoe", "qwen3_5_moe")
PATH = Path(known_families.__file__).with_name(known_families.FILE)
PUBLISHED = sorted((Path(__file__).parents[1] / "published").glob("*.json"))


def ask(config: PreTrainedConfig) -> None:
    """Every question that the product asks of a model's code before it is sharded."""
    model = build_meta_model(config, torch.float32)
    anatomy, kept = describe(model), kept_in_fp32(model, torch.bfloat16)
    questions = (
        lambda: confirm_experts(model, anatomy),
        lambda: ask_compute(model, anatomy, kept),
        lambda: tensor_plan(model, anatomy, 2, kept),
        lambda: context_plan(model, anatomy, Layout(cp=2)),
        lambda: plan_cut(meta_copy(model), anatomy, Layout(pp=2)),
        lambda: packing_refusal(model),
        lambda: without_gradient(model, anatomy),
        lambda: ask_adapted(config),
        lambda: ask_eager(model),
    )
    for question in questions:
        with suppress(Exception):  # a refusal: what was found on the way to it is noted, and itself it never is
            question()


def ask_adapted(config: PreTrainedConfig) -> None:
    """What is asked again of a model with adapters."""
    model = build_meta_model(config, torch.bfloat16)
    anatomy, kept = describe(model), kept_in_fp32(model, torch.bfloat16)
    adapt(model, LoraConfig(r=2), torch.float32, None)
    ask_compute(model, anatomy, kept)


def ask_compute(model: PreTrainedModel, anatomy: Anatomy, kept: Callable[[str], bool]) -> None:
    policy = plan_compute(meta_copy(model), anatomy, torch.bfloat16, kept)
    with_wide_routers(meta_copy(model), anatomy, torch.bfloat16, policy)


def ask_eager(model: nn.Module) -> None:
    """What is asked of the function behind eager attention."""
    for call in filter(None, map(registry_call, model.modules())):
        attributes_read(call.global_of(call.default))


def answers_of(family: Family, switches: int) -> Answers:
    return _answers(_configs(family, switches))


def answers_of_published(paths: Iterable[Path]) -> Answers:
    with tempfile.TemporaryDirectory() as directory:
        return _answers(_published(path, Path(directory)) for path in paths)


def _published(path: Path, directory: Path) -> PreTrainedConfig:
    """The configuration as the product reads it."""
    (directory / "config.json").write_text(path.read_text())
    return read_model_config(str(directory))[0]


class _Recorded(dict[Any, Any]):
    """Answers to one question, or by question: none is there to be taken, and each is found as often as it is asked."""

    def __contains__(self, key: object) -> bool:
        return False

    def __setitem__(self, key: Any, answer: Any) -> None:
        earlier = super().setdefault(key, answer)
        assert earlier == answer, f"{key}: {earlier} and {answer}: the key lacks an argument"

    def setdefault(self, key: Any, default: Any = None) -> Any:
        return super().setdefault(key, _Recorded())


@contextmanager
def recording() -> Iterator[Answers]:
    """Record every answer that is found, and ignore the table, inside the block."""
    answers = _Recorded()
    with mock.patch.object(known_families, "_table", return_value=answers):
        yield answers


def _answers(configs: Iterable[PreTrainedConfig]) -> Answers:
    with recording() as answers:
        for config in configs:
            with suppress(Exception):  # a combination that the family's own code does not build
                ask(config)
    return answers


def _configs(family: Family, switches: int) -> Iterator[PreTrainedConfig]:
    """The tiny configuration, and with up to `switches` of its switches turned at once."""
    assert family.model_class is not None
    text = tiny_config(family.model_class, family.name).get_text_config()
    settings, turned = text.to_dict(), turned_switches(text)
    if settings.get("head_dim") is None and "num_attention_heads" in settings:
        turned["head_dim"] = text.hidden_size // text.num_attention_heads
    for count in range(switches + 1):
        for names in itertools.combinations(turned, count):
            config = tiny_config(family.model_class, family.name)
            with suppress(Exception):  # a setting that the family computes from others
                for name in names:
                    setattr(config.get_text_config(), name, turned[name])
                yield config


def packed(answers: dict[str, Any]) -> list[dict[str, Any]]:
    """As known_families.json has the answers to one question: what is alike is written once."""
    entries: dict[str, dict[str, list[str]]] = {}
    for key, answer in sorted(answers.items()):
        start, _, word = key.rpartition(" ")
        entries.setdefault(json.dumps(answer, sort_keys=True), {}).setdefault(start, []).append(word)
    return [
        {"answer": json.loads(answer), "keys": {start: " ".join(words) for start, words in keys.items()}}
        for answer, keys in sorted(entries.items())
    ]


def main(names: list[str]) -> None:
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    merged: Answers = dict(known_families._table()) if names else {}
    asked: dict[str, Callable[[], Answers]] = {
        family.name: partial(answers_of, family, 2 if family.name in CORE else 1)
        for family in families()
        if family.model_class is not None
    }
    asked["published"] = partial(answers_of_published, PUBLISHED)
    for name, answers_now in asked.items():
        if names and name not in names:
            continue
        started = time.monotonic()
        try:
            found = answers_now()
        except Exception as error:
            print(f"{name:24} no tiny configuration: {type(error).__name__}: {error}", flush=True)
            continue
        for question, answers in found.items():
            for key, answer in answers.items():
                assert merged.setdefault(question, {}).setdefault(key, answer) == answer, (question, key)
        counts = ", ".join(f"{question} {len(answers)}" for question, answers in sorted(found.items()))
        print(f"{name:24} {time.monotonic() - started:5.1f} s  {counts}", flush=True)
    content = json.loads(PATH.read_text())
    content[transformers.__version__] = {question: packed(answers) for question, answers in merged.items()}
    PATH.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    print(f"wrote {PATH}")


if __name__ == "__main__":
    main(sys.argv[1:])
