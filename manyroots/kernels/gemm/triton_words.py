"""FP8 weights in words of four numbers, for experts of few tokens.

This makes loads 16 bytes wide. A word's numbers are four columns of the weight, each multiplied
with its own columns of the rows. Unpacked numbers are already in the layout of the matrix
instruction.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.scaled import ScaledMatrix


@triton.jit
def _unpacked_bfloat16(words):
    """Unpack four FP8 numbers of each word. They are converted to float16; its bits, shifted, are
    those of a bfloat16 that is 2^112 times too small."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        .reg .b32 first, second, sign1, sign2, most;
        mov.b32 {low, high}, $4;
        mov.b32 most, 0x77807780;
        cvt.rn.f16x2.e4m3x2 first, low;
        cvt.rn.f16x2.e4m3x2 second, high;
        and.b32 sign1, first, 0x80008000;
        and.b32 sign2, second, 0x80008000;
        shr.b32 first, first, 3;
        shr.b32 second, second, 3;
        lop3.b32 first, first, 0x0fff0fff, sign1, 0xea;
        lop3.b32 second, second, 0x0fff0fff, sign2, 0xea;
        mul.rn.bf16x2 first, first, most;
        mul.rn.bf16x2 second, second, most;
        mov.b32 {$0, $1}, first;
        mov.b32 {$2, $3}, second;
        }""",
        "=h,=h,=h,=h,r", [words],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _number_of(words, which: tl.constexpr, dtype: tl.constexpr):
    """One FP8 number of each word."""
    byte = ((words >> (8 * which)) & 255).to(tl.uint8)
    return byte.to(tl.float8e4nv, bitcast=True).to(dtype)


@triton.jit
def times_words(words, xs, acc, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, FAST: tl.constexpr):
    """acc + W x^T, where four columns of W are in a word."""
    even, odd = tl.split(tl.reshape(xs, (BLOCK_M, BLOCK_K // 4, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    if FAST and xs.dtype == tl.bfloat16:
        w0, w1, w2, w3 = _unpacked_bfloat16(words)
    else:
        w0, w1 = _number_of(words, 0, xs.dtype), _number_of(words, 1, xs.dtype)
        w2, w3 = _number_of(words, 2, xs.dtype), _number_of(words, 3, xs.dtype)
    acc = tl.dot(w0, tl.trans(x0), acc, input_precision="ieee")
    acc = tl.dot(w1, tl.trans(x1), acc, input_precision="ieee")
    acc = tl.dot(w2, tl.trans(x2), acc, input_precision="ieee")
    return tl.dot(w3, tl.trans(x3), acc, input_precision="ieee")


def words_of(weight: Tensor | ScaledMatrix, other: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """A kernel's arguments for a weight: its numbers (FP8 in words of four), its scales, the scales
    per row, and the columns per scale. 1 means a whole row. 0 means no scales; `other` then fills
    the unused argument."""
    if isinstance(weight, Tensor):
        return weight, other, 0, 0
    group = 1 if weight.has_row_scales else weight.group
    return weight.data.view(torch.int32), weight.scales, weight.scales.shape[-1], group
