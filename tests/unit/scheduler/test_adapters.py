"""The cap on adapters, policies, and adapters that come and go (L and W rows), audited."""

from __future__ import annotations

import pytest

from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.planes import Capacity
from manyroots.ids import AdapterDigest, AdapterName
from manyroots.lora.spec import AdapterSpec
from manyroots.messages import FinishReason
from manyroots.scheduler.slices import QUANTUM_LOADS_ALONE
from manyroots.step import AdapterLoaded, LoadAdapter
from tests.helpers.cache_harness import recurrent
from tests.helpers.scheduler_harness import SchedulerHarness, expected_tokens, submit


def load(engine: SchedulerHarness, name: str, content: str | None = None) -> AdapterDigest:
    digest = AdapterDigest((content or name).encode())
    engine.scheduler.load_adapter(AdapterName(name), AdapterSpec(digest, 8, 100), path=name)
    return digest


def running(engine: SchedulerHarness) -> list[int]:
    return [int(r.submit.request_id) for r in engine.scheduler._rows.running]


def running_adapters(engine: SchedulerHarness) -> set[AdapterDigest]:
    return {r.hold.digest for r in engine.scheduler._rows.running if r.hold is not None}


def test_n19_each_request_is_computed_with_the_adapter_it_names() -> None:
    """N19, N01: base, two adapters and the same prompt; tokens are each one's own, and no page of
    one is reused by another."""
    engine = SchedulerHarness(max_loras=2)
    digests = {name: load(engine, name) for name in ("a", "b")}
    prompt = list(range(17))
    for number, name in enumerate([None, "a", "b", None, "a", "b"]):
        engine.loop.handle(submit(number, prompt, adapter=name))
        engine.run()
        want = expected_tokens(submit(number, prompt), None if name is None else digests[name])
        assert engine.tokens(number) == want
        assert engine.last(number).num_cached_tokens == (16 if number >= 3 else 0)


def test_n19_an_unknown_adapter_is_an_error_never_base_output() -> None:
    """N19: the name is looked up in the engine, where an unload takes effect at once."""
    engine = SchedulerHarness()
    engine.loop.handle(submit(0, [1, 2, 3], adapter="nobody"))
    engine.run()
    assert engine.last(0).finish_reason is FinishReason.ERROR
    assert "nobody" in (engine.last(0).error or "")
    assert engine.tokens(0) == []


def test_l01_at_most_max_loras_adapters_run_and_others_are_not_held_back() -> None:
    """L01: four adapters under a cap of two; base and more requests of the two run with them."""
    engine = SchedulerHarness(max_loras=2, max_num_seqs=8)
    for name in "abcd":
        load(engine, name)
    names = ["a", "b", "c", "d", None, "a", "b", None]
    for number, name in enumerate(names):
        engine.loop.handle(submit(number, [number, 1, 2], max_tokens=12, adapter=name))
    for _ in range(4):
        engine.step()
        assert len(running_adapters(engine)) <= 2
    assert set(running(engine)) == {0, 1, 4, 5, 6, 7}
    engine.run()
    assert all(engine.last(n).finish_reason is FinishReason.LENGTH for n in range(8))


def test_l02_zero_is_no_cap() -> None:
    """L02: with max_loras 0 any number of adapters runs at once."""
    engine = SchedulerHarness(max_loras=0, max_num_seqs=8)
    for number in range(8):
        load(engine, str(number))
        engine.loop.handle(submit(number, [1, 2, 3], max_tokens=9, adapter=str(number)))
    engine.step()
    engine.step()
    engine.step()
    assert len(running_adapters(engine)) == 8
    engine.run()


def test_l03_an_adapter_blocked_on_memory_does_not_use_up_the_cap() -> None:
    """L03: cap 1; A's request does not fit beside a base request, B's does and runs."""
    engine = SchedulerHarness(num_pages=12, page_size=4, max_loras=1, max_cpu_loras=4)
    load(engine, "a")
    load(engine, "b")
    engine.loop.handle(submit(0, list(range(20)), max_tokens=12))
    engine.step()
    engine.loop.handle(submit(1, list(range(28)), max_tokens=4, adapter="a"))
    engine.loop.handle(submit(2, [5, 6, 7], max_tokens=3, adapter="b"))
    for _ in range(8):
        engine.step()
    assert engine.last(2).finish_reason is FinishReason.LENGTH
    assert 1 not in engine.outputs
    engine.run()
    assert engine.last(1).finish_reason is FinishReason.LENGTH


def test_l03_l04_a_request_without_room_holds_back_no_other_adapter() -> None:
    """L03, L04: A's request, which came first, does not fit beside what runs. All adapters are on
    the device: requests of B, of C and of the base model begin in the same step, and none is
    retracted."""
    engine = SchedulerHarness(num_pages=16, page_size=4, max_loras=4, depth=0)
    for number, name in enumerate("abc"):
        load(engine, name)
        engine.loop.handle(submit(number, [40, number], max_tokens=1, adapter=name))
        engine.run()
    engine.loop.handle(submit(10, list(range(20)), max_tokens=12))
    engine.step()
    engine.loop.handle(submit(11, list(range(40)), max_tokens=4, adapter="a"))
    for number, name in [(12, "b"), (13, None), (14, "c")]:
        engine.loop.handle(submit(number, [5, number], max_tokens=2, adapter=name))
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert sorted(int(arrival.request_id) for arrival in plan.arrivals) == [12, 13, 14]
    for output in engine.scheduler.advance(engine.runner.execute(plan)):
        engine.outputs.setdefault(int(output.request_id), []).append(output)
    engine.run()
    assert engine.last(11).finish_reason is FinishReason.LENGTH
    assert engine.scheduler.stats().total_retractions == 0


def test_l04_a_held_back_request_causes_no_empty_plan_and_no_retraction() -> None:
    """L04: every plan computes something (the harness refuses empty ones); no request is
    retracted."""
    engine = SchedulerHarness(max_loras=1)
    load(engine, "a")
    load(engine, "b")
    engine.loop.handle(submit(0, [1, 2, 3], max_tokens=20, adapter="a"))
    engine.loop.handle(submit(1, [1, 2, 3], max_tokens=20, adapter="b"))
    engine.run()
    stats = engine.scheduler.stats()
    assert stats.total_retractions == 0
    assert stats.total_steps < 60


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_l04_h05_a_request_that_loads_its_state_gets_the_room_it_was_promised(
    depth: int, policy: str
) -> None:
    """L04, H05: cap 1. B's rows hold all states, two of them passed ones of their answers. A's
    request displaces B, because those will be freed for it. It must get one for the state that it
    has on the host, too. If that were refused, A would wait for B's states, and B for its time."""
    engine = SchedulerHarness(
        max_loras=1,
        max_num_seqs=2,
        policy=policy,
        depth=depth,
        capacities=(Capacity(FULL_ATTENTION, 64, 64), Capacity(recurrent(100), 6, 8)),
    )
    digests = {name: load(engine, name) for name in "ab"}
    prompt = [1, 2, 3, 4, 5, 6]
    engine.loop.handle(submit(0, prompt, max_tokens=1, adapter="a"))
    engine.run()
    requests = {
        number: submit(number, [40, number], max_tokens=80, adapter="b") for number in (1, 2)
    }
    for request in requests.values():
        engine.loop.handle(request)
    while engine.cache.stats().planes[1].num_held < 6:
        engine.step()
    requests[3] = submit(3, prompt, max_tokens=4, adapter="a")
    engine.loop.handle(requests[3])
    engine.run(400)
    assert engine.last(3).num_cached_tokens == 4, "from the host: the device had no room"
    assert engine.scheduler.stats().total_host_hit_tokens == 4
    assert engine.scheduler.stats().total_pauses == 2
    for number, request in requests.items():
        name = request.adapter
        assert name is not None
        assert engine.tokens(number) == expected_tokens(request, digests[name])


def test_l06_no_adapter_starves_under_endless_traffic_of_another() -> None:
    """L06: cap 1 and a new request of A every step: B's first token comes within A's quantum, which
    is so many loads of two steps, and its own load."""
    engine = SchedulerHarness(max_loras=1, max_num_seqs=4, num_pages=256)
    load(engine, "a")
    load(engine, "b")
    number = 0
    for _ in range(5):
        engine.loop.handle(submit(number, [number % 50, 1], max_tokens=6, adapter="a"))
        number += 1
        engine.step()
    engine.loop.handle(submit(10_000, [7, 7, 7], max_tokens=2, adapter="b"))
    for _ in range(2 * QUANTUM_LOADS_ALONE + 8):
        engine.loop.handle(submit(number, [number % 50, 1], max_tokens=6, adapter="a"))
        number += 1
        engine.step()
        if engine.outputs.get(10_000):
            break
    else:
        raise AssertionError("B was starved")
    engine.run()


def test_l07_running_decodes_keep_their_adapter() -> None:
    """L07: a new adapter never pauses those that run; chunked prefills count against the cap."""
    engine = SchedulerHarness(max_loras=1, chunk=4, num_pages=128)
    load(engine, "a")
    load(engine, "b")
    engine.loop.handle(submit(0, list(range(40)), max_tokens=10, adapter="a"))
    for _ in range(3):
        engine.step()
    engine.loop.handle(submit(1, [1, 2], max_tokens=2, adapter="b"))
    for _ in range(15):
        engine.step()
        adapters = running_adapters(engine)
        assert len(adapters) <= 1
        if 0 in running(engine):
            assert 1 not in running(engine)
    engine.run()
    assert engine.last(1).finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("fcfs", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("priority", [4, 1, 5, 7, 0, 2, 3, 6]),
        ("pack", [0, 3, 6, 1, 4, 7, 2, 5]),
    ],
)
def test_l08_the_order_of_a_policy_holds_across_adapters_and_tenants(
    policy: str, order: list[int]
) -> None:
    """L08: first come; by priority, and then first come; by adapter, that of the first first, and
    first come within each. No request waits for weights here."""
    engine = SchedulerHarness(policy=policy, max_num_seqs=1, max_loras=2, depth=0)
    for number, name in enumerate("ab", 98):
        load(engine, name)
        engine.loop.handle(submit(number, [9], max_tokens=1, adapter=name))
        engine.run()
    priorities = [2, 1, 2, 2, 0, 1, 2, 1]
    adapters = ["a", "b", None, "a", "b", None, "a", "b"]
    for number in range(8):
        engine.loop.handle(
            submit(
                number, [number], max_tokens=1, adapter=adapters[number],
                priority=priorities[number],
                salt=f"{number % 3}",
            )
        )  # fmt: skip
    engine.run()
    assert [number for number in engine.outputs if number < 98] == order


def test_l08_packing_keeps_to_an_adapter() -> None:
    """L08: grouped by adapter with arrival order kept within each."""
    engine = SchedulerHarness(policy="pack", max_num_seqs=1, max_loras=1, depth=0)
    load(engine, "a")
    load(engine, "b")
    # Adapter a is on the device already: packing starts with it.
    engine.loop.handle(submit(99, [9], max_tokens=1, adapter="a"))
    engine.run()
    for number in range(6):
        engine.loop.handle(submit(number, [number], max_tokens=1, adapter="ab"[number % 2]))
    engine.run()
    assert [number for number in engine.outputs if number != 99] == [0, 2, 4, 1, 3, 5]


def test_l08_fair_shares_between_tenants_that_ask_unequally() -> None:
    """L08: a tenant with many requests does not keep another from its share."""
    engine = SchedulerHarness(policy="fair", max_num_seqs=1, depth=0)
    for number in range(20):
        engine.loop.handle(submit(number, [number], max_tokens=2, salt="many"))
    for number in range(20, 23):
        engine.loop.handle(submit(number, [number], max_tokens=2, salt="few"))
    engine.run()
    finished = list(engine.outputs)
    assert max(finished.index(number) for number in (20, 21, 22)) < 8


def test_w04_unload_in_mid_decode_lets_running_requests_finish() -> None:
    """W04, N12, N13: new requests are refused at once, running ones finish unchanged, then
    weights and pages go with no second call."""
    engine = SchedulerHarness(max_loras=1)
    digest = load(engine, "a")
    request = submit(0, list(range(10)), max_tokens=12, adapter="a")
    engine.loop.handle(request)
    for _ in range(5):
        engine.step()
    engine.scheduler.unload_adapter(AdapterName("a"))
    engine.loop.handle(submit(1, list(range(10)), adapter="a"))
    engine.run()
    assert engine.tokens(0) == expected_tokens(request, digest)
    assert engine.last(1).finish_reason is FinishReason.ERROR
    [pages] = engine.cache.stats().planes
    assert pages.num_free == pages.num_units
    assert engine.adapters.stats().num_on_device == 0


def test_n13_the_last_request_of_an_unloaded_adapter_takes_its_pages_along() -> None:
    """N13: one that began after the unload publishes what it computes, since others of the version
    may still come to it; when the last is over all of it goes, with no second call."""
    engine = SchedulerHarness(max_loras=1, max_num_seqs=1)
    digest = load(engine, "a")
    requests = [submit(number, list(range(10)), adapter="a") for number in range(3)]
    for request in requests:
        engine.loop.handle(request)
    for _ in range(3):
        engine.step()
    engine.scheduler.unload_adapter(AdapterName("a"))
    engine.run()
    assert [engine.tokens(n) for n in range(3)] == [expected_tokens(requests[0], digest)] * 3
    assert engine.last(2).num_cached_tokens == 8, "the last found nothing of the one before it"
    [pages] = engine.cache.stats().planes
    assert pages.num_free == pages.num_units
    assert not [*engine.cache.index.tree.nodes()]


def test_n03_an_adapters_request_finds_as_much_as_bases() -> None:
    """N03: cached tokens and pages in use, request by request, are those of base."""
    prompts = [list(range(length)) for length in (9, 9, 17, 8, 16, 4, 30)]
    sides = []
    for name in (None, "a"):
        engine = SchedulerHarness(max_loras=1, num_pages=32)
        load(engine, "a")
        seen: list[tuple[int, int, int]] = []
        for number, prompt in enumerate(prompts):
            engine.loop.handle(submit(number, prompt, adapter=name))
            engine.run()
            [pages] = engine.cache.stats().planes
            cached = engine.last(number).num_cached_tokens
            seen.append((cached, pages.num_free, pages.num_cached))
        sides.append(seen)
    assert [cached for cached, _, _ in sides[0]] == [0, 8, 8, 4, 12, 0, 16]
    assert sides[1] == sides[0]


def test_w03_w05_w09_a_slot_stays_as_it_is_while_a_launched_step_reads_it() -> None:
    """W03, W05, W09: one slot and one row. A's request loses its row to an important one of the
    base model while a step that computes it is under way; B's weights, which are wanted next, come
    when that step is done (the harness looks at every plan). A's request goes on with its own
    weights, although A is unloaded by then."""
    engine = SchedulerHarness(
        policy="priority", max_loras=1, max_cpu_loras=4, max_num_seqs=1, depth=1
    )
    digests = {"a": load(engine, "a"), "b": load(engine, "b")}
    requests = [
        submit(0, [1, 2, 3], max_tokens=12, priority=2, adapter="a"),
        submit(1, [4, 5], max_tokens=3, priority=0),
        submit(2, [6, 7], max_tokens=3, priority=1, adapter="b"),
    ]
    engine.loop.handle(requests[0])
    while not engine.outputs:
        engine.step()
    for request in requests[1:]:
        engine.loop.handle(request)
    engine.scheduler.unload_adapter(AdapterName("a"))
    engine.run()
    assert engine.scheduler.stats().total_retractions >= 1
    assert list(engine.outputs) == [0, 1, 2]
    for request in requests:
        digest = None if request.adapter is None else digests[request.adapter]
        assert engine.tokens(int(request.request_id)) == expected_tokens(request, digest)


def test_w03_w05_w09_a_slot_keeps_its_weights_until_a_paused_requests_step_is_done() -> None:
    """W03, W05, W09: one slot. A's request is paused for B's while a launched step computes it:
    B's weights come when that step is done (the harness looks at every plan). A's request
    resumes with its own weights, although A is unloaded by then."""
    engine = SchedulerHarness(max_loras=1, max_cpu_loras=4, depth=1, adapter_quantum_steps=1)
    digests = {"a": load(engine, "a"), "b": load(engine, "b")}
    requests = [
        submit(0, [1, 2, 3], max_tokens=12, adapter="a"),
        submit(1, [6, 7], max_tokens=3, adapter="b"),
    ]
    engine.loop.handle(requests[0])
    while not engine.outputs:
        engine.step()
    engine.loop.handle(requests[1])
    engine.scheduler.unload_adapter(AdapterName("a"))
    engine.run()
    assert engine.scheduler.stats().total_pauses >= 1
    for request in requests:
        assert request.adapter is not None
        expected = expected_tokens(request, digests[request.adapter])
        assert engine.tokens(int(request.request_id)) == expected


def test_w05_a_retracted_request_of_an_unloading_adapter_resumes_with_it() -> None:
    """W05: retraction keeps the hold on the old version."""
    engine = SchedulerHarness(num_pages=8, page_size=4, max_loras=2)
    digest = load(engine, "a")
    requests = [submit(n, [n, 1, 2, 3, 4], max_tokens=16, adapter="a") for n in range(3)]
    for request in requests:
        engine.loop.handle(request)
    for _ in range(6):
        engine.step()
    engine.scheduler.unload_adapter(AdapterName("a"))
    engine.run()
    assert engine.scheduler.stats().total_retractions > 0
    for request in requests:
        assert engine.tokens(int(request.request_id)) == expected_tokens(request, digest)


def test_w06_the_same_name_with_other_weights_never_hits_old_pages() -> None:
    """W06, N20: old requests keep the old weights, new ones get the new and start cold."""
    engine = SchedulerHarness(max_loras=2, num_pages=128)
    old = load(engine, "a", "old")
    prompt = list(range(17))
    first = submit(0, prompt, max_tokens=20, adapter="a")
    engine.loop.handle(first)
    for _ in range(5):
        engine.step()
    new = load(engine, "a", "new")
    second = submit(1, prompt, max_tokens=5, adapter="a")
    engine.loop.handle(second)
    engine.run()
    assert engine.tokens(0) == expected_tokens(first, old)
    assert engine.tokens(1) == expected_tokens(second, new)
    assert engine.last(1).num_cached_tokens == 0


def test_w10_a_failed_load_fails_only_its_own_requests_and_can_be_retried() -> None:
    """W10: others decode meanwhile; the reason reaches the caller; the next request tries again."""
    attempts: list[int] = []

    def finish(loads: list[LoadAdapter]) -> list[AdapterLoaded]:
        done = []
        for request in loads:
            attempts.append(request.load_id)
            error = "no such file" if request.digest == b"bad" and len(attempts) < 3 else None
            done.append(AdapterLoaded(request.load_id, error))
        return done

    engine = SchedulerHarness(max_loras=2, finish_loads=finish)
    good, bad = load(engine, "good"), load(engine, "bad")
    engine.loop.handle(submit(0, [1, 2, 3], max_tokens=8, adapter="good"))
    engine.loop.handle(submit(1, [1, 2, 3], max_tokens=8, adapter="bad"))
    engine.loop.handle(submit(2, [1, 2, 3], max_tokens=8))
    engine.run()
    assert engine.last(1).finish_reason is FinishReason.ERROR
    assert "no such file" in (engine.last(1).error or "")
    assert engine.tokens(0) == expected_tokens(submit(0, [1, 2, 3], max_tokens=8), good)
    assert engine.tokens(2) == expected_tokens(submit(2, [1, 2, 3], max_tokens=8))
    engine.loop.handle(submit(3, [1, 2, 3], max_tokens=8, adapter="bad"))
    engine.run()
    assert engine.tokens(3) == expected_tokens(submit(3, [1, 2, 3], max_tokens=8), bad)
