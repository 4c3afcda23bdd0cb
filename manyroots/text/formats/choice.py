"""Which format a model writes in: chosen by its chat template, or by the operator's word.

Takes the template's source and the names of parsers (vLLM's); gives a `ChatFormat`, which makes a
`ChatOutput` for each completion.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from manyroots.errors import ConfigError
from manyroots.structured_outputs import StructuredOutputsParams
from manyroots.text.chat_output import ChatOutput, parse_content, parse_plain
from manyroots.text.formats.call_grammars import calls_instead
from manyroots.text.formats.deepseek import DEEPSEEK, DEEPSEEK_FENCED
from manyroots.text.formats.dsml import DSML
from manyroots.text.formats.gemma import FUNCTIONGEMMA, GEMMA
from manyroots.text.formats.glm import GLM, GLM_47
from manyroots.text.formats.harmony import HARMONY
from manyroots.text.formats.hermes import HERMES
from manyroots.text.formats.json_lists import GRANITE, NEMOTRON, PHI_4_MINI, XLAM
from manyroots.text.formats.kimi import KIMI
from manyroots.text.formats.llama import LLAMA
from manyroots.text.formats.mistral import MISTRAL, MISTRAL_NAMED
from manyroots.text.formats.pythonic import LFM2, OLMO_3, PYTHONIC
from manyroots.text.formats.qwen_coder import QWEN_CODER
from manyroots.text.formats.thinking import ThinkingMarks, parse_thinking
from manyroots.text.formats.tool_format import ToolFormat
from manyroots.text.tokenizer import Tokenizer
from manyroots.text.tools import NO_TOOLS, ToolUse

T = TypeVar("T")

_REGISTRY: tuple[ToolFormat, ...] = (
    HARMONY,
    XLAM,
    MISTRAL_NAMED,
    MISTRAL,
    DSML,
    DEEPSEEK_FENCED,
    DEEPSEEK,
    KIMI,
    GLM_47,
    GLM,
    QWEN_CODER,
    NEMOTRON,
    GRANITE,
    HERMES,
    LFM2,
    OLMO_3,
    GEMMA,
    FUNCTIONGEMMA,
    PHI_4_MINI,
    PYTHONIC,
    LLAMA,
)
"""Every format. The first that a template's words tell counts, so that a format comes before those
whose words its templates have, too."""

TOOL_FORMATS: dict[str, ToolFormat] = {
    name: made for made in reversed(_REGISTRY) for name in (made.name, *made.aliases)
}
"""By vLLM's names, and a few of SGLang's."""


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How one model writes reasoning and calls."""

    tools: ToolFormat
    thinking: ThinkingMarks | None = None

    def special_tokens(self, use: ToolUse) -> tuple[str, ...]:
        """Those that the text of an answer must have for its format to be read."""
        marks = () if self.thinking is None else (self.thinking.begin, self.thinking.end)
        return (self.tools.special_tokens if self._reads_tools(use) else ()) + marks

    def _reads_tools(self, use: ToolUse) -> bool:
        return use.is_on or self.tools.prefix is not None

    def structure(
        self,
        wanted: StructuredOutputsParams | None,
        use: ToolUse,
        *,
        prompt: str,
        tokenizer: Tokenizer,
    ) -> StructuredOutputsParams | None:
        """The shape of a whole completion: what a caller wants of the answer, or a call where the
        choice of tools demands one, after the reasoning. Where the model may call, an answer in
        JSON leaves it the choice."""

        def mark(text: str) -> str:
            index = tokenizer.special_id(text)
            return json.dumps(text) if index is None else f"<[{index}]>"

        if use.must_call:
            wanted = StructuredOutputsParams(grammar=self.tools.grammar(use, mark))
            if self.tools.prefix is not None:
                return wanted
        if wanted is None:
            return None
        thoughts = None if self.thinking is None else self.thinking.grammar(prompt, mark)
        instead = None
        if use.is_on and not use.must_call and self._may_call_instead(wanted):
            before = "" if thoughts is None else "prefix"
            instead = calls_instead(lambda loose: self.tools.grammar(loose, mark), use, before)
        prefix = thoughts if self.tools.prefix is None else self.tools.prefix(mark)
        return replace(wanted, prefix=prefix, instead=instead)

    def _may_call_instead(self, wanted: StructuredOutputsParams) -> bool:
        """Whether a caller asked for the shape of its answers, not of every completion: so OpenAI's
        clients mean `response_format` beside tools."""
        is_json = wanted.kind in ("json", "json_object") and wanted.asked_as == "response_format"
        return is_json and not self.tools.is_like_json

    def output(
        self, use: ToolUse = NO_TOOLS, *, prompt: str = "", is_continued: bool = False
    ) -> ChatOutput:
        """For one completion of a prompt. `is_continued`: the prompt ends within the answer."""
        max_calls = None if use.is_parallel else 1
        parse = self.tools.parser(use) if self._reads_tools(use) else None
        if self.thinking is not None:
            begins = () if parse is None else self.tools.begins
            parse = parse_thinking(self.thinking, prompt, parse or parse_content, begins)
        return ChatOutput(
            parse or parse_plain,
            max_calls=max_calls,
            must_call=use.must_call,
            is_continued=is_continued,
            new_id=self.tools.new_id,
        )


_THINK = ThinkingMarks("<think>", "</think>")
_BRACKETS = ThinkingMarks("[THINK]", "[/THINK]")
_CHANNEL = ThinkingMarks("<|channel>", "<channel|>", label="thought\n", is_anywhere=True)
_SEED = ThinkingMarks("<seed:think>", "</seed:think>")
REASONING_FORMATS: dict[str, ThinkingMarks | None] = {
    "none": None,
    "qwen3": _THINK,
    "deepseek_r1": ThinkingMarks("<think>", "</think>", is_always_open=True),
    "deepseek_v3": _THINK,
    "glm45": _THINK,
    "kimi_k2": _THINK,
    "nemotron_v3": _THINK,
    "olmo3": _THINK,
    "mistral": _BRACKETS,
    "gemma4": _CHANNEL,
    "seed_oss": _SEED,
    "openai_gptoss": None,
    "gpt-oss": None,
}
"""By vLLM's names, and one of SGLang's. That of gpt-oss is part of its format of calls."""


def choose_format(
    template: str | None, tool_call_parser: str | None = None, reasoning_parser: str | None = None
) -> ChatFormat:
    """The format that a template's words speak of, unless parsers are named."""
    source = template or ""
    tools = _named(TOOL_FORMATS, tool_call_parser, "--tool-call-parser") or _told_format(source)
    if reasoning_parser is not None:
        thinking = _named(REASONING_FORMATS, reasoning_parser, "--reasoning-parser")
        if reasoning_parser in ("openai_gptoss", "gpt-oss") and tool_call_parser is None:
            tools = HARMONY
    else:
        thinking = _told_marks(source) if tools.prefix is None else None
    return ChatFormat(tools, thinking)


def _told_format(source: str) -> ToolFormat:
    return next((made for made in _REGISTRY if made.is_told_by(source)), HERMES)


def _told_marks(source: str) -> ThinkingMarks | None:
    for marks in (_THINK, _BRACKETS, _SEED, _CHANNEL):
        if marks.end in source and marks.begin in source:
            return marks
    return _THINK if _THINK.end in source else None


def _named(known: Mapping[str, T], name: str | None, flag: str) -> T | None:
    if name is None:
        return None
    if name not in known:
        raise ConfigError(f"{flag} is {name!r}; choose one of {', '.join(sorted(known))}.")
    return known[name]
