"""Tokenizers and chat templates made for the tests: byte-level BPE trained on standard-library docstrings.

The templates are written for these tests, each with one habit that published templates have.
"""

import argparse
import asyncio
import functools
import json
import logging

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>", "<|return|>")

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

CHATML_WITH_MARKS = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

DEFAULT_SYSTEM = (
    """\
{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}{%- endif %}
"""
    + CHATML
)

# Thinking is shown in the last turn only, which also gets an empty frame when there is none.
STRIPS_EARLIER_THINKING = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- set answer = message.content.split('</think>')[-1].lstrip('\\n') %}
{%- if message.role == 'assistant' and loop.last %}
{%- set thought = message.content.split('</think>')[0].split('<think>')[-1] %}
{{- '<think>\\n' + (thought.strip('\\n') if '</think>' in message.content else '') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- answer + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# The first line depends on the whole conversation, so no rendering begins another.
COUNTS_MESSAGES = "{{- 'A talk of ' ~ messages|length ~ ' messages.\\n' }}\n" + CHATML

# The last turn ends with another token than earlier ones.
ENDS_DIFFERENTLY = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{{- '<|return|>' if loop.last and message.role == 'assistant' else '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# No special tokens and no line break after the colon: BPE joins the space with the first word of the answer.
PLAIN_WORDS = """\
{%- for message in messages %}{{- message.role + ':' + message.content + '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant:' }}{%- endif %}"""

# Tools at the top, calls after the answer, and thinking after the last question alone.
WITH_TOOLS = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(question=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.question = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and loop.index0 > ns.question and enable_thinking is not false %}
{{- '<think>\\n' + message.reasoning_content | default('', true) + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content | default('', true) }}
{%- for call in message.tool_calls | default([], true) %}
{{- '<call>' + call.function.name + ' ' + call.function.arguments | tojson + '</call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# A call ends with a token of its own, results name the function that was called last, and thinking is left out of
# every turn that an answer follows.
WITH_CHANNELS = """\
{%- set ns = namespace(called='nobody') %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set later = messages[loop.index:] | selectattr('role', 'equalto', 'assistant') %}
{%- if message.thinking and not later | rejectattr('tool_calls', 'defined') | list %}
{{- '<|im_start|>assistant thinks ' + message.thinking + '<|im_end|>' }}{%- endif %}
{%- if message.tool_calls %}
{%- set ns.called = message.tool_calls[0].function.name %}
{{- '<|im_start|>assistant to=' + ns.called + ' ' + message.tool_calls[0].function.arguments | tojson + '<|eos|>' }}
{%- else %}{{- '<|im_start|>assistant says ' + message.content }}
{{- '<|return|>' if loop.last else '<|im_end|>' }}{%- endif %}
{%- elif message.role == 'tool' %}{{- '<|im_start|>' + ns.called + ' gave ' + message.content + '<|im_end|>' }}
{%- else %}{{- '<|im_start|>' + message.role + ' says ' + message.content + '<|im_end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant' }}{%- endif %}"""

WRITES_DATE = "{{- 'Today is ' + strftime_now('%d %B %Y at %H:%M') + '.\\n' }}" + CHATML

REPEATS_ANSWERS = CHATML + "{%- for message in messages %}{{- message.content }}{%- endfor %}"
MARKS_NOTHING = "{% generation %}{% endgeneration %}" + CHATML
DROPS_ANSWERS = CHATML.replace("message.content", "(message.content if message.role == 'user' else '')")
ALTERNATES_ONLY = (
    """\
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}
{%- endif %}
{%- endfor %}
"""
    + CHATML
)


@functools.cache
def _bpe(trim_offsets: bool) -> str:
    corpus = [
        text
        for module in (argparse, asyncio, json, logging)
        for item in vars(module).values()
        if (text := getattr(item, "__doc__", None))
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet))
    return tokenizer.to_str()


def bpe_tokenizer(
    template: str | None = None,
    *,
    eos: str | None = "<|eos|>",
    adds_bos: bool = False,
    trim_offsets: bool = False,
) -> PreTrainedTokenizerFast:
    """A fast tokenizer with the special tokens of `SPECIAL` and the given chat template."""
    backend = Tokenizer.from_str(_bpe(trim_offsets))
    backend.add_special_tokens(list(SPECIAL))
    if adds_bos:
        bos = ("<|bos|>", backend.token_to_id("<|bos|>"))
        backend.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[bos])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|bos|>",
        eos_token=eos,
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>", "<|return|>"],
    )
    tokenizer.chat_template = template
    return tokenizer
