"""Fetch models that a URL names, and explain errors of the hub's clients: was it reached, and what does it answer.

transformers, datasets and huggingface_hub each wrap the reason in errors of their own, so the chain of causes is
searched for it. ModelScope is asked through its own library, which is imported for its URLs (ms://) alone.
"""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError

from expertmesh.config.errors import InputError
from expertmesh.io.local_copy import local_model, model_patterns

_BUSY = 429
_MODELSCOPE = "ms://"


def model_at(url: str, revision: str | None = None, trust_remote_code: bool = False, *, weights: bool = True) -> Path:
    """Return the local directory with the files of the model at `url`: of ModelScope (ms://) or of object storage.

    Args:
        revision: A branch, tag or commit of ModelScope.
        trust_remote_code: Also copy Python files.
        weights: If False, weights are left out.

    Raises:
        InputError: The model is not there, or a package is missing.
    """
    if not url.startswith(_MODELSCOPE):
        return local_model(url, trust_remote_code, weights=weights)
    name = url.removeprefix(_MODELSCOPE)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise InputError(f"model {url}: is no id of ModelScope; write ms://OWNER/NAME", key="model.not-found")
    try:
        modelscope = importlib.import_module("modelscope")
    except ImportError as error:
        raise InputError(
            f"model {url}: needs the modelscope package; pip install modelscope", key="install.missing-package"
        ) from error
    patterns = model_patterns(trust_remote_code, weights=weights)
    try:
        return Path(modelscope.snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # errors of its library and of the libraries below it
        where = f"{url} at revision {revision}" if revision else url
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"model {where}: ModelScope cannot provide it ({reason[:200]}); correct the name, or name a directory that "
            "has its files",
            key="model.not-found",
        ) from error


def hub_mend(error: BaseException, local: str, otherwise: str) -> str:
    """Return how to fix `error`: `otherwise` if the hub has answered, else fix the network, or use `local` instead."""
    behind = list(_behind(error))
    if any(isinstance(each, GatedRepoError) for each in behind):
        return "accept the conditions on its page on the hub, and set HF_TOKEN"
    responses = [each.response for each in behind if isinstance(each, HfHubHTTPError) and each.response is not None]
    unreached = any(isinstance(each, ConnectionError | TimeoutError | LocalEntryNotFoundError) for each in behind)
    if not unreached and all(response.status_code < _BUSY for response in responses):
        return otherwise
    if constants.HF_HUB_OFFLINE:
        return f"HF_HUB_OFFLINE is set, so nobody has asked the hub, and the cache has none; unset it, or {local}"
    return f"the hub was not reached, so the network is the cause and not the name; connect, or {local}"


def _behind(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the chain of its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
