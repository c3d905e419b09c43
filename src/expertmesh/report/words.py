"""Numbers in the words of the report."""

import math

import numpy as np
import numpy.typing as npt

NOTHING = "–"


def number(value: float, digits: int = 4) -> str:
    """`digits` significant ones, thousands apart; a dash for what is not known."""
    if not math.isfinite(value):
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def whole(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) else NOTHING


def size(value: float) -> str:
    """Bytes."""
    if not math.isfinite(value):
        return NOTHING
    for unit, limit in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(value) >= limit:
            return f"{value / limit:.2f} {unit}" if unit == "GiB" else f"{value / limit:.1f} {unit}"
    return f"{value:.0f} bytes"


def duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return NOTHING
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 72 * 60 else f"{seconds / 86400:.1f} days"


def plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'s' * (count != 1)}"


def known(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Without what is not known."""
    return values[np.isfinite(values)]


def last(values: npt.NDArray[np.float64]) -> float:
    """The last value that is known, or NaN."""
    finite = known(values)
    return float(finite[-1]) if len(finite) else math.nan


def first(values: npt.NDArray[np.float64]) -> float:
    finite = known(values)
    return float(finite[0]) if len(finite) else math.nan


def middle(values: npt.NDArray[np.float64]) -> float:
    """The median of what is known, or NaN."""
    finite = known(values)
    return float(np.median(finite)) if len(finite) else math.nan


def highest(values: npt.NDArray[np.float64]) -> float:
    finite = known(values)
    return float(finite.max()) if len(finite) else math.nan


def lowest(values: npt.NDArray[np.float64]) -> float:
    finite = known(values)
    return float(finite.min()) if len(finite) else math.nan
