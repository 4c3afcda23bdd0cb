"""One rank's place among all, and the few operations in which ranks meet.

Takes tensors that each rank has a part of; gives what one rank alone would have had. All ranks
call the same operations in the same order, because they carry out the same plans. Where there is
one rank (`WHOLE`), nothing is called and nothing is copied.

Knows nothing of models: which weight is cut along which side is said in `models/sharding.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

_APART: list[None] = []
"""Not empty while this process computes without the other ranks."""


@contextmanager
def apart() -> Iterator[None]:
    """In here ranks don't meet, and what they would have given each other is anything: for steps
    whose results are not read, before the others are there."""
    _APART.append(None)
    try:
        yield
    finally:
        _APART.pop()


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `rank` of `size` equal ones."""

    rank: int
    size: int

    @property
    def is_whole(self) -> bool:
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """Of the rank that samples, answers and adds what must be added once."""
        return self.rank == 0

    def part(self, count: int) -> slice:
        """Which of `count` things this rank has; the last ranks may have fewer."""
        step = -(-count // self.size)
        return slice(min(self.rank * step, count), min((self.rank + 1) * step, count))

    def add_up(self, partial: Tensor) -> Tensor:
        """The sum of every rank's tensor, in place."""
        if self.size > 1 and not _APART:
            dist.all_reduce(partial)
        return partial

    def join(self, own: Tensor, width: int) -> Tensor:
        """Every rank's columns side by side, `width` in all, cut as `part` cuts them."""
        if self.size == 1:
            return own
        step = -(-width // self.size)
        # Collectives move equal pieces; a shorter last one is filled up, and cut again below.
        padded = F.pad(own, (0, step - own.shape[-1])).contiguous()
        pieces = padded.new_empty(self.size, *padded.shape)
        if not _APART:
            dist.all_gather(list(pieces.unbind(0)), padded)
        return torch.cat(pieces.unbind(0), dim=-1)[..., :width]

    def agree(self, tokens: Tensor) -> Tensor:
        """The first rank's tensor, in place; the others bring one of the same shape."""
        if self.size > 1 and not _APART:
            dist.broadcast(tokens, src=0)
        return tokens


WHOLE = Shard(rank=0, size=1)
"""The only rank there is."""
