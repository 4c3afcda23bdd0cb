"""Drafts from a recorded run, each token right with a given probability: to measure and to test.

Takes what each prompt was answered with; implements `DraftSource`. Which guesses are wrong depends
on the seed, the request and the position alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from manyroots.scheduler.request import Request
from manyroots.scheduler.suffixes import NO_TOKENS
from manyroots.step import Int32s


class RecordedDrafts:
    """Guesses what was said the last time."""

    is_runner = False

    def __init__(self, acceptance: float, *, vocab_size: int, seed: int = 0) -> None:
        self._acceptance = acceptance
        self._vocab_size = vocab_size
        self._seed = seed
        self._answers: dict[bytes, Int32s] = {}

    def record(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        self._answers[np.asarray(prompt, np.int32).tobytes()] = np.asarray(answer, np.int32)

    def guess(self, request: Request, most: int) -> Int32s:
        prompt = request.tokens[: request.num_prompt_tokens].tobytes()
        answer = self._answers.get(prompt)
        if answer is None:
            return NO_TOKENS
        said = request.num_tokens - request.num_prompt_tokens
        draft = answer[said : said + most].copy()
        rng = np.random.default_rng((self._seed, int(request.submit.request_id), said))
        wrong = np.flatnonzero(rng.random(len(draft)) >= self._acceptance)
        draft[wrong] = (draft[wrong] + 1) % self._vocab_size
        return draft

    def ended(self, request: Request) -> None:
        """What a request says beside its recording is not learned."""

    def forget(self) -> None:
        self._answers.clear()
