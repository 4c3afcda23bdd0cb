"""A request for a message becomes a request for a chat, which the same code carries out.

Takes `MessagesRequest`; gives `ChatRequest`. Raises RequestError naming the block.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from manyroots.api.anthropic.shapes import (
    SAME_IN_CHATS,
    UNSUPPORTED,
    MessagesRequest,
    PromptFields,
)
from manyroots.api.anthropic.tools import TOOL_CHANGES, chat_choice, chat_tools
from manyroots.api.body import as_format
from manyroots.api.requests import ChatRequest, ResponseFormat
from manyroots.errors import RequestError
from manyroots.text.chat import SWITCHES

_BILLING = re.compile(r"\Ax-anthropic-billing-header:.*\n?")
"""Claude Code puts this line at the start of its prompt, for Anthropic's billing. It changes with
each request, so no request would find a cached prefix."""


def chat_request(request: PromptFields, template_options: Collection[str]) -> ChatRequest:
    """`template_options`: what the model's template can be told."""
    for name in UNSUPPORTED:
        if getattr(request, name, None):
            raise RequestError(f"{name} is not supported by this server; remove it.", field=name)
    choice, parallel = chat_choice(request.tool_choice)
    chat = ChatRequest(
        model=request.model,
        messages=_messages(request),
        tools=chat_tools(request) or None,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        response_format=_response_format(request),
        chat_template_kwargs=_template_kwargs(request, template_options),
    )
    if _is_begun(chat.messages):
        chat.continue_final_message, chat.add_generation_prompt = True, False
    if request.output_config is not None:
        chat.reasoning_effort = request.output_config.effort
    if isinstance(request, MessagesRequest):
        chat.max_completion_tokens = request.max_tokens
        chat.stop = request.stop_sequences
        for name in SAME_IN_CHATS:
            setattr(chat, name, getattr(request, name))
    return chat


def _is_begun(messages: list[Any]) -> bool:
    """Whether the last message is the beginning of the answer, which goes on from there."""
    last = messages[-1] if messages else {"role": None}
    return last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last


def _template_kwargs(
    request: PromptFields, template_options: Collection[str]
) -> dict[str, Any] | None:
    """Thinking is on or off where the template can be told so."""
    given = request.chat_template_kwargs
    switches = SWITCHES.intersection(template_options)
    if request.thinking is None or not switches:
        return given
    return dict.fromkeys(switches, request.thinking.type != "disabled") | (given or {})


def _response_format(request: PromptFields) -> ResponseFormat | None:
    chosen = request.output_format
    if chosen is None and request.output_config is not None:
        chosen = request.output_config.format
    if chosen is None:
        return None
    if chosen.get("type") != "json_schema":
        raise RequestError(
            f"output_format is of type {chosen.get('type')!r:.60}; give json_schema.",
            field="output_format",
        )
    described = {"name": "answer", "schema": chosen.get("schema")}
    wanted = {"type": "json_schema", "json_schema": described}
    return as_format(wanted, "output_format")


def _messages(request: PromptFields) -> list[Any]:
    messages: list[Any] = []
    if request.system is not None:
        text = _BILLING.sub("", _text(request.system, "system"))
        messages.append({"role": "system", "content": text})
    if not request.messages:
        raise RequestError("messages is empty; give at least one message.", field="messages")
    for place, message in enumerate(request.messages):
        where = f"messages[{place}]"
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ("user", "assistant", "system"):
            raise RequestError(
                f"{where}.role is {role!r:.60}; choose user or assistant.", field=f"{where}.role"
            )
        content = message.get("content")
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
        elif role == "assistant":
            messages.append(_answer(content, f"{where}.content"))
        else:
            messages += _asked(role, content, f"{where}.content")
    return messages


def _blocks(content: Any, where: str) -> list[tuple[str, Mapping[str, Any], str]]:
    """Each block's type, the block, and where it is."""
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of blocks.", field=where)
    blocks = []
    for place, block in enumerate(content):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if not isinstance(kind, str):
            raise RequestError(f"{where}[{place}] has no type.", field=f"{where}[{place}]")
        blocks.append((kind, block, f"{where}[{place}]"))
    return blocks


def _unknown(kind: str, where: str, known: str) -> RequestError:
    return RequestError(
        f"{where} is a block of type {kind!r:.60}; this model reads {known}.", field=where
    )


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for kind, block, place in _blocks(content, where):
        if kind != "text" or not isinstance(block.get("text"), str):
            raise _unknown(kind, place, "text only")
        texts.append(block["text"])
    return "\n".join(texts)


def _result(content: Any, where: str) -> str:
    """A tool's result: a text, or blocks that contain text."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_block_text(*block) for block in _blocks(content, where))


def _block_text(kind: str, block: Mapping[str, Any], where: str) -> str:
    """The text of a block: a text, a document, a search result or the name of a tool."""
    texts: list[Any] = [None]
    match kind:
        case "text":
            texts = [block.get("text")]
        case "tool_reference":  # what a search for tools found
            texts = [f"Tool available: {name}" for name in _told(block, "tool_name")] or [None]
        case "search_result":
            texts = [*_told(block, "title", "source"), _text(block.get("content"), where)]
        case "document":
            source = block.get("source")
            given = source if isinstance(source, Mapping) else {}
            texts = _told(block, "title", "context")
            match given.get("type"):
                case "text":
                    texts.append(given.get("data"))
                case "content":
                    texts.append(_text(given.get("content"), where))
                case _:  # bytes, or an address: nothing is ever fetched
                    texts.append(None)
    if not all(isinstance(text, str) for text in texts):
        raise _unknown(kind, where, "text only")
    return "\n".join(texts)


def _told(block: Mapping[str, Any], *names: str) -> list[Any]:
    return [block[name] for name in names if block.get(name) is not None]


def _asked(role: str, content: Any, where: str) -> list[dict[str, Any]]:
    """What a user says: results of tools first, each a message of its own, then the words."""
    messages: list[dict[str, Any]] = []
    words: list[Any] = []
    blocks = _blocks(content, where)
    for kind, block, place in blocks:
        if kind == "tool_result":
            result = block.get("content")
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": block.get("tool_use_id"),
                    "content": _result(result, f"{place}.content"),
                }
            )
        elif kind in ("text", "document", "search_result"):
            words.append(_block_text(kind, block, place))
        elif kind not in TOOL_CHANGES:
            raise _unknown(kind, place, "text and tool_result")
    if words or not blocks:
        messages.append({"role": role, "content": "\n".join(words)})
    return messages


def _answer(content: Any, where: str) -> dict[str, Any]:
    """What the assistant said, thought and called: one message."""
    words: list[str] = []
    thoughts: list[str] = []
    calls: list[Any] = []
    for kind, block, place in _blocks(content, where):
        match kind:
            case "text":
                words.append(_block_text(kind, block, place))
            case "thinking":
                thoughts.append(str(block.get("thinking", "")))
            case "redacted_thinking":
                pass
            case "tool_use":
                arguments = json.dumps(block.get("input"), ensure_ascii=False)
                function = {"name": block.get("name"), "arguments": arguments}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case _:
                raise _unknown(kind, place, "text, thinking and tool_use")
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(words) or None}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message
