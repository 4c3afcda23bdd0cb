"""Bad news that does not wait for a step: why an engine can't go on.

Rung on any thread; the loop's thread reads it, and is woken for that.
"""

from __future__ import annotations

from collections.abc import Callable


def _nobody() -> None:
    """Nobody sleeps yet."""


class Alarm:
    """Rings once; stays rung."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.wake: Callable[[], None] = _nobody

    def ring(self, reason: str) -> None:
        self.reason = reason
        self.wake()
