"""Threads that run jobs one after the other, for jobs that may take long or hang.

Unlike a pool of the standard library, it does not keep the process from exiting, even if a disk or
a server never answers.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Job = TypeVar("Job")


class JobThreads(Generic[Job]):
    """Jobs in order, with the requested number of threads."""

    def __init__(self, name: str, work: Callable[[list[Job]], None], *, num_threads: int = 1,
                 takes_all: bool = False) -> None:  # fmt: skip
        """`work` gets one job, or with `takes_all` all that wait, and never raises."""
        self._work = work
        self._takes_all = takes_all
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=name, daemon=True) for _ in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, job: Job) -> None:
        self._jobs.put(job)

    def close(self, timeout_s: float | None = None) -> None:
        """Finish queued jobs and accept no more; wait at most this long."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(timeout_s)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            jobs = [job]
            ends = False
            while self._takes_all and not ends:
                try:
                    more = self._jobs.get_nowait()
                except queue.Empty:
                    break
                if more is None:
                    ends = True
                else:
                    jobs.append(more)
            self._work(jobs)
            if ends:
                return
