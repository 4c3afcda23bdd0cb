"""What each key has used, by adapter: a line of JSON for every request, and counts.

Takes the facts of requests that have ended. Lines are written by a thread of their own. Labels are
bounded: keys are those of the keys file, and adapters beyond a number are counted together.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from manyroots.errors import ConfigError
from manyroots.observe.requests import RequestFacts

MAX_PAIRS = 1000
"""Of a key and an adapter that have labels of their own."""
OTHER = "(other)"
BASE = "(base)"


class UsageCounts:
    """Tokens by key and adapter."""

    def __init__(self, registry: CollectorRegistry, max_pairs: int = MAX_PAIRS) -> None:
        self._tokens = Counter(
            "manyroots:key_tokens", "Tokens by key, adapter and kind.",
            ("key", "adapter", "kind"), registry=registry,
        )  # fmt: skip
        self._requests = Counter(
            "manyroots:key_requests", "Requests that ended, by key and adapter.",
            ("key", "adapter"), registry=registry,
        )  # fmt: skip
        self._max_pairs = max_pairs
        self._pairs: set[tuple[str, str]] = set()

    def take(self, facts: RequestFacts) -> None:
        if facts.tenant is None:
            return
        pair = (facts.tenant, _adapter_of(facts))
        if pair not in self._pairs:
            if len(self._pairs) >= self._max_pairs:
                pair = (facts.tenant, OTHER)
            else:
                self._pairs.add(pair)
        self._requests.labels(*pair).inc()
        self._tokens.labels(*pair, "prompt").inc(facts.num_prompt_tokens)
        self._tokens.labels(*pair, "completion").inc(facts.num_output_tokens)


class RefusedCounts(Collector):
    """Requests over a key's limits, read when scraped."""

    def __init__(self, read: Callable[[], Iterable[tuple[str, dict[str, int]]]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        refused = CounterMetricFamily(
            "manyroots:key_refused", "Requests over a key's limits, by reason.",
            labels=["key", "reason"],
        )  # fmt: skip
        for key, reasons in self._read():
            for reason, count in reasons.items():
                refused.add_metric([key, reason], count)
        yield refused


class UsageLog:
    """A file that grows by a line for each request."""

    def __init__(self, path: str) -> None:
        try:
            self._file = Path(path).expanduser().open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--usage-log {path} can't be written: {error.strerror}.") from error
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="usage-log", daemon=True).start()

    def take(self, facts: RequestFacts) -> None:
        line = {
            "time": facts.begin_ns / 1e9,
            "seconds": facts.total_s,
            "id": facts.id,
            "key": facts.tenant,
            "adapter": _adapter_of(facts),
            "prompt_tokens": facts.num_prompt_tokens,
            "cached_tokens": facts.num_cached_tokens,
            "completion_tokens": facts.num_output_tokens,
            "finish": list(facts.finish_reasons),
        }
        self._lines.put(json.dumps(line))

    def _write(self) -> None:
        while True:
            self._file.write(self._lines.get() + "\n")
            if self._lines.empty():
                self._file.flush()


def _adapter_of(facts: RequestFacts) -> str:
    return ",".join(facts.adapters) or BASE
