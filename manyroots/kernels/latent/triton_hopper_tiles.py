"""Shared by the kernels of latent decode on Hopper GPUs, in Gluon: sizes, and how work is divided.

All rows' tokens form one list of units. Each program takes an equal range of it, so the work
follows the lengths while the launch grid is fixed.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

LATENT, ROPE = 512, 64
HALF = gl.constexpr(256)
"""Columns of a copy, and output columns of one group of warps."""
ROPE_DIM = gl.constexpr(ROPE)
TOKENS = gl.constexpr(64)
"""Tokens of a tile."""
ROWS_AT_ONCE = gl.constexpr(128)
"""Rows whose lengths are added up at once. It is no argument, so a kernel is compiled once for any
number of rows."""
load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # Triton 3.6's name


def _quota(total, longest, num_parts):
    """Units of a part: an equal share, or the longest row if that is hardly more, so that rows of
    one length are not split."""
    quota = (total + num_parts - 1) // num_parts
    if longest > quota:
        if longest * 8 <= quota * 9:
            quota = longest
    if quota < 1:
        quota = 1
    return quota


_quota_in_gluon = gluon.jit(_quota)
quota_in_triton = triton.jit(_quota)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _units_of(lengths, rows, num_rows, UNIT: gl.constexpr):
    return (gl.load(lengths + rows, mask=rows < num_rows, other=0) + UNIT - 1) // UNIT


@gluon.jit
def plan_of(lengths, num_rows, part, num_parts, UNIT: gl.constexpr, WARPS: gl.constexpr):
    """The start of a part: the row, the unit of tokens in it, and the number of units of the
    part."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    r = gl.arange(0, ROWS_AT_ONCE, layout)
    total, longest = 0, 0
    for begin in range(0, num_rows, ROWS_AT_ONCE):
        units = _units_of(lengths, begin + r, num_rows, UNIT)
        total += gl.sum(units, 0)
        longest = gl.maximum(longest, gl.max(units, 0))
    quota = _quota_in_gluon(total, longest, num_parts)
    first = part * quota
    row, before, end = 0, 0, 0
    for begin in range(0, num_rows, ROWS_AT_ONCE):
        units = _units_of(lengths, begin + r, num_rows, UNIT)
        is_before = end + gl.associative_scan(units, 0, _add) <= first
        row += gl.sum(is_before.to(gl.int32), 0)
        before += gl.sum(gl.where(is_before, units, 0), 0)
        end += gl.sum(units, 0)
    return row, first - before, gl.minimum(total - first, quota)


@gluon.jit
def look_up(table, first, last_page, PAGE_SIZE: gl.constexpr, COPIED: gl.constexpr):
    """The pages of a tile whose first token is `first`; entries past the last page repeat it."""
    pages = ()
    for j in gl.static_range(TOKENS // COPIED):
        page = gl.minimum((first + j * COPIED) // PAGE_SIZE, last_page)
        pages += (gl.load(table + page),)  # type: ignore[assignment]
    return pages


@gluon.jit
def clear_after(tile, first, length, WARPS: gl.constexpr):
    """Write zeros over values of no token: zero times NaN is NaN. A few at a time, because
    registers are scarce."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    for j in gl.static_range(TOKENS // 8):
        few = tile.slice(j * 8, 8)
        t = first + j * 8 + gl.arange(0, 8, gl.SliceLayout(1, layout))
        few.store(gl.where((t < length)[:, None], few.load(layout), 0.0))
    fence_async_shared()


@gluon.jit
def barriers(num: gl.constexpr, count: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [num, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(num):
        mbarrier.init(bars.index(i), count=count)
    return bars
