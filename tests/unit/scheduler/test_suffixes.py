"""Guesses from earlier text: which are made, how long, and from whose text (V02)."""

from __future__ import annotations

import numpy as np
import pytest

from manyroots.ids import AdapterDigest
from manyroots.scheduler.suffixes import (
    MAX_NAMESPACES,
    MAX_PLACES,
    NO_TOKENS,
    RECENT_TOKENS,
    AdapterAndSalt,
    RecentOutputs,
    guess,
)
from manyroots.speculative_config import SpeculationChoice
from manyroots.step import Int32s

CHOICE = SpeculationChoice(num_tokens=8, shortest_match=2, longest_match=8)
ONE: AdapterAndSalt = (AdapterDigest(b"1"), None)


def ints(*tokens: int) -> Int32s:
    return np.array(tokens, np.int32)


def guessed(tokens: list[int], recent: list[int] | None = None, most: int = 8) -> list[int]:
    said = guess(ints(*tokens), ints(*(recent or [])), CHOICE, most).tolist()
    assert isinstance(said, list)
    return said


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4]),  # two equal tokens, seen once
        ([9, 1, 2, 3, 4, 5, 6, 9, 1, 2, 3], [4, 5, 6, 9]),
        ([1, 2, 3, 4, 5, 9, 2], []),  # one equal token is too few
        ([1, 2, 3, 4], []),
        ([7], []),
        ([5, 5, 5, 5, 5, 5, 5], [5]),  # the text ends
    ],
)
def test_v02_a_guess_is_what_followed_the_longest_equal_suffix(
    tokens: list[int], wanted: list[int]
) -> None:
    assert guessed(tokens) == wanted


def test_v02_a_continuation_that_was_seen_more_often_makes_a_longer_guess() -> None:
    once = [1, 2, 3, 4, 5, 6, 7, 8]
    assert guessed([*once, 1, 2]) == [3, 4]
    assert guessed([*once, 9, *once, 10, *once, 11, 1, 2]) == [3, 4, 5, 6, 7, 8]
    # Two of three went one way; the third went the other way last.
    mixed = [1, 2, 3, 4, 9, 1, 2, 3, 4, 9, 1, 2, 7, 7, 9, 8, 1, 2]
    assert guessed(mixed)[:2] == [3, 4]


def test_v02_the_longer_equal_suffix_counts_be_it_in_earlier_output() -> None:
    own = [1, 2, 30, 31, 32, 5, 1, 2]
    assert guessed(own, [6, 5, 1, 2, 40, 41, 42]) == [40, 41, 42]
    assert guessed(own, [6, 6, 1, 2, 40, 41, 42]) == [30, 31]
    assert guessed(own, [5, 1, 2, -1, 77, 77]) == [], "a guess crossed the end of an output"
    assert guessed(own, [6, 5, 1, 2, 40, 41, 42], most=1) == [40]


def test_v02_outputs_are_bounded_and_kept_by_namespace() -> None:
    """V02: neither an adapter's output nor a tenant's is searched for another."""
    recent = RecentOutputs()
    recent.add(ONE, ints(1, 2, 3))
    for other in ((None, None), (AdapterDigest(b"2"), None), (AdapterDigest(b"1"), "salt")):
        assert recent.of(other) is NO_TOKENS
    recent.add(ONE, np.arange(2 * RECENT_TOKENS, dtype=np.int32))
    assert len(recent.of(ONE)) == RECENT_TOKENS
    assert recent.of(ONE)[-1] == 2 * RECENT_TOKENS - 1
    for number in range(MAX_NAMESPACES):
        recent.add((None, str(number)), ints(1))
    assert recent.of(ONE) is NO_TOKENS, "the namespace not used for longest is still there"
    recent.clear()
    assert recent.of((None, "3")) is NO_TOKENS


def _naive_guess(tokens: list[int], recent: list[int], most: int) -> list[int]:
    """The longest equal suffix of all places, and the likeliest token after it, step by step."""

    def length_at(text: list[int], end: int) -> int:
        length = 0
        while (
            length < min(CHOICE.longest_match, len(tokens), end + 1)
            and text[end - length] == tokens[-1 - length]
        ):
            length += 1
        return length

    best, text, places = 0, tokens, list[int]()
    for each, ends in ((tokens, range(len(tokens) - 1)), (recent, range(len(recent)))):
        lengths = [length_at(each, end) for end in ends]
        if max(lengths, default=0) > best:
            best, text = max(lengths), each
            places = [end + 1 for end, length in zip(ends, lengths, strict=True) if length == best]
    if best < CHOICE.shortest_match:
        return []
    places = places[-MAX_PLACES:]
    if len(places) == 1:
        said = text[places[0] : places[0] + min(most, best)]
        return said[: said.index(-1)] if -1 in said else said
    said = []
    while len(said) < most:
        following = [(place, text[place]) for place in places if place < len(text)]
        if not following:
            break
        times = [sum(token == other for _, other in following) for _, token in following]
        token = next(
            t for (_, t), n in list(zip(following, times, strict=True))[::-1] if n == max(times)
        )
        if token == -1 or len(said) >= best * max(times):
            break
        said.append(token)
        places = [place + 1 for place, other in following if other == token]
    return said


def test_v02_guesses_are_those_of_a_naive_search() -> None:
    rng = np.random.default_rng(1)
    num_guesses = 0
    for _ in range(400):
        vocabulary = int(rng.integers(1, 5))
        tokens = rng.integers(0, vocabulary, int(rng.integers(1, 40))).tolist()
        recent = rng.integers(-1, vocabulary, int(rng.integers(0, 60))).tolist()
        wanted = _naive_guess(tokens, recent, 8)
        assert guessed(tokens, recent) == wanted
        num_guesses += bool(wanted)
    assert num_guesses > 100
