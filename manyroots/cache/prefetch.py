"""Asking storage for pages that neither device nor host has (T04).

Whether storage has a page is known only when it answers. A ticket asks for every page behind what
was found, family by family; when all answers are in, what arrived becomes findable on the host.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from manyroots.cache.eviction import Evictor
from manyroots.cache.index import Index
from manyroots.cache.keys import PageHasher, PrefixKey
from manyroots.cache.planes import ABSENT, Plane, Units
from manyroots.cache.publishing import Publisher
from manyroots.cache.tree import Node
from manyroots.ids import CopyId, StepId, Tier
from manyroots.step import Bools, Copy, CopyDone


@dataclass(slots=True)
class Ticket:
    """One request's question to storage."""

    key: PrefixKey
    cursor: Node
    first: int
    keys: bytes
    """Tokens of the pages from `first` on."""
    patience_steps: int | None
    """For how many steps the request should wait for it; None is as long as it takes. Whether or
    not it does, the answer is taken when it comes."""
    units: dict[CopyId, tuple[Plane, Units]] = field(default_factory=dict)
    arrived: dict[CopyId, Bools] = field(default_factory=dict)
    is_barred: bool = False
    """A namespace of it was evicted since: the answer is published nowhere."""
    asked: tuple[bytes, ...] = ()
    """The hashes that were asked for: as many pages as there was room for."""
    is_whole: bool = False
    """All of those were there, in every family that a page can't do without."""
    num_useful_pages: int = 0
    """How many of those, from the front, are of use now."""
    leader: Ticket | None = None
    """Who has asked for its first page already: nothing is asked for then but to be told (T09)."""

    def hashes(self, hasher: PageHasher, parent: bytes) -> list[bytes]:
        """The hash of each page, behind the page hashed `parent`."""
        end = self.first + len(self.keys) // hasher.page_bytes
        hashes: list[bytes] = []
        page = self.first
        while page < end:
            stop = self.key.run_end(page, end)
            begin = (page - self.first) * hasher.page_bytes
            run = self.keys[begin : (stop - self.first) * hasher.page_bytes]
            hashes += hasher.chain(parent, self.key.at(page), run)
            parent, page = hashes[-1], stop
        return hashes

    @property
    def is_done(self) -> bool:
        if self.leader is not None:
            return self.leader.is_done
        return len(self.arrived) == len(self.units)

    @property
    def num_found_pages(self) -> int:
        """What storage had of those that were asked for, by this ticket or for it."""
        return (self.leader or self).num_useful_pages

    @property
    def is_worth_going_on(self) -> bool:
        """Whether storage had all that another asked for, so that it may have what lies behind."""
        answer = self.leader
        return answer is not None and not answer.is_barred and answer.is_whole


class Prefetcher:
    """Questions under way."""

    def __init__(self, index: Index, evictors: list[Evictor], publisher: Publisher) -> None:
        self._index = index
        self._evictors = evictors
        self._publisher = publisher
        self._tickets: dict[CopyId, Ticket] = {}
        self._asked: dict[bytes, Ticket] = {}
        """By the hash of a page that storage was asked for and has not answered."""

    def tickets(self) -> list[Ticket]:
        """For audits."""
        return list({id(ticket): ticket for ticket in self._tickets.values()}.values())

    def ask(self, ticket: Ticket, hashes: list[bytes], copy_ids: list[CopyId]) -> list[Copy]:
        """Take host units for as many pages as there is room for; the intents to send. None if
        another has asked for the first of them, whose answer the ticket then waits for."""
        leader = self._asked.get(hashes[0])
        if leader is not None and not leader.is_barred:
            ticket.leader = leader
            return []
        host = self._index.layout.host
        count = min(len(hashes), *(self._index.pools[p.index].num_available for p in host))
        if count == 0:
            return []
        ticket.asked = tuple(hashes[:count])
        self._asked.update(dict.fromkeys(ticket.asked, ticket))
        intents = []
        for plane, copy_id in zip(host, copy_ids, strict=True):
            pool = self._index.pools[plane.index]
            if count > pool.num_free:
                self._evictors[plane.index].evict(count - pool.num_free)
            units = pool.take(count)
            ticket.units[copy_id] = (plane, units)
            self._tickets[copy_id] = ticket
            intents.append(
                Copy(copy_id, plane.family_index, Tier.STORAGE, Tier.HOST,
                     np.empty(0, np.int32), units.astype(np.int32), ticket.asked)
            )  # fmt: skip
        return intents

    def acknowledge(self, done: CopyDone) -> int | None:
        """Take an answer; gives its family, or None if it is not one of ours."""
        ticket = self._tickets.pop(done.copy_id, None)
        if ticket is None:
            return None
        ticket.arrived[done.copy_id] = np.asarray(done.arrived)
        if ticket.is_done:
            self._settle(ticket)
        return ticket.units[done.copy_id][0].family_index

    def _settle(self, ticket: Ticket) -> None:
        for digest in ticket.asked:
            if self._asked.get(digest) is ticket:
                del self._asked[digest]
        index = self._index
        spine = {plane.index for plane in index.layout.spine}
        answers = [(plane, units, ticket.arrived[i]) for i, (plane, units) in ticket.units.items()]
        supports = [arrived for plane, _, arrived in answers if plane.index in spine]
        count = _useful(supports, any(p.family.is_ordered for p in index.layout.spine))
        ticket.is_whole = count == len(ticket.asked)
        ticket.num_useful_pages = count
        if count and not ticket.is_barred:
            keys = ticket.keys[: count * index.layout.page_size * 4]
            self._publish(ticket, count, keys, answers)
        for plane, units, _ in answers:
            index.pools[plane.index].drop(units)
        self._publisher.offer_path(ticket.cursor)

    def _publish(
        self, ticket: Ticket, count: int, keys: bytes, answers: list[tuple[Plane, Units, Bools]]
    ) -> None:
        cursor = ticket.cursor
        while not cursor.is_attached and cursor.parent is not None:
            cursor = cursor.parent
        if cursor.end < ticket.first:
            return  # what this would continue has gone meanwhile
        end = ticket.first + count
        path = self._index.tree.insert(
            cursor, ticket.key, keys, ticket.first, end, StepId(0), lengthen=False
        )
        for node in path:
            self._index.fill_hashes(node)
            for depth in range(max(ticket.first, node.first), min(end, node.end)):
                place = depth - node.first
                for plane, units, arrived in answers:
                    at = depth - ticket.first
                    if arrived[at] and node.units[plane.index][place] == ABSENT:
                        self._index.add(node, plane.index, np.array([place]), units[at : at + 1])
        ticket.cursor = path[-1]
        self._publisher.touch(path[-1], end)


def _useful(supports: list[Bools], is_ordered: bool) -> int:
    """How many pages, from the front, are worth a place in the tree."""
    if is_ordered:
        whole = np.logical_and.reduce(supports)
        return len(whole) if whole.all() else int(np.argmin(whole))
    places = np.logical_or.reduce(supports).nonzero()[0]
    return int(places[-1]) + 1 if len(places) else 0
