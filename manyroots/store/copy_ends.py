"""The ends of copies between tiers: collected on the first rank, sent there by the others.

A copy has ended when every rank has ended it. A unit has arrived if it is complete on every rank:
a value that is damaged or missing for one rank counts as missing for all. So ranks never read a
page of which only some of them have their part.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np

from manyroots.ids import CopyId
from manyroots.step import CopyDone


class CopyEnds(Protocol):
    """Where a rank reports the ends of its copies. All methods may be called on any thread."""

    def expect(self, count: int) -> None:
        """This many more copies are in progress on this rank."""
        ...

    def report(self, done: CopyDone) -> None:
        """This rank has ended a copy."""
        ...

    def take(self) -> tuple[CopyDone, ...]:
        """Ends that were not taken yet, each exactly once."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait until there is an end, nothing is in progress, or the timeout."""
        ...


class CollectedEnds:
    """On the first rank, which has the ends of all ranks."""

    def __init__(self, num_ranks: int = 1) -> None:
        self._num_ranks = num_ranks
        self._changed = threading.Condition()
        # Guards everything below.
        self._by_rank: dict[CopyId, dict[int, CopyDone]] = {}
        self._ended: list[CopyDone] = []
        self._num_under_way = 0

    def expect(self, count: int) -> None:
        with self._changed:
            self._num_under_way += count

    def report(self, done: CopyDone) -> None:
        self.hear(0, done)

    def hear(self, rank: int, done: CopyDone) -> None:
        """A rank has ended a copy, perhaps before this rank has started it."""
        with self._changed:
            ends = self._by_rank.setdefault(done.copy_id, {})
            ends[rank] = done
            if len(ends) < self._num_ranks:
                return
            del self._by_rank[done.copy_id]
            self._ended.append(_joined(ends))
            self._num_under_way -= 1
            self._changed.notify_all()

    def take(self) -> tuple[CopyDone, ...]:
        with self._changed:
            ended, self._ended = tuple(self._ended), []
        return ended

    def wait(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended or not self._num_under_way, timeout_s)


class ForwardedEnds:
    """On another rank: all ends go to the first rank, the only one that waits for them."""

    def __init__(self, tell: Callable[[CopyDone], None]) -> None:
        self._tell = tell

    def expect(self, count: int) -> None:
        pass

    def report(self, done: CopyDone) -> None:
        self._tell(done)

    def take(self) -> tuple[CopyDone, ...]:
        return ()

    def wait(self, timeout_s: float) -> None:
        pass


def _joined(ends: dict[int, CopyDone]) -> CopyDone:
    """One end of a copy for all ranks. The slowest rank's time counts, since all wait for it."""
    if len(ends) == 1:
        return ends[0]
    ranks = sorted(ends)
    return CopyDone(
        ends[0].copy_id,
        np.logical_and.reduce([ends[rank].arrived for rank in ranks]),
        error=next((_error(rank, ends[rank]) for rank in ranks if ends[rank].error), None),
        seconds=max(ends[rank].seconds for rank in ranks),
    )


def _error(rank: int, done: CopyDone) -> str | None:
    return done.error if rank == 0 else f"on rank {rank}: {done.error}"
