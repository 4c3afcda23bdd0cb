"""Batch sizes that graphs are captured for. A step runs in the next larger one, padded."""

from __future__ import annotations

from bisect import bisect_left

_SMALL = (1, 2, 4, 8, 16, 24, 32, 48, 64)
_STEP = 32


def buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Close enough together that padding costs little, few enough to capture in seconds.

    Up to 64 rows a step's time hardly depends on their number; beyond, it grows.
    """
    sizes = [*_SMALL, *range(_SMALL[-1] + _STEP, max_num_seqs, _STEP), max_num_seqs]
    return tuple(sorted({size for size in sizes if size <= max_num_seqs}))


def bucket_of(num_rows: int, sizes: tuple[int, ...]) -> int:
    """The smallest of `sizes` that has room."""
    return sizes[bisect_left(sizes, num_rows)]
