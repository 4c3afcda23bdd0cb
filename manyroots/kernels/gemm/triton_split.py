"""Rows in two FP8 numbers each, so that FP8 weights are multiplied as they are.

To make bfloat16 of a weight's every number costs more than reading it. Rows are few: each of their
numbers becomes the FP8 number next to it and another for 16 times what is left, with one scale for
a row. Both together have eight bits, as bfloat16 has, and two products with the same tile of the
weight cost a step nothing, which waits for the weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.launch import launch_options, let_next_begin, wait_for_inputs
from manyroots.kernels.scaled import LARGEST
from manyroots.kernels.scaled_gemm.reference import LEAST_SCALE

REST = tl.constexpr(16.0)
"""What the second number is times of what the first leaves."""


@dataclass(frozen=True, slots=True)
class SplitRows:
    """Rows that stand for (parts[0] + parts[1] / REST) * scales."""

    parts: Tensor
    """float8_e4m3fn [2, num_rows, k]"""
    scales: Tensor
    """float32 [num_rows]"""


@triton.jit
def split_row(values, parts, scales, row, num_rows, k_size, columns, ok, inverse_largest, least):
    """Write one row, whose values are in float32, as two numbers each."""
    scale = tl.maximum(tl.max(tl.abs(values), axis=0) * inverse_largest, least)
    scaled = values * tl.div_rn(1.0, scale)
    large = scaled.to(tl.float8e4nv)
    small = ((scaled - large.to(tl.float32)) * REST).to(tl.float8e4nv)
    to = parts + row * k_size + columns
    tl.store(to, large, mask=ok)
    tl.store(to + num_rows.to(tl.int64) * k_size, small, mask=ok)
    tl.store(scales + row, scale)


@triton.jit(do_not_specialize=["num_rows"])
def _split_rows(
    x, parts, scales, num_rows, k_size, inverse_largest, least,
    COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    ok = columns < k_size
    wait_for_inputs(DEPENDENT)
    values = tl.load(x + row * k_size + columns, mask=ok, other=0.0).to(tl.float32)
    split_row(values, parts, scales, row, num_rows, k_size, columns, ok, inverse_largest, least)


def split_rows(x: Tensor) -> SplitRows:
    """Of rows [num_rows, k] of any dtype."""
    num_rows, k_size = x.shape
    found = empty_split(num_rows, k_size, x.device)
    columns = triton.next_power_of_2(k_size)
    _split_rows[(num_rows,)](
        x, found.parts, found.scales, num_rows, k_size, 1.0 / LARGEST, LEAST_SCALE,
        COLUMNS=columns, num_warps=max(1, min(16, columns // 512)), **launch_options(x.device),
    )  # fmt: skip
    return found


def empty_split(num_rows: int, k_size: int, device: torch.device) -> SplitRows:
    """To be written."""
    return SplitRows(
        torch.empty(2, num_rows, k_size, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(num_rows, dtype=torch.float32, device=device),
    )
