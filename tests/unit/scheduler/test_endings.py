"""However an answer ends, the next turn finds what was computed of it (H05).

Through the scheduler and the fake runner, which raises where a step reads what belongs to other
tokens; every step is audited.
"""

from __future__ import annotations

import pytest

from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.planes import Capacity
from manyroots.ids import RequestId
from tests.helpers.cache_harness import recurrent, window
from tests.helpers.scheduler_harness import SchedulerHarness, expected_tokens, submit

PAGE = 4
PROMPT = [1, 2, 3, 4, 5, 6]
NEXT = [7, 8, 9]
FULL = Capacity(FULL_ATTENTION, 64)
WINDOW = Capacity(window(6, PAGE), 64)
FAMILIES = {
    "full": (FULL,),
    "window": (FULL, WINDOW),
    "state": (FULL, Capacity(recurrent(100), 16)),
    "window and state": (FULL, WINDOW, Capacity(recurrent(100), 16)),
}
LENGTHS = range(5, 5 + PAGE)
"""Of answers: ends at every place in a page."""
STEPS_AHEAD = [("full", 1), ("window", 1), ("state", 0), ("state", 1), ("window and state", 2)]


def found(engine: SchedulerHarness, number: int, prompt: list[int]) -> int:
    """What a request finds; its tokens are those of a cold engine."""
    request = submit(number, prompt, max_tokens=3)
    engine.scheduler.submit(request)
    engine.run()
    assert engine.tokens(number) == expected_tokens(request)
    return engine.last(number).num_cached_tokens


def answer(length: int) -> list[int]:
    return expected_tokens(submit(1, PROMPT, max_tokens=length))


def run_until(engine: SchedulerHarness, num_tokens: int) -> None:
    while not engine.outputs.get(1) or len(engine.tokens(1)) < num_tokens:
        engine.step()


def after_length(families: str, depth: int, length: int) -> int:
    engine = SchedulerHarness(capacities=FAMILIES[families], depth=depth)
    engine.scheduler.submit(submit(1, PROMPT, max_tokens=length))
    engine.run()
    return found(engine, 2, [*PROMPT, *answer(length), *NEXT])


@pytest.mark.parametrize(("families", "depth"), STEPS_AHEAD)
def test_h05_an_abort_keeps_as_much_as_an_end_by_length(families: str, depth: int) -> None:
    """H05: the next turn has the tokens that the caller had seen when it went away or when its text
    had a stop string. The engine has computed up to a page more by then, which differs."""
    for length in LENGTHS:
        least = after_length(families, depth, length)
        for num_unseen in (0, 1, PAGE - 1):
            engine = SchedulerHarness(capacities=FAMILIES[families], depth=depth)
            engine.scheduler.submit(submit(1, PROMPT, max_tokens=40))
            run_until(engine, length + num_unseen)
            engine.scheduler.abort(RequestId(1))
            engine.run()
            assert found(engine, 2, [*PROMPT, *answer(length), *NEXT]) >= least


@pytest.mark.parametrize("families", FAMILIES)
def test_h05_a_stop_token_keeps_as_much_as_an_end_by_length(families: str) -> None:
    """H05: the step that is under way when the stop token comes may save a state."""
    for length in LENGTHS:
        said = answer(length)
        if said[-1] in said[:-1]:
            continue  # it would stop earlier
        engine = SchedulerHarness(capacities=FAMILIES[families])
        engine.scheduler.submit(submit(1, PROMPT, max_tokens=40, stop_ids=(said[-1],)))
        engine.run()
        assert engine.tokens(1) == said
        assert found(engine, 2, [*PROMPT, *said, *NEXT]) >= after_length(families, 1, length)


@pytest.mark.parametrize(("families", "depth"), STEPS_AHEAD)
def test_h05_what_was_computed_past_an_abort_is_kept_under_its_own_tokens(
    families: str, depth: int
) -> None:
    """H05: launched steps go on past the abort. A request with the same tokens finds all whole
    pages that they filled, since their states and their sampled tokens belong together."""
    for length in LENGTHS:
        engine = SchedulerHarness(capacities=FAMILIES[families], depth=depth)
        engine.scheduler.submit(submit(1, PROMPT, max_tokens=40))
        run_until(engine, length)
        engine.scheduler.abort(RequestId(1))
        engine.run()
        num_computed = len(PROMPT) + length - 1 + depth
        prompt = [*PROMPT, *answer(40)]
        assert found(engine, 2, prompt) == num_computed // PAGE * PAGE


@pytest.mark.parametrize(("families", "depth"), STEPS_AHEAD[2:])
def test_h05_a_retracted_request_goes_on_from_its_newest_state(families: str, depth: int) -> None:
    """H05: a more important arrival takes the only row; what gave way computes less than a
    page again, unless the step under way saved its state: then less than two."""
    for length in LENGTHS:
        engine = SchedulerHarness(
            capacities=FAMILIES[families], depth=depth, max_num_seqs=1, policy="priority"
        )
        first = submit(1, PROMPT, max_tokens=24, priority=1)
        engine.scheduler.submit(first)
        run_until(engine, length)
        engine.scheduler.submit(submit(2, [41, 42, 43], max_tokens=1))
        engine.run()
        assert engine.scheduler.stats().total_retractions == 1
        assert engine.tokens(1) == expected_tokens(first)
        num_alone = len(PROMPT) + 23 + 3
        num_again = engine.scheduler.stats().total_step_tokens - num_alone
        assert num_again < 2 * PAGE + depth


def test_h05_states_that_answers_have_passed_never_keep_a_request_out() -> None:
    """H05: with two states for each row, all rows run at once."""
    engine = SchedulerHarness(capacities=(FULL, Capacity(recurrent(100), 8)), max_num_seqs=4)
    requests = [submit(n, [n, *PROMPT], max_tokens=40) for n in range(1, 5)]
    for request in requests:
        engine.scheduler.submit(request)
        for _ in range(6):
            engine.step()
    assert engine.scheduler.stats().num_running == 4
    engine.run()
    for number, request in enumerate(requests, 1):
        assert engine.tokens(number) == expected_tokens(request)
