"""Whether drafts pay: what guesses gain, by namespace, and what steps with them cost.

Takes how many guesses were right and how long steps took; says when to draft and how many tokens.
While nothing is drafted, guesses are made now and then and compared with what is said later, so
that a server finds out for nothing that drafts would pay again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from manyroots.scheduler.suffixes import MAX_NAMESPACES, NO_TOKENS, AdapterAndSalt
from manyroots.step import Int32s

FIRST_GAIN = 0.5
"""What a namespace of which nothing is known is taken to gain: enough to try."""
NEWEST, NAMESPACE_NEWEST = 0.2, 0.1
"""What the newest of many measurements counts: of a request, and of its namespace."""
MOST_RISE = 2.0
"""Of a cost that was measured before, what one measurement counts at most."""
FORGOTTEN = 0.005
"""Of what drafts cost more than FIRST_COST, with each step without them."""
FIRST_COST = 1.2
"""What a step with drafts is taken to cost, of one without, before both were measured."""
MARGIN = 0.03
"""Drafts begin where they gain so much more than they cost."""
LEAST_ROW_GAIN = 0.1
"""Of a row; with less it gets no draft in a step that drafts for others."""
LOOKED_FIRST, LOOKED_AGAIN = 16, 256
"""After so many steps with drafts, some steps without are measured: the first time, and again."""
NUM_MEASURED = 4


@dataclass(slots=True)
class DraftProgress:
    """What one request's guesses gain: tokens of a step beyond its first."""

    gain: float
    guessed: Int32s = field(default_factory=lambda: NO_TOKENS)
    """Made while nothing is drafted, to be compared with what comes."""
    guessed_at: int = -1
    """After how many tokens; -1 if there is none."""


class StepCosts:
    """Seconds of steps in which all rows decode, by the number of rows."""

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}
        self._drafting: dict[int, float] = {}
        self._num_since = 0
        """Steps with drafts since steps without were measured."""
        self._num_wanted = 0
        """Steps without that are to be measured now."""

    def measured(self, num_rows: int, seconds: float, *, drafts: bool) -> None:
        """A step of so many rows took so long; `drafts`: planned when all tokens were known."""
        costs = self._drafting if drafts else self._plain
        known = costs.get(num_rows) or self._plain.get(num_rows, seconds)
        # A step may take far longer for reasons of its own: a graph that is captured, a prompt.
        costs[num_rows] = known + NEWEST * (min(seconds, MOST_RISE * known) - known)
        if not drafts:
            self._num_wanted = max(0, self._num_wanted - 1)
            self._relax(num_rows)
            return
        self._num_since += 1
        if self._num_since > (LOOKED_AGAIN if num_rows in self._plain else LOOKED_FIRST):
            self._num_since, self._num_wanted = 0, NUM_MEASURED

    def _relax(self, num_rows: int) -> None:
        """While nothing is drafted, what it would cost is known less and less: a high cost may have
        passed, and is tried again where guesses are right."""
        plain, drafting = self._plain[num_rows], self._drafting.get(num_rows)
        if drafting is not None and drafting > FIRST_COST * plain:
            self._drafting[num_rows] = drafting + FORGOTTEN * (FIRST_COST * plain - drafting)

    def ratio(self, num_rows: int) -> float:
        """What a step with drafts costs of one without."""
        plain, drafting = self._plain.get(num_rows), self._drafting.get(num_rows)
        return FIRST_COST if plain is None or drafting is None else drafting / plain

    @property
    def wants_plain(self) -> bool:
        """Whether a step without drafts should be measured."""
        return self._num_wanted > 0


class DraftGains:
    """What guesses gain, by request and by namespace."""

    def __init__(self) -> None:
        self._namespaces: OrderedDict[AdapterAndSalt, float] = OrderedDict()

    def start(self, group: AdapterAndSalt) -> DraftProgress:
        """Of a request that begins: as good as its namespace's."""
        return DraftProgress(self._namespaces.get(group, FIRST_GAIN))

    def checked(self, group: AdapterAndSalt, progress: DraftProgress, num_right: int) -> None:
        """So many guesses in a row were right."""
        progress.gain += NEWEST * (num_right - progress.gain)
        known = self._namespaces.pop(group, FIRST_GAIN)
        self._namespaces[group] = known + NAMESPACE_NEWEST * (num_right - known)
        if len(self._namespaces) > MAX_NAMESPACES:
            self._namespaces.popitem(last=False)

    def compare(self, group: AdapterAndSalt, progress: DraftProgress, tokens: Int32s) -> bool:
        """Compare a guess that no step checked with what was said; gives whether another one may
        be made."""
        at, guessed = progress.guessed_at, progress.guessed
        if at >= 0:
            if len(tokens) < at + len(guessed):
                return False
            wrong = np.flatnonzero(tokens[at : at + len(guessed)] != guessed)
            self.checked(group, progress, int(wrong[0]) if len(wrong) else len(guessed))
            progress.guessed_at = -1
        return True


def draft_length(gain: float, most: int) -> int:
    """How many tokens to guess where so many are right of a draft, on average."""
    return min(most, 1 + int(2 * gain + 0.5))
