"""What a format of tool calls consists of.

A new format is one file here that ends in a `ToolFormat`, and one line in `choice.py`. The parser
reads text (`reader.py`) and tells an `AnswerWriter`; the grammar is what forces a call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from manyroots.text.chat_output import Parse, openai_id
from manyroots.text.formats.thinking import Mark
from manyroots.text.tools import ToolUse


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes calls."""

    name: str
    """The parser's, as vLLM calls it."""
    parser: Callable[[ToolUse], Parse]
    grammar: Callable[[ToolUse, Mark], str]
    """Lark of an answer that has to call."""
    told_by: tuple[tuple[str, ...], ...] = ()
    """Words of a chat template that tell this format: all words of one of the groups."""
    aliases: tuple[str, ...] = ()
    """Other names of the parser, vLLM's and SGLang's."""
    begins: tuple[str, ...] = ()
    """Marks that calls begin with, for calls inside of reasoning that never ends. None where a call
    has no mark of its own."""
    is_like_json: bool = False
    """Calls begin as JSON does, so that a grammar can't let a typed answer or calls follow."""
    special_tokens: tuple[str, ...] = ()
    """Special tokens that are part of the format, and so of the text that it reads."""
    prefix: Callable[[Mark], str] | None = None
    """Of a format that has reasoning of its own, and so reads answers without tools, too: Lark's
    rule for what comes before an answer of some shape."""
    new_id: Callable[[], str] = openai_id
    fit_id: Callable[[str], str] = str
    """An id of a call in the history, as the template takes them."""

    def is_told_by(self, template: str) -> bool:
        """Whether a template's words speak of this format."""
        return any(all(word in template for word in words) for words in self.told_by)
