"""Activations in FP8, in Triton: the code with which a kernel writes rows from registers, and a
kernel for plain rows. Rounds to the same bits as `fp8_rows.py`."""

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
"""Most columns of a group that one program holds."""
_INVERSE = tl.constexpr(1.0 / LARGEST)
_SCALES = tl.constexpr(NUM_SCALES)
_LEAST = tl.constexpr(LEAST_SCALE)
_SMALLEST = tl.constexpr(2.0**-6)
"""The smallest FP8 number with full precision."""
_ROUNDER = tl.constexpr(1.5 * 2.0**14)
"""Added to a float32, leaves multiples of 2^-9, the step of smaller numbers."""


@triton.jit
def scale_of(largest):
    """The scale of numbers with this maximum, and its inverse."""
    scale = tl.maximum(largest * _INVERSE, _LEAST)
    return scale, tl.div_rn(tl.zeros_like(scale) + 1.0, scale)


@triton.jit
def scaled_groups(values, AXIS: tl.constexpr):
    """float32 values divided by a scale for each group along the last axis, and that scale."""
    scale, inverse = scale_of(tl.max(tl.abs(values), axis=AXIS))
    return values * tl.expand_dims(inverse, AXIS), scale


@triton.jit
def scale_errors(values, largest, RUN: tl.constexpr):
    """Takes numbers [n] of a row whose maximum is `largest`. Returns squared errors of each run's
    largest number for each of the tried scales, [n / RUN, scales]."""
    tops = tl.max(tl.reshape(tl.abs(values), (values.shape[0] // RUN, RUN)), axis=1)
    factors = 1.0 + tl.arange(0, _SCALES).to(tl.float32) * (1.0 / _SCALES)
    _, inverse = scale_of(largest)
    inverses = inverse * tl.div_rn(tl.zeros_like(factors) + 1.0, factors)
    scaled = tops[:, None] * inverses[None, :]
    # Rounded to three bits after the first; ties are equally far from both.
    bits = (scaled.to(tl.int32, bitcast=True) + 0x80000) & -0x100000
    off = bits.to(tl.float32, bitcast=True) - scaled
    return off * off


@triton.jit
def best_scale(largest, errors):
    """The tried scale with the least error, and its inverse."""
    step = tl.arange(0, _SCALES)
    factors = 1.0 + step.to(tl.float32) * (1.0 / _SCALES)
    sums = tl.sum(errors, axis=0) * (factors * factors)
    first = tl.min(tl.where(sums == tl.min(sums, axis=0), step, _SCALES), axis=0)
    scale, _ = scale_of(largest)
    scale *= 1.0 + first.to(tl.float32) * (1.0 / _SCALES)
    return scale, tl.div_rn(tl.zeros_like(scale) + 1.0, scale)


@triton.jit
def scaled_row(values, RUN: tl.constexpr):
    """float32 values [n] of one row, divided by the best scale for all of them, and that scale."""
    largest = tl.max(tl.abs(values), axis=0)
    scale, inverse = best_scale(largest, scale_errors(values, largest, RUN))
    return values * inverse, scale


@triton.jit
def nearest_fp8(scaled):
    """The nearest FP8 numbers, in float32, clamped to FP8's largest.

    Uses arithmetic instead of a conversion to FP8 and back. For four such conversions to a word,
    ptxas 12.8 reads two back from a register that was never written (seen on an H200 and in its
    machine code).
    """
    bits = scaled.to(tl.int32, bitcast=True)
    # Rounded to three bits after the first, ties to even.
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    # Subnormal numbers have the step of the smallest normal number.
    return tl.where(
        tl.abs(scaled) < _SMALLEST,
        (scaled + _ROUNDER) - _ROUNDER,
        bits.to(tl.float32, bitcast=True),
    )


@triton.jit
def store_parts(data, part_stride, scaled, ok, PARTS: tl.constexpr):
    """Write numbers in FP8 at `data`, and the rounded remainder at an offset of `part_stride`."""
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
    """Output buffers, with a scale for each `group` columns."""
    device = like.device
    data = torch.empty(form.num_parts, num_rows, k_size, dtype=torch.float8_e4m3fn, device=device)
    # The scales of one group are adjacent, as the library requires.
    num_groups = triton.cdiv(k_size, group)
    scales = torch.empty(num_groups, num_rows, dtype=torch.float32, device=device).t()
    return Fp8Rows(data, scales, group, like.dtype, values)
