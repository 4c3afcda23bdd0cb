"""Rows as columns: what decoding costs the scheduler nothing must still come out right."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from manyroots.ids import Row, StepId
from manyroots.messages import ErrorKind, FinishReason, Submit
from manyroots.scheduler.plan_builder import PlanBuilder
from manyroots.step import Plan, RowFault
from manyroots.structured_outputs import StructuredOutputsParams
from tests.helpers.scheduler_harness import SchedulerHarness, expected_tokens, submit


def plan_of(engine: SchedulerHarness) -> Plan:
    plan = engine.scheduler.schedule()
    assert plan is not None
    return plan


def next_victim(engine: SchedulerHarness) -> int:
    """The request that a step would retract first before it has placed any row."""
    builder = PlanBuilder(StepId(99), 32, engine.scheduler._rows)
    anyone = next(iter(engine.scheduler._rows.running))
    victim = engine.scheduler._victims.for_running(anyone, builder)
    assert victim is not None
    return int(victim.submit.request_id)


def test_the_request_that_is_cheapest_to_resume_is_retracted_first() -> None:
    """With pages of 4, these have 1, 0 and 2 tokens after their last published page."""
    engine = SchedulerHarness(depth=0, page_size=4)
    for number, length in enumerate([9, 8, 10]):
        engine.loop.handle(submit(number, [number] * length, max_tokens=9))
    engine.step()
    assert next_victim(engine) == 1
    engine.step()  # 2, 1 and 3
    assert next_victim(engine) == 1
    engine.step()  # 3, 2 and 0: the last has filled a page
    assert next_victim(engine) == 2


@pytest.mark.parametrize(
    ("num_pages", "max_tokens", "num_first"), [(9, 4, 3), (2, 4, 2), (9, 1, 2), (9, 2, 3)]
)
def test_a_full_prompt_gets_its_next_tokens_page_with_it(
    num_pages: int, max_tokens: int, num_first: int
) -> None:
    """With pages of 4, a prompt of 8 tokens fills two. The page of its first output token comes
    with them, if one is free and that token is computed at all."""
    engine = SchedulerHarness(depth=0, page_size=4, num_pages=num_pages, max_model_len=64)
    engine.scheduler.submit(submit(0, [1, 2, 3, 4, 5, 6, 7, 8], max_tokens=max_tokens))
    plan = plan_of(engine)
    assert len(plan.arrivals[0].page_tables[0]) == num_first


def test_of_requests_equally_cheap_to_resume_the_youngest_is_retracted() -> None:
    engine = SchedulerHarness(depth=0, page_size=4)
    for number in range(3):
        engine.loop.handle(submit(number, [number] * 9, max_tokens=9))
    engine.step()
    assert next_victim(engine) == 2


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_plain_tokens_are_columns_and_only_beginnings_and_endings_are_outputs(depth: int) -> None:
    engine = SchedulerHarness(depth=depth)
    requests = [submit(number, [number] * 5, max_tokens=6) for number in range(4)]
    for request in requests:
        engine.loop.handle(request)
    tokens: dict[int, list[int]] = {number: [] for number in range(4)}
    begins: list[int] = []
    ends: list[int] = []
    while engine.loop.has_work:
        news = engine.loop.step()
        ended = [output for output in news.outputs if output.finish_reason is not None]
        begun = [output for output in news.outputs if output.cache_use is not None]
        assert len(ended) + len(begun) == len(news.outputs)
        ends += [int(output.request_id) for output in ended]
        begins += [int(output.request_id) for output in begun]
        for output in news:
            tokens[output.request_id] += output.tokens
    assert begins == ends == [0, 1, 2, 3]
    assert tokens == {int(r.request_id): expected_tokens(r) for r in requests}


def test_a_prompt_may_be_an_array_and_is_never_written_to() -> None:
    numbers = [3, 1, 4, 1, 5, 9]
    prompt = array("i", numbers)
    engine = SchedulerHarness()
    plain = submit(0, numbers, max_tokens=20)
    engine.loop.handle(replace(plain, prompt=prompt))
    engine.run()
    assert engine.tokens(0) == expected_tokens(plain)
    assert prompt.tolist() == numbers


def test_with_a_small_budget_those_who_began_first_decode_first() -> None:
    engine = SchedulerHarness(budget=3, max_num_seqs=8, depth=0)
    requests: list[Submit] = [submit(n, [n, 7], max_tokens=10) for n in range(6)]
    for request in requests:
        engine.loop.handle(request)
    engine.run()
    for request in requests:
        assert engine.tokens(int(request.request_id)) == expected_tokens(request)
    assert list(engine.outputs) == sorted(engine.outputs)


def test_stop_tokens_are_watched_for_only_as_long_as_somebody_runs_who_has_them() -> None:
    engine = SchedulerHarness(depth=0)
    engine.loop.handle(submit(0, [1, 2, 3], max_tokens=3, stop_ids=(901, 902)))
    engine.loop.handle(submit(1, [1, 2, 3], max_tokens=9, stop_ids=(902,)))
    rows = engine.scheduler._rows
    engine.step()
    assert dict(rows.stops) == {901: 1, 902: 2}
    while engine.last(0).finish_reason is None:
        engine.step()
    assert dict(rows.stops) == {902: 1}
    engine.run()
    assert not rows.stops


def test_a_row_that_gave_nothing_fails_alone_and_its_page_is_not_published() -> None:
    """The page that it was filling could not be trusted, though a later step wrote to it too."""
    engine = SchedulerHarness(page_size=4)
    broken, good = submit(0, [5] * 7, max_tokens=9), submit(1, [6] * 7, max_tokens=4)
    for request in (broken, good):
        engine.loop.handle(request)
    plans = [plan_of(engine), plan_of(engine)]
    engine.scheduler.advance(engine.runner.execute(plans[0]))
    plans.append(plan_of(engine))
    result = engine.runner.execute(plans[1])
    first = engine.scheduler.advance(replace(result, faults=(RowFault(Row(0), "not finite"),)))
    [failed] = first.outputs
    assert (failed.request_id, failed.finish_reason) == (0, FinishReason.ERROR)
    assert failed.error == "not finite"
    engine.scheduler.advance(engine.runner.execute(plans[2]))
    engine.run()
    assert engine.last(1).finish_reason is FinishReason.LENGTH
    again = [5] * 7 + expected_tokens(broken)[:3]
    engine.loop.handle(submit(2, again))
    engine.run()
    assert engine.last(2).num_cached_tokens == 4
    assert engine.scheduler.stats().num_held_pages == 0


def test_a_row_without_a_token_to_choose_names_the_field_that_left_none() -> None:
    """Not the model, which is what a request is refused for that names no adapter that is there."""
    shape = StructuredOutputsParams(choice=("a",), asked_as="guided_choice")
    for number, (values, field) in enumerate((
        ({"allowed_token_ids": (5,), "structured_outputs": shape}, "allowed_token_ids"),
        ({"bad_words": ("a",)}, "bad_words"),
        ({"structured_outputs": shape}, "guided_choice"),
    )):  # fmt: skip
        engine = SchedulerHarness(page_size=4)
        request = submit(number, [5] * 7)
        sampling = replace(request.sampling, **values)  # type: ignore[arg-type]
        engine.scheduler.submit(replace(request, sampling=sampling))
        result = engine.runner.execute(plan_of(engine))
        fault = RowFault(Row(0), "nothing left", is_of_request=True)
        [failed] = engine.scheduler.advance(replace(result, faults=(fault,))).outputs
        assert failed.error_kind is ErrorKind.REQUEST
        assert failed.notice is not None
        assert failed.notice.error_field == field


def test_an_aborted_prompt_publishes_only_what_was_computed() -> None:
    """P03: aborted in the middle of its prompt, with a step in flight."""
    engine = SchedulerHarness(page_size=4, chunk=6, depth=1)
    engine.loop.handle(submit(0, list(range(30)), max_tokens=2))
    engine.step()
    engine.step()
    engine.scheduler.abort(submit(0, []).request_id)
    engine.run()
    engine.loop.handle(submit(1, list(range(30)), max_tokens=2))
    engine.run()
    assert engine.last(1).num_cached_tokens == 12
    assert engine.tokens(1) == expected_tokens(submit(1, list(range(30)), max_tokens=2))


@pytest.mark.parametrize(
    ("engine", "lengths"),
    [
        (
            SchedulerHarness(num_pages=10, page_size=1, depth=2, max_num_seqs=4),
            [(4, 5), (3, 2), (2, 5), (4, 1), (2, 8)],
        ),
        (
            SchedulerHarness(num_pages=9, page_size=2, depth=3, budget=4, max_num_seqs=3),
            [(7, 10), (1, 9), (6, 12)],
        ),
    ],
)
def test_a_retracted_request_begins_again_only_when_its_tokens_under_way_have_come(
    engine: SchedulerHarness, lengths: list[tuple[int, int]]
) -> None:
    """Several steps are in flight, and a request ends just when another was retracted, so that
    there is room for it at once."""
    requests = [submit(i, [i] * length, max_tokens=m) for i, (length, m) in enumerate(lengths)]
    for request in requests:
        engine.loop.handle(request)
    engine.run()
    assert engine.scheduler.stats().total_retractions > 0
    for request in requests:
        assert engine.tokens(int(request.request_id)) == expected_tokens(request)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_requests_tokens_are_always_current(depth: int) -> None:
    """However its tokens were last read, in the middle of a page too: it has the tokens that it was
    told. The scheduler does not keep finished requests."""
    engine = SchedulerHarness(page_size=8, depth=depth)
    requests = [submit(i, [i] * (3 + i), max_tokens=14) for i in range(3)]
    for request in requests:
        engine.loop.handle(request)
    known = dict(engine.scheduler._requests)
    while engine.loop.has_work:
        engine.step()
        for request_id, request in engine.scheduler._requests.items():
            told = engine.tokens(int(request_id)) if int(request_id) in engine.outputs else []
            assert request.tokens.tolist() == [*request.submit.prompt, *told]
            assert request.num_tokens == len(request.tokens)
    assert len(known) == 3
    assert not engine.scheduler._requests
