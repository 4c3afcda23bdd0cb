"""Carries out what was decided of adapters: loads on a thread of its own, drops at once.

Takes the intents of plans, in their order; gives an answer for each load, in any order. Keeps the
host copies, by content. Steps go on computing meanwhile: nothing here waits but `wait`.

A load takes the host copy if there is one, else it reads the files. What was read must have the
digest that was asked for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from manyroots.errors import AdapterError, ManyrootsError
from manyroots.ids import AdapterDigest, AdapterSlot
from manyroots.step import AdapterIntent, AdapterLoaded, DropAdapter, LoadAdapter
from manyroots.store.adapter_pool import AdapterPool
from manyroots.store.adapter_weights import AdapterWeights

logger = logging.getLogger(__name__)

Read = Callable[[str], AdapterWeights]
"""Reads and checks the files at a path."""


class AdapterLoader:
    """The way of adapters from storage through host memory into slots."""

    def __init__(self, read: Read, pool: AdapterPool) -> None:
        self.pool = pool
        """Where adapters are on the device."""
        self._read = read
        self._generations: dict[AdapterSlot, int] = {}
        """The owner of each slot. Set by `start` alone."""
        self._changed = threading.Condition()
        # All below are guarded by it.
        self._host: dict[AdapterDigest, AdapterWeights] = {}
        self._answers: list[AdapterLoaded] = []
        self._num_under_way = 0
        # Two: an adapter that is in host memory need not wait for another's slow files.
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="adapters")

    def start(self, intents: Iterable[AdapterIntent]) -> None:
        """Begin the loads and carry out the drops of one plan; returns at once."""
        for intent in intents:
            if isinstance(intent, DropAdapter):
                self._drop(intent)
            else:
                self._begin(intent)

    def finished(self) -> tuple[AdapterLoaded, ...]:
        """The answers that were not taken yet."""
        with self._changed:
            answers, self._answers = tuple(self._answers), []
        return answers

    def wait(self, timeout_s: float) -> None:
        """Until there is an answer to take, or nothing to wait for, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._answers or not self._num_under_way, timeout_s)

    def keep(self, weights: AdapterWeights) -> None:
        """A host copy that was just read, to open the adapter; dropped as any other is."""
        with self._changed:
            self._host[weights.digest] = weights

    def close(self) -> None:
        """Wait for the loads under way; those that have not begun never do."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _begin(self, load: LoadAdapter) -> None:
        if load.target is not None:
            # The slot is no longer used: what it holds goes now, so that its memory is there.
            self.pool.clear(load.target.slot)
            self._generations[load.target.slot] = load.target.generation
        with self._changed:
            self._num_under_way += 1
        self._threads.submit(self._load, load)

    def _drop(self, drop: DropAdapter) -> None:
        if drop.target is None:
            with self._changed:
                self._host.pop(drop.digest, None)
        elif self._generations.get(drop.target.slot) == drop.target.generation:
            self.pool.clear(drop.target.slot)

    def _load(self, load: LoadAdapter) -> None:
        error: str | None = None
        begin_s = time.monotonic()
        try:
            weights = self._host_copy(load)
            if load.target is not None:
                self.pool.load(load.target.slot, weights)
        except ManyrootsError as refusal:
            error = str(refusal)
        except Exception as fault:
            # Whatever it was, this adapter can't be served and everyone else can.
            logger.exception("adapter at %s could not be loaded", load.path)
            error = f"{type(fault).__name__}: {fault}"
        self._end(AdapterLoaded(load.load_id, error, time.monotonic() - begin_s))

    def _end(self, answer: AdapterLoaded) -> None:
        """A load is over; called on its thread."""
        with self._changed:
            self._answers.append(answer)
            self._num_under_way -= 1
            self._changed.notify_all()

    def _host_copy(self, load: LoadAdapter) -> AdapterWeights:
        with self._changed:
            weights = self._host.get(load.digest)
        if weights is None:
            weights = self._read(load.path)
            if weights.digest != load.digest:
                raise AdapterError(
                    f"the files at {load.path} changed since the adapter was opened; load it again"
                )
        with self._changed:
            self._host[load.digest] = weights
        return weights
