"""Time is divided among overlapping kernels without losing or counting any of it twice."""

from __future__ import annotations

from manyroots.bench.kernel_profile import share


def test_an_instant_belongs_to_the_kernel_that_began_first() -> None:
    times = share([(0.0, 10.0, "first"), (2.0, 13.0, "second"), (3.0, 9.0, "third")])
    assert times.own_us == {"first": 10.0, "second": 3.0, "third": 0.0}
    assert times.idle_us == 0.0


def test_own_times_and_idle_add_up_to_the_whole() -> None:
    times = share([(20.0, 21.5, "b"), (5.0, 12.0, "a"), (10.0, 14.0, "b")])
    assert times.idle_us == 6.0
    assert sum(times.own_us.values()) + times.idle_us == 21.5 - 5.0
    assert times.counts == {"a": 1, "b": 2}


def test_a_step_is_what_the_longer_run_had_more() -> None:
    prefill = [(0.0, 100.0, "product")]
    steps = [(110.0 + 10 * i, 117.0 + 10 * i, "product") for i in range(4)]
    rows = share(prefill).per_step(share(prefill + steps), 4)
    assert rows == [
        {"kernel": "product", "launches": 1.0, "us": 7.0},
        {"kernel": "(idle)", "launches": 0.0, "us": 4.8},
    ]
