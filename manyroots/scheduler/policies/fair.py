"""Fair between adapters and tenants: the tenant that was served the fewest tokens is next.

Start-time fair queueing. An account counts one tenant's tokens with one adapter, while any of its
requests is unfinished. Nothing is kept for a tenant without requests.
"""

from __future__ import annotations

from collections.abc import Iterator

from manyroots.ids import AdapterDigest
from manyroots.scheduler.lanes import GroupKey, Lane, Line, QueueKey
from manyroots.scheduler.policies.fcfs import FcfsPolicy
from manyroots.scheduler.ranking import Ranking
from manyroots.scheduler.request import Request


class Account:
    """The tokens of one tenant with one adapter."""

    __slots__ = ("lane", "line", "num_served_tokens", "taken")

    def __init__(self, num_served_tokens: int) -> None:
        self.num_served_tokens = num_served_tokens
        """On the scale of virtual time: it starts at the time of the tenant's arrival."""
        self.line = Line()
        self.lane: FairLane | None = None
        """The lane in which its requests wait."""
        self.taken: set[Request] = set()
        """Requests that left the line for the batch and are unfinished."""

    @property
    def rank(self) -> QueueKey | None:
        key = self.line.rank
        return None if key is None else (self.num_served_tokens, key[1], key[2])


class FairPolicy(FcfsPolicy):
    """Accounts of all tenants.

    Virtual time is the largest account from which a request started. It is at least the lowest
    account of waiting tenants, and the highest of all if none waits. A tenant that arrives, or
    returns when none of its requests waits, starts there. It gets no credit for absence, and no
    debt for tokens that no other tenant wanted.

    While two tenants both have waiting requests that could start, their served tokens differ by at
    most twice what the running requests of one may still compute.
    """

    charges_tokens = True

    def __init__(self) -> None:
        self.virtual_time = 0
        self._highest = 0
        """The highest account so far."""
        self.accounts: dict[GroupKey, Account] = {}

    def new_lane(self, adapter: AdapterDigest | None) -> Lane:
        return FairLane(adapter, self)

    def arrive(self, request: Request, order: Ranking[Lane]) -> None:
        """A request that lost its row is not an arrival: its tenant never stopped waiting."""
        account = self.accounts.get(request.group)
        if account is not None and (request in account.taken or account.line.rank is not None):
            return
        first = order.first_rank()
        self.virtual_time = max(self.virtual_time, self._highest if first is None else first[0])
        if account is None:
            self.accounts[request.group] = Account(self.virtual_time)
        else:
            account.num_served_tokens = max(account.num_served_tokens, self.virtual_time)

    def charge(self, request: Request, num_tokens: int) -> Lane | None:
        account = self.accounts.get(request.group)
        if account is None:
            return None
        account.num_served_tokens += num_tokens
        self._highest = max(self._highest, account.num_served_tokens)
        if num_tokens >= 0 or account.lane is None or account.rank is None:
            return None
        account.lane.note(account)
        return account.lane

    def num_served_tokens(self, request: Request) -> int:
        account = self.accounts.get(request.group)
        return 0 if account is None else account.num_served_tokens

    def close(self, request: Request) -> None:
        account = self.accounts.get(request.group)
        if account is not None:
            account.taken.discard(request)
            if not account.taken and account.line.rank is None:
                del self.accounts[request.group]


class FairLane(Lane):
    """A line for each tenant; the tenant that was served least is next."""

    __slots__ = ("_policy", "_tenants", "adapter")

    def __init__(self, adapter: AdapterDigest | None, policy: FairPolicy) -> None:
        self.adapter = adapter
        self._policy = policy
        self._tenants: Ranking[Account] = Ranking()

    @property
    def rank(self) -> QueueKey | None:
        return self._tenants.first_rank()

    def __len__(self) -> int:
        return sum(len(account.line) for account in self._tenants)

    def push(self, request: Request) -> None:
        account = self._policy.accounts[request.group]
        account.taken.discard(request)
        account.line.push(request)
        account.lane = self
        self._tenants.note(account)

    def pop(self) -> Request:
        account = self._tenants.first()
        assert account is not None
        self._policy.virtual_time = max(self._policy.virtual_time, account.num_served_tokens)
        request = account.line.pop()
        account.taken.add(request)
        self._forget_if_empty(account)
        return request

    def discard(self, request: Request) -> None:
        account = self._policy.accounts[request.group]
        account.line.discard(request)
        self._forget_if_empty(account)
        self._policy.close(request)

    def note(self, account: Account) -> None:
        """A tenant's account is lower than before."""
        self._tenants.note(account)

    def __iter__(self) -> Iterator[Request]:
        for account in self._tenants:
            yield from account.line

    def _forget_if_empty(self, account: Account) -> None:
        if account.line.rank is None:
            self._tenants.forget(account)
