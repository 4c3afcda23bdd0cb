"""Tools for a model whose chat template knows nothing of them, told in words.

Takes checked messages and tools; gives messages of plain text: the tools in the system message,
earlier calls in the assistant's, results in the user's. Calls are asked for as Hermes writes them,
the form that most open models have seen.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_INSTRUCTIONS = """\
# Tools

You can call these functions:
<tools>
{tools}
</tools>

To call one, write its name and arguments as JSON between tool_call tags:
<tool_call>
{{"name": <function-name>, "arguments": <arguments-object>}}
</tool_call>"""


def tell_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same chat in the roles system, user and assistant alone."""
    plain: list[dict[str, Any]] = []
    results: list[str] | None = None
    for message in messages:
        if message["role"] == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if results is None:  # results of several calls are one message
                results = [result]
                plain.append({"role": "user", "content": ""})
            else:
                results.append(result)
            plain[-1]["content"] = "\n".join(results)
            continue
        results = None
        plain.append(_plain(message))
    return plain


def tell_tools(
    messages: Sequence[dict[str, Any]], declarations: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The same chat with its tools in the system message."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in declarations)
    text = _INSTRUCTIONS.format(tools=lines)
    first, *others = messages
    if first["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    joined = f"{first['content']}\n\n{text}" if first["content"] else text
    return [first | {"content": joined}, *others]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    lines = [message["content"]] if message["content"] else []
    for call in calls:
        text = json.dumps(call["function"], ensure_ascii=False)
        lines.append(f"<tool_call>\n{text}\n</tool_call>")
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return rest | {"content": "\n".join(lines)}
