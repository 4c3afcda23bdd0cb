"""Executes adapter intents: loads on separate threads, drops at once.

Takes the intents of plans, in order; gives a reply for each load, in any order. Keeps the host
copies, by content. Steps continue meanwhile: only `wait` blocks.

A load uses the host copy if there is one, otherwise it reads the files. The content must have the
requested digest.
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
    """Moves adapters from storage through host memory into slots."""

    def __init__(self, read: Read, pool: AdapterPool) -> None:
        self.pool = pool
        """The adapters on the device."""
        self._read = read
        self._generations: dict[AdapterSlot, int] = {}
        """The owner of each slot. Set only by `start`."""
        self._changed = threading.Condition()
        # Guards everything below.
        self._host: dict[AdapterDigest, AdapterWeights] = {}
        self._answers: list[AdapterLoaded] = []
        self._num_under_way = 0
        # Two threads: an adapter in host memory need not wait for another's slow files.
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="adapters")

    def start(self, intents: Iterable[AdapterIntent]) -> None:
        """Start the loads and execute the drops of one plan; returns at once."""
        for intent in intents:
            if isinstance(intent, DropAdapter):
                self._drop(intent)
            else:
                self._begin(intent)

    def finished(self) -> tuple[AdapterLoaded, ...]:
        """Replies that were not taken yet."""
        with self._changed:
            answers, self._answers = tuple(self._answers), []
        return answers

    def wait(self, timeout_s: float) -> None:
        """Wait until there is a reply, nothing to wait for, or the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._answers or not self._num_under_way, timeout_s)

    def keep(self, weights: AdapterWeights) -> None:
        """Keep a host copy that was just read to open the adapter; dropped like any other."""
        with self._changed:
            self._host[weights.digest] = weights

    def close(self) -> None:
        """Wait for running loads; loads that have not started never do."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _begin(self, load: LoadAdapter) -> None:
        if load.target is not None:
            # The slot is no longer used: free its content now, so that its memory is available.
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
            # Any error here concerns only this adapter; all others can be served.
            logger.exception("adapter at %s could not be loaded", load.path)
            error = f"{type(fault).__name__}: {fault}"
        self._end(AdapterLoaded(load.load_id, error, time.monotonic() - begin_s))

    def _end(self, answer: AdapterLoaded) -> None:
        """A load has ended; called on its thread."""
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
