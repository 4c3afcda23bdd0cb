"""Guesses how a text continues, from earlier occurrences of its last tokens.

Takes a sequence's tokens and the recent output of its namespace (adapter and salt); gives the
tokens that followed the longest equal suffix. Texts are arrays and are searched on demand:
comparing 30,000 tokens takes some ten microseconds, so there is no index. Outputs of one namespace
are never searched for another.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

import numpy as np

from manyroots.ids import AdapterDigest
from manyroots.speculative_config import SpeculationChoice
from manyroots.step import Int32s

AdapterAndSalt = tuple[AdapterDigest | None, str | None]
"""Adapter and salt."""

RECENT_TOKENS = 1 << 14
"""The newest tokens of a namespace's output that are kept."""
MAX_NAMESPACES = 256
"""With more, the least recently used are forgotten: 16 MiB in all."""
MAX_PLACES = 16
"""Occurrences of an equal suffix that are compared; the newest."""
_BREAK = -1
"""Between two outputs: equals no token."""

NO_TOKENS: Int32s = np.empty(0, np.int32)


class RecentOutputs:
    """The newest output of each namespace, bounded."""

    def __init__(self) -> None:
        self._texts: OrderedDict[AdapterAndSalt, Int32s] = OrderedDict()

    def add(self, group: AdapterAndSalt, output: Int32s) -> None:
        """A sequence of this namespace is finished."""
        old = self._texts.pop(group, NO_TOKENS)
        parts = (old, np.array([_BREAK], np.int32), output)
        self._texts[group] = np.concatenate(parts)[-RECENT_TOKENS:]
        if len(self._texts) > MAX_NAMESPACES:
            self._texts.popitem(last=False)

    def of(self, group: AdapterAndSalt) -> Int32s:
        if group not in self._texts:
            return NO_TOKENS
        self._texts.move_to_end(group)
        return self._texts[group]

    def clear(self) -> None:
        self._texts.clear()


def guess(tokens: Int32s, recent: Int32s, choice: SpeculationChoice, most: int) -> Int32s:
    """At most this many tokens that may follow `tokens`, from its own text or from `recent` output,
    whichever has the longer equal suffix."""
    suffix = tokens[-choice.longest_match :]
    length, ends = _places(tokens[:-1], suffix)
    text = tokens
    if len(recent):
        other_length, other_ends = _places(recent, suffix)
        if other_length > length:
            length, ends, text = other_length, other_ends, recent
    if length < choice.shortest_match:
        return NO_TOKENS
    return _continuation(text, ends[-MAX_PLACES:] + 1, length, most)


def _places(text: Int32s, suffix: Int32s) -> tuple[int, np.ndarray]:
    """How much of the suffix occurs elsewhere in a text, and where each occurrence ends."""
    ends = np.flatnonzero(text == suffix[-1])
    length = min(len(ends), 1)
    while len(ends) and length < len(suffix):
        longer = ends[ends >= length]
        longer = longer[text[longer - length] == suffix[-1 - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    return length, ends


def _continuation(text: Int32s, places: np.ndarray, length: int, most: int) -> Int32s:
    """The most frequent continuation at these places. It is longer if more tokens before it are
    equal, and if it occurred more often."""
    if len(places) == 1:
        followed = text[places[0] :][: min(most, length)]
        breaks = np.flatnonzero(followed == _BREAK)
        return followed[: breaks[0]] if len(breaks) else followed
    said: list[int] = []
    # Lists: for so few numbers they are faster than arrays.
    left: list[int] = places.tolist()
    while len(said) < most:
        left = [place for place in left if place < len(text)]
        if not left:
            break
        following: list[int] = text[left].tolist()
        counts = Counter(following)
        highest = max(counts.values())
        # Of equally frequent ones, the newest.
        token = next(t for t in reversed(following) if counts[t] == highest)
        if token == _BREAK or len(said) >= length * highest:
            break
        said.append(token)
        left = [place + 1 for place, t in zip(left, following, strict=True) if t == token]
    return np.array(said, np.int32)
