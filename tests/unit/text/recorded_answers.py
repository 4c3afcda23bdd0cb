"""Texts as models write them, and what they mean: for the parsers of every format."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from manyroots.text.chat_output import (
    Answer,
    ChatEvent,
    ChatOutput,
    ContentDelta,
    ReasoningDelta,
    ToolCall,
    ToolCallArguments,
    ToolCallBegins,
)
from manyroots.text.formats.choice import choose_format
from manyroots.text.tools import check_tools


@dataclass(frozen=True)
class Recorded:
    """One text and its meaning."""

    name: str
    text: str
    content: str | None
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Names and arguments, exactly as they are spelled in the answer."""
    reasoning: str | None = None
    parser: str = "hermes"
    reasoning_parser: str = "none"
    prompt: str = ""
    tools: list[Any] = field(default_factory=list)

    def output(self) -> ChatOutput:
        chosen = choose_format(None, self.parser, self.reasoning_parser)
        return chosen.output(check_tools(self.tools or TOOLS, "auto"), prompt=self.prompt)


def function(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    function("get_weather", city={"type": "string"}, days={"type": "integer"}),
    function("now"),
]

CITY = '{"city": "Oslo"}'
QWEN = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'

RECORDED = [
    Recorded("plain", "  Hello <b>there</b>.\n", "Hello <b>there</b>.\n"),
    Recorded("one call", QWEN, None, [("get_weather", CITY)]),
    Recorded("words before", f"Let me see.\n\n{QWEN}", "Let me see.", [("get_weather", CITY)]),
    Recorded("words between", f"a{QWEN} b {QWEN}\n", "a\nb", [("get_weather", CITY)] * 2),
    Recorded(
        "arguments first",
        '<tool_call>{"arguments": {"city": "Oslo"}, "name": "get_weather"}</tool_call>',
        None,
        [("get_weather", CITY)],
    ),
    Recorded("no arguments", '<tool_call>{"name": "now"}</tool_call>', None, [("now", "{}")]),
    Recorded(
        "the end mark in an argument",
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call> \\" }"}}</tool_call>!',
        "!",
        [("f", '{"a": "</tool_call> \\" }"}')],
    ),
    Recorded(
        "arguments as a string",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        None,
        [("f", '{"a": 1}')],
    ),
    Recorded("no call", "<tool_call>maybe</tool_call> or", "<tool_call>maybe</tool_call> or"),
    Recorded("half a mark", "is 1 <tool_cal", "is 1 <tool_cal"),
    Recorded("half a call", '<tool_call>{"name": "f', '<tool_call>{"name": "f'),
    Recorded(
        "arguments cut short",
        '<tool_call>{"name": "f", "arguments": {"a": [1, "x',
        None,
        [("f", '{"a": [1, "x')],
    ),
    Recorded(
        "reasoning, then a call",
        f"<think>\nI need\nit.\n</think>\n\n{QWEN}",
        None,
        [("get_weather", CITY)],
        reasoning="I need\nit.",
        reasoning_parser="qwen3",
    ),
    Recorded(
        "reasoning begun in the prompt",
        "so <tool_call> is a word\n</think>\n\nYes.",
        "Yes.",
        reasoning="so <tool_call> is a word",
        reasoning_parser="qwen3",
        prompt="<|im_start|>assistant\n<think>\n",
    ),
    Recorded(
        "no reasoning",
        "Yes, <think> is a mark.",
        "Yes, <think> is a mark.",
        reasoning_parser="qwen3",
        prompt="assistant\n<think>\n\n</think>\n\n",
    ),
    Recorded(
        "reasoning that never ends",
        "<think>and on",
        None,
        reasoning="and on",
        reasoning_parser="qwen3",
    ),
    Recorded(
        "reasoning without a beginning",
        "hm</think>ok",
        "ok",
        reasoning="hm",
        reasoning_parser="deepseek_r1",
    ),
]


def pieces(text: str, rng: random.Random) -> list[str]:
    """The text in pieces, cut at random."""
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(1, 2 + len(text))))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def joined(events: list[ChatEvent]) -> Answer:
    """What a client puts together of the events."""
    answer = Answer()
    calls: dict[int, list[str]] = {}
    for event in events:
        match event:
            case ContentDelta():
                answer.content = (answer.content or "") + event.text
            case ReasoningDelta():
                answer.reasoning = (answer.reasoning or "") + event.text
            case ToolCallBegins():
                assert event.index == len(calls), "calls are numbered in order"
                calls[event.index] = [event.id, event.name, ""]
            case ToolCallArguments():
                assert event.index == len(calls) - 1, "arguments are of the last call"
                calls[event.index][2] += event.text
    return Answer(answer.reasoning, answer.content, [ToolCall(*parts) for parts in calls.values()])


def plain(answer: Answer) -> tuple[str | None, str | None, list[tuple[str, str]]]:
    """Without the ids, which are drawn."""
    return answer.reasoning, answer.content, [(c.name, c.arguments) for c in answer.tool_calls]
