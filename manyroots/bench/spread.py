"""A figure with its spread: the median of several samples, and the least and most of them.

Takes samples, each of which was measured by itself; gives what a report holds. Nothing here
subtracts one sample from another, so that a slow one can only make its own figure worse.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

# A run of two milliseconds is told as exactly as one of two minutes.
LEAST_FIGURES = 5


def spread(samples: Sequence[float], digits: int = 4) -> dict[str, Any]:
    """Median, least, most and every sample, rounded to `digits` places, or to more if small."""
    return {
        "median": _rounded(statistics.median(samples), digits),
        "least": _rounded(min(samples), digits),
        "most": _rounded(max(samples), digits),
        "samples": [_rounded(sample, digits) for sample in samples],
    }


def _rounded(value: float, digits: int) -> float:
    if value == 0 or not math.isfinite(value):
        return value
    return round(value, max(digits, LEAST_FIGURES - 1 - math.floor(math.log10(abs(value)))))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of `values` that so large a share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
