"""The messages of a chat, checked.

Takes what a caller sent (OpenAI's message shapes, as plain dicts); gives plain dicts that a chat
template can use, with every content a string. Parts that are not text are refused: nothing is
ever fetched from an address in a request.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from manyroots.errors import RequestError

ROLES = ("system", "user", "assistant", "tool")
_ALIASES = {"developer": "system", "function": "tool", "model": "assistant"}
"""Roles of other APIs and times, for templates that do not ask for them by name."""
MAX_MESSAGES = 10_000
_UNSERVED = frozenset({"audio", "documents", "function_call", "images", "partial", "prefix"})
"""What would change the answer and is not served. Every other field is ignored: clients send
answers back whole, as history, with what other servers and they themselves put there."""
_TEXT_PARTS = ("text", "input_text", "output_text")
"""The last two are the Responses API's words, which agents keep in their histories."""
_THOUGHT_PARTS = ("thinking", "redacted_thinking")
"""Of answers: Mistral's API and Anthropic's have reasoning within the content."""
_INSTEAD = {"function_call": "send tool_calls instead"}


def check_messages(
    messages: Sequence[Any], *, known_roles: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Messages for the template. `known_roles`: beside the usual ones, those that it asks for."""
    if not messages:
        raise RequestError("messages is empty; give at least one message.", field="messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(
            f"messages has {len(messages)} entries; at most {MAX_MESSAGES} are allowed.",
            field="messages",
        )
    return [
        _message(message, f"messages[{place}]", known_roles)
        for place, message in enumerate(messages)
    ]


def _message(message: Any, where: str, known_roles: Collection[str]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(
            f"{where} is not an object; write {{'role': ..., 'content': ...}}.", field=where
        )
    role = _role(message.get("role"), where, known_roles)
    for name in sorted(_UNSERVED & message.keys()):
        if message[name] not in (None, False, []):
            remedy = _INSTEAD.get(name, "remove it")
            raise RequestError(
                f"{where}.{name} is not supported; {remedy}.", field=f"{where}.{name}"
            )
    checked: dict[str, Any] = {"role": role}
    calls = message.get("tool_calls")
    if calls is not None and calls != []:
        checked["tool_calls"] = _tool_calls(calls, role, f"{where}.tool_calls")
    # An answer of calls or thoughts alone has no content, nor has the result of a tool that gives
    # nothing back.
    content, is_answer = message.get("content"), role == "assistant"
    checked["content"] = _content(
        content,
        f"{where}.content",
        optional=is_answer or role == "tool",
        left_out=_THOUGHT_PARTS if is_answer else (),
    )
    thoughts = message.get("reasoning_content") or message.get("reasoning") or _thoughts(content)
    if is_answer and isinstance(thoughts, str) and thoughts:
        checked["reasoning_content"] = thoughts  # of which most templates keep the latest
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            checked[name] = _string(message[name], f"{where}.{name}")
    return checked


def _role(role: Any, where: str, known_roles: Collection[str]) -> str:
    if isinstance(role, str):
        if role in ROLES or role in known_roles:
            return role
        if role in _ALIASES:
            return _ALIASES[role]
    choices = ", ".join((*ROLES, *sorted({*_ALIASES, *known_roles})))
    raise RequestError(
        f"{where}.role is {_brief(role)}, which this model's chat template does not know; choose "
        f"one of {choices}.",
        field=f"{where}.role",
    )


def _content(content: Any, where: str, *, optional: bool, left_out: Collection[str] = ()) -> str:
    """`left_out`: types of parts."""
    if content is None and optional:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(
            f"{where} is {_brief(content)}; it must be a string or a list of text parts.",
            field=where,
        )
    return "\n".join(
        _part(part, f"{where}[{place}]")
        for place, part in enumerate(content)
        if _kind(part) not in left_out
    )


def _thoughts(content: Any) -> str:
    """In the parts of an answer: a text, or a list of texts."""
    texts: list[Any] = []
    for part in content if isinstance(content, list) else ():
        if _kind(part) == "thinking":
            given = part.get("thinking")
            parts = given if isinstance(given, list) else [given]
            texts += [one.get("text") if isinstance(one, Mapping) else one for one in parts]
    return "\n".join(text for text in texts if isinstance(text, str))


def _kind(part: Any) -> Any:
    return part.get("type") if isinstance(part, Mapping) else None


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = _kind(part)
    if kind == "refusal":  # part of an answer, sent back
        return _string(part.get("refusal"), f"{where}.refusal")
    if kind not in _TEXT_PARTS:
        raise RequestError(
            f"{where} is a part of type {_brief(kind)}; this model reads text only. "
            "Send parts of type 'text'.",
            field=where,
        )
    return _string(part.get("text"), f"{where}.text")


def _tool_calls(calls: Any, role: Any, where: str) -> list[dict[str, Any]]:
    if role != "assistant":
        raise RequestError(f"{where} belongs to assistant messages only.", field=where)
    if not isinstance(calls, list):
        raise RequestError(f"{where} is {_brief(calls)}; it must be a list.", field=where)
    return [_tool_call(call, f"{where}[{place}]") for place, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}.function is missing; name the function.", field=where)
    name = _string(function.get("name"), f"{where}.function.name")
    given = function.get("arguments")
    # OpenAI's clients send JSON in a string; templates are written for the object.
    if not isinstance(given, Mapping):
        given = parsed_arguments(_string(given or "", f"{where}.function.arguments"))
    return {
        "id": str(call.get("id", "")),
        "type": "function",
        "function": {"name": name, "arguments": dict(given)},
    }


def parsed_arguments(text: str) -> dict[str, Any]:
    """A call's arguments as an object. A model may write anything, and be cut short anywhere: its
    caller must see it, and a chat in which it happened must be able to go on."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {"_not_json": text}
    if value is None:
        return {}
    return value if isinstance(value, dict) else {"_not_an_object": value}


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{where} is {_brief(value)}; it must be a string.", field=where)
    return value


def _brief(value: Any) -> str:
    """A caller's value in a message, never long enough to fill a log."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
