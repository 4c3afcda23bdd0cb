"""Where a checkpoint's tensor goes, and which part of it this rank has.

A layer gives one `Fill` for each tensor that it takes from a checkpoint, by name; the loader hands
it the whole tensor. What is divided among ranks is said here, once for weights and for adapters:

    q, k, v, gate, up, head   by output   W [out, in] and B are cut by rows; nothing to add up
    o, down                   by input    W and A are cut by columns; ranks add up their products
    all else                  whole       embeddings, norms, routers

Heads are never cut: a rank has whole key-value heads with all queries that read them. Experts are
cut like dense blocks, each of them, so that every rank has a part of every expert.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from manyroots.distributed.shard import WHOLE, Shard


class Side(enum.Enum):
    """What of a projection is divided among ranks."""

    OUTPUT = "output"
    INPUT = "input"


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

    def part_of(self, tensor: Tensor) -> Tensor:
        """This rank's part of a whole tensor; of the shape of `place` if both belong together."""
        if self.cut is not None and self.cut < tensor.ndim:
            part = self.shard.part(tensor.shape[self.cut])
            tensor = tensor.narrow(self.cut, part.start, part.stop - part.start)
        return tensor

    @property
    def whole_shape(self) -> list[int]:
        """Of the checkpoint's tensor, if all ranks have as much of it as this one."""
        shape = list(self.place.shape)
        if self.cut is not None:
            shape[self.cut] *= self.shard.size
        return shape

    @torch.no_grad()
    def take(self, part: Tensor) -> None:
        """Copy what `part_of` gave."""
        if self.is_first_only and not self.shard.is_first:
            self.place.zero_()
            return
        self.place.copy_(part)
        if self.offset:
            self.place.add_(self.offset)


Fills = Iterator[tuple[str, Fill]]
"""By the names of the checkpoint."""
