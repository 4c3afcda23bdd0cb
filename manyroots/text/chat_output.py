"""A completion's text becomes what a chat's caller reads: reasoning, content and tool calls.

Takes text as it comes; gives events in order, and at the end the whole message. One object for
each completion. How the pieces of text are cut makes no difference: the joined events are the same.
Which words of the text mean what is the format's part (`formats/`).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from manyroots.text.content_marks import ContentMarks, ContentPiece, ReasoningMarks
from manyroots.text.formats.reader import Reader


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegins:
    """The model calls a tool. What follows up to the next of these is of this call."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of a call's arguments: JSON, as the model wrote it."""

    index: int
    text: str


ChatEvent = ReasoningDelta | ContentDelta | ToolCallBegins | ToolCallArguments


@dataclass(slots=True)
class ToolCall:
    """A call of a tool, whole."""

    id: str
    name: str
    arguments: str = ""
    """JSON, if the model wrote JSON."""


@dataclass(slots=True)
class Answer:
    """What a completion says, so far or whole."""

    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)


Parse = Callable[[Reader, "AnswerWriter"], Generator[None, None, None]]
"""A format: reads all text, telling the writer what it finds; pauses where text has not come."""


def openai_id() -> str:
    """A new call's, as most clients know them."""
    return f"call_{uuid.uuid4().hex[:24]}"


class ChatOutput:
    """One completion's answer, from its first text to its last."""

    def __init__(
        self,
        parse: Parse,
        *,
        max_calls: int | None = None,
        must_call: bool = False,
        is_continued: bool = False,
        new_id: Callable[[], str] = openai_id,
    ) -> None:
        """`max_calls`: calls beyond these are dropped; None takes all. `must_call`: there is
        nothing but calls, so that what looks like content is a call cut short before its name.
        `is_continued`: the answer began in the prompt, so that space in front is its own.
        `new_id`: of a call."""
        self._reader = Reader()
        self._writer = AnswerWriter(
            max_calls, must_call=must_call, is_continued=is_continued, new_id=new_id
        )
        self._parsing = parse(self._reader, self._writer)

    @property
    def answer(self) -> Answer:
        """What the events so far add up to."""
        return self._writer.answer

    @property
    def has_calls(self) -> bool:
        return bool(self._writer.answer.tool_calls)

    def push(self, text: str) -> list[ChatEvent]:
        """Take more text; gives what has become certain."""
        if text:
            self._reader.push(text)
            next(self._parsing, None)
        return self._writer.take()

    def finish(self) -> list[ChatEvent]:
        """There is no more text; gives what was held back. Call once."""
        self._reader.close()
        for _ in self._parsing:
            raise AssertionError("a format waits for text after the end")
        self._writer.end()
        return self._writer.take()


class AnswerWriter:
    """What formats tell of what they read. Space around reasoning and calls is layout, and dropped;
    within a text it stays."""

    def __init__(
        self,
        max_calls: int | None = None,
        *,
        must_call: bool = False,
        is_continued: bool = False,
        new_id: Callable[[], str] = openai_id,
    ) -> None:
        self._new_id = new_id
        self._must_call = must_call
        self.answer = Answer()
        self._max_calls = max_calls
        self._events: list[ChatEvent] = []
        self._space = ""
        """White space after the last text, which may turn out to be layout."""
        self._is_open = is_continued
        """The last thing said was text of the same kind, so that space belongs to it."""
        self._is_dropping = False
        self._marks: ContentMarks | None = None

    def hide(self, marks: ReasoningMarks) -> None:
        """Content may have these marks in it, which are not to be shown."""
        self._marks = ContentMarks(marks)

    def reasoning(self, text: str) -> None:
        is_apart = not self._is_open and self.answer.reasoning is not None
        if text := self._with_space(text):
            text = f"\n{text}" if is_apart else text
            self.answer.reasoning = (self.answer.reasoning or "") + text
            self._events.append(ReasoningDelta(text))

    def end_reasoning(self) -> None:
        self._space, self._is_open = "", False

    def end_content(self) -> None:
        """What comes next is a text of its own."""
        self._is_open = False

    def content(self, text: str) -> None:
        if self._marks is None:
            self._content(text)
            return
        for piece in self._marks.push(text):
            self._tell_piece(piece)

    def _tell_piece(self, piece: ContentPiece) -> None:
        (self.reasoning if piece.is_reasoning else self._content)(piece.text)
        if piece.is_last:
            (self.end_reasoning if piece.is_reasoning else self.end_content)()

    def _release(self) -> None:
        """The content is over here, so that what was held back is no mark."""
        if self._marks is not None:
            self._tell_piece(self._marks.finish())

    def _content(self, text: str) -> None:
        if self._must_call:
            return
        is_apart = not self._is_open and self.answer.content is not None
        if text := self._with_space(text):
            text = f"\n{text}" if is_apart else text  # what calls have parted
            self.answer.content = (self.answer.content or "") + text
            self._events.append(ContentDelta(text))

    def plain(self, text: str) -> None:
        """Content of a completion that has nothing else: all of it as it is."""
        self.answer.content = (self.answer.content or "") + text
        self._events.append(ContentDelta(text))

    def call(self, name: str, call_id: str | None = None) -> None:
        """A call begins."""
        self._release()
        self._space, self._is_open = "", False
        calls = self.answer.tool_calls
        self._is_dropping = self._max_calls is not None and len(calls) >= self._max_calls
        if self._is_dropping:
            return
        call = ToolCall(call_id or self._new_id(), name)
        calls.append(call)
        self._events.append(ToolCallBegins(len(calls) - 1, call.id, name))

    def arguments(self, text: str) -> None:
        """Of the call that began last."""
        if self._is_dropping or not text:
            return
        calls = self.answer.tool_calls
        calls[-1].arguments += text
        self._events.append(ToolCallArguments(len(calls) - 1, text))

    def end(self) -> None:
        """Space at the very end is the answer's own, unless it follows a call."""
        self._release()
        if self._space and self.answer.content is not None and not self.answer.tool_calls:
            space, self._space = self._space, ""
            self.plain(space)

    def take(self) -> list[ChatEvent]:
        """The events since the last time."""
        events, self._events = self._events, []
        return events

    def _with_space(self, text: str) -> str:
        """The text with the space held back before it, without the space at its end."""
        body = text.rstrip()
        if not body:
            self._space += text if self._is_open else ""
            return ""
        shown = self._space + body if self._is_open else body.lstrip()
        self._space, self._is_open = text[len(body) :], True
        return shown


def parse_content(reader: Reader, writer: AnswerWriter) -> Generator[None, None, None]:
    """All text is content, after something that is not."""
    yield from reader.rest(writer.content)


def parse_plain(reader: Reader, writer: AnswerWriter) -> Generator[None, None, None]:
    """The format of a model that only answers: all text is content."""
    yield from reader.rest(writer.plain)
