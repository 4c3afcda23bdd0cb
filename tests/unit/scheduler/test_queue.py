"""The order in which waiting requests are taken, whichever requests return or leave in between."""

from __future__ import annotations

import pytest

from manyroots.config import Policy
from manyroots.ids import StepId
from manyroots.scheduler.lanes import PlainLane
from manyroots.scheduler.policies.choice import make_policy
from manyroots.scheduler.policies.fair import FairLane, FairPolicy
from manyroots.scheduler.queue import WaitingQueue
from manyroots.scheduler.ranking import MAX_STALE
from manyroots.scheduler.request import Request
from tests.helpers.scheduler_harness import submit

PAGE = 4


def requests(*priorities: int) -> list[Request]:
    return [
        Request(submit(i, [1, 2, 3], priority=priority), i, StepId(1), None, PAGE)
        for i, priority in enumerate(priorities, 1)
    ]


def queue_of(waiting: list[Request], policy: Policy = Policy.FCFS) -> WaitingQueue:
    queue = WaitingQueue(make_policy(policy.value))
    for request in waiting:
        queue.push(request)
    return queue


def take(queue: WaitingQueue) -> Request | None:
    for lane in queue.first_lanes(1):
        head = lane.head
        assert queue.pop(lane) is head
        return head
    return None


def order(queue: WaitingQueue) -> list[int]:
    """The serials of all, taken one after the other."""
    serials = []
    while (request := take(queue)) is not None:
        serials.append(request.serial)
    assert len(queue) == 0
    return serials


def test_who_comes_back_stands_where_he_stood() -> None:
    """Requests that were given up or retracted come before all that arrived after them."""
    waiting = requests(0, 0, 0, 0, 0)
    queue = queue_of(waiting)
    taken = [take(queue) for _ in range(3)]
    assert taken == waiting[:3]
    for request in (waiting[2], waiting[0]):
        queue.push(request)
    assert len(queue) == 4
    assert order(queue) == [1, 3, 4, 5]


def test_priority_comes_before_arrival() -> None:
    waiting = requests(2, 1, 3, 1, 2)
    assert order(queue_of(waiting, Policy.PRIORITY)) == [2, 4, 1, 5, 3]


def test_who_is_gone_is_never_next() -> None:
    """At the head, in the middle, and among those that came back."""
    waiting = requests(0, 0, 0, 0, 0, 0)
    queue = queue_of(waiting)
    for _ in range(3):
        take(queue)
    for request in waiting[:3]:
        queue.push(request)
    for request in (waiting[1], waiting[0], waiting[4]):
        queue.remove(request)
    [lane] = queue.lanes.values()
    assert sorted(request.serial for request in lane) == [3, 4, 6]
    assert len(queue) == 3
    assert order(queue) == [3, 4, 6]


def test_a_lane_that_all_have_left_is_no_lane() -> None:
    waiting = requests(0, 0)
    queue = queue_of(waiting)
    for request in waiting:
        queue.remove(request)
    assert not queue.lanes
    assert take(queue) is None


def tenants_queue(policy: Policy, num_tenants: int) -> tuple[WaitingQueue, list[Request]]:
    waiting = [
        Request(
            submit(i, [1, 2, 3], salt=f"{i}"),
            i,
            StepId(1),
            None,
            PAGE,
        )
        for i in range(1, num_tenants + 1)
    ]
    return queue_of(waiting, policy), waiting


@pytest.mark.parametrize("policy", list(Policy))
def test_l08_nothing_is_kept_of_tenants_that_have_ended(policy: Policy) -> None:
    """L08: salts are callers' to choose. Some leave while they wait, some after they ran."""
    queue, waiting = tenants_queue(policy, 500)
    for request in waiting[1::2]:
        queue.remove(request)
    kept = [take(queue) for _ in range(250)]
    assert len(queue) == 0
    assert not queue.lanes
    if isinstance(queue.policy, FairPolicy):
        assert len(queue.policy.accounts) == 250
    for request in kept:
        assert request is not None
        queue.charge(request, 7)
        queue.policy.close(request)
    if isinstance(queue.policy, FairPolicy):
        assert len(queue.policy.accounts) == 0
    assert len(queue._order) <= MAX_STALE


@pytest.mark.parametrize("policy", list(Policy))
def test_l08_what_is_kept_shrinks_with_the_tenants_that_wait(policy: Policy) -> None:
    """L08: one tenant that goes on waiting keeps nothing of those that have left."""
    queue, waiting = tenants_queue(policy, 5000)
    for request in waiting[1:]:
        queue.remove(request)
    [lane] = queue.lanes.values()
    assert lane.head is waiting[0]
    if isinstance(lane, FairLane):
        assert isinstance(queue.policy, FairPolicy)
        assert len(queue.policy.accounts) == 1
        assert len(lane._tenants) <= 2 + MAX_STALE
    if isinstance(lane, PlainLane):
        assert len(lane._line) <= 2 + MAX_STALE
    assert sum(1 for _ in lane) == 1
