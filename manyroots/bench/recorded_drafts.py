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
from manyroots.step import Floats, Int32s


class RecordedDrafts:
    """Guesses what was said the last time."""

    is_runner = False

    def __init__(self, acceptance: float, *, vocab_size: int, seed: int = 0) -> None:
        self._acceptance = acceptance
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(seed)
        self._answers: dict[bytes, tuple[Int32s, Floats]] = {}
        """By prompt: its answer, and for each position the random numbers of a draft from there
        on. They are drawn here, since drafts are made between two steps that are timed."""

    def record(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        said = np.asarray(answer, np.int32)
        drawn = self._rng.random((len(said), MAX_DRAFT_TOKENS), np.float32)
        self._answers[np.asarray(prompt, np.int32).tobytes()] = (said, drawn)

    def guess(self, request: Request, most: int) -> Int32s:
        prompt = request.tokens[: request.num_prompt_tokens].tobytes()
        if prompt not in self._answers:
            return NO_TOKENS
        answer, drawn = self._answers[prompt]
        said = request.num_tokens - request.num_prompt_tokens
        draft = answer[said : said + most]
        if not len(draft):
            return NO_TOKENS
        is_wrong = drawn[said, : len(draft)] >= self._acceptance
        return np.where(is_wrong, (draft + 1) % self._vocab_size, draft).astype(np.int32)

    def ended(self, request: Request) -> None:
        """What a request says beside its recording is not learned."""

    def forget(self) -> None:
        self._answers.clear()
