"""The tools of a chat, checked: what the model may call, and whether it must.

Takes `tools` and `tool_choice` as a caller sent them (OpenAI's shapes, as plain values); gives a
`ToolUse`. Raises RequestError naming the field.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manyroots.errors import RequestError

MAX_TOOLS = 1024
_NAME = re.compile(r"[^\s\"'<>{}()\[\]=,\\|]{1,256}")
"""Names are part of what models write; these characters would end them there."""


class ToolChoice(enum.Enum):
    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the caller can carry out."""

    name: str
    parameters: Mapping[str, Any] | None
    """A JSON schema of its arguments; None for one without arguments."""
    declaration: dict[str, Any]
    """The tool as the caller wrote it, for the chat template."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request."""

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice.NONE
    name: str | None = None
    """With NAMED: which one must be called."""
    is_parallel: bool = True
    """Several calls in one answer are welcome."""

    @property
    def is_on(self) -> bool:
        """Whether the model may call at all."""
        return self.choice is not ToolChoice.NONE

    @property
    def must_call(self) -> bool:
        """Whether the answer is a call, and nothing else."""
        return self.choice in (ToolChoice.REQUIRED, ToolChoice.NAMED)

    @property
    def names(self) -> frozenset[str]:
        """Of all tools that the model is told of."""
        return frozenset(tool.name for tool in self.tools)

    @property
    def declarations(self) -> list[dict[str, Any]]:
        return [tool.declaration for tool in self.tools]

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """Those that the choice leaves."""
        if self.choice is ToolChoice.NAMED:
            return tuple(tool for tool in self.tools if tool.name == self.name)
        return self.tools if self.is_on else ()


NO_TOOLS = ToolUse()


def check_tools(tools: Any, choice: Any, parallel: Any = None) -> ToolUse:
    """What a request says of tools. Without a choice the model chooses, if there are any."""
    if tools is not None and not isinstance(tools, list):
        raise RequestError(f"tools is {_brief(tools)}; it must be a list.", field="tools")
    if tools and len(tools) > MAX_TOOLS:
        raise RequestError(
            f"tools has {len(tools)} entries; at most {MAX_TOOLS} are allowed.", field="tools"
        )
    checked = tuple(_tool(tool, f"tools[{place}]") for place, tool in enumerate(tools or ()))
    _refuse_twins(checked)
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        checked, choice = _allowed(choice, checked)
    kind, name = _choice(choice, checked)
    if parallel not in (None, True, False):
        raise RequestError(
            f"parallel_tool_calls is {_brief(parallel)}; it must be true or false.",
            field="parallel_tool_calls",
        )
    # Naming a function asks for one call of it, as with OpenAI and vLLM.
    is_parallel = parallel is True if kind is ToolChoice.NAMED else parallel is not False
    return ToolUse(checked, kind, name, is_parallel)


def _tool(tool: Any, where: str) -> Tool:
    kind = tool.get("type", "function") if isinstance(tool, Mapping) else None
    if kind != "function":
        raise RequestError(
            f"{where} is of type {_brief(kind)}; this server knows tools of type 'function'.",
            field=where,
        )
    function = tool if _is_flat(tool) else tool.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}.function is missing; describe the function.", field=where)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{where}.function.name is {_brief(name)}; use up to 256 letters, digits, dots, "
            "dashes and underscores.",
            field=f"{where}.function.name",
        )
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise RequestError(
            f"{where}.function.description is {_brief(description)}; it must be a string.",
            field=f"{where}.function.description",
        )
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise RequestError(
            f"{where}.function.parameters is {_brief(parameters)}; it must be a JSON schema.",
            field=f"{where}.function.parameters",
        )
    if (strict := function.get("strict")) not in (None, True, False):
        raise RequestError(
            f"{where}.function.strict is {_brief(strict)}; it must be true or false.",
            field=f"{where}.function.strict",
        )
    shown: dict[str, Any] = {"name": name}
    if description is not None:
        shown["description"] = description
    # Most templates print the parameters without asking whether there are any.
    shown["parameters"] = parameters or {"type": "object", "properties": {}}
    return Tool(name, parameters, {"type": "function", "function": shown})


def _is_flat(tool: Mapping[str, Any]) -> bool:
    """As in the Responses API, whose tools Cursor sends to chats, too."""
    return "function" not in tool and "name" in tool and "input_schema" not in tool


def _refuse_twins(tools: Sequence[Tool]) -> None:
    seen: set[str] = set()
    for place, tool in enumerate(tools):
        if tool.name in seen:
            raise RequestError(
                f"tools[{place}] has the name {tool.name!r} of another tool; give each its own.",
                field="tools",
            )
        seen.add(tool.name)


def _allowed(choice: Mapping[str, Any], tools: Sequence[Tool]) -> tuple[tuple[Tool, ...], Any]:
    """Some of the tools, and the choice among them. The others are not shown to the model either:
    it would call what it sees."""
    within = choice.get("allowed_tools", choice)  # a level deeper in chats than in responses
    listed = within.get("tools") if isinstance(within, Mapping) else None
    mode = within.get("mode", "auto") if isinstance(within, Mapping) else None
    if not isinstance(listed, list) or not listed or mode not in ("auto", "required"):
        raise RequestError(
            "tool_choice of type 'allowed_tools' needs tools, a list of functions by name, and "
            "mode 'auto' or 'required'.",
            field="tool_choice",
        )
    names = [_allowed_name(tool) for tool in listed]
    for name in names:
        if all(tool.name != name for tool in tools):
            raise _not_among(name, tools)
    return tuple(tool for tool in tools if tool.name in names), mode


def _allowed_name(tool: Any) -> Any:
    if not isinstance(tool, Mapping):
        return tool
    function = tool.get("function", tool)
    return function.get("name") if isinstance(function, Mapping) else None


def _not_among(name: Any, tools: Sequence[Tool]) -> RequestError:
    return RequestError(
        f"tool_choice names {_brief(name)}, which is not among the tools; choose one of "
        f"{_brief(', '.join(tool.name for tool in tools))}.",
        field="tool_choice",
    )


def _choice(choice: Any, tools: Sequence[Tool]) -> tuple[ToolChoice, str | None]:
    if choice is None:
        return (ToolChoice.AUTO if tools else ToolChoice.NONE), None
    if choice == "none":
        return ToolChoice.NONE, None
    if choice == "auto":
        return (ToolChoice.AUTO if tools else ToolChoice.NONE), None
    name = _chosen_name(choice)
    if choice != "required" and name is None:
        raise RequestError(
            f"tool_choice is {_brief(choice)}; choose 'none', 'auto', 'required' or "
            "{'type': 'function', 'function': {'name': ...}}.",
            field="tool_choice",
        )
    if not tools:
        raise RequestError(
            f"tool_choice is {_brief(choice)}, and there are no tools; give some in tools.",
            field="tool_choice",
        )
    if name is None:
        return ToolChoice.REQUIRED, None
    if all(tool.name != name for tool in tools):
        raise _not_among(name, tools)
    return ToolChoice.NAMED, name


def _chosen_name(choice: Any) -> str | None:
    """The function that a choice names."""
    if not isinstance(choice, Mapping) or choice.get("type") != "function":
        return None
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _brief(value: Any) -> str:
    """A caller's value in a message, never long enough to fill a log."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
