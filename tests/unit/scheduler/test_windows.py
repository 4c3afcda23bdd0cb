"""Layers that see a window, through the real scheduler and cache: what requests hold of them."""

from __future__ import annotations

import numpy as np
import pytest

from manyroots.cache.families.attention import attention_families
from manyroots.cache.planes import Capacity
from manyroots.cache.split import Demand, FamilyBytes, split
from manyroots.ids import RequestId, Row, StepId
from manyroots.runner.fake import FakeRunner
from manyroots.sampling import SamplingParams
from manyroots.step import Arrival, NewPages, Plan
from tests.helpers.scheduler_harness import SchedulerHarness, expected_tokens, submit

WINDOW, PAGE, BUDGET = 512, 16, 2048


def held(harness: SchedulerHarness) -> list[int]:
    return [plane.num_held for plane in harness.cache.stats().planes]


def peaks(harness: SchedulerHarness) -> list[list[int]]:
    """Run to the end; what was held after each step, by family."""
    found = []
    while harness.loop.has_work:
        harness.step()
        found.append(held(harness))
    return found


def test_f04_a_long_request_holds_a_quarter_of_what_full_attention_would_at_its_peak() -> None:
    """F04: 32,768 tokens, five layers of six with windows of 512, steps of 2048 tokens; prefill
    included, with one step planned ahead. The windows' pool is no larger than one request needs."""
    families = attention_families([None, WINDOW], page_size=PAGE, max_model_len=32768)
    demand = Demand(
        page_size=PAGE, max_model_len=32768, num_step_tokens=BUDGET, num_chunk_tokens=BUDGET
    )
    sizes = [FamilyBytes(family, n) for family, n in zip(families, (1, 5), strict=True)]
    least = sum(demand.least(size.family) * size.unit_bytes for size in sizes)
    capacities = split(sizes, least, demand)
    harness = SchedulerHarness(
        page_size=PAGE, budget=BUDGET, capacities=capacities, max_model_len=32768
    )  # fmt: skip
    request = submit(1, [n % 49 for n in range(32768 - 8)], max_tokens=8)
    harness.scheduler.submit(request)
    steps = peaks(harness)
    assert harness.tokens(1) == expected_tokens(request)
    full_attention = 32768 // PAGE * 6
    most = max(full + 5 * window for full, window in steps)
    assert most < 0.25 * full_attention
    assert max(full for full, _ in steps) == 32768 // PAGE
    assert steps[-1] == [0, 0]


@pytest.mark.parametrize("windows", [(None, 40), (40,), (24, 72), (None, 24, 72)])
@pytest.mark.parametrize("depth", [0, 1])
def test_f04_windows_give_pages_back_between_the_chunks_of_a_prompt_and_while_decoding(
    windows: tuple[int | None, ...], depth: int
) -> None:
    """F04: never more than the window and one step's tokens; then what decoding needs."""
    families = attention_families(windows, page_size=4, max_model_len=600)
    capacities = tuple(Capacity(family, 200) for family in families)
    harness = SchedulerHarness(
        page_size=4, budget=32, capacities=capacities, max_model_len=600, depth=depth
    )  # fmt: skip
    request = submit(1, [n % 47 for n in range(400)], max_tokens=60)
    harness.scheduler.submit(request)
    steps = peaks(harness)
    assert harness.tokens(1) == expected_tokens(request)
    for index, family in enumerate(families):
        in_prompt, decoding = family.most_needed(32), family.most_needed(1)
        if in_prompt is None or decoding is None:
            assert max(step[index] for step in steps) == -(-459 // 4)
            continue
        assert max(step[index] for step in steps) <= in_prompt
        assert max(step[index] for step in steps[20:]) <= decoding


@pytest.mark.parametrize("windows", [(None, 12), (12,), (6, 20), (None, 6, 20)])
def test_p07_turns_of_talks_under_pressure_give_what_they_give_alone(
    windows: tuple[int | None, ...],
) -> None:
    """P07: talks that take each other's pages, are retracted and go on from what is left; every
    page that is read is checked."""
    families = attention_families(windows, page_size=4, max_model_len=120)
    capacities = tuple(
        Capacity(family, 34 if family.most_needed(1) is None else 22) for family in families
    )
    harness = SchedulerHarness(page_size=4, budget=16, capacities=capacities, max_model_len=120)
    said = {talk: [talk * 7 % 50, *range(10)] for talk in range(5)}
    number = 0
    for _ in range(3):
        asked = {}
        for talk, prompt in said.items():
            number += 1
            asked[number] = (talk, submit(number, prompt, max_tokens=11))
            harness.scheduler.submit(asked[number][1])
        harness.run()
        for each, (talk, request) in asked.items():
            assert harness.tokens(each) == expected_tokens(request)
            said[talk] = [*request.prompt, *harness.tokens(each), 1, 2, 3]
    assert held(harness) == [0] * len(families)


@pytest.mark.parametrize("windows", [(None, 12), (12,), (None, 6, 20)])
def test_f04_requests_that_share_a_windows_pages_leave_them_together(
    windows: tuple[int | None, ...],
) -> None:
    """F04: several requests hold a page, and each gives up its own hold, in one step. Only then is
    the page without a holder."""
    families = attention_families(windows, page_size=4, max_model_len=120)
    harness = SchedulerHarness(
        page_size=4, capacities=tuple(Capacity(f, 120) for f in families), max_model_len=120
    )
    requests = [submit(i, list(range(30)), max_tokens=40) for i in range(4)]
    for request in requests:
        harness.scheduler.submit(request)
    steps = peaks(harness)
    for request in requests:
        assert harness.tokens(int(request.request_id)) == expected_tokens(request)
    for index, family in enumerate(families):
        most = family.most_needed(1)
        if most is not None:
            assert max(step[index] for step in steps[12:]) <= 4 * most
    assert steps[-1] == [0] * len(families)


def runner_with_pages(held_units: set[tuple[int, int]]) -> FakeRunner:
    """A runner with one sequence of 6 tokens on row 0, pages of 2, a window of 3 in the second
    family: computed but for the last."""
    families = attention_families([None, 3], page_size=2, max_model_len=100)
    runner = FakeRunner(
        page_size=2, vocab_size=9, families=families, is_held=lambda f, u: (f, u) in held_units
    )
    arrival = Arrival(
        Row(0), RequestId(1), np.arange(6, dtype=np.int32), 6, 0,
        (np.array([0, 1, 2], np.int32), np.array([5, 6, 7], np.int32)),
        SamplingParams(temperature=0), 0, (), None, 0,
    )  # fmt: skip
    runner.execute(step(1, 5, arrivals=(arrival,)))
    return runner


def step(
    number: int,
    num_tokens: int,
    *,
    arrivals: tuple[Arrival, ...] = (),
    new_pages: tuple[NewPages, ...] = (),
) -> Plan:
    return Plan(
        StepId(number), arrivals, new_pages,
        np.array([0], np.int32), np.array([num_tokens], np.int32), np.array([num_tokens == 1]),
    )  # fmt: skip


def test_r01_a_step_that_reads_a_page_that_was_given_back_raises() -> None:
    """R01: by family. Token 5 sees all pages of full attention, and of the window those of tokens 3
    to 5: its first page may be gone, its second may not."""
    everything = {(0, 0), (0, 1), (0, 2), (1, 5), (1, 6), (1, 7)}
    for gone, is_needed in (((1, 5), False), ((1, 6), True), ((0, 0), True), ((0, 2), True)):
        units = set(everything)
        runner = runner_with_pages(units)
        units.remove(gone)
        if is_needed:
            with pytest.raises(RuntimeError, match="was given back"):
                runner.execute(step(2, 1))
        else:
            runner.execute(step(2, 1))


def test_r01_several_families_grow_in_one_step_each_by_its_own_pages() -> None:
    """R01: a page that continues another family's table is not read as this one's."""
    units = {(0, 0), (0, 1), (0, 2), (0, 3), (1, 5), (1, 6), (1, 7), (1, 8)}
    row, place = np.array([0], np.int32), np.array([3], np.int32)
    grown = tuple(
        NewPages(family, row, place, np.array([page], np.int32))
        for family, page in ((0, 3), (1, 8))
    )
    runner = runner_with_pages(units)
    runner.execute(step(2, 1))
    runner.execute(step(3, 1, new_pages=grown))
    for missing in range(2):
        runner = runner_with_pages(units)
        runner.execute(step(2, 1))
        with pytest.raises((IndexError, RuntimeError)):
            runner.execute(step(3, 1, new_pages=grown[missing : missing + 1]))
