"""Waiting requests of one adapter, in the order in which they are taken.

Within a lane tenants matter to the fair policy alone, which has a line for each and takes from the
tenant that was served least. All others have one line, by importance and arrival. Knows no other
lane and no adapter but its own.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator

from manyroots.ids import AdapterDigest
from manyroots.scheduler.ranking import MAX_STALE, Ranking
from manyroots.scheduler.request import Request

LaneEntry = tuple[int, int, Request]
"""What the policy goes by, then the order of arrival, and whose place it is."""
GroupKey = tuple[AdapterDigest | None, str | None]
"""Adapter and tenant."""
Importance = Callable[[Request], int]
"""What a request goes by before its arrival; the less, the sooner."""


def priority_of(request: Request) -> int:
    return request.submit.priority


def begun_first(request: Request) -> int:
    """Who was retracted goes on before anybody else begins."""
    return 0 if request.num_cached_tokens is None else -1


class Line:
    """Requests by arrival, behind importance where that counts."""

    __slots__ = ("_gone", "_importance", "_late", "_line", "rank")

    def __init__(self, importance: Importance | None = None) -> None:
        self._importance = importance
        self._line: deque[LaneEntry] = deque()
        """Who came behind all that stood in line: nearly everybody."""
        self._late: list[LaneEntry] = []
        """A heap of the others, who came back or are more important."""
        self._gone: set[Request] = set()
        """Of those, who waits no more; never the head."""
        self.rank: LaneEntry | None = None
        """The place of the next request; None if there is none. Kept, as it is read more often
        than it changes."""

    def __len__(self) -> int:
        """How many places are kept, for tests of what is forgotten."""
        return len(self._line) + len(self._late)

    def push(self, request: Request) -> None:
        importance = 0 if self._importance is None else self._importance(request)
        place = (importance, request.serial, request)
        if not self._line or place > self._line[-1]:
            self._line.append(place)
        else:
            heapq.heappush(self._late, place)
        if self.rank is None or place < self.rank:
            self.rank = place

    def discard(self, request: Request) -> None:
        """A request that is over will not be pushed again."""
        if self.rank is not None and self.rank[2] is request:
            self.pop()
        else:
            self._gone.add(request)
        if 2 * len(self._gone) > len(self) + MAX_STALE:
            gone, self._gone = self._gone, set()
            self._line = deque(place for place in self._line if place[2] not in gone)
            self._late = sorted(place for place in self._late if place[2] not in gone)

    def pop(self) -> Request:
        place, line, late, gone = self.rank, self._line, self._late, self._gone
        assert place is not None
        request = place[2]
        while place is not None:
            if late and late[0] is place:
                heapq.heappop(late)
            else:
                line.popleft()
            place = line[0] if line else None
            if late and (place is None or late[0] < place):
                place = late[0]
            if not gone or place is None or place[2] not in gone:
                break
            gone.discard(place[2])
        self.rank = place
        return request

    def __iter__(self) -> Iterator[Request]:
        for _, _, request in (*self._line, *self._late):
            if request not in self._gone:
                yield request


class Lane(ABC):
    """Waiting requests of one adapter, or of the base model."""

    __slots__ = ()

    adapter: AdapterDigest | None

    @property
    @abstractmethod
    def rank(self) -> LaneEntry | None:
        """The place of the next request; None if there is none."""

    @property
    def head(self) -> Request:
        """The next request; there is at least one."""
        place = self.rank
        assert place is not None
        return place[2]

    @abstractmethod
    def __len__(self) -> int:
        """How many wait; a few that are gone may be counted."""

    @abstractmethod
    def push(self, request: Request) -> None: ...

    @abstractmethod
    def pop(self) -> Request: ...

    @abstractmethod
    def discard(self, request: Request) -> None: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]: ...


class PlainLane(Line, Lane):
    """One line for all tenants."""

    __slots__ = ("adapter",)

    def __init__(self, adapter: AdapterDigest | None, importance: Importance | None) -> None:
        super().__init__(importance)
        self.adapter = adapter


class Account:
    """What one tenant was served with one adapter, while any request of it is not over."""

    __slots__ = ("line", "num_served_tokens", "taken")

    def __init__(self, num_served_tokens: int) -> None:
        self.num_served_tokens = num_served_tokens
        """On the scale of virtual time: it begins at the time at which the tenant came."""
        self.line = Line()
        self.taken: set[Request] = set()
        """Who left the line for the batch and is not over."""

    @property
    def rank(self) -> LaneEntry | None:
        place = self.line.rank
        return None if place is None else (self.num_served_tokens, place[1], place[2])


class Accounts:
    """Start-time fair queueing over tenants, whichever lane they are in.

    Virtual time is the largest account that a request began from; it is at least the lowest
    account of those that wait, and where nobody waits, the highest of all. Who comes, or comes back
    when nothing of it waits, starts there: no credit for absence, and no debt for what nobody else
    wanted. An account is dropped with the last request of its tenant.

    While two tenants both have requests that wait and could begin, the tokens that they are served
    differ by at most twice what the running requests of one may still compute.
    """

    def __init__(self) -> None:
        self.virtual_time = 0
        self._highest = 0
        """The highest account that there was."""
        self._accounts: dict[GroupKey, Account] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    def __getitem__(self, group: GroupKey) -> Account:
        return self._accounts[group]

    def num_served_tokens(self, group: GroupKey) -> int:
        """What a tenant was served; none, if no request of it is in the queue or the batch."""
        account = self._accounts.get(group)
        return 0 if account is None else account.num_served_tokens

    def arrive(self, request: Request, first: LaneEntry | None) -> None:
        """A request is about to be pushed; `first` is the lowest place of those that wait. One
        that lost its place in the batch is no arrival: its tenant never stopped waiting."""
        account = self._accounts.get(request.group)
        if account is not None and (request in account.taken or account.line.rank is not None):
            return
        level = self._highest if first is None else first[0]
        self.virtual_time = max(self.virtual_time, level)
        if account is None:
            self._accounts[request.group] = Account(self.virtual_time)
        else:
            account.num_served_tokens = max(account.num_served_tokens, self.virtual_time)

    def push(self, request: Request) -> Account:
        account = self._accounts[request.group]
        account.taken.discard(request)
        account.line.push(request)
        return account

    def pop(self, account: Account) -> Request:
        self.virtual_time = max(self.virtual_time, account.num_served_tokens)
        request = account.line.pop()
        account.taken.add(request)
        return request

    def charge(self, group: GroupKey, num_tokens: int) -> Account | None:
        """Tokens are computed for a tenant; less than none: they were not after all."""
        account = self._accounts.get(group)
        if account is not None:
            account.num_served_tokens += num_tokens
            self._highest = max(self._highest, account.num_served_tokens)
        return account

    def close(self, request: Request) -> None:
        """A request that does not wait is over."""
        account = self._accounts.get(request.group)
        if account is not None:
            account.taken.discard(request)
            if not account.taken and account.line.rank is None:
                del self._accounts[request.group]


class FairLane(Lane):
    """A line for each tenant; the one that was served least is next."""

    __slots__ = ("_accounts", "_tenants", "adapter")

    def __init__(self, adapter: AdapterDigest | None, accounts: Accounts) -> None:
        self.adapter = adapter
        self._accounts = accounts
        self._tenants: Ranking[Account] = Ranking()

    @property
    def rank(self) -> LaneEntry | None:
        first = self._tenants.first()
        return None if first is None else first.rank

    def __len__(self) -> int:
        return sum(len(account.line) for account in self._tenants)

    def push(self, request: Request) -> None:
        self._tenants.note(self._accounts.push(request))

    def pop(self) -> Request:
        first = self._tenants.first()
        assert first is not None
        request = self._accounts.pop(first)
        self._forget_if_empty(first)
        return request

    def discard(self, request: Request) -> None:
        account = self._accounts[request.group]
        account.line.discard(request)
        self._forget_if_empty(account)
        self._accounts.close(request)

    def note(self, account: Account) -> None:
        """A tenant's account is lower than it was."""
        if account.rank is not None:
            self._tenants.note(account)

    def __iter__(self) -> Iterator[Request]:
        for account in self._tenants:
            yield from account.line

    def _forget_if_empty(self, account: Account) -> None:
        if account.line.rank is None:
            self._tenants.forget(account)
