"""Merges parts of a history, each computed by a program of its own: device code of `triton.py` and
`triton_runs.py`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge_parts(
    partial, sums, out, head, num_used,
    NUM_SPLITS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Merge the parts of GROUP heads, a few parts of every head at a time."""
    most: tl.constexpr = 4 if GROUP <= 16 else 1
    few: tl.constexpr = most if most < NUM_SPLITS else NUM_SPLITS
    s = tl.arange(0, NUM_SPLITS)
    all_sizes = tl.load(
        sums + head[:, None] * NUM_SPLITS + s[None, :], mask=(s < num_used)[None, :],
        other=float("-inf"), cache_modifier=".cg",
    )  # fmt: skip
    best = tl.max(all_sizes, axis=1)
    total = tl.sum(tl.exp2(all_sizes - best[:, None]), axis=1)
    d = tl.arange(0, HEAD_DIM)
    mixed = tl.zeros((GROUP, HEAD_DIM), tl.float32)
    for first in range(0, num_used, few):
        part = first + tl.arange(0, few)
        is_part = (part < num_used)[None, :]
        slot = head[:, None] * NUM_SPLITS + part[None, :]
        size = tl.load(sums + slot, mask=is_part, other=float("-inf"), cache_modifier=".cg")
        value = tl.load(
            partial + slot[:, :, None] * HEAD_DIM + d[None, None, :], mask=is_part[:, :, None],
            other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        mixed += tl.sum(value * tl.exp2(size - best[:, None])[:, :, None], axis=1)
    tl.store(out + head[:, None] * HEAD_DIM + d[None, :], mixed / total[:, None])
