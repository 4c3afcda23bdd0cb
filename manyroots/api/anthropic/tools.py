"""The tools of a message as a chat's: those that the request declares, and what its conversation
changed of them.

Takes `MessagesRequest`; gives a list for `ChatRequest`, and its choice. Raises RequestError naming
the tool or the block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from manyroots.api.anthropic.shapes import PromptFields
from manyroots.errors import RequestError

TOOL_CHANGES = ("tool_addition", "tool_removal")
"""Blocks of a conversation that change the tools from there on. Claude Code sends them where it
searches for tools (ENABLE_TOOL_SEARCH)."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_tools(request: PromptFields) -> list[Any]:
    """The tools that are there at the end of the conversation. A prompt tells all of them at its
    beginning, also those that are to be found by a search first (`defer_loading`)."""
    declared = [_tool(tool, f"tools[{place}]") for place, tool in enumerate(request.tools or ())]
    added: dict[str, Any] = {}
    removed: set[str] = set()
    for block, where in _changes(request.messages):
        changed = block.get("tool")
        changed = changed if isinstance(changed, Mapping) else {}
        kind = changed.get("type")
        if kind == "tool_definition" and block["type"] == "tool_addition":
            tool = _tool(changed.get("definition"), f"{where}.tool.definition")
            added[_name(tool)] = tool
            removed.discard(_name(tool))
        elif kind == "tool_reference":
            change = removed.add if block["type"] == "tool_removal" else removed.discard
            change(str(changed.get("name")))
        else:
            raise RequestError(
                f"{where}.tool is of type {kind!r:.60}; this server knows tool_reference and "
                "tool_definition.",
                field=where,
            )
    tools = [*(tool for tool in declared if _name(tool) not in added), *added.values()]
    return [tool for tool in tools if _name(tool) not in removed]


def _changes(messages: list[Any]) -> Iterator[tuple[Mapping[str, Any], str]]:
    for place, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        for number, block in enumerate(content if isinstance(content, list) else ()):
            if isinstance(block, Mapping) and block.get("type") in TOOL_CHANGES:
                yield block, f"messages[{place}].content[{number}]"


def _tool(tool: Any, where: str) -> Any:
    if not isinstance(tool, Mapping):
        raise RequestError(
            f"{where} is not an object; give a name and an input_schema.", field=where
        )
    if tool.get("type") not in (None, "custom"):
        return tool  # one that a server runs: left out where functions are known
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    for name in ("description", "strict"):
        if tool.get(name) is not None:
            function[name] = tool[name]
    return {"type": "function", "function": function}


def _name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    return str((function if isinstance(function, Mapping) else tool).get("name"))


def chat_choice(choice: dict[str, Any] | None) -> tuple[Any, bool | None]:
    """The choice as a chat's, and whether several calls are welcome."""
    if choice is None:
        return None, None
    kind = choice.get("type")
    parallel = False if choice.get("disable_parallel_tool_use") else None
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}, parallel
    if kind not in _CHOICES:
        raise RequestError(
            f"tool_choice.type is {kind!r:.60}; choose auto, any, none or tool.",
            field="tool_choice.type",
        )
    return _CHOICES[kind], parallel
