"""Messages in the roles that a template takes.

Takes checked messages that a template refused; gives others that say the same in fewer roles, the
nearest first. Agents send several system messages, and some between the turns; many templates
take one at the beginning, some take none, and some want user and assistant to alternate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Messages = list[dict[str, Any]]


def foldings(messages: Sequence[dict[str, Any]]) -> Iterator[Messages]:
    """One system message in front and later ones as the user's words; then none at all."""
    num_first = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    first = [dict(message) for message in messages[:num_first]]
    later = [_as_user(message) for message in messages[num_first:]]
    yield [*_joined(first), *_joined(later)]
    yield _joined([*(_as_user(message) for message in first), *later])


def _as_user(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "role": "user"} if message["role"] == "system" else dict(message)


def _joined(messages: Sequence[dict[str, Any]]) -> Messages:
    """Neighbours of one role as one message; answers and results of tools stay apart."""
    joined: Messages = []
    for message in messages:
        last = joined[-1] if joined else None
        if last is not None and last["role"] == message["role"] and message["role"] in _JOINED:
            last["content"] = f"{last['content']}\n\n{message['content']}"
        else:
            joined.append(dict(message))
    return joined


_JOINED = ("system", "user")
