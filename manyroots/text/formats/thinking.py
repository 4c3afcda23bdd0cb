"""Reasoning that a model writes between marks in front of its answer: <think> ... </think>.

A format around another one, which reads the answer. Whether the reasoning's opening mark is part of
the prompt, where some templates write it, is told by the code that made the prompt. Reasoning that
never ends may have a call in it, which counts: models forget the mark that ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

from manyroots.text.chat_output import AnswerWriter, Parse
from manyroots.text.content_marks import ReasoningMarks
from manyroots.text.formats.reader import Reader, Wait

Mark = Callable[[str], str]
"""How Lark writes a mark: in quotes, or as the special token that it is."""


@dataclass(frozen=True, slots=True)
class ThinkingMarks(ReasoningMarks):
    """How a model marks its reasoning, and where that begins."""

    is_always_open: bool = False
    """The model begins to reason without saying so."""

    def is_open_behind(self, prompt: str) -> bool:
        """Whether a completion of this prompt goes on with reasoning that the prompt began."""
        ends = (self.begin, f"{self.begin}{self.label}".rstrip())
        return prompt.rstrip().endswith(ends)

    def is_closed_behind(self, prompt: str) -> bool:
        """Whether the prompt ends with reasoning that is over: the model is told not to reason."""
        return prompt.rstrip().endswith(self.end)

    def is_begun_behind(self, prompt: str) -> bool:
        """Whether the completion begins with reasoning without saying so."""
        is_assumed = self.is_always_open and not self.is_closed_behind(prompt)
        return is_assumed or self.is_open_behind(prompt)

    def grammar(self, prompt: str, mark: Mark) -> str | None:
        """Lark's rule `prefix`: the reasoning that may come before an answer of some shape; None
        where the model is told not to reason."""
        if self.is_closed_behind(prompt):
            return None
        begin, end = mark(self.begin), mark(self.end)
        prefix = (
            f"{begin}? thought" if self.is_begun_behind(prompt) else f"(SPACE? {begin} thought)?"
        )
        is_text = end.startswith('"')
        rules = [f"prefix: {prefix}", r"SPACE: /[ \n\r\t]{1,8}/"]
        if is_text:
            rules += ["thought: reason SPACE?", rf"reason[lazy]: /(.|\n)*/ {end}"]
        else:
            rules += [f"thought: REASON {end} SPACE?", r"REASON: /(.|\n)*/"]
        return "\n".join(rules)


def parse_thinking(
    marks: ThinkingMarks, prompt: str, answer: Parse, begins: tuple[str, ...] = ()
) -> Parse:
    """The reasoning, if there is any, and then `answer`'s format. `begins`: marks that calls begin
    with."""
    is_begun = marks.is_begun_behind(prompt)

    def parse(reader: Reader, writer: AnswerWriter) -> Wait:
        writer.hide(marks)
        space = yield from reader.skip_space()
        is_inside = yield from reader.begins(marks.begin)
        if not is_inside:
            (writer.reasoning if is_begun else writer.content)(space)
        is_inside = is_inside or is_begun
        while is_inside:
            if marks.label:
                yield from reader.begins(marks.label)
            if not (yield from _reasoning(reader, writer)):
                return
            writer.end_reasoning()
            yield from reader.skip_space()
            is_inside = yield from reader.begins(marks.begin)
        yield from answer(reader, writer)

    def _reasoning(reader: Reader, writer: AnswerWriter) -> Generator[None, None, bool]:
        """Up to the mark that ends it; gives whether that came."""
        while True:
            mark = yield from reader.until(marks.end, *begins, to=writer.reasoning)
            if mark is None or mark == marks.end:
                return mark is not None
            # A call, or a word about calls. What is a call is held back: only if the reasoning
            # never ends it was meant.
            trial = _Trial(answer, mark)
            while not trial.is_content:
                if (yield from reader.begins(marks.end)):
                    writer.reasoning(trial.text)
                    return True
                character = yield from reader.next()
                if not character:
                    trial.finish(writer)
                    return False
                trial.push(character)
            writer.reasoning(trial.text)

    return parse


class _Trial:
    """Text that is read as an answer to see whether it is a call."""

    def __init__(self, answer: Parse, text: str) -> None:
        self._answer = answer
        self._reader = Reader()
        self._writer = AnswerWriter()
        self._parsing = answer(self._reader, self._writer)
        self._parts: list[str] = []
        self.push(text)

    @property
    def text(self) -> str:
        return "".join(self._parts)

    @property
    def is_content(self) -> bool:
        """Whether the text does not begin with a call."""
        found = self._writer.answer
        return found.content is not None and not found.tool_calls

    def push(self, text: str) -> None:
        self._parts.append(text)
        self._reader.push(text)
        next(self._parsing, None)

    def finish(self, writer: AnswerWriter) -> None:
        """There is no more text: tell what it is."""
        self._reader.close()
        for _ in self._parsing:
            raise AssertionError("a format waits for text after the end")
        if not self._writer.answer.tool_calls:
            writer.reasoning(self.text)
            return
        writer.end_reasoning()
        reader = Reader()
        reader.push(self.text)
        reader.close()
        for _ in self._answer(reader, writer):
            raise AssertionError("a format waits for text after the end")
