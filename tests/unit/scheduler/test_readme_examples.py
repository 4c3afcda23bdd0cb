"""The six examples of the scheduler's README: what a reader predicts is what happens."""

from __future__ import annotations

from pathlib import Path

import manyroots.scheduler as room
from tests.unit.scheduler.test_slices import Hot

README = Path(room.__file__).with_name("README.md")
LONG = 200


def example(policy: str = "fcfs", **rows: int) -> Hot:
    """Two adapters may run, and one more slot is there; `rows`: long requests of each."""
    engine = Hot(hot=2, max_num_seqs=4, num_spare_slots=1, policy=policy)
    for name in "abc":
        engine.digests[name] = engine.load(name)
    engine.ask("c", 1)
    engine.engine.run()
    for name, count in rows.items():
        for _ in range(count):
            engine.ask(name, LONG)
    engine.steps(3, keeps_asking=False)
    assert sorted(running(engine)) == sorted(n for n, count in rows.items() for _ in range(count))
    return engine


def running(engine: Hot) -> list[str | None]:
    return [request.submit.adapter for request in engine.engine.scheduler._rows.running]


def steps(engine: Hot, count: int) -> None:
    engine.steps(count, keeps_asking=False)


def steps_until_it_runs(engine: Hot, name: str, most: int) -> int:
    for count in range(1, most + 1):
        steps(engine, 1)
        if name in running(engine):
            return count
    raise AssertionError(f"{name} did not begin within {most} steps")


def test_the_readme_has_these_examples_and_is_short() -> None:
    text = README.read_text()
    section = text[text.index("## Adapter time slices") :]
    assert [f"| {n}. " in section for n in range(1, 8)] == [True] * 6 + [False]
    assert section.count("\n") <= 40


def test_l01_example_1_what_fits_begins_in_the_next_step() -> None:
    engine = example(a=1, b=1)
    engine.ask("b", LONG)
    engine.ask(None, LONG)
    steps(engine, 1)
    assert running(engine) == ["a", "b", "b", None]


def test_l07_example_2_the_entry_with_the_fewest_rows_is_paused_for_a_newcomer() -> None:
    engine = example(a=3, b=1)
    steps(engine, 20)
    engine.ask("c", LONG)
    steps_until_it_runs(engine, "c", 4)
    assert engine.paused() == ["b"]
    assert sorted(map(str, running(engine))) == ["a", "a", "a", "c"]


def test_l07_example_3_a_newcomer_waits_until_a_quantum_is_over() -> None:
    engine = example(a=3, b=1)
    steps(engine, 2)
    engine.ask("c", LONG)
    assert steps_until_it_runs(engine, "c", 16) >= 9


def test_l07_example_4_an_entry_with_as_many_rows_resumes_after_one_quantum() -> None:
    engine = example(a=3, b=1)
    steps(engine, 20)
    engine.ask("c", LONG)
    steps_until_it_runs(engine, "c", 4)
    assert steps_until_it_runs(engine, "b", 20) >= 15
    assert engine.paused() == ["c"]


def test_l06_example_5_an_entry_without_a_row_takes_one() -> None:
    engine = example(a=4)
    steps(engine, 20)
    first = next(iter(engine.engine.scheduler._rows.running))
    engine.ask("b", LONG)
    steps_until_it_runs(engine, "b", 6)
    assert engine.engine.scheduler.slices.paused_requests() == [first]


def test_l08_example_6_a_less_important_entry_waits() -> None:
    engine = example("priority", a=1, b=1)
    engine.ask("c", LONG, priority=1)
    steps(engine, LONG - 10)
    assert running(engine) == ["a", "b"]
    assert steps_until_it_runs(engine, "c", 20) > 1
