"""More requests at once than host memory holds pages of: each finds what storage has of it (T04).

What came for one that waits is kept until it begins or is over, and the others are asked for in
order as room comes. Every step is audited, and in the end nothing is held.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import pytest

from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.keys import PageHasher, PrefixKey
from manyroots.cache.planes import Capacity
from manyroots.cache.policies import CachePolicies, Prefetch
from manyroots.ids import AdapterDigest, AdapterName, Namespace, RequestId, Tier
from manyroots.lora.spec import AdapterSpec
from manyroots.messages import Abort, FinishReason, Submit
from manyroots.scheduler import fetches
from manyroots.scheduler.request import State
from manyroots.step import AdapterLoaded, Copy, LoadAdapter
from tests.helpers.cache_harness import recurrent, window
from tests.helpers.scheduler_harness import SchedulerHarness, expected_tokens, submit

PAGE = 4
NUM_PAGES = 10
"""Of each prompt."""
KINDS = {"full": FULL_ATTENTION, "window": window(9, PAGE), "state": recurrent(1)}


def prompt(number: int, num_pages: int = NUM_PAGES) -> list[int]:
    """Whole pages and a token that is always computed; no two begin alike."""
    rng = random.Random(number)
    return [rng.randrange(50) for _ in range(num_pages * PAGE + 1)]


@dataclass
class Burst:
    """An engine whose storage has prompts that neither its device nor its host has."""

    prompts: list[list[int]]
    num_host: int = 16
    num_device: int = 200
    kinds: tuple[str, ...] = ("full",)
    policy: str = "fcfs"
    prefetch: Prefetch = Prefetch.WAIT
    max_num_seqs: int = 16
    max_loras: int = 0
    salts: tuple[str | None, ...] = (None,)
    """Whose prompts storage has."""
    is_slow: bool = False
    """Whether storage gives no answer."""
    num_asked: Counter[bytes] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._seen: set[int] = set()
        is_slow, self.is_slow = self.is_slow, False
        warm = self._start(200, Prefetch.WAIT)
        for number, (tokens, salt) in enumerate(product(self.prompts, self.salts)):
            warm.loop.handle(submit(number, tokens, max_tokens=1, salt=salt))
            warm.run()
        self.is_slow = is_slow
        self.num_asked.clear()
        self._seen.clear()
        self.engine = self._start(self.num_host, self.prefetch)
        self.engine.runner._storage.update(warm.runner._storage)

    def _start(self, num_host: int, prefetch: Prefetch) -> SchedulerHarness:
        return SchedulerHarness(
            capacities=tuple(Capacity(KINDS[k], self.num_device, num_host) for k in self.kinds),
            page_size=PAGE, max_num_seqs=self.max_num_seqs, budget=256, depth=1, policy=self.policy,
            policies=CachePolicies(uses_storage=True, prefetch=prefetch),
            max_model_len=40 * PAGE, finish_copies=self._finish, max_loras=self.max_loras,
            max_cpu_loras=8 if self.max_loras else 0,
        )  # fmt: skip

    def _finish(self, copies: list[Copy]) -> list[tuple[Copy, bool]]:
        for copy in copies:
            if copy.source is Tier.STORAGE and copy.copy_id not in self._seen:
                self._seen.add(copy.copy_id)
                self.num_asked.update(copy.hashes)
        return [(c, True) for c in copies if not (self.is_slow and c.source is Tier.STORAGE)]

    def send(
        self, number: int, tokens: list[int], *, max_tokens: int = 4, priority: int = 0,
        salt: str | None = None, adapter: str | None = None,
    ) -> Submit:  # fmt: skip
        request = submit(
            number, tokens, max_tokens=max_tokens, priority=priority, salt=salt,
            adapter=adapter,
        )  # fmt: skip
        self.engine.loop.handle(request)
        return request

    def send_all(self, *, max_tokens: int = 4) -> list[Submit]:
        return [self.send(n, t, max_tokens=max_tokens) for n, t in enumerate(self.prompts)]

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    def state(self, number: int) -> State:
        return self.engine.scheduler._requests[RequestId(number)].state

    def found(self, number: int) -> int:
        return self.engine.last(number).num_cached_tokens

    def finish(self, requests: list[Submit]) -> list[int]:
        """All end with their own tokens and nothing is held; gives what each reused."""
        self.engine.run()
        for request in requests:
            number = int(request.request_id)
            if self.engine.last(number).finish_reason is not FinishReason.ABORT:
                assert self.engine.tokens(number) == expected_tokens(request)
        assert self.engine.cache.num_keeps == 0
        assert not self.engine.scheduler.fetches.has_any
        assert all(plane.num_held == 0 for plane in self.engine.cache.stats().planes)
        return [self.found(int(request.request_id)) for request in requests]


WHOLE = NUM_PAGES * PAGE


@pytest.mark.parametrize("kinds", [("full",), ("window",), ("full", "window"), ("full", "state")])
@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "pack"])
def test_t04_a_burst_larger_than_the_host_reuses_all_that_storage_has(
    kinds: tuple[str, ...], policy: str
) -> None:
    """T04: 16 prompts of 10 pages at once through 16 host pages. What came for one is not pushed
    out by what comes for the next; nothing is asked for twice."""
    burst = Burst([prompt(n) for n in range(16)], kinds=kinds, policy=policy)
    assert burst.finish(burst.send_all()) == [WHOLE] * 16
    assert set(burst.num_asked.values()) == {len(kinds)}


def test_t04_what_came_for_one_that_waits_is_not_pushed_out_by_what_comes_for_others() -> None:
    """T04: with one row, all but the first wait for long; each finds its pages in its turn, and
    at most three quarters of the host are kept, so that there is room for write-back."""
    burst = Burst([prompt(n, 3) for n in range(12)], max_num_seqs=1)
    requests = burst.send_all(max_tokens=20)
    most = 0
    while burst.engine.loop.has_work:
        burst.engine.step()
        most = max(most, burst.engine.cache.host_room[0][0])
    assert most == 12
    assert burst.finish(requests) == [3 * PAGE] * 12


@pytest.mark.parametrize("prefetch", [Prefetch.BEST_EFFORT, Prefetch.TIMEOUT])
def test_t04_who_does_not_wait_for_storage_does_not_wait_for_room_either(
    prefetch: Prefetch,
) -> None:
    """T04: those that are not next are asked for as room comes, if that is in time."""
    burst = Burst([prompt(n) for n in range(8)], prefetch=prefetch, is_slow=True)
    requests = burst.send_all()
    burst.steps(120)
    assert not burst.engine.scheduler._requests
    burst.is_slow = False
    assert burst.finish(requests) == [0] * 8
    waiting = Burst([prompt(n) for n in range(8)], prefetch=prefetch, max_num_seqs=1)
    found = waiting.finish(waiting.send_all(max_tokens=12))
    assert found.count(WHOLE) >= 3


def test_t04_t09_requests_that_want_the_same_pages_share_what_is_kept() -> None:
    """T04, T09: 8 of one prompt take the room of one, and it is asked for once; the first is
    aborted when its pages are there, and they are still the others'."""
    burst = Burst([prompt(0)], max_num_seqs=1)
    first = burst.send(50, prompt(99), max_tokens=30)  # has the only row
    requests = [first] + [burst.send(n, prompt(0)) for n in range(8)]
    burst.steps(6)
    assert burst.engine.cache.host_room[0][0] == NUM_PAGES
    burst.engine.loop.handle(Abort([RequestId(0)]))
    burst.steps(1)
    assert burst.engine.cache.host_room[0][0] == NUM_PAGES
    assert burst.finish(requests)[2:] == [WHOLE] * 7
    assert max(burst.num_asked.values()) == 1


def test_t04_t09_a_burst_with_a_shared_head_reuses_heads_and_tails() -> None:
    """T04, T09: a request that learns that the head has come waits in line for its own tail."""
    head = prompt(500, 5)[:-1]
    prompts = [[*head, *prompt(n, 5)] for n in range(16)]
    burst = Burst(prompts)
    assert burst.finish(burst.send_all()) == [WHOLE] * 16
    assert max(burst.num_asked.values()) == 1


def test_t04_a_prompt_larger_than_the_host_takes_what_fits_and_holds_up_nobody() -> None:
    """T04: it waits for what is under way alone."""
    prompts = [prompt(0), prompt(1, 30), prompt(2), prompt(3, 30), prompt(4)]
    burst = Burst(prompts)
    found = burst.finish(burst.send_all())
    assert [found[0], found[2], found[4]] == [WHOLE] * 3
    assert found[1] == 16 * PAGE
    assert found[3] >= 6 * PAGE  # beside what is being written back
    stalled = Burst([prompt(0), prompt(1, 30), prompt(2)], max_num_seqs=1)
    first = stalled.send(50, prompt(99, 1), max_tokens=60)
    requests = [first, *stalled.send_all()]
    stalled.steps(12)
    # What is kept for the first in the queue is not for it, and it waits in the queue, not in line.
    assert stalled.state(0) is stalled.state(1) is State.WAITING
    found = stalled.finish(requests)[1:]
    assert found[0] == found[2] == WHOLE
    assert 0 < found[1] <= 6 * PAGE


@pytest.mark.parametrize("steps", range(0, 14, 2))
def test_t04_t08_a_burst_that_is_aborted_leaves_nothing_kept(steps: int) -> None:
    """T04, T08: whether storage was asked, has answered, or the pages are on their way."""
    burst = Burst([prompt(n) for n in range(6)], max_num_seqs=2)
    burst.send_all(max_tokens=8)
    burst.steps(steps)
    burst.engine.loop.handle(Abort([RequestId(n) for n in range(6)]))
    burst.engine.run()
    burst.finish([])


def test_t03_t04_a_burst_whose_storage_dies_is_computed() -> None:
    """T03, T04: requests in line learn of it, too, and wait no longer."""
    burst = Burst([prompt(n) for n in range(12)])
    end = burst.engine.runner._finish_copies
    assert end is not None
    burst.engine.runner._finish_copies = lambda copies: [
        (copy, is_good and copy.source is not Tier.STORAGE) for copy, is_good in end(copies)
    ]
    assert burst.finish(burst.send_all()) == [0] * 12


def test_t04_a_failed_step_takes_nothing_from_those_that_wait() -> None:
    """T04: the requests of the step fail; what is kept for others is found in their turn."""
    burst = Burst([prompt(n) for n in range(6)], max_num_seqs=1)
    first = burst.send(50, prompt(99), max_tokens=60)
    burst.steps(3)
    requests = burst.send_all()
    burst.steps(6)
    burst.engine.runner.fail_next = "planted"
    burst.engine.run()
    assert burst.engine.last(int(first.request_id)).finish_reason is FinishReason.ERROR
    assert burst.finish(requests) == [WHOLE] * 6


def test_t04_l08_what_is_kept_for_the_unimportant_is_no_matter_to_the_important() -> None:
    """T04, L08: an important arrival takes their room, and is asked for before them."""
    burst = Burst([prompt(n) for n in range(5)], policy="priority", max_num_seqs=1)
    first = burst.send(50, prompt(99), max_tokens=60, priority=0)
    low = [burst.send(n, prompt(n), priority=5) for n in range(4)]
    burst.steps(8)
    assert [r.serial for r in burst.engine.scheduler.fetches.kept] == [2]
    high = burst.send(4, prompt(4), priority=-5)
    found = burst.finish([first, high, *low])
    assert found[1] == WHOLE
    assert found[3:] == [WHOLE] * 3  # and what was kept for the first of the others was given up


def test_t04_l08_one_tenants_burst_does_not_stand_before_anothers_request() -> None:
    """T04, L08: with the fair policy storage is asked first for the tenant that was served
    least."""
    burst = Burst(
        [prompt(n) for n in range(12)], policy="fair", max_num_seqs=1, salts=("many", "few")
    )
    requests = [burst.send(n, prompt(n), salt="many") for n in range(10)]
    burst.steps(4)
    requests += [burst.send(n, prompt(n), salt="few") for n in (10, 11)]
    order = _order_of_ends(burst, range(12))
    assert max(order.index(10), order.index(11)) < 6
    assert burst.finish(requests) == [WHOLE] * 12


def test_t04_l03_what_is_kept_for_an_adapter_without_its_weights_goes_to_one_that_can_begin() -> (
    None
):
    """T04, L03: its turn does not come, and that is no reason to hold back others."""
    burst, digest = Burst([prompt(0), prompt(1)], max_loras=1), AdapterDigest(b"a" * 32)
    burst.engine.scheduler.load_adapter(AdapterName("a"), AdapterSpec(digest, 8, 100), path="a")
    finish_loads, burst.engine.runner._finish_loads = burst.engine.runner._finish_loads, _none
    key, tokens = PrefixKey(Namespace(adapter=digest, salt=None)), np.array(prompt(2), np.int32)
    hasher = PageHasher(b"", PAGE * 4)
    for page in hasher.chain(hasher.root, key.at(0), tokens[:WHOLE].tobytes()):
        burst.engine.runner._storage[0, page] = (0,) * PAGE
    stuck = burst.send(10, prompt(2), adapter="a")
    burst.steps(6)
    assert burst.state(10) is State.WAITING
    assert burst.engine.cache.host_room[0][0] == NUM_PAGES
    requests = [burst.send(n, prompt(n)) for n in range(2)]
    burst.steps(40)
    assert [burst.found(n) for n in range(2)] == [WHOLE] * 2
    burst.engine.loop.handle(Abort([stuck.request_id]))
    burst.engine.runner._finish_loads = finish_loads
    burst.finish(requests)


def _none(loads: list[LoadAdapter]) -> list[AdapterLoaded]:
    return []


def test_t04_nobody_stands_in_line_for_ever_behind_those_that_do_not_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """T04: one that keeps the host's room lacks pages of the device, and there are rows: after a
    while those in line are in the queue."""
    monkeypatch.setattr(fetches, "MOST_STALLED_STEPS", 8)
    burst = Burst([prompt(0, 12), prompt(1, 2)], num_device=24)
    first = burst.send(50, prompt(99, 13), max_tokens=40)
    burst.steps(3)
    large = burst.send(0, prompt(0, 12), max_tokens=20)
    burst.steps(6)
    assert burst.state(0) is State.WAITING
    small = burst.send(1, prompt(1, 2))
    burst.steps(7)
    assert burst.state(1) is State.FETCHING
    burst.steps(4)
    assert burst.state(1) is State.WAITING
    assert burst.finish([first, large, small])[1] == 12 * PAGE


def _order_of_ends(burst: Burst, numbers: range) -> list[int]:
    ended: list[int] = []
    while burst.engine.loop.has_work:
        burst.engine.step()
        ended += [
            n for n in numbers
            if n not in ended and n in burst.engine.outputs
            and burst.engine.last(n).finish_reason is not None
        ]  # fmt: skip
    return ended
