"""The numbers by which settings are compared, each with its title: for tables and for plots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from manyroots.simulate.summary import Summary


@dataclass(frozen=True, slots=True)
class Measure:
    """One number of a run."""

    title: str
    value: Callable[[Summary], float]
    format: str
    in_plot: bool = True


MEASURES = (
    Measure("output tok/s", lambda s: s.output_tokens_per_s, ",.0f"),
    Measure("hit rate", lambda s: s.all.hit_rate, ".3f"),
    Measure("from host", lambda s: s.hit_rate_by_tier["host"], ".3f", in_plot=False),
    Measure("TTFT p50, ms", lambda s: 1000 * s.all.ttft_s.p50, ",.1f"),
    Measure("TTFT p99, ms", lambda s: 1000 * s.all.ttft_s.p99, ",.1f"),
    Measure("ITL p50, ms", lambda s: 1000 * s.itl_s.p50, ",.2f"),
    Measure("ITL p99, ms", lambda s: 1000 * s.itl_s.p99, ",.2f"),
    Measure("duration, s", lambda s: s.duration_s, ",.1f", in_plot=False),
    Measure("retractions", lambda s: s.num_retractions, ",.0f", in_plot=False),
    Measure("peak pages", lambda s: s.peak_held_pages, ",.0f", in_plot=False),
    Measure("busy", lambda s: s.busy_share, ".1%", in_plot=False),
)

PLOTTED = tuple(measure for measure in MEASURES if measure.in_plot)
