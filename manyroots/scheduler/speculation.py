"""Which rows get drafts in a step, and how long these are.

Takes running requests whose tokens are all known; gives guesses of a source, and learns from
results how often they were right. A wrong guess costs time and changes no token.
"""

from __future__ import annotations

from typing import Protocol

from manyroots.messages import SpeculationStats
from manyroots.scheduler.request import Request
from manyroots.scheduler.suffixes import NO_TOKENS, RecentOutputs, guess
from manyroots.speculative_config import SpeculationChoice
from manyroots.step import MAX_STEP_DRAFT_TOKENS, Int32s

MAX_ROWS = 32
"""With more rows a step computes enough without drafts, and guessing would delay its plan."""


class DraftSource(Protocol):
    """Where guesses come from."""

    def guess(self, request: Request, most: int) -> Int32s:
        """At most so many tokens that may follow a request's known ones."""
        ...

    def ended(self, request: Request) -> None:
        """A request is over."""
        ...

    def forget(self) -> None:
        """Nothing that was said before may be used any more."""
        ...


class SuffixDrafts:
    """Guesses from a request's own text and from the recent output of its namespace."""

    def __init__(self, choice: SpeculationChoice) -> None:
        self._choice = choice
        self._recent = RecentOutputs()

    def guess(self, request: Request, most: int) -> Int32s:
        recent = self._recent.of(request.group) if self._choice.uses_namespace else NO_TOKENS
        return guess(request.tokens, recent, self._choice, most)

    def ended(self, request: Request) -> None:
        if self._choice.uses_namespace and request.num_tokens > request.num_prompt_tokens:
            self._recent.add(request.group, request.tokens[request.num_prompt_tokens :])

    def forget(self) -> None:
        self._recent.clear()


class Speculation:
    """Makes drafts and counts what became of them."""

    def __init__(self, choice: SpeculationChoice, source: DraftSource | None = None) -> None:
        """`source`: None for earlier text."""
        self._choice = choice
        self.source = source or SuffixDrafts(choice)
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._num_accepted_tokens = 0
        self._accepted_by_place = [0] * choice.num_tokens

    def wants_results(self, num_running: int) -> bool:
        """Whether the next step should be planned only when all tokens are known."""
        return 0 < num_running <= MAX_ROWS

    def most_tokens(self, num_tokens_left: int, num_running: int) -> int:
        """How many guesses a step may check, whose budget is so large: a row's own token comes
        first."""
        return min(MAX_STEP_DRAFT_TOKENS, num_tokens_left - num_running)

    def draft(self, request: Request, most: int) -> Int32s:
        """Guesses of what follows a request's known tokens, at most so many."""
        most = min(most, self._choice.num_tokens, request.max_num_tokens - request.num_tokens - 1)
        if most < 1:
            return NO_TOKENS
        guessed = self.source.guess(request, most)
        if request.stop_ids:
            # What ends the sequence is never a guess: the sampler says it, and nothing follows.
            for place, token in enumerate(guessed.tolist()):
                if token in request.stop_ids:
                    return guessed[:place]
        return guessed

    def checked(self, request: Request, num_draft_tokens: int, num_accepted: int) -> None:
        """A step has checked a draft."""
        self._num_drafts += 1
        self._num_draft_tokens += num_draft_tokens
        self._num_accepted_tokens += num_accepted
        for place in range(num_accepted):
            self._accepted_by_place[place] += 1
        request.num_draft_tokens += num_draft_tokens
        request.num_accepted_tokens += num_accepted

    def stats(self) -> SpeculationStats:
        return SpeculationStats(
            self._num_drafts,
            self._num_draft_tokens,
            self._num_accepted_tokens,
            tuple(self._accepted_by_place),
        )
