"""Reasoning that a model writes between marks in front of its answer: <think> ... </think>.

A format around another one, which reads the answer. Whether the reasoning's opening mark is part of
the prompt, where some templates write it, is told by whoever made the prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from manyroots.text.chat_output import AnswerWriter, Parse
from manyroots.text.formats.reader import Reader, Wait

Mark = Callable[[str], str]
"""How Lark writes a mark: in quotes, or as the special token that it is."""


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


def parse_thinking(marks: ThinkingMarks, prompt: str, answer: Parse) -> Parse:
    """The reasoning, if there is any, and then `answer`'s format."""
    is_begun = marks.is_begun_behind(prompt)

    def parse(reader: Reader, writer: AnswerWriter) -> Wait:
        space = yield from reader.skip_space()
        begins = yield from reader.begins(marks.begin)
        if not begins:
            (writer.reasoning if is_begun else writer.content)(space)
        if begins or is_begun:
            yield from reader.until(marks.end, to=writer.reasoning)
            writer.end_reasoning()
        yield from answer(reader, writer)

    return parse
