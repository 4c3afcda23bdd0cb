"""The destination of a checkpoint's tensor, and this rank's part of it.

A layer gives one `Fill`, by name, for each tensor that it takes from a checkpoint; the loader
passes it the whole tensor. Ranks divide weights, and adapters for them, as follows:

    q, k, v, gate, up, head   by output   W [out, in] and B are cut by rows; nothing to add up
    o, down                   by input    W and A are cut by columns; ranks add up their products
    in_proj of a convolution  by output   in three pieces, each cut by rows
    all else                  whole       embeddings, norms, routers

Heads are never cut: a rank has whole key-value heads with all queries that read them. Each expert
is cut like a dense block, so that every rank has a part of every expert.
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
    """This rank's part; a view of its storage."""
    cut: int | None = None
    """The dimension of the checkpoint's tensor that ranks divide; None: all have the whole
    tensor."""
    shard: Shard = WHOLE
    offset: float = 0.0
    """Number that is added to the checkpoint's values."""
    is_first_only: bool = False
    """Whether only the first rank has it: the sum over ranks must contain it once."""
    pieces: tuple[OutputPiece, ...] = ()
    """All pieces, in order, if ranks divide the tensor piece by piece."""
    order: tuple[int, ...] = ()
    """If this rank has rows in another order: the row of its part for each."""

    def part_of(self, tensor: Tensor) -> Tensor:
        """This rank's part of a whole tensor; it has `shape` if both match."""
        if self.cut is None or self.cut >= tensor.ndim or self.shard.is_whole:
            return tensor
        if self.pieces:
            return piecewise(tensor, self.cut, self.pieces, self.shard)
        part = self.shard.part(tensor.shape[self.cut])
        return tensor.narrow(self.cut, part.start, part.stop - part.start)

    @property
    def shape(self) -> torch.Size:
        """Shape of this rank's part of the checkpoint's tensor."""
        return self.place.shape

    @property
    def nbytes(self) -> int:
        """Bytes that it fills."""
        return self.place.nbytes

    @property
    def values(self) -> Tensor:
        """The stored numbers, in the form that products read."""
        return self.place

    @property
    def source_dtype(self) -> torch.dtype:
        """Dtype of a made-up checkpoint's tensor for it."""
        return self.place.dtype

    @property
    def whole_shape(self) -> list[int]:
        """Shape of the checkpoint's tensor, if all ranks have as much of it as this one."""
        shape = list(self.shape)
        if self.pieces and self.cut is not None:
            shape[self.cut] = whole_size(self.pieces, self.shard)
        elif self.cut is not None:
            shape[self.cut] *= self.shard.size
        return shape

    @torch.no_grad()
    def take(self, part: Tensor) -> None:
        """Copy the result of `part_of`."""
        if self.is_first_only and not self.shard.is_first:
            self.place.zero_()
            return
        self.place.copy_(part[list(self.order)] if self.order else part)
        if self.offset:
            self.place.add_(self.offset)


@dataclass(frozen=True, slots=True)
class FilledRows:
    """Rows of a product's matrix that are one projection of a checkpoint."""

    name: str
    """The checkpoint's."""
    rows: slice
    side: Side | None
    shard: Shard
    dtype: torch.dtype
    """Of the computation."""

    @property
    def cut(self) -> int | None:
        """As in `Fill`."""
        return cut_of(self.side)


def cut_of(side: Side | None) -> int | None:
    """The dimension of a matrix [out, in] that ranks divide."""
    return {Side.OUTPUT: 0, Side.INPUT: 1, None: None}[side]


def whole_size(pieces: Iterable[OutputPiece], shard: Shard) -> int:
    """Size of an output of these pieces on all ranks together."""
    return sum(_whole_size(piece, shard) for piece in pieces)


def piecewise(tensor: Tensor, dim: int, pieces: Sequence[OutputPiece], shard: Shard) -> Tensor:
    """A rank's part of a whole tensor whose `dim` consists of these pieces. A tensor of another
    size is returned unchanged, for the caller to refuse."""
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
"""By names of the checkpoint."""
