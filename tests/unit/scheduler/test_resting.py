"""Resting: a rare adapter gets its turn, and the others go on where they were; audited."""

from __future__ import annotations

import random
from typing import Any

import pytest

from manyroots.ids import AdapterDigest, AdapterName, RequestId
from manyroots.lora.spec import AdapterSpec
from manyroots.messages import Abort, FinishReason, Submit
from manyroots.scheduler.claims import REST_STEPS
from manyroots.scheduler.swap_costs import PACK_PATIENCE, STAY_STEPS
from manyroots.scheduler.turns import AGING_STEPS
from manyroots.step import AdapterLoaded, LoadAdapter
from tests.scheduler_harness import SchedulerHarness, expected_tokens, submit

PATIENCE = 8
WITHIN = 8
"""Steps from the end of a patience to the first token: rest, load, begin, result."""


class Hot:
    """An engine whose places are all taken by adapters that are asked for without end."""

    def __init__(self, *, hot: int = 2, max_tokens: int = 200, **settings: Any) -> None:
        options: dict[str, Any] = {
            "max_loras": hot, "max_num_seqs": 8, "num_pages": 1024, "page_size": 4, "budget": 64,
            "adapter_patience_steps": PATIENCE,
        } | settings  # fmt: skip
        self.engine = SchedulerHarness(**options)
        self.names = [f"hot {number}" for number in range(hot)]
        self.digests = {name: self.load(name) for name in [*self.names, "rare", "rarer"]}
        self.submitted: dict[int, tuple[str | None, int]] = {}
        self.requests: dict[int, Submit] = {}
        self._next = 0
        self.max_tokens = max_tokens
        self.rows: list[int] = []

    def load(self, name: str) -> AdapterDigest:
        digest = AdapterDigest(name.encode())
        self.engine.scheduler.load_adapter(
            AdapterName(name), AdapterSpec(digest, 8, 100), path=name
        )
        return digest

    def ask(self, name: str | None, max_tokens: int, prompt_len: int = 3, priority: int = 0) -> int:
        number = self._next
        self._next += 1
        prompt = [number % 50, number // 50, *range(prompt_len - 2)]
        self.requests[number] = submit(
            number, prompt, max_tokens=max_tokens, adapter=name, priority=priority
        )
        self.submitted[number] = (name, max_tokens)
        self.engine.loop.handle(self.requests[number])
        return number

    def request(self, number: int) -> Submit:
        return self.requests[number]

    def step(self, *, keeps_asking: bool = True) -> None:
        """One step, before which as many of the hot ones wait as there are places."""
        while keeps_asking and self.engine.scheduler.stats().num_waiting < len(self.names):
            self.ask(self.names[self._next % len(self.names)], self.max_tokens)
        self.engine.step()
        scheduler = self.engine.scheduler
        self.rows.append(len(scheduler._rows.running))
        adapters = {r.group[0] for r in scheduler._rows.running}
        assert len(adapters - {None}) <= len(self.names), "more adapters run than may"

    def steps_until(self, number: int, most: int) -> int:
        for count in range(most):
            self.step()
            if self.engine.outputs.get(number):
                return count + 1
        raise AssertionError(f"request {number} had no token within {most} steps")

    def settle(self, num_steps: int = 3 * STAY_STEPS) -> None:
        for _ in range(num_steps):
            self.step()

    @property
    def num_resting(self) -> int:
        return self.engine.scheduler.stats().num_resting

    def check_tokens(self) -> None:
        """Everybody got what it gets alone."""
        for number, (name, _) in self.submitted.items():
            digest = None if name is None else self.digests[name]
            assert self.engine.tokens(number) == expected_tokens(self.request(number), digest)


@pytest.mark.parametrize("hot", [1, 2, 3])
@pytest.mark.parametrize("depth", [0, 1])
def test_l06_a_rare_adapters_first_token_does_not_depend_on_others_lengths(
    hot: int, depth: int
) -> None:
    """L06: all places are taken by requests that outlast the test; nobody's tokens change."""
    engine = Hot(hot=hot, max_tokens=120, depth=depth)
    engine.settle()
    rare = engine.ask("rare", 4)
    assert engine.steps_until(rare, PATIENCE + WITHIN) > PATIENCE
    engine.engine.run()
    assert engine.engine.last(rare).finish_reason is FinishReason.LENGTH
    engine.check_tokens()
    assert engine.engine.scheduler.stats().total_retractions == 0


def test_l07_the_fewest_rows_rest_and_only_for_as_long_as_the_guest_runs() -> None:
    """L07: of 5, 2 and 1 rows the one rests, keeps its pages, and goes on when the guest ended."""
    engine = Hot(hot=3, max_num_seqs=8)
    for name, count in (("hot 0", 5), ("hot 1", 2), ("hot 2", 1)):
        for _ in range(count):
            engine.ask(name, 120)
    for _ in range(2 * STAY_STEPS):
        engine.step(keeps_asking=False)
    rare = engine.ask("rare", 4)
    held = [engine.engine.scheduler.stats().num_held_pages]
    resting = []
    while rare not in engine.engine.outputs or engine.engine.last(rare).finish_reason is None:
        engine.step(keeps_asking=False)
        resting.append(engine.num_resting)
        held.append(engine.engine.scheduler.stats().num_held_pages)
    assert set(resting) == {0, 1}
    assert sum(resting) <= 4 + WITHIN
    assert min(held) >= held[0], "pages were given back"
    for _ in range(4):
        engine.step(keeps_asking=False)
    assert engine.num_resting == 0
    assert engine.rows[-1] == 8
    engine.engine.run()
    engine.check_tokens()


@pytest.mark.parametrize("num_spare_slots", [0, 2])
def test_l08_nobody_rests_for_one_that_is_less_important(num_spare_slots: int) -> None:
    """L08: of two that hold all places the less important rests, for its equals."""
    engine = Hot(hot=2, policy="priority", num_spare_slots=num_spare_slots)
    chief, other = engine.ask("hot 0", 150, priority=-2), engine.ask("hot 1", 150, priority=0)
    for _ in range(2 * STAY_STEPS):
        engine.step(keeps_asking=False)
    low = engine.ask("rare", 4, priority=1)
    for _ in range(3 * PATIENCE + WITHIN):
        engine.step(keeps_asking=False)
        assert engine.num_resting == 0
    assert not engine.engine.outputs.get(low), "both that run are more important"
    even = engine.ask("rarer", 4, priority=0)
    num_told = len(engine.engine.tokens(chief))
    for count in range(PATIENCE + 2 * WITHIN):
        engine.step(keeps_asking=False)
        assert len(engine.engine.tokens(chief)) > num_told + count - WITHIN, "the chief rests"
    assert engine.engine.tokens(even)
    engine.engine.run()
    assert len(engine.engine.tokens(other)) == 150
    engine.check_tokens()


def test_l07_new_requests_of_the_others_go_on_beginning_while_some_rest() -> None:
    """L07: nobody is held back but those that rest; those who end are followed by others."""
    engine = Hot(hot=2, max_tokens=12)
    engine.settle()
    engine.ask("rare", STAY_STEPS)
    while not engine.num_resting:
        engine.step()
    scheduler = engine.engine.scheduler
    resting = {request.group[0] for request in scheduler._resting}
    others = {d for name, d in engine.digests.items() if name in engine.names} - resting

    def of_others() -> set[int]:
        return {int(r.submit.request_id) for r in scheduler._rows.running if r.group[0] in others}

    [other] = [name for name, digest in engine.digests.items() if digest in others]
    for _ in range(12):
        engine.ask(other, 12)
    before, during, fewest = of_others(), set(), 8
    while engine.num_resting:
        engine.step()
        during |= of_others()
        fewest = min(fewest, len(of_others()))
    assert len(during - before) >= 2, "new ones did not begin"
    assert fewest >= len(before) - 1, "who ended was not followed by another"
    engine.engine.run()
    engine.check_tokens()


@pytest.mark.parametrize("chunk", [None, 2])
def test_l06_a_long_guest_and_those_that_rest_for_it_take_turns(chunk: int | None) -> None:
    """L06: a guest with a long prompt and a long output; nobody pauses for long but the guest, and
    all end with their own tokens."""
    engine = Hot(hot=1, max_tokens=100, max_num_seqs=4, chunk=chunk)
    engine.settle()
    rare = engine.ask("rare", 40, prompt_len=12)
    last: dict[int, tuple[int, int]] = {}
    longest = 0
    for step in range(6000):
        engine.step(keeps_asking=step < 300)
        for number, outputs in engine.engine.outputs.items():
            if len(outputs) != last.get(number, (0, 0))[0]:
                if number in last and number != rare:
                    longest = max(longest, step - last[number][1])
                last[number] = (len(outputs), step)
        if not engine.engine.loop.has_work:
            break
    assert 2 < longest <= STAY_STEPS + 2 * WITHIN
    engine.check_tokens()


def test_l06_several_rare_adapters_each_get_their_turn() -> None:
    """L06: two at once under cap 1."""
    engine = Hot(hot=1, max_tokens=100, max_num_seqs=4)
    engine.settle()
    first, second = engine.ask("rare", 4), engine.ask("rarer", 4)
    engine.steps_until(first, PATIENCE + WITHIN)
    # What the first one's turn cost the others is made up for before the second's.
    engine.steps_until(second, 600)
    engine.engine.run()
    engine.check_tokens()


def rested(**settings: Any) -> tuple[Hot, int]:
    """An engine of which some rest, and the number of one of those."""
    engine = Hot(**settings)
    engine.settle()
    engine.ask("rare", 12)
    while not engine.num_resting:
        engine.step()
    return engine, int(next(iter(engine.engine.scheduler._resting)).submit.request_id)


def test_l07_one_that_rests_can_be_aborted() -> None:
    """L07: its pages go, and nobody else notices."""
    engine, number = rested(max_tokens=60)
    count = engine.num_resting
    engine.engine.loop.handle(Abort([RequestId(number)]))
    engine.step()
    assert engine.num_resting == count - 1
    assert engine.engine.last(number).finish_reason is FinishReason.ABORT
    engine.engine.run()
    engine.submitted.pop(number)
    engine.check_tokens()
    assert engine.engine.cache.stats().planes[0].num_held == 0


def test_l07_the_adapter_of_one_that_rests_can_be_unloaded() -> None:
    """L07: its requests go on with it, after its weights have left the device."""
    engine, number = rested(max_tokens=60)
    name, _ = engine.submitted[number]
    assert name is not None
    engine.engine.scheduler.unload_adapter(AdapterName(name))
    for _ in range(400):
        engine.step(keeps_asking=False)
    engine.engine.run()
    engine.check_tokens()


def test_w10_those_that_rest_fail_where_their_adapter_can_not_be_loaded_again() -> None:
    """W10: with the reason; others go on."""
    is_broken = False

    def finish(loads: list[LoadAdapter]) -> list[AdapterLoaded]:
        error = "the disk is gone" if is_broken else None
        return [AdapterLoaded(load.load_id, error) for load in loads]

    engine, number = rested(max_tokens=60, finish_loads=finish)
    while engine.num_resting and engine.engine.scheduler._admission.turns.places.kept():
        engine.step()
    is_broken = True
    for _ in range(40):
        engine.step(keeps_asking=False)
    assert engine.engine.last(number).finish_reason is FinishReason.ERROR
    assert "the disk is gone" in (engine.engine.last(number).error or "")
    engine.engine.run()


@pytest.mark.parametrize("seed", range(12))
def test_l07_random_traffic_with_impatient_adapters(seed: int) -> None:
    """L07: little memory, chunks, aborts and failed steps while some rest: tokens are each
    one's own, or the beginning of them, and everything is given back."""
    rng = random.Random(f"resting {seed}")
    engine = Hot(
        hot=rng.choice([1, 2]), max_num_seqs=rng.choice([3, 6]), num_pages=rng.choice([40, 200]),
        chunk=rng.choice([None, 2]), adapter_patience_steps=rng.choice([0, 3, None]),
        depth=rng.choice([0, 1]), reuse=rng.random() < 0.8,
        num_spare_slots=rng.choice([0, 1, 2]),
    )  # fmt: skip
    names = [*engine.names, *engine.names, "rare", "rarer", None]
    for _ in range(40):
        number = engine.ask(rng.choice(names), rng.randint(1, 60), rng.randint(2, 20))
        for _ in range(rng.randint(0, 8)):
            engine.step(keeps_asking=False)
        if rng.random() < 0.1:
            engine.engine.loop.handle(Abort([RequestId(rng.randrange(number + 1))]))
        if rng.random() < 0.03:
            engine.engine.runner.fail_next = "planted"
    engine.engine.run()
    for number, (name, _) in engine.submitted.items():
        digest = None if name is None else engine.digests[name]
        request = engine.request(number)
        got, want = engine.engine.tokens(number), expected_tokens(request, digest)
        is_whole = engine.engine.last(number).finish_reason is FinishReason.LENGTH
        assert got == (want if is_whole else want[: len(got)])
    assert engine.engine.cache.stats().planes[0].num_held == 0
    assert engine.engine.scheduler.stats().total_rests > 0


# Visits: with slots to spare an adapter's prompts are computed at once


def visiting(**settings: Any) -> Hot:
    """With slots to spare and patience as it is by default."""
    return Hot(adapter_patience_steps=None, num_spare_slots=1, **settings)


@pytest.mark.parametrize("hot", [1, 2, 3])
@pytest.mark.parametrize("depth", [0, 1])
def test_l06_with_a_slot_to_spare_a_rare_adapter_waits_for_its_load_alone(
    hot: int, depth: int
) -> None:
    """L06: its weights come while others run; whoever makes place pauses for its prompt alone, and
    all places are taken by requests that outlast the test."""
    engine = visiting(hot=hot, max_tokens=120, depth=depth)
    engine.settle()
    before = {
        number: len(outputs) for number, outputs in engine.engine.outputs.items()
        if outputs[-1].finish_reason is None
    }  # fmt: skip
    count = engine.steps_until(engine.ask("rare", 40), WITHIN)
    for number, num_tokens in before.items():
        missed = num_tokens + count - len(engine.engine.outputs[number])
        assert missed <= 2 + depth, "more than the steps of the prompt were lost"
    engine.engine.run()
    engine.check_tokens()
    assert engine.engine.scheduler.stats().total_retractions == 0


def test_l06_a_visitor_goes_on_when_a_place_is_free_or_after_a_while() -> None:
    """L06: soon behind its first token it rests: nobody loses more for it; and it has turns, though
    all places are taken by requests without end."""
    engine = visiting(hot=2, max_tokens=250, max_num_seqs=4)
    engine.settle()
    rare = engine.ask("rare", 40)
    engine.steps_until(rare, WITHIN)
    for _ in range(STAY_STEPS):
        engine.step()
    assert engine.num_resting > 0
    count = len(engine.engine.tokens(rare))
    assert count < STAY_STEPS
    engine.settle(REST_STEPS + STAY_STEPS)
    assert len(engine.engine.tokens(rare)) > count


def test_l06_more_visitors_than_places_are_all_served_while_others_go_on() -> None:
    """L06: as many rest as there are places, then who comes waits in line, which moves."""
    engine = visiting(hot=2, max_tokens=30, max_num_seqs=6)
    names = [f"visitor {number}" for number in range(12)]
    engine.digests |= {name: engine.load(name) for name in names}
    engine.settle()
    asked = [engine.ask(name, 20) for name in names]
    most = 0
    for _ in range(3000):
        engine.step()
        most = max(most, len(engine.engine.scheduler._resting.groups()))
        if all(number in engine.engine.outputs for number in asked):
            break
    assert all(number in engine.engine.outputs for number in asked), "somebody starves"
    assert 2 <= most <= 5
    engine.engine.run()
    engine.check_tokens()


def test_l06_one_more_has_its_turn_where_those_that_rest_do_not_end() -> None:
    """L06: as many rest as there are places, with outputs that outlast the test."""
    engine = visiting(hot=1, max_tokens=300, max_num_seqs=4)
    engine.settle()
    engine.steps_until(engine.ask("rare", 300), WITHIN)
    engine.settle(4)
    assert engine.num_resting > 0
    engine.steps_until(engine.ask("rarer", 2), AGING_STEPS + WITHIN)


def test_l06_new_requests_of_an_adapter_that_rests_bring_it_back() -> None:
    """L06: they need not wait for a free place, and those that rest go on beside them."""
    engine = visiting(hot=2, max_tokens=400)
    engine.settle()
    first = engine.ask("rare", 60)
    engine.steps_until(first, WITHIN)
    for _ in range(2 * STAY_STEPS):
        engine.step()
    count = len(engine.engine.tokens(first))
    engine.steps_until(engine.ask("rare", 2), WITHIN)
    engine.settle(2)
    assert len(engine.engine.tokens(first)) > count


def test_l06_patience_is_what_a_load_takes_where_no_slot_is_to_spare() -> None:
    """L06: loads that take ten steps are waited for about as long before anybody rests, since the
    place stands idle for them; those that take one are not."""

    def wait(num_steps: int) -> int:
        under_way: dict[int, int] = {}

        def finish(loads: list[LoadAdapter]) -> list[AdapterLoaded]:
            for load in loads:
                under_way[load.load_id] = under_way.get(load.load_id, 0) + 1
            done = [load for load in loads if under_way[load.load_id] >= num_steps]
            return [AdapterLoaded(load.load_id, None) for load in done]

        engine = Hot(hot=2, max_tokens=400, adapter_patience_steps=None, finish_loads=finish)
        engine.settle(4 * STAY_STEPS)
        engine.ask("rare", 4)
        count = 0
        while not engine.num_resting:
            engine.step()
            count += 1
        return count

    assert wait(1) <= 6
    assert 9 <= wait(10) <= 16


@pytest.mark.parametrize("policy", ["fcfs", "pack", "fair"])
@pytest.mark.parametrize("rows", [2, 4, 8])
@pytest.mark.parametrize("max_tokens", [1, 2, 6, 17, 60])
def test_l06_outputs_of_any_length_leave_a_rare_adapter_its_turn(
    max_tokens: int, rows: int, policy: str
) -> None:
    """L06: with short ones all of an adapter may end at once and the next begin: its place was
    never free for long, and never old either."""
    hot = Hot(max_tokens=max_tokens, max_num_seqs=rows, policy=policy)
    hot.settle()
    patience = PATIENCE * (PACK_PATIENCE if policy == "pack" else 1)
    hot.steps_until(hot.ask("rare", 2), patience + 2 * STAY_STEPS + WITHIN)
