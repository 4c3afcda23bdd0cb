"""Texts with the slips that models make, and what they mean all the same: marks that are missing or
only spoken of, strings that look like numbers, Python that Python can't read. Each was read wrongly
once. And a text of each family that came later."""

from __future__ import annotations

from typing import Any

from tests.unit.text.recorded_answers import (
    CALL_BEGIN,
    CALLS_BEGIN,
    CALLS_END,
    CITY,
    CODER,
    QWEN,
    SEP,
    WEATHER,
    Recorded,
    function,
)

NUMBER = ("save", '{"code": "12345"}')
DSML = "<｜DSML｜"  # noqa: RUF001
DSML_END = "</｜DSML｜"  # noqa: RUF001
LIST = '[{"name": "get_weather", "arguments": {"city": "Oslo"}}, {"name": "now", "arguments": {}}]'
BOTH = [WEATHER, ("now", "{}")]
QUOTED = "sed -n '1,5p' a.txt"
OPEN_QWEN = QWEN.removesuffix("</tool_call>")


def _save(**properties: Any) -> list[Any]:
    tool = function("save", **properties)
    tool["function"]["parameters"]["$defs"] = {"Code": {"type": "string"}}
    return [tool]


def _kimi(*calls: tuple[str, str]) -> str:
    made = "".join(
        f"<|tool_call_begin|>{name}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        for name, arguments in calls
    )
    return f"<|tool_calls_section_begin|>{made}<|tool_calls_section_end|>"


_TEXT_SCHEMAS: dict[str, Any] = {
    "anyOf": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "types": {"type": ["string", "null"]},
    "a reference": {"$ref": "#/$defs/Code"},
    "a reference or null": {"oneOf": [{"$ref": "#/$defs/Code"}, {"type": "null"}]},
    "allOf": {"allOf": [{"$ref": "#/$defs/Code"}]},
}
_SAVED = {
    "qwen3_coder": "<tool_call>\n<function=save>\n<parameter=code>\n12345\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm45": "<tool_call>save\n<arg_key>code</arg_key>\n<arg_value>12345</arg_value>\n</tool_call>",
    "gemma4": '<|tool_call>call:save{code:<|"|>12345<|"|>}<tool_call|>',
    "functiongemma": "<start_function_call>call:save{code:<escape>12345<escape>}"
    "<end_function_call>",
    "deepseek_v32": f'{DSML}function_calls>\n{DSML}invoke name="save">\n'
    f'{DSML}parameter name="code" string="true">12345{DSML_END}parameter>\n'
    f"{DSML_END}invoke>\n{DSML_END}function_calls>",
}
STRINGS = [
    Recorded(
        f"{parser}: a string by {name}", text, None, [NUMBER], parser=parser,
        tools=_save(code=schema),
    )
    for parser, text in _SAVED.items()
    for name, schema in _TEXT_SCHEMAS.items()
] + [
    Recorded(
        "qwen coder: null where a string may be null, and other types",
        "<function=save><parameter=code>null</parameter><parameter=size>0012</parameter>"
        "<parameter=days>['a', {'b': None}]</parameter><parameter=more>1e999</parameter>"
        "</function>",
        None,
        [("save", '{"code": null, "size": "0012", "days": ["a", {"b": null}], "more": 1e999}')],
        parser="qwen3_coder",
        tools=_save(
            code={"type": ["string", "null"]},
            size={"type": ["string", "integer"]},
            days={"type": "array"},
            more={"type": "number"},
        ),
    ),
    Recorded(
        "gemma 4: strings without their quotes, and inside of lists",
        '<|tool_call>call:save{code:12345,list:[<|"|>1<|"|>,2],map:{a:<|"|>3<|"|>}}<tool_call|>',
        None,
        [("save", '{"code": "12345", "list": ["1", "2"], "map": {"a": 3}}')],
        parser="gemma4",
        tools=_save(
            code={"type": "string"},
            list={"type": "array", "items": {"type": "string"}},
            map={"type": "object", "properties": {"a": {"type": "integer"}}},
        ),
    ),
]  # fmt: skip

OBJECTS = [
    Recorded(
        "llama 3: a person",
        '{"name": "Alice", "age": 30}',
        '{"name": "Alice", "age": 30}',
        parser="llama3_json",
    ),
    Recorded(
        "llama 3: a person with parameters",
        '{"name": "Alice", "parameters": {"age": 30}}',
        '{"name": "Alice", "parameters": {"age": 30}}',
        parser="llama3_json",
    ),
    Recorded(
        "llama 3: a name alone", '{"name": "now"}', None, [("now", "{}")], parser="llama3_json"
    ),
    Recorded(
        "llama 3: names alone, then arguments",
        '{"type": "function", "name": "now"}; {"function": {"name": "now"}, "id": "c"}; '
        '{"name": "get_weather", "parameters": {"city": "Oslo"}}',
        None,
        [("now", "{}"), ("now", "{}"), WEATHER],
        parser="llama3_json",
    ),
    Recorded(
        "llama 3: a tool described",
        '[{"name": "now", "description": "the time"}]',
        '[{"name": "now", "description": "the time"}]',
        parser="llama3_json",
    ),
    Recorded(
        "llama 3: the name of no tool",
        '{"name": "later"}',
        '{"name": "later"}',
        parser="llama3_json",
    ),
    Recorded(
        "mistral's list of a name alone",
        '[TOOL_CALLS][{"name": "now"}]',
        None,
        [("now", "{}")],
        parser="mistral",
    ),
    Recorded(
        "mistral's names alone",
        "[TOOL_CALLS]now[TOOL_CALLS]now[ARGS][TOOL_CALLS] now\n",
        None,
        [("now", "{}")] * 3,
        parser="mistral",
    ),
    Recorded(
        "mistral: the name of no tool",
        "[TOOL_CALLS]now or later",
        "[TOOL_CALLS]now or later",
        parser="mistral",
    ),
    Recorded(
        "llama 3: an answer with objects in it",
        '{"calls": [{"name": "now", "parameters": {}}], "x": 1}',
        '{"calls": [{"name": "now", "parameters": {}}], "x": 1}',
        parser="llama3_json",
    ),
    Recorded(
        "llama 3: a call among words",
        'Here is {1}: {"name": "now", "parameters": {}} Would you like more?',
        "Here is {1}:\nWould you like more?",
        [("now", "{}")],
        parser="llama3_json",
    ),
    Recorded(
        "llama 3: arguments, a type and a fence",
        '```json\n{"type": "function", "name": "get_weather", "arguments": {"city": "Oslo"}}\n```',
        None,
        [WEATHER],
        parser="llama3_json",
    ),
    Recorded(
        "llama 3: a function within",
        '{"type": "function", "function": {"name": "now", "arguments": {}}}',
        None,
        [("now", "{}")],
        parser="llama3_json",
    ),
]

REASONING = [
    Recorded(
        "a call in reasoning that never ends",
        f"<think>I need it.\n\n{QWEN}",
        None,
        [WEATHER],
        reasoning="I need it.",
        reasoning_parser="qwen3",
    ),
    Recorded(
        "qwen coder: a call in reasoning that the prompt began",
        f"I need it.\n{CODER}\n",
        None,
        [("get_weather", '{"city": "Oslo", "days": 3}')],
        reasoning="I need it.",
        parser="qwen3_coder",
        reasoning_parser="qwen3",
        prompt="<|im_start|>assistant\n<think>\n",
    ),
    Recorded(
        "a call that reasoning thinks of",
        f"<think>Maybe {QWEN}? No, <tool_call> is wrong.</think>No.",
        "No.",
        reasoning=f"Maybe {QWEN}? No, <tool_call> is wrong.",
        reasoning_parser="qwen3",
    ),
    Recorded(
        "a mark and then a call in reasoning that never ends",
        f"<think>I write <tool_call> and so: {QWEN}",
        None,
        [WEATHER],
        reasoning="I write <tool_call> and so:",
        reasoning_parser="qwen3",
    ),
    Recorded(
        "a second end of reasoning",
        "<think>hm</think>\n</think>Yes.</think> No.",
        "Yes. No.",
        reasoning="hm",
        reasoning_parser="qwen3",
    ),
    Recorded(
        "an end of reasoning where there was none",
        f"</think>\n\nLet me see.</think>{QWEN}",
        "Let me see.",
        [WEATHER],
        reasoning_parser="qwen3",
        prompt="assistant\n<think>\n\n</think>\n\n",
    ),
    Recorded(
        "an answer about marks",
        "<think>hm</think>Write <think> and </think>.",
        "Write <think> and </think>.",
        reasoning="hm",
        reasoning_parser="qwen3",
    ),
    Recorded(
        "marks of reasoning in an argument",
        '<think>a</think><tool_call>{"name": "f", "arguments": {"a": "x</think>y"}}</tool_call>',
        None,
        [("f", '{"a": "x</think>y"}')],
        reasoning="a",
        reasoning_parser="qwen3",
    ),
    Recorded(
        "reasoning in two parts",
        "<think>a</think>\n<think>b</think>c",
        "c",
        reasoning="a\nb",
        reasoning_parser="qwen3",
    ),
    Recorded(
        "gemma 4: reasoning without a word, and later",
        "<|channel>let me<channel|>Yes.<|channel>thought\nor not<channel|>No.<channel|>",
        "Yes.\nNo.",
        reasoning="let me\nor not",
        parser="gemma4",
        reasoning_parser="gemma4",
    ),
]

PYTHON = [
    Recorded(
        "pythonic: a line break in a string",
        "[get_weather(city='Os\nlo'), now()]",
        None,
        [("get_weather", '{"city": "Os\\nlo"}'), ("now", "{}")],
        parser="pythonic",
    ),
    Recorded(
        "pythonic: words before and after",
        'Let me see [1].\n[now(), get_weather(city="Oslo")]\nThere.',
        "Let me see [1].\nThere.",
        [("now", "{}"), WEATHER],
        parser="pythonic",
    ),
    Recorded(
        "pythonic: code among words",
        "Write [sorted(key=1)] there.",
        "Write [sorted(key=1)] there.",
        parser="pythonic",
    ),
    Recorded(
        "lfm2: what Python refuses",
        "<|tool_call_start|>[a-b(month=07, tags={'x', 'y'}, s='''it's\n\"it\"''', "
        "e=\"\\ud83d\\ude00 \\x41\", p='a' 'b')]<|tool_call_end|>",
        None,
        [
            (
                "a-b",
                '{"month": 7, "tags": ["x", "y"], "s": "it\'s\\n\\"it\\"", "e": "😀 A", "p": "ab"}',
            )
        ],
        parser="lfm2",
    ),
    Recorded(
        "lfm2: quotes inside of quotes",
        f"<|tool_call_start|>[bash(command='{QUOTED}'), bash(command='it's', n=2)]"
        "<|tool_call_end|>Done.",
        "Done.",
        [("bash", f'{{"command": "{QUOTED}"}}'), ("bash", '{"command": "it\'s", "n": 2}')],
        parser="lfm2",
    ),
    Recorded(
        "lfm2: a call, something else and a call",
        "<|tool_call_start|>[now(), what?, now(), f(x=celsius)]<|tool_call_end|>",
        "what?,",
        [("now", "{}"), ("now", "{}"), ("f", '{"x": "celsius"}')],
        parser="lfm2",
    ),
    Recorded(
        "lfm2's JSON",
        f"Sure.<|tool_call_start|>{LIST}<|tool_call_end|>",
        "Sure.",
        BOTH,
        parser="lfm2",
    ),
    Recorded(
        "lfm2 says it twice",
        "<|tool_call_start|>[now()]<|tool_call_end|>[now()]<|tool_call_end|>",
        None,
        [("now", "{}")],
        parser="lfm2",
    ),
]

MARKS = [
    Recorded(
        "qwen coder without the ends of arguments",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n<parameter=days>\n3\n"
        "</function>\n</tool_call>",
        None,
        [("get_weather", '{"city": "Oslo", "days": 3}')],
        parser="qwen3_coder",
    ),
    Recorded(
        "qwen coder: tags inside of an argument",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nan <parameter=x> and a "
        "</function> in it\n</parameter>\n</function>\n</tool_call>",
        None,
        [("get_weather", '{"city": "an <parameter=x> and a </function> in it"}')],
        parser="qwen3_coder",
    ),
    Recorded(
        "qwen coder: calls without an end between them",
        "<tool_call>\n<function=now>\n</function>\n<tool_call>\n<function=get_weather>\n"
        "<parameter=city>\nOslo\n</function>\n<tool_call>\n<function=now>\n</function>\n"
        "</tool_call>",
        None,
        [("now", "{}"), WEATHER, ("now", "{}")],
        parser="qwen3_coder",
    ),
    Recorded(
        "a call behind a mark that is spoken of",
        f"I use <tool_call> for it:\n{QWEN}",
        "I use <tool_call> for it:",
        [WEATHER],
    ),
    Recorded("two calls without an end between them", f"{OPEN_QWEN}\n{QWEN}", None, [WEATHER] * 2),
    Recorded(
        "words behind a call without an end", f"{OPEN_QWEN}\nand so on", "and so on", [WEATHER]
    ),
    Recorded(
        "a bracket too few, and one too many",
        '<tool_call>{"name": "f", "arguments": {"a": [1, 2</tool_call>'
        '<tool_call>{"name": "g", "arguments": {}}}</tool_call>',
        None,
        [("f", '{"a": [1, 2]}'), ("g", "{}")],
    ),
    Recorded(
        "a line break inside of JSON",
        '<tool_call>{"name": "f", "arguments": {"a":\n"x\ny\t"}}</tool_call>',
        None,
        [("f", '{"a":\n"x\\ny\\t"}')],
    ),
    Recorded("a list of calls", f"<tool_call>{LIST}</tool_call>", None, BOTH),
    Recorded(
        "gemma 4: an end of nothing",
        "<|tool_call>call:now{}; <tool_call|><tool_call|>Done.",
        "; Done.",
        [("now", "{}")],
        parser="gemma4",
    ),
    Recorded(
        "gemma 4: an end before its bracket",
        "<|tool_call>call:get_weather{days:3<tool_call|>Done.",
        "Done.",
        [("get_weather", '{"days": 3}')],
        parser="gemma4",
    ),
    Recorded(
        "deepseek v3.1 without an end between calls",
        f"{CALLS_BEGIN}{CALL_BEGIN}get_weather{SEP}{CITY}{CALL_BEGIN}now{SEP}{{}}{CALLS_END}.",
        ".",
        BOTH,
        parser="deepseek_v31",
    ),
]

FAMILIES = [
    Recorded(
        "kimi",
        "Let me see. " + _kimi(("functions.get_weather:0", CITY), ("functions.now:1", "{}")),
        "Let me see.",
        BOTH,
        parser="kimi_k2",
    ),
    Recorded(
        "kimi without a prefix, and without an end",
        "<|tool_calls_section_begin|> so <|tool_call_begin|>now:0 <|tool_call_argument_begin|> "
        '{"a": 1}<|tool_call_begin|>functions.a.b:12<|tool_call_argument_begin|>{"b": "x',
        None,
        [("now", '{"a": 1}'), ("a.b", '{"b": "x')],
        parser="kimi_k2",
    ),
    Recorded(
        "glm 4.5",
        "<think>so</think>\nI see.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>"
        "Oslo</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"
        "<tool_call>now\n</tool_call>",
        "I see.",
        [("get_weather", '{"city": "Oslo", "days": 3}'), ("now", "{}")],
        reasoning="so",
        parser="glm45",
        reasoning_parser="glm45",
    ),
    Recorded(
        "glm 4.7, in one line and with space that counts",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>  Os\nlo </arg_value></tool_call>"
        "<tool_call>now</tool_call> <tool_call> is a mark",
        "<tool_call> is a mark",
        [("get_weather", '{"city": "  Os\\nlo "}'), ("now", "{}")],
        parser="glm47",
    ),
    Recorded(
        "deepseek v3.2",
        f'I see.\n\n{DSML}function_calls>\n{DSML}invoke name="get_weather">\n'
        f'{DSML}parameter name="city" string="true">Oslo{DSML_END}parameter>\n'
        f'{DSML}parameter name="days" string="false">3{DSML_END}parameter>\n'
        f'{DSML}parameter name="more" string="false">[1, null]{DSML_END}parameter>\n'
        f'{DSML_END}invoke>\n{DSML}invoke name="now">\n{DSML_END}invoke>\n'
        f"{DSML_END}function_calls>",
        "I see.",
        [("get_weather", '{"city": "Oslo", "days": 3, "more": [1, null]}'), ("now", "{}")],
        parser="deepseek_v32",
    ),
    Recorded("granite", f"I see.\n<|tool_call|> {LIST}", "I see.", BOTH, parser="granite"),
    Recorded(
        "granite's words, the arguments first",
        '<tool_call> [{"arguments": {"city": "Oslo"}, "name": "get_weather"}]',
        None,
        [WEATHER],
        parser="granite",
    ),
    Recorded(
        "phi",
        f"I see.\nfunctools{LIST}\nMore?",
        "I see.\nMore?",
        BOTH,
        parser="phi4_mini_json",
    ),
    Recorded(
        "phi: no call",
        "Use functools[] or functools.cache",
        "Use functools[] or functools.cache",
        parser="phi4_mini_json",
    ),
    Recorded(
        "phi's tokens",
        f"<|tool_call|>{LIST}<|/tool_call|>",
        None,
        BOTH,
        parser="phi4_mini_json",
    ),
    Recorded(
        "nemotron",
        f"<think>so</think>\n\n<TOOLCALL>{LIST}</TOOLCALL>",
        None,
        BOTH,
        reasoning="so",
        parser="nemotron_json",
        reasoning_parser="nemotron_v3",
    ),
    Recorded("xlam", f" {LIST}", None, BOTH, parser="xlam"),
    Recorded("xlam in a fence", f"I see.\n```json\n{LIST}\n```", "I see.", BOTH, parser="xlam"),
    Recorded(
        "xlam with marks of others",
        f"a[TOOL_CALLS]{LIST} b <tool_call>{LIST}</tool_call>",
        "a\nb",
        BOTH * 2,
        parser="xlam",
    ),
    Recorded(
        "xlam: no call",
        '[1] and [{"name": "Bob"}] <tool_call>',
        '[1] and [{"name": "Bob"}] <tool_call>',
        parser="xlam",
    ),
    Recorded(
        "olmo 3",
        "I see.<function_calls>get_weather(city='Oslo')\nnow()</function_calls>",
        "I see.",
        BOTH,
        parser="olmo3",
    ),
]

SLIPS = [*STRINGS, *OBJECTS, *REASONING, *PYTHON, *MARKS, *FAMILIES]
