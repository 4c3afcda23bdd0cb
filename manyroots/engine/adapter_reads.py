"""Reads adapters' files on separate threads and wakes the loop when one is read.

In: a key and a job. Out: the key again, with the job's result or error. The loop's thread calls
everything except the jobs and `wake`.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

NUM_THREADS = 2
"""With two, a long job delays no other."""
NUM_SLOW_THREADS = 16
"""For jobs that wait for other machines, so that they delay no local read."""


@dataclass(frozen=True, slots=True)
class Finished(Generic[T]):
    """A finished job."""

    key: object
    result: T | None
    error: BaseException | None
    seconds: float
    """Time since it was started."""


class Reads(Generic[T]):
    """Running jobs, and those that ended since the last `take`."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="adapter-read")
        self._slow_threads = ThreadPoolExecutor(
            NUM_SLOW_THREADS, thread_name_prefix="adapter-fetch"
        )
        self._finished: queue.SimpleQueue[Finished[T]] = queue.SimpleQueue()
        self._seen: list[Finished[T]] = []
        self.num_under_way = 0
        """Started and not taken yet."""
        self.wake: Callable[[], None] = lambda: None
        """Called on a job's thread when it has ended, to wake the loop."""

    def begin(self, key: object, job: Callable[[], T], *, is_slow: bool = False) -> None:
        self.num_under_way += 1
        start = time.monotonic()
        threads = self._slow_threads if is_slow else self._threads
        threads.submit(job).add_done_callback(lambda done: self._end(key, start, done))

    @property
    def has_finished(self) -> bool:
        return bool(self._seen) or not self._finished.empty()

    def take(self) -> list[Finished[T]]:
        """Ended jobs, in the order in which they ended."""
        while not self._finished.empty():
            self._seen.append(self._finished.get())
        finished, self._seen = self._seen, []
        self.num_under_way -= len(finished)
        return finished

    def wait(self, timeout_s: float | None = None) -> None:
        """Sleep until one has ended, or until the timeout. Only while some are running."""
        if not self._seen:
            with contextlib.suppress(queue.Empty):
                self._seen.append(self._finished.get(timeout=timeout_s))

    def close(self) -> None:
        for threads in (self._threads, self._slow_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    def _end(self, key: object, start: float, done: Future[T]) -> None:
        if done.cancelled():
            return
        error, seconds = done.exception(), time.monotonic() - start
        self._finished.put(Finished(key, None if error else done.result(), error, seconds))
        self.wake()
