"""Finds stop strings in a text that arrives in pieces.

Takes pieces of text; gives what may be shown. Text that could be the beginning of a stop string
is held back until it is clear. Where the pieces are cut makes no difference to what is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Checked:
    """What a piece of text gave."""

    text: str
    stop: str | None
    """The stop string that was found; nothing after it is text of the sequence."""


class StopChecker:
    """One sequence's search for its stop strings."""

    __slots__ = ("_first_characters", "_held", "_ignored", "_include", "_longest", "_stops")

    def __init__(self, stops: Sequence[str], *, include_in_output: bool) -> None:
        self._stops = tuple(stops)
        self._include = include_in_output
        self._first_characters = frozenset(stop[0] for stop in self._stops)
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._held = ""
        self._ignored = 0
        """How much of the held text may not end a stop string any more."""

    def push(self, piece: str, *, may_stop: bool) -> Checked:
        """Take the next piece. With `may_stop` False no stop string ends within it."""
        if not self._stops:
            return Checked(piece, None)
        text = self._held + piece
        if may_stop:
            found = self._find(text)
            if found is not None:
                return self._stop_at(text, *found)
        shown = len(text) - self._length_to_hold(text)
        self._held = text[shown:]
        old = len(text) if not may_stop else self._ignored
        self._ignored = max(0, old - shown)
        return Checked(text[:shown], None)

    def flush(self) -> str:
        """The text still held back, at the end of the sequence."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, str] | None:
        """The match that ends first; of those that end together, the longest."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            # A match that ended in text which could not stop must not be found now.
            start = text.find(stop, max(0, self._ignored - len(stop) + 1))
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                best = candidate if best is None else min(best, candidate)
        return None if best is None else (best[1], best[2])

    def _stop_at(self, text: str, start: int, stop: str) -> Checked:
        self._held = ""
        end = start + len(stop) if self._include else start
        return Checked(text[:end], stop)

    def _length_to_hold(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        earliest = max(0, len(text) - self._longest + 1)
        for start in range(earliest, len(text)):
            if text[start] in self._first_characters:
                tail = text[start:]
                if any(stop.startswith(tail) for stop in self._stops):
                    return len(tail)
        return 0
