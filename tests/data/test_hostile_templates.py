"""Chat templates that reach out of their sandbox or would render without end are refused, quickly and on every rank."""

import datetime
import json
import os
import resource
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase, Qwen3MoeConfig

from expertmesh.cli.data import run_check
from expertmesh.config import Config
from expertmesh.config.errors import SecurityError
from expertmesh.data.encoding import sandbox
from expertmesh.data.encoding.encode import ChatRenderer
from expertmesh.data.encoding.targets import MAX_ADDED_CHARACTERS, ChatOptions, Rendered
from expertmesh.data.formats import Conversation, MalformedRow
from expertmesh.distributed.all_ranks import raise_on_all_ranks
from tests.data import tokenizers_on_the_fly as on_the_fly
from tests.data.tokenizers_on_the_fly import bpe_tokenizer
from tests.support.errors import refused
from tests.support.ranks import shared_ranks

HELLO = Conversation(({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}))
NESTED_LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = (
    "{% set ns = namespace(x='a') %}{% for i in range(64) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x | length }}"
)

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ ('' | attr('__class__')).__mro__ }}",
    "{{ ''['__class__']['__base__'] }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ messages.append(1) }}",
    "{{ namespace(__class__=1) }}",
    "{{ raise_exception.__globals__['__builtins__'] }}",
]
SLOW = [NESTED_LOOPS, "{{ 10 ** (10 ** 9) > 1 }}"]
MEMORY = [
    DOUBLING,
    "{{ 'a' * 10 ** 10 }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '{:10000000000}'.format(1) }}",
    "{{ 'a' | center(10 ** 10) }}",
    "{{ 'a' | indent(10 ** 10, first=True) }}",
    "{{ ([0] * 10 ** 10) | length }}",
    "{{ 'a'.zfill(10 ** 10) }}",
    "{{ messages | tojson(indent=10 ** 10) }}",
    "{{ [1] | batch(10 ** 10, 'x') | list }}",
    "{{ 'abc'.encode().ljust(10 ** 10) }}",
]
FLOODS = [f"{{{{ 'a' * {MAX_ADDED_CHARACTERS + 7} }}}}", "{% for i in range(99999) %}{{ 'a' * 99 }}{% endfor %}"]
OVERFLOWS = ["{% for i in range(10 ** 9) %}{% endfor %}", "{{ 'a' * 10 ** 30 }}"]
ENDLESS = ["{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"]
CASES = [
    *((template, "reaches for what its sandbox forbids") for template in ESCAPES),
    *((template, "needs more than 256 MiB of memory") for template in MEMORY),
    *((template, "turns a conversation of 21 characters into") for template in FLOODS),
    *((template, "asks for more than a template may") for template in OVERFLOWS),
    *((template, "is nested without end") for template in ENDLESS),
]


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of memory that is reached sooner."""
    monkeypatch.setattr(sandbox, "MEMORY_LIMIT_BYTES", 1 << 28)


@pytest.fixture
def half_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes this long on a busy machine is endless, so only tests of endless templates use it."""
    monkeypatch.setattr(sandbox, "TIME_LIMIT_SECONDS", 0.5)


def tokenizer_with(template: str) -> PreTrainedTokenizerBase:
    tokenizer = bpe_tokenizer(template)
    tokenizer.name_or_path = "some/model"
    return tokenizer


def render(template: str, *conversations: Conversation) -> list[Rendered | MalformedRow]:
    results = ChatRenderer(tokenizer_with(template), ChatOptions()).render(conversations or [HELLO])
    return [result if isinstance(result, MalformedRow) else only(result) for result in results]


def only(samples: list[Rendered] | MalformedRow) -> Rendered:
    assert not isinstance(samples, MalformedRow)
    (sample,) = samples
    return sample


@pytest.mark.parametrize(("template", "reason"), CASES, ids=[template[:60] for template, _ in CASES])
def test_hostile_templates_are_refused_by_name_and_in_time(template: str, reason: str) -> None:
    with refused("tokenizer.unsafe-chat-template", SecurityError, naming=reason):
        render(template + on_the_fly.CHATML)


@pytest.mark.usefixtures("half_a_second")
@pytest.mark.parametrize("template", SLOW, ids=["loops", "one operation"])
def test_endless_templates_are_refused_when_their_time_is_over(template: str) -> None:
    with refused("tokenizer.unsafe-chat-template", SecurityError, naming="does not finish within 0.5 s"):
        render(template + on_the_fly.CHATML)


@pytest.mark.usefixtures("half_a_second")  # each is refused, by whichever limit it comes to first
@pytest.mark.parametrize(
    "template", [ESCAPES[0], NESTED_LOOPS, DOUBLING, FLOODS[0]], ids=["escape", "time", "memory", "text"]
)
def test_generation_marks_are_no_way_round_the_limits(template: str) -> None:
    with refused("tokenizer.unsafe-chat-template", SecurityError, naming="some/model"):
        render(f"{{% generation %}}{template}{{% endgeneration %}}{on_the_fly.CHATML_WITH_MARKS}")


@pytest.mark.usefixtures("half_a_second")
def test_the_time_is_that_of_the_whole_row_however_often_it_is_rendered() -> None:
    slow = "{% for a in range(99999) %}{% for b in range(8) %}{% endfor %}{% endfor %}" + on_the_fly.CHATML
    turns = Conversation(HELLO.messages * 60)
    with refused("tokenizer.unsafe-chat-template", SecurityError, naming="does not finish within 0.5 s"):
        render(slow, turns)


@pytest.mark.usefixtures("half_a_second")
def test_a_template_that_waits_for_certain_data_is_refused_when_it_comes() -> None:
    template = "{% if messages[0].content == 'now' %}" + NESTED_LOOPS + "{% endif %}" + on_the_fly.CHATML
    now = Conversation(({"role": "user", "content": "now"}, *HELLO.messages[1:]))
    renderer = ChatRenderer(tokenizer_with(template), ChatOptions())
    assert all(only(each) for each in renderer.render([HELLO] * 50))
    with refused("tokenizer.unsafe-chat-template", SecurityError, naming="does not finish within 0.5 s"):
        renderer.render([HELLO, now, HELLO])


def test_whatever_else_a_template_raises_is_a_malformed_row_and_the_next_row_is_rendered() -> None:
    template = "{% if messages|length == 1 %}{{ 1 // 0 }}{% endif %}" + on_the_fly.CHATML
    alone = Conversation(HELLO.messages[1:])
    refused, good = render(template, alone, HELLO)
    assert isinstance(refused, MalformedRow)
    assert "integer division" in str(refused)
    assert isinstance(good, Rendered)


def test_long_conversations_and_many_of_them_are_within_the_limits() -> None:
    long = Conversation(tuple({"role": role, "content": "wörd " * 50_000} for role in ("user", "assistant")))
    results = render(on_the_fly.CHATML, *[long] * 30)
    assert all(isinstance(each, Rendered) and len(each.text) > 500_000 for each in results)


def test_text_is_what_transformers_renders_character_for_character() -> None:
    odd = Conversation(
        (
            {"role": "system", "content": "\ud800 lone surrogate \x00\u2028\r\n é漢🙂"},
            {"role": "user", "content": "{{ 1 }} {% raw %}", "name": None, "when": datetime.date(2026, 1, 1)},
            {"role": "assistant", "content": "<|im_end|>", "reasoning": "Because.", "extra": [1, 2.5, {"a": (True,)}]},
        )
    )
    template = "{{ messages | tojson }}{{ bos_token }}{{ messages[1].when }}" + on_the_fly.CHATML
    for each in (odd, HELLO):
        tokenizer = bpe_tokenizer(template)
        (samples,) = ChatRenderer(tokenizer, ChatOptions("all")).render([each])
        assert only(samples).text == tokenizer.apply_chat_template(list(each.messages), tokenize=False)


def test_the_child_ends_with_its_renderer_and_leaves_no_handler_or_limit_behind() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)
    renderer = ChatRenderer(tokenizer_with(on_the_fly.CHATML), ChatOptions())
    renderer.render([HELLO])
    pid = renderer._child._pid
    os.kill(pid, 0)
    del renderer
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)) == before


def _render_on_this_rank(waits: bool) -> str:
    template = NESTED_LOOPS if waits else ESCAPES[0]
    # Here: ranks that live on were forked before a fixture of the test.
    limited = mock.patch.object(sandbox, "TIME_LIMIT_SECONDS", 0.5)
    with limited, pytest.raises(SecurityError) as caught, raise_on_all_ranks("reading the data"):
        render(template + on_the_fly.CHATML)
    dist.barrier()  # The group still works.
    return str(caught.value)


@pytest.mark.parametrize("waits", [False, True], ids=["escape", "endless"])
def test_every_rank_refuses_in_the_same_words(waits: bool) -> None:
    first, second = shared_ranks(_render_on_this_rank, 2, waits)
    assert first == second
    assert "some/model is refused" in first


@pytest.mark.usefixtures("half_a_second")
@pytest.mark.parametrize("template", [ESCAPES[0], NESTED_LOOPS], ids=["escape", "endless"])
def test_check_refuses_as_training_does_even_when_bad_rows_are_skipped(template: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    Qwen3MoeConfig(vocab_size=706, num_hidden_layers=2, num_experts=8).save_pretrained(model)
    bpe_tokenizer(template + on_the_fly.CHATML).save_pretrained(model)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": list(HELLO.messages)}) + "\n")
    config = Config.model_validate(
        {
            "model": {"name_or_path": str(model)},
            "data": {"train": [{"path": str(tmp_path / "rows.jsonl")}], "on_error": "skip"},
            "output_dir": str(tmp_path / "run"),
        }
    )
    with refused("tokenizer.unsafe-chat-template", SecurityError, naming=str(model)):
        run_check(config)
