"""Asks storage for pages that neither device nor host has (T04).

Storage has a page or not; this is known only when it answers. A ticket asks for every page after
those that were found, family by family. When all answers are in, what arrived becomes findable on
the host. One state is enough to resume from. If the host has fewer units for states than a prompt
has pages, states are requested after the pages. First the newest states of the pages that storage
has, then older ones until one is there, in a bounded number of questions. A ticket that asks for
all or nothing also keeps what the host already has (`keeping.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from manyroots.cache.eviction import Evictor
from manyroots.cache.index import Index
from manyroots.cache.keeping import MOST_KEPT, Keep, Keeper
from manyroots.cache.keys import PageHasher, PrefixKey
from manyroots.cache.outcomes import Refusal
from manyroots.cache.planes import ABSENT, Plane, Units
from manyroots.cache.publishing import Publisher
from manyroots.cache.tree import Node, Walk
from manyroots.ids import CopyId, StepId, Tier
from manyroots.step import Bools, Copy, CopyDone, Int32s

MOST_QUESTIONS = 4
"""For the states of one prompt. A request waits for each question, and a state so far before the
last page in storage saves little."""


class Share(enum.Enum):
    """How much of the host's memory a question may take."""

    ANY = "any"
    """As many pages as there is room for; pages after them are not requested."""
    WHOLE = "whole"
    """Room for everything that it asks for, or it is not asked. It also keeps what the host has of
    the same prompt."""
    NONE = "none"
    """None, since other requests come first: it is asked only if another ticket has asked the same
    already."""


@dataclass(slots=True)
class Ticket:
    """One request's question to storage."""

    key: PrefixKey
    cursor: Node
    first: int
    keys: bytes
    """Tokens of the pages from `first` on."""
    kept: Keep | None = None
    """What the host has of the same prompt, until the request lets go of it."""
    refusal: Refusal | None = None
    """The reason that it was not asked."""
    units: dict[CopyId, tuple[Plane, Units]] = field(default_factory=dict)
    begins: dict[CopyId, int] = field(default_factory=dict)
    """The first of the requested pages of each copy."""
    late: tuple[Plane, ...] = ()
    """Planes of states that are requested once the number of pages in storage is known."""
    num_questions: int = 0
    """Number of questions for those states so far."""
    arrived: dict[CopyId, Bools] = field(default_factory=dict)
    is_barred: bool = False
    """One of its namespaces was evicted since: the answer is not published."""
    asked: tuple[bytes, ...] = ()
    """The requested hashes: as many pages as there was room for."""
    is_whole: bool = False
    """All of them were there, in every family that a page needs."""
    num_useful_pages: int = 0
    """How many of them, from the front, are usable now."""
    leader: Ticket | None = None
    """The ticket that already asks for its first page: this one then only waits for that answer
    (T09)."""

    def hashes(self, hasher: PageHasher, parent: bytes) -> list[bytes]:
        """The hash of each page, after the page hashed `parent`."""
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
        """Pages that storage had of those requested by this ticket or for it."""
        return (self.leader or self).num_useful_pages

    @property
    def is_worth_going_on(self) -> bool:
        """Whether storage had everything that another ticket asked for, so that it may have later
        pages."""
        answer = self.leader
        return answer is not None and not answer.is_barred and answer.is_whole


class Prefetcher:
    """Questions in progress."""

    def __init__(
        self,
        index: Index,
        evictors: list[Evictor],
        publisher: Publisher,
        keeper: Keeper,
        hasher: PageHasher | None,
        next_id: Callable[[], CopyId],
    ) -> None:
        """`hasher`: None if nothing will be asked."""
        self._index = index
        self._evictors = evictors
        self._publisher = publisher
        self._keeper = keeper
        self._hasher = hasher
        self._next_id = next_id
        self._outbox: list[Copy] = []
        self._tickets: dict[CopyId, Ticket] = {}
        self._asked: dict[bytes, Ticket] = {}
        """By hash of a page that storage was asked for and has not answered."""

    def tickets(self) -> list[Ticket]:
        """For audits."""
        return list({id(ticket): ticket for ticket in self._tickets.values()}.values())

    def take_intents(self) -> tuple[Copy, ...]:
        """Questions to send with the step being planned."""
        intents, self._outbox = tuple(self._outbox), []
        return intents

    def ask(self, key: PrefixKey, tokens: Int32s, walk: Walk, room: Share) -> Ticket | None:
        """Ask for all whole pages after those that were found, or as many as `room` allows. If
        another ticket has asked for the first of them, this one waits for that answer. None: no
        room at all."""
        hasher, page_size = self._hasher, self._index.layout.page_size
        assert hasher is not None
        cursor, parent = self._index.tree.root, hasher.root
        if walk.nodes:
            cursor = walk.nodes[-1]
            parent = self._index.hash_of(cursor, walk.depth - 1 - cursor.first)
        max_pages = (len(tokens) - 1) // page_size
        keys = tokens[walk.depth * page_size : max_pages * page_size].tobytes()
        ticket = Ticket(key, cursor, walk.depth, keys)
        hashes = ticket.hashes(hasher, parent)
        leader = self._asked.get(hashes[0])
        if leader is not None and not leader.is_barred:
            ticket.leader = leader
            return ticket
        if room is Share.NONE:
            ticket.refusal = Refusal.NO_ROOM
        elif room is Share.WHOLE:
            ticket.kept = self._keeper.keep(key, tokens)
            ticket.refusal = self._refusal(ticket.kept, len(hashes))
            if ticket.refusal is not None:
                self._keeper.let_go(ticket.kept)
                ticket.kept = None
        if ticket.refusal is not None:
            return ticket
        return ticket if self._take(ticket, hashes) else None

    def _take(self, ticket: Ticket, hashes: list[bytes]) -> bool:
        """Take host units for as many pages as there is room for; False if there is none."""
        host = self._index.layout.host
        ticket.late = tuple(p for p in host if self._num_states(p, len(hashes)) < len(hashes))
        at_once = [plane for plane in host if plane not in ticket.late]
        count = min(len(hashes), *(self._index.pools[p.index].num_available for p in at_once))
        if count == 0:
            return False
        ticket.asked = tuple(hashes[:count])
        self._asked.update(dict.fromkeys(ticket.asked, ticket))
        for plane in at_once:
            self._send(ticket, plane, 0, count)
        return True

    def _send(self, ticket: Ticket, plane: Plane, begin: int, end: int) -> None:
        """Ask for some of a ticket's pages, of one family."""
        pool, copy_id, count = self._index.pools[plane.index], self._next_id(), end - begin
        if count > pool.num_free:
            self._evictors[plane.index].evict(count - pool.num_free)
        units = pool.take(count)
        ticket.units[copy_id], ticket.begins[copy_id] = (plane, units), begin
        self._tickets[copy_id] = ticket
        self._outbox.append(
            Copy(copy_id, plane.family_index, Tier.STORAGE, Tier.HOST,
                 np.empty(0, np.int32), units.astype(np.int32), ticket.asked[begin:end])
        )  # fmt: skip

    def _num_states(self, plane: Plane, num_pages: int) -> int:
        """How many states to request for this many pages. If another family's pages show how far
        storage has them, at most what leaves room for others. For other families, all."""
        is_led = any(p.family.is_ordered for p in self._index.layout.spine)
        if not plane.family.is_state or not is_led:
            return num_pages
        num_taken, num_available = self.room(plane)
        most = max(1, int(MOST_KEPT * plane.num_units) - num_taken)
        return min(num_pages, num_available, most)

    def _ask_states(self, ticket: Ticket) -> None:
        """The number of pages in storage is known: ask for the newest states of those. If none of
        them was there, ask for the states before them, in the same units."""
        end = 0 if ticket.is_barred else self._count_useful(ticket)
        answered = [i for i, (plane, _) in ticket.units.items() if plane in ticket.late]
        has_states = bool(answered) and all(ticket.arrived[i].any() for i in answered)
        if has_states or ticket.num_questions == MOST_QUESTIONS:
            return
        for copy_id in answered:
            plane, units = ticket.units.pop(copy_id)
            self._index.pools[plane.index].drop(units)
            del ticket.arrived[copy_id]
            end = min(end, ticket.begins.pop(copy_id))
        ticket.num_questions += 1
        for plane in ticket.late:
            num_states = self._num_states(plane, end)
            if num_states:
                self._send(ticket, plane, end - num_states, end)

    def _count_useful(self, ticket: Ticket) -> int:
        """How many of the requested pages, from the front, are worth keeping."""
        spine = self._index.layout.spine
        supports = [ticket.arrived[i] for i, (plane, _) in ticket.units.items() if plane in spine]
        return _useful(supports, any(p.family.is_ordered for p in spine))

    def _refusal(self, own: Keep, num_pages: int) -> Refusal | None:
        """Why there is no room for this many pages, if some plane has none: now, beside what others
        keep and fetch, or ever, beside its own."""
        has_room, num_asked = True, num_pages
        for plane in self._index.layout.host:
            num_pages = max(1, self._num_states(plane, num_asked))
            num_own = len(own.units.get(plane.index, ()))
            if num_own + num_pages > plane.num_units:
                return Refusal.TOO_LARGE
            num_taken, num_available = self.room(plane)
            is_alone = num_taken == num_own
            has_room &= num_pages <= num_available
            has_room &= is_alone or num_taken + num_pages <= MOST_KEPT * plane.num_units
        return None if has_room else Refusal.NO_ROOM

    def room(self, plane: Plane) -> tuple[int, int]:
        """Units of a host plane that are kept or being fetched, and units that could be taken."""
        fetched = sum(
            len(units) for t in self.tickets() for p, units in t.units.values() if p is plane
        )
        kept = self._keeper.num_kept(plane.index)
        return kept + fetched, self._index.pools[plane.index].num_available

    def acknowledge(self, done: CopyDone) -> int | None:
        """Handle an answer; returns its family, or None if it belongs to no question."""
        ticket = self._tickets.pop(done.copy_id, None)
        if ticket is None:
            return None
        ticket.arrived[done.copy_id] = np.asarray(done.arrived)
        family = ticket.units[done.copy_id][0].family_index
        if ticket.is_done and ticket.late:
            self._ask_states(ticket)
        if ticket.is_done:
            self._settle(ticket)
        return family

    def _settle(self, ticket: Ticket) -> None:
        for digest in ticket.asked:
            if self._asked.get(digest) is ticket:
                del self._asked[digest]
        index = self._index
        count = self._count_useful(ticket)
        ticket.is_whole = count == len(ticket.asked)
        ticket.num_useful_pages = count
        if count and not ticket.is_barred:
            keys = ticket.keys[: count * index.layout.page_size * 4]
            self._publish(ticket, count, keys)
        for plane, units in ticket.units.values():
            index.pools[plane.index].drop(units)
        self._publisher.offer_path(ticket.cursor)

    def _publish(self, ticket: Ticket, count: int, keys: bytes) -> None:
        cursor = ticket.cursor
        while not cursor.is_attached and cursor.parent is not None:
            cursor = cursor.parent
        if cursor.end < ticket.first:
            return  # the page before these is gone by now
        end = ticket.first + count
        path = self._index.tree.insert(
            cursor, ticket.key, keys, ticket.first, end, StepId(0), lengthen=False
        )
        for node in path:
            self._index.fill_hashes(node)
            for depth in range(max(ticket.first, node.first), min(end, node.end)):
                place = depth - node.first
                for copy_id, (plane, units) in ticket.units.items():
                    at = depth - ticket.first - ticket.begins[copy_id]
                    arrived = ticket.arrived[copy_id]
                    if not 0 <= at < len(units):
                        continue
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
