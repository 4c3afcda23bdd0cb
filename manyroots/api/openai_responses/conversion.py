"""A request for a response becomes a request for a chat, which the same code carries out.

Takes `ResponsesRequest`; gives `ChatRequest`. Raises RequestError naming the item. A chat has no
namespaces: a function in one is called `namespace__function` there, and by its own name outside.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from manyroots.api.body import as_format
from manyroots.api.notices import Notices
from manyroots.api.openai_responses.shapes import REMEDIES, SAME_IN_CHATS, ResponsesRequest
from manyroots.api.requests import ChatRequest, ResponseFormat
from manyroots.errors import RequestError

LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
"""What is given beside the answer. There is no encrypted reasoning: it comes as it is."""
_SEPARATOR = "__"
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def chat_request(request: ResponsesRequest, notices: Notices) -> ChatRequest:
    _check_supported(request, notices)
    wants_logprobs = LOGPROBS in (request.include or ()) or bool(request.top_logprobs)
    return ChatRequest(
        messages=_messages(request),
        max_completion_tokens=request.max_output_tokens,
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        logprobs=True if wants_logprobs else None,
        top_logprobs=request.top_logprobs if wants_logprobs else None,
        response_format=_response_format(request),
        tools=[_chat_tool(tool, space) for tool, space in _flat(request.tools or ())] or None,
        tool_choice=_tool_choice(request.tool_choice, request.tools or ()),
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


def namespaces(request: ResponsesRequest) -> dict[str, tuple[str, str]]:
    """By a function's name in the chat: its namespace, and its name there."""
    return {
        _in_chat(tool["name"], space): (space, tool["name"])
        for tool, space in _flat(request.tools or ())
        if space is not None and isinstance(tool, Mapping) and isinstance(tool.get("name"), str)
    }


def _flat(tools: Iterable[Any]) -> Iterator[tuple[Any, str | None]]:
    """Tools, and those inside of namespaces, each with its namespace."""
    for tool in tools:
        inner = tool.get("tools") if isinstance(tool, Mapping) else None
        if isinstance(inner, list) and tool.get("type") == "namespace":
            for held in inner:
                yield held, str(tool.get("name"))
        else:
            yield tool, None


def _in_chat(name: str, namespace: str | None) -> str:
    return name if namespace is None else f"{namespace}{_SEPARATOR}{name}"


def _chat_tool(tool: Any, namespace: str | None) -> Any:
    """A function's fields lie beside its type here, and one level deeper in a chat. Tools of other
    types go on as they are."""
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        return tool
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    if isinstance(function.get("name"), str):
        function["name"] = _in_chat(function["name"], namespace)
    return {"type": "function", "function": function}


def _tool_choice(choice: Any, tools: Iterable[Any]) -> Any:
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": _chosen(choice, tools)}}
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        listed = [
            {**tool, "name": _chosen(tool, tools)} if isinstance(tool, Mapping) else tool
            for tool in choice["tools"]
        ]
        return {**choice, "tools": listed}
    return choice


def _chosen(choice: Mapping[str, Any], tools: Iterable[Any]) -> Any:
    """What a chat calls the function that a choice names, with its namespace or without."""
    name, wanted = choice.get("name"), choice.get("namespace")
    spaces = [
        space
        for tool, space in _flat(tools)
        if isinstance(tool, Mapping) and tool.get("name") == name and wanted in (None, space)
    ]
    if not spaces or None in spaces or not isinstance(name, str):
        return name
    return _in_chat(name, spaces[0])


def _messages(request: ResponsesRequest) -> list[Any]:
    messages: list[dict[str, Any]] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    if not request.input:
        raise RequestError("input is empty; give a text or at least one item.", field="input")
    for place, item in enumerate(request.input):
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
        case "function_call":
            name = item.get("name")
            if isinstance(name, str) and isinstance(item.get("namespace"), str):
                name = _in_chat(name, item["namespace"])
            function = {"name": name, "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            _answer_or_new(messages, {"role": "assistant", "content": None, "tool_calls": [call]})
        case "function_call_output":
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
                f"{where}.type is {kind!r:.60}; this server takes message, function_call, "
                "function_call_output and reasoning.",
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
