"""A short step with every token as a row of its own, so that a decode step's graph computes it.

Keys and values of all rows are written before any row attends, layer by layer, so tokens of one
sequence may be rows side by side: each sees those before it. What a graph saves is the host's time
to launch some 350 kernels one by one, which is most of the time of a short prompt, and of what is
left of a long one whose beginning is in the cache.
"""

from __future__ import annotations

import numpy as np

from manyroots.runner.batch import StepInputs

MAX_TOKENS = 64
"""More would no longer be bound by reading the weights, as a decode step is."""
MAX_SEEN_TOKENS = 1 << 17
"""Summed over the tokens of prompts: each reads by itself what it sees."""


def is_short(inputs: StepInputs) -> bool:
    of_prompts = inputs.positions[inputs.query_starts[inputs.num_decodes] :]
    return len(inputs.tokens) <= MAX_TOKENS and of_prompts.sum() <= MAX_SEEN_TOKENS


def as_single_tokens(inputs: StepInputs) -> StepInputs:
    """The same step; rows of one adapter lie together here, too."""
    num_tokens = len(inputs.tokens)
    order = np.arange(num_tokens)
    if inputs.token_slots is not None:
        order = np.argsort(inputs.token_slots, kind="stable")
    place = np.empty(num_tokens, np.int64)
    place[order] = np.arange(num_tokens)
    seqs = np.repeat(np.arange(len(inputs.rows)), np.diff(inputs.query_starts))[order]
    sampling = place[inputs.query_starts[inputs.sampling + 1] - 1]
    in_order = np.argsort(sampling)
    rank = np.empty_like(in_order)
    rank[in_order] = np.arange(len(in_order))
    return StepInputs(
        rows=inputs.rows[seqs],
        tokens=inputs.tokens[order],
        positions=inputs.positions[order],
        query_starts=np.arange(num_tokens + 1),
        context_lens=inputs.positions[order] + 1,
        num_decodes=num_tokens,
        page_table=inputs.page_table[seqs],
        slot_pages=inputs.slot_pages[order],
        slot_offsets=inputs.slot_offsets[order],
        token_slots=None if inputs.token_slots is None else inputs.token_slots[order],
        sampling=sampling[in_order],
        sampling_order=rank[inputs.sampling_order],
    )
