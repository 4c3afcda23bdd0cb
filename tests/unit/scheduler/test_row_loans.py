"""Rows that are lent: where a place is free and no row is, one request rests and not an adapter."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from manyroots.bench.adapter_turns import ENDLESS, Turns, TurnsCase
from manyroots.ids import AdapterDigest, AdapterName, RequestId, StepId
from manyroots.lora.spec import AdapterSpec
from manyroots.messages import Abort, FinishReason
from manyroots.scheduler.resting import Resting
from manyroots.scheduler.swap_costs import STAY_STEPS
from tests.scheduler_harness import SchedulerHarness, expected_tokens, submit

NUM_ROWS = 8
WITHIN = 8
"""Steps from a request to its first token: load, begin, result."""
LONG = 120


class Full:
    """Eight rows that some adapters fill, and places for more."""

    def __init__(
        self, names: Sequence[str | None], *, num_pages: int = 1024, depth: int = 1
    ) -> None:
        self.engine = SchedulerHarness(
            max_loras=4, num_spare_slots=1, max_num_seqs=NUM_ROWS, num_pages=num_pages,
            budget=64, adapter_patience_steps=None, depth=depth,
        )  # fmt: skip
        for name in ("a", "b", "rare", "rarer"):
            spec = AdapterSpec(AdapterDigest(name.encode()), 8, 100)
            self.engine.scheduler.load_adapter(AdapterName(name), spec, path=name)
        self.asked = [submit(n, [n, 1, 2], max_tokens=LONG, adapter=a) for n, a in enumerate(names)]
        for request in self.asked:
            self.engine.loop.handle(request)
        self.steps(2 * STAY_STEPS)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    def ask(self, name: str, max_tokens: int) -> int:
        number = len(self.asked)
        self.asked.append(submit(number, [number, 1, 2], max_tokens=max_tokens, adapter=name))
        self.engine.loop.handle(self.asked[-1])
        return number

    def steps_until(self, number: int) -> int:
        for count in range(1, 20 * WITHIN):
            self.engine.step()
            if self.engine.outputs.get(number):
                return count
        raise AssertionError("it had no token")

    def resting(self) -> list[str | None]:
        adapters = [request.group[0] for request in self.engine.scheduler._resting]
        return [None if adapter is None else adapter.decode() for adapter in adapters]

    def check(self) -> None:
        self.engine.run()
        for number, request in enumerate(self.asked):
            if self.engine.last(number).finish_reason is FinishReason.ABORT:
                continue
            digest = None if request.adapter is None else request.adapter.encode()
            assert self.engine.tokens(number) == expected_tokens(request, digest)
        assert self.engine.scheduler.stats().total_retractions == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_l06_who_lacks_a_row_alone_has_one_request_rest(depth: int) -> None:
    """L06, L07: of five and three rows one of the five rests, not the three; all rows run."""
    full = Full(["a"] * 5 + ["b"] * 3, depth=depth)
    rare = full.ask("rare", 4)
    assert full.steps_until(rare) <= WITHIN
    assert full.resting() == ["a"]
    assert len(full.engine.scheduler._rows.running) == NUM_ROWS
    full.steps(6)
    assert full.resting() == []
    full.check()


def test_l06_rows_of_the_base_model_are_lent_too() -> None:
    full = Full([None] * NUM_ROWS)
    assert full.steps_until(full.ask("rare", 4)) <= WITHIN
    assert full.resting() == [None]
    full.check()


def test_l07_a_row_that_is_lent_for_long_is_anothers_in_turn() -> None:
    """L07: the guest outlasts everybody; nobody's stream pauses for much longer than a stay."""
    full = Full(["a"] * NUM_ROWS)
    full.ask("rare", 3 * LONG)
    last: dict[int, tuple[int, int]] = {}
    paused: dict[int, int] = {}
    for step in range(LONG):
        full.engine.step()
        for number, outputs in full.engine.outputs.items():
            count, at = last.get(number, (0, step))
            if len(outputs) > count:
                paused[number] = max(paused.get(number, 0), step - at)
                last[number] = (len(outputs), step)
    assert max(paused.values()) <= STAY_STEPS + 4
    assert sum(pause > 4 for pause in paused.values()) >= 4, "the same one rests all the time"
    full.check()


def test_l06_two_that_lack_rows_have_one_each() -> None:
    full = Full(["a"] * NUM_ROWS)
    rare, rarer = full.ask("rare", 4), full.ask("rarer", 4)
    assert full.steps_until(rare) <= WITHIN
    if not full.engine.outputs.get(rarer):
        assert full.steps_until(rarer) <= WITHIN
    full.check()


def test_l07_one_that_has_lent_its_row_can_be_aborted() -> None:
    full = Full(["a"] * NUM_ROWS)
    full.steps_until(full.ask("rare", 12))
    [lender] = full.engine.scheduler._resting
    full.engine.loop.handle(Abort([RequestId(lender.submit.request_id)]))
    full.steps(2)
    assert full.resting() == []
    full.check()


@pytest.mark.parametrize("num_running", [1, 2, 3])
def test_l07_who_had_lent_a_row_goes_on_before_those_that_ran(num_running: int) -> None:
    """L07: an adapter may come for a step at a time; who has lent a row is not left out of each."""
    adapter = AdapterDigest(b"a")
    first, second, *running = Full(["a"] * NUM_ROWS).engine.scheduler._rows.running
    running, resting = running[:num_running], Resting()
    resting.lend(first, StepId(5))
    resting.lend(second, StepId(6))
    resting.add(adapter, running, StepId(9), place=0)
    since = {first: 5, second: 6}
    assert list(resting.by_adapter[adapter].requests.items()) == [
        *list(since.items())[:num_running],
        *((request, 9) for request in running[2:]),
    ]
    assert list(resting.loans.items()) == [
        *list(since.items())[num_running:],
        *((request, 9) for request in running[:2]),
    ]


class Waves(Turns):
    """Each adapter in its turn asks for as many as fill all rows."""

    def run(self) -> None:
        case, rng, number = self._case, self._rng, 0
        while self._step < case.num_steps:
            while len(self._outstanding) < case.num_outstanding:
                adapter = number // case.max_num_seqs % case.num_adapters
                self._outstanding.add(self.submit(adapter, rng.randint(*case.output_len)))
                number += 1
            if self._step % case.rare_every == case.rare_every // 2:
                self.submit(case.num_adapters, case.rare_output_len)
            self.step()


@pytest.mark.parametrize(
    ("num_places", "output_len"), [(2, (20, 200)), (3, (10, 60)), (4, (10, 60)), (4, (150, 150))]
)
def test_l06_waves_of_two_adapters_and_a_rare_third_leave_rows_in_use(
    num_places: int, output_len: tuple[int, int]
) -> None:
    """L06: at least 0.97 of the rows that run where nobody rests; 0.89 and 0.95 did while whole
    adapters rested for who lacked a row. With a place to spare the rare one's first token is there
    in a few steps, where it could take hundreds."""
    case = TurnsCase(
        "waves", NUM_ROWS, num_places, 2, 2 * NUM_ROWS, output_len, rare_every=80, num_steps=4000
    )
    turns, endless = Waves(case, None), Waves(case, ENDLESS)
    turns.run()
    endless.run()
    assert turns.figures()["mean_rows"] >= 0.97 * endless.figures()["mean_rows"]
    if num_places > 2:
        assert turns.figures()["rare_wait_max"] <= WITHIN
        assert turns.figures()["pause_max"] <= STAY_STEPS + 2


@pytest.mark.parametrize("num_places", [2, 3])
def test_l07_an_adapter_whose_last_row_changes_hands_keeps_its_place(num_places: int) -> None:
    """L07: while two requests of it take turns in one row it claims nobody else's place: others
    rested for it, and rows were lent without end."""
    engine = SchedulerHarness(
        max_loras=num_places, num_spare_slots=1, max_num_seqs=2, num_pages=1024, depth=0,
        adapter_patience_steps=None,
    )  # fmt: skip
    for name in ("a", "rare"):
        spec = AdapterSpec(AdapterDigest(name.encode()), 8, 100)
        engine.scheduler.load_adapter(AdapterName(name), spec, path=name)
    names = ["a", "a", "rare"]
    requests = [submit(n, [n, 1], max_tokens=LONG, adapter=name) for n, name in enumerate(names)]
    for request in requests[:2]:
        engine.loop.handle(request)
    engine.step()
    engine.loop.handle(requests[2])
    while len(engine.outputs.get(2, [])) < LONG:
        engine.step()
        assert not engine.scheduler._resting.by_adapter, "an adapter rests, with a place for each"
        assert len(engine.scheduler._resting.loans) <= 1
    assert engine.scheduler._resting.total_rests >= 4, "their row did not change hands"
    engine.run()
    for number, request in enumerate(requests):
        assert engine.tokens(number) == expected_tokens(request, names[number].encode())
