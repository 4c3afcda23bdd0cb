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

WEATHER = ("get_weather", CITY)
SEP, CALLS_BEGIN = "<｜tool▁sep｜>", "<｜tool▁calls▁begin｜>"  # noqa: RUF001
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
CALLS_END = "<｜tool▁calls▁end｜>"  # noqa: RUF001
CODER = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
FINAL = "<|start|>assistant<|channel|>final<|message|>"

RECORDED += [
    Recorded(
        "qwen coder",
        f"Let me look.\n{CODER}\n{CODER}",
        "Let me look.",
        [("get_weather", '{"city": "Oslo", "days": 3}')] * 2,
        parser="qwen3_coder",
    ),
    Recorded(
        "qwen coder: lines, tags and types",
        "<tool_call>\n<function=write>\n<parameter=text>\n\na < b\n</tool_call>\n\n</parameter>\n"
        "<parameter=flag>True</parameter>\n<parameter=items>\n[1, {}]\n</parameter>\n"
        "<parameter=more>7</parameter>\n<parameter=days>soon</parameter></function></tool_call>",
        None,
        [
            (
                "write",
                '{"text": "\\na < b\\n</tool_call>\\n", "flag": true, "items": [1, {}], '
                '"more": "7", "days": "soon"}',
            )
        ],
        parser="qwen3_coder",
        tools=[
            function(
                "write",
                text={"type": "string"},
                flag={"type": "boolean"},
                items={"type": "array"},
                days={"type": "integer"},
            )
        ],
    ),
    Recorded(
        "qwen coder without outer tags",
        "<function=now>\n</function>",
        None,
        [("now", "{}")],
        parser="qwen3_coder",
    ),
    Recorded(
        "qwen coder: no call",
        "<tool_call> is <functional>",
        "<tool_call> is <functional>",
        parser="qwen3_coder",
    ),
    Recorded(
        "qwen coder cut short",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOs",
        None,
        [("get_weather", '{"city": "Os')],
        parser="qwen3_coder",
    ),
    Recorded(
        "llama 3",
        '{"name": "get_weather", "parameters": {"city": "Oslo"}}',
        None,
        [WEATHER],
        parser="llama3_json",
    ),
    Recorded(
        "llama 3 with its tag, twice",
        '<|python_tag|>{"name": "now", "parameters": {}}; '
        '{"name": "get_weather", "parameters": {"city": "Oslo"}}',
        None,
        [("now", "{}"), WEATHER],
        parser="llama3_json",
    ),
    Recorded(
        "llama 3: words first",
        'I will.<|python_tag|>{"name": "now", "parameters": {}}',
        "I will.",
        [("now", "{}")],
        parser="llama3_json",
    ),
    Recorded(
        "llama 3: some JSON",
        '{"answer": [1, 2]} is it',
        '{"answer": [1, 2]} is it',
        parser="llama3_json",
    ),
    Recorded("llama 3: python", "<|python_tag|>print(1)", "print(1)", parser="llama3_json"),
    Recorded(
        "pythonic",
        '[get_weather(city="Oslo", days=3), a.b(x=[1, {"k": None}], y=true, z=\'it\\\'s)\')]',
        None,
        [
            ("get_weather", '{"city": "Oslo", "days": 3}'),
            ("a.b", '{"x": [1, {"k": null}], "y": true, "z": "it\'s)"}'),
        ],
        parser="pythonic",
    ),
    Recorded(
        "pythonic: no call", "[1] says so, [2] too", "[1] says so, [2] too", parser="pythonic"
    ),
    Recorded(
        "pythonic: names that Python has for itself",
        '[f(from=1, text="class=2, from=3")]',
        None,
        [("f", '{"from": 1, "text": "class=2, from=3"}')],
        parser="pythonic",
    ),
    Recorded("pythonic: half a call", "[now(", "[now(", parser="pythonic"),
    Recorded("pythonic: code", "[f(x), g()]", "[f(x), g()]", parser="pythonic"),
    Recorded(
        "lfm2",
        'Sure.<|tool_call_start|>[get_weather(city="Oslo")]<|tool_call_end|>Wait.',
        "Sure.\nWait.",
        [WEATHER],
        parser="lfm2",
    ),
    Recorded(
        "mistral's list",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oslo"}}, '
        '{"name": "now", "arguments": {}}]',
        None,
        [WEATHER, ("now", "{}")],
        parser="mistral",
    ),
    Recorded(
        "mistral's names",
        'Hm.[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]now{}',
        "Hm.",
        [WEATHER, ("now", "{}")],
        parser="mistral",
    ),
    Recorded(
        "mistral with an id and reasoning",
        '[THINK]so[/THINK]yes[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{"a": "]"}',
        "yes",
        [("now", '{"a": "]"}')],
        reasoning="so",
        parser="mistral",
        reasoning_parser="mistral",
    ),
    Recorded("mistral: no call", "[TOOL_CALLS]no", "[TOOL_CALLS]no", parser="mistral"),
    Recorded(
        "deepseek v3.1",
        f"<think>hm</think>Yes.{CALLS_BEGIN}{CALL_BEGIN}get_weather{SEP}{CITY}{CALL_END}"
        f"{CALL_BEGIN}now{SEP}{{}}{CALL_END}{CALLS_END}",
        "Yes.",
        [WEATHER, ("now", "{}")],
        reasoning="hm",
        parser="deepseek_v31",
        reasoning_parser="deepseek_v3",
    ),
    Recorded(
        "deepseek v3",
        f"{CALLS_BEGIN}{CALL_BEGIN}function{SEP}get_weather\n```json\n{CITY}\n```{CALL_END}{CALLS_END}",
        None,
        [WEATHER],
        parser="deepseek_v3",
    ),
    Recorded(
        "gemma 4",
        '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
        None,
        [("get_weather", '{"city": "Oslo", "days": 3}'), ("now", "{}")],
        parser="gemma4",
    ),
    Recorded(
        "gemma 4: nested, with reasoning",
        '<|channel>thought\nlet me<channel|>Now.<|tool_call>call:f{a:{b:[1,true,<|"|>x},"<|"|>],'
        "c:{}},d:null,e:-2.5}<tool_call|>",
        "Now.",
        [("f", '{"a": {"b": [1, true, "x},\\""], "c": {}}, "d": null, "e": -2.5}')],
        reasoning="let me",
        parser="gemma4",
        reasoning_parser="gemma4",
    ),
    Recorded(
        "function gemma",
        "<start_function_call>call:get_weather{city:<escape>Oslo<escape>,days:<escape>3<escape>}"
        "<end_function_call>",
        None,
        [("get_weather", '{"city": "Oslo", "days": 3}')],
        parser="functiongemma",
    ),
    Recorded(
        "harmony",
        f"<|channel|>analysis<|message|>User asks.<|end|>{FINAL}Hello.",
        "Hello.",
        reasoning="User asks.",
        parser="openai",
    ),
    Recorded(
        "harmony with a preamble and a call",
        "<|channel|>analysis<|message|>I need it.<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>Let me look.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}',
        "Let me look.",
        [WEATHER],
        reasoning="I need it.",
        parser="openai",
    ),
    Recorded(
        "harmony with the recipient first, and two of each",
        " to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
        f"{FINAL}a<|end|>{FINAL}b ",
        "a\nb",
        [("now", "{}")],
        parser="openai",
    ),
    Recorded(
        "harmony without arguments",
        "<|channel|>commentary to=functions.now <|constrain|>json<|message|>",
        None,
        [("now", "{}")],
        parser="openai",
    ),
    Recorded(
        "harmony with arguments that are no JSON",
        "<|channel|>commentary to=functions.now<|message|> noon <|call|>",
        None,
        [("now", "noon ")],
        parser="openai",
    ),
    Recorded("harmony cut short", "<|channel|>ana", None, parser="openai"),
    Recorded("harmony without marks", "just text", "just text", parser="openai"),
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
