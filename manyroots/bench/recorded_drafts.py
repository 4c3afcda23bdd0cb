"""Drafts from a recorded run, each token right with a given probability: to measure and to test.

Takes what each prompt was answered with; implements `DraftSource`. Which guesses are wrong depends
on the seed, the order of the recordings and the position alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from manyroots.scheduler.request import Request
from manyroots.scheduler.suffixes import NO_TOKENS
from manyroots.speculative_config import MAX_DRAFT_TOKENS
from manyroots.step import Int32s

Drafts = np.ndarray[tuple[int, int], np.dtype[np.int32]]
"""For each position of an answer, the guesses of the tokens from there on."""
_NONE: Drafts = np.empty((0, MAX_DRAFT_TOKENS), np.int32)


class RecordedDrafts:
    """Guesses what was said the last time."""

    is_runner = False

    def __init__(self, acceptance: float, *, vocab_size: int, seed: int = 0) -> None:
        self._acceptance = acceptance
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(seed)
        self._drafts: dict[bytes, Drafts] = {}
        """By prompt. They are made when it is recorded: a guess is asked for between two steps
        that are timed."""
        self._of_requests: dict[int, Drafts] = {}
        """By the order of arrival."""

    def record(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        said = np.asarray(answer, np.int32)
        ahead = np.concatenate((said, np.zeros(MAX_DRAFT_TOKENS, np.int32)))
        drafts = np.lib.stride_tricks.sliding_window_view(ahead, MAX_DRAFT_TOKENS)[: len(said)]
        is_wrong = self._rng.random(drafts.shape, np.float32) >= self._acceptance
        drafts = np.where(is_wrong, (drafts + 1) % self._vocab_size, drafts).astype(np.int32)
        self._drafts[np.asarray(prompt, np.int32).tobytes()] = drafts

    def guess(self, request: Request, most: int) -> Int32s:
        drafts = self._of_requests.get(request.serial)
        if drafts is None:
            prompt = request.tokens[: request.num_prompt_tokens].tobytes()
            drafts = self._of_requests[request.serial] = self._drafts.get(prompt, _NONE)
        said = request.num_tokens - request.num_prompt_tokens
        if said >= len(drafts):
            return NO_TOKENS
        return drafts[said, : min(most, len(drafts) - said)]

    def ended(self, request: Request) -> None:
        """What a request says beside its recording is not learned."""
        self._of_requests.pop(request.serial, None)

    def forget(self) -> None:
        self._drafts.clear()
        self._of_requests.clear()
