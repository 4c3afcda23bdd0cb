"""Which prefixes were ever asked for, page by page and by namespace: what a cache could know.

Naive on purpose: a dictionary, no tree, no eviction, so that it shares no mistake with the cache.
"""

from __future__ import annotations

from collections import Counter

from manyroots.ids import Namespace


class SeenPrefixes:
    """Each prefix of full pages is a number, found by its parent's number and its own tokens."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._numbers: dict[tuple[Namespace | int, tuple[int, ...]], int] = {}
        self._times_seen: Counter[int] = Counter()

    def add(self, namespace: Namespace, tokens: list[int]) -> None:
        prefix: Namespace | int = namespace
        for begin in range(0, len(tokens) - self._page_size + 1, self._page_size):
            key = (prefix, tuple(tokens[begin : begin + self._page_size]))
            prefix = self._numbers.setdefault(key, len(self._numbers))
            self._times_seen[prefix] += 1

    def match(self, namespace: Namespace, prompt: list[int], *, times: int = 1) -> int:
        """Leading tokens of a prompt that were seen at least so many times; never all of it."""
        prefix: Namespace | int = namespace
        longest = (len(prompt) - 1) // self._page_size * self._page_size
        for begin in range(0, longest, self._page_size):
            page = tuple(prompt[begin : begin + self._page_size])
            found = self._numbers.get((prefix, page))
            if found is None or self._times_seen[found] < times:
                return begin
            prefix = found
        return longest
