"""A figure with its spread: the median of several samples, and the least and most of them.

Takes samples, each of which was measured by itself; gives what a report holds. Nothing here
subtracts one sample from another, so that a slow one can only make its own figure worse.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any


def spread(samples: Sequence[float], digits: int = 4) -> dict[str, Any]:
    """Median, least, most and every sample, rounded."""
    return {
        "median": round(statistics.median(samples), digits),
        "least": round(min(samples), digits),
        "most": round(max(samples), digits),
        "samples": [round(sample, digits) for sample in samples],
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of `values` that so large a share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
