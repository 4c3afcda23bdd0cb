"""Virtual time, and futures that take some of it.

Nothing here waits: taking the result of a step sets the clock to the moment the step was done. The
engine's own loop runs on it unchanged, because the only thing it ever waits for is a future.
"""

from __future__ import annotations

from concurrent.futures import Future

from manyroots.step import StepResult


class Clock:
    """Seconds since the simulation began; only ever moves forward."""

    __slots__ = ("_now_s",)

    def __init__(self) -> None:
        self._now_s = 0.0

    @property
    def now_s(self) -> float:
        return self._now_s

    def wait_until(self, moment_s: float) -> None:
        """Let time pass; a moment that has passed costs nothing."""
        self._now_s = max(self._now_s, moment_s)


class TimedFuture(Future[StepResult]):
    """A step whose outcome is known already, and whose caller gets it when it would be done."""

    def __init__(self, clock: Clock, done_at_s: float) -> None:
        super().__init__()
        self._clock = clock
        self._done_at_s = done_at_s
        self.is_taken = False
        """Whether the caller has seen the outcome."""

    def result(self, timeout: float | None = None) -> StepResult:
        self._take()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._take()
        return super().exception(timeout)

    def _take(self) -> None:
        self.is_taken = True
        self._clock.wait_until(self._done_at_s)
