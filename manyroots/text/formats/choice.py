"""Which format a model writes in: chosen by its chat template, or by the operator's word.

Takes the template's source and the names of parsers (vLLM's); gives a `ChatFormat`, which makes a
`ChatOutput` for each completion.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from manyroots.errors import ConfigError
from manyroots.structured_outputs import StructuredOutputsParams
from manyroots.text.chat_output import (
    ChatOutput,
    Parse,
    openai_id,
    parse_content,
    parse_plain,
)
from manyroots.text.formats import deepseek, harmony, mistral
from manyroots.text.formats.deepseek import (
    deepseek_fenced_grammar,
    deepseek_grammar,
    parse_deepseek,
)
from manyroots.text.formats.gemma import (
    FUNCTION_GEMMA,
    GEMMA_4,
    GemmaMarks,
    gemma_grammar,
    parse_gemma,
)
from manyroots.text.formats.harmony import harmony_grammar, harmony_prefix, parse_harmony
from manyroots.text.formats.hermes import hermes_grammar, parse_hermes
from manyroots.text.formats.llama import PYTHON_TAG, llama_grammar, parse_llama
from manyroots.text.formats.mistral import (
    as_mistral_id,
    mistral_grammar,
    mistral_id,
    mistral_named_grammar,
    parse_mistral,
)
from manyroots.text.formats.pythonic import parse_pythonic, pythonic_grammar
from manyroots.text.formats.qwen_coder import parse_qwen_coder, qwen_coder_grammar
from manyroots.text.formats.thinking import Mark, ThinkingMarks, parse_thinking
from manyroots.text.tokenizer import Tokenizer
from manyroots.text.tools import NO_TOOLS, ToolUse

T = TypeVar("T")
_LFM2_MARKS = ("<|tool_call_start|>", "<|tool_call_end|>")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls."""

    name: str
    """The parser's, as vLLM calls it."""
    parser: Callable[[ToolUse], Parse]
    grammar: Callable[[ToolUse, Mark], str]
    """Lark of an answer that has to call."""
    special_tokens: tuple[str, ...] = ()
    """Special tokens that are part of the format, and so of the text that it reads."""
    prefix: Callable[[Mark], str] | None = None
    """Of a format that has reasoning of its own, and so reads answers without tools, too: Lark's
    rule for what comes before an answer of some shape."""
    new_id: Callable[[], str] = openai_id
    fit_id: Callable[[str], str] = str
    """An id of a call in the history, as the template takes them."""


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
        choice of tools demands one, behind the reasoning."""

        def mark(text: str) -> str:
            index = tokenizer.special_id(text)
            return json.dumps(text) if index is None else f"<[{index}]>"

        if use.must_call:
            wanted = StructuredOutputsParams(grammar=self.tools.grammar(use, mark))
            if self.tools.prefix is not None:
                return wanted
        if wanted is not None and self.tools.prefix is not None:
            return replace(wanted, prefix=self.tools.prefix(mark))
        if wanted is None or self.thinking is None:
            return wanted
        return replace(wanted, prefix=self.thinking.grammar(prompt, mark))

    def output(
        self, use: ToolUse = NO_TOOLS, *, prompt: str = "", is_continued: bool = False
    ) -> ChatOutput:
        """For one completion of a prompt. `is_continued`: the prompt ends within the answer."""
        max_calls = None if use.is_parallel else 1
        parse = self.tools.parser(use) if self._reads_tools(use) else None
        if self.thinking is not None:
            parse = parse_thinking(self.thinking, prompt, parse or parse_content)
        return ChatOutput(
            parse or parse_plain,
            max_calls=max_calls,
            must_call=use.must_call,
            is_continued=is_continued,
            new_id=self.tools.new_id,
        )


HERMES = ToolFormat("hermes", lambda use: parse_hermes, hermes_grammar)
QWEN_CODER = ToolFormat("qwen3_coder", lambda use: parse_qwen_coder(use.tools), qwen_coder_grammar)
LLAMA = ToolFormat("llama3_json", lambda use: parse_llama, llama_grammar, (PYTHON_TAG,))
PYTHONIC = ToolFormat("pythonic", lambda use: parse_pythonic(), pythonic_grammar)
LLAMA_4 = replace(PYTHONIC, name="llama4_pythonic")
LFM2 = ToolFormat(
    "lfm2",
    lambda use: parse_pythonic(*_LFM2_MARKS),
    lambda use, mark: pythonic_grammar(use, mark, *_LFM2_MARKS),
    _LFM2_MARKS,
)
MISTRAL = ToolFormat(
    "mistral",
    lambda use: parse_mistral,
    mistral_grammar,
    (mistral.CALLS, mistral.ARGUMENTS, mistral.CALL_ID),
    new_id=mistral_id,
    fit_id=as_mistral_id,
)
MISTRAL_NAMED = replace(MISTRAL, grammar=mistral_named_grammar)
DEEPSEEK = ToolFormat("deepseek_v31", lambda use: parse_deepseek, deepseek_grammar, deepseek.MARKS)
DEEPSEEK_FENCED = replace(DEEPSEEK, name="deepseek_v3", grammar=deepseek_fenced_grammar)
HARMONY = ToolFormat(
    "openai",
    lambda use: parse_harmony(with_calls=use.is_on),
    harmony_grammar,
    harmony.MARKS,
    prefix=harmony_prefix,
)


def _gemma(name: str, marks: GemmaMarks) -> ToolFormat:
    return ToolFormat(
        name,
        lambda use: parse_gemma(marks, use.tools),
        lambda use, mark: gemma_grammar(marks, use, mark),
        (marks.begin, marks.end, marks.quote),
    )


GEMMA = _gemma("gemma4", GEMMA_4)
FUNCTIONGEMMA = _gemma("functiongemma", FUNCTION_GEMMA)

TOOL_FORMATS: dict[str, ToolFormat] = {
    **{
        made.name: made
        for made in (
            HERMES, QWEN_CODER, LLAMA, PYTHONIC, LLAMA_4, LFM2, MISTRAL, DEEPSEEK, DEEPSEEK_FENCED,
            HARMONY, GEMMA, FUNCTIONGEMMA,
        )
    },
    "qwen": HERMES,
    "qwen25": HERMES,
    "qwen3_xml": QWEN_CODER,
    "llama4_json": LLAMA,
    "llama3": LLAMA,
    "gpt-oss": HARMONY,
}  # fmt: skip
"""By vLLM's names, and a few of SGLang's."""

_TOLD_BY: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
    (("<|channel|>", "<|message|>"), HARMONY),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_NAMED),
    (("[TOOL_CALLS]",), MISTRAL),
    ((deepseek.CALLS_BEGIN, "```json"), DEEPSEEK_FENCED),
    ((deepseek.CALLS_BEGIN,), DEEPSEEK),
    (("<function=", "<parameter="), QWEN_CODER),
    (("<tool_call>",), HERMES),
    ((_LFM2_MARKS[0],), LFM2),
    ((GEMMA_4.begin,), GEMMA),
    ((FUNCTION_GEMMA.begin,), FUNCTIONGEMMA),
    (("[func_name1(",), PYTHONIC),
    (('"parameters": dictionary of argument',), LLAMA),
    ((PYTHON_TAG,), LLAMA),
)
"""Words of a template, all of which must be there, and the format that they tell; the first that
fits counts."""

_THINK = ThinkingMarks("<think>", "</think>")
_BRACKETS = ThinkingMarks("[THINK]", "[/THINK]")
_CHANNEL = ThinkingMarks("<|channel>thought\n", "<channel|>")
_SEED = ThinkingMarks("<seed:think>", "</seed:think>")
REASONING_FORMATS: dict[str, ThinkingMarks | None] = {
    "none": None,
    "qwen3": _THINK,
    "deepseek_r1": ThinkingMarks("<think>", "</think>", is_always_open=True),
    "deepseek_v3": _THINK,
    "glm45": _THINK,
    "kimi_k2": _THINK,
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
    for words, made in _TOLD_BY:
        if all(word in source for word in words):
            return made
    return HERMES


def _told_marks(source: str) -> ThinkingMarks | None:
    for marks in (_THINK, _BRACKETS, _SEED, _CHANNEL):
        if marks.end in source and marks.begin.rstrip() in source:
            return marks
    return _THINK if _THINK.end in source else None


def _named(known: Mapping[str, T], name: str | None, flag: str) -> T | None:
    if name is None:
        return None
    if name not in known:
        raise ConfigError(f"{flag} is {name!r}; choose one of {', '.join(sorted(known))}.")
    return known[name]
