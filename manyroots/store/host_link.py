"""Copies between the device and the host, beside the steps.

Takes the copies of plans; reports each one's end and duration. On a GPU each direction has its own
stream. A copy waits for everything that was launched before it was requested, since the running
step may still write a unit. On a CPU, launched steps are already done, and a thread for each
direction copies.

Several copies that a step reads while they arrive are copied together, one group of layers after
the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from manyroots.ids import Tier
from manyroots.step import Copy, CopyDone
from manyroots.store.arena import UnitArena
from manyroots.store.batched_copies import WHOLE_UNIT, copy_batch, runs
from manyroots.store.host_arena import rows_of
from manyroots.store.job_threads import JobThreads
from manyroots.store.layer_arrivals import LayerArrivals, LayerGroups

ReportCopy = Callable[[CopyDone], None]


@dataclass(frozen=True, slots=True)
class HostErrand:
    """Copies of one direction that start and end together."""

    copies: tuple[Copy, ...]
    fence: torch.cuda.Event | None
    """An event on the device that must come first."""
    arrivals: LayerArrivals | None
    """Receives arrived groups of layers; None: units are copied whole."""


class HostLink:
    """Both directions."""

    def __init__(
        self,
        device: Sequence[UnitArena],
        host: Sequence[UnitArena],
        report: ReportCopy,
        groups: LayerGroups | None = None,
    ) -> None:
        self._device = device
        self._host = host
        self._report = report
        self._groups = groups
        self._is_gpu = device[0].data.is_cuda
        work = self._copy_on_streams if self._is_gpu else self._copy_here
        self._streams: dict[Tier, torch.cuda.Stream] = {}
        if self._is_gpu:
            where = device[0].data.device
            for target in (Tier.HOST, Tier.DEVICE):
                self._streams[target] = torch.cuda.Stream(where)  # type: ignore[no-untyped-call]
        self._lines = {
            Tier.HOST: JobThreads[HostErrand]("to-host", work, takes_all=True),
            Tier.DEVICE: JobThreads[HostErrand]("from-host", work, takes_all=True),
        }
        """By target. Two, so that a request's pages need not wait for copies to the host."""

    def start(self, copy: Copy) -> None:
        """Queue a copy; called by the thread that launches steps."""
        self._lines[copy.target].put(HostErrand((copy,), self._fence(), None))

    def start_overlapped(self, copies: Sequence[Copy]) -> LayerArrivals:
        """Queue copies from the host that the next step reads; returns what it waits for."""
        if self._groups is None:
            raise RuntimeError("a step is to read what is on its way, and layers are not known")
        arrivals = LayerArrivals(self._groups)
        self._lines[Tier.DEVICE].put(HostErrand(tuple(copies), self._fence(), arrivals))
        return arrivals

    def close(self) -> None:
        for line in self._lines.values():
            line.close()

    def _fence(self) -> torch.cuda.Event | None:
        if not self._is_gpu:
            return None
        fence = torch.cuda.Event()  # type: ignore[no-untyped-call]
        fence.record()
        return fence

    def _copy_here(self, errands: list[HostErrand]) -> None:
        for errand in errands:
            begin = time.perf_counter()
            try:
                for group, parts in enumerate(self._parts(errand)):
                    for copy, part in parts:
                        source, target = (rows_of(arena.data) for arena in self._ends(copy))
                        for first, place, count in runs(copy.source_units, copy.target_units):
                            rows = source[first : first + count, part]
                            target[place : place + count, part] = rows
                    if errand.arrivals is not None:
                        errand.arrivals.tell(group, None)
            except Exception as error:
                self._fail(errand, error)
                continue
            self._end(errand, time.perf_counter() - begin)

    def _copy_on_streams(self, errands: list[HostErrand]) -> None:
        """All waiting copies are launched before the first is awaited."""
        launched: list[tuple[HostErrand, torch.cuda.Event, torch.cuda.Event]] = []
        for errand in errands:
            try:
                launched.append((errand, *self._launch(errand)))
            except Exception as error:
                self._fail(errand, error)
        for errand, begin, end in launched:
            try:
                end.synchronize()
                seconds = begin.elapsed_time(end) / 1000.0
            except Exception as error:
                self._fail(errand, error)
                continue
            self._end(errand, float(seconds))

    def _launch(self, errand: HostErrand) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Queue an errand's copies; returns the events before and after them."""
        stream = self._streams[errand.copies[0].target]
        with torch.cuda.stream(stream):
            if errand.fence is not None:
                stream.wait_event(errand.fence)
            begin, end = _timed_event(), _timed_event()
            begin.record()
            for group, parts in enumerate(self._parts(errand)):
                for copy, part in parts:
                    source, target = (arena.data for arena in self._ends(copy))
                    copy_batch(source, target, copy.source_units, copy.target_units, part)
                if errand.arrivals is not None:
                    there = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    there.record()
                    errand.arrivals.tell(group, there)
            end.record()
        return begin, end

    def _parts(self, errand: HostErrand) -> Iterator[list[tuple[Copy, slice]]]:
        """The bytes of the units that are copied before each group of layers is reported."""
        if errand.arrivals is None or self._groups is None:
            yield [(copy, WHOLE_UNIT) for copy in errand.copies]
            return
        for group in range(self._groups.num_groups):
            parts = [
                (copy, self._groups.part(copy.family, group, self._unit_bytes(copy)))
                for copy in errand.copies
            ]
            yield [(copy, part) for copy, part in parts if part.stop > part.start]

    def _ends(self, copy: Copy) -> tuple[UnitArena, UnitArena]:
        by_tier = {Tier.DEVICE: self._device, Tier.HOST: self._host}
        return by_tier[copy.source][copy.family], by_tier[copy.target][copy.family]

    def _unit_bytes(self, copy: Copy) -> int:
        data = self._host[copy.family].data
        return data[0].numel() * data.itemsize

    def _end(self, errand: HostErrand, seconds: float) -> None:
        """Everything has arrived. Each copy's time is its share by bytes."""
        sizes = [len(copy.target_units) * self._unit_bytes(copy) for copy in errand.copies]
        for copy, size in zip(errand.copies, sizes, strict=True):
            share = size / sum(sizes) if sum(sizes) else 0.0
            arrived = np.ones(len(copy.target_units), np.bool_)
            self._report(CopyDone(copy.copy_id, arrived, seconds=seconds * share))

    def _fail(self, errand: HostErrand, error: Exception) -> None:
        if errand.arrivals is not None:
            errand.arrivals.fail(f"{type(error).__name__}: {error}")
        for copy in errand.copies:
            self._report(failed(copy, error))


def _timed_event() -> torch.cuda.Event:
    """A thread that waits for it sleeps: a spinning core would be lost for the steps."""
    event: torch.cuda.Event
    event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
    return event


def failed(copy: Copy, error: object) -> CopyDone:
    """Nothing of a copy can be used."""
    count = len(copy.hashes) or len(copy.target_units)
    reason = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else str(error)
    return CopyDone(copy.copy_id, np.zeros(count, np.bool_), error=reason)
