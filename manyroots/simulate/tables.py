"""Results as tables for a terminal."""

from __future__ import annotations

from rich.table import Table

from manyroots.simulate.hit_rates import HitRates
from manyroots.simulate.measures import MEASURES
from manyroots.simulate.memory_splits import SplitRow
from manyroots.simulate.replicas import ReplicasRun
from manyroots.simulate.state_rates import StateRates
from manyroots.simulate.summary import Distribution, SequenceGroup, Summary, summarize
from manyroots.simulate.sweep import Point


def summary_table(summary: Summary, best_offline: float, endless: float) -> Table:
    table = _table("", "", title=None)
    table.show_header = False
    rows = {
        "sequences": f"{summary.all.num_sequences:,} ({summary.num_finished:,} finished, "
        f"{summary.num_aborted:,} aborted, {summary.num_failed:,} failed)",
        "prompt / output tokens": f"{summary.all.num_prompt_tokens:,} / "
        f"{summary.all.num_output_tokens:,}",
        "duration": f"{summary.duration_s:,.2f} s, device busy {summary.busy_share:.1%}",
        "throughput": f"{summary.output_tokens_per_s:,.0f} output tok/s, "
        f"{summary.prompt_tokens_per_s:,.0f} prompt tok/s",
        "hit rate": f"{summary.all.hit_rate:.4f} (best offline policy in the device's pages "
        f"{best_offline:.4f}, endless cache {endless:.4f})",
        "hit rate by tier": ", ".join(
            f"{tier} {rate:.4f}" for tier, rate in summary.hit_rate_by_tier.items()
        ),
        "pages copied": _counts(summary.num_copied_pages),
        "adapters loaded": _counts(summary.num_adapter_loads),
        "pages": f"{summary.peak_held_pages:,} held at the peak of {summary.num_pages:,}",
        "retractions": f"{summary.num_retractions:,}",
        "steps": f"{summary.num_steps:,} ({summary.num_failed_steps:,} made to fail, "
        f"{summary.num_audits:,} audits)",
        "guesses": f"{summary.num_accepted_tokens:,} right of {summary.num_draft_tokens:,}",
        "plans": summary.plan_digest,
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def latency_table(summary: Summary) -> Table:
    table = _table("latency, ms", "mean", "p50", "p90", "p99", "max")
    for name, times in (
        ("time to first token", summary.all.ttft_s),
        ("between tokens", summary.itl_s),
        ("whole request", summary.e2e_s),
    ):
        table.add_row(name, *_milliseconds(times))
    return table


def group_table(title: str, groups: list[SequenceGroup]) -> Table:
    table = _table(title, "sequences", "prompt tok", "cached tok", "hit rate", "TTFT p50", "p99")
    for group in groups:
        table.add_row(
            group.name,
            f"{group.num_sequences:,}",
            f"{group.num_prompt_tokens:,}",
            f"{group.num_cached_tokens:,}",
            f"{group.hit_rate:.3f}",
            f"{1000 * group.ttft_s.p50:,.1f}",
            f"{1000 * group.ttft_s.p99:,.1f}",
        )
    return table


def hit_rate_table(rows: list[HitRates]) -> Table:
    policies = list(rows[0].by_policy)
    table = _table("trace", "pages", *policies, "best offline", "endless")
    for row in rows:
        rates = (*row.by_policy.values(), row.best_offline, row.endless)
        table.add_row(row.trace, f"{row.num_pages:,}", *(f"{rate:.4f}" for rate in rates))
    return table


def state_rate_table(rows: list[StateRates]) -> Table:
    table = _table("trace", "states", "of", "hit rate", "best offline", "endless", "missed for")
    for row in rows:
        rates = (row.hit_rate, row.best_offline, row.endless)
        table.add_row(
            row.trace,
            f"{row.num_states:,}",
            f"{row.num_all_states:,}",
            *(f"{rate:.4f}" for rate in rates),
            _counts(row.missed_tokens),
        )
    return table


def memory_split_table(rows: list[SplitRow]) -> Table:
    table = _table(
        "trace", "best fixed share", "TTFT mean, ms", "one memory", "gain", "worst fixed",
        title="memory for pages and adapters",
    )  # fmt: skip
    for row in rows:
        best = row.fixed_s[row.best_share]
        table.add_row(
            row.trace,
            f"{row.best_share:.2f}",
            f"{1000 * best:,.1f}",
            f"{1000 * row.one_memory_s:,.1f}",
            f"{row.gain:.2f}",
            f"{1000 * max(row.fixed_s.values()):,.1f}",
        )
    return table


def replica_table(runs: list[ReplicasRun]) -> Table:
    table = _table(
        "routing", "hit rate", "TTFT p50, ms", "p99", "adapter loads", "queue ratio", "out tok/s"
    )
    for run in runs:
        merged = run.merged
        summary = summarize(merged)
        table.add_row(
            run.policy.value,
            f"{summary.all.hit_rate:.4f}",
            f"{1000 * summary.all.ttft_s.p50:,.1f}",
            f"{1000 * summary.all.ttft_s.p99:,.1f}",
            f"{sum(merged.num_adapter_loads.values()):,}",
            f"{run.queue_ratio:.2f}",
            f"{summary.output_tokens_per_s:,.0f}",
        )
    return table


def sweep_table(points: list[Point]) -> Table:
    names = list(points[0].values)
    table = _table(*names, *(measure.title for measure in MEASURES))
    for point in points:
        table.add_row(
            *(f"{value:g}" for value in point.values.values()),
            *(format(measure.value(point.summary), measure.format) for measure in MEASURES),
        )
    return table


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items() if count) or "none"


def _table(first: str, *others: str, title: str | None = None) -> Table:
    table = Table(title=title, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right" if name else "left")
    return table


def _milliseconds(times: Distribution) -> list[str]:
    values = (times.mean, times.p50, times.p90, times.p99, times.max)
    return [f"{1000 * value:,.2f}" for value in values]
