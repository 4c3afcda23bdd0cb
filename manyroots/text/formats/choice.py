"""Which format a model writes in: chosen by its chat template, or by the operator's word.

Takes the template's source and the names of parsers (vLLM's); gives a `ChatFormat`, which makes a
`ChatOutput` for each completion.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from manyroots.errors import ConfigError
from manyroots.structured_outputs import StructuredOutputsParams
from manyroots.text.chat_output import ChatOutput, Parse, parse_content, parse_plain
from manyroots.text.formats.hermes import hermes_grammar, parse_hermes
from manyroots.text.formats.thinking import Mark, ThinkingMarks, parse_thinking
from manyroots.text.tokenizer import Tokenizer
from manyroots.text.tools import NO_TOOLS, Tool, ToolChoice, ToolUse

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls."""

    name: str
    """The parser's, as vLLM calls it."""
    parser: Callable[[Sequence[Tool]], Parse]
    grammar: Callable[[ToolUse, Mark], str]
    """Lark of an answer that has to call."""
    special_tokens: tuple[str, ...] = ()
    """Special tokens that are part of the format, and so of the text that it reads."""


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How one model writes reasoning and calls."""

    tools: ToolFormat
    thinking: ThinkingMarks | None = None

    def special_tokens(self, use: ToolUse) -> tuple[str, ...]:
        """Those that the text of an answer must have for its format to be read."""
        marks = () if self.thinking is None else (self.thinking.begin, self.thinking.end)
        return (self.tools.special_tokens if use.is_on else ()) + marks

    def structure(
        self,
        wanted: StructuredOutputsParams | None,
        use: ToolUse,
        *,
        prompt: str,
        tokenizer: Tokenizer,
    ) -> StructuredOutputsParams | None:
        """The shape of a whole completion: what a caller wants of the answer, or a call where the
        choice of tools demands one, behind the reasoning."""

        def mark(text: str) -> str:
            index = tokenizer.special_id(text)
            return json.dumps(text) if index is None else f"<[{index}]>"

        if use.choice in (ToolChoice.REQUIRED, ToolChoice.NAMED):
            wanted = StructuredOutputsParams(grammar=self.tools.grammar(use, mark))
        if wanted is None or self.thinking is None:
            return wanted
        return replace(wanted, prefix=self.thinking.grammar(prompt, mark))

    def output(
        self, use: ToolUse = NO_TOOLS, *, prompt: str = "", is_continued: bool = False
    ) -> ChatOutput:
        """For one completion of a prompt. `is_continued`: the prompt ends within the answer."""
        max_calls = None if use.is_parallel else 1
        parse = self.tools.parser(use.tools) if use.is_on else None
        if self.thinking is not None:
            parse = parse_thinking(self.thinking, prompt, parse or parse_content)
        return ChatOutput(parse or parse_plain, max_calls=max_calls, is_continued=is_continued)


HERMES = ToolFormat("hermes", lambda tools: parse_hermes, hermes_grammar)

TOOL_FORMATS: dict[str, ToolFormat] = {"hermes": HERMES}

_THINK = ThinkingMarks("<think>", "</think>")
REASONING_FORMATS: dict[str, ThinkingMarks | None] = {
    "none": None,
    "qwen3": _THINK,
    "deepseek_r1": ThinkingMarks("<think>", "</think>", is_always_open=True),
}


def choose_format(
    template: str | None, tool_call_parser: str | None = None, reasoning_parser: str | None = None
) -> ChatFormat:
    """The format that a template's words speak of, unless parsers are named."""
    tools = _named(TOOL_FORMATS, tool_call_parser, "--tool-call-parser")
    if reasoning_parser is not None:
        thinking = _named(REASONING_FORMATS, reasoning_parser, "--reasoning-parser")
    else:
        thinking = _THINK if template is not None and "</think>" in template else None
    return ChatFormat(tools or HERMES, thinking)


def _named(known: Mapping[str, T], name: str | None, flag: str) -> T | None:
    if name is None:
        return None
    if name not in known:
        raise ConfigError(f"{flag} is {name!r}; choose one of {', '.join(sorted(known))}.")
    return known[name]
