"""Decides whether drafts pay: the gain of guesses, by namespace, and the cost of steps with them.

Takes the number of right guesses and the duration of steps; decides when to draft and how many
tokens. While nothing is drafted, it sometimes makes guesses and compares them with later output. A
server thus learns at no cost that drafts would pay again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from manyroots.scheduler.suffixes import MAX_NAMESPACES, NO_TOKENS, AdapterAndSalt
from manyroots.step import Int32s

FIRST_GAIN = 0.5
"""Assumed gain of an unknown namespace: enough to try."""
NEWEST, NAMESPACE_NEWEST = 0.2, 0.1
"""Weight of the newest of many measurements: for a request, and for its namespace."""
MOST_RISE = 2.0
"""Limit of one measurement, relative to the previously measured cost."""
FORGOTTEN = 0.005
"""Share of the cost above FIRST_COST that is forgotten with each step without drafts."""
FIRST_COST = 1.2
"""Assumed cost of a step with drafts, relative to one without, before both were measured."""
MARGIN = 0.03
"""Drafts start if they gain this much more than they cost."""
LEAST_ROW_GAIN = 0.1
"""A row with less gain gets no draft in a step that drafts for others."""
LOOKED_FIRST, LOOKED_AGAIN = 16, 256
"""After this many steps with drafts, some steps without are measured: the first time, and again."""
NUM_MEASURED = 4


@dataclass(slots=True)
class DraftProgress:
    """The gain of one request's guesses: tokens of a step beyond its first."""

    gain: float
    guessed: Int32s = field(default_factory=lambda: NO_TOKENS)
    """Guesses made while nothing is drafted, to compare with later output."""
    guessed_at: int = -1
    """The number of tokens before them; -1 if there are none."""


class StepCosts:
    """Seconds of steps in which all rows decode, by the number of rows."""

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}
        self._drafting: dict[int, float] = {}
        self._num_since = 0
        """Steps with drafts since steps without were measured."""
        self._num_wanted = 0
        """Steps without drafts that should be measured now."""

    def measured(self, num_rows: int, seconds: float, *, drafts: bool) -> None:
        """A step of this many rows took this long; `drafts`: planned when all tokens were known."""
        costs = self._drafting if drafts else self._plain
        known = costs.get(num_rows) or self._plain.get(num_rows, seconds)
        # A step may take far longer for other reasons, such as a graph capture or a prompt.
        costs[num_rows] = known + NEWEST * (min(seconds, MOST_RISE * known) - known)
        if not drafts:
            self._num_wanted = max(0, self._num_wanted - 1)
            self._relax(num_rows)
            return
        self._num_since += 1
        if self._num_since > (LOOKED_AGAIN if num_rows in self._plain else LOOKED_FIRST):
            self._num_since, self._num_wanted = 0, NUM_MEASURED

    def _relax(self, num_rows: int) -> None:
        """While nothing is drafted, the measured cost becomes outdated: a high cost may have
        passed, and is tried again if guesses are right."""
        plain, drafting = self._plain[num_rows], self._drafting.get(num_rows)
        if drafting is not None and drafting > FIRST_COST * plain:
            self._drafting[num_rows] = drafting + FORGOTTEN * (FIRST_COST * plain - drafting)

    def ratio(self, num_rows: int) -> float:
        """The cost of a step with drafts, relative to one without."""
        plain, drafting = self._plain.get(num_rows), self._drafting.get(num_rows)
        return FIRST_COST if plain is None or drafting is None else drafting / plain

    @property
    def wants_plain(self) -> bool:
        """Whether a step without drafts should be measured."""
        return self._num_wanted > 0


class DraftGains:
    """The gain of guesses, by request and by namespace."""

    def __init__(self) -> None:
        self._namespaces: OrderedDict[AdapterAndSalt, float] = OrderedDict()

    def start(self, group: AdapterAndSalt) -> DraftProgress:
        """A starting request is assumed as good as its namespace."""
        return DraftProgress(self._namespaces.get(group, FIRST_GAIN))

    def checked(self, group: AdapterAndSalt, progress: DraftProgress, num_right: int) -> None:
        """This many guesses in a row were right."""
        progress.gain += NEWEST * (num_right - progress.gain)
        known = self._namespaces.pop(group, FIRST_GAIN)
        self._namespaces[group] = known + NAMESPACE_NEWEST * (num_right - known)
        if len(self._namespaces) > MAX_NAMESPACES:
            self._namespaces.popitem(last=False)

    def compare(self, group: AdapterAndSalt, progress: DraftProgress, tokens: Int32s) -> bool:
        """Compare an unchecked guess with the output; returns whether another one may be made."""
        at, guessed = progress.guessed_at, progress.guessed
        if at >= 0:
            if len(tokens) < at + len(guessed):
                return False
            wrong = np.flatnonzero(tokens[at : at + len(guessed)] != guessed)
            self.checked(group, progress, int(wrong[0]) if len(wrong) else len(guessed))
            progress.guessed_at = -1
        return True


def draft_length(gain: float, most: int) -> int:
    """How many tokens to guess if this many of a draft are right on average. Above the average: one
    more guess costs a step little, and a gain that is measured by chance too low would cut drafts
    that are right."""
    return min(most, 1 + int(3 * gain + 0.5))
