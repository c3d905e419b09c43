"""Load the model's tokenizer. Code that comes with a model runs only if `model.trust_remote_code` is set."""

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from huggingface_hub import file_exists, try_to_load_from_cache
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from expertmesh.config import ModelConfig
from expertmesh.config.errors import ExpertmeshError, InputError, SecurityError
from expertmesh.io.hub import hub_mend, model_at, remote_code
from expertmesh.io.reading import MAX_TOKENIZER_BYTES, opened, parse_json, read_file
from expertmesh.io.storage import is_url

# What tokenizers of transformers are read from.
_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "additional_chat_templates/*")
# How many characters a normaliser may make of one, and texts of a thousand characters stay harmless.
_MOST_GROWTH = 10_000


def load_tokenizer(model: ModelConfig, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of `model.name_or_path`; every rank may call it, no collective.

    `chat_template` (`data.chat_template`) is a file whose text takes the place of the tokenizer's own template. One of
    DeepSeek-V4 without a template gets ours, which writes what the published encoder writes. Raises
    `InputError` when there is no tokenizer, when it is damaged, when it needs its own code and
    `model.trust_remote_code` is off, or when the file cannot be read.
    """
    if is_url(model.name_or_path):
        directory = model_at(model.name_or_path, model.revision, model.trust_remote_code, weights=False)
        model = model.model_copy(update={"name_or_path": str(directory)})
    name = model.name_or_path
    _refuse_hostile_files(Path(name))
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
        whole = Path(name) / "tokenizer.json" if Path(name).is_dir() else _cached(model)
        if whole is not None and whole.exists():
            _refuse_growth(whole)
        tokenizer("a")  # some settings are only used here
    except ExpertmeshError:
        raise
    except Exception as error:  # transformers, the hub client and the Rust library share no base class
        reason = " ".join(str(error).split())
        if "trust_remote_code" in reason and not model.trust_remote_code:
            raise remote_code(f"the tokenizer of {name} is Python code that the model brings along") from error
        local = "set model.name_or_path to a directory that has its files"
        files_there = "check model.name_or_path and that the tokenizer's files are there and whole"
        raise InputError(
            f"the tokenizer of {name} cannot be loaded ({reason[:200]}); {hub_mend(error, local, files_there)}.",
            key="tokenizer.not-loaded",
        ) from error
    # Without any tokenizer file transformers silently makes an empty tokenizer for some families.
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder):
        raise InputError(
            f"the tokenizer of {name} has no vocabulary; put the model's tokenizer.json into its directory.",
            key="tokenizer.no-vocabulary",
        )
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    if chat_template is None and tokenizer.chat_template is None and _is_deepseek_v4(model, tokenizer):
        tokenizer.chat_template = files("expertmesh.data.encoding").joinpath("deepseek_v4.jinja").read_text("utf-8")
    if chat_template is not None:
        try:
            tokenizer.chat_template = read_file(Path(chat_template).expanduser()).decode("utf-8")
        except (OSError, ValueError) as error:
            raise InputError(
                f"data.chat_template: {chat_template} cannot be read ({error}); name a file with a Jinja template.",
                key="data.not-found",
            ) from error
    return tokenizer


def _refuse_hostile_files(directory: Path) -> None:
    """Raise `SecurityError` for what is no file, and `InputError` for what is too large to be part of a tokenizer:
    transformers and its Rust library have no limits of their own.
    """
    for path in sorted(path for pattern in _FILES for path in directory.glob(pattern)):
        if not path.is_dir():
            try:
                with opened(path, MAX_TOKENIZER_BYTES):
                    pass
            except OSError as error:
                raise InputError(
                    f"{path}: cannot be read ({error.strerror}); copy or download it again", key="tokenizer.not-loaded"
                ) from error


def _is_deepseek_v4(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether conversations are for DeepSeek-V4, whose checkpoints have an encoder in Python and no template.
    Another encoder beside the weights, as that of V4.1, is none of ours.
    """
    directory = Path(model.name_or_path)
    path = directory / "config.json" if directory.is_dir() else _cached(model, "config.json")
    if path is None or not path.is_file() or "<｜latest_reminder｜>" not in tokenizer.get_vocab():
        return False
    try:
        content = parse_json(read_file(path))
    except ValueError:  # reported by the code that reads the model's config
        return False
    return isinstance(content, dict) and content.get("model_type") == "deepseek_v4" and _has_its_encoder(model)


def _has_its_encoder(model: ModelConfig) -> bool:
    """Return whether the encoder beside the weights is that of DeepSeek-V4, or there is none in a directory."""
    encoder, directory = "encoding/encoding_dsv4.py", Path(model.name_or_path)
    if directory.is_dir():
        return not (directory / "encoding").is_dir() or (directory / encoder).exists()
    if _cached(model, encoder) is not None:
        return True
    try:
        return file_exists(model.name_or_path, encoder, revision=model.revision)
    # The hub's client raises errors of many kinds. Conversations without the encoder are refused by name later.
    except Exception:
        return False


def _cached(model: ModelConfig, name: str = "tokenizer.json") -> Path | None:
    """Return a file of a model of the hub, which has been downloaded by now."""
    found = try_to_load_from_cache(model.name_or_path, name, revision=model.revision)
    return Path(found) if isinstance(found, str) else None


def _refuse_growth(path: Path) -> None:
    """Raise `SecurityError` for a tokenizer.json that would make gigabytes of a short text."""
    try:
        content = parse_json(read_file(path, MAX_TOKENIZER_BYTES))
    except ValueError as error:
        raise InputError(
            f"{path}: cannot be read as a tokenizer ({error}); copy or download it again", key="tokenizer.not-loaded"
        ) from error
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        growth = 1
        for content_of in _replacements(content.get(part) if isinstance(content, dict) else None):
            growth *= max(1, len(content_of))
        if growth > _MOST_GROWTH:
            raise SecurityError(
                f"{path}: refused: its {part} makes up to {growth:,} characters of one; read it, and take a tokenizer "
                "that you trust",
                key="tokenizer.unsafe",
            )


def _replacements(step: Any) -> Iterator[str]:
    """Yield what the replacing steps of a part of a tokenizer put in the place of something."""
    if isinstance(step, dict):
        if step.get("type") == "Replace" and isinstance(step.get("content"), str):
            yield step["content"]
        for inner in step.values():
            yield from _replacements(inner)
    elif isinstance(step, list):
        for inner in step:
            yield from _replacements(inner)
