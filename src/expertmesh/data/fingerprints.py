"""What prepared tokens depend on: tokenizer, template, settings and code, and the rows that they were made from."""

import hashlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from expertmesh.data.build import Recipe
from expertmesh.data.sources import locations

# Keys of `data` that tokens do not depend on; the template's text counts, not its file.
_NO_MATTER = {"train", "eval", "packing", "shuffle", "chat_template", "prepared_path", "stream", "stream_rows"}
# Files of this package that only read tokens.
_READERS = {"loader", "packing", "prepared", "fingerprints", "mixture", "stream", "__init__"}


class Origin(BaseModel):
    """One location as it was read."""

    name: str
    stamp: str
    content: str


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """Return all but the rows that the tokens of a recipe depend on."""
    return {
        "code": _code_sha256(),
        "versions": {name: importlib.metadata.version(name) for name in ("transformers", "tokenizers", "jinja2")},
        "tokenizer": _tokenizer_sha256(recipe),
        "model_vocab_size": recipe.model_vocab_size,
        "pairs": recipe.pairs,
        "sources": [source.model_dump(mode="json", exclude={"weight", "repeat", "name"}) for source in recipe.sources],
        "data": recipe.config.model_dump(mode="json", exclude=_NO_MATTER),
    }


class Origins:
    """The locations of a recipe, looked at once."""

    def __init__(self, recipe: Recipe) -> None:
        self._locations = [each for source in recipe.sources for each in locations(source.path)]
        self._contents: dict[int, str] = {}

    def are(self, before: list[Origin]) -> bool:
        """Return whether these are the locations that were read, with the same content."""
        if [each.name for each in self._locations] != [origin.name for origin in before]:
            return False
        return all(
            location.stamp() == origin.stamp or self._content(at) == origin.content
            for at, (location, origin) in enumerate(zip(self._locations, before, strict=True))
        )

    def stamps(self) -> list[str]:
        return [location.stamp() for location in self._locations]

    def now(self) -> list[Origin]:
        return [
            Origin(name=location.name, stamp=location.stamp(), content=self._content(at))
            for at, location in enumerate(self._locations)
        ]

    def _content(self, at: int) -> str:
        if at not in self._contents:
            self._contents[at] = self._locations[at].content()
        return self._contents[at]


def sha256_of(text: str) -> str:
    """Return the hash of the text's UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def _code_sha256() -> str:
    """Return the hash of the code that makes tokens of rows: the results of an earlier version are not taken."""
    here = Path(__file__).parent
    return sha256_of(
        "".join(path.read_text("utf-8") for path in sorted(here.rglob("*.py")) if path.stem not in _READERS)
    )


def _tokenizer_sha256(recipe: Recipe) -> str:
    tokenizer = recipe.tokenizer
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        for state in ("truncation", "padding"):  # calls change them
            backend.pop(state, None)
    else:
        files = [Path(str(getattr(tokenizer, name, ""))) for name in tokenizer.vocab_files_names]
        backend = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.is_file()}
        backend |= {"vocabulary": tokenizer.get_vocab(), "arguments": repr(sorted(tokenizer.init_kwargs.items()))}
    special = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
    return sha256_of(json.dumps([type(tokenizer).__name__, backend, tokenizer.chat_template, special], sort_keys=True))
