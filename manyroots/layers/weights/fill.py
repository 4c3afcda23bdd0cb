"""Where a checkpoint's tensor goes, and which part of it this rank has.

A layer gives one `Fill` for each tensor that it takes from a checkpoint, by name; the loader hands
it the whole tensor. What is divided among ranks, of weights and of adapters for them:

    q, k, v, gate, up, head   by output   W [out, in] and B are cut by rows; nothing to add up
    o, down                   by input    W and A are cut by columns; ranks add up their products
    in_proj of a convolution  by output   in three pieces, each cut by rows
    all else                  whole       embeddings, norms, routers

Heads are never cut: a rank has whole key-value heads with all queries that read them. Experts are
cut like dense blocks, each of them, so that every rank has a part of every expert.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manyroots.distributed.shard import WHOLE, Shard
from manyroots.lora.targets import OutputPiece, Side


@dataclass(frozen=True, slots=True)
class Fill:
    """One tensor of a checkpoint."""

    place: Tensor
    """This rank's part; a view of wherever it lies."""
    cut: int | None = None
    """The dimension of the checkpoint's tensor that ranks divide; None: all have the whole."""
    shard: Shard = WHOLE
    offset: float = 0.0
    """What the checkpoint has it less."""
    is_first_only: bool = False
    """Whether the first rank alone has it, and the others nothing: the sum over ranks must have
    it once."""
    pieces: tuple[OutputPiece, ...] = ()
    """Where ranks divide the tensor piece by piece: all of its pieces, in order."""
    order: tuple[int, ...] = ()
    """Where this rank has rows in another order: which row of its part each is."""

    def part_of(self, tensor: Tensor) -> Tensor:
        """This rank's part of a whole tensor; of `shape` if both belong together."""
        if self.cut is None or self.cut >= tensor.ndim or self.shard.is_whole:
            return tensor
        if self.pieces:
            return piecewise(tensor, self.cut, self.pieces, self.shard)
        part = self.shard.part(tensor.shape[self.cut])
        return tensor.narrow(self.cut, part.start, part.stop - part.start)

    @property
    def shape(self) -> torch.Size:
        """Of this rank's part of the checkpoint's tensor."""
        return self.place.shape

    @property
    def values(self) -> Tensor:
        """The numbers that lie there, as products take them."""
        return self.place

    @property
    def source_dtype(self) -> torch.dtype:
        """What a checkpoint's tensor for it is in, where one is made up."""
        return self.place.dtype

    @property
    def whole_shape(self) -> list[int]:
        """Of the checkpoint's tensor, if all ranks have as much of it as this one."""
        shape = list(self.shape)
        if self.pieces and self.cut is not None:
            shape[self.cut] = whole_size(self.pieces, self.shard)
        elif self.cut is not None:
            shape[self.cut] *= self.shard.size
        return shape

    @torch.no_grad()
    def take(self, part: Tensor) -> None:
        """Copy what `part_of` gave."""
        if self.is_first_only and not self.shard.is_first:
            self.place.zero_()
            return
        self.place.copy_(part[list(self.order)] if self.order else part)
        if self.offset:
            self.place.add_(self.offset)


def cut_of(side: Side | None) -> int | None:
    """The dimension of a matrix [out, in] that ranks divide."""
    return {Side.OUTPUT: 0, Side.INPUT: 1, None: None}[side]


def whole_size(pieces: Iterable[OutputPiece], shard: Shard) -> int:
    """Of an output of these pieces, on all ranks together."""
    return sum(_whole_size(piece, shard) for piece in pieces)


def piecewise(tensor: Tensor, dim: int, pieces: Sequence[OutputPiece], shard: Shard) -> Tensor:
    """A rank's part of a whole tensor whose `dim` consists of these pieces. A tensor of another
    size is given back as it is, for the caller to refuse."""
    if whole_size(pieces, shard) != tensor.shape[dim]:
        return tensor
    parts, end = [], 0
    for piece in pieces:
        begin = end if piece.is_whole else end + shard.rank * piece.size
        parts.append(tensor.narrow(dim, begin, piece.size))
        end += _whole_size(piece, shard)
    return torch.cat(parts, dim)


def _whole_size(piece: OutputPiece, shard: Shard) -> int:
    return piece.size if piece.is_whole else piece.size * shard.size


Fills = Iterator[tuple[str, Fill]]
"""By the names of the checkpoint."""
