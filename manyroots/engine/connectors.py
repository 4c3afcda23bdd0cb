"""Connectors: plug-ins that hear what happens to pages, in order, beside the steps (T14).

An installed package adds one with an entry point of the group `manyroots.connectors`;
`--kv-connectors NAME` switches it on. Takes the cache's events, the plans and their results, as the
loop has them; gives each connector `ConnectorEvent`s in its own thread. The step only puts
references into a bounded queue. What does not fit is dropped and counted, and the connector is told
how much it has missed.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Protocol

from manyroots.cache.events import CacheEvent, PagesRemoved, PagesStored
from manyroots.config import TierSettings
from manyroots.errors import ConfigError
from manyroots.ids import CopyId, RequestId, Row, StepId, Tier
from manyroots.step import Plan, StepResult
from manyroots.store.backends.registry import imported

logger = logging.getLogger(__name__)

GROUP = "manyroots.connectors"
MAX_BATCHES = 1024
"""That wait for a connector: some seconds of steps."""
CLOSE_S = 1.0


@dataclass(frozen=True, slots=True)
class PagesAllocated:
    """A request has these units of the device from this step on, at these places of its table."""

    step_id: StepId
    request_id: RequestId
    family: int
    first_place: int
    units: tuple[int, ...]
    num_computed_tokens: int
    """Of a request that starts: its tokens whose pages were found. 0 for one that grows."""


@dataclass(frozen=True, slots=True)
class TransferStarted:
    """Units are copied between tiers, or within the device (a state is saved or restored)."""

    copy_id: CopyId
    family: int
    source: Tier
    target: Tier
    source_units: tuple[int, ...]
    """Empty where the source is storage."""
    target_units: tuple[int, ...]
    """Empty where the target is storage."""
    hashes: tuple[bytes, ...]
    """With storage at one end: the page of each unit."""


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """A copy between tiers has ended."""

    copy_id: CopyId
    arrived: tuple[bool, ...]
    """For each unit."""
    error: str | None


ConnectorEvent = PagesAllocated | PagesStored | PagesRemoved | TransferStarted | TransferEnded
"""Allocation, publication on a tier, eviction from a tier, transfer."""


@dataclass(frozen=True, slots=True)
class ConnectorInfo:
    """What a connector is told of its engine."""

    model_name: str
    page_size: int
    num_pages: int
    """Of the device."""


class Connector(Protocol):
    """Hears events. Called in one thread of its own."""

    def hear(self, events: Sequence[ConnectorEvent], num_missed: int) -> None:
        """Events in the order in which they happened. `num_missed`: batches dropped just before,
        because this connector was slow."""
        ...

    def close(self) -> None:
        """No call follows."""
        ...


class OpenConnector(Protocol):
    """What an entry point names: most simply, the connector's class."""

    def __call__(self, info: ConnectorInfo) -> Connector: ...


def check_connectors(settings: TierSettings) -> None:
    """Raise ConfigError for names that no installed package has."""
    for name in settings.kv_connectors:
        _load(name)


def open_connectors(settings: TierSettings, info: ConnectorInfo) -> Connectors | None:
    """None without --kv-connectors."""
    if not settings.kv_connectors:
        return None
    return Connectors({name: _load(name)(info) for name in settings.kv_connectors})


def _load(name: str) -> OpenConnector:
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in found:
        raise ConfigError(
            f"--kv-connectors has {name!r}; installed connectors are: "
            f"{', '.join(sorted(found)) or 'none'}. Install a package that has {name!r} as an "
            f"entry point of {GROUP}."
        )
    opener: OpenConnector = imported(found[name], f"--kv-connectors has {name!r}")
    return opener


_Batch = tuple[list[CacheEvent], Plan | StepResult | None]
"""What the cache did, and then this."""


class Connectors:
    """All connectors of one engine."""

    def __init__(self, connectors: dict[str, Connector]) -> None:
        self._listeners = {name: _Listener(name, each) for name, each in connectors.items()}

    def hear(self, events: list[CacheEvent], what: Plan | StepResult | None) -> None:
        """Returns at once. The lists and arrays are read later, and must stay as they are."""
        if not events and not _has_news(what):
            return
        for listener in self._listeners.values():
            listener.put((events, what))

    @property
    def dropped(self) -> dict[str, int]:
        """Batches that did not fit, by connector."""
        return {name: each.num_dropped for name, each in self._listeners.items()}

    @property
    def failed(self) -> dict[str, int]:
        """Calls that raised, by connector."""
        return {name: each.num_failed for name, each in self._listeners.items()}

    def close(self) -> None:
        for listener in self._listeners.values():
            listener.close()


def _has_news(what: Plan | StepResult | None) -> bool:
    if isinstance(what, Plan):
        return bool(what.arrivals or what.new_pages or what.copies)
    return what is not None and bool(what.copies)


class _Listener:
    """One connector, its queue and its thread."""

    def __init__(self, name: str, connector: Connector) -> None:
        self._name = name
        self._connector = connector
        self._queue: queue.Queue[tuple[_Batch, int] | None] = queue.Queue(MAX_BATCHES)
        self._requests: dict[Row, RequestId] = {}
        self._num_missed = 0
        self.num_dropped = 0
        self.num_failed = 0
        self._thread = threading.Thread(target=self._run, name=f"connector {name}", daemon=True)
        self._thread.start()

    def put(self, batch: _Batch) -> None:
        try:
            self._queue.put_nowait((batch, self._num_missed))
        except queue.Full:
            if self.num_dropped == 0:
                logger.warning(
                    "the connector %s is slower than the steps: events are dropped and counted "
                    "(this is said once)", self._name,
                )  # fmt: skip
            self.num_dropped += 1
            self._num_missed += 1
        else:
            self._num_missed = 0

    def close(self) -> None:
        """Deliver what is queued, if that takes no longer than a second."""
        try:
            self._queue.put(None, timeout=CLOSE_S)
        except queue.Full:
            logger.debug("events that the connector %s never heard are dropped", self._name)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            (events, what), num_missed = item
            if num_missed:
                self._requests.clear()  # rows may have other requests since
            told = [*self._in_order(events, what)]
            try:
                self._connector.hear(told, num_missed)
            except Exception:
                self.num_failed += 1
                if self.num_failed == 1:
                    logger.exception("the connector %s failed (this is said once)", self._name)
        try:
            self._connector.close()
        except Exception:
            logger.exception("the connector %s could not be closed", self._name)

    def _in_order(
        self, events: list[CacheEvent], what: Plan | StepResult | None
    ) -> Iterator[ConnectorEvent]:
        """A plan's pages can be found while it is planned: they are allocated before that."""
        first = len(events)
        if isinstance(what, Plan):
            stored = (at for at, event in enumerate(events) if isinstance(event, PagesStored))
            first = next(stored, first)
        yield from events[:first]
        yield from self._events_of(what)
        yield from events[first:]

    def _events_of(self, what: Plan | StepResult | None) -> Iterator[ConnectorEvent]:
        if isinstance(what, StepResult):
            for done in what.copies:
                arrived = tuple(map(bool, done.arrived))
                yield TransferEnded(done.copy_id, arrived, done.error)
        elif what is not None:
            yield from self._allocated(what)
            for copy in what.copies:
                ends = (tuple(copy.source_units.tolist()), tuple(copy.target_units.tolist()))
                yield TransferStarted(
                    copy.copy_id, copy.family, copy.source, copy.target, *ends, copy.hashes
                )

    def _allocated(self, plan: Plan) -> Iterator[PagesAllocated]:
        for arrival in plan.arrivals:
            self._requests[arrival.row] = arrival.request_id
            for family, table in enumerate(arrival.page_tables):
                yield PagesAllocated(
                    plan.step_id, arrival.request_id, family, 0, tuple(table.tolist()),
                    arrival.num_computed_tokens,
                )  # fmt: skip
        for new in plan.new_pages:
            rows, places, pages = new.rows.tolist(), new.places.tolist(), new.pages.tolist()
            first = 0
            for end in range(1, len(rows) + 1):
                if end == len(rows) or rows[end] != rows[first]:
                    request = self._requests.get(Row(rows[first]))
                    if request is not None:  # unknown after a gap
                        yield PagesAllocated(
                            plan.step_id, request, new.family, places[first],
                            tuple(pages[first:end]), 0,
                        )  # fmt: skip
                    first = end
