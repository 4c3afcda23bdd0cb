"""Copies between the host and storage: addressed by hash, checked, and limited in time.

Takes copies with hashes; reports for each unit whether it is complete. A value in storage that is
damaged or foreign is removed there, and counts as missing. A copy without an answer in time is
reported as failed; a later answer changes no unit.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from manyroots.ids import HASH_BYTES, Tier
from manyroots.step import Bools, Copy, CopyDone, KeepStored
from manyroots.store.backends.backend import Backend
from manyroots.store.host_arena import UnitRows
from manyroots.store.host_link import ReportCopy, failed
from manyroots.store.job_threads import JobThreads
from manyroots.store.unit_values import HEADER_BYTES, pack, unit_key, unpack

logger = logging.getLogger(__name__)

BATCH_BYTES = 32 << 20
"""Approximate size of one batch that is read from storage or written to it."""
NUM_READERS = 4
MAX_KEEPS = 256
"""So many hints to keep pages may wait; more are dropped."""
KEEP_PAGES = 1024
"""A backend is told to keep about as many pages at once."""
OTHER_NUMBERS_OF_RANKS = (1, 2, 4, 8)
NUM_LOOKS = 64
"""The number of batches with a missing page that are also looked up under other numbers of
ranks."""
CLOSE_S = 5.0
"""How long a closing engine waits for copies to and from storage."""


@dataclass(frozen=True, slots=True)
class UnitStorage:
    """A backend, and the keys of this rank's units in it."""

    backend: Backend
    timeout_s: float
    rank: int = 0
    num_ranks: int = 1

    def key(self, page_hash: bytes, family: int) -> bytes:
        return unit_key(page_hash, family, self.rank, self.num_ranks)

    def keys_elsewhere(self, page_hash: bytes, family: int) -> dict[int, bytes]:
        """The keys of the same page in engines with another number of ranks, by that number."""
        others = (size for size in OTHER_NUMBERS_OF_RANKS if size != self.num_ranks)
        return {size: unit_key(page_hash, family, 0, size) for size in others}


@dataclass(eq=False, slots=True)
class _Errand:
    """A copy in progress: its batches end in any order."""

    copy: Copy
    keys: list[bytes]
    deadline: float
    num_batches: int
    begun: float = 0.0
    """When the first batch started."""
    arrived: Bools = field(default_factory=lambda: np.zeros(0, np.bool_))
    error: str | None = None
    is_over: bool = False
    """Reported: its units may belong to another request now."""


_Batch = tuple[_Errand, int, int]
"""An errand, its first unit, and the unit after its last."""


@dataclass(frozen=True, slots=True)
class _Removal:
    """Values that must not be found again."""

    keys: list[bytes]
    is_done: threading.Event


@dataclass(frozen=True, slots=True)
class _Keep:
    """Pages to evict after others."""

    hashes: bytes
    until: float | None
    """None ends what was asked before."""
    deadline: float
    """Later it would only delay what waits to be written."""


class StorageLink:
    """Both directions. A lock guards units and the ends of errands: an ended errand touches no
    unit."""

    def __init__(
        self,
        host: Sequence[UnitRows],
        storage: UnitStorage,
        report: ReportCopy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._storage = storage
        self._backend = storage.backend
        self._report = report
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way: dict[_Errand, None] = {}
        self._num_bad = self._num_keeps = self._num_dropped_keeps = 0
        self._num_looks = NUM_LOOKS if storage.rank == 0 else 0
        """The number of lookups under other numbers of ranks that are left."""
        self._readers = JobThreads[_Batch]("from-storage", self._read, num_threads=NUM_READERS)
        self._writer = JobThreads[_Batch | _Removal | _Keep]("to-storage", self._write)

    def start(self, copy: Copy) -> None:
        """Queue a copy; returns at once."""
        keys = [self._storage.key(page, copy.family) for page in copy.hashes]
        size = max(1, BATCH_BYTES // self._host[copy.family].shape[1])
        firsts = range(0, len(keys), size)
        errand = _Errand(
            copy, keys, self._clock() + self._storage.timeout_s, len(firsts),
            arrived=np.zeros(len(keys), np.bool_),
        )  # fmt: skip
        with self._lock:
            self._under_way[errand] = None
        line = self._readers if copy.source is Tier.STORAGE else self._writer
        for first in firsts:
            line.put((errand, first, min(first + size, len(keys))))
        if not firsts:
            self._end(errand, None)

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Remove pages of all families, after all queued writes. Waits at most for storage's
        timeout, so that the next request does not find them."""
        families = range(len(self._host))
        keys = [self._storage.key(page, family) for page in hashes for family in families]
        removal = _Removal(keys, threading.Event())
        self._writer.put(removal)
        removal.is_done.wait(self._storage.timeout_s)

    def keep(self, keep: KeepStored) -> None:
        """Have pages of all families evicted later, after whatever is being written. Returns at
        once; dropped where storage is too slow."""
        now = self._clock()
        with self._lock:
            is_full = self._num_keeps >= MAX_KEEPS
            self._num_keeps += not is_full
        if is_full:
            self._drop_keep()
            return
        until = now + keep.for_s if keep.for_s > 0 else None
        self._writer.put(_Keep(keep.hashes, until, now + self._storage.timeout_s))

    def give_up_late_ones(self) -> None:
        """Report copies without an answer in time as failed."""
        now = self._clock()
        with self._lock:
            late = [errand for errand in self._under_way if errand.deadline < now]
        for errand in late:
            self._end(errand, f"no answer in {self._storage.timeout_s:g} s")

    def close(self) -> None:
        self._writer.close(CLOSE_S)
        self._readers.close(CLOSE_S)
        self._backend.close()

    def _read(self, batches: list[_Batch]) -> None:
        for errand, first, end in batches:
            if self._is_over(errand):
                continue
            try:
                self._fetch(errand, first, end)
            except Exception as error:
                self._end(errand, f"{type(error).__name__}: {error}")
                continue
            self._batch_done(errand)

    def _fetch(self, errand: _Errand, first: int, end: int) -> None:
        keys, units = errand.keys[first:end], errand.copy.target_units[first:end].tolist()
        rows = self._host[errand.copy.family]
        bad: list[bytes] = []
        values = self._backend.get(keys, HEADER_BYTES + rows.shape[1])
        for at, (key, unit, value) in enumerate(zip(keys, units, values, strict=True)):
            if value is None:
                continue
            found = unpack(key, value, rows.shape[1])
            if found is None:
                bad.append(key)
                continue
            with self._lock:
                if errand.is_over:
                    return
                rows[unit] = np.frombuffer(found, np.uint8)
                errand.arrived[first + at] = True
        if bad:
            self._remove(bad)
        if values[0] is None and self._num_looks > 0:
            self._look_elsewhere(errand.copy.hashes[first], errand.copy.family)

    def _look_elsewhere(self, page_hash: bytes, family: int) -> None:
        """Warn once that pages are missing because another number of ranks stored them."""
        self._num_looks -= 1
        keys = self._storage.keys_elsewhere(page_hash, family)
        try:
            found = self._backend.exists(list(keys.values()))
        except Exception as error:
            logger.debug("other numbers of ranks could not be asked for: %s", error)
            return  # only the warning is lost: the copy itself has ended
        sizes = [size for size, is_there in zip(keys, found, strict=True) if is_there]
        if sizes:
            self._num_looks = 0
            logger.warning(
                "storage has pages of this model that were stored with --tensor-parallel-size %s; "
                "this engine has %d and computes them again (this is said once)",
                " and ".join(map(str, sizes)), self._storage.num_ranks,
            )  # fmt: skip

    def _remove(self, keys: list[bytes]) -> None:
        """Remove damaged values, which would be found again and again."""
        with self._lock:
            is_first, self._num_bad = self._num_bad == 0, self._num_bad + len(keys)
        if is_first:
            logger.warning(
                "storage has values that are damaged or not this engine's; they count as missing "
                "and are removed (this is said once)"
            )
        self._try_to_remove(keys)

    def _try_to_remove(self, keys: list[bytes]) -> None:
        try:
            self._backend.remove(keys)
        except Exception as error:
            logger.debug("what is damaged could not be removed: %s", error)

    def _keep_marked(self, keep: _Keep) -> None:
        families, pages = range(len(self._host)), keep.hashes
        for first in range(0, len(pages), KEEP_PAGES * HASH_BYTES):
            end = min(len(pages), first + KEEP_PAGES * HASH_BYTES)
            hashes = [pages[at : at + HASH_BYTES] for at in range(first, end, HASH_BYTES)]
            keys = [self._storage.key(page, family) for page in hashes for family in families]
            now = self._clock()
            if now > keep.deadline:
                self._drop_keep()
                return
            for_s = 0.0 if keep.until is None else keep.until - now
            if for_s < 0:
                return
            try:
                self._backend.keep(keys, for_s)
            except Exception as error:
                logger.debug("storage could not be told to keep pages: %s", error)
                return

    def _drop_keep(self) -> None:
        with self._lock:
            self._num_dropped_keeps += 1
            is_first = self._num_dropped_keeps == 1
        if is_first:
            logger.warning(
                "storage is too slow to be told of marked pages; it may evict them like others "
                "(this is said once)"
            )

    def _write(self, jobs: list[_Batch | _Removal | _Keep]) -> None:
        for job in jobs:
            if isinstance(job, _Keep):
                self._keep_marked(job)
                with self._lock:
                    self._num_keeps -= 1
                continue
            if isinstance(job, _Removal):
                self._try_to_remove(job.keys)
                job.is_done.set()
                continue
            errand, first, end = job
            if self._is_over(errand):
                continue
            try:
                self._keep(errand, first, end)
            except Exception as error:
                self._end(errand, f"{type(error).__name__}: {error}")
                continue
            self._batch_done(errand)

    def _keep(self, errand: _Errand, first: int, end: int) -> None:
        keys = errand.keys[first:end]
        is_there = self._backend.exists(keys)
        wanted = [at for at, there in enumerate(is_there) if not there]
        values: list[tuple[bytes, bytes]] = []
        rows = self._host[errand.copy.family]
        with self._lock:
            if errand.is_over:
                return
            # Copied now: storing them may outlast this errand's hold on the units.
            units = [rows[int(errand.copy.source_units[first + at])].tobytes() for at in wanted]
        values = [(keys[at], pack(keys[at], unit)) for at, unit in zip(wanted, units, strict=True)]
        kept = np.array(is_there, np.bool_)
        kept[wanted] = self._backend.put(values) if values else []
        with self._lock:
            errand.arrived[first:end] = kept

    def _is_over(self, errand: _Errand) -> bool:
        with self._lock:
            errand.begun = errand.begun or self._clock()
            return errand.is_over

    def _batch_done(self, errand: _Errand) -> None:
        with self._lock:
            errand.num_batches -= 1
            is_last = errand.num_batches == 0
        if is_last:
            self._end(errand, None)

    def _end(self, errand: _Errand, error: str | None) -> None:
        with self._lock:
            if errand.is_over:
                return
            errand.is_over = True
            del self._under_way[errand]
            seconds = self._clock() - (errand.begun or self._clock())
        if error is not None:
            self._report(failed(errand.copy, error))
        else:
            self._report(CopyDone(errand.copy.copy_id, errand.arrived, seconds=seconds))
