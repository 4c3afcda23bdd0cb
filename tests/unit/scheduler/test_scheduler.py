"""The scheduler and cache together, on the fake runner, audited after every step."""

from __future__ import annotations

import pytest

from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.families.window import SlidingWindow
from manyroots.cache.planes import Capacity
from manyroots.ids import AdapterDigest, AdapterName, RequestId
from manyroots.lora.spec import AdapterSpec
from manyroots.messages import Abort, FinishReason
from tests.helpers.scheduler_harness import SchedulerHarness, expected_tokens, submit


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("chunk", [1, 3, 4, None])
def test_tokens_do_not_depend_on_chunking_or_overlap(depth: int, chunk: int | None) -> None:
    engine = SchedulerHarness(depth=depth, chunk=chunk)
    requests = [submit(i, list(range(i, i + 7 + i)), max_tokens=5 + i) for i in range(6)]
    for request in requests:
        engine.loop.handle(request)
    engine.run()
    for request in requests:
        assert engine.tokens(request.request_id) == expected_tokens(request)
        assert engine.last(request.request_id).finish_reason is FinishReason.LENGTH
    assert engine.scheduler.stats().num_held_pages == 0


def test_n01_namespaces_never_share_and_the_same_one_hits_every_full_page() -> None:
    """N01: warm A; B and base find nothing, A finds every full page but the last token's."""
    prompt = list(range(17))
    engine = SchedulerHarness(max_loras=2, max_cpu_loras=2)
    for name in ("a", "b"):
        spec = AdapterSpec(AdapterDigest(name.encode() * 32), 4, 1)
        engine.scheduler.load_adapter(AdapterName(name), spec, path=name)
    engine.loop.handle(submit(0, prompt, adapter="a"))
    engine.run()
    for number, adapter, cached in [(1, "b", 0), (2, None, 0), (3, "a", 16)]:
        engine.loop.handle(submit(number, prompt, adapter=adapter))
        engine.run()
        assert engine.last(number).num_cached_tokens == cached


def test_n21_a_salt_separates_tenants() -> None:
    """N21: the same tokens under another salt, an empty salt or none are not shared."""
    prompt = list(range(12))
    engine = SchedulerHarness()
    for number, salt in enumerate([None, "", "tenant", "Tenant"]):
        engine.loop.handle(submit(number, prompt, salt=salt))
        engine.run()
        assert engine.last(number).num_cached_tokens == 0
    engine.loop.handle(submit(9, prompt, salt="tenant"))
    engine.run()
    assert engine.last(9).num_cached_tokens == 8


def test_p01_a_running_requests_pages_are_reused() -> None:
    """P01: B with A's prompt reuses A's full pages while A still decodes."""
    prompt = [i % 50 for i in range(338)]
    engine = SchedulerHarness(num_pages=64, page_size=64, budget=512)
    engine.loop.handle(submit(0, prompt, max_tokens=50))
    for _ in range(5):
        engine.step()
    assert engine.last(0).finish_reason is None
    engine.loop.handle(submit(1, prompt, max_tokens=2))
    engine.run()
    assert engine.last(1).num_cached_tokens == 320
    assert engine.tokens(0)[:2] == engine.tokens(1)


def test_p02_a_burst_computes_a_shared_prefix_once_within_one_step() -> None:
    """P02: N same-prefix requests in one step; the shared pages are computed by the first."""
    shared = [7] * 32
    engine = SchedulerHarness(budget=64, page_size=4)
    for number in range(8):
        engine.loop.handle(submit(number, [*shared, number], max_tokens=2))
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert sorted(plan.num_tokens.tolist()) == [1] * 7 + [33]


def test_p03_a_failed_step_publishes_nothing_and_fails_only_its_own() -> None:
    """P03: pages of a failed step are not findable afterwards; waiting requests go on."""
    engine = SchedulerHarness(max_num_seqs=2)
    requests = [submit(i, [i] * 9, max_tokens=6) for i in range(3)]
    for request in requests:
        engine.loop.handle(request)
    engine.runner.fail_next = "planted fault"
    engine.run()
    for number in (0, 1):
        assert engine.last(number).finish_reason is FinishReason.ERROR
        assert "planted fault" in (engine.last(number).error or "")
    assert engine.tokens(2) == expected_tokens(requests[2])
    assert engine.scheduler.stats().num_held_pages == 0
    engine.loop.handle(submit(10, [0] * 9))
    engine.run()
    assert engine.last(10).num_cached_tokens == 0


def test_p05_the_same_page_computed_twice_is_indexed_once() -> None:
    """P05: without sharing inside the step both compute; one copy is indexed, nothing leaks."""
    engine = SchedulerHarness(page_size=4, budget=9, chunk=3)
    for number in range(2):
        engine.loop.handle(submit(number, [1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=3))
    engine.run()
    assert engine.tokens(0) == engine.tokens(1)
    assert engine.scheduler.stats().num_held_pages == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_n07_retraction_resumes_exactly(depth: int) -> None:
    """N07: under memory pressure requests are retracted, and resume with the same tokens."""
    engine = SchedulerHarness(num_pages=12, page_size=4, depth=depth)
    requests = [submit(i, [i, 2, 3, 4, 5, 6], max_tokens=20) for i in range(4)]
    for request in requests:
        engine.loop.handle(request)
    engine.run()
    assert engine.scheduler.stats().total_retractions > 0
    for request in requests:
        assert engine.tokens(request.request_id) == expected_tokens(request)
    assert engine.scheduler.stats().num_held_pages == 0


def test_g06_who_was_retracted_has_begun() -> None:
    """G06: its next tokens must be of the same weights, though it holds no page of them."""
    engine = SchedulerHarness(num_pages=8)
    for number in range(2):
        engine.loop.handle(submit(number, [number] * 8, max_tokens=16))
    assert engine.scheduler.num_begun == 0
    while not engine.scheduler.stats().total_retractions:
        engine.step()
    while engine.loop._launched:
        engine.loop._finish_oldest()
    assert engine.cache.num_leases == 1
    assert engine.scheduler.num_begun == 2
    engine.run()
    assert engine.scheduler.num_begun == 0


def test_decodes_are_not_held_up_by_a_long_prompt() -> None:
    engine = SchedulerHarness(num_pages=200, budget=8, max_num_seqs=4)
    engine.loop.handle(submit(0, [1, 2, 3], max_tokens=30))
    engine.step()
    engine.step()
    engine.loop.handle(submit(1, [i % 50 for i in range(100)], max_tokens=1))
    before = len(engine.tokens(0))
    for _ in range(10):
        engine.step()
    assert len(engine.tokens(0)) == before + 10


def test_stop_tokens_end_a_request_and_min_tokens_delays_them() -> None:
    plain = submit(0, [3, 1, 4], max_tokens=12)
    stop = expected_tokens(plain)[1]
    engine = SchedulerHarness()
    engine.loop.handle(submit(1, [3, 1, 4], max_tokens=12, stop_ids=(stop,)))
    late = submit(2, [3, 1, 4], max_tokens=12, min_tokens=6, stop_ids=(stop,))
    engine.loop.handle(late)
    engine.run()
    assert engine.tokens(1) == expected_tokens(plain)[:2]
    assert engine.last(1).finish_reason is FinishReason.STOP
    assert engine.last(1).stop_token == stop
    assert engine.tokens(2) == expected_tokens(late)
    assert len(engine.tokens(2)) > 6


def test_s06_abort_frees_pages_also_with_a_step_in_flight() -> None:
    """S06: aborting waiting, running and unknown requests leaves nothing held."""
    engine = SchedulerHarness(max_num_seqs=2)
    for number in range(4):
        engine.loop.handle(submit(number, [number] * 10, max_tokens=100))
    engine.step()
    engine.step()
    engine.loop.handle(Abort([RequestId(n) for n in (0, 3, 99)]))
    engine.step()
    assert engine.last(0).finish_reason is FinishReason.ABORT
    assert engine.last(3).finish_reason is FinishReason.ABORT
    engine.loop.handle(Abort([RequestId(1), RequestId(2), RequestId(1)]))
    engine.run()
    assert engine.scheduler.stats().num_held_pages == 0


def test_without_prefix_caching_nothing_is_reused() -> None:
    engine = SchedulerHarness(reuse=False)
    for number in range(2):
        engine.loop.handle(submit(number, list(range(20))))
        engine.run()
        assert engine.last(number).num_cached_tokens == 0
    assert engine.scheduler.stats().num_cached_pages == 0


def test_n17_two_engines_fed_the_same_calls_make_the_same_plans() -> None:
    """N17: plans, pages and victims are identical."""

    def transcript() -> list[object]:
        engine = SchedulerHarness(num_pages=14, depth=0)
        plans: list[object] = []
        for number in range(10):
            engine.loop.handle(submit(number, [number % 3] * (5 + number), max_tokens=6))
        while engine.scheduler.has_work:
            plan = engine.scheduler.schedule()
            assert plan is not None
            tables = [[t.tolist() for t in a.page_tables] for a in plan.arrivals]
            grown = [(g.rows.tolist(), g.places.tolist(), g.pages.tolist()) for g in plan.new_pages]
            plans.append((plan.rows.tolist(), plan.num_tokens.tolist(), tables, grown))
            engine.scheduler.advance(engine.runner.execute(plan))
        return plans

    assert transcript() == transcript()


@pytest.mark.parametrize("beside", [False, True])
def test_h04_a_prompt_longer_than_a_windows_pool_begins_beside_others(beside: bool) -> None:
    """H04: each chunk fits, since pages that the window has left are given back on the way. The
    prompt begins while others run, computes chunk by chunk, and no request is retracted."""
    family = SlidingWindow("window", 6, 4)
    engine = SchedulerHarness(
        page_size=4, budget=12, max_model_len=256, depth=0,
        capacities=(Capacity(FULL_ATTENTION, 128), Capacity(family, 12)) if beside
        else (Capacity(family, 12),),
    )  # fmt: skip
    other, long = submit(1, [1, 2, 3], max_tokens=60), submit(2, list(range(40)) * 4, max_tokens=4)
    engine.loop.handle(other)
    engine.step()
    engine.loop.handle(long)
    for _ in range(25):
        engine.step()
    assert 2 in engine.outputs, "the long prompt waits until nothing runs"
    assert engine.last(1).finish_reason is None
    engine.run()
    for request in (other, long):
        assert engine.tokens(int(request.request_id)) == expected_tokens(request)
    assert engine.scheduler.stats().total_retractions == 0
