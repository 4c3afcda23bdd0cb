"""The tools of a response as a chat's functions, and the functions' calls as the caller knows them.

Takes `tools` and `tool_choice` of `/v1/responses`; gives those of a chat. A chat has no namespaces:
a function in one is called `namespace__function` there, and by its own name outside. It has no
custom tools either, whose input is a text: there they are functions of one string, `input`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from manyroots.text.chat_messages import parsed_arguments

_SEPARATOR = "__"
_CALLABLE = ("function", "custom")
"""Types of tools that the caller carries out."""


@dataclass(frozen=True, slots=True)
class CallersTool:
    """A tool by the words of its caller."""

    name: str
    namespace: str | None
    is_custom: bool
    """Its input is a text."""


def callers_tools(tools: Iterable[Any]) -> dict[str, CallersTool]:
    """By their names in the chat."""
    return {
        in_chat(tool["name"], space): CallersTool(tool["name"], space, tool["type"] == "custom")
        for tool, space in _flat(tools)
        if _is_callable(tool) and isinstance(tool.get("name"), str)
    }


def chat_tools(tools: Iterable[Any]) -> list[Any]:
    """Tools of types that the caller does not carry out go on as they are."""
    return [_chat_tool(tool, space) for tool, space in _flat(tools)]


def chat_choice(choice: Any, tools: Iterable[Any]) -> Any:
    """A `tool_choice` in a chat's words."""
    if not isinstance(choice, Mapping) or _is_of_chats(choice):
        return choice
    if choice.get("type") in _CALLABLE:
        return {"type": "function", "function": {"name": _chosen(choice, _spaces(tools))}}
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        spaces = _spaces(tools)
        return {**choice, "tools": [_allowed(tool, spaces) for tool in choice["tools"]]}
    return choice


def in_chat(name: Any, namespace: Any) -> Any:
    """What a chat calls a tool. Values that are no names stay as they are, to be refused there."""
    if not isinstance(name, str) or not isinstance(namespace, str):
        return name
    return f"{namespace}{_SEPARATOR}{name}"


def arguments_of(text: Any) -> Any:
    """The arguments of a custom tool's function, whose input is `text`."""
    return {"input": text} if isinstance(text, str) else text


def input_of(arguments: str) -> str:
    """The text in such arguments; all of them if the model wrote something else."""
    text = parsed_arguments(arguments).get("input")
    return text if isinstance(text, str) else arguments


def _is_callable(tool: Any) -> bool:
    is_tool = isinstance(tool, Mapping) and not _is_of_chats(tool)
    return is_tool and tool.get("type") in _CALLABLE


def _is_of_chats(tool: Mapping[str, Any]) -> bool:
    """Written as in chats already, as some clients do."""
    return isinstance(tool.get("function"), Mapping)


def _flat(tools: Iterable[Any]) -> Iterator[tuple[Any, str | None]]:
    """Tools, and those inside of namespaces, each with its namespace."""
    for tool in tools:
        inner = tool.get("tools") if isinstance(tool, Mapping) else None
        if isinstance(inner, list) and tool.get("type") == "namespace":
            for held in inner:
                yield held, str(tool.get("name"))
        else:
            yield tool, None


def _chat_tool(tool: Any, namespace: str | None) -> Any:
    """A function's fields lie beside its type here, and one level deeper in a chat."""
    if not _is_callable(tool):
        return tool
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    if tool["type"] == "custom":
        function |= _taking_text(tool)
    if "name" in function:
        function["name"] = in_chat(function["name"], namespace)
    return {"type": "function", "function": function}


def _taking_text(tool: Mapping[str, Any]) -> dict[str, Any]:
    """What a custom tool's function has of its own. The model is told the format of the input."""
    described, form = tool.get("description"), tool.get("format")
    if isinstance(form, Mapping) and isinstance(form.get("definition"), str):
        rule = f"The input must match this {form.get('syntax', '')} grammar:\n{form['definition']}"
        described = f"{described}\n\n{rule}" if described else rule
    parameters = {
        "type": "object",
        "properties": {"input": {"type": "string", "description": "The whole input."}},
        "required": ["input"],
    }
    return {"parameters": parameters} | ({} if described is None else {"description": described})


def _spaces(tools: Iterable[Any]) -> dict[str, list[str | None]]:
    """By name: the namespaces that have such a tool, None for no namespace."""
    spaces: dict[str, list[str | None]] = {}
    for tool, space in _flat(tools):
        if _is_callable(tool) and isinstance(tool.get("name"), str):
            spaces.setdefault(tool["name"], []).append(space)
    return spaces


def _allowed(tool: Any, spaces: Mapping[str, list[str | None]]) -> Any:
    if not _is_callable(tool):
        return tool
    return {**tool, "type": "function", "name": _chosen(tool, spaces)}


def _chosen(choice: Mapping[str, Any], spaces: Mapping[str, list[str | None]]) -> Any:
    """What a chat calls the tool that a choice names, with its namespace or without."""
    name, wanted = choice.get("name"), choice.get("namespace")
    known = spaces.get(name, []) if isinstance(name, str) else []
    if wanted is not None:
        return in_chat(name, wanted) if wanted in known else name
    return name if not known or None in known else in_chat(name, known[0])
