"""Expressions matched with names in bounded time.

Python's `re` tries one way after the other and can take years for a line of text, with the
interpreter's lock held. Here expressions become an automaton, which goes through a name once, in
all ways at the same time. What matches is the same.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field

from manyroots.lora.files.expressions import (
    Choice,
    Concatenation,
    End,
    PatternNode,
    Refused,
    Repeat,
    Single,
    Start,
)

MAX_STATES = 4000
"""Of all keys of a config: `{9}` is nine copies."""
MAX_VISITS = 1_000_000
"""Of states, for all names of a file: a few seconds at worst. A clock would make it depend on the
machine whether an adapter is served."""


@dataclass(slots=True)
class _State:
    """Of the automaton: where to go, with a character or without."""

    single: int | None = None
    """Number of the `Single` that its character must be; None: `free` counts."""
    then: int = 0
    free: list[tuple[str, int]] = field(default_factory=list)
    """(where it may be done: "" anywhere, "^" at the start, "$" at the end; state)."""
    accepts: int | None = None
    """The number of the expression that ends here."""


class Automaton:
    """Several expressions at once; a name is read once for all of them.

    Sets of states that were met are kept, so that most characters of most names are one lookup.
    """

    def __init__(self) -> None:
        self._states: list[_State] = []
        self._singles: dict[str, int] = {}
        self._patterns: list[re.Pattern[str]] = []
        self._fits: dict[tuple[int, str], bool] = {}
        self._begins: list[int] = []
        self._sets: dict[frozenset[int], int] = {}
        self._members: list[frozenset[int]] = []
        self._next: dict[tuple[int, str], int] = {}
        self._accepted: dict[int, frozenset[int]] = {}
        self._first: int | None = None
        self._num_visits = 0

    def add(self, number: int, node: PatternNode) -> None:
        """An expression; all are added before the first name is matched."""
        end = self._state(_State(accepts=number))
        self._begins.append(self._emit(node, end))

    def matches(self, name: str) -> frozenset[int]:
        """The numbers of the expressions that match the end of `name`, from its start or from
        behind a dot on."""
        if self._first is None:
            self._first = self._kept(self._closed(self._begins, "^"))
        at = self._first
        for character in name:
            after = self._next.get((at, character))
            at = self._step(at, character) if after is None else after
        if at not in self._accepted:
            ended = self._closed(self._members[at], "^$" if not name else "$")
            found = (self._states[state].accepts for state in ended)
            self._accepted[at] = frozenset(number for number in found if number is not None)
        return self._accepted[at]

    def _step(self, at: int, character: str) -> int:
        moved = []
        for number in self._members[at]:
            state = self._states[number]
            if state.single is not None and self._fit(state.single, character):
                moved.append(state.then)
        if character == ".":
            moved += self._begins
        after = self._kept(self._closed(moved, ""))
        self._next[at, character] = after
        return after

    def _closed(self, states: list[int] | frozenset[int], where: str) -> frozenset[int]:
        """With all that can be reached without a character."""
        found = set(states)
        left = list(found)
        while left:
            for condition, state in self._states[left.pop()].free:
                if state not in found and (not condition or condition in where):
                    found.add(state)
                    left.append(state)
        self._num_visits += len(found)
        if self._num_visits > MAX_VISITS:
            raise Refused("takes too long to match with all modules of the file")
        return frozenset(found)

    def _kept(self, states: frozenset[int]) -> int:
        if states not in self._sets:
            self._sets[states] = len(self._members)
            self._members.append(states)
        return self._sets[states]

    def _fit(self, single: int, character: str) -> bool:
        key = (single, character)
        if key not in self._fits:
            self._fits[key] = self._patterns[single].fullmatch(character) is not None
        return self._fits[key]

    def _state(self, state: _State) -> int:
        if len(self._states) >= MAX_STATES:
            raise Refused("is too large, or all of them together are")
        self._states.append(state)
        return len(self._states) - 1

    def _emit(self, node: PatternNode, then: int) -> int:
        """States for `node` that lead on to `then`; gives the first."""
        match node:
            case Single(source):
                return self._state(_State(single=self._single(source), then=then))
            case Start():
                return self._state(_State(free=[("^", then)]))
            case End():
                return self._state(_State(free=[("$", then)]))
            case Concatenation(parts):
                for part in reversed(parts):
                    then = self._emit(part, then)
                return then
            case Choice(options):
                begins = [("", self._emit(option, then)) for option in options]
                return self._state(_State(free=begins))
            case Repeat(part, least, most):
                return self._emit_repeat(part, least, most, then)

    def _emit_repeat(self, part: PatternNode, least: int, most: int | None, then: int) -> int:
        if most is None:
            loop = self._state(_State(free=[("", then)]))
            self._states[loop].free.append(("", self._emit(part, loop)))
            then = loop
        else:
            done = then
            for _ in range(most - least):
                then = self._state(_State(free=[("", done), ("", self._emit(part, then))]))
        for _ in range(least):
            then = self._emit(part, then)
        return then

    def _single(self, source: str) -> int:
        if source not in self._singles:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._patterns.append(re.compile(source))
            self._singles[source] = len(self._patterns) - 1
        return self._singles[source]
