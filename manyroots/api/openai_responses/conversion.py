"""A request for a response becomes a request for a chat, which the same code carries out.

Takes `ResponsesRequest`; gives `ChatRequest`. Raises RequestError naming the item.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manyroots.api.body import as_format
from manyroots.api.notices import Notices
from manyroots.api.openai_responses.shapes import REMEDIES, SAME_IN_CHATS, ResponsesRequest
from manyroots.api.openai_responses.tools import arguments_of, chat_choice, chat_tools, in_chat
from manyroots.api.requests import ChatRequest, ResponseFormat
from manyroots.errors import RequestError

LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
"""What is given beside the answer. There is no encrypted reasoning: it comes as it is."""
_SEARCH = "web_search_call"
"""What was found is not in the item. Agents keep it when they change servers."""
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def chat_request(request: ResponsesRequest, notices: Notices) -> ChatRequest:
    _check_supported(request, notices)
    wants_logprobs = LOGPROBS in (request.include or ()) or bool(request.top_logprobs)
    return ChatRequest(
        messages=_messages(request, notices),
        max_completion_tokens=request.max_output_tokens,
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        logprobs=True if wants_logprobs else None,
        top_logprobs=request.top_logprobs if wants_logprobs else None,
        response_format=_response_format(request),
        tools=chat_tools(request.tools or ()) or None,
        tool_choice=chat_choice(request.tool_choice, request.tools or ()),
        **{name: getattr(request, name) for name in SAME_IN_CHATS},
    )


def _check_supported(request: ResponsesRequest, notices: Notices) -> None:
    for name, (harmless, remedy) in REMEDIES.items():
        value = getattr(request, name)
        if value is not None and value not in harmless:
            raise RequestError(f"{name} is not supported by this server: {remedy}.", field=name)
    for name in request.include or ():
        if name not in _INCLUDED:
            notices.tell(f"include: {name}", "is nothing that this server has")


def _response_format(request: ResponsesRequest) -> ResponseFormat | None:
    chosen = None if request.text is None else request.text.format
    if chosen is None:
        return None
    described = {name: value for name, value in chosen.items() if name != "type"}
    wanted: dict[str, Any] = {"type": chosen.get("type")}
    if chosen.get("type") == "json_schema":
        wanted["json_schema"] = described
    return as_format(wanted, "text.format")


def _messages(request: ResponsesRequest, notices: Notices) -> list[Any]:
    messages: list[dict[str, Any]] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    if not request.input:
        raise RequestError("input is empty; give a text or at least one item.", field="input")
    for place, item in enumerate(request.input):
        if isinstance(item, Mapping) and item.get("type") == _SEARCH:
            notices.tell(_SEARCH, "says only that another server searched; such items are left out")
        else:
            _add_item(messages, item, f"input[{place}]")
    return messages


def _add_item(messages: list[dict[str, Any]], item: Any, where: str) -> None:
    if not isinstance(item, Mapping):
        raise RequestError(f"{where} is not an object; an item has a type or a role.", field=where)
    kind = item.get("type") or "message"
    match kind:
        case "message":
            content = _content(item.get("content"), f"{where}.content")
            _answer_or_new(messages, {"role": item.get("role"), "content": content})
        case "function_call" | "custom_tool_call":
            given = item.get("arguments")
            if kind == "custom_tool_call":
                given = arguments_of(item.get("input"))
            name = in_chat(item.get("name"), item.get("namespace"))
            function = {"name": name, "arguments": given}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            _answer_or_new(messages, {"role": "assistant", "content": None, "tool_calls": [call]})
        case "function_call_output" | "custom_tool_call_output":
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": item.get("call_id"),
                    "content": _content(item.get("output"), f"{where}.output"),
                }
            )
        case "reasoning":
            thought = _content(item.get("content") or [], f"{where}.content", "reasoning_text")
            if thought:
                message = {"role": "assistant", "content": None, "reasoning_content": thought}
                messages.append(message)
        case "item_reference":
            raise RequestError(
                f"{where} refers to an item of an earlier answer, and nothing is stored here; send "
                "the item itself. Clients such as the AI SDK do so with store: false.",
                field=where,
            )
        case _:
            raise RequestError(
                f"{where}.type is {kind!r:.60}; this server takes message, reasoning, calls of "
                "functions and custom tools, and their outputs.",
                field=where,
            )


def _answer_or_new(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Thoughts, words and calls of one answer are one message of a chat."""
    last = messages[-1] if messages else None
    if message["role"] != "assistant" or last is None or last["role"] != "assistant":
        messages.append(message)
    elif "tool_calls" in message:
        last.setdefault("tool_calls", []).extend(message["tool_calls"])
    elif last["content"] is None and "tool_calls" not in last:
        last["content"] = message["content"]
    else:
        messages.append(message)


def _content(content: Any, where: str, *more: str) -> Any:
    """A text, of a text or of parts that are texts."""
    if not isinstance(content, list):
        return content
    texts: list[str] = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        name = "text" if kind in more else _TEXTS.get(str(kind))
        text = part.get(name) if isinstance(part, Mapping) and name is not None else None
        if not isinstance(text, str):
            raise RequestError(
                f"{where}[{place}] is a part of type {kind!r:.60}; this model reads text only. "
                "Send parts of type 'input_text'.",
                field=f"{where}[{place}]",
            )
        texts.append(text)
    return "\n".join(texts)
