"""Reuse as the scheduler decides it: namespaces, tiers and claims, through whole steps."""

from __future__ import annotations

from collections import Counter

import pytest

from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.families.recurrent import RecurrentState
from manyroots.cache.families.window import SlidingWindow
from manyroots.cache.planes import Capacity
from manyroots.cache.policies import CachePolicies, Prefetch, WriteBack
from manyroots.ids import Namespace, RequestId, Tier
from manyroots.messages import Abort, FinishReason, Submit
from manyroots.step import Copy, Plan
from tests.helpers.scheduler_harness import BASE, SchedulerHarness, expected_tokens, submit

SALTED = Namespace(adapter=None, salt="tenant")
OTHER = Namespace(adapter=None, salt="other")
PROMPT = list(range(1, 18))


Placed = tuple[int, int, int, list[list[int]]]


def hybrid(num_device: int, num_host: int = 0) -> tuple[Capacity, ...]:
    return (
        Capacity(FULL_ATTENTION, num_device, num_host),
        Capacity(SlidingWindow("window", 6, 4), num_device, num_host),
        Capacity(RecurrentState("recurrent", interval=2), num_device, num_host),
    )


def cached(engine: SchedulerHarness, number: int, prompt: list[int], namespace: Namespace) -> int:
    engine.loop.handle(submit(number, prompt, salt=namespace.salt, max_tokens=1))
    engine.run()
    return engine.last(number).num_cached_tokens


def push_out(engine: SchedulerHarness) -> None:
    """Evict from the device all units without a holder."""
    for plane in engine.cache.layout.device:
        pool = engine.cache.index.pools[plane.index]
        engine.cache.evictors[plane.index].evict(pool.num_cached)


@pytest.mark.parametrize("is_hybrid", [False, True])
def test_n05_a_cold_namespaces_first_plan_starts_at_token_0(is_hybrid: bool) -> None:
    """N05: with base warm; all steps together compute exactly the prompt."""
    engine = SchedulerHarness(capacities=hybrid(64) if is_hybrid else None, budget=64, depth=0)
    assert cached(engine, 0, PROMPT, BASE) == 0
    engine.loop.handle(submit(1, PROMPT, salt=SALTED.salt, max_tokens=1))
    plans: list[Plan] = []
    while engine.scheduler.has_work:
        plan = engine.scheduler.schedule()
        assert plan is not None
        plans.append(plan)
        engine.scheduler.advance(engine.runner.execute(plan))
    assert plans[0].arrivals[0].num_computed_tokens == 0
    assert sum(plan.total_tokens for plan in plans) == len(PROMPT)


@pytest.mark.parametrize("depth", [0, 1])
def test_n06_later_chunks_and_decode_pages_are_the_namespaces_own(depth: int) -> None:
    """N06: a prompt in three chunks and decode pages; base hits none, the tenant all."""
    engine = SchedulerHarness(chunk=6, depth=depth)
    request = submit(0, PROMPT, salt=SALTED.salt, max_tokens=9)
    engine.loop.handle(request)
    engine.run()
    conversation = [*PROMPT, *engine.tokens(0), 5]
    for number, namespace, found in [(1, BASE, 0), (2, OTHER, 0), (3, SALTED, 24)]:
        assert cached(engine, number, conversation, namespace) == found


def test_n07_a_retracted_request_resumes_from_its_own_prefix() -> None:
    """N07: requests of several namespaces with the same tokens are retracted under pressure; each
    finds its own pages again and gives its own tokens."""
    engine = SchedulerHarness(num_pages=15, page_size=4, depth=0)
    requests = [
        submit(i, [1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=14, salt=namespace.salt)
        for i, namespace in enumerate([BASE, SALTED, OTHER])
    ]
    for request in requests:
        engine.loop.handle(request)
    resumed: list[tuple[int, int]] = []
    seen: set[int] = set()
    while engine.scheduler.has_work:
        plan = engine.scheduler.schedule()
        assert plan is not None
        for arrival in plan.arrivals:
            if arrival.request_id in seen:
                resumed.append((int(arrival.request_id), arrival.num_computed_tokens))
            seen.add(int(arrival.request_id))
        for output in engine.scheduler.advance(engine.runner.execute(plan)):
            engine.outputs.setdefault(int(output.request_id), []).append(output)
    assert engine.scheduler.stats().total_retractions > 0
    assert any(num_computed >= 8 for _, num_computed in resumed)
    for request in requests:
        assert engine.tokens(request.request_id) == expected_tokens(request)


@pytest.mark.parametrize("is_hybrid", [False, True])
def test_h03_a_prefix_on_the_host_is_loaded_by_a_plan_and_not_computed(is_hybrid: bool) -> None:
    """H03, N09: an adapter's prompt, evicted from the device; the plan carries the copies, the
    request begins when they are there and computes only the rest."""
    capacities = hybrid(32, 32) if is_hybrid else (Capacity(FULL_ATTENTION, 32, 32),)
    engine = SchedulerHarness(capacities=capacities, depth=0, max_model_len=64)
    request = submit(0, PROMPT, salt=SALTED.salt)
    assert cached(engine, 0, PROMPT, SALTED) == 0
    cached(engine, 1, [40, 41], BASE)  # a step more, so that the copies have ended
    push_out(engine)
    engine.loop.handle(submit(2, PROMPT, salt=SALTED.salt))
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert plan.total_tokens == 0
    assert {(c.source, c.target) for c in plan.copies} == {(Tier.HOST, Tier.DEVICE)}
    engine.scheduler.advance(engine.runner.execute(plan))
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert plan.num_tokens.tolist() == [1]
    for output in engine.scheduler.advance(engine.runner.execute(plan)):
        engine.outputs.setdefault(2, []).append(output)
    engine.run()
    assert engine.last(2).num_cached_tokens == 16
    assert engine.tokens(2) == expected_tokens(request)


def test_c01_with_the_host_full_every_claimed_hit_of_a_step_is_loaded() -> None:
    """C01: three requests whose prefixes are on a full host begin together; making room for one
    does not cost another its hit."""
    prompts = [[10 * i + j for j in range(9)] for i in range(3)]
    engine = SchedulerHarness(
        capacities=(Capacity(FULL_ATTENTION, 12, 6),), depth=0, max_model_len=32, budget=64
    )
    for number, prompt in enumerate(prompts):
        assert cached(engine, number, prompt, BASE) == 0
    cached(engine, 10, [49, 49], BASE)
    push_out(engine)
    for number, prompt in enumerate(prompts):
        engine.loop.handle(submit(20 + number, prompt))
    engine.run()
    for number, prompt in enumerate(prompts):
        assert engine.last(20 + number).num_cached_tokens == 8
        assert engine.tokens(20 + number) == expected_tokens(submit(0, prompt))


def test_c03_claims_of_requests_that_do_not_fit_are_given_back() -> None:
    """C03: the second finds pages but has no room; it waits holding nothing."""
    engine = SchedulerHarness(num_pages=8, page_size=4, depth=0)
    assert cached(engine, 0, [1] * 9, BASE) == 0
    engine.loop.handle(submit(1, [2] * 15, max_tokens=8))
    engine.step()
    engine.loop.handle(submit(2, [*[1] * 8, *[3] * 15], max_tokens=2))
    held = engine.scheduler.stats().num_held_pages
    engine.step()
    assert engine.scheduler.stats().num_waiting == 1
    assert engine.scheduler.stats().num_held_pages <= held + 1  # the running one's own growth
    engine.run()
    assert engine.last(2).finish_reason is FinishReason.LENGTH
    assert engine.scheduler.stats().num_held_pages == 0


@pytest.mark.parametrize("is_hybrid", [False, True])
def test_c07_without_pressure_batched_and_single_admission_give_the_same_plan(
    is_hybrid: bool,
) -> None:
    """C07: many requests submitted at once, or each planned before the next arrives: the same
    pages, tokens and tables."""
    prompts = [[*PROMPT[: 4 * i], 30 + i, 31 + i] for i in range(4)]

    def engine() -> SchedulerHarness:
        capacities = hybrid(64) if is_hybrid else None
        found = SchedulerHarness(num_pages=64, capacities=capacities, budget=512, depth=0)
        cached(found, 90, PROMPT, BASE)
        return found

    def describe(plan: Plan) -> list[Placed]:
        tokens = dict(zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True))
        return [
            (
                int(a.request_id),
                a.num_computed_tokens,
                tokens[a.row],
                # A hybrid's requests go on in between, and take units.
                [t.tolist()[: a.num_computed_tokens // 4 if is_hybrid else 99] for t in
                 a.page_tables[: 2 if is_hybrid else 1]],
            )
            for a in plan.arrivals
        ]  # fmt: skip

    batched, single = engine(), engine()
    one_by_one: list[Placed] = []
    for number, prompt in enumerate(prompts):
        for each in (batched, single):
            each.loop.handle(submit(number, prompt, max_tokens=1))
        plan = single.scheduler.schedule()
        assert plan is not None
        one_by_one += describe(plan)
    plan = batched.scheduler.schedule()
    assert plan is not None
    assert describe(plan) == one_by_one
    assert len(one_by_one) == 4


def test_c04_each_output_reports_its_own_reuse() -> None:
    """C04: three requests in one step with different hits."""
    engine = SchedulerHarness(budget=64)
    cached(engine, 0, PROMPT, BASE)
    for number, prompt in [(1, PROMPT), (2, [*PROMPT[:8], 0]), (3, [9, 9, 9])]:
        engine.loop.handle(submit(number, prompt))
    engine.run()
    assert [engine.last(n).num_cached_tokens for n in (1, 2, 3)] == [16, 8, 0]


def test_t03_what_does_not_arrive_from_the_host_is_computed() -> None:
    """T03, T08: the request waits for its load, which fails; it begins anew and gives its own
    tokens, and nothing is held in the end."""
    is_bad: list[bool] = [False]

    def finish(copies: list[Copy]) -> list[tuple[Copy, bool]]:
        return [(copy, not is_bad[0] or copy.target is not Tier.DEVICE) for copy in copies]

    engine = SchedulerHarness(
        capacities=(Capacity(FULL_ATTENTION, 12, 12),), finish_copies=finish, max_model_len=40
    )
    cached(engine, 0, PROMPT, BASE)
    cached(engine, 1, [40, 41], BASE)
    push_out(engine)
    is_bad[0] = True
    request = submit(2, PROMPT)
    engine.loop.handle(request)
    engine.run()
    assert engine.tokens(2) == expected_tokens(request)
    assert engine.last(2).num_cached_tokens == 0
    cached(engine, 3, [40, 41], BASE)  # a step more, so that copies to the host have ended
    for plane in engine.cache.stats().planes:
        assert plane.num_held == 0


@pytest.mark.parametrize("write_back", [WriteBack.THROUGH, WriteBack.REUSED])
@pytest.mark.parametrize("delay", [0, 3])
def test_t11_an_idle_engine_finishes_copies_and_gives_both_ends_back(
    write_back: WriteBack, delay: int
) -> None:
    """T11: no request arrives any more. What the last requests left to be copied is still sent,
    acknowledged and released, from the device to the host and on to storage. Then there is no
    work."""
    asked: dict[int, int] = {}

    def late(copies: list[Copy]) -> list[tuple[Copy, bool]]:
        for copy in copies:
            asked[copy.copy_id] = asked.get(copy.copy_id, -1) + 1
        return [(copy, True) for copy in copies if asked[copy.copy_id] >= delay]

    engine = SchedulerHarness(
        capacities=hybrid(16, 16), max_model_len=64, finish_copies=late,
        policies=CachePolicies(uses_storage=True, write_back=write_back),
    )  # fmt: skip
    for number in range(2):
        engine.loop.handle(submit(number, PROMPT, max_tokens=1))
        while number not in engine.outputs:
            engine.step()
    assert engine.cache.has_transfers, "nothing is on its way: the test shows nothing"
    assert engine.loop.has_work
    engine.run()
    assert not engine.cache.has_transfers
    planes = engine.cache.stats().planes
    assert all(plane.num_held == 0 for plane in planes)
    assert all(plane.num_cached > 0 for plane in planes if plane.tier is Tier.HOST)
    assert engine.runner._storage, "what came to the host did not go on to storage"


class Counted:
    """An engine that counts how often each unit is copied, and whose copies end, once they may, in
    the order in which they began or in the other."""

    def __init__(self, *, uses_storage: bool = False, backwards: bool = False) -> None:
        self.is_slow = self.backwards = False
        self.copies: Counter[tuple[int, Tier, object]] = Counter()
        """By family, source, and unit or hash."""
        self.seen: set[int] = set()
        self.engine = SchedulerHarness(
            capacities=hybrid(64, 64), max_model_len=96, depth=0, finish_copies=self._finish,
            policies=CachePolicies(uses_storage=uses_storage), budget=64,
        )  # fmt: skip
        cached(self.engine, 0, PROMPT, BASE)
        cached(self.engine, 1, [*PROMPT, *range(60, 68)], BASE)
        push_out(self.engine)
        if uses_storage:
            for plane in self.engine.cache.layout.host:
                pool = self.engine.cache.index.pools[plane.index]
                self.engine.cache.evictors[plane.index].evict(pool.num_cached)
        self.copies.clear()
        self.is_slow, self.backwards = True, backwards

    def _finish(self, copies: list[Copy]) -> list[tuple[Copy, bool]]:
        for copy in copies:
            if copy.copy_id not in self.seen:
                self.seen.add(copy.copy_id)
                units = copy.hashes if copy.source is Tier.STORAGE else copy.source_units.tolist()
                self.copies.update((copy.family, copy.source, unit) for unit in units)
        if self.is_slow and any(copy.target is not Tier.STORAGE for copy in copies):
            return []
        ended = copies[-1:] if self.backwards else copies
        return [(copy, True) for copy in ended]

    def loaded(self, source: Tier) -> list[int]:
        """How often what came from a tier came from there."""
        return [count for (_, tier, _), count in self.copies.items() if tier is source]

    def finish(self, requests: list[Submit]) -> None:
        self.is_slow = False
        self.engine.run()
        for request in requests:
            number = int(request.request_id)
            assert self.engine.tokens(number) == expected_tokens(request)
        assert all(plane.num_held == 0 for plane in self.engine.cache.stats().planes)


@pytest.mark.parametrize("backwards", [False, True])
def test_t09_a_prefix_on_the_host_is_loaded_once_for_all_who_want_it(backwards: bool) -> None:
    """T09: two in one step, one while the pages are on their way, one that shares a part of them,
    and one that wants more; whichever copy ends first."""
    counted = Counted(backwards=backwards)
    prompts = [PROMPT, PROMPT, [*PROMPT, *range(60, 69)], [*PROMPT[:9], 40], PROMPT]
    requests = [submit(10 + number, prompt) for number, prompt in enumerate(prompts)]
    for batch in (requests[:2], requests[2:4], requests[4:]):
        for request in batch:
            counted.engine.loop.handle(request)
        counted.engine.step()
    assert counted.engine.scheduler.stats().num_waiting == 5, "a request did not wait"
    assert set(counted.loaded(Tier.HOST)) == {1}
    counted.finish(requests)
    found = [counted.engine.last(10 + number).num_cached_tokens for number in range(5)]
    assert found == [16, 16, 24, 8, 16]
    assert set(counted.loaded(Tier.HOST)) == {1}


def test_t09_whoever_began_a_load_may_go_and_it_may_fail_for_all() -> None:
    """T09, T08: the first of those that share it is aborted, and the others begin with what came;
    what does not come is computed by each."""
    for is_good in (True, False):
        counted = Counted()
        requests = [submit(10 + number, PROMPT) for number in range(3)]
        for request in requests:
            counted.engine.loop.handle(request)
        counted.engine.step()
        counted.engine.loop.handle(Abort([RequestId(10)]))
        if not is_good:
            end = counted.engine.runner._finish_copies
            counted.engine.runner._finish_copies = lambda copies, end=end: [  # type: ignore[misc]
                (copy, copy.target is not Tier.DEVICE) for copy, _ in end(copies)
            ]
        counted.finish(requests[1:])
        found = [counted.engine.last(number).num_cached_tokens for number in (11, 12)]
        assert found == [16, 16] if is_good else found[0] == 0


def test_t09_storage_is_asked_once_for_a_prefix_that_several_want() -> None:
    """T09: also by one that wants more, which continues to the rest when the answer is there, and
    by one that comes later; all of them share what was found."""
    counted = Counted(uses_storage=True)
    prompts = [PROMPT, PROMPT, [*PROMPT, *range(60, 69)], [*PROMPT[:9], 40]]
    requests = [submit(10 + number, prompt) for number, prompt in enumerate(prompts)]
    for request in requests:
        counted.engine.loop.handle(request)
        counted.engine.step()
    assert set(counted.loaded(Tier.STORAGE)) == {1}
    counted.finish(requests)
    assert set(counted.loaded(Tier.STORAGE)) == {1}
    found = [counted.engine.last(10 + number).num_cached_tokens for number in range(4)]
    assert found == [16, 16, 24, 8]


def test_t09_what_storage_does_not_have_is_asked_for_once() -> None:
    """T09: of several that want it together, none asks again for what was not there."""
    counted = Counted(uses_storage=True)
    requests = [submit(10 + number, [*PROMPT, *range(20, 40)]) for number in range(3)]
    for request in requests:
        counted.engine.loop.handle(request)
    counted.engine.step()
    counted.finish(requests)
    assert set(counted.loaded(Tier.STORAGE)) == {1}
    assert counted.engine.last(10).num_cached_tokens == 16


def test_c03_who_has_loaded_and_does_not_run_gives_way_to_who_runs() -> None:
    """C03: its pages are still on the host, while one that runs would compute its own again."""
    engine = SchedulerHarness(
        capacities=(Capacity(FULL_ATTENTION, 8, 12),), max_model_len=32, depth=0
    )
    cached(engine, 0, PROMPT, BASE)
    cached(engine, 1, [40, 41], BASE)  # a step more, so that copies to the host have ended
    push_out(engine)
    running, loading = submit(2, list(range(50, 58)), max_tokens=20), submit(3, PROMPT)
    for request in (running, loading):
        engine.loop.handle(request)
    engine.run()
    assert engine.scheduler.stats().total_retractions == 0
    assert engine.last(3).num_cached_tokens == 16
    for request in (running, loading):
        assert engine.tokens(request.request_id) == expected_tokens(request)


class SlowStorage:
    """An engine whose storage tier has a prompt, and answers when it is told to."""

    def __init__(self, prefetch: Prefetch, timeout_steps: int = 5) -> None:
        self.is_slow = False
        self.engine = SchedulerHarness(
            capacities=(Capacity(FULL_ATTENTION, 32, 32),), max_model_len=64, depth=0,
            policies=CachePolicies(
                uses_storage=True, prefetch=prefetch, prefetch_timeout_steps=timeout_steps
            ),
            finish_copies=self._finish,
        )  # fmt: skip
        cached(self.engine, 0, PROMPT, BASE)
        cached(self.engine, 1, [40, 41], BASE)  # some steps more, so that all copies have ended
        cached(self.engine, 2, [40, 41], BASE)
        for plane in self.engine.cache.layout.planes:
            pool = self.engine.cache.index.pools[plane.index]
            self.engine.cache.evictors[plane.index].evict(pool.num_cached)
        self.is_slow = True

    def _finish(self, copies: list[Copy]) -> list[tuple[Copy, bool]]:
        return [(c, True) for c in copies if not (self.is_slow and c.source is Tier.STORAGE)]

    def rest(self) -> None:
        """All copies end; then nothing is held."""
        while self.engine.cache.has_transfers:
            self.engine.step()
        assert all(plane.num_held == 0 for plane in self.engine.cache.stats().planes)

    def begins_after(self, number: int, *, at_most: int) -> int | None:
        """How many steps pass until a request has news; None if more than `at_most`."""
        for step in range(1, at_most + 1):
            self.engine.step()
            if number in self.engine.outputs:
                return step
        return None


def test_t04_by_default_a_request_waits_for_storage_and_blocks_no_one() -> None:
    """T04: asked when it is queued; others begin, run and end meanwhile."""
    slow = SlowStorage(Prefetch.WAIT)
    request, other = submit(10, PROMPT), submit(11, [30, 31, 32])
    slow.engine.loop.handle(request)
    slow.engine.loop.handle(other)
    assert slow.begins_after(10, at_most=20) is None
    assert slow.engine.tokens(11) == expected_tokens(other)
    slow.is_slow = False
    slow.engine.run()
    assert slow.engine.last(10).num_cached_tokens == 16
    assert slow.engine.tokens(10) == expected_tokens(request)


def test_t04_with_best_effort_a_request_never_waits_for_storage() -> None:
    """T04: what comes late is of use to later requests."""
    slow = SlowStorage(Prefetch.BEST_EFFORT)
    request = submit(10, PROMPT)
    slow.engine.loop.handle(request)
    assert slow.begins_after(10, at_most=1) == 1
    while slow.engine.scheduler.is_serving:
        slow.engine.step()
    assert slow.engine.last(10).num_cached_tokens == 0
    assert slow.engine.tokens(10) == expected_tokens(request)
    slow.is_slow = False
    assert cached(slow.engine, 11, PROMPT, BASE) == 16
    slow.rest()


def test_t04_with_best_effort_what_arrives_while_a_request_is_queued_is_used() -> None:
    """T04: its turn has not come when storage answers."""
    slow = SlowStorage(Prefetch.BEST_EFFORT)
    slow.engine.loop.handle(submit(9, [7] * 100, max_tokens=1))
    slow.engine.loop.handle(submit(10, PROMPT))
    slow.is_slow = False
    slow.engine.run()
    assert slow.engine.last(10).num_cached_tokens == 16


@pytest.mark.parametrize("timeout_steps", [0, 1, 5])
def test_t04_with_a_timeout_a_request_waits_so_many_steps_and_no_more(timeout_steps: int) -> None:
    """T04: then it computes its prompt; if storage answers in time, it does not."""
    slow = SlowStorage(Prefetch.TIMEOUT, timeout_steps)
    slow.engine.loop.handle(submit(9, [30, 31, 32], max_tokens=30))
    slow.engine.step()
    request = submit(10, PROMPT)
    slow.engine.loop.handle(request)
    assert slow.begins_after(10, at_most=20) == timeout_steps + 1
    slow.is_slow = False
    slow.engine.run()
    assert slow.engine.last(10).num_cached_tokens == 0
    assert slow.engine.tokens(10) == expected_tokens(request)


def test_t04_with_a_timeout_what_arrives_in_time_is_used() -> None:
    slow = SlowStorage(Prefetch.TIMEOUT, 5)
    slow.engine.loop.handle(submit(9, [30, 31, 32], max_tokens=30))
    slow.engine.loop.handle(submit(10, PROMPT))
    assert slow.begins_after(10, at_most=4) is None
    slow.is_slow = False
    slow.engine.run()
    assert slow.engine.last(10).num_cached_tokens == 16


@pytest.mark.parametrize("prefetch", list(Prefetch))
def test_t04_t08_aborting_a_request_whose_pages_storage_is_asked_for_leaks_nothing(
    prefetch: Prefetch,
) -> None:
    """T04, T08: while it waits, or after it has lost patience."""
    for steps in (0, 3, 8):
        slow = SlowStorage(prefetch, 5)
        slow.engine.loop.handle(submit(9, [30, 31, 32], max_tokens=30))
        slow.engine.loop.handle(submit(10, PROMPT, max_tokens=30))
        for _ in range(steps):
            slow.engine.step()
        slow.engine.loop.handle(Abort([RequestId(10)]))
        slow.is_slow = False
        slow.engine.run()
        assert slow.engine.last(10).finish_reason is FinishReason.ABORT
        slow.rest()


@pytest.mark.parametrize("arrives", [True, False])
def test_t08_aborting_a_request_that_waits_for_its_pages_leaks_nothing(arrives: bool) -> None:
    """T08: in load-back; the copy ends later, well or not."""
    held_back: list[bool] = [False]

    def finish(copies: list[Copy]) -> list[tuple[Copy, bool]]:
        return [] if held_back[0] else [(copy, arrives) for copy in copies]

    engine = SchedulerHarness(
        capacities=(Capacity(FULL_ATTENTION, 12, 12),), depth=0, finish_copies=None,
        max_model_len=40,
    )  # fmt: skip
    cached(engine, 0, PROMPT, BASE)
    cached(engine, 1, [40, 41], BASE)
    push_out(engine)
    engine.runner._finish_copies = finish
    held_back[0] = True
    engine.loop.handle(submit(2, PROMPT))
    engine.step()
    assert engine.scheduler.stats().num_held_pages == 4
    engine.loop.handle(Abort([RequestId(2)]))
    engine.step()
    assert engine.last(2).finish_reason is FinishReason.ABORT
    held_back[0] = False
    engine.loop.handle(submit(3, [45, 46, 47]))
    engine.run()
    assert engine.tokens(3) == expected_tokens(submit(3, [45, 46, 47]))
    for plane in engine.cache.stats().planes:
        assert plane.num_held == 0


def test_p03_a_request_that_waits_for_a_load_does_not_rely_on_pages_of_a_failed_step() -> None:
    """P03: it found pages that a launched step was to fill, and others on the host. The step
    fails while it waits: it gets its own tokens all the same, or the error."""
    is_slow: list[bool] = [False]

    def finish(copies: list[Copy]) -> list[tuple[Copy, bool]]:
        return [] if is_slow[0] else [(copy, True) for copy in copies]

    engine = SchedulerHarness(
        capacities=(
            Capacity(FULL_ATTENTION, 32, 32),
            Capacity(RecurrentState("recurrent", interval=100), 8, 8),
        ),
        depth=1, budget=64, finish_copies=finish, max_model_len=64,
    )  # fmt: skip
    shared = [1, 2, 3, 4, 5, 6, 7, 8]
    longer = [*shared, 11, 12, 13, 14]
    assert cached(engine, 0, [*longer, 15], BASE) == 0  # one state, after its third page
    cached(engine, 1, [40, 41], BASE)
    push_out(engine)
    # No state after the shared pages: they are computed again, into the pages of the index.
    engine.loop.handle(submit(2, [*shared, 21, 22]))
    engine.runner.fail_next = "planted"
    is_slow[0] = True
    engine.step()  # launched, not done
    waiting = submit(3, [*longer, 16])
    engine.loop.handle(waiting)
    engine.step()  # the first step is found to have failed
    assert engine.last(2).finish_reason is FinishReason.ERROR
    is_slow[0] = False
    engine.run()
    if engine.last(3).finish_reason is not FinishReason.ERROR:
        assert engine.tokens(3) == expected_tokens(waiting)
    assert "planted" in (engine.last(3).error or "planted")


@pytest.mark.parametrize("namespace", [BASE, SALTED])
def test_n02_plans_for_base_do_not_depend_on_what_other_namespaces_have(
    namespace: Namespace,
) -> None:
    """N02: the same requests get the same tokens, chunks and hits, whatever was served before."""
    engine = SchedulerHarness(num_pages=128, depth=0, policies=CachePolicies(records_events=True))
    if namespace is not BASE:
        cached(engine, 90, PROMPT, namespace)
        engine.cache.take_events()
    steps = []
    for number in range(3):
        engine.loop.handle(submit(number, PROMPT[: 5 + 4 * number]))
    while engine.scheduler.has_work:
        plan = engine.scheduler.schedule()
        assert plan is not None
        steps.append((plan.rows.tolist(), plan.num_tokens.tolist()))
        engine.scheduler.advance(engine.runner.execute(plan))
    assert steps[0] == ([0, 1, 2], [5, 5, 5])
    assert {event.namespace for event in engine.cache.take_events()} == {BASE}


def test_c04_a_request_that_resumes_is_not_counted_again() -> None:
    """C04: lookups and hits are of requests that come, whatever is retracted meanwhile."""
    engine = SchedulerHarness(num_pages=12, max_num_seqs=4)
    for number in range(4):
        engine.loop.handle(submit(number, [number, 1, 2, 3, 4], max_tokens=16))
    engine.run()
    stats = engine.scheduler.stats()
    assert stats.total_retractions > 0
    assert (stats.total_lookup_tokens, stats.total_hit_tokens) == (4 * 5, 0)


def test_c04_without_reuse_nothing_is_looked_up() -> None:
    """C04: with caching off there is no hit rate, rather than one of 0."""
    engine = SchedulerHarness(reuse=False)
    engine.loop.handle(submit(0, PROMPT))
    engine.run()
    stats = engine.scheduler.stats()
    assert (stats.total_lookup_tokens, stats.missed_tokens) == (0, {})


@pytest.mark.parametrize("is_on_host", [False, True], ids=["computed", "loaded"])
def test_c01_c07_room_for_one_request_of_a_step_costs_no_other_its_hit(is_on_host: bool) -> None:
    """C01, C07: two requests arrive together. The prefix of the second is the first page that
    eviction would take; room for the first is made elsewhere, and both find what they find alone.
    """
    first, second = [10 + i for i in range(17)], [30 + i for i in range(9)]
    num_found = [16 if is_on_host else 0, 8]
    engine = SchedulerHarness(
        capacities=(Capacity(FULL_ATTENTION, 12, 32 if is_on_host else 0),),
        depth=0, max_model_len=48, budget=64,
    )  # fmt: skip
    if is_on_host:
        cached(engine, 0, first, BASE)
        cached(engine, 1, [49, 49], BASE)  # a step more, so that the copies have ended
        push_out(engine)
    cached(engine, 2, second, BASE)  # used longest ago, and still on the device
    cached(engine, 3, [1] * 16, BASE)
    cached(engine, 4, [2] * 16, BASE)
    engine.loop.handle(submit(5, first, max_tokens=1))
    engine.loop.handle(submit(6, second, max_tokens=1))
    engine.run()
    assert [engine.last(number).num_cached_tokens for number in (5, 6)] == num_found
    assert engine.last(6).cache_use is not None
    assert engine.last(6).cache_use.num_host_tokens == 0, "it was on the device all the time"
    for number, prompt in [(5, first), (6, second)]:
        assert engine.tokens(number) == expected_tokens(submit(number, prompt, max_tokens=1))
