"""`cache_control` in a request for a message: where a prefix ends that is to be kept.

Takes the request; gives, for each mark, the request cut off there and how long to keep the prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from manyroots.api.anthropic.shapes import PromptFields
from manyroots.errors import RequestError

MAX_MARKS = 4
LIFETIMES_S = {"5m": 300.0, "1h": 3600.0}
PRIORITIES = {300.0: 50, 3600.0: 60}
"""Where marks compete, what is to be kept for longer is the stronger one."""
P = TypeVar("P", bound=PromptFields)
_ANY_MESSAGE = {"role": "user", "content": "."}


def marks(request: P) -> list[tuple[P, float]]:
    """In the order of the prompt."""
    found = list(_marks(request))
    if len(found) > MAX_MARKS:
        raise RequestError(
            f"cache_control is set on {len(found)} blocks; set it on at most {MAX_MARKS}.",
            field="cache_control",
        )
    return found


def _marks(request: P) -> Iterator[tuple[P, float]]:
    replace = msgspec.structs.replace
    for place, tool in enumerate(request.tools or ()):
        if lifetime_s := _lifetime_s(tool, f"tools[{place}]"):
            # Templates write tools after the system prompt or into it: they are kept together.
            yield replace(request, messages=[_ANY_MESSAGE]), lifetime_s
    system = request.system if isinstance(request.system, list) else []
    for place, block in enumerate(system):
        if lifetime_s := _lifetime_s(block, f"system[{place}]"):
            cut = replace(request, system=system[: place + 1], messages=[_ANY_MESSAGE])
            yield cut, lifetime_s
    for number, message in enumerate(request.messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list):
            continue
        for place, block in enumerate(content):
            if lifetime_s := _lifetime_s(block, f"messages[{number}].content[{place}]"):
                last = {**message, "content": content[: place + 1]}
                yield replace(request, messages=[*request.messages[:number], last]), lifetime_s
    if lifetime_s := _lifetime_s({"cache_control": request.cache_control}, "the request"):
        yield request, lifetime_s


def _lifetime_s(block: Any, where: str) -> float | None:
    asked = block.get("cache_control") if isinstance(block, Mapping) else None
    if asked is None:
        return None
    kind = asked.get("type") if isinstance(asked, Mapping) else None
    lifetime = asked.get("ttl", "5m") if isinstance(asked, Mapping) else None
    if kind != "ephemeral" or lifetime not in LIFETIMES_S:
        raise RequestError(
            f"cache_control of {where} is {asked!r:.80}; it must be "
            "{'type': 'ephemeral'}, with 'ttl' '5m' or '1h' if any.",
            field="cache_control",
        )
    return LIFETIMES_S[lifetime]
