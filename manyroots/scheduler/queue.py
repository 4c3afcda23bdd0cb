"""Who is next: waiting requests in groups, one per adapter and tenant.

A group that can't begin now (its adapter is loading, or the cap is reached) is passed over as a
whole, so that a waiting request costs nothing while it waits. Within a group the order is that of
arrival, behind priority where the policy is that; between groups the policy decides. Deterministic.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator

from manyroots.config import Policy
from manyroots.ids import AdapterDigest
from manyroots.scheduler.request import Request

Place = tuple[int, int, Request]
"""Priority, order of arrival, and whose."""
GroupKey = tuple[AdapterDigest | None, str | None]
"""Adapter and tenant."""


class Group:
    """Waiting requests of one adapter and tenant."""

    __slots__ = ("_gone", "_late", "_line", "key", "served")

    def __init__(self, key: GroupKey, served: int) -> None:
        self.key = key
        self.served = served
        """Tokens computed for this group, as far as fairness counts them."""
        self._line: deque[Place] = deque()
        """Who came behind all that stood in line: nearly everybody."""
        self._late: list[Place] = []
        """A heap of the others, who came back or have priority."""
        self._gone: set[Request] = set()
        """Of those, who waits no more; never the head."""

    def push(self, request: Request, priority: int) -> None:
        place = (priority, request.serial, request)
        if not self._line or place > self._line[-1]:
            self._line.append(place)
        else:
            heapq.heappush(self._late, place)

    def discard(self, request: Request) -> None:
        """A request that is over will not be pushed again."""
        self._gone.add(request)
        self._skip_gone()

    @property
    def is_empty(self) -> bool:
        return not self._line and not self._late

    @property
    def head(self) -> Request:
        """The next request; the group has at least one."""
        if self._late and (not self._line or self._late[0] < self._line[0]):
            return self._late[0][2]
        return self._line[0][2]

    def pop(self) -> Request:
        request = self._take()
        if self._gone:
            self._skip_gone()
        return request

    def _take(self) -> Request:
        if self._late and (not self._line or self._late[0] < self._line[0]):
            return heapq.heappop(self._late)[2]
        return self._line.popleft()[2]

    def _skip_gone(self) -> None:
        while not self.is_empty and self.head in self._gone:
            self._gone.discard(self._take())

    def __iter__(self) -> Iterator[Request]:
        places = (*self._line, *self._late)
        waiting = [request for _, _, request in places if request not in self._gone]
        return iter(sorted(waiting, key=lambda request: request.serial))


class WaitingQueue:
    """Every waiting request."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._groups: dict[GroupKey, Group] = {}
        self._served: dict[GroupKey, int] = {}
        """With FAIR: what groups that have nobody waiting had been served."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, request: Request) -> None:
        group = self._groups.get(request.group)
        if group is None:
            # A group that was away starts level with the least served one: no credit for absence.
            least = min((g.served for g in self._groups.values()), default=0)
            served = max(self._served.pop(request.group, 0), least)
            group = self._groups[request.group] = Group(request.group, served)
        is_ranked = self._policy is Policy.PRIORITY
        group.push(request, request.submit.priority if is_ranked else 0)
        self._count += 1

    def remove(self, request: Request) -> None:
        group = self._groups[request.group]
        group.discard(request)
        self._count -= 1
        if group.is_empty:
            self._close(group)

    def next_group(
        self, closed: set[GroupKey], is_running: Callable[[GroupKey], bool]
    ) -> Group | None:
        """The group whose head is next, of those that are not closed."""
        if len(self._groups) == 1:
            [group] = self._groups.values()
            return None if closed and group.key in closed else group
        best: Group | None = None
        best_rank: tuple[int, ...] = ()
        for group in self._groups.values():
            rank = self._rank(group, is_running)
            if (best is None or rank < best_rank) and group.key not in closed:
                best, best_rank = group, rank
        return best

    def pop(self, group: Group) -> Request:
        request = group.pop()
        self._count -= 1
        if group.is_empty:
            self._close(group)
        return request

    def serve(self, key: GroupKey, num_tokens: int) -> None:
        """Count tokens computed for a group."""
        if self._policy is Policy.FAIR:
            group = self._groups.get(key)
            if group is not None:
                group.served += num_tokens
            else:
                self._served[key] = self._served.get(key, 0) + num_tokens

    def groups(self) -> list[Group]:
        return list(self._groups.values())

    def oldest(self) -> Request | None:
        """The request that has waited longest."""
        heads = (group.head for group in self._groups.values())
        return min(heads, key=lambda request: request.serial, default=None)

    def _rank(self, group: Group, is_running: Callable[[GroupKey], bool]) -> tuple[int, ...]:
        head = group.head
        if self._policy is Policy.PRIORITY:
            return (head.submit.priority, head.serial)
        if self._policy is Policy.PACK:
            return (int(not is_running(group.key)), head.serial)
        if self._policy is Policy.FAIR:
            return (group.served, head.serial)
        return (head.serial,)

    def _close(self, group: Group) -> None:
        """Nobody of the group waits any more."""
        del self._groups[group.key]
        if self._policy is Policy.FAIR:
            self._served[group.key] = group.served
