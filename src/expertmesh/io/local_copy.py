"""Copy directories of object storage to local files: models, adapters, checkpoints.

The copies are in the user's cache, one for each content: a directory that changed in storage is copied again. Processes
of one machine wait for each other. Nothing here communicates.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

from filelock import FileLock

from expertmesh.config.errors import InputError
from expertmesh.io.directory import io_errors, require_space
from expertmesh.io.safetensors_writer import rename_synced
from expertmesh.io.storage import Storage

# The files of a model directory except code: weights, JSON, and the tokenizer's plain-text files.
MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")


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
    found = {name: facts for name, facts in storage.objects().items() if any(fnmatchcase(name, p) for p in patterns)}
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
