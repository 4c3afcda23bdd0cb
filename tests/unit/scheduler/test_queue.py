"""The order in which waiting requests are taken, whoever comes back or goes in between."""

from __future__ import annotations

from manyroots.config import Policy
from manyroots.ids import StepId
from manyroots.scheduler.queue import WaitingQueue
from manyroots.scheduler.request import Request
from tests.deciding import submit

PAGE = 4


def requests(*priorities: int) -> list[Request]:
    return [
        Request(submit(i, [1, 2, 3], priority=priority), i, StepId(1), None, PAGE)
        for i, priority in enumerate(priorities, 1)
    ]


def queue_of(waiting: list[Request], policy: Policy = Policy.FCFS) -> WaitingQueue:
    queue = WaitingQueue(policy)
    for request in waiting:
        queue.push(request)
    return queue


def take(queue: WaitingQueue) -> Request | None:
    group = queue.next_group(set(), lambda key: True)
    if group is None:
        return None
    head = group.head
    assert queue.pop(group) is head
    return head


def order(queue: WaitingQueue) -> list[int]:
    """The serials of all, taken one after the other."""
    serials = []
    while (request := take(queue)) is not None:
        serials.append(request.serial)
    assert len(queue) == 0
    return serials


def test_who_comes_back_stands_where_he_stood() -> None:
    """Those who were given up or retracted are before all that arrived after them."""
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
    """At the head, in the middle, and among those who came back."""
    waiting = requests(0, 0, 0, 0, 0, 0)
    queue = queue_of(waiting)
    for _ in range(3):
        take(queue)
    for request in waiting[:3]:
        queue.push(request)
    for request in (waiting[1], waiting[0], waiting[4]):
        queue.remove(request)
    [group] = queue.groups()
    assert [request.serial for request in group] == [3, 4, 6]
    assert len(queue) == 3
    assert order(queue) == [3, 4, 6]


def test_a_group_that_all_have_left_is_no_group() -> None:
    waiting = requests(0, 0)
    queue = queue_of(waiting)
    for request in waiting:
        queue.remove(request)
    assert queue.groups() == []
    assert take(queue) is None
