"""What a request asks the cache to keep: ranges of its prompt's tokens (T13).

A range is given in tokens (`retention`), or by a place in a conversation (`cache_control`). The
tokens up to such a place are those that the prompt shares with the conversation cut off there,
whatever the model's template writes.
"""

from __future__ import annotations

from collections.abc import Sequence

from manyroots.api.requests import RetentionRange
from manyroots.api.tenants import Tenant
from manyroots.errors import RequestError
from manyroots.messages import KeepRange, Retention

MAX_RANGES = 8
MAX_KEEP_S = 86_400.0
SHARE = 0.5
"""Of the cache, for marks of requests without a key of their own."""
KEY_SHARE = 0.1
"""Of the cache, for marks of a key whose `memory_share` is not set."""


def retention_of(
    asked: Sequence[RetentionRange], marked: Sequence[KeepRange], tenant: Tenant | None
) -> Retention | None:
    """`marked`: ranges that were found by their places in a conversation."""
    if len(asked) > MAX_RANGES:
        raise RequestError(
            f"retention has {len(asked)} ranges; give at most {MAX_RANGES}.", field="retention"
        )
    ranges = [_checked(each, place) for place, each in enumerate(asked)]
    ranges += marked
    if not ranges:
        return None
    if tenant is None:
        return Retention(tuple(ranges), None, SHARE)
    share = tenant.spec.memory_share
    return Retention(tuple(ranges), tenant.name, KEY_SHARE if share is None else share)


def shared_tokens(prompt: list[int], other: list[int]) -> int:
    """How many tokens both begin with."""
    low, high = 0, min(len(prompt), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if prompt[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _checked(asked: RetentionRange, place: int) -> KeepRange:
    for name, value, least, most in (
        ("until_token", asked.until_token, 1, 1 << 31),
        ("priority", asked.priority, 0, 100),
        ("for_s", asked.for_s, 0.0, MAX_KEEP_S),
    ):
        if not least <= value <= most:
            where = f"retention[{place}].{name}"
            raise RequestError(
                f"{where} is {value}; it must be from {least:g} to {most:g}.", field=where
            )
    return KeepRange(asked.until_token, asked.priority, asked.for_s)
