"""A matrix in MXFP4: 4 bits a number (E2M1), and a power of two (E8M0) for each 32 numbers of a
row.

Stored in the order that the GPU kernel reads. A row's columns are in tiles of 128; word j of a tile
has columns j, 16 + j, ..., 112 + j. A thread can thus build whole operands of matrix instructions
from its words. Each half of a word has four numbers. A shift and a mask move their bits to the
positions of a bfloat16:

    bit      15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
    number    0  3  3  1  3  3  2  0  0  0  1  1  1  2  2  2
              s  s  e  s  e  m  s  e  e  m  e  e  m  e  e  m

The result is the number itself; see `fused_moe/triton_fp4.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
"""Columns that share an exponent."""
TILE = 128
"""Columns that are reordered together; the last tile of a row is filled up with zeros."""
WORD = 8
"""Numbers of a word."""
BIAS = 127
LEAST_EXPONENT, LARGEST_EXPONENT = 28, 154
"""2^-99 to 2^27: kernels multiply bfloat16 numbers by powers in this range."""
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Midpoints between two values; a number on a midpoint goes to the even code."""
_PLACES = ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (10, 11, 13, 14))
"""Bit positions of each number of half a word, lowest first."""


@dataclass(frozen=True, slots=True)
class Mxfp4Matrix:
    """One matrix, or a stack of them: [..., out, in]."""

    words: Tensor
    """int32 [..., out, 16 for each TILE columns]"""
    exponents: Tensor
    """uint8 [..., out, 4 for each TILE columns]: exponents of 2, with BIAS added."""
    columns: int

    @classmethod
    def empty(cls, *shape: int, device: torch.device) -> Mxfp4Matrix:
        """`shape` is that of the numbers."""
        *rows, columns = shape
        tiles = -(-columns // TILE)
        words = torch.empty(*rows, tiles * TILE // WORD, dtype=torch.int32, device=device)
        exponents = torch.empty(*rows, tiles * TILE // GROUP, dtype=torch.uint8, device=device)
        return cls(words, exponents, columns)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.words.shape[:-1], self.columns))

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.exponents.nbytes

    def __getitem__(self, index: int | slice) -> Mxfp4Matrix:
        """Size of the first dimension."""
        return Mxfp4Matrix(self.words[index], self.exponents[index], self.columns)

    def plain(self, dtype: torch.dtype) -> Tensor:
        """The numbers themselves; exact in bfloat16 and float32."""
        numbers = values_of(codes_of(self.words), self.exponents)
        return numbers[..., : self.columns].to(dtype)

    def take(self, blocks: Tensor, exponents: Tensor) -> None:
        """Fill it from a checkpoint's bytes: two numbers each, [out, in / 2], and exponents [out,
        in / 32]."""
        blocks = blocks.to(self.words.device)
        codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
        missing = self.words.shape[-1] * WORD - codes.shape[-1]
        self.words.copy_(words_of(torch.nn.functional.pad(codes, (0, missing))))
        self.exponents.fill_(BIAS)
        self.exponents[..., : exponents.shape[-1]].copy_(exponents)


def padded_bytes(rows: int, columns: int) -> int:
    """Bytes of a matrix, with the last tile of each row filled up."""
    numbers = rows * -(-columns // TILE) * TILE
    return numbers // 2 + numbers // GROUP


def words_of(codes: Tensor) -> Tensor:
    """uint8 codes [..., columns], a multiple of TILE, as reordered words."""
    tiles = codes.reshape(*codes.shape[:-1], -1, WORD, TILE // WORD).int()
    words = torch.zeros_like(tiles[..., 0, :])
    for number in range(WORD):
        code = tiles[..., number, :]
        for bit, place in enumerate(_PLACES[number % 4]):
            words |= (code >> bit & 1) << (place + 16 * (number // 4))
    return words.flatten(-2)


def codes_of(words: Tensor) -> Tensor:
    """The reverse."""
    tiles = words.reshape(*words.shape[:-1], -1, TILE // WORD)
    codes = [torch.zeros_like(tiles) for _ in range(WORD)]
    for number, code in enumerate(codes):
        for bit, place in enumerate(_PLACES[number % 4]):
            code |= (tiles >> (place + 16 * (number // 4)) & 1) << bit
    return torch.stack(codes, dim=-2).flatten(-3).to(torch.uint8)


def values_of(codes: Tensor, exponents: Tensor) -> Tensor:
    """float32 numbers of codes [..., columns] and exponents [..., columns / GROUP]."""
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], device=codes.device)
    groups = values[codes.int()].reshape(*exponents.shape, GROUP)
    return torch.ldexp(groups, (exponents.int() - BIAS).unsqueeze(-1)).flatten(-2)


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers [..., columns] in MXFP4: bytes [..., columns / 2] and exponents, in the format of
    checkpoints. The largest number of a group has the largest exponent that four bits hold."""
    groups = rows.float().reshape(*rows.shape[:-1], -1, GROUP)
    largest = groups.abs().amax(-1, keepdim=True)
    exponents = torch.frexp(largest).exponent - 3 + BIAS
    exponents = exponents.clamp(LEAST_EXPONENT, LARGEST_EXPONENT)
    scaled = torch.ldexp(groups, BIAS - exponents).flatten(-2)
    middles = torch.tensor(_MIDDLES, device=rows.device)
    size = scaled.abs().contiguous()
    # A midpoint goes up from odd codes, down from even ones.
    codes = torch.bucketize(size, middles)
    above = torch.bucketize(size, middles, right=True)
    codes = torch.where(codes % 2 == 1, above, codes) | (scaled < 0).long() << 3
    pairs = codes.to(torch.uint8).reshape(*codes.shape[:-1], -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4, exponents.squeeze(-1).to(torch.uint8)
