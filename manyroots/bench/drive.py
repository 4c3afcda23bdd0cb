"""An engine driven without text and HTTP: requests go in when they are due, and each one's times
come out.

Takes an engine and requests; gives a `Timeline` with a mark for every step that gave tokens. A
request that fails is an error of the bench, never a fast request.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from manyroots.engine.build import Engine
from manyroots.errors import ConfigError
from manyroots.ids import RequestId
from manyroots.messages import FinishReason, Submit


@dataclass(slots=True)
class RequestTimes:
    """In seconds since the run began."""

    due_s: float
    """When it should have come in; what waits for a busy driver waits, too."""
    first_s: float = -1.0
    num_tokens: int = 0

    @property
    def to_first_s(self) -> float:
        return self.first_s - self.due_s


@dataclass(frozen=True, slots=True)
class StepMark:
    """Where all requests together stood when a step's tokens were read."""

    at_s: float
    num_tokens: int
    num_begun: int
    num_ended: int


@dataclass(slots=True)
class Timeline:
    """One run."""

    requests: dict[RequestId, RequestTimes]
    marks: list[StepMark] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Until the last request had ended."""
        return self.marks[-1].at_s

    @property
    def num_tokens(self) -> int:
        return self.marks[-1].num_tokens

    @property
    def seconds_to_all_begun(self) -> float:
        """Until every request had its first token."""
        return self._all_begun().at_s

    def all_decoding(self) -> tuple[float, int]:
        """Seconds and tokens of the steps in which every request decoded: after the one that
        gave the last first token, up to the one in which the first request ended.

        Both ends are read in the same run, so that a slow prompt can't shorten it.
        """
        begin = self._all_begun()
        end = next(mark for mark in self.marks if mark.num_ended)
        if end.num_tokens <= begin.num_tokens or begin.num_ended:
            raise ConfigError(
                "a request ended before the last one had begun, so no step decoded the whole "
                "batch; raise --output-len or --max-num-batched-tokens."
            )
        return end.at_s - begin.at_s, end.num_tokens - begin.num_tokens

    def _all_begun(self) -> StepMark:
        count = len(self.requests)
        return next(mark for mark in self.marks if mark.num_begun == count)


def drive(
    engine: Engine, submits: Sequence[Submit], due_s: Sequence[float] | None = None
) -> Timeline:
    """Submit each when it is due (`due_s` ascends; None: all at once), and wait for all."""
    due = [0.0] * len(submits) if due_s is None else list(due_s)
    times = {
        submit.request_id: RequestTimes(due_s=at) for submit, at in zip(submits, due, strict=True)
    }
    line = Timeline(times)
    loop = engine.loop
    num_sent = num_tokens = num_begun = num_ended = 0
    began = time.perf_counter()
    while num_ended < len(submits):
        now = time.perf_counter() - began
        while num_sent < len(submits) and due[num_sent] <= now:
            loop.handle(submits[num_sent])
            num_sent += 1
        if not loop.has_work:
            if loop.is_reading:
                loop.wait_for_read(0.001 if num_sent < len(submits) else None)
            elif num_sent < len(submits):
                time.sleep(max(0.0, due[num_sent] - (time.perf_counter() - began)))
                continue
        outputs = loop.step()
        if len(outputs) == 0:
            continue
        now = time.perf_counter() - began
        for output in outputs:
            if output.finish_reason is FinishReason.ERROR:
                raise RuntimeError(f"a request of the bench failed: {output.error}")
            own = times[output.request_id]
            if own.num_tokens == 0 and output.tokens:
                own.first_s = now
                num_begun += 1
            own.num_tokens += len(output.tokens)
            num_tokens += len(output.tokens)
            if output.finish_reason is not None:
                num_ended += 1
        line.marks.append(StepMark(now, num_tokens, num_begun, num_ended))
    while loop.has_work:
        loop.step()
    return line
