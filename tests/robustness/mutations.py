"""Files made hostile: bytes flipped, cut and filled with zeros; JSON changed where its structure is; headers rewritten.

Everything follows from a seed, so that a case that fails is a line to run again.
"""

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    1,
    7,
    2**31,
    2**62,
    2**64,
    10**400,
    -(10**18),
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "1",
    "yes",
    "\x00",
    "\x1b]0;x\x07",
    "\ud800",
    "../../etc/passwd",
    "/dev/zero",
    "~nouser",
    "os.system",
    "x" * 5000,
    [],
    [[]],
    [None],
    {},
    {"": {}},
    {"a": [1, {"b": []}]},
)
Mutation = Callable[[random.Random, bytes], bytes]


def flip_bits(rng: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 3, 40))):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(rng: random.Random, content: bytes) -> bytes:
    return content[: rng.randrange(len(content) + 1)]


def zeros(rng: random.Random, content: bytes) -> bytes:
    at = rng.randrange(len(content) + 1)
    return content[:at] + bytes(rng.choice((1, 64, 4096))) + content[at + rng.choice((0, 64, 4096)) :]


def twice(rng: random.Random, content: bytes) -> bytes:
    start = rng.randrange(len(content) + 1)
    return content[:start] + content[start : start + rng.randrange(200)] * 2 + content[start:]


def nested(rng: random.Random, content: bytes) -> bytes:
    depth = rng.choice((90, 300, 1100, 100_000))
    opening, closing = rng.choice((("[", "]"), ('{"a":', "}"), ("{a: ", "}")))
    return (opening * depth + "1" + closing * rng.choice((0, depth))).encode()


BYTES: tuple[Mutation, ...] = (flip_bits, cut, zeros, twice, nested)


def in_json(rng: random.Random, content: bytes) -> bytes:
    """One to three places of a JSON value replaced, removed, renamed, moved or said twice."""
    value = json.loads(content)
    for _ in range(rng.choice((1, 1, 2, 3))):
        value = _changed(rng, value)
    text = json.dumps(value)
    if rng.random() < 0.1:
        text = _said_twice(rng, text)
    return text.encode("utf-8", "surrogatepass")


def in_lines(rng: random.Random, content: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    lines[at] = in_json(rng, lines[at]) + b"\n"
    return b"".join(lines)


def in_header(rng: random.Random, content: bytes) -> bytes:
    """The header of a safetensors file changed, its length kept true half of the time."""
    length = int.from_bytes(content[:8], "little")
    header = in_json(rng, content[8 : 8 + length])
    said = len(header) if rng.random() < 0.7 else rng.choice((0, 1, length, 2**31, 2**63, 10**8))
    return said.to_bytes(8, "little") + header + content[8 + length :]


def _changed(rng: random.Random, value: Any) -> Any:
    value = copy.deepcopy(value)
    places = list(_places(value))
    if not places:
        return rng.choice(ODD)
    holder, key = rng.choice(places)
    match rng.randrange(5):
        case 0 | 1:
            holder[key] = copy.deepcopy(rng.choice(ODD))
        case 2:
            del holder[key]
        case 3:
            other, name = rng.choice(places)
            holder[key] = copy.deepcopy(other[name]) if _reachable(other, name) else None
        case 4 if isinstance(holder, dict):
            holder[rng.choice(("", "x" * 300, "\x1b[2J", "__class__", "schema_version", key + "s"))] = holder.pop(key)
        case _:
            holder[key] = [copy.deepcopy(holder[key]) for _ in range(rng.choice((0, 2, 50)))]
    return value


def _reachable(holder: Any, key: Any) -> bool:
    return key in holder if isinstance(holder, dict) else key < len(holder)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(what holds it, its key or position) of each value inside."""
    if isinstance(value, dict):
        for key in value:
            yield value, key
            yield from _places(value[key])
    elif isinstance(value, list):
        for at, each in enumerate(value):
            yield value, at
            yield from _places(each)


def _said_twice(rng: random.Random, text: str) -> str:
    if not text.startswith("{") or text == "{}":
        return text
    end = text.index(":")
    return "{" + text[1:end] + ": " + json.dumps(rng.choice(ODD)) + ", " + text[1:]
