"""One error of a job under torchrun: of the ranks of a machine that fail alike or after each other, one tells it.

torchrun starts ranks without looking at how they fail: each would print the same refusal, or the connections that it
has lost to the rank which failed first. The directory that torchrun has made for the errors of an attempt is where
ranks see what has been told. There the telling rank leaves its error for the summary of torchrun, as `record` does.
"""

import hashlib
import json
import os
import time
from pathlib import Path

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_TOLD = "expertmesh-told-"


def has_to_tell(message: str, *, may_follow: bool) -> bool:
    """Whether this rank has to print `message`. Always where torchrun has not started it.

    `may_follow`: the error may come from that of another rank, so anything that has been told is told instead of it.
    """
    if _ERROR_FILE not in os.environ:
        return True
    file = Path(os.environ[_ERROR_FILE])
    attempt = file.parents[1]  # of all local ranks; each has a directory of its own below
    what = "first" if may_follow else hashlib.sha256(message.encode()).hexdigest()[:16]
    try:
        if may_follow and any(attempt.glob(f"{_TOLD}*")):
            return False
        (attempt / f"{_TOLD}{what}").touch(exist_ok=False)
        content = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        file.write_text(json.dumps({"message": content}), encoding="utf-8")
    except FileExistsError:
        return False
    except OSError:
        return True  # a directory that cannot be used must not cost the error itself
    return True
