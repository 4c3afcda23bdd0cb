"""Messages in the roles that a template takes.

Takes checked messages that a template refused; gives others that say the same in fewer roles, the
nearest first. Agents send several system messages, and some between the turns; many templates
take one at the beginning, some take none, and some want user and assistant to alternate. Llama's
take one call in a message.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

Messages = list[dict[str, Any]]
_JOINED = ("system", "user")
_JOINED_LAST = (*_JOINED, "assistant")
"""Answers too, where a template takes nothing else: users and answers must alternate."""


def foldings(messages: Sequence[dict[str, Any]]) -> Iterator[Messages]:
    """Each call in a message of its own; one system message in front and later ones as the user's
    words; then none at all; then neighbouring answers as one."""
    apart = _one_call_each(messages)
    yield apart
    yield from _fewer_roles(messages)
    if len(apart) > len(messages):
        yield from _fewer_roles(apart)


def _one_call_each(messages: Sequence[dict[str, Any]]) -> Messages:
    """The calls of an answer one after the other, each with its result."""
    apart: Messages = []
    place = 0
    while place < len(messages):
        message, place = messages[place], place + 1
        if len(message.get("tool_calls", ())) < 2:
            apart.append(dict(message))
            continue
        results = list(itertools.takewhile(lambda m: m["role"] == "tool", messages[place:]))
        place += len(results)
        apart += _calls_apart(message, results)
    return apart


def _calls_apart(message: dict[str, Any], results: Messages) -> Iterator[dict[str, Any]]:
    """What was said and thought stands before the first call. Results of no call come last."""
    by_call: dict[str | None, Messages] = {}
    for result in results:
        by_call.setdefault(result.get("tool_call_id"), []).append(result)
    said = message
    for call in message["tool_calls"]:
        yield {**said, "tool_calls": [call]}
        yield from by_call.pop(call["id"], ())
        said = {"role": message["role"], "content": message["content"] and ""}
    yield from itertools.chain(*by_call.values())


def _fewer_roles(messages: Sequence[dict[str, Any]]) -> Iterator[Messages]:
    num_first = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    first = [dict(message) for message in messages[:num_first]]
    later = [_as_user(message) for message in messages[num_first:]]
    yield [*_joined(first), *_joined(later)]
    plain = [*(_as_user(message) for message in first), *later]
    yield _joined(plain)
    yield _joined(plain, _JOINED_LAST)


def _as_user(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "role": "user"} if message["role"] == "system" else dict(message)


def _joined(messages: Sequence[dict[str, Any]], roles: Sequence[str] = _JOINED) -> Messages:
    """Neighbours of one role as one message; calls and results of tools stay apart."""
    joined: Messages = []
    for message in messages:
        last: dict[str, Any] = joined[-1] if joined else {"role": None}
        calls = "tool_calls" in last or "tool_calls" in message
        if last["role"] == message["role"] and message["role"] in roles and not calls:
            last["content"] = f"{last['content']}\n\n{message['content']}"
        else:
            joined.append(dict(message))
    return joined
