"""Fetch models that a URL names, and explain errors of the hub's clients: was it reached, and what does it answer.

transformers, datasets and huggingface_hub each wrap the reason in errors of their own, so the chain of causes is
searched for it. ModelScope is reached through its own library, which is imported for its URLs (ms://) alone.

Directories of object storage are copied into the user's cache, one copy for each content: a directory that changed in
storage is copied again. Processes of one machine wait for each other. Nothing here communicates.
"""

import hashlib
import importlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

from filelock import FileLock
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError

from expertmesh.config.errors import InputError
from expertmesh.io.directory import io_errors, rename_synced, require_space
from expertmesh.io.storage import Storage

# The files of a model directory except code: weights, JSON, and the tokenizer's plain-text files.
MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
# Second copies of weights in other forms (`original/` of GPT-OSS): the files of a model lie beside config.json.
OTHER_WEIGHTS = "*/*.safetensors"
_BUSY = 429
_MODELSCOPE = "ms://"


def remote_code(what: str) -> InputError:
    return InputError(
        f"{what}; read it, then set model.trust_remote_code to true (--trust-remote-code where there is no config) if "
        "you want it to run",
        key="model.remote-code",
    )


def local_model(url: str, trust_remote_code: bool = False, *, weights: bool = True, holds: str = "config.json") -> Path:
    """Return the local directory with the files of the model, or the adapter, at `url`.

    Args:
        trust_remote_code: Also copy Python files.
        weights: If False, safetensors files are left out.
        holds: A file that must exist at `url`.

    Raises:
        InputError: There is no file `holds`, the disk has too little space, or storage failed.
    """
    patterns = model_patterns(trust_remote_code, weights=weights)
    storage = Storage(url, "the model")
    found = {
        name: facts
        for name, facts in storage.objects().items()
        if any(fnmatchcase(name, p) for p in patterns) and not fnmatchcase(name, OTHER_WEIGHTS)
    }
    if holds not in found:
        raise InputError(f"{url}: holds no {holds}; correct the URL", key="storage.not-found")
    sizes = {name: size for name, (size, _) in found.items()}

    def make(directory: Path) -> None:
        require_space(directory, sum(sizes.values()))
        storage.get(directory, sizes)

    return cached([url, sorted(found.items())], storage.url.rpartition("/")[2], make)


def model_patterns(trust_remote_code: bool, *, weights: bool) -> list[str]:
    """Return the patterns of the files of a model that are copied or downloaded; arguments as in `local_model`."""
    return [each for each in MODEL_FILES if weights or each != "*.safetensors"] + ["*.py"] * trust_remote_code


def cached(content: object, name: str, make: Callable[[Path], None], *, anew: bool = False) -> Path:
    """Return the cached directory `name` for this `content` (any JSON value); `make` fills it if it does not exist.

    With `anew` it is made again in any case.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "expertmesh" / "storage"
    place = root / hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
    with io_errors(place, 0):
        place.mkdir(parents=True, exist_ok=True)
        with FileLock(place / "lock"):
            if anew:
                shutil.rmtree(place / name, ignore_errors=True)
            if not (place / name).is_dir():
                temporary = place / f"tmp-{uuid.uuid4().hex}"
                # The lock is held, so these directories belong to processes that were killed.
                for left_behind in place.glob("tmp-*"):
                    shutil.rmtree(left_behind)
                temporary.mkdir()
                try:
                    make(temporary)
                    rename_synced(temporary, place / name)
                finally:
                    shutil.rmtree(temporary, ignore_errors=True)
    return place / name


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
        wanted = {"allow_patterns": patterns, "ignore_patterns": [OTHER_WEIGHTS]}
        return Path(modelscope.snapshot_download(name, revision=revision, **wanted))
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
    behind, cause = [error], error.__cause__ or error.__context__
    while cause is not None:
        behind.append(cause)
        cause = cause.__cause__ or cause.__context__
    if any(isinstance(each, GatedRepoError) for each in behind):
        return "accept the conditions on its page on the hub, and set HF_TOKEN"
    responses = [each.response for each in behind if isinstance(each, HfHubHTTPError) and each.response is not None]
    unreached = any(isinstance(each, ConnectionError | TimeoutError | LocalEntryNotFoundError) for each in behind)
    if not unreached and all(response.status_code < _BUSY for response in responses):
        return otherwise
    if constants.HF_HUB_OFFLINE:
        return f"HF_HUB_OFFLINE is set, so nobody has asked the hub, and the cache has none; unset it, or {local}"
    return f"the hub was not reached, so the network is the cause and not the name; connect, or {local}"
