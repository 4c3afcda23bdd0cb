"""Numbers that are equal on every machine, so that draws are equal, too.

Libraries' exponentials differ in their last bit between devices. This one consists of single
float32 additions and multiplications, each rounded once, and of shifts. Code that keeps their order
and contracts none into a fused multiply-add gets the same bits. A token's weight is

2 ** ((logit - best) * (LOG2_E / temperature)), times `scale(vocab)`, as an integer

The exponent t = n + f is split. n, the nearest integer, is added to the exponent's bits. f, at most
a half, goes through a polynomial (within 2e-7 of the true power). The most likely token's weight is
the scale itself. Sums of integers are exact in any order.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

LOG2_E = float(np.float32(1.4426950408889634))
LEAST = -100.0
"""Smaller exponents are raised to this: their weight is 0 in every vocabulary."""
ROUNDER = 12582912.0
"""1.5 * 2**23. A float32 of moderate size plus this is rounded to an integer, which is then in its
lowest bits."""
POWERS = (
    1.0, 0.6931470036506653, 0.24022242426872253, 0.05550733581185341, 0.009671512991189957,
    0.001326472731307149,
)  # fmt: skip
"""2**f = sum of POWERS[i] * f**i for f from -0.5 to 0.5; evaluated from the highest down."""
MANTISSA_BITS = 23


def scale_bits(vocab: int) -> int:
    """The most likely token's weight is 2 to this power: the largest that keeps sums below
    2**62."""
    return 62 - vocab.bit_length()


def weights(
    logits: npt.NDArray[np.float32], best: np.float32, temperature: np.float32
) -> npt.NDArray[np.int64]:
    """Weights of one row, whose temperature is above 0 and whose `best` logit is finite."""
    per_logit = np.float32(LOG2_E) / temperature
    with np.errstate(over="ignore", under="ignore"):
        exponents = np.maximum((logits - best) * per_logit, np.float32(LEAST))
    rounded = exponents + np.float32(ROUNDER)
    rest = exponents - (rounded - np.float32(ROUNDER))
    power = np.full_like(rest, POWERS[-1])
    for factor in POWERS[-2::-1]:
        power = power * rest + np.float32(factor)
    shift = rounded.view(np.int32) << MANTISSA_BITS
    bits = power.view(np.int32) + shift + np.int32(scale_bits(len(logits)) << MANTISSA_BITS)
    whole: npt.NDArray[np.int64] = bits.view(np.float32).astype(np.int64)
    return whole


def uniform(
    seeds: npt.NDArray[np.uint64], indices: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """One random number in [0, 1) per pair, which depends only on the pair: there is no generator
    to keep or restore. Two rounds of splitmix64's finalizer."""
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
