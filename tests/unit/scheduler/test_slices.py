"""Adapter time slices: what requests see where more adapters are wanted than may run; audited."""

from __future__ import annotations

import random
from typing import Any

import pytest

from manyroots.ids import AdapterDigest, AdapterName, RequestId
from manyroots.lora.spec import AdapterSpec
from manyroots.messages import Abort, FinishReason, Submit
from manyroots.scheduler.policies.pack import PATIENCE_STEPS
from manyroots.scheduler.slices import OVERDUE_STEPS, QUANTUM_LOADS_ALONE, QUANTUM_STEPS
from manyroots.step import AdapterLoaded, LoadAdapter
from tests.helpers.scheduler_harness import SchedulerHarness, expected_tokens, submit

WITHIN = 8
"""Steps from the end of a quantum to the first token: pause, load, begin, result."""
LONG_QUANTUM = 2 * QUANTUM_LOADS_ALONE
"""Where nothing can be loaded ahead and a load takes two steps."""


class Hot:
    """An engine in which adapters that are asked for without end are all that may run."""

    def __init__(self, *, hot: int = 2, max_tokens: int = 200, **settings: Any) -> None:
        options: dict[str, Any] = {
            "max_loras": hot, "max_num_seqs": 8, "num_pages": 1024, "page_size": 4, "budget": 64,
        } | settings  # fmt: skip
        self.engine = SchedulerHarness(**options)
        self.names = [f"hot {number}" for number in range(hot)]
        self.digests = {name: self.load(name) for name in [*self.names, "rare", "rarer"]}
        self.submitted: dict[int, str | None] = {}
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
        self.submitted[number] = name
        self.engine.loop.handle(self.requests[number])
        return number

    def step(self, *, keeps_asking: bool = True) -> None:
        """One step, before which as many of the hot ones wait as may run."""
        while keeps_asking and self.engine.scheduler.stats().num_waiting < len(self.names):
            self.ask(self.names[self._next % len(self.names)], self.max_tokens)
        self.engine.step()
        scheduler = self.engine.scheduler
        self.rows.append(len(scheduler._rows.running))
        adapters = {r.group[0] for r in scheduler._rows.running}
        assert len(adapters - {None}) <= len(self.names), "more adapters run than may"

    def steps_until(self, number: int, most: int, *, keeps_asking: bool = True) -> int:
        for count in range(most):
            self.step(keeps_asking=keeps_asking)
            if self.engine.outputs.get(number):
                return count + 1
        raise AssertionError(f"request {number} had no token within {most} steps")

    def steps(self, num_steps: int, *, keeps_asking: bool = True) -> None:
        for _ in range(num_steps):
            self.step(keeps_asking=keeps_asking)

    @property
    def num_paused(self) -> int:
        return self.engine.scheduler.stats().num_paused

    def paused(self) -> list[str | None]:
        requests = self.engine.scheduler.slices.paused_requests()
        return [request.submit.adapter for request in requests]

    def check_tokens(self) -> None:
        """Every request got what it gets alone."""
        for number, name in self.submitted.items():
            digest = None if name is None else self.digests[name]
            if self.engine.last(number).finish_reason is not FinishReason.ABORT:
                want = expected_tokens(self.requests[number], digest)
                assert self.engine.tokens(number) == want

    def longest_pauses(self, num_steps: int, *, keeps_asking: bool) -> dict[int, int]:
        """Of each request that had a token before: the most steps without one, while it ran on."""
        last: dict[int, tuple[int, int]] = {}
        pauses: dict[int, int] = {}
        for step in range(num_steps):
            self.step(keeps_asking=keeps_asking)
            for number, outputs in self.engine.outputs.items():
                count, at = last.get(number, (len(outputs), step))
                if len(outputs) > count:
                    pauses[number] = max(pauses.get(number, 0), step - at)
                if len(outputs) > count or number not in last:
                    last[number] = (len(outputs), step)
        return pauses


@pytest.mark.parametrize("hot", [1, 2, 3])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("spare", [0, 1])
def test_l06_a_rare_adapters_first_token_does_not_depend_on_others_lengths(
    hot: int, depth: int, spare: int
) -> None:
    """L06: requests that outlast the test hold all that may run; no request's tokens change."""
    engine = Hot(hot=hot, max_tokens=120, depth=depth, num_spare_slots=spare)
    engine.steps(LONG_QUANTUM + 4)
    rare = engine.ask("rare", 4)
    engine.steps_until(rare, WITHIN)
    engine.engine.run()
    engine.check_tokens()
    assert engine.engine.scheduler.stats().total_retractions == 0


@pytest.mark.parametrize("spare", [0, 1])
def test_l06_a_newcomer_waits_for_one_quantum_at_most(spare: int) -> None:
    """L06: it comes when the others have just begun."""
    engine = Hot(hot=2, max_tokens=300, num_spare_slots=spare)
    engine.steps(3)
    quantum = QUANTUM_STEPS if spare else LONG_QUANTUM
    count = engine.steps_until(engine.ask("rare", 4), quantum + WITHIN)
    assert count > quantum - 4, "a running entry lost its quantum"


def test_l07_the_fewest_rows_are_paused_and_only_while_the_other_runs() -> None:
    """L07: of 5, 2 and 1 rows the one is paused, keeps its pages, and resumes when the other has
    ended."""
    engine = Hot(hot=3, num_spare_slots=1)
    for name, count in (("hot 0", 5), ("hot 1", 2), ("hot 2", 1)):
        for _ in range(count):
            engine.ask(name, 120)
    engine.steps(2 * QUANTUM_STEPS, keeps_asking=False)
    rare = engine.ask("rare", 4)
    held = [engine.engine.scheduler.stats().num_held_pages]
    paused: list[str | None] = []
    while rare not in engine.engine.outputs or engine.engine.last(rare).finish_reason is None:
        engine.step(keeps_asking=False)
        paused += engine.paused()
        held.append(engine.engine.scheduler.stats().num_held_pages)
    assert set(paused) == {"hot 2"}
    assert len(paused) <= 4 + WITHIN
    assert min(held) >= held[0], "pages were given back"
    engine.steps(4, keeps_asking=False)
    assert engine.num_paused == 0
    assert engine.rows[-1] == 8
    engine.engine.run()
    engine.check_tokens()


@pytest.mark.parametrize("spare", [0, 2])
def test_l08_a_less_important_entry_displaces_no_more_important_one(spare: int) -> None:
    """L08: of two that run the less important is paused, for an equal."""
    engine = Hot(hot=2, policy="priority", num_spare_slots=spare)
    chief, other = engine.ask("hot 0", 250, priority=-2), engine.ask("hot 1", 250, priority=0)
    engine.steps(LONG_QUANTUM + 4, keeps_asking=False)
    low = engine.ask("rare", 4, priority=1)
    for _ in range(OVERDUE_STEPS // 2):
        engine.step(keeps_asking=False)
        assert engine.num_paused == 0
    assert not engine.engine.outputs.get(low), "both that run are more important"
    even = engine.ask("rarer", 4, priority=0)
    num_told = len(engine.engine.tokens(chief))
    for count in range(2 * WITHIN):
        engine.step(keeps_asking=False)
        assert len(engine.engine.tokens(chief)) > num_told + count - 3, "the chief is paused"
    assert engine.engine.tokens(even)
    engine.engine.run()
    assert len(engine.engine.tokens(other)) == 250
    engine.check_tokens()


def test_l07_new_requests_of_the_others_begin_while_some_are_paused() -> None:
    """L07: where requests of a running adapter end, its next ones begin."""
    engine = Hot(hot=2, max_tokens=12, num_spare_slots=1)
    engine.steps(3 * QUANTUM_STEPS)
    engine.ask("rare", QUANTUM_STEPS)
    while not engine.num_paused:
        engine.step()
    [paused] = set(engine.paused())
    [other] = [name for name in engine.names if name != paused]
    for _ in range(12):
        engine.ask(other, 12)
    running = engine.engine.scheduler._rows.running

    def of_other() -> set[int]:
        return {int(r.submit.request_id) for r in running if r.submit.adapter == other}

    before, during, fewest = of_other(), set(), 8
    while engine.num_paused:
        engine.step()
        during |= of_other()
        fewest = min(fewest, len(of_other()))
    assert len(during - before) >= 2, "new ones did not begin"
    assert fewest >= len(before) - 1, "the next did not begin in a row that was free"
    engine.engine.run()
    engine.check_tokens()


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("spare", [0, 1])
def test_l06_a_long_guest_and_the_others_share_their_time(chunk: int | None, spare: int) -> None:
    """L06, L07: a guest with a long prompt and a long output; no stream but the guest's pauses for
    more than the guest's quantum, and all end with their own tokens."""
    engine = Hot(hot=1, max_tokens=100, max_num_seqs=4, chunk=chunk, num_spare_slots=spare)
    engine.steps(LONG_QUANTUM)
    rare = engine.ask("rare", 90, prompt_len=12)
    pauses = engine.longest_pauses(600, keeps_asking=True)
    quantum = QUANTUM_STEPS if spare else LONG_QUANTUM
    longest = max(pause for number, pause in pauses.items() if number != rare)
    assert 2 < longest <= quantum + WITHIN
    engine.engine.run()
    engine.check_tokens()


def test_l07_a_pause_ends_after_128_steps_and_a_quantum() -> None:
    """L07: hot adapters with more rows run without end, and the rare one is overdue again and
    again."""
    engine = Hot(hot=2, max_tokens=250, max_num_seqs=4, num_spare_slots=1)
    engine.steps(3 * QUANTUM_STEPS)
    rare = engine.ask("rare", 100)
    pauses = engine.longest_pauses(700, keeps_asking=True)
    assert OVERDUE_STEPS <= pauses[rare] <= OVERDUE_STEPS + 2 * QUANTUM_STEPS
    others = [pause for number, pause in pauses.items() if number != rare]
    assert max(others) <= QUANTUM_STEPS + 4, "those with more rows paused as long"


def test_l06_endless_newcomers_starve_no_paused_entry() -> None:
    """L06, L07: a new adapter in every fourth step, and answers that are longer than a quantum."""
    engine = Hot(hot=2, max_tokens=60, max_num_seqs=6, num_spare_slots=1)
    names = [f"guest {number}" for number in range(30)]
    engine.digests |= {name: engine.load(name) for name in names}
    engine.steps(3 * QUANTUM_STEPS)
    asked = []
    for name in names:
        asked.append(engine.ask(name, 30))
        engine.steps(4)
    engine.engine.run()
    engine.check_tokens()
    assert all(number in engine.engine.outputs for number in asked)


def test_l06_new_requests_of_a_paused_adapter_bring_it_back() -> None:
    """L06: they need not wait until it is overdue, and its paused requests resume beside them."""
    engine = Hot(hot=2, max_tokens=400, num_spare_slots=1)
    engine.steps(3 * QUANTUM_STEPS)
    first = engine.ask("rare", 60)
    engine.steps_until(first, WITHIN)
    engine.steps(2 * QUANTUM_STEPS)
    assert engine.paused() == ["rare"]
    count = len(engine.engine.tokens(first))
    engine.steps_until(engine.ask("rare", 2), WITHIN)
    engine.steps(2)
    assert len(engine.engine.tokens(first)) > count


def test_l06_several_rare_adapters_are_served_one_after_the_other() -> None:
    """L06: two at once where one may run."""
    engine = Hot(hot=1, max_tokens=100, max_num_seqs=4)
    engine.steps(LONG_QUANTUM)
    first, second = engine.ask("rare", 4), engine.ask("rarer", 4)
    engine.steps_until(first, WITHIN)
    engine.steps_until(second, LONG_QUANTUM + WITHIN)
    engine.engine.run()
    engine.check_tokens()


def with_paused(**settings: Any) -> tuple[Hot, int]:
    """An engine with paused requests, and the number of one of them."""
    engine = Hot(**settings)
    engine.steps(LONG_QUANTUM + 4)
    engine.ask("rare", 12)
    while not engine.num_paused:
        engine.step()
    request = engine.engine.scheduler.slices.paused_requests()[0]
    return engine, int(request.submit.request_id)


def test_l07_a_paused_request_can_be_aborted() -> None:
    """L07: its pages go, and no other request notices."""
    engine, number = with_paused(max_tokens=60)
    count = engine.num_paused
    engine.engine.loop.handle(Abort([RequestId(number)]))
    engine.step()
    assert engine.num_paused == count - 1
    assert engine.engine.last(number).finish_reason is FinishReason.ABORT
    engine.engine.run()
    engine.check_tokens()
    assert engine.engine.cache.stats().planes[0].num_held == 0


def test_l07_the_adapter_of_a_paused_request_can_be_unloaded() -> None:
    """L07: its requests resume with it, after its weights have left the device."""
    engine, number = with_paused(max_tokens=60)
    name = engine.submitted[number]
    assert name is not None
    engine.engine.scheduler.unload_adapter(AdapterName(name))
    engine.engine.run()
    engine.check_tokens()


def test_w10_paused_requests_fail_where_their_adapter_can_not_be_loaded_again() -> None:
    """W10: with the reason; others run on."""
    is_broken = False

    def finish(loads: list[LoadAdapter]) -> list[AdapterLoaded]:
        error = "the disk is gone" if is_broken else None
        return [AdapterLoaded(load.load_id, error) for load in loads]

    engine, number = with_paused(max_tokens=160, finish_loads=finish)
    while not any(r.submit.adapter == "rare" for r in engine.engine.scheduler._rows.running):
        engine.step()
    is_broken = True
    engine.steps(40, keeps_asking=False)
    assert engine.engine.last(number).finish_reason is FinishReason.ERROR
    assert "the disk is gone" in (engine.engine.last(number).error or "")
    engine.engine.run()


def test_l03_an_entry_that_lacks_pages_leaves_its_time_to_another() -> None:
    """L03: one adapter may run; a's prompt does not fit beside the base model's, b's does, and no
    step is lost for it."""
    engine = Hot(hot=1, num_pages=24, page_size=4, max_num_seqs=4, num_spare_slots=1)
    base = engine.ask(None, 40, prompt_len=40)
    engine.steps(3, keeps_asking=False)
    large = engine.ask("rare", 4, prompt_len=60)
    small = engine.ask("rarer", 3)
    engine.steps_until(small, WITHIN, keeps_asking=False)
    assert not engine.engine.outputs.get(large)
    engine.engine.run()
    engine.check_tokens()
    assert len(engine.engine.tokens(base)) == 40


def test_l03_entries_that_lack_pages_do_not_replace_each_others_weights() -> None:
    """L03: the base model holds the pages that four adapters with two slots wait for. Each is
    loaded when it is looked at, and then stays, instead of a load in every step."""
    engine = Hot(hot=2, num_pages=24, page_size=4, max_num_seqs=4)
    base = engine.ask(None, 48, prompt_len=40)
    engine.steps(3, keeps_asking=False)
    large = [engine.ask(name, 2, prompt_len=60) for name in engine.digests]
    engine.steps(36, keeps_asking=False)
    assert not any(engine.engine.outputs.get(number) for number in large)
    stats = engine.engine.scheduler.stats().adapters
    assert stats is not None
    num_loads = stats.total_loads_from_host + stats.total_loads_from_storage
    assert num_loads <= 8
    engine.engine.run()
    engine.check_tokens()
    assert len(engine.engine.tokens(base)) == 48


@pytest.mark.parametrize("seed", range(6))
def test_l07_random_traffic_of_more_adapters_than_may_run(seed: int) -> None:
    """L07: little memory, chunks, aborts and failed steps while some are paused: tokens are each
    request's own, or the beginning of them, and everything is given back."""
    rng = random.Random(f"resting {seed}")
    engine = Hot(
        hot=rng.choice([1, 2]), max_num_seqs=rng.choice([3, 6]), num_pages=rng.choice([40, 200]),
        chunk=rng.choice([None, 2]), adapter_quantum_steps=rng.choice([1, 3, None]),
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
    for number, name in engine.submitted.items():
        digest = None if name is None else engine.digests[name]
        got, want = engine.engine.tokens(number), expected_tokens(engine.requests[number], digest)
        is_whole = engine.engine.last(number).finish_reason is FinishReason.LENGTH
        assert got == (want if is_whole else want[: len(got)])
    assert engine.engine.cache.stats().planes[0].num_held == 0
    assert engine.engine.scheduler.stats().total_pauses > 0


POLICIES = ("fcfs", "pack", "fair")
LENGTHS = (1, 2, 6, 17, 60)


@pytest.mark.parametrize(
    ("max_tokens", "rows", "policy"),
    # Each length with each policy, and each policy with each number of rows: 15 of 45.
    [
        (length, (2, 4, 8)[(number + policy) % 3], POLICIES[policy])
        for number, length in enumerate(LENGTHS)
        for policy in range(3)
    ],
)
def test_l06_outputs_of_any_length_leave_a_rare_adapter_its_time(
    max_tokens: int, rows: int, policy: str
) -> None:
    """L06: short ones of an adapter may all end at once while the next begin."""
    hot = Hot(max_tokens=max_tokens, max_num_seqs=rows, policy=policy)
    hot.steps(LONG_QUANTUM)
    patience = PATIENCE_STEPS if policy == "pack" else 0
    hot.steps_until(hot.ask("rare", 2), patience + LONG_QUANTUM + WITHIN)


# Rows: all that are wanted may run, and one has every row


def with_rows_of(names: list[str | None], **settings: Any) -> Hot:
    """Eight rows that some adapters fill, and up to four adapters may run."""
    engine = Hot(hot=4, num_spare_slots=1, **settings)
    for name in names:
        engine.ask(name, 200)
    engine.steps(2 * QUANTUM_STEPS, keeps_asking=False)
    return engine


@pytest.mark.parametrize("depth", [0, 1])
def test_l06_an_entry_without_a_row_takes_one_of_the_entry_with_the_most(depth: int) -> None:
    """L06, L07: of five and three rows one of the five is paused; all rows run."""
    engine = with_rows_of(["hot 0"] * 5 + ["hot 1"] * 3, depth=depth)
    engine.steps_until(engine.ask("rare", 4), WITHIN, keeps_asking=False)
    assert engine.paused() == ["hot 0"]
    assert engine.rows[-1] == 8
    engine.steps(6, keeps_asking=False)
    assert engine.num_paused == 0
    engine.engine.run()
    engine.check_tokens()


def test_l06_the_base_model_gives_up_a_row_too() -> None:
    engine = with_rows_of([None] * 8)
    engine.steps_until(engine.ask("rare", 4), WITHIN, keeps_asking=False)
    assert engine.paused() == [None]
    engine.engine.run()
    engine.check_tokens()


def test_l06_two_entries_without_a_row_take_one_each() -> None:
    engine = with_rows_of(["hot 0"] * 8)
    rare, rarer = engine.ask("rare", 9), engine.ask("rarer", 9)
    engine.steps(WITHIN, keeps_asking=False)
    assert {rare, rarer} <= engine.engine.outputs.keys()
    assert engine.paused() == ["hot 0", "hot 0"]
    engine.engine.run()
    engine.check_tokens()


def test_l07_a_request_whose_row_was_taken_has_one_after_128_steps() -> None:
    """L07: the guest outlasts all others, which take turns at being paused."""
    engine = with_rows_of(["hot 0"] * 8, num_pages=2048)
    engine.max_tokens = 600
    guest = engine.ask("rare", 600)
    for _ in range(12):
        engine.ask("hot 0", 500)
    pauses = engine.longest_pauses(500, keeps_asking=False)
    assert max(pauses.values()) <= OVERDUE_STEPS + 4
    assert pauses.get(guest, 0) <= OVERDUE_STEPS + 4


@pytest.mark.parametrize("rows", [1, 2])
def test_l06_more_adapters_than_rows_share_them(rows: int) -> None:
    """L06: each has one long request, and rows for some of them."""
    engine = Hot(hot=3, max_num_seqs=rows, num_spare_slots=1)
    asked = [engine.ask(name, 80) for name in engine.names]
    for number in asked:
        if number not in engine.engine.outputs:
            engine.steps_until(number, 3 * (QUANTUM_STEPS + WITHIN), keeps_asking=False)
    engine.engine.run()
    engine.check_tokens()
