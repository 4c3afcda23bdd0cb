"""Places: who holds which, and the rows that go with them."""

from __future__ import annotations

from manyroots.ids import AdapterDigest, AdapterName, StepId
from manyroots.lora.limits import AdapterLimits
from manyroots.lora.registry import Hold
from manyroots.lora.residency import Residency
from manyroots.lora.spec import AdapterSpec
from manyroots.scheduler.places import GAP_STEPS, AdapterPlaces
from manyroots.scheduler.request import Request
from manyroots.scheduler.resting import Resting
from manyroots.step import AdapterLoaded
from tests.scheduler_harness import submit


class Ledger:
    """Adapters whose weights are on the device, and two places."""

    def __init__(self) -> None:
        self.adapters = Residency(AdapterLimits(max_loras=2, max_cpu_loras=0, num_spare_slots=2))
        self.resting = Resting()
        self.places = AdapterPlaces(2, self.adapters, self.resting)
        self.digests = [AdapterDigest(name.encode()) for name in "abcd"]
        for digest in self.digests:
            name = AdapterName(digest.decode())
            self.adapters.register(name, AdapterSpec(digest, 8, 100), path="")
            self.adapters.prepare([digest])
            for load in list(self.adapters.transfers.loads):
                self.adapters.acknowledge(AdapterLoaded(load, None))

    def run(self, digest: AdapterDigest, count: int, step: int) -> list[Hold]:
        holds = []
        for _ in range(count):
            self.places.begin(digest, StepId(step))
            holds.append(self.adapters.acquire(AdapterName(digest.decode())))
            self.adapters.seat(holds[-1])
        self.places.note_running(StepId(step))
        return holds

    def rest(self, digest: AdapterDigest, holds: list[Hold], step: int) -> None:
        place = self.places.of(digest)
        assert place is not None
        requests = []
        for number, hold in enumerate(holds):
            self.adapters.unseat(hold, is_in_flight=False)
            asked = submit(number, [1, 2], adapter=digest.decode())
            requests.append(Request(asked, number, StepId(step), hold, 4))
        self.resting.add(digest, requests, StepId(step), place.number)


def test_l07_who_was_back_and_has_no_row_any_more_has_no_place_either() -> None:
    """L07: the last of them that ran has ended before the others had their tokens: they are away,
    and have the next place."""
    ledger = Ledger()
    a, *_ = ledger.digests
    ledger.rest(a, ledger.run(a, 2, 1), 20)
    [place] = [p for p in ledger.places.all if p.holder == a]
    ledger.places.keep(place, a, 16)
    assert ledger.places.away() == []
    [back] = ledger.run(a, 1, 21)
    assert ledger.places.away() == []
    ledger.adapters.unseat(back, is_in_flight=False)
    assert [rested.adapter for rested in ledger.places.away()] == [a]
    assert len(ledger.places.free()) == 2


def test_l07_rows_go_with_places() -> None:
    """L07: of those that rest, the largest in each place has its rows; the guest may use them, and
    nobody else."""
    ledger = Ledger()
    a, b, c, *_ = ledger.digests
    ledger.rest(a, ledger.run(a, 5, 1), 20)
    place = ledger.places.all[0]
    ledger.places.keep(place, b, 16)
    ledger.run(b, 2, 20)
    ledger.run(c, 3, 20)
    assert ledger.places.num_kept_rows() == 3
    assert ledger.places.num_rows_of_others(b) == 0
    assert ledger.places.num_rows_of_others(c) == ledger.places.num_rows_of_others(None) == 3
    [rested] = ledger.resting.groups()
    assert ledger.places.have_rows(rested, place, num_free_rows=3)
    assert ledger.places.have_rows(rested, ledger.places.all[1], num_free_rows=2)
    assert not ledger.places.have_rows(rested, ledger.places.all[1], num_free_rows=1)


def test_l06_an_adapter_that_runs_again_within_a_few_steps_has_kept_its_place() -> None:
    """L06: else one whose requests are short would never have had it for long."""
    ledger = Ledger()
    a, *_ = ledger.digests
    [hold] = ledger.run(a, 1, 1)
    [place] = [p for p in ledger.places.all if p.holder == a]
    ledger.adapters.unseat(hold, is_in_flight=False)
    [hold] = ledger.run(a, 1, 1 + GAP_STEPS)
    assert place.since == 1
    ledger.adapters.unseat(hold, is_in_flight=False)
    ledger.run(a, 1, 2 + 2 * GAP_STEPS)
    assert place.since == 2 + 2 * GAP_STEPS
