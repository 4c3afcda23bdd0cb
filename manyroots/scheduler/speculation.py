"""Chooses which rows get drafts in a step, and how long the drafts are.

Takes running requests whose tokens are all known; gives a source's guesses, and learns from results
how often they were right. A wrong guess costs time and changes no token.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from manyroots.ids import StepId
from manyroots.messages import SpeculationStats
from manyroots.scheduler.draft_gain import (
    LEAST_ROW_GAIN,
    MARGIN,
    DraftGains,
    DraftProgress,
    StepCosts,
    draft_length,
)
from manyroots.scheduler.request import Request
from manyroots.scheduler.suffixes import NO_TOKENS, RecentOutputs, guess
from manyroots.speculative_config import SpeculationChoice
from manyroots.step import MAX_STEP_DRAFT_TOKENS, Int32s

MAX_ROWS = 32
"""With more rows a step computes enough without drafts, and guessing would delay its plan."""
LOOKED_EVERY = 4
"""Steps between guesses that no step checks."""


class DraftSource(Protocol):
    """A source of guesses."""

    @property
    def is_runner(self) -> bool:
        """Whether the runner makes guesses, in steps whose plans ask for them."""
        ...

    def guess(self, request: Request, most: int) -> Int32s:
        """At most this many tokens that may follow a request's known ones."""
        ...

    def ended(self, request: Request) -> None:
        """A request is finished."""
        ...

    def forget(self) -> None:
        """Earlier output may no longer be used."""
        ...


class SuffixDrafts:
    """Guesses from a request's own text and from the recent output of its namespace."""

    is_runner = False

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


class PredictedDrafts:
    """Guesses of the model's prediction layer, which came with the newest result."""

    is_runner = True

    def guess(self, request: Request, most: int) -> Int32s:
        if request.predicted is None:
            return NO_TOKENS
        num_tokens, guessed = request.predicted
        return guessed[:most] if num_tokens == request.num_tokens else NO_TOKENS

    def ended(self, request: Request) -> None:
        """Nothing is kept of it."""

    def forget(self) -> None:
        """Nothing is kept of earlier output."""


class Speculation:
    """Makes drafts and counts the results."""

    def __init__(self, choice: SpeculationChoice, source: DraftSource | None = None) -> None:
        """`source`: None for the one that the choice names."""
        self._choice = choice
        own = PredictedDrafts() if choice.is_predicted else SuffixDrafts(choice)
        self.source: DraftSource | None = source or own
        """None drafts nothing."""
        self._gains = DraftGains()
        self._costs = StepCosts()
        self._is_on = True
        self._may_guess = True
        """Whether few enough rows run."""
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._num_accepted_tokens = 0
        self._accepted_by_place = [0] * choice.num_tokens

    @property
    def is_on(self) -> bool:
        """Whether the next step should be planned only when all tokens are known, since it may have
        drafts."""
        return self._is_on and self.source is not None

    def num_guesses(self, step_id: StepId) -> int:
        """How many tokens the runner should guess in the step being planned."""
        if self.source is None or not self.source.is_runner or not self._may_guess:
            return 0
        # While nothing is drafted, some steps guess to learn whether drafts would pay.
        return self._choice.num_tokens if self._is_on or step_id % LOOKED_EVERY == 0 else 0

    def choose(self, running: Collection[Request], step_id: StepId) -> None:
        """Decide whether the step being planned, and the one after it, may have drafts."""
        num_rows = len(running)
        self._may_guess = num_rows <= MAX_ROWS
        if num_rows == 0:
            return
        if num_rows > MAX_ROWS or self.source is None:
            self._is_on = False
            return
        if not self._choice.is_adaptive:
            self._is_on = True
            return
        if not self._is_on and (self.source.is_runner or step_id % LOOKED_EVERY == 0):
            for request in running:
                self._look(request, self.source)
        gain = sum(self._progress(request).gain for request in running) / num_rows
        needed = self._costs.ratio(num_rows) - 1.0 + (0.0 if self._is_on else MARGIN)
        self._is_on = gain > needed and not self._costs.wants_plain

    def _progress(self, request: Request) -> DraftProgress:
        if request.draft_progress is None:
            request.draft_progress = self._gains.start(request.group)
        return request.draft_progress

    def _look(self, request: Request, source: DraftSource) -> None:
        """Guess without a draft, to compare later."""
        progress, tokens = self._progress(request), request.tokens
        if len(tokens) <= request.num_prompt_tokens:
            return
        if self._gains.compare(request.group, progress, tokens):
            guessed = source.guess(request, self._choice.num_tokens)
            if len(guessed) or not source.is_runner:
                progress.guessed, progress.guessed_at = guessed, len(tokens)

    def most_tokens(self, num_tokens_left: int, num_running: int) -> int:
        """How many guesses a step with this budget may check: a row's own token comes first."""
        return min(MAX_STEP_DRAFT_TOKENS, num_tokens_left - num_running)

    def draft(self, request: Request, most: int) -> Int32s:
        """Guesses of the tokens after a request's known ones, at most this many."""
        source, longest = self.source, self._choice.num_tokens
        assert source is not None
        if self._choice.is_adaptive:
            progress = self._progress(request)
            if progress.gain < LEAST_ROW_GAIN:
                self._look(request, source)
                return NO_TOKENS
            progress.guessed_at = -1
            longest = draft_length(progress.gain, longest)
        most = min(most, longest, request.max_num_tokens - request.num_tokens - 1)
        if most < 1:
            return NO_TOKENS
        guessed = source.guess(request, most)
        if not len(guessed) and self._choice.is_adaptive and not source.is_runner:
            self._gains.checked(request.group, self._progress(request), 0)
        if request.stop_ids:
            # A token that ends the sequence is never guessed: the sampler chooses it, and nothing
            # follows.
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
        self._gains.checked(request.group, self._progress(request), num_accepted)

    def measured(self, num_rows: int, seconds: float, *, drafts: bool) -> None:
        """A step in which all rows decoded took this long; `drafts`: it may have had guesses."""
        if seconds > 0.0 and 0 < num_rows <= MAX_ROWS:
            self._costs.measured(num_rows, seconds, drafts=drafts)

    def ended(self, request: Request) -> None:
        """A request is finished."""
        if self.source is not None:
            self.source.ended(request)

    def forget(self) -> None:
        """Earlier output may no longer be used."""
        if self.source is not None:
            self.source.forget()

    def stats(self) -> SpeculationStats:
        return SpeculationStats(
            self._num_drafts,
            self._num_draft_tokens,
            self._num_accepted_tokens,
            tuple(self._accepted_by_place),
        )
