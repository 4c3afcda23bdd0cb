"""Activations in FP8 in Triton: what a kernel that has rows in registers writes of them, and a
kernel for rows that come as they are. See `fp8_rows.py`, to whose bits this rounds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.fp8_rows import (
    LEAST_SCALE,
    NUM_SCALES,
    ROW_GROUP,
    SHORTEST_RUN,
    Fp8Form,
    Fp8Rows,
    run_length,
    tries_scales,
)
from manyroots.kernels.launch import launch_options, let_next_begin, wait_for_inputs
from manyroots.kernels.scaled import LARGEST

MOST_COLUMNS = 32_768
"""Of a group that one program has."""
_INVERSE = tl.constexpr(1.0 / LARGEST)
_SCALES = tl.constexpr(NUM_SCALES)
_LEAST = tl.constexpr(LEAST_SCALE)
_SMALLEST = tl.constexpr(2.0**-6)
"""Number of FP8 that has all its bits."""
_ROUNDER = tl.constexpr(1.5 * 2.0**14)
"""What float32 keeps no more than multiples of 2^-9 beside, the step of smaller ones."""


@triton.jit
def scale_of(largest):
    """Of numbers that are at most so large: their scale, and its inverse."""
    scale = tl.maximum(largest * _INVERSE, _LEAST)
    return scale, tl.div_rn(tl.zeros_like(scale) + 1.0, scale)


@triton.jit
def scaled_groups(values, AXIS: tl.constexpr):
    """Values in float32 divided by a scale for each group of them along the last axis, and that."""
    scale, inverse = scale_of(tl.max(tl.abs(values), axis=AXIS))
    return values * tl.expand_dims(inverse, AXIS), scale


@triton.jit
def scale_errors(values, largest, RUN: tl.constexpr):
    """Of numbers [n] of a row that has none above `largest`: squared errors of each run's largest,
    with each of the scales that are tried, [n / RUN, scales]."""
    tops = tl.max(tl.reshape(tl.abs(values), (values.shape[0] // RUN, RUN)), axis=1)
    factors = 1.0 + tl.arange(0, _SCALES).to(tl.float32) * (1.0 / _SCALES)
    _, inverse = scale_of(largest)
    inverses = inverse * tl.div_rn(tl.zeros_like(factors) + 1.0, factors)
    scaled = tops[:, None] * inverses[None, :]
    # To three bits behind the first; ties are as far from either.
    bits = (scaled.to(tl.int32, bitcast=True) + 0x80000) & -0x100000
    off = bits.to(tl.float32, bitcast=True) - scaled
    return off * off


@triton.jit
def best_scale(largest, errors):
    """The one of the scales that are tried that leaves least, and its inverse."""
    step = tl.arange(0, _SCALES)
    factors = 1.0 + step.to(tl.float32) * (1.0 / _SCALES)
    sums = tl.sum(errors, axis=0) * (factors * factors)
    first = tl.min(tl.where(sums == tl.min(sums, axis=0), step, _SCALES), axis=0)
    scale, _ = scale_of(largest)
    scale *= 1.0 + first.to(tl.float32) * (1.0 / _SCALES)
    return scale, tl.div_rn(tl.zeros_like(scale) + 1.0, scale)


@triton.jit
def scaled_row(values, RUN: tl.constexpr):
    """Values [n] in float32 of one row, divided by the best scale for all of them, and that."""
    largest = tl.max(tl.abs(values), axis=0)
    scale, inverse = best_scale(largest, scale_errors(values, largest, RUN))
    return values * inverse, scale


@triton.jit
def nearest_fp8(scaled):
    """The numbers of FP8 next to these, in float32, none of them beyond its largest.

    By arithmetic, and not by a conversion there and back: of four such to a word, ptxas 12.8 reads
    back two from a register that nobody wrote (seen on an H200 and in its machine code).
    """
    bits = scaled.to(tl.int32, bitcast=True)
    # To three bits behind the first, ties to the even one.
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    # Numbers below the smallest of these have the step of those.
    return tl.where(
        tl.abs(scaled) < _SMALLEST,
        (scaled + _ROUNDER) - _ROUNDER,
        bits.to(tl.float32, bitcast=True),
    )


@triton.jit
def store_parts(data, part_stride, scaled, ok, PARTS: tl.constexpr):
    """Write numbers in FP8 at `data`, and what that leaves of them `part_stride` behind."""
    if PARTS == 1:
        tl.store(data, scaled.to(tl.float8e4nv), mask=ok)
    else:
        large = nearest_fp8(scaled)
        tl.store(data, large.to(tl.float8e4nv), mask=ok)
        tl.store(data + part_stride, (scaled - large).to(tl.float8e4nv), mask=ok)


@triton.jit(do_not_specialize=["num_rows", "scale_group"])
def _in_fp8(
    x, data, scales, num_rows, k_size, group, scale_row, scale_group,
    PARTS: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, RUN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    which = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = tl.arange(0, COLUMNS)
    at = which[:, None] * group + column[None, :]
    inside = (column < group)[None, :] & (at < k_size)
    wait_for_inputs(DEPENDENT)
    values = tl.load(x + row * k_size + at, mask=inside, other=0.0).to(tl.float32)
    if RUN:
        scaled, scale = scaled_row(tl.reshape(values, (COLUMNS,)), RUN)
        scaled, scale = tl.reshape(scaled, (1, COLUMNS)), tl.zeros((1,), tl.float32) + scale
    else:
        scaled, scale = scaled_groups(values, 1)
    part_stride = num_rows.to(tl.int64) * k_size
    store_parts(data + row * k_size + at, part_stride, scaled, inside, PARTS)
    to = scales + row * scale_row + which * scale_group
    tl.store(to, scale, mask=which * group < k_size)


def in_fp8(x: Tensor, form: Fp8Form) -> Fp8Rows:
    """Rows [num_rows, k] of any dtype."""
    num_rows, k_size = x.shape
    group = form.group or (k_size if k_size <= MOST_COLUMNS else ROW_GROUP)
    rows = empty_rows(num_rows, k_size, form, group, x if form.keeps_values else None, x)
    num_groups = rows.scales.shape[1]
    columns = max(SHORTEST_RUN, triton.next_power_of_2(min(group, k_size)))
    groups = max(1, min(triton.next_power_of_2(num_groups), 8192 // columns))
    tries = tries_scales(form.num_parts, group, k_size)
    _in_fp8[(num_rows, triton.cdiv(num_groups, groups))](
        x, rows.data, rows.scales, num_rows, k_size, group, *rows.scales.stride(),
        PARTS=form.num_parts, GROUPS=groups, COLUMNS=columns,
        RUN=run_length(k_size) if tries else 0,
        num_warps=max(1, min(16, groups * columns // (1024 if tries else 512))),
        **launch_options(x.device),
    )  # fmt: skip
    return rows


def empty_rows(
    num_rows: int,
    k_size: int,
    form: Fp8Form,
    group: int,
    values: Tensor | None,
    like: Tensor,
) -> Fp8Rows:
    """To be written, with a scale for each `group` columns."""
    device = like.device
    data = torch.empty(form.num_parts, num_rows, k_size, dtype=torch.float8_e4m3fn, device=device)
    # The scales of one group are side by side: the library wants them so.
    num_groups = triton.cdiv(k_size, group)
    scales = torch.empty(num_groups, num_rows, dtype=torch.float32, device=device).t()
    return Fp8Rows(data, scales, group, like.dtype, values)
