"""Adapter loading with several ranks: a load ends when all ranks have finished it.

Every rank executes the same intents from the same files, and keeps its own part of the weights. The
first rank replies: success if all ranks have the adapter, otherwise the error, and then no rank
keeps it in its slot. Later intents drop the host copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from manyroots.ids import Tier
from manyroots.step import AdapterIntent, AdapterLoaded, DropAdapter, LoadAdapter, LoadId
from manyroots.store.adapter_loader import AdapterLoader, Read
from manyroots.store.adapter_pool import AdapterPool
from manyroots.store.adapter_weights import AdapterWeights


class FollowingLoader(AdapterLoader):
    """A rank other than the first: reports how each load ended, and replies nothing."""

    def __init__(
        self, read: Read, pool: AdapterPool, tell: Callable[[AdapterLoaded], None]
    ) -> None:
        """`tell` is called on the threads of loads."""
        super().__init__(read, pool)
        self._tell = tell

    def wait(self, timeout_s: float) -> None:
        """Does nothing: the first rank waits, and sends the next plan afterwards."""

    def _end(self, answer: AdapterLoaded) -> None:
        with self._changed:
            self._num_under_way -= 1
            self._changed.notify_all()
        self._tell(answer)


class FirstLoader(AdapterLoader):
    """The first rank: replies for all of them."""

    def __init__(
        self,
        read: Read,
        pool: AdapterPool,
        *,
        num_ranks: int,
        cut: Callable[[AdapterWeights], AdapterWeights],
        drop_elsewhere: Callable[[DropAdapter], None],
    ) -> None:
        """`cut` gives this rank's part of a whole adapter; `drop_elsewhere` reaches the others."""
        super().__init__(read, pool)
        self._num_ranks = num_ranks
        self._cut = cut
        self._drop_elsewhere = drop_elsewhere
        self._loads: dict[LoadId, LoadAdapter] = {}
        """Loads without a reply. Guarded, like everything that other threads touch."""
        self._ends: dict[LoadId, dict[int, str | None]] = {}
        """How each rank ended a load, by rank. Guarded, too."""

    def start(self, intents: Iterable[AdapterIntent]) -> None:
        intents = tuple(intents)
        with self._changed:
            self._loads |= {load.load_id: load for load in intents if isinstance(load, LoadAdapter)}
        super().start(intents)

    def keep(self, weights: AdapterWeights) -> None:
        super().keep(self._cut(weights))

    def hear(self, rank: int, answer: AdapterLoaded) -> None:
        """A rank has ended a load; called on any thread, perhaps before this rank has started
        it."""
        with self._changed:
            ends = self._ends.setdefault(answer.load_id, {})
            ends[rank] = answer.error
            if len(ends) < self._num_ranks:
                return
            del self._ends[answer.load_id]
            self._answers.append(AdapterLoaded(answer.load_id, _first_error(ends)))
            self._num_under_way -= 1
            self._changed.notify_all()

    def finished(self) -> tuple[AdapterLoaded, ...]:
        answers = super().finished()
        with self._changed:
            ended = [(answer, self._loads.pop(answer.load_id)) for answer in answers]
        for answer, load in ended:
            if answer.error is not None and load.target is not None:
                # Before the reply is visible, and so before the slot's next load.
                drop = DropAdapter(load.digest, Tier.DEVICE, load.target)
                self._drop(drop)
                self._drop_elsewhere(drop)
        return answers

    def _end(self, answer: AdapterLoaded) -> None:
        self.hear(0, answer)


def _first_error(ends: dict[int, str | None]) -> str | None:
    for rank in sorted(ends):
        error = ends[rank]
        if error is not None:
            return error if rank == 0 else f"on rank {rank}: {error}"
    return None
