"""Copies between the device and the host, beside the steps.

Takes copies as plans ask for them; reports each one's end and how long it took. On a GPU each
direction has a stream of its own, behind whatever was launched before the copy was asked for, since
a unit may still be written by the step that runs. On a CPU steps are done when they are launched,
and a thread for each direction copies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from manyroots.ids import Tier
from manyroots.step import Copy, CopyDone
from manyroots.store.batched_copies import copy_batch, runs
from manyroots.store.host_arena import UnitArena, rows_of
from manyroots.store.job_threads import JobThreads

Report = Callable[[CopyDone], None]
Fenced = tuple[Copy, torch.cuda.Event | None]
"""A copy, and what must have happened on the device before it."""


class HostLink:
    """Both directions."""

    def __init__(
        self, device: Sequence[UnitArena], host: Sequence[UnitArena], report: Report
    ) -> None:
        self._device = device
        self._host = host
        self._report = report
        self._is_gpu = device[0].data.is_cuda
        work = self._copy_on_streams if self._is_gpu else self._copy_here
        self._streams: dict[Tier, torch.cuda.Stream] = {}
        if self._is_gpu:
            where = device[0].data.device
            for target in (Tier.HOST, Tier.DEVICE):
                self._streams[target] = torch.cuda.Stream(where)  # type: ignore[no-untyped-call]
        self._lines = {
            Tier.HOST: JobThreads[Fenced]("to-host", work, takes_all=True),
            Tier.DEVICE: JobThreads[Fenced]("from-host", work, takes_all=True),
        }
        """By target. Two, so that a request's pages need not wait for others' way to the host."""

    def start(self, copy: Copy) -> None:
        """Queue a copy; called by the thread that launches steps."""
        fence = None
        if self._is_gpu:
            fence = torch.cuda.Event()  # type: ignore[no-untyped-call]
            fence.record()
        self._lines[copy.target].put((copy, fence))

    def close(self) -> None:
        for line in self._lines.values():
            line.close()

    def _copy_here(self, jobs: list[Fenced]) -> None:
        for copy, _ in jobs:
            begin = time.perf_counter()
            try:
                source, target = (rows_of(arena.data) for arena in self._ends(copy))
                for first, place, count in runs(copy.source_units, copy.target_units):
                    target[place : place + count] = source[first : first + count]
            except Exception as error:
                self._report(failed(copy, error))
                continue
            self._report(_whole(copy, time.perf_counter() - begin))

    def _copy_on_streams(self, jobs: list[Fenced]) -> None:
        """All that wait are launched before the first is waited for."""
        launched: list[tuple[Copy, torch.cuda.Event, torch.cuda.Event]] = []
        for copy, fence in jobs:
            stream = self._streams[copy.target]
            try:
                with torch.cuda.stream(stream):
                    if fence is not None:
                        stream.wait_event(fence)
                    begin, end = (
                        # Whoever waits sleeps: a core that spins is one less for the steps.
                        torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
                        for _ in range(2)
                    )
                    begin.record()
                    source, target = (arena.data for arena in self._ends(copy))
                    copy_batch(source, target, copy.source_units, copy.target_units)
                    end.record()
                launched.append((copy, begin, end))
            except Exception as error:
                self._report(failed(copy, error))
        for copy, begin, end in launched:
            try:
                end.synchronize()
                seconds = begin.elapsed_time(end) / 1000.0
            except Exception as error:
                self._report(failed(copy, error))
                continue
            self._report(_whole(copy, float(seconds)))

    def _ends(self, copy: Copy) -> tuple[UnitArena, UnitArena]:
        by_tier = {Tier.DEVICE: self._device, Tier.HOST: self._host}
        return by_tier[copy.source][copy.family], by_tier[copy.target][copy.family]


def failed(copy: Copy, error: object) -> CopyDone:
    """Nothing of a copy can be relied on."""
    count = len(copy.hashes) or len(copy.target_units)
    reason = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else str(error)
    return CopyDone(copy.copy_id, np.zeros(count, np.bool_), error=reason)


def _whole(copy: Copy, seconds: float) -> CopyDone:
    return CopyDone(copy.copy_id, np.ones(len(copy.target_units), np.bool_), seconds=seconds)
