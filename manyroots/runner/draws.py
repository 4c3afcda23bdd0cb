"""Random numbers that depend on (seed, index) alone.

A sequence's draw number i is the same whatever else is in the batch, however its prompt was cut
into chunks, and after a retraction. There is no generator state to keep or to restore.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def uniform(
    seeds: npt.NDArray[np.uint64], indices: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per pair, by two rounds of splitmix64's finalizer."""
    with np.errstate(over="ignore"):
        state = _mix(seeds) + (indices.astype(np.uint64) + np.uint64(1)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        bits = _mix(state)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
