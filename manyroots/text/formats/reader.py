"""Text that is read while it arrives.

Takes pieces of text; lets a format be written as if it were all there. Methods that may have to
wait are generators: `yield from` them, and they pause the format until more text has come or it is
clear that none will.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

Wait = Generator[None, None, None]


class Reader:
    """One completion's text, read from front to back."""

    __slots__ = ("_place", "_text", "is_over")

    def __init__(self) -> None:
        self._text = ""
        self._place = 0
        self.is_over = False
        """No more will come."""

    def push(self, text: str) -> None:
        self._text = self._text[self._place :] + text
        self._place = 0

    def close(self) -> None:
        self.is_over = True

    def unread(self, text: str) -> None:
        """Give back text that was taken, to be read again."""
        self._text = text + self._text[self._place :]
        self._place = 0

    def take(self) -> str:
        """All that is there."""
        text = self._text[self._place :]
        self._place = len(self._text)
        return text

    def peek(self) -> Generator[None, None, str]:
        """The next character; "" at the end."""
        while self._place == len(self._text):
            if self.is_over:
                return ""
            yield
        return self._text[self._place]

    def skip(self) -> None:
        """Leave out the character that was peeked at."""
        self._place += 1

    def next(self) -> Generator[None, None, str]:
        """The next character, taken; "" at the end."""
        character = yield from self.peek()
        self._place += len(character)
        return character

    def skip_space(self) -> Generator[None, None, str]:
        """Up to what is none; gives what was left out."""
        space = ""
        while (character := (yield from self.peek())).isspace():
            space += character
            self._place += 1
        return space

    def begins(self, mark: str) -> Generator[None, None, bool]:
        """Whether the text goes on with this mark, which is taken if so."""
        while True:
            there = self._text[self._place : self._place + len(mark)]
            if there == mark:
                self._place += len(mark)
                return True
            if self.is_over or not mark.startswith(there):
                return False
            yield

    def until(self, *marks: str, to: Callable[[str], None]) -> Generator[None, None, str | None]:
        """Hand on all text before the first of `marks`, as it comes. Gives the mark, which is taken
        too; None if the text ends without. Where two begin at one place, the longer counts."""
        longest = max(map(len, marks))
        while True:
            found = [
                (place, -len(mark), mark)
                for mark in marks
                if (place := self._text.find(mark, self._place)) >= 0
            ]
            if found:
                place, _, mark = min(found)
                if any(
                    other.startswith(self._text[place:]) and len(other) > len(mark)
                    for other in marks
                    if not self.is_over
                ):
                    self._hand_on(place, to)
                    yield  # this mark, or a longer one that begins with it
                    continue
                self._hand_on(place, to)
                self._place = place + len(mark)
                return mark
            if self.is_over:
                self._hand_on(len(self._text), to)
                return None
            self._hand_on(self._possible_mark(marks, longest), to)
            yield

    def rest(self, to: Callable[[str], None]) -> Wait:
        """Hand on all text that is left, as it comes."""
        while True:
            if text := self.take():
                to(text)
            if self.is_over:
                return
            yield

    def collect(self, *marks: str) -> Generator[None, None, tuple[str, str | None]]:
        """As `until`, but all the text at once."""
        parts: list[str] = []
        mark = yield from self.until(*marks, to=parts.append)
        return "".join(parts), mark

    def _hand_on(self, end: int, to: Callable[[str], None]) -> None:
        if end > self._place:
            to(self._text[self._place : end])
            self._place = end

    def _possible_mark(self, marks: tuple[str, ...], longest: int) -> int:
        """The first place from which the text may turn out to be a mark."""
        end = len(self._text)
        for place in range(max(self._place, end - longest + 1), end):
            tail = self._text[place:]
            if any(mark.startswith(tail) for mark in marks):
                return place
        return end
