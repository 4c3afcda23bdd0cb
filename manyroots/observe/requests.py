"""One request from its admission to its end: how much it took, how long, and how it ended.

Takes what its sequences give as it comes; gives the facts, once, to every sink: the log
(`--enable-log-requests`), traces (`traces.py`). No text of prompts or answers is kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from manyroots.messages import Submit

logger = logging.getLogger("manyroots.requests")


@dataclass(slots=True)
class RequestFacts:
    """All there is to say of a request that has ended."""

    id: str
    model: str
    """As its caller named it."""
    n: int
    submits: Sequence[Submit]
    headers: Mapping[str, str] = field(default_factory=dict)
    tenant: str | None = None
    """The name of the key that it came with, where keys have names."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    begin_ns: int = 0
    """By the clock on the wall."""
    first_token_s: float | None = None
    """Since the begin; None if none came."""
    total_s: float = 0.0
    finish_reasons: tuple[str, ...] = ()
    """The choices', each once, in order."""
    outputs: dict[int, list[int]] = field(default_factory=dict)
    """The tokens of each choice that gave any, by its place in `submits`."""
    cached: dict[int, int] = field(default_factory=dict)
    """Prompt tokens that were reused, by the place of a prompt's first choice."""

    @property
    def adapters(self) -> list[str]:
        return list(dict.fromkeys(s.adapter for s in self.submits if s.adapter is not None))


Sink = Callable[[RequestFacts], None]


class RequestWatch:
    """Gathers a request's facts."""

    def __init__(self, facts: RequestFacts, sinks: Sequence[Sink]) -> None:
        self._facts = facts
        self._sinks = sinks
        facts.begin_ns = time.time_ns()
        self._begin = time.monotonic()
        self._reasons: dict[int, str] = {}
        # A prompt counts once, however many choices it has.
        facts.num_prompt_tokens = sum(len(submit.prompt) for submit in facts.submits[:: facts.n])

    def saw(self, index: int, tokens: Sequence[int], num_cached: int, reason: str | None) -> None:
        """An output of one choice."""
        facts = self._facts
        if tokens:
            if facts.first_token_s is None:
                facts.first_token_s = time.monotonic() - self._begin
            if self._sinks:
                facts.outputs.setdefault(index, []).extend(tokens)
        facts.num_output_tokens += len(tokens)
        if index % facts.n == 0:
            facts.cached[index] = num_cached
        if reason is not None:
            self._reasons[index] = reason

    def end(self, reason: str) -> None:
        """It is over; `reason` is that of the choices that have none of their own."""
        facts = self._facts
        facts.total_s = time.monotonic() - self._begin
        facts.num_cached_tokens = sum(facts.cached.values())
        reasons = [self._reasons.get(index, reason) for index in range(len(facts.submits))]
        facts.finish_reasons = tuple(dict.fromkeys(reasons))
        for sink in self._sinks:
            try:
                sink(facts)
            except Exception:  # a failing log must not harm the request
                logger.exception("a request's facts could not be passed on")


def log_request(facts: RequestFacts) -> None:
    """One line."""
    first = "-" if facts.first_token_s is None else f"{facts.first_token_s:.3f}s"
    logger.info(
        "%s adapter=%s prompt=%d cached=%d output=%d ttft=%s total=%.3fs finish=%s",
        facts.id, ",".join(facts.adapters) or "-", facts.num_prompt_tokens,
        facts.num_cached_tokens, facts.num_output_tokens, first, facts.total_s,
        ",".join(facts.finish_reasons),
    )  # fmt: skip
