"""Marks of reasoning inside of content, which are not to be shown.

Takes content as it comes; gives pieces of content and of reasoning. An end mark that ends nothing
is a slip of the model and left out, unless the answer itself speaks of such marks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """How a model marks its reasoning."""

    begin: str
    end: str
    label: str = ""
    """What may follow the opening mark and is no part of the reasoning."""
    is_anywhere: bool = False
    """The opening mark begins reasoning wherever it stands; else it is text inside of content."""


@dataclass(frozen=True, slots=True)
class ContentPiece:
    text: str
    is_reasoning: bool = False
    is_last: bool = False
    """Of its kind: a mark follows."""


class ContentMarks:
    """The content of one answer."""

    def __init__(self, marks: ReasoningMarks) -> None:
        self._marks = marks
        self._held = ""
        """The end of the content, which may be the beginning of a mark."""
        self._is_reasoning = False
        self._speaks_of_marks = False
        self._seen = ""
        """The end of the content, in which an opening mark may have begun."""

    def push(self, text: str) -> Iterator[ContentPiece]:
        text, self._held = self._held + text, ""
        marks = self._marks
        while (place := self._next_mark(text)) >= 0:
            yield self._piece(text[:place])
            if text.startswith(marks.end, place):
                if self._is_reasoning:
                    yield ContentPiece("", is_reasoning=True, is_last=True)
                    self._is_reasoning = False
                elif self._speaks_of_marks:
                    yield ContentPiece(marks.end)
                text = text[place + len(marks.end) :]
                continue
            behind = text[place + len(marks.begin) :]
            if len(behind) < len(marks.label) and marks.label.startswith(behind):
                self._held = text[place:]
                return
            yield ContentPiece("", is_last=True)
            self._is_reasoning = True
            text = behind.removeprefix(marks.label)
        end = self._possible_mark(text)
        self._held = text[end:]
        yield self._piece(text[:end])

    def finish(self) -> ContentPiece:
        """What was held back; an opening mark with nothing after it is left out."""
        held, self._held = self._held, ""
        is_mark = self._marks.is_anywhere and held.startswith(self._marks.begin)
        return ContentPiece("" if is_mark else held, self._is_reasoning)

    def _piece(self, text: str) -> ContentPiece:
        seen = self._seen + text
        self._speaks_of_marks = self._speaks_of_marks or self._marks.begin in seen
        self._seen = seen[1 - len(self._marks.begin) :]
        return ContentPiece(text, self._is_reasoning)

    def _wanted(self) -> tuple[str, ...]:
        is_begin_wanted = self._marks.is_anywhere and not self._is_reasoning
        return (self._marks.end, self._marks.begin) if is_begin_wanted else (self._marks.end,)

    def _next_mark(self, text: str) -> int:
        places = [place for mark in self._wanted() if (place := text.find(mark)) >= 0]
        return min(places, default=-1)

    def _possible_mark(self, text: str) -> int:
        longest = max(map(len, self._wanted()))
        for place in range(max(0, len(text) - longest + 1), len(text)):
            if any(mark.startswith(text[place:]) for mark in self._wanted()):
                return place
        return len(text)
