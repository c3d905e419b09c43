"""Our template of DeepSeek-V4 beside the encoder that its checkpoints bring along, on its examples and random talks.

    python -m benchmarks.deepseek_v4_encoding DeepSeek-V4-Flash/encoding

The directory has encoding_dsv4.py, and tests/test_input_*.json with test_output_*.txt. That code is run: read it first.
"""

import copy
import importlib.util
import json
import random
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

from tests.data.tokenizers_on_the_fly import bpe_tokenizer

TALKS = 3000
ROLES = ("user", "user", "assistant", "assistant", "tool", "developer", "latest_reminder")
ARGUMENTS: tuple[dict[str, Any], ...] = ({"a": "v", "b": [1, {"k": "é"}], "c": None, "d": True}, {}, {"x": 1.5})
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "é<>&'", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "g"}},
]


def main(directory: Path) -> int:
    spec = importlib.util.spec_from_file_location("encoding_dsv4", directory / "encoding_dsv4.py")
    assert spec is not None
    assert spec.loader is not None
    published: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(published)
    tokenizer = bpe_tokenizer(files("expertmesh.data.encoding").joinpath("deepseek_v4.jinja").read_text("utf-8"))
    tokenizer.bos_token, tokenizer.eos_token = published.bos_token, published.eos_token

    def ours(talk: list[dict[str, Any]], tools: Any, **options: Any) -> Any:
        talk = copy.deepcopy(talk)
        for call in (call for message in talk for call in message.get("tool_calls", ())):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        return tokenizer.apply_chat_template(talk, tools=tools, tokenize=False, add_generation_prompt=True, **options)

    different = 0
    for path in sorted((directory / "tests").glob("test_input_*.json")):
        content = json.loads(path.read_text("utf-8"))
        talk, tools = (content["messages"], content["tools"]) if isinstance(content, dict) else (content, None)
        expected = path.with_name(path.name.replace("input", "output")).with_suffix(".txt").read_text("utf-8")
        equal = any(ours(talk, tools, thinking_mode=mode) == expected for mode in ("thinking", "chat"))
        print(f"{path.name}: {'equal' if equal else 'DIFFERENT'}")
        different += not equal
    chance = random.Random(1)
    for _ in range(TALKS):
        talk, tools = _talk(chance), TOOLS if chance.random() < 0.4 else None
        options = {
            "thinking_mode": chance.choice(["thinking", "chat"]),
            "drop_thinking": chance.random() < 0.7,
            "reasoning_effort": chance.choice([None, "high", "max"]),
        }
        given = copy.deepcopy(talk)
        if tools is not None:  # the encoder takes them with the first message
            if given[0]["role"] not in ("system", "developer"):
                given.insert(0, {"role": "system", "content": ""})
            given[0]["tools"] = tools
        if ours(talk, tools, **options) != published.encode_messages(given, **options):
            different += 1
            print(f"DIFFERENT: {options} {json.dumps(talk, ensure_ascii=False)}")
    print(f"{different} of {TALKS:,} random conversations and the examples differ")
    return int(different > 0)


def _talk(chance: random.Random) -> list[dict[str, Any]]:
    talk = [{"role": "system", "content": chance.choice(["sys", ""])}] if chance.random() < 0.5 else []
    return talk + [_message(chance) for _ in range(chance.randint(1, 7))]


def _message(chance: random.Random) -> dict[str, Any]:
    role = chance.choice(ROLES)
    message: dict[str, Any] = {"role": role, "content": chance.choice(["x", "y\n z ", "<b>&'\"é"])}
    if role == "assistant":
        if chance.random() < 0.6:
            message["reasoning_content"] = chance.choice(["why", "because\n"])
        if chance.random() < 0.4:
            message["tool_calls"] = [
                {"id": f"c{n}", "function": {"name": "f", "arguments": json.dumps(chance.choice(ARGUMENTS))}}
                for n in range(chance.randint(1, 3))
            ]
        if chance.random() < 0.1:
            message["wo_eos"] = True
    if role == "tool":
        message["tool_call_id"] = f"c{chance.randint(0, 3)}"
    if role == "user" and chance.random() < 0.1:
        message["task"] = chance.choice(["action", "query", "title"])
    if role == "developer" and chance.random() < 0.3:
        message["response_format"] = {"type": "é"}
    return message


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
