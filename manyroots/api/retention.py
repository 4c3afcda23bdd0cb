"""What a request asks the cache to keep: ranges of its prompt's tokens (T13).

A range is given in tokens (`retention`), or by a place in a conversation (`cache_control`). The
tokens up to such a place are those that the prompt shares with the conversation cut off there,
whatever the model's template writes.
"""

from __future__ import annotations

from collections.abc import Sequence

from manyroots.api.requests import RetentionRange
from manyroots.api.tenants import Tenant
from manyroots.engine.retention import SHARE, checked_ranges
from manyroots.messages import KeepRange, Retention

KEY_SHARE = 0.1
"""Of the cache, for marks of a key whose `memory_share` is not set."""


def retention_of(
    asked: Sequence[RetentionRange], marked: Sequence[KeepRange], tenant: Tenant | None
) -> Retention | None:
    """`marked`: ranges that were found by their places in a conversation."""
    ranges = checked_ranges(asked)
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
