"""Several ranks as threads of one process, so that sharding is tested without processes.

Each rank computes its own part; where they meet, a barrier and a list take the collective's place.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from typing import Any, TypeVar

import torch
from torch import Tensor

from manyroots.distributed.shard import Shard
from tests.helpers.patience import PATIENCE_S

T = TypeVar("T")


@dataclass(slots=True)
class Meeting:
    """Where ranks leave their tensors for each other."""

    size: int
    barrier: Barrier = field(init=False)
    brought: list[Any] = field(init=False)
    num_meetings: int = 0

    def __post_init__(self) -> None:
        self.barrier = Barrier(self.size, timeout=PATIENCE_S)
        self.brought = [None] * self.size

    def exchange(self, rank: int, own: Tensor) -> list[Tensor]:
        self.brought[rank] = own.clone()
        self.barrier.wait()
        everyone = list(self.brought)
        self.num_meetings += rank == 0
        self.barrier.wait()  # no rank writes the next value before all have read this one
        return everyone


@dataclass(frozen=True, slots=True)
class LockstepShard(Shard):
    """A rank that meets the others in a `Meeting`."""

    meeting: Meeting

    def add_up(self, partial: Tensor) -> Tensor:
        return partial.copy_(torch.stack(self.meeting.exchange(self.rank, partial)).sum(0))

    def join(self, own: Tensor, width: int) -> Tensor:
        joined = torch.cat(self.meeting.exchange(self.rank, own), dim=-1)
        assert joined.shape[-1] == width
        return joined


def in_lockstep(size: int, rank: Callable[[LockstepShard], T]) -> tuple[list[T], Meeting]:
    """What each of `size` ranks gave, and where they met."""
    meeting = Meeting(size)

    def run(index: int) -> T:
        try:
            return rank(LockstepShard(index, size, meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size))), meeting
