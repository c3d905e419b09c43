"""The model's tokenizer. Code that comes with a model runs only if `model.trust_remote_code` is set."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from expertmesh.config import ModelConfig
from expertmesh.config.errors import InputError


def load_tokenizer(model: ModelConfig, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of `model.name_or_path`; every rank may call it, no collective.

    `chat_template` (`data.chat_template`) is a file whose text takes the place of the tokenizer's own template. Raises
    `InputError` when there is no tokenizer, when it is damaged, when it needs its own code and
    `model.trust_remote_code` is off, or when the file cannot be read.
    """
    name = model.name_or_path
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
    except Exception as error:  # transformers, the hub client and the Rust library share no base class
        reason = " ".join(str(error).split())
        if "trust_remote_code" in reason and not model.trust_remote_code:
            raise InputError(
                f"the tokenizer of {name} is Python code that the model brings along; read that code, and "
                "set model.trust_remote_code: true if you trust it.",
                key="model.remote-code",
            ) from error
        raise InputError(
            f"the tokenizer of {name} cannot be loaded ({reason[:200]}); check model.name_or_path and that "
            "the tokenizer's files are there and whole.",
            key="tokenizer.not-loaded",
        ) from error
    # Without any tokenizer file transformers silently makes an empty tokenizer for some families.
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder):
        raise InputError(
            f"the tokenizer of {name} has no vocabulary; put the model's tokenizer.json into its directory.",
            key="tokenizer.no-vocabulary",
        )
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    if chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).expanduser().read_text("utf-8")
        except (OSError, ValueError) as error:
            raise InputError(
                f"data.chat_template: {chat_template} cannot be read ({error}); name a file with a Jinja template.",
                key="data.not-found",
            ) from error
    return tokenizer
