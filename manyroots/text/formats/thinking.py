"""Reasoning that a model writes between marks in front of its answer: <think> ... </think>.

A format around another one, which reads the answer. Whether the reasoning's opening mark is part of
the prompt, where some templates write it, is told by whoever made the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

from manyroots.text.chat_output import AnswerWriter, Parse
from manyroots.text.formats.reader import Reader, Wait


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """How a model marks its reasoning."""

    begin: str
    end: str
    is_always_open: bool = False
    """The model begins to reason without saying so."""

    def is_open_behind(self, prompt: str) -> bool:
        """Whether a completion of this prompt goes on with reasoning that the prompt began."""
        return prompt.rstrip().endswith(self.begin)

    def is_closed_behind(self, prompt: str) -> bool:
        """Whether the prompt ends with reasoning that is over: the model is told not to reason."""
        return prompt.rstrip().endswith(self.end)


def parse_thinking(marks: ThinkingMarks, prompt: str, answer: Parse) -> Parse:
    """The reasoning, if there is any, and then `answer`'s format."""
    is_open = marks.is_open_behind(prompt)
    is_assumed = marks.is_always_open and not marks.is_closed_behind(prompt)

    def parse(reader: Reader, writer: AnswerWriter) -> Wait:
        space = yield from reader.skip_space()
        begins = yield from reader.begins(marks.begin)
        if not begins:
            (writer.reasoning if is_open or is_assumed else writer.content)(space)
        if begins or is_open or is_assumed:
            yield from reader.until(marks.end, to=writer.reasoning)
            writer.end_reasoning()
        yield from answer(reader, writer)

    return parse
