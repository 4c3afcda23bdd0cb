"""Many rows times a weight in FP8, with FP8 matrix instructions.

Same signatures as `reference.py`. Rows come rounded, or a separate kernel rounds them, to the same
bits as the reference's. If two scales have the same error, up to the order of its sum, either may
be chosen. The library computes bfloat16 products with a scale per row of the weight. Our own tiles
compute the others; they scale each group's sums as they are added up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.fp8_rows import Fp8Form, Fp8Rows
from manyroots.kernels.launch import (
    is_dependent,
    launch_options,
    let_next_begin,
    wait_for_inputs,
)
from manyroots.kernels.scaled import SIDE_STEP, TILE_COLUMNS, ScaledMatrix
from manyroots.kernels.triton_fp8_rows import MOST_COLUMNS, in_fp8


@triton.jit(do_not_specialize=["num_rows", "x_group"])
def _tiles(
    x, x_scales, w, w_scales, bias, out, num_rows, n_size, k_size, x_row, x_group, w_row, w_group,
    GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One tile of the product. With GROUP, each scale covers this many columns; otherwise a row."""
    let_next_begin(DEPENDENT)
    pid = tl.program_id(0)
    # Tiles of a band of rows follow each other, so that their inputs stay in the cache.
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
            # Loaded as bytes: masked bytes are zero in FP8, too.
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
    """Whether `linear` supports this product: a tile lies within a group of columns, and a row of
    groups within a program."""
    k_size = weight.shape[1]
    fits = weight.has_row_scales or weight.group % TILE_COLUMNS == 0
    return k_size % SIDE_STEP == 0 and k_size <= MOST_COLUMNS and fits


def form_for(weight: ScaledMatrix, keeps_values: bool) -> Fp8Form:
    """The form in which `linear` reads rows; it rounds plain rows itself."""
    return Fp8Form(1, weight.group, keeps_values)


def linear(x: Tensor | Fp8Rows, weight: ScaledMatrix, bias: Tensor | None = None) -> Tensor:
    """x [rows, k] rounded, times weight [n, k] transposed, and a bias [n], in x's dtype."""
    if isinstance(x, Tensor):
        x = in_fp8(x.contiguous(), form_for(weight, False))
    rounded = x.rounded
    if _is_librarys(x, weight):
        # The library needs the scales of a group to be adjacent, and sums exactly.
        scales = weight.scales.t().contiguous()
        return torch._scaled_mm(
            rounded.data, weight.data.t(), rounded.scales, scales, bias=bias,
            out_dtype=x.dtype, use_fast_accum=weight.has_row_scales,
        )  # fmt: skip
    return in_tiles(rounded, weight, bias, x.dtype)


def _is_librarys(x: Fp8Rows, weight: ScaledMatrix) -> bool:
    """Whether the library has such a product: on Hopper, in bfloat16, with scales of rows, or of
    128 columns if rows and columns are whole tiles."""
    if not is_dependent(x.data.device) or x.dtype is not torch.bfloat16:
        return False
    if weight.shape[1] % TILE_COLUMNS:
        return False
    if weight.has_row_scales:
        return weight.shape[0] % SIDE_STEP == 0
    is_whole = x.shape[0] % SIDE_STEP == 0 and weight.shape[0] % TILE_COLUMNS == 0
    return weight.group == TILE_COLUMNS and is_whole


def in_tiles(
    rounded: ScaledMatrix, weight: ScaledMatrix, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The product by our own kernel."""
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
