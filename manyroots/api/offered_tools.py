"""The tools of a request that its caller carries out; others are left out.

Takes a chat's `tools` and `tool_choice` as the caller sent them; gives a `ToolUse` of the
functions among them. Agents offer tools that only their maker's server runs, such as
`web_search`, to every server. The model never sees those. A choice that demands one is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from manyroots.api.notices import Notices
from manyroots.api.requests import ChatRequest, TokenizeRequest
from manyroots.errors import RequestError
from manyroots.text.tools import ToolUse, check_tools

_WORDS = ("auto", "none", "required")


def tool_use(request: ChatRequest | TokenizeRequest, notices: Notices) -> ToolUse:
    tools, choice = request.tools, _as_word(request.tool_choice)
    parallel = request.parallel_tool_calls if isinstance(request, ChatRequest) else None
    left_out: dict[str, str] = {}
    """Types of tools that can't be run, by name."""
    if isinstance(tools, list):
        left_out = {_name(tool): tool["type"] for tool in tools if _is_foreign(tool)}
    _refuse_foreign_choice(choice, left_out)
    if not left_out:
        return check_tools(tools, choice, parallel)
    kept = [tool for tool in tools or () if not _is_foreign(tool)]
    choice = _among_functions(choice)
    if choice == "required" and not kept:
        raise _cannot_run(left_out.values())
    for kind in left_out.values():
        notices.tell(kind, "is a type of tool that this server can't run; such tools are left out")
    return check_tools(kept, choice, parallel)


def _as_word(choice: Any) -> Any:
    """Cursor writes the choices that are words as objects."""
    is_word = isinstance(choice, Mapping) and choice.keys() == {"type"}
    return choice["type"] if is_word and choice["type"] in _WORDS else choice


def _is_foreign(tool: Any) -> bool:
    return (
        isinstance(tool, Mapping)
        and tool.get("type", "function") != "function"
        and (isinstance(tool["type"], str))
    )


def _name(tool: Mapping[str, Any]) -> str:
    within = tool.get(tool["type"])  # a custom tool of a chat has its name one level deeper
    name = (within if isinstance(within, Mapping) else tool).get("name")
    return name if isinstance(name, str) else tool["type"]


def _refuse_foreign_choice(choice: Any, left_out: Mapping[str, str]) -> None:
    """`left_out`: the types of tools that can't be run, by name."""
    if not isinstance(choice, Mapping) or choice.get("type") == "allowed_tools":
        return
    kind, name = choice.get("type"), _chosen_name(choice)
    if isinstance(kind, str) and kind != "function":
        wanted = kind
    elif name in left_out:
        wanted = left_out[name]
    else:
        return
    raise _cannot_run([wanted])


def _cannot_run(kinds: Iterable[str]) -> RequestError:
    shown = ", ".join(sorted({repr(kind[:60]) for kind in kinds}))
    return RequestError(
        f"tool_choice demands a tool of type {shown}, which this server can't run; offer and "
        "choose a function, or choose 'auto'.",
        field="tool_choice",
    )


def _chosen_name(choice: Mapping[str, Any]) -> Any:
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _among_functions(choice: Any) -> Any:
    """A choice among some tools, without those that were left out."""
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return choice
    within = choice.get("allowed_tools", choice)
    listed = within.get("tools") if isinstance(within, Mapping) else None
    if not isinstance(listed, list):
        return choice  # malformed, and refused with its reason later
    kept = [tool for tool in listed if not _is_foreign(tool)]
    if not kept and listed:
        if within.get("mode", "auto") == "required":
            raise _cannot_run(tool["type"] for tool in listed)
        return "none"
    return {"type": "allowed_tools", "tools": kept, "mode": within.get("mode", "auto")}
