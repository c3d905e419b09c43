"""What the command line of `train` says beside the configuration: how to run, not what to compute. And its units.

None of it is part of a run's identity: the same run may go on with other values.
"""

import argparse
import re
from dataclasses import dataclass
from typing import Literal

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_THOUSANDS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True, slots=True)
class RunOptions:
    """`max_seconds` counts from the start of the command, over all restarts; None is no limit.

    `audit`: compare samples or all of the loaded weights with their files. `arguments`: see `Control`.
    """

    nproc: int | None = None
    max_seconds: float | None = None
    max_restarts: int = 0
    audit: Literal["sampled", "full"] = "sampled"
    arguments: str = ""


def duration(text: str) -> float:
    """Seconds in `text`: a number, or a number with s, m, h or d (`90s`, `1.5h`). For argparse."""
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if matched is None or float(matched[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a length of time; write 90s, 30m, 2h or seconds")
    return float(matched[1]) * _SECONDS[matched[2]]


def size(text: str) -> int:
    """Bytes in `text`: a number, or one with KB, MB, GB, TB (powers of 1000) or KiB, ... (of 1024). For argparse."""
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT]?)(i?)B)?", text.strip(), re.IGNORECASE)
    if matched is None or float(matched[1]) == 0 or (matched[3] and not matched[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 5GB, 500MB, 4GiB or bytes")
    unit = 1024 if matched[3] else 1000
    return int(float(matched[1]) * unit ** _THOUSANDS[(matched[2] or "").upper()])
