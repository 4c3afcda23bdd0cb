"""Guesses of a simulated engine: the trace's own tokens, each right with a given probability.

Takes what each sequence will say; implements `DraftSource`. Which guesses are wrong depends on the
seed, the request and the position alone, so that a run can be replayed.
"""

from __future__ import annotations

import numpy as np

from manyroots.scheduler.request import Request
from manyroots.scheduler.suffixes import NO_TOKENS
from manyroots.simulate.executors import Replies
from manyroots.simulate.segments import VOCAB_SIZE
from manyroots.step import Int32s


class TraceDrafts:
    """Guesses what the trace says next."""

    is_runner = False

    def __init__(self, replies: Replies, acceptance: float, seed: int) -> None:
        """`acceptance`: the probability that a guess is right if all before it are."""
        self._replies = replies
        self._acceptance = acceptance
        self._seed = seed

    def guess(self, request: Request, most: int) -> Int32s:
        request_id = request.submit.request_id
        said = request.num_tokens - request.num_prompt_tokens
        draft = np.array(self._replies[request_id][said : said + most], np.int32)
        if not len(draft):
            return NO_TOKENS
        rng = np.random.default_rng((self._seed, int(request_id), said))
        is_wrong = rng.random(len(draft)) >= self._acceptance
        return np.where(is_wrong, (draft + 1) % VOCAB_SIZE, draft).astype(np.int32)

    def ended(self, request: Request) -> None:
        """Nothing is learned of what a request said."""

    def forget(self) -> None:
        """Nothing is kept of earlier output."""
