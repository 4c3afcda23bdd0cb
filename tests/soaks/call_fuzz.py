"""Every format of tool calls against its own writer:

    python -m tests.soaks.call_fuzz --first 0 --cases 100000

A case writes calls as a model's chat template would (any JSON arguments by a drawn schema, odd
strings, marks inside of strings), cuts the text anywhere and reads it back: whole, by characters
and in random pieces the same calls must come out. A case is a seed, so that a run may be done in
parts; it says how far it is, and names the seed of every case that fails.
"""

from __future__ import annotations

import argparse
import functools
import json
import keyword
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from manyroots.text.chat import ChatTemplate
from manyroots.text.chat_output import Answer
from manyroots.text.formats.choice import ChatFormat, choose_format
from manyroots.text.tools import ToolUse, check_tools
from tests.helpers.family_templates import BEGIN, END, OTHER_SPELLINGS, TEMPLATES
from tests.helpers.seeded import Draw
from tests.soaks.bfcl import Call, messages_of
from tests.unit.text.recorded_answers import joined, pieces, plain

MARKS = (
    "<tool_call>", "</tool_call>", "</think>", "<think>", "[TOOL_CALLS]", "[ARGS]", "<function=f>",
    "<parameter=a>", "</function>", "<arg_key>", "<|tool_call_end|>", "<|python_tag|>",
    "functools[",
    "</function_calls>", "<|end|>", "<|call|>", "<tool_call|>", "```json", "\n```", '{"name": "',
    '"}}', "')]", '")', "\\", "\\n", "\\u0041", "'''", '"""', "null", "12345", "true", "\n", " ",
    "<|tool_call_begin|>", "</TOOLCALL>", "<escape>", '<|"|>', "</parameter>",
    "<｜tool▁call▁end｜>",  # noqa: RUF001
)  # fmt: skip
_PLAIN_KEYS = ("city", "days", "a", "b2", "_x", "Größe", "from", "class", "arguments", "name", "id")
_NAMES = ("get_weather", "now", "geo.find", "a-b", "f", "save_2", "函数")


@dataclass(frozen=True)
class Writer:
    """How a family writes calls, and what it can't write so that it could be read."""

    parser: str
    write: Callable[[list[Call], ToolUse], str]
    forbidden: tuple[str, ...] = ()
    """Texts that no string has in it: they end strings, and nothing escapes them."""
    is_typed: bool = False
    """Strings are written without quotes, so that their schema tells them from other values."""
    has_plain_keys: bool = False
    """Keys inside of objects are written without quotes."""

    @functools.cached_property
    def format(self) -> ChatFormat:
        return choose_format(None, self.parser, "none")


def _by_template(source: str) -> Callable[[list[Call], ToolUse], str]:
    template = ChatTemplate(source, {})

    def write(calls: list[Call], use: ToolUse) -> str:
        text = template.render(messages_of(calls), use=use, add_generation_prompt=False)
        return text.partition(BEGIN)[2].removesuffix(END)

    return write


def _python(begin: str, separator: str, end: str) -> Callable[[list[Call], ToolUse], str]:
    """As Python itself writes values, which no template can."""

    def write(calls: list[Call], use: ToolUse) -> str:
        made = [
            f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
            for name, arguments in calls
        ]
        return begin + separator.join(made) + end

    return write


_TYPED: dict[str, tuple[str, ...]] = {
    "qwen3_coder": ("</parameter>", "<parameter=", "</function>"),
    "glm45": ("</arg_value>",),
    "glm47": ("</arg_value>",),
    "deepseek_v32": ("</｜DSML｜parameter>",),  # noqa: RUF001
}
_QUOTED = {"gemma4": ('<|"|>',), "functiongemma": ("<escape>",)}
WRITERS: dict[str, Writer] = {
    name: Writer(
        name.partition(",")[0],
        _by_template(source),
        forbidden=_TYPED.get(name) or _QUOTED.get(name) or (),
        is_typed=name in _TYPED,
        has_plain_keys=name in _QUOTED,
    )
    for name, source in {**TEMPLATES, **OTHER_SPELLINGS}.items()
} | {
    "pythonic, by repr": Writer("pythonic", _python("[", ", ", "]")),
    "lfm2, by repr": Writer("lfm2", _python("<|tool_call_start|>[", ", ", "]<|tool_call_end|>")),
    "olmo3, by repr": Writer("olmo3", _python("<function_calls>", "\n", "</function_calls>")),
}


class Case:
    """One drawn case."""

    def __init__(self, seed: int) -> None:
        self.name = list(WRITERS)[seed % len(WRITERS)]
        self._writer = WRITERS[self.name]
        self._draw = draw = Draw(seed)
        names = draw.sample(_NAMES, draw.randint(1, 3))
        schemas = {name: self._parameters() for name in names}
        self.use = check_tools(
            [
                {"type": "function", "function": {"name": name, "parameters": schema}}
                for name, schema in schemas.items()
            ],
            "auto",
        )
        chosen = [draw.choice(names) for _ in range(draw.choice((1, 1, 2, 3)))]
        self.calls: list[Call] = [(name, self._arguments(schemas[name])) for name in chosen]
        self.content = draw.choice((None, "I see.", "So\n\nit is: é"))
        self._written = self._writer.write(self.calls, self.use)
        # A call is looked for in reasoning by its mark, and "</think>" ends reasoning anywhere.
        begins = self._writer.format.tools.begins
        may_be_open = self._written.startswith(begins) and "</think>" not in self._written
        self.thoughts = draw.choice((None, None, "closed", "open" if may_be_open else "closed"))
        if self._writer.format.tools.prefix is not None:
            self.thoughts = self.content = None  # which the format has marks of its own for
        if self.thoughts == "open":
            self.content = None

    @property
    def text(self) -> str:
        """What the model writes."""
        think = {None: "", "closed": "<think>I think\n</think>\n\n", "open": "<think>I think\n"}
        content = "" if self.content is None else f"{self.content}\n"
        return think[self.thoughts] + content + self._written

    def read(self, parts: list[str]) -> Answer:
        chosen = self._writer.format
        if self.thoughts is not None:
            chosen = choose_format(None, self._writer.parser, "qwen3")
        output = chosen.output(self.use)
        events = [event for part in parts for event in output.push(part)] + output.finish()
        answer = joined(events)
        assert answer == output.answer
        return answer

    def check(self) -> None:
        """Raises AssertionError where other calls come out than went in."""
        text = self.text
        whole = self.read([text])
        assert whole.reasoning == (None if self.thoughts is None else "I think"), whole.reasoning
        assert whole.content == self.content, whole.content
        read = [(call.name, json.loads(call.arguments)) for call in whole.tool_calls]
        assert json.dumps(read) == json.dumps(self.calls), (read, self.calls, text)
        for parts in (list(text), pieces(text, self._draw)):
            assert plain(self.read(parts)) == plain(whole), (parts, text)

    def _parameters(self) -> dict[str, Any]:
        draw = self._draw
        keys = draw.sample(_PLAIN_KEYS, draw.randint(0, 4))
        is_json = not (self._writer.is_typed or self._writer.has_plain_keys)
        if is_json and self._writer.parser not in ("pythonic", "lfm2", "olmo3"):
            keys = [*keys, *draw.list_of(self._string, most=1)]
        return {
            "type": "object",
            "properties": {key: self._schema() for key in keys},
            "$defs": {"Text": {"type": "string"}, "Number": {"type": "number"}},
        }

    def _schema(self) -> dict[str, Any]:
        draw = self._draw
        kinds: list[dict[str, Any]] = [
            {"type": "string"}, {"type": "string"}, {"type": "integer"}, {"type": "number"},
            {"type": "boolean"}, {"type": "array"}, {"type": "object"},
            {"type": "array", "items": {"type": "string"}},
            {"type": "array", "items": {"$ref": "#/$defs/Number"}},
            {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}},
            {"type": ["string", "null"]}, {"anyOf": [{"type": "string"}, {"type": "null"}]},
            {"anyOf": [{"$ref": "#/$defs/Text"}, {"type": "null"}]}, {"$ref": "#/$defs/Text"},
            {"allOf": [{"$ref": "#/$defs/Text"}]}, {"type": ["string", "integer"]},
            {"oneOf": [{"type": "integer"}, {"type": "null"}]}, {"$ref": "#/$defs/Number"},
            {"description": "anything"},
        ]  # fmt: skip
        if draw.random() < 0.1:
            return {"enum": draw.list_of(self._string, least=1, most=3)}
        return draw.choice(kinds)

    def _arguments(self, parameters: dict[str, Any]) -> dict[str, Any]:
        named = parameters["properties"].items()
        return {key: self._value(schema) for key, schema in named if self._draw.random() < 0.8}

    def _value(self, schema: dict[str, Any]) -> Any:
        draw = self._draw
        if "enum" in schema:
            return draw.choice(schema["enum"])
        if "$ref" in schema:
            return self._number() if "Number" in schema["$ref"] else self._string()
        if parts := schema.get("anyOf") or schema.get("oneOf"):
            return self._of_union([self._value(part) for part in parts])
        if parts := schema.get("allOf"):
            return self._value(parts[0])
        kind = schema.get("type")
        if isinstance(kind, list):
            return self._of_union([self._value({"type": one}) for one in kind])
        match kind:
            case "string":
                return self._string()
            case "integer":
                return draw.any_integer()
            case "number":
                return self._number()
            case "boolean":
                return draw.flag()
            case "null":
                return None
            case "array":
                items = schema.get("items")
                return draw.list_of(lambda: self._value(items or {"type": "any"}), most=3)
            case "object" if "properties" in schema:
                return {key: self._value(one) for key, one in schema["properties"].items()}
            case "object":
                return {self._key(): self._json(2) for _ in range(draw.randint(0, 3))}
            case "any":
                return self._json(2)
        # What a schema does not say is a string where nothing else tells.
        return self._string() if self._writer.is_typed else self._json(2)

    def _of_union(self, values: list[Any]) -> Any:
        """One of several types. Where a schema alone tells them apart, no string may look like a
        value of the other type."""
        value = self._draw.choice(values)
        is_unclear = self._writer.is_typed and self._writer.parser != "deepseek_v32"
        if isinstance(value, str) and is_unclear:
            looks_like = value.strip()
            is_number = any(isinstance(other, int) for other in values)
            if looks_like in ("null", "None", "true", "True") or is_number:
                return f"x{value}"
        return value

    def _json(self, depth: int) -> Any:
        draw = self._draw
        match draw.randrange(7 if depth else 5):
            case 0:
                return None
            case 1:
                return draw.flag()
            case 2:
                return draw.any_integer()
            case 3:
                return self._number()
            case 4:
                return self._string()
            case 5:
                return draw.list_of(lambda: self._json(depth - 1), most=3)
        return {self._key(): self._json(depth - 1) for _ in range(draw.randint(0, 3))}

    def _number(self) -> float:
        number = self._draw.any_float()
        is_finite = number == number and abs(number) != float("inf")
        return number if is_finite else 0.5

    def _key(self) -> str:
        return self._draw.choice(_PLAIN_KEYS) if self._writer.has_plain_keys else self._string()

    def _string(self) -> str:
        draw = self._draw
        if draw.random() < 0.2:
            return draw.choice(("", "12345", "null", "Oslo", "true", "1e5", "[1]", " x "))
        parts = [draw.choice(MARKS) if draw.flag() else draw.text(most=6) for _ in range(3)]
        text = "".join(parts)
        for mark in self._writer.forbidden:
            text = text.replace(mark, "")
        return "" if any(mark in text for mark in self._writer.forbidden) else text


assert set(keyword.kwlist) & set(_PLAIN_KEYS), "names that Python has for itself"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--cases", type=int, default=1000)
    options = parser.parse_args()
    began, num_failed = time.perf_counter(), 0
    end = options.first + options.cases
    for seed in range(options.first, end):
        try:
            Case(seed).check()
        except Exception as error:  # whatever it is, it is to be reported
            num_failed += 1
            name = list(WRITERS)[seed % len(WRITERS)]
            print(f"seed {seed}, {name}: {type(error).__name__}: {str(error)[:600]}", flush=True)
        if (seed + 1) % 5000 == 0 or seed + 1 == end:
            took = time.perf_counter() - began
            print(f"up to seed {seed}: {num_failed} failed, {took:.0f} s", flush=True)
    print(f"{options.cases} cases of {len(WRITERS)} writers, {num_failed} failed")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
