"""Many rows times a weight in FP8, by the matrix instructions of FP8.

Same signatures as `reference.py`. Rows are rounded by a kernel of their own, to the same bits as
the reference's. Products with a scale for each row of the weight, in bfloat16, are the library's;
others are tiles of ours, which scale each group's sums as they are added up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.launch import launch_options, let_next_begin, wait_for_inputs
from manyroots.kernels.scaled import LARGEST, SIDE_STEP, TILE_COLUMNS, ScaledMatrix
from manyroots.kernels.scaled_gemm.reference import LEAST_SCALE

MOST_COLUMNS = 32_768
"""Of a row that one program rounds."""


@triton.jit
def _round_rows(
    x, data, scales, k_size, group, scale_row, scale_group, inverse_largest, least,
    GROUPS: tl.constexpr, COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    which = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = tl.arange(0, COLUMNS)
    at = which[:, None] * group + column[None, :]
    inside = (column < group)[None, :] & (at < k_size)
    wait_for_inputs(DEPENDENT)
    values = tl.load(x + row * k_size + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), axis=1) * inverse_largest, least)
    rounded = values * tl.div_rn(tl.full((GROUPS,), 1.0, tl.float32), scale)[:, None]
    tl.store(data + row * k_size + at, rounded.to(tl.float8e4nv), mask=inside)
    to = scales + row * scale_row + which * scale_group
    tl.store(to, scale, mask=which * group < k_size)


@triton.jit(do_not_specialize=["num_rows"])
def _tiles(
    x, x_scales, w, w_scales, bias, out, num_rows, n_size, k_size, x_row, x_group, w_row, w_group,
    GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One tile of the product. With GROUP, scales are of so many columns each; else of rows."""
    let_next_begin(DEPENDENT)
    pid = tl.program_id(0)
    # Tiles of a band of rows follow each other, so that what they read stays in the cache.
    across = tl.cdiv(n_size, BLOCK_N)
    band = pid // (BAND * across) * BAND
    height = tl.minimum(tl.cdiv(num_rows, BLOCK_M) - band, BAND)
    rows = (band + pid % (BAND * across) % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (pid % (BAND * across) // height) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(rows, num_rows - 1)
    column = tl.minimum(columns, n_size - 1)
    k = tl.arange(0, BLOCK_K)
    x_at = x + row.to(tl.int64)[:, None] * k_size + k[None, :]
    w_at = w + column.to(tl.int64)[None, :] * k_size + k[:, None]
    wait_for_inputs(DEPENDENT)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for at in range(0, k_size, BLOCK_K):
        if EVEN_K:
            left, right = tl.load(x_at + at), tl.load(w_at + at)
        else:
            # As bytes: what is masked is zero in FP8, too.
            left = tl.load(x_at + at, mask=(at + k < k_size)[None, :], other=0.0)
            right = tl.load(w_at + at, mask=(at + k < k_size)[:, None], other=0.0)
        if GROUP:
            ours = tl.load(x_scales + row * x_row + (at // GROUP) * x_group)
            theirs = tl.load(w_scales + column * w_row + (at // GROUP) * w_group)
            acc += tl.dot(left, right) * (ours[:, None] * theirs[None, :])
        else:
            acc = tl.dot(left, right, acc)
    if not GROUP:
        ours, theirs = tl.load(x_scales + row * x_row), tl.load(w_scales + column * w_row)
        acc *= ours[:, None] * theirs[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + column).to(tl.float32)[None, :]
    to = out + rows.to(tl.int64)[:, None] * n_size + columns[None, :]
    tl.store(to, acc, mask=(rows < num_rows)[:, None] & (columns < n_size)[None, :])


def is_for(weight: ScaledMatrix, dtype: torch.dtype) -> bool:
    """Whether `linear` computes this: a tile lies within a group of columns, and a row of groups
    within a program."""
    k_size = weight.shape[1]
    fits = weight.has_row_scales or weight.group % TILE_COLUMNS == 0
    return k_size % SIDE_STEP == 0 and k_size <= MOST_COLUMNS and fits


def round_rows(x: Tensor, group: int) -> ScaledMatrix:
    """Activations [rows, k] in FP8, with a scale for each `group` of a row's columns: the smallest
    that holds its largest number."""
    num_rows, k_size = x.shape
    data = torch.empty(num_rows, k_size, dtype=torch.float8_e4m3fn, device=x.device)
    num_groups = triton.cdiv(k_size, group)
    # The scales of one group are side by side: the library wants them so.
    scales = torch.empty(num_groups, num_rows, dtype=torch.float32, device=x.device).t()
    columns = triton.next_power_of_2(min(group, k_size))
    groups = max(1, min(triton.next_power_of_2(num_groups), 8192 // columns))
    _round_rows[(num_rows, triton.cdiv(num_groups, groups))](
        x, data, scales, k_size, group, scales.stride(0), scales.stride(1), 1.0 / LARGEST,
        LEAST_SCALE,
        GROUPS=groups, COLUMNS=columns, num_warps=4 if groups * columns <= 4096 else 8,
        **launch_options(x.device),
    )  # fmt: skip
    return ScaledMatrix(data, scales, group)


def linear(x: Tensor, weight: ScaledMatrix, bias: Tensor | None = None) -> Tensor:
    """x [rows, k] rounded, times weight [n, k] transposed, and a bias [n], in x's dtype."""
    rounded = round_rows(x.contiguous(), weight.group)
    if _is_librarys(x, weight):
        # Scales of groups lie side by side there, and are summed up exactly.
        scales = weight.scales.t().contiguous()
        return torch._scaled_mm(
            rounded.data, weight.data.t(), rounded.scales, scales, bias=bias,
            out_dtype=x.dtype, use_fast_accum=weight.has_row_scales,
        )  # fmt: skip
    return in_tiles(rounded, weight, bias, x.dtype)


def _is_librarys(x: Tensor, weight: ScaledMatrix) -> bool:
    """Whether the library has such a product: on Hopper, of rows' scales or of 128 columns', and in
    bfloat16."""
    return (
        x.device.type == "cuda"
        and x.dtype is torch.bfloat16
        and (weight.has_row_scales or weight.group == TILE_COLUMNS)
        and weight.shape[0] % SIDE_STEP == 0
        and weight.shape[1] % TILE_COLUMNS == 0
    )


def in_tiles(
    rounded: ScaledMatrix, weight: ScaledMatrix, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The product of both, by our own kernel."""
    num_rows, k_size = rounded.shape
    n_size = weight.shape[0]
    out = torch.empty(num_rows, n_size, dtype=dtype, device=rounded.data.device)
    block_m = 64 if num_rows <= 64 else 128
    grid = (triton.cdiv(num_rows, block_m) * triton.cdiv(n_size, 128),)
    _tiles[grid](
        rounded.data, rounded.scales, weight.data, weight.scales, out if bias is None else bias,
        out, num_rows, n_size, k_size, *rounded.scales.stride(), *weight.scales.stride(),
        GROUP=0 if weight.has_row_scales else weight.group, HAS_BIAS=bias is not None,
        EVEN_K=k_size % TILE_COLUMNS == 0, BLOCK_M=block_m, BLOCK_N=128, BLOCK_K=TILE_COLUMNS,
        BAND=8,
        num_warps=4 if block_m == 64 else 8, num_stages=3, **launch_options(out.device),
    )  # fmt: skip
    return out
