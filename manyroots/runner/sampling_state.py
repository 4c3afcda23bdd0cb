"""Sampling parameters by row, kept as arrays so that a step only selects from them."""

from __future__ import annotations

import logging

import numpy as np

from manyroots.sampling import SamplingParams
from manyroots.step import Arrival, Bools, Int32s

logger = logging.getLogger(__name__)

_GREEDY = SamplingParams(temperature=0.0)


class SamplingState:
    """What each row's sequence asked of the sampler."""

    def __init__(self, max_num_seqs: int) -> None:
        self.params: list[SamplingParams] = [_GREEDY] * max_num_seqs
        self.stop_ids: list[tuple[int, ...]] = [()] * max_num_seqs
        self.seed = np.zeros(max_num_seqs, np.uint64)
        self.temperature = np.zeros(max_num_seqs, np.float32)
        """0 for greedy rows."""
        self.top_p = np.ones(max_num_seqs, np.float64)
        self.top_k = np.zeros(max_num_seqs, np.int64)
        self.min_p = np.zeros(max_num_seqs, np.float64)
        self.edits_logits = np.zeros(max_num_seqs, np.bool_)
        """Rows with penalties, biases or a minimum length: their logits are changed one by one."""
        self.wants_logprobs = np.zeros(max_num_seqs, np.bool_)
        self.wants_prompt_logprobs = np.zeros(max_num_seqs, np.bool_)
        self.failures: dict[int, str] = {}
        """Rows whose parameters could not be taken in, and why: nothing is chosen for them."""

    def arrive(self, arrival: Arrival) -> None:
        """Take in what a row's new sequence asks for. Never fails a step: the door has checked
        everything, and what it missed is one request's failure."""
        self.failures.pop(arrival.row, None)
        try:
            self._take(arrival)
        except Exception as error:
            logger.exception("the sampling parameters of a request could not be taken in")
            self.failures[arrival.row] = (
                f"its sampling parameters can't be used ({type(error).__name__}: {error})"
            )

    def is_cut(self, rows: Int32s) -> Bools:
        """Rows that draw from a part of the vocabulary."""
        cut: Bools = (self.top_k[rows] > 0) | (self.top_p[rows] < 1.0) | (self.min_p[rows] > 0.0)
        return cut & (self.temperature[rows] > 0.0)

    def _take(self, arrival: Arrival) -> None:
        row, params = arrival.row, arrival.sampling
        self.params[row] = params
        self.stop_ids[row] = arrival.stop_ids
        self.seed[row] = np.uint64(arrival.seed)
        self.temperature[row] = 0.0 if params.is_greedy else params.temperature
        self.top_p[row] = params.top_p
        self.top_k[row] = max(params.top_k, 0)
        self.min_p[row] = params.min_p
        self.edits_logits[row] = bool(
            params.has_penalties or params.logit_bias or (params.min_tokens and arrival.stop_ids)
        )
        self.wants_logprobs[row] = params.logprobs is not None
        self.wants_prompt_logprobs[row] = params.prompt_logprobs is not None
