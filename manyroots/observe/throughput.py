"""What the server has done lately, in a line every ten seconds while it is busy.

Takes totals and the engine's counts at two moments; gives a line, or nothing while idle.
"""

from __future__ import annotations

from dataclasses import dataclass

from manyroots.messages import Stats

INTERVAL_S = 10.0


@dataclass(frozen=True, slots=True)
class Totals:
    """At one moment."""

    at_s: float
    num_prompt_tokens: int
    num_generation_tokens: int
    stats: Stats | None


class Throughput:
    """Remembers the last moment."""

    def __init__(self, first: Totals) -> None:
        self._last = first

    def line(self, now: Totals) -> str | None:
        last, self._last = self._last, now
        seconds = max(now.at_s - last.at_s, 1e-9)
        prompt = now.num_prompt_tokens - last.num_prompt_tokens
        generation = now.num_generation_tokens - last.num_generation_tokens
        stats = now.stats
        running, waiting = (stats.num_running, stats.num_waiting) if stats is not None else (0, 0)
        if not (prompt or generation or running or waiting):
            return None
        in_use = stats.page_usage if stats is not None else 0.0
        return (
            f"running {running}, waiting {waiting}, prompt {prompt / seconds:.1f} tok/s, "
            f"generation {generation / seconds:.1f} tok/s, cache in use {in_use:.1%}, "
            f"hit rate {_hit_rate(last.stats, stats)}"
        )


def _hit_rate(last: Stats | None, now: Stats | None) -> str:
    """Of the tokens looked up between the two."""
    if now is None:
        return "-"
    # An engine that was started again counts from 0.
    is_same = last is not None and last.total_lookup_tokens <= now.total_lookup_tokens
    lookups = now.total_lookup_tokens - (last.total_lookup_tokens if is_same and last else 0)
    hits = now.total_hit_tokens - (last.total_hit_tokens if is_same and last else 0)
    return f"{hits / lookups:.1%}" if lookups else "-"
