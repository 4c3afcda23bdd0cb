"""`bench router` measures decisions on what it says it fills."""

from __future__ import annotations

from manyroots.bench.router import RouterWorkload, run_router


def test_m02_the_bench_knows_as_many_prefixes_as_asked_for() -> None:
    report = run_router(RouterWorkload(10, 5000, 64, 20, 200))
    assert report["known_prefixes"] >= 5000
    assert 0.0 < report["choose_us"]["p50"] <= report["choose_us"]["p99"]
