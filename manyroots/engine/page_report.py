"""Collects added and removed pages for a gateway that routes between engines.

Takes the cache's events after each step; gives them as `PageChange`s with the step's other
messages. Also passes the events on if --kv-events-config publishes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from manyroots.cache.events import CacheEvent, PagesStored
from manyroots.cache.keys import short_hash
from manyroots.engine.loop import EventSink
from manyroots.ids import AdapterDigest, AdapterName
from manyroots.messages import PageChange

NameOf = Callable[[AdapterDigest], AdapterName | None]


class PageReport:
    """An `EventSink` that keeps events until they are taken."""

    def __init__(self, name_of: NameOf, publisher: EventSink | None) -> None:
        self._name_of = name_of
        self._publisher = publisher
        self._changes: list[PageChange] = []

    def publish(self, events: Sequence[CacheEvent]) -> None:
        for event in events:
            is_stored = isinstance(event, PagesStored)
            digest = event.namespace.adapter if is_stored else None
            name = None if digest is None else self._name_of(digest)
            self._changes.append(
                PageChange(
                    event.tier,
                    [short_hash(page) for page in event.hashes],
                    is_stored,
                    None if digest is None or name is None else (name, digest),
                )
            )
        if self._publisher is not None:
            self._publisher.publish(events)

    def take(self) -> list[PageChange]:
        changes, self._changes = self._changes, []
        return changes

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
