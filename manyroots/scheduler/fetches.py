"""Pages in storage for waiting requests: which requests to ask for, and which keep what arrived
(T04).

In: new requests, answers, and requests that start or end. Out: requests that no longer wait for
storage. Pages that arrived for a request are kept on the host until it starts or ends. If the host
has no room for a question, its request stands in line, and is asked for in order when there is
room.

No request waits forever, and no two wait for each other:

- A request in line keeps nothing: room for everything that it lacks is taken at once or not.
- A request that keeps pages waits for rows, pages and its adapter, none of which a request in line
  has.
- Memory that is kept for requests that cannot start (they are less important, or their adapter
  does not run) goes to the first in line. If requests that keep pages do not start although there
  are rows, all in line move to the queue. Storage is still asked for them when there is room.
- A prompt that is larger than the host waits only for fetches in progress, and takes what fits.
"""

from __future__ import annotations

from manyroots.cache.cache import PrefixCache
from manyroots.cache.keeping import Keep
from manyroots.cache.outcomes import Refusal
from manyroots.cache.prefetch import Share, Ticket
from manyroots.ids import StepId
from manyroots.scheduler.lanes import GroupKey, Line
from manyroots.scheduler.queue import WaitingQueue, has_aged
from manyroots.scheduler.request import Request
from manyroots.scheduler.rows import Rows
from manyroots.scheduler.slices import AdapterSlices

MOST_STALLED_STEPS = 64
"""Steps without progress: nothing arrives from storage, no request with kept pages starts although
there are rows, and the first in line finds no room. After this many, no request waits in line."""


class Fetches:
    """Requests that wait for storage, and pages kept for requests that wait to start."""

    def __init__(
        self,
        cache: PrefixCache,
        waiting: WaitingQueue,
        slices: AdapterSlices,
        rows: Rows,
    ) -> None:
        self._cache = cache
        self._policy = waiting.policy
        self._slices = slices
        self._rows = rows
        self._importance = waiting.policy.importance
        self.fetching: dict[Request, None] = {}
        """Requests that are not in the queue yet, because of storage."""
        self.asked: dict[Request, Ticket] = {}
        """Open questions to storage, including those whose request no longer waits."""
        self.kept: dict[Request, Keep] = {}
        """Pages that arrived for requests that have not started."""
        self._lines: dict[GroupKey, Line] = {}
        """By adapter and tenant: requests not asked for yet, including those in the queue."""
        self.in_line: set[Request] = set()
        self._num_stalled_steps = 0
        self._refused: tuple[Request, bool, list[tuple[int, int]]] | None = None
        """The last request without room, whether anything was in progress, and the room at that
        time."""

    def __len__(self) -> int:
        return len(self.fetching)

    # Coming and going

    def begin(self, request: Request) -> bool:
        """Ask storage for a new request, in order. False if it need not wait for that."""
        is_waiting = self._ask_or_stand(request)
        if is_waiting:
            self.fetching[request] = None
        return is_waiting

    def end(self, request: Request) -> None:
        """A request starts or ends."""
        self.fetching.pop(request, None)
        if request in self.in_line:
            self._leave_line(request)
        ticket = self.asked.pop(request, None)
        if ticket is not None and ticket.kept is not None:
            self._cache.let_go(ticket.kept)
        self._let_go(request)

    def loads(self, request: Request) -> None:
        """A request loads what was found: nothing more is asked for. What arrived is kept until it
        starts, since it may have to wait again."""
        if request in self.in_line:
            self._leave_line(request)

    @property
    def has_any(self) -> bool:
        """Whether any request is known here."""
        return bool(self.in_line or self.asked or self.kept)

    @property
    def num_open_keeps(self) -> int:
        """All keeps, for any request; for audits."""
        return self._cache.num_keeps

    # Answers

    def take_answers(self) -> list[Request]:
        """Storage may have answered; returns requests that no longer wait for it."""
        done = [(request, ticket) for request, ticket in self.asked.items() if ticket.is_done]
        # All requests keep what has arrived for them before any asks for more.
        for request, ticket in done:
            del self.asked[request]
            request.num_fetched_tokens += ticket.num_found_pages * self._cache.page_size
            self._keep(request)
            if ticket.kept is not None:
                self._cache.let_go(ticket.kept)
        # After another request's answer, one may ask for later pages.
        over = [r for r, t in done if not (t.is_worth_going_on and self._ask_or_stand(r))]
        return self._go_on(over)

    def lose_patience(self, step_id: StepId) -> list[Request]:
        """A step is planned; returns requests that have waited long enough for storage. It may
        still answer in time, while they are in the queue."""
        patience = self._cache.patience_steps
        if patience is None:
            return []
        return self._go_on([r for r in self.fetching if step_id - r.since >= patience])

    def ask_in_order(self, step_id: StepId) -> list[Request]:
        """All requests that can start in this step have started, and may have left room: ask for
        those in line until one finds none. Returns requests that have nothing to wait for."""
        over: list[Request] = []
        while (request := self._first(step_id)) is not None:
            ticket, is_refused = self._ask_first(request)
            if not is_refused:
                self._leave_line(request)
                self._num_stalled_steps = 0
                if ticket is None:
                    over.append(request)
            elif self._is_busy or not self._take_back(request, step_id):
                break
        if self.in_line and not self._is_busy and self._rows.free:
            self._num_stalled_steps += 1
        if self.in_line and self._num_stalled_steps > MOST_STALLED_STEPS:
            over += [r for r in self.fetching if r in self.in_line]
        return self._go_on(over)

    def _go_on(self, requests: list[Request]) -> list[Request]:
        """The given requests that waited for storage; they no longer do."""
        waited = [request for request in dict.fromkeys(requests) if request in self.fetching]
        for request in waited:
            del self.fetching[request]
        return waited

    # Asking

    def _ask_or_stand(self, request: Request) -> bool:
        """Ask for a request, or put it in line; False if there is nothing to ask."""
        room = Share.NONE if self.in_line else Share.WHOLE
        ticket = self._ask(request, room)
        if ticket is None:
            return False
        if ticket.refusal is not None:
            self._let_go(request)
            self._lines.setdefault(request.group, Line(self._importance)).push(request)
            self.in_line.add(request)
        return True

    def _ask(self, request: Request, room: Share) -> Ticket | None:
        ticket = self._cache.prefetch(request.key, request.tokens, room)
        request.skips_storage = self._cache.left_storage_alone
        if ticket is not None and ticket.refusal is None:
            self.asked[request] = ticket
            if ticket.kept is not None:
                self._let_go(request)  # the ticket keeps the same
        return ticket

    def _ask_first(self, request: Request) -> tuple[Ticket | None, bool]:
        """Ask for the first in line; returns the ticket, and whether the request must stay in
        line."""
        is_busy = self._is_busy
        tried = (request, is_busy, self._cache.host_room)
        if tried == self._refused:
            return None, True
        ticket = self._ask(request, Share.WHOLE)
        if ticket is None or ticket.refusal is None:
            return ticket, False
        if ticket.refusal is Refusal.TOO_LARGE and not is_busy:
            self._keep(request)
            return self._ask(request, Share.ANY), False
        self._refused = tried
        return None, True

    @property
    def _is_busy(self) -> bool:
        """Whether anything in progress will make room: copies from storage, or to the device for
        requests with kept pages."""
        if self.asked:
            return True
        return any(r.lease is not None and not r.lease.is_ready for r in self.kept)

    # Order

    def _first(self, step_id: StepId) -> Request | None:
        """The next request to ask for: one whose adapter runs, then in the order of the queue."""
        heads = [line.rank[2] for line in self._lines.values() if line.rank is not None]
        if len(heads) < 2:
            return heads[0] if heads else None

        def rank(request: Request) -> tuple[tuple[bool, int], int, int]:
            num_served = self._policy.num_served_tokens(request)
            return self._standing(request, step_id), num_served, request.serial

        return min(heads, key=rank)

    def _standing(self, request: Request, step_id: StepId) -> tuple[bool, int]:
        """The smallest comes first, whenever it arrived. A request that has waited long counts as
        if its adapter ran: its adapter may not be loaded before it is in the queue."""
        is_later = not self._slices.is_open(request.group[0]) and not has_aged(request, step_id)
        return is_later, 0 if self._importance is None else self._importance(request)

    def _take_back(self, request: Request, step_id: StepId) -> bool:
        """Release the pages of a request that cannot start, for one that stands before it in line;
        False if there is none. It recomputes them when it starts."""
        standings = [(self._standing(r, step_id), r.serial, r) for r in self.kept]
        if not standings:
            return False
        standing, _, last = max(standings, key=lambda place: place[:2])
        if standing <= self._standing(request, step_id):
            return False
        self._let_go(last)
        return True

    def _leave_line(self, request: Request) -> None:
        self.in_line.remove(request)
        line = self._lines[request.group]
        line.discard(request)
        if line.rank is None:
            del self._lines[request.group]
        if not self.in_line:
            self._num_stalled_steps = 0

    def _keep(self, request: Request) -> None:
        """Keep what the host has of a request now, instead of what it had."""
        keep = self._cache.keep(request.key, request.tokens)
        self._let_go(request)
        self.kept[request] = keep

    def _let_go(self, request: Request) -> None:
        keep = self.kept.pop(request, None)
        if keep is not None:
            self._cache.let_go(keep)
