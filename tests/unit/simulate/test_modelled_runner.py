"""The runner on virtual time: overlap, wrong pages, planned failures; and the source of faults."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from manyroots.errors import ConfigError
from manyroots.ids import RequestId, Row, StepId
from manyroots.sampling import SamplingParams
from manyroots.simulate.clock import Clock
from manyroots.simulate.executors import CheckedExecutor, SimulatedExecutor, UncheckedExecutor
from manyroots.simulate.faults import STEPS_BETWEEN_FAILURES, Faults, FaultSource, TransferFault
from manyroots.simulate.plan_digest import PlanDigest
from manyroots.simulate.runner import ModelledRunner
from manyroots.simulate.traffic import sequences
from manyroots.simulate.transfers import TransferModel
from manyroots.step import Arrival, Plan
from tests.unit.simulate.traces import COSTS, line

REPLIES = {RequestId(1): [7, 8, 9], RequestId(2): [5]}


def plan(step: int, *rows: tuple[int, int], arrivals: tuple[Arrival, ...] = ()) -> Plan:
    """Every row samples."""
    return Plan(
        step_id=StepId(step),
        arrivals=arrivals,
        new_pages=(),
        rows=np.array([row for row, _ in rows], np.int32),
        num_tokens=np.array([count for _, count in rows], np.int32),
        samples=np.ones(len(rows), np.bool_),
    )


def arrival(
    row: int, number: int, tokens: list[int], pages: list[int], computed: int = 0
) -> Arrival:
    return Arrival(
        row=Row(row),
        request_id=RequestId(number),
        tokens=np.array(tokens, np.int32),
        num_prompt_tokens=len(tokens),
        num_computed_tokens=computed,
        page_tables=(np.array(pages, np.int32),),
        sampling=SamplingParams(),
        seed=0,
        stop_ids=(),
        adapter_slot=None,
        adapter_from=0,
    )


def transfers(faults: Faults | None = None) -> TransferModel:
    return TransferModel(COSTS, FaultSource(faults or Faults(), seed=0), page_size=4)


def runner(
    executor: SimulatedExecutor | None = None, faults: Faults | None = None
) -> tuple[Clock, ModelledRunner]:
    clock = Clock()
    model = transfers(faults)
    executor = executor or CheckedExecutor(REPLIES, model, page_size=4)
    source = FaultSource(faults or Faults(), seed=0)
    return clock, ModelledRunner(clock, COSTS, executor, source, model, max_num_seqs=4)


def test_a_step_begins_when_the_one_before_it_ends() -> None:
    clock, modelled = runner()
    first = modelled.launch(plan(1, (0, 4), arrivals=(arrival(0, 1, [1, 2, 3, 4], [0, 1]),)))
    second = modelled.launch(plan(2, (0, 1)))
    assert clock.now_s == 0.0
    assert first.result().tokens.tolist() == [7]
    first_s = 0.01 + 4 / 10_000
    assert clock.now_s == pytest.approx(first_s)
    assert second.result().tokens.tolist() == [8]
    assert clock.now_s == pytest.approx(first_s + 0.01 + 0.001 + 5e-6)


@pytest.mark.parametrize("checked", [True, False])
def test_tokens_come_from_the_trace(checked: bool) -> None:
    executor: SimulatedExecutor = UncheckedExecutor(REPLIES, transfers())
    if checked:
        executor = CheckedExecutor(REPLIES, transfers(), page_size=4)
    _, modelled = runner(executor)
    arrivals = (arrival(0, 1, [1, 2, 3], [0, 1]), arrival(2, 2, [4], [2]))
    said = [modelled.launch(plan(1, (2, 1), (0, 3), arrivals=arrivals)).result().tokens.tolist()]
    said += [modelled.launch(plan(i, (0, 1))).result().tokens.tolist() for i in (2, 3, 4)]
    assert said == [[5, 7], [8], [9], [0]]


def test_a_page_that_was_never_filled_is_caught_at_once() -> None:
    """The loop takes failed futures for failed steps and goes on: a wrong page must not be one."""
    _, modelled = runner()
    wrong = arrival(0, 1, [1, 2, 3, 4, 5], [3, 4], computed=4)
    with pytest.raises(RuntimeError, match="does not hold position 0"):
        modelled.launch(plan(1, (0, 1), arrivals=(wrong,)))


def test_a_step_behind_a_failed_one_may_fail_too_and_the_next_may_not() -> None:
    _, modelled = runner(faults=Faults(failed_steps=1.0))
    failed = modelled.launch(plan(1, (0, 4), arrivals=(arrival(0, 1, [1, 2, 3, 4], [0, 1]),)))
    leaning = arrival(1, 2, [1, 2, 3, 4, 5], [0, 2], computed=4)
    behind = modelled.launch(plan(2, (1, 1), arrivals=(leaning,)))
    with pytest.raises(RuntimeError, match="step 1 was made to fail"):
        failed.result()
    assert "does not hold position 0" in str(behind.exception())
    with pytest.raises(KeyError):
        modelled.launch(plan(3, (3, 1)))


@pytest.mark.parametrize("checked", [True, False])
def test_a_failed_step_has_taken_in_who_arrived(checked: bool) -> None:
    """Otherwise the step after it would write through the table of the row's last owner."""
    executor: SimulatedExecutor = UncheckedExecutor(REPLIES, transfers())
    if checked:
        executor = CheckedExecutor(REPLIES, transfers(), page_size=4)
    _, modelled = runner(executor, Faults(failed_steps=1.0))
    modelled.launch(plan(1, (0, 1), arrivals=(arrival(0, 2, [4], [2]),)))
    behind = modelled.launch(plan(2, (0, 1)))
    assert behind.result().tokens.tolist() == [5]


def test_failures_are_far_enough_apart_for_the_loop_to_go_on() -> None:
    source = FaultSource(Faults(failed_steps=1.0), seed=0)
    failed = [step for step in range(1, 50) if source.step_fails(StepId(step))]
    assert failed == list(range(1, 50, STEPS_BETWEEN_FAILURES))


def test_answers_depend_on_the_seed_and_the_number_alone() -> None:
    faults = Faults(failed_transfers=0.2, slow_transfers=0.2, lost_transfers=0.2, bursts=0.5)
    one, other = (FaultSource(faults, seed=4) for _ in range(2))
    forwards = [one.transfer(i) for i in range(200)]
    assert forwards == [other.transfer(i) for i in reversed(range(200))][::-1]
    assert set(forwards) == set(TransferFault)
    assert forwards != [FaultSource(faults, seed=5).transfer(i) for i in range(200)]
    assert 50 < sum(one.joins_previous(RequestId(i)) for i in range(200)) < 150


def test_storage_that_has_died_stays_dead() -> None:
    source = FaultSource(Faults(dead_storage=1.0), seed=2)
    answers = [source.storage_is_dead(StepId(step)) for step in range(1, 102)]
    assert answers == sorted(answers)
    assert answers[-1]


def test_aborts_fall_anywhere_from_the_queue_to_too_late() -> None:
    source = FaultSource(Faults(aborts=1.0), seed=0)
    trace = tuple(line(0.0, ("p", 4), output_tokens=10) for _ in range(300))
    after = {source.abort_after(sequence) for sequence in sequences(trace)}
    assert after == set(range(17))


def test_no_faults_are_none() -> None:
    source = FaultSource(Faults(), seed=0)
    assert not source.step_fails(StepId(1))
    assert source.transfer(1) is TransferFault.NONE
    assert not source.storage_is_dead(StepId(1))
    [asked] = sequences((line(0.0, ("p", 4), adapter="a"),))
    assert source.reload_after(asked) is None
    assert source.load(1) is TransferFault.NONE


def test_a_chance_outside_0_to_1_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"aborts is 1\.5"):
        Faults(aborts=1.5)


def test_plans_that_differ_anywhere_have_other_digests() -> None:
    one = plan(1, (0, 4), arrivals=(arrival(0, 1, [1, 2, 3, 4], [0, 1]),))
    others = [
        one,
        replace(one, step_id=StepId(2)),
        replace(one, rows=np.array([1], np.int32)),
        replace(one, arrivals=()),
        replace(one, arrivals=(arrival(0, 1, [1, 2, 3, 4], [0, 2]),)),
        replace(one, samples=np.zeros(1, np.bool_)),
    ]
    digests = []
    for other in others:
        digest = PlanDigest()
        digest.add(other)
        digests.append(digest.hexdigest())
    assert len(set(digests)) == len(others)
