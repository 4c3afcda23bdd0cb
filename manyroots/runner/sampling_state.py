"""Sampling parameters by row, kept as arrays so that a step only selects from them."""

from __future__ import annotations

import numpy as np

from manyroots.sampling import SamplingParams
from manyroots.step import Arrival

_GREEDY = SamplingParams(temperature=0.0)


class SamplingState:
    """What each row's sequence asked of the sampler."""

    def __init__(self, max_num_seqs: int) -> None:
        self.params: list[SamplingParams] = [_GREEDY] * max_num_seqs
        self.stop_ids: list[tuple[int, ...]] = [()] * max_num_seqs
        self.seed = np.zeros(max_num_seqs, np.uint64)
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.top_p = np.ones(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int64)
        self.min_p = np.zeros(max_num_seqs, np.float32)
        self.edits_logits = np.zeros(max_num_seqs, np.bool_)
        """Rows with penalties, biases or a minimum length: their logits are changed one by one."""
        self.wants_logprobs = np.zeros(max_num_seqs, np.bool_)
        self.wants_prompt_logprobs = np.zeros(max_num_seqs, np.bool_)

    def arrive(self, arrival: Arrival) -> None:
        row, params = arrival.row, arrival.sampling
        self.params[row] = params
        self.stop_ids[row] = arrival.stop_ids
        self.seed[row] = np.uint64(arrival.seed)
        self.temperature[row] = params.temperature
        self.top_p[row] = params.top_p
        self.top_k[row] = max(params.top_k, 0)
        self.min_p[row] = params.min_p
        self.edits_logits[row] = bool(
            params.has_penalties or params.logit_bias or (params.min_tokens and arrival.stop_ids)
        )
        self.wants_logprobs[row] = params.logprobs is not None
        self.wants_prompt_logprobs[row] = params.prompt_logprobs is not None
