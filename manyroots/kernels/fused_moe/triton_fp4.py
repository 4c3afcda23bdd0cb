"""Experts' products with weights in MXFP4, converted to bfloat16 in registers.

A tile of a weight is 16 words of eight numbers in each row (`kernels/mxfp4.py` gives the layout).
Unpacked words are already in the layout of the matrix instruction, one number of each word in every
16 columns, so they never pass through shared memory. Each number is multiplied by its group's power
of two, which is exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.fused_moe.weights import ExpertMatrix
from manyroots.kernels.gemm.triton_words import words_of
from manyroots.kernels.mxfp4 import TILE, WORD, Mxfp4Matrix

FOUR_BITS = tl.constexpr(-4)
"""The value of SCALED for a weight in MXFP4."""
_TILE = tl.constexpr(TILE)
_SLICES = tl.constexpr(WORD)
_SLICE = tl.constexpr(TILE // WORD)
_REST = tl.constexpr(2.0**26)
"""The bits of a number are those of a bfloat16 that is 2^126 times too small. The group's factor
includes 2^100 of this; sums get the rest."""


@triton.jit
def _bfloat16_numbers(words, power0, power1, power2, power3):
    """The eight numbers of each word times the power of their group."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 low, high, bits, more;
        prmt.b32 low, $8, $9, 0x5410;
        prmt.b32 high, $8, $9, 0x7632;
        and.b32 bits, low, 0x81c081c0;
        mul.rn.bf16x2 $0, bits, $10;
        shl.b32 bits, low, 3;
        and.b32 bits, bits, 0x81c081c0;
        mul.rn.bf16x2 $1, bits, $10;
        shl.b32 bits, low, 6;
        and.b32 bits, bits, 0x81c081c0;
        mul.rn.bf16x2 $2, bits, $12;
        shr.u32 bits, low, 5;
        shr.u32 more, low, 4;
        and.b32 bits, bits, 0x01000100;
        lop3.b32 bits, more, 0x00c000c0, bits, 0xea;
        shl.b32 more, low, 1;
        lop3.b32 bits, more, 0x80008000, bits, 0xea;
        mul.rn.bf16x2 $3, bits, $12;
        and.b32 bits, high, 0x81c081c0;
        mul.rn.bf16x2 $4, bits, $14;
        shl.b32 bits, high, 3;
        and.b32 bits, bits, 0x81c081c0;
        mul.rn.bf16x2 $5, bits, $14;
        shl.b32 bits, high, 6;
        and.b32 bits, bits, 0x81c081c0;
        mul.rn.bf16x2 $6, bits, $16;
        shr.u32 bits, high, 5;
        shr.u32 more, high, 4;
        and.b32 bits, bits, 0x01000100;
        lop3.b32 bits, more, 0x00c000c0, bits, 0xea;
        shl.b32 more, high, 1;
        lop3.b32 bits, more, 0x80008000, bits, 0xea;
        mul.rn.bf16x2 $7, bits, $16;
        }""",
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r",
        [words, power0, power1, power2, power3],
        dtype=(
            tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
            tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
        ),
        is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _powers(exponents):
    """The powers of two of a tile's four groups, each as two bfloat16 numbers, times 2^100 so that
    no power overflows."""
    return tl.inline_asm_elementwise(
        """
        prmt.b32 $0, $4, 0, 0x4040;
        prmt.b32 $1, $4, 0, 0x4141;
        prmt.b32 $2, $4, 0, 0x4242;
        prmt.b32 $3, $4, 0, 0x4343;
        mad.lo.u32 $0, $0, 128, 0x32003200;
        mad.lo.u32 $1, $1, 128, 0x32003200;
        mad.lo.u32 $2, $2, 128, 0x32003200;
        mad.lo.u32 $3, $3, 128, 0x32003200;
        """,
        "=&r,=&r,=&r,=&r,r", [exponents], dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _number(words, exponents, which: tl.constexpr, dtype: tl.constexpr):
    """One number of each word, by plain arithmetic."""
    half = words >> (16 * (which // 4))
    if which % 4 == 0:
        size, sign = (half >> 6) & 7, half >> 15
    elif which % 4 == 1:
        size, sign = (half >> 3) & 7, half >> 12
    elif which % 4 == 2:
        size, sign = half & 7, half >> 9
    else:
        size, sign = ((half >> 10) & 3) | ((half >> 11) & 4), half >> 14
    exponent, odd = size >> 1, size & 1
    halves = tl.where(exponent == 0, odd, (2 + odd) << tl.maximum(exponent - 1, 0))
    value = halves.to(tl.float32) * tl.where((sign & 1) == 1, -0.5, 0.5)
    power = ((exponents >> (8 * (which // 2))) & 255) << 23
    return (value * power.to(tl.float32, bitcast=True)).to(dtype)


@triton.jit
def fp4_words(weight, row, k_size):
    """Addresses of the words of these rows' first tile: [n, 16]."""
    in_row = tl.cdiv(k_size, _TILE) * _SLICE
    return weight + row[:, None] * in_row + tl.arange(0, _SLICE)[None, :]


@triton.jit
def fp4_numbers(
    words, exponents, dtype: tl.constexpr, BLOCK_N: tl.constexpr, FAST: tl.constexpr
):  # fmt: skip
    """A tile [n, 128] of the numbers in words [n, 16]. Each row has one word with its groups'
    exponents. With FAST the numbers are those that `whole_sums` expects."""
    own = exponents[:, None]
    if FAST and dtype == tl.bfloat16:
        p0, p1, p2, p3 = _powers(own)
        _, p0 = tl.broadcast(words, p0)
        _, p1 = tl.broadcast(words, p1)
        _, p2 = tl.broadcast(words, p2)
        _, p3 = tl.broadcast(words, p3)
        w0, w1, w2, w3, w4, w5, w6, w7 = _bfloat16_numbers(words, p0, p1, p2, p3)
    else:
        w0, w1 = _number(words, own, 0, dtype), _number(words, own, 1, dtype)
        w2, w3 = _number(words, own, 2, dtype), _number(words, own, 3, dtype)
        w4, w5 = _number(words, own, 4, dtype), _number(words, own, 5, dtype)
        w6, w7 = _number(words, own, 6, dtype), _number(words, own, 7, dtype)
    even = tl.join(tl.join(w0, w4), tl.join(w2, w6))
    odd = tl.join(tl.join(w1, w5), tl.join(w3, w7))
    by_word = tl.reshape(tl.join(even, odd), (BLOCK_N, _SLICE, _SLICES))
    return tl.reshape(tl.permute(by_word, (0, 2, 1)), (BLOCK_N, _TILE))


@triton.jit
def whole_sums(sums, dtype: tl.constexpr, FAST: tl.constexpr):
    """Sums of products with `fp4_numbers`; with FAST these are 2^26 times too small."""
    if FAST and dtype == tl.bfloat16:
        sums *= _REST
    return sums


def operand_of(weight: ExpertMatrix, other: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """A kernel's arguments for a weight: see `words_of`. For MXFP4: its words, its exponents by
    four, their number per row, and FOUR_BITS."""
    if not isinstance(weight, Mxfp4Matrix):
        return words_of(weight, other)
    exponents = weight.exponents.view(torch.int32)
    return weight.words, exponents, exponents.shape[-1], FOUR_BITS.value
