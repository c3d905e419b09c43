"""Check URLs of object storage.

This file has the supported schemes and the fsspec package that each needs. It opens nothing and uses no network.
"""

import importlib.util
import re

from expertmesh.config.errors import InputError

# The package behind each scheme; None: fsspec itself.
PACKAGES = {
    "file": None, "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs",
    "abfss": "adlfs",
}  # fmt: skip
_PLACE = re.compile(r"[^/\s]*/?[^\s]*")


def is_url(path: str) -> bool:
    """Return whether `path` is a URL."""
    return "://" in path


def url_problem(url: str) -> str | None:
    """Return why `url` cannot be a directory of object storage, or None if it can."""
    scheme, separator, place = url.partition("://")
    host = place.partition("/")[0]
    if not separator or scheme not in PACKAGES:
        return f"is no URL of storage that is read and written: {', '.join(f'{each}://' for each in PACKAGES)}"
    if not place.strip("/") or not _PLACE.fullmatch(place) or ".." in place.split("/"):
        return "names no directory; write s3://BUCKET/DIRECTORY"
    if ":" in host or any(each in place for each in "?#"):
        return (
            "holds credentials or options, which would be copied into logs and config.yaml; set them in the environment"
        )
    return None


def refuse_url(url: str, what: str) -> None:
    """Raise `InputError` for a URL that cannot be opened here, also if a package is missing. No network access."""
    if (problem := url_problem(url)) is not None:
        shown = re.sub(r"//.*[@?#].*", "//...", url)  # the message must not contain credentials
        raise InputError(f"{what} {shown}: {problem}", key="storage.unsupported-url")
    package = PACKAGES[url.partition("://")[0]]
    if package is not None and importlib.util.find_spec(package) is None:
        raise InputError(
            f"{what} {url}: needs the {package} package; pip install {package}", key="install.missing-package"
        )
